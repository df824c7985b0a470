"""The built-in task `arithmetic`: sums whose answers a function verifies."""
