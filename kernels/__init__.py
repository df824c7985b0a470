"""Fused operations, one folder per operation: `reference` is the specification, `api` chooses an implementation."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
