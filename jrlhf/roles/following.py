"""Prompts that follow a rollout: its rows by their ids, and then a turn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.data.batches import Batch, other_keys, pad_rows, put_rows
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Message
from jrlhf.meshes.transfers import to_host
from jrlhf.roles.placement import ready


def follow(tokenizer: Tokenizer, mesh: Mesh, batch: Batch, rollout: Any, turn: str | Sequence[Message]) -> Batch:
    """See `Batch.after`. mesh: of the prompts."""
    drawn, added = to_host(ready(rollout)), _added(tokenizer, turn)
    ends = drawn.prompt_lengths + drawn.response_lengths
    rows, texts = list[list[int]](), list[str]()
    for text, row, start, end in zip(batch.texts, drawn.tokens, drawn.prompt_lengths, ends, strict=True):
        more = added(int(row[end - 1]))
        rows.append([*row[:end].tolist(), *more])
        texts.append(text + tokenizer.continuation(row[:start].tolist(), rows[-1][start:], special=True))
    width = drawn.tokens.shape[1] + max(map(len, map(added, (-1, *tokenizer.eos_ids))))
    with jax.set_mesh(mesh):
        tokens, counts = put_rows(pad_rows(rows, width), mesh)
        keys = other_keys(batch.arrays[2], turn if isinstance(turn, str) else json.dumps(turn))
        return replace(batch, arrays=(tokens, counts, keys), texts=texts)


def _added(tokenizer: Tokenizer, turn: str | Sequence[Message]) -> Callable[[int], list[int]]:
    """The last id of a row -> the ids that are added to it. A template's end of turn is added where it is missing."""
    if isinstance(turn, str):
        ids = tokenizer.encode(turn)
        return lambda _: ids
    from jrlhf.data.rendering import make_renderer

    bridge = make_renderer(tokenizer).bridge
    return cache(lambda last: bridge([last], turn))
