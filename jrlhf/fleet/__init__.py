"""Asynchronous rollouts: which weights draw which tokens, and when the trainer learns from them."""
