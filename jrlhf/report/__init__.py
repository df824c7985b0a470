"""The report of a run: one HTML file."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
