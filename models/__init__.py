"""The Flax decoder: its weights, its heads, generation, and Hugging Face export."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
