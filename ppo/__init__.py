"""RL mathematics and jitted steps over functions and arrays, for any model that computes log-probs and values."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
