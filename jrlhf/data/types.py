"""Types of texts, conversations, examples (rows of a dataset) and responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
class Response:
    """One sampled response. Its ids are used as sampled; the text is never tokenized again."""

    ids: Ids
    text: str  # as it continues the prompt, without special tokens
    finished: bool
    marked: str | None = None  # the text with its special tokens, if there are any besides its end
