"""Token log-probabilities and entropies from hidden states, without ever holding `[tokens, vocabulary]` logits."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
