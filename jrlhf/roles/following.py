"""Prompts that follow a rollout: its rows by their ids, and then a text."""

import zlib
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrlhf.data.batches import Batch, pad_rows, put_rows
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.meshes.transfers import to_host
from jrlhf.roles.placement import ready


def follow(tokenizer: Tokenizer, mesh: Mesh, batch: Batch, rollout: Any, text: str) -> Batch:
    """See `Batch.after`. mesh: of the prompts."""
    drawn, added = to_host(ready(rollout)), tokenizer.encode(text)
    width = drawn.tokens.shape[1] + len(added)
    lengths = drawn.prompt_lengths + drawn.response_lengths
    rows = [[*row[:length], *added] for row, length in zip(drawn.tokens, lengths, strict=True)]
    spans = zip(drawn.tokens, drawn.prompt_lengths, lengths, strict=True)
    answers = [tokenizer.continuation(row[:start], row[start:end], special=True) for row, start, end in spans]
    texts = [f"{before}{answer}{text}" for before, answer in zip(batch.texts, answers, strict=True)]
    with jax.set_mesh(mesh):
        tokens, counts = put_rows(pad_rows(rows, width), mesh)
        return replace(batch, arrays=(tokens, counts, other_keys(batch.arrays[2], text)), texts=texts)


def other_keys(keys: jax.Array, name: str) -> jax.Array:
    """The keys of rows for draws of another name than those of `keys`."""
    return _folded(keys, np.uint32(zlib.crc32(name.encode())))


_folded = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(0, None)))
