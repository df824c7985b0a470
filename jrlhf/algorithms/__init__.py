"""Algorithms: the dataflow of one iteration each."""
