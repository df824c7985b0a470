"""`StopTable`: tells from drawn tokens alone where a response contains a stop string, inside of compiled programs."""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jrlhf.models.config.checks import MOST_STOP_BYTES


@dataclass(frozen=True)
class StopTable:
    """The states of responses with respect to stop strings, and the state after each token.

    A state is the longest end of a response's bytes that begins a stop string (Aho and Corasick 1975, Efficient string
    matching). State 0 is the empty one, in which every response begins, so prompts play no part. There are at most as
    many states as the stop strings have bytes, and one.

    Its fields are text and numbers, so that it may be compared and sent to other processes:
    classes: the classes of the V tokens as int32, compressed, in base64. Tokens of a class move all states alike.
    moves: for each of S states and C classes the next state; ~state, which is negative, if a string was completed.
    """

    classes: str
    moves: tuple[tuple[int, ...], ...]

    @cached_property
    def _arrays(self) -> tuple[Int[np.ndarray, "V"], Int[np.ndarray, "S C"]]:
        classes = np.frombuffer(zlib.decompress(b64decode(self.classes)), np.int32)
        small = np.uint16 if classes.max(initial=0) < 2**16 else np.int32  # a constant of each program
        return classes.astype(small), np.array(self.moves, np.int16)

    def advance(self, states: Int[Array, "B"], tokens: Int[Array, "B"]) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
        """Returns the states after one more token each, and whether the token completed a stop string."""
        classes, moves = map(jnp.asarray, self._arrays)
        moved = moves[states, classes[tokens].astype(jnp.int32)].astype(jnp.int32)
        return jnp.where(moved < 0, ~moved, moved), moved < 0


def stop_table(strings: Sequence[bytes], tokens: Sequence[bytes]) -> StopTable:
    """Returns the table of stop strings for a vocabulary. tokens: the bytes that each of the V tokens adds to a text.

    A string may begin and end inside of tokens. Raises ValueError for an empty string, and for more than 256 bytes.
    """
    if not strings or not all(strings) or sum(map(len, strings)) > MOST_STOP_BYTES:
        raise ValueError(f"stop strings {list(strings)} must be of 1 to {MOST_STOP_BYTES} bytes together, none empty")
    follows, completes = _automaton(strings)
    lengths = np.array([len(token) for token in tokens])
    order = np.argsort(-lengths, kind="stable")
    content, starts = np.frombuffer(b"".join(tokens), np.uint8), np.cumsum(lengths) - lengths
    states = np.repeat(np.arange(len(follows), dtype=np.int16)[:, None], len(tokens), axis=1)
    completed = np.zeros(states.shape, bool)
    for place in range(lengths.max(initial=0)):
        longer = order[: np.count_nonzero(lengths > place)]
        states[:, longer] = follows[states[:, longer], content[starts[longer] + place]]
        completed[:, longer] |= completes[states[:, longer]]
    moves, classes = np.unique(np.where(completed, ~states, states), axis=1, return_inverse=True)
    written = b64encode(zlib.compress(classes.astype(np.int32).tobytes())).decode()
    return StopTable(written, tuple(map(tuple, moves.tolist())))


def _automaton(strings: Sequence[bytes]) -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, "S"]]:
    """Returns the next state after each byte, and in which states a string has just been completed."""
    starts = sorted({string[:end] for string in strings for end in range(len(string) + 1)}, key=len)
    number = {start: state for state, start in enumerate(starts)}
    follows, completes = np.zeros((len(starts), 256), np.int16), np.zeros(len(starts), bool)
    for state, start in enumerate(starts):
        shorter = next((number[start[cut:]] for cut in range(1, len(start)) if start[cut:] in number), 0)
        follows[state] = follows[shorter] if state else 0
        completes[state] = start in strings or completes[shorter]
        for byte in range(256):
            if (longer := number.get(start + bytes([byte]))) is not None:
                follows[state, byte] = longer
    return follows, completes
