"""Processes that draw rows for a run, on this machine or in a Ray cluster, each with its own devices."""
