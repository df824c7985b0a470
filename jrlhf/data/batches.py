"""Batches: the rows of a step, padded and put on the mesh. Their content depends on (seed, step) only."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Message, Response, Sequences
from jrlhf.meshes.layout import GENERATE, TRAIN
from jrlhf.meshes.transfers import to_devices


@dataclass(frozen=True)
class Batch:
    """The prompts of an iteration: U prompts with `samples` rows each, B = U * samples; a prompt's rows are neighbours.

    examples, texts: the examples and their rendered texts, one for each row.
    origins: number of each row's group, and of the logical worker that drew it, where they were drawn ahead.
    follow: (batch, rollout, turn) -> the batch that `after` returns; None: none follows it.
    """

    arrays: tuple[Array, Array, Array]  # on the mesh: tokens [U, P], lengths [U], row keys [B]
    examples: Sequence[Example]
    texts: Sequence[str]
    step: int
    origins: Sequence[tuple[int, int]] = ()
    follow: Callable[..., "Batch"] | None = None

    @property
    def samples(self) -> int:
        """The number of rows of each prompt."""
        return self.arrays[2].shape[0] // self.arrays[0].shape[0]

    def after(self, rollout: Any, turn: str | Sequence[Message]) -> "Batch":
        """Returns prompts that continue a rollout of these: each of its rows, by its ids, and then a turn.

        One response is drawn to each.

        turn: messages, which the chat template writes (`Renderer.bridge`); or a text as it is, in which the texts of
            special tokens become their ids.
        """
        assert self.follow is not None, "the batch of a dataflow"
        return self.follow(self, rollout, turn)


def whole_batches(count: int, batch: int) -> Iterator[tuple[Int[np.ndarray, "B"], int]]:
    """Yields each batch's rows, and how many of them count: the last batch is filled up with rows from the start."""
    for start in range(0, count, batch):
        yield np.arange(start, start + batch) % count, min(batch, count - start)


def program_width(longest: int, most: int, least: int = 32) -> int:
    """Returns the width of token arrays: a power of two, or `most`. Few widths mean that few programs compile."""
    return min(max(least, 1 << max(longest - 1, 0).bit_length()), most)


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Returns right-padded tokens and the rows' lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    if lengths.max(initial=0) > width:
        raise ValueError(f"a row of {lengths.max()} tokens does not fit into {width}")
    tokens = np.zeros((len(rows), width), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, lengths


def sft_rows(texts: Sequences, width: int) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Returns the tokens [B, T] of the texts, and the mask of the tokens to learn."""
    tokens, _ = pad_rows(texts.ids, width)
    learn, _ = pad_rows(texts.learn, width)
    return tokens, learn.astype(bool)


def distinct_first(rows: int, samples: int) -> Int[np.ndarray, "rows"]:
    """Returns the rows in an order in which the first response of every prompt comes before any second response."""
    return np.argsort(np.arange(rows) % samples, kind="stable")


def read_responses(tokenizer: Tokenizer, rollout, rows: slice | np.ndarray = slice(None)) -> list[Response]:
    """The responses of a rollout on the host, or only those of `rows`."""
    fields = rollout.tokens, rollout.prompt_lengths, rollout.response_lengths, rollout.finished
    own = zip(*(field[rows] for field in fields), strict=True)
    return [to_response(tokenizer, row[:start], row[start : start + length], done) for row, start, length, done in own]


def to_response(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], finished: bool) -> Response:
    """Returns the tokens that were drawn after a prompt as ids and text."""
    ids = tuple(map(int, tokens))
    marked = None if tokenizer.marks.isdisjoint(ids) else tokenizer.continuation(prompt, ids, special=True)
    response = Response(ids, tokenizer.continuation(prompt, ids), bool(finished), marked)
    if tokenizer.stop is None or not finished:
        return response
    from jrlhf.data.stops import without_stop

    return without_stop(tokenizer, prompt, response)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch between two calls: rows over every device."""
    return NamedSharding(mesh, P(TRAIN.batch))


def put_rows(tree, mesh: Mesh):
    """Returns device arrays of host arrays, with their rows over every device of the mesh."""
    return to_devices(tree, row_sharding(mesh))


def put_prompts(tree, mesh: Mesh, samples: int):
    """Puts prompts with `samples` responses each on the devices that generate the responses."""
    return put_rows(tree, mesh) if samples == 1 else to_devices(tree, NamedSharding(mesh, P(GENERATE.batch)))


def key_for(seed: int, purpose: str, step: int = 0) -> jax.Array:
    """The PRNG key of one purpose at one step. Random numbers on the host come from NumPy generators that are seeded
    with `seed` and the step or epoch, too: a resumed run draws the same as an undisturbed one."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode())), step)


def row_keys(key: jax.Array, rows: int, mesh: Mesh, *, first: int = 0) -> jax.Array:
    """One key per row, so that a row's text does not depend on its neighbours. first: the number of the first row."""
    return to_devices(_folded_in(key, np.arange(first, first + rows, dtype=np.int32)), row_sharding(mesh))


def other_keys(keys: jax.Array, name: str) -> jax.Array:
    """The keys of rows for draws of another name than those of `keys`."""
    return _folded(keys, np.uint32(zlib.crc32(name.encode())))


_folded_in = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
_folded = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(0, None)))
