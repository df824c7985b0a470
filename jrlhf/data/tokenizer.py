"""Text to token ids and back: a thin frozen wrapper around `tokenizers`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

import tokenizers

from jrlhf.data.types import Stop
from jrlhf.errors import UserError


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back."""

    backend: tokenizers.Tokenizer  # without padding and truncation
    eos_ids: tuple[int, ...]  # each of them ends a response; the first one is appended to end a text
    pad_id: int | None = None  # None: rows are filled up with 0. Masks come from lengths, never from ids
    bos_id: int | None = None  # begins a text; None: the model has no such token
    prefix_ids: tuple[int, ...] = ()  # put before a plain text, for models that were trained with them
    chat_template: str | None = None  # Jinja source, rendered by `jrlhf.data.chat`
    tool_template: str | None = None  # the template of rows with tools, if it is another one
    # The template's variables in addition to the messages: bos_token, eos_token, ..., and a template's own switches.
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None  # where its files are; an export copies them
    stop: Stop | None = None  # texts that end a response, too
    limit: int | None = None  # the number of ids in the model's embedding; a text with a token beyond it is refused

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise ValueError("a tokenizer needs an end-of-text id: without one no response ever ends")

    @property
    def called(self) -> str:
        """The name of the tokenizer in messages."""
        return "the tokenizer" if self.directory is None else f"the tokenizer in {self.directory}"

    @property
    def templates(self) -> tuple[str, ...]:
        """The chat templates, as words that identify them."""
        return str(self.chat_template), *([] if self.tool_template is None else [self.tool_template])

    @property
    def eos_id(self) -> int:
        """The id that is appended to end a text."""
        return self.eos_ids[0]

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1, special ones included. Ids from here on have no meaning and must never be drawn."""
        highest = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return highest if self.limit is None else min(highest, self.limit)

    def encode(self, text: str) -> list[int]:
        """Returns token ids of one text; nothing is added to it."""
        return self._checked(ask(self.called, self.backend.encode, text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns token ids of many texts, as `encode` gives them."""
        encodings = ask(self.called, self.backend.encode_batch, list(texts), add_special_tokens=False)
        return [self._checked(encoding.ids) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Returns token ids of a plain text that begins a sequence: `prefix_ids`, then the text. An end-of-text token
        that the tokenizer would add is left out, because an answer follows."""
        return [*self.prefix_ids, *self.encode(text)]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Returns token ids of one text, and for each the number of characters that come before its end."""
        encoding = ask(self.called, self.backend.encode, text, add_special_tokens=False)
        return self._checked(encoding.ids), [end for _, end in encoding.offsets]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of token ids, in which bytes that are no UTF-8 are U+FFFD. special: with special tokens."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=not special)

    def continuation(self, before: Sequence[int], ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text with which `ids` continue `before`: that of all tokens, without the text of `before`.

        Decoders may drop the blank that begins the first token of a text. A character with tokens on both sides belongs
        to `ids`. special: with the special tokens among `ids`, except padding and ends of text.
        """
        if special:
            ids = [token for token in ids if token in self.marks or token not in self._special]
        # No decoder looks back beyond a token that begins with a letter, so the text before it cancels out.
        start = next((place for place in range(len(before) - 1, 0, -1) if self._is_word(before[place])), 0)
        begun, whole = (self.decode([*before[start:], *rest], special=special) for rest in ((), ids))
        return whole[len(commonprefix((begun, whole))) :]

    @cached_property
    def marks(self) -> frozenset[int]:
        """The special tokens that a text may contain: all but padding and ends of text."""
        return self._special - {*self.eos_ids, self.pad_id}

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def _is_word(self, token: int) -> bool:
        text = (self.backend.id_to_token(int(token)) or "").lstrip("▁Ġ")[:1]
        return text.isascii() and text.isalpha() and token not in self._special

    def to_json(self) -> str:
        """Returns the text of a `tokenizer.json`; equal tokenizers give equal texts."""
        return self.backend.to_str(pretty=True)

    def _checked(self, ids: list[int]) -> list[int]:
        if self.limit is not None and ids and max(ids) >= self.limit:
            raise UserError(
                f"the text holds the token {self.backend.id_to_token(max(ids))!r} (id {max(ids)}), but the model's "
                f"embedding has {self.limit} rows: remove it from the text"
            )
        return ids


def ask(called: str, method: Callable, *arguments: Any, **options: Any) -> Any:
    """Calls a method of `tokenizers`; an error, which a user's file or text may cause, becomes a UserError."""
    try:
        return method(*arguments, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare `Exception`, and Rust's panics as `BaseException`
        raise UserError(f"{called} fails ({error}): see its tokenizer.json and the text that it is given") from error
