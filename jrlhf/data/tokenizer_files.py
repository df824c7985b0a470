"""Reads the tokenizer of a Hugging Face model directory, and compares it with a model and with other tokenizers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from jrlhf.data.tokenizer import Tokenizer, ask
from jrlhf.errors import UserError, user_errors
from jrlhf.models.hf.files import check_file, read_object

# The names that chat templates have for special tokens.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(directory: Path | str, *, eos: Sequence[str] = ()) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face model directory.

    It reads tokenizer.json; tokenizer_config.json and special_tokens_map.json (special tokens); generation_config.json,
    or else config.json (further ids that end a response); chat_template.jinja, tokenizer_config.json or
    chat_template.json.

    eos: names of the tokens that end a response, in place of those in the files; the first one is appended to texts.
        For example for a base model whose chat template ends a turn with a token other than its end-of-text token.
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

    Ordinary tokens must all have a row. Added tokens without one (the image token of a text-only checkpoint, a padding
    token that was never trained) are accepted as long as no text contains them: `Tokenizer.limit`.
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
    """True if two tokenizers encode texts with the same ids. Added tokens that only one has, such as a reward model's
    padding, do not count."""
    first, second = (json.loads(tokenizer.to_json()) for tokenizer in (one, other))
    if any(first.get(part) != second.get(part) for part in ("model", "normalizer", "pre_tokenizer")):
        return False
    ours, theirs = ({token["id"]: token["content"] for token in x.get("added_tokens", [])} for x in (first, second))
    return all(ours[index] == theirs[index] for index in ours.keys() & theirs.keys())


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
        backend = ask(str(path), tokenizers.Tokenizer.from_file, str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch the file again") from error
    backend.no_truncation()  # a file may have been saved while they were on
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty where there is no file."""
    if not path.exists():
        return {}
    with user_errors():
        return read_object(path, "fetch the file again", "a JSON object should be: fetch the file again")


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
    """Returns the tokens of `added_tokens_decoder` with their ids, in ascending order."""
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
    """Returns the tokenizer's own end-of-text token first, then those at which generation stops."""
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
    """Returns the ids that the tokenizer itself puts before a text."""
    encoding = ask(f"the tokenizer in {directory}", backend.encode, "a", add_special_tokens=True)
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
