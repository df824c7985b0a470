"""What a dataset's rows become: prompts, conversations, examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Conversation = tuple[Message, ...]
Text = str | Conversation  # a prompt or a completion: plain text, or the messages of a conversation


@dataclass(frozen=True)
class Example:
    """One row of a dataset.

    completion: what to learn to answer. chosen, rejected: answers of which an annotator preferred the first.
    source: which of several mixed datasets the row is from (verl's `data_source`); measured separately.
    columns: every other column, as read: reward functions get them by name.
    """

    prompt: Text
    completion: Text | None = None
    chosen: Text | None = None
    rejected: Text | None = None
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """One response as it was sampled; its ids are never tokenized again."""

    ids: tuple[int, ...]
    text: str
    finished: bool
