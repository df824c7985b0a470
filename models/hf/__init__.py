"""Reads and writes Hugging Face directories: config.json, safetensors, PEFT adapters. Does not need torch."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
