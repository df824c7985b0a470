"""Planning before a run: predicts memory and time of calls, and searches for the fastest plan that fits."""
