"""The configuration of a run: its classes, how it is loaded, and how it is checked as a whole."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
