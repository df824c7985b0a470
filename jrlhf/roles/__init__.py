"""Roles: what an algorithm calls, where they run, and their compiled functions."""
