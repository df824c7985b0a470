"""Fused operations, one folder per operation: `reference` is the specification, `api` chooses an implementation."""

from jrlhf.kernels.logprob import token_logprobs, token_sums

__all__ = ["token_logprobs", "token_sums"]
