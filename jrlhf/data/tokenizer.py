"""Text to token ids and back: a thin frozen wrapper around `tokenizers`, and its loading from a model directory."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jrlhf.errors import UserError
from jrlhf.models.hf.files import check_file, read_object

# The names that chat templates have for special tokens.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back."""

    backend: tokenizers.Tokenizer  # it neither pads nor cuts off
    eos_ids: tuple[int, ...]  # each of them ends a response; the first is the one that is written to end a text
    pad_id: int | None = None  # None: rows are filled up with 0. Masks come from lengths, never from ids
    bos_id: int | None = None  # the beginning of a text, where the model has one
    prefix_ids: tuple[int, ...] = ()  # what a plain text begins with, for models that were trained so
    chat_template: str | None = None  # Jinja source, rendered by `jrlhf.data.chat`
    # The template's variables in addition to the messages: bos_token, eos_token, ..., and a template's own switches.
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None  # of the files, for an export that copies them
    limit: int | None = None  # the number of ids in the model's embedding; a text with a token beyond it is refused

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise ValueError("a tokenizer needs an end-of-text id: without one no response ever ends")

    @property
    def called(self) -> str:
        """The tokenizer, for messages."""
        return "the tokenizer" if self.directory is None else f"the tokenizer in {self.directory}"

    @property
    def eos_id(self) -> int:
        """The id that is written to end a text."""
        return self.eos_ids[0]

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1, special ones included: ids from here on mean nothing and must never be drawn."""
        highest = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return highest if self.limit is None else min(highest, self.limit)

    def encode(self, text: str) -> list[int]:
        """Returns token ids of one text; nothing is added to it."""
        return self._checked(_asked(self.called, self.backend.encode, text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns token ids of many texts, as `encode` gives them."""
        encodings = _asked(self.called, self.backend.encode_batch, list(texts), add_special_tokens=False)
        return [self._checked(encoding.ids) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a plain text that begins a sequence: `prefix_ids`, then the text. An end of text that the
        tokenizer would add is left out, because an answer follows."""
        return [*self.prefix_ids, *self.encode(text)]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Returns token ids of one text, and for each the number of characters that come before its end."""
        encoding = _asked(self.called, self.backend.encode, text, add_special_tokens=False)
        return self._checked(encoding.ids), [end for _, end in encoding.offsets]

    def encode_continuation(self, before: str, begun: Sequence[int], text: str) -> list[int]:
        """Returns token ids of a text that follows `before`, whose tokens `begun` stay as they are.

        They are the tokens behind `begun` in the two texts together. Where a token would reach over from one text to
        the other, they are those of the text alone, without the blank with which SentencePiece-like vocabularies begin.
        """
        for first, ids in ((before, list(begun)), *((first, self.encode(first)) for first in self._stand_ins)):
            both = self.encode(first + text)
            if both[: len(ids)] == ids:
                return both[len(ids) :]
        return self.encode(text)

    @cached_property
    def _stand_ins(self) -> tuple[str, ...]:
        """Texts to put before a continuation while it is encoded; none where a text is encoded alike everywhere."""
        line, both = self.encode("\n"), self.encode("\na")
        return () if both == [*line, *self.encode("a")] else ("\n", "a", ".")

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; special tokens are left out, and bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)

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


def load_tokenizer(directory: Path | str, *, eos: Sequence[str] = ()) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face model directory.

    From tokenizer.json; tokenizer_config.json and special_tokens_map.json (special tokens); generation_config.json, or
    else config.json (further ids that end a response); chat_template.jinja, tokenizer_config.json or
    chat_template.json.

    eos: names of the tokens that end a response, in place of those that the files name; the first one is written. For
        a base model, say, whose chat template closes a turn with a token other than its end of text.
    """
    directory = Path(directory)
    backend = _read_backend(directory)
    settings = _read_json(directory / "tokenizer_config.json")
    # The older of the two files counts only where the newer one does not list the added tokens itself.
    if "added_tokens_decoder" not in settings:
        settings |= _read_json(directory / "special_tokens_map.json")
    _add_missing(backend, settings, directory)
    special_tokens = {name: text for name in _NAMED if (text := _content(settings.get(name))) is not None}
    return Tokenizer(
        backend=backend,
        eos_ids=_named_ids(backend, eos, directory) if eos else _eos_ids(backend, special_tokens, directory),
        pad_id=backend.token_to_id(special_tokens.get("pad_token", "")),
        bos_id=backend.token_to_id(special_tokens.get("bos_token", "")),
        prefix_ids=_prefix_ids(backend, directory),
        chat_template=_chat_template(directory, settings),
        special_tokens=special_tokens,
        directory=directory,
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer to use with a model whose embedding has `vocab_size` rows.

    Ordinary tokens must all have a row. Added ones beyond it (the image token of a text-only checkpoint, a padding
    token that was never trained) are tolerated as long as no text holds them: `Tokenizer.limit`.
    """
    added = set(tokenizer.backend.get_added_tokens_decoder())
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    ordinary = max((index for index in vocabulary.values() if index not in added), default=0)
    highest = max((ordinary, *tokenizer.eos_ids, *tokenizer.prefix_ids))
    if highest >= vocab_size:
        raise UserError(
            f"{tokenizer.called} has ids up to {highest}, but the model's embedding has {vocab_size} rows: take the "
            "tokenizer that the model was trained with"
        )
    if tokenizer.vocab_size <= vocab_size:
        return tokenizer
    pad_id = tokenizer.pad_id if tokenizer.pad_id is None or tokenizer.pad_id < vocab_size else None
    return replace(tokenizer, pad_id=pad_id, limit=vocab_size)


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """True if two tokenizers write a text with the same ids. Added tokens that only one has do not count: a reward
    model's padding, say."""
    first, second = (json.loads(tokenizer.to_json()) for tokenizer in (one, other))
    if any(first.get(part) != second.get(part) for part in ("model", "normalizer", "pre_tokenizer")):
        return False
    ours, theirs = ({token["id"]: token["content"] for token in x.get("added_tokens", [])} for x in (first, second))
    return all(ours[index] == theirs[index] for index in ours.keys() & theirs.keys())


