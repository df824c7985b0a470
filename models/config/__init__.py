"""The sizes and switches that define a decoder (`decoder.py`), and their checks."""
