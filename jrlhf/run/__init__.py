"""Services of a run: its directory and files, checkpoints, metrics, console, devices and processes."""