def _asked(called: str, method: Callable, *arguments: Any, **options: Any) -> Any:
    """Returns what a method of the library returns, for a tokenizer file of anyone and texts of anyone."""
    try:
        return method(*arguments, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare `Exception`, and Rust's panics as `BaseException`
        raise UserError(f"{called} fails ({error}): see its tokenizer.json and the text that it is given") from error


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: name the directory that holds tokenizer.json")
    if not path.exists():
        others = [n for n in ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt") if (directory / n).exists()]
        if others:
            raise UserError(
                f"{directory} has {' and '.join(others)} but no tokenizer.json: convert it once with transformers, "
                f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
            )
        raise UserError(f"{directory} has no tokenizer.json: name a directory that holds the model's tokenizer")
    try:
        check_file(path)
        backend = _asked(str(path), tokenizers.Tokenizer.from_file, str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch the file again") from error
    backend.no_truncation()  # a file may have been saved while they were on
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        return read_object(path, "fetch the file again", "a JSON object should be: fetch the file again")
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def _content(token: Any) -> str | None:
    """Returns a token's text: files write it as a string or as an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _add_missing(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: Path) -> None:
    """Adds the special tokens that only tokenizer_config.json lists."""
    file = directory / "tokenizer_config.json"
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    for index, token in _listed(settings.get("added_tokens_decoder"), file):
        if token.content not in contents:
            backend.add_tokens([token])
            if (here := backend.token_to_id(token.content)) != index:
                raise UserError(
                    f"{file} gives {token.content!r} the id {index}, but by tokenizer.json it is {here}: the two files "
                    "are of different models, fetch them again"
                )
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [text for name in _NAMED if (text := _content(settings.get(name))) is not None and text not in contents]
    backend.add_special_tokens([text for text in named if backend.token_to_id(text) is not None])


def _listed(decoder: Any, file: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """Returns the tokens of `added_tokens_decoder` with their ids, rising."""
    try:
        entries = sorted((int(index), entry) for index, entry in (decoder or {}).items())
        if not all(isinstance(entry["content"], str) for _, entry in entries):
            raise TypeError("a token's content is no text")
        return [(index, tokenizers.AddedToken(**entry)) for index, entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"added_tokens_decoder in {file} is no object of tokens by their ids ({error}): fetch the file again"
        ) from error


def _named_ids(backend: tokenizers.Tokenizer, names: Iterable[str], directory: Path) -> tuple[int, ...]:
    ids = []
    for name in names:
        index = backend.token_to_id(name)
        if index is None:
            raise UserError(f"the vocabulary in {directory} has no token {name!r} to end a text with: name one it has")
        ids.append(index)
    return tuple(ids)


def _eos_ids(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], directory: Path) -> tuple[int, ...]:
    """Returns the tokenizer's own end of text first, then those that generation stops at."""
    name = special_tokens.get("eos_token")
    own = () if name is None else _named_ids(backend, [name], directory)
    stops: Any = None
    for file in ("generation_config.json", "config.json"):
        settings = _read_json(directory / file)
        inner = settings.get("text_config")
        stops = settings.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        if stops is not None:
            break
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(index) is int and 0 <= index < 2**32 for index in listed):
        raise UserError(f"eos_token_id in {directory / file} is {stops!r}, not an id or a list of ids: correct it")
    ids = tuple(dict.fromkeys((*own, *listed)))
    if not ids:
        raise UserError(
            f"nothing in {directory} says which token ends a text: set eos_token in tokenizer_config.json, or "
            "eos_token_id in generation_config.json"
        )
    unknown = [index for index in ids if backend.id_to_token(index) is None]
    if unknown:
        raise UserError(
            f"{directory / file} ends a response at id {unknown[0]}, which the tokenizer does not have: "
            "correct eos_token_id there"
        )
    return ids


def _prefix_ids(backend: tokenizers.Tokenizer, directory: Path) -> tuple[int, ...]:
    """Returns the ids that the tokenizer by itself puts before a text."""
    encoding = _asked(f"the tokenizer in {directory}", backend.encode, "a", add_special_tokens=True)
    own = [added == 0 for added in encoding.special_tokens_mask]
    return tuple(encoding.ids[: own.index(True)]) if True in own else ()


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            check_file(path)
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): fetch the file again") from error
    template = settings.get("chat_template")
    if template is None:
        template = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # named ones: [{"name": "default", "template": "..."}, ...]
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None
