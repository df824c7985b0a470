"""Types of texts, conversations, examples (rows of a dataset), encoded rows and responses."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from jrlhf.models.generation.stops import StopTable

Ids = tuple[int, ...]  # token ids
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Conversation = tuple[Message, ...]
Text = str | Conversation  # a prompt or a completion: plain text, or the messages of a conversation


@dataclass(frozen=True)
class Example:
    """One row of a dataset."""

    prompt: Text
    completion: Text | None = None  # the answer to learn
    chosen: Text | None = None  # the answer of two that an annotator preferred
    rejected: Text | None = None
    source: str = ""  # the row's dataset in a mixture (verl's `data_source`); sources are measured separately
    columns: Mapping[str, Any] = field(default_factory=dict)  # all other columns: reward functions get them by name


@dataclass(frozen=True)
class Source:
    """One of several datasets whose rows follow each other: its name, its number of rows, and its weight in a draw."""

    name: str
    count: int
    weight: float


@dataclass(frozen=True)
class Response:
    """One sampled response. Its ids are used as sampled; the text is never tokenized again."""

    ids: Ids
    text: str  # as it continues the prompt, without special tokens
    finished: bool
    marked: str | None = None  # the text with its special tokens, if there are any besides its end


class Stop(NamedTuple):
    """Texts that end a response: whether its text keeps them, and the table that finds them in tokens."""

    texts: tuple[str, ...]
    keep: bool
    table: StopTable


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Encoded rows.

    filtered: number of rows left out as too long. truncated: number of rows cut at the beginning. twice: number of
    plain texts that write out what the tokenizer puts before every text, so that they begin with it twice.
    """

    examples: Sequence[Example] = ()
    filtered: int = 0
    truncated: int = 0
    twice: int = 0

    def _describe(self, unit: str, rows: Sequence[Ids], remark: str = "") -> str:
        lengths = [len(row) for row in rows]
        line = f"{len(lengths)} {unit} of {min(lengths)} to {max(lengths)} tokens (median {median(lengths):g})"
        line += f"; {self.filtered} too long and left out" if self.filtered else ""
        line += f"; {self.truncated} too long and cut off at the beginning" if self.truncated else ""
        again = "write out the token that the tokenizer puts before every text, and have it twice: remove it there"
        return line + (f"; {self.twice} {again}" if self.twice else "") + remark


@dataclass(frozen=True)
class Prompts(EncodedRows):
    """Prompts for generation. A truncated prompt keeps its whole text.

    The prompts of `examples` are conversations if the model gets conversations.
    """

    ids: tuple[Ids, ...]
    texts: tuple[str, ...]  # as rendered by the chat template
    sources: tuple[Source, ...] = ()  # the datasets of a mixture, in the order of the prompts; (): it is no mixture

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sources of the examples; empty if they all have the same one."""
        names = tuple(sorted({example.source for example in self.examples}))
        return names if len(names) > 1 else ()

    def describe(self) -> str:
        return self._describe("prompts", self.ids)


@dataclass(frozen=True)
class Sequences(EncodedRows):
    """Whole sequences for supervised learning."""

    ids: tuple[Ids, ...]
    learn: tuple[tuple[bool, ...], ...]  # mask of the tokens to learn; never the first one
    prompt_lengths: tuple[int, ...]  # number of tokens before the first one to learn

    def describe(self) -> str:
        learned = f"; {sum(map(sum, self.learn))} of {sum(map(len, self.learn))} tokens are learnt"
        return self._describe("sequences", self.ids, learned)


@dataclass(frozen=True)
class Pairs(EncodedRows):
    """Two answers to each prompt as whole sequences, prompt included; an annotator preferred the first."""

    chosen: Sequence[Ids]
    rejected: Sequence[Ids]
    prompt_lengths: Sequence[int]  # both sequences of a row begin with these tokens
    clear: np.ndarray | None = None  # mask of the pairs with a clear preference of the annotator; None: all
    rows: Sequence[Mapping[str, Any]] = ()  # the pairs as rows of a dataset, if they were sampled; a run saves them
    same: int = 0  # number of rows left out because their answers have the same tokens

    def __len__(self) -> int:
        return len(self.chosen)

    def describe(self) -> str:
        longer = [max(pair, key=len) for pair in zip(self.chosen, self.rejected, strict=True)]
        return self._describe("pairs", longer, f"; {self.same} with two equal answers left out" if self.same else "")


def without_gap(text: str, gap: str) -> str:
    """Returns the message whose text in a conversation is `text`."""
    return text[len(os.path.commonprefix((text, gap))) :]
