"""The settings of the algorithms: `policy.py` has those that all share, `algorithms.py` a class for each algorithm."""
