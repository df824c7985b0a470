"""A run directory and what keeps a run alive: files, checkpoints, metrics, console, processes."""
