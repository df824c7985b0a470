"""Asynchronous rollouts: workers draw groups of responses while the trainer updates the weights."""
