"""The numbers and switches that define a decoder: `decoder.py`, and what they must satisfy."""
