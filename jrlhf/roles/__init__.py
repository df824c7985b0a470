"""Roles: the objects whose methods an algorithm calls, their placement, and their compiled functions."""
