"""Token log-probabilities and entropies from hidden states, without ever holding `[tokens, vocabulary]` logits."""

from jrlhf.kernels.logprob.api import IMPLEMENTATIONS, token_logprobs, token_sums
from jrlhf.kernels.logprob.common import Terms

__all__ = ["IMPLEMENTATIONS", "Terms", "token_logprobs", "token_sums"]
