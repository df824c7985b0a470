"""Which sizes of a mesh the sizes of a decoder allow."""

import math
from collections.abc import Iterator

from jrlhf.models.config.decoder import ModelConfig


def indivisible(model: ModelConfig, fsdp: int, tensor: int) -> Iterator[tuple[str, int, int, str, int]]:
    """Yields (key, value, divided size, mesh axis, size of the axis) for each size of a model that does not divide."""
    kv_heads = model.kv_heads if tensor % model.kv_heads else tensor  # fewer kv-heads than slices are repeated
    for key, written, size, axis, parts in (
        ("embed", model.embed, model.embed, "fsdp", fsdp),
        ("heads", model.heads, model.heads, "tensor", tensor),
        ("kv_heads", model.kv_heads, kv_heads, "tensor", tensor),
        ("mlp", model.mlp, model.mlp, "tensor", tensor),
        ("vocab_size", model.vocab_size, model.padded_vocab, "tensor", tensor),
    ):
        if size % parts:
            yield key, written, size, axis, parts


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
