"""The built-in task: a function's summary line from its signature, on the docstrings of the standard library."""
