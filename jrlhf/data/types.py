"""Prompts, conversations and examples: what a dataset's rows become."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Ids = tuple[int, ...]  # of tokens
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Conversation = tuple[Message, ...]
Text = str | Conversation  # a prompt or a completion: plain text, or the messages of a conversation


@dataclass(frozen=True)
class Example:
    """One row of a dataset."""

    prompt: Text
    completion: Text | None = None  # the answer to learn
    chosen: Text | None = None  # of two answers, the one that an annotator preferred
    rejected: Text | None = None
    source: str = ""  # which of several mixed datasets the row is from (verl's `data_source`); measured separately
    columns: Mapping[str, Any] = field(default_factory=dict)  # all other columns: reward functions get them by name


@dataclass(frozen=True)
class Response:
    """One response as it was sampled; its ids are never tokenized again."""

    ids: Ids
    text: str
    finished: bool
