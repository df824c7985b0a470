"""Token log-probabilities and entropies from hidden states, without ever holding `[tokens, vocabulary]` logits."""

from jrlhf.kernels.logprob.api import IMPLEMENTATIONS, token_logprobs

__all__ = ["IMPLEMENTATIONS", "token_logprobs"]
