"""Reads the tokenizer of a Hugging Face model directory, and compares it with a model and with other tokenizers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jrlhf.data.tokenizer import Tokenizer, ask
from jrlhf.data.tokenizer_classes import CLASSES, class_of, rebuild
from jrlhf.errors import UserError, user_errors
from jrlhf.models.hf.directories import TEMPLATES
from jrlhf.models.hf.files import check_file, read_object
from jrlhf.models.hf.values import object_at, refuse_others

SETTINGS = "tokenizer_config.json"
_EXTRA = "extra_special_tokens", "additional_special_tokens"
_OWN = "model_specific_special_tokens"  # where transformers 5 saves named tokens such as Gemma 3's image_token
# The names that chat templates have for special tokens, in the order in which transformers adds them.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(directory: Path | str, *, eos: Sequence[str] = ()) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face model directory.

    It reads tokenizer.json; tokenizer_config.json, special_tokens_map.json and added_tokens.json (special and added
    tokens); generation_config.json, or else config.json (further ids that end a response); chat_template.jinja and
    additional_chat_templates/, or else tokenizer_config.json or chat_template.json. Ids and texts are those of
    transformers; what would lead to others is refused by name.

    eos: names of the tokens that end a response, in place of those in the files; the first one is appended to texts.
        For example for a base model whose chat template ends a turn with a token other than its end-of-text token.
    """
    directory = Path(directory)
    backend = _read_backend(directory)
    with user_errors(f"{directory / SETTINGS}"):
        settings = _read_settings(directory, backend)
        name = class_of(settings, _read_json(directory / "config.json"), backend)
        named, extra = _special_tokens(settings, CLASSES.get(name or "", {}))
        _add_tokens(backend, _listed(directory, settings, backend, alone=name is not None), named)
        if name is not None:
            rebuild(backend, name, settings, named["unk_token"].content if "unk_token" in named else None)
        templates = _templates(directory, settings)
    special_tokens = {key: token.content for key, token in named.items()}
    if not eos and "eos_token" in named:
        _named_ids(backend, [named["eos_token"].content], directory)  # one that is added now would end no response
    _add_special_tokens(backend, [*named.values(), *extra], plain=name == "Qwen2Tokenizer")
    return Tokenizer(
        backend=backend,
        eos_ids=_named_ids(backend, eos, directory) if eos else _eos_ids(backend, special_tokens, directory),
        pad_id=backend.token_to_id(special_tokens.get("pad_token", "")),
        bos_id=backend.token_to_id(special_tokens.get("bos_token", "")),
        prefix_ids=_prefix_ids(backend, directory),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
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


def other_token(one: Tokenizer, other: Tokenizer) -> tuple[int, str | None, str | None] | None:
    """Returns the first id by which two tokenizers mean other tokens, and the two tokens; None: there is no such id.

    How they divide texts does not count, nor do added tokens that only one has, such as padding.
    """
    tokens, counted = [], []
    for backend in (one.backend, other.backend):
        tokens.append({index: token for token, index in backend.get_vocab(with_added_tokens=True).items()})
        counted.append(tokens[-1].keys() - backend.get_added_tokens_decoder().keys())
    ours, theirs = tokens
    wanted = counted[0] | counted[1] | (ours.keys() & theirs.keys())
    first = min((index for index in wanted if ours.get(index) != theirs.get(index)), default=None)
    return None if first is None else (first, ours.get(first), theirs.get(first))


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


# Keys of tokenizer_config.json -> their values without an effect; other values are refused. The keys that are applied
# are those that this module and `tokenizer_classes` read. All others, such as add_bos_token beside a tokenizer.json,
# have no effect.
NEUTRAL: Mapping[str, list[Any]] = {
    "auto_map": [None, {}],  # Python code
    "init_inputs": [None, []],
    "split_special_tokens": [None, False],
    "fix_mistral_regex": [None, False],
    "fast_tokenizer_files": [None, [], ["tokenizer.json"]],
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": [None, False],
}


def _read_settings(directory: Path, backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns what tokenizer_config.json says. special_tokens_map.json, which is older, counts only where that does not
    list the added tokens itself."""
    settings = _read_json(directory / SETTINGS)
    refuse_others(settings, NEUTRAL)
    if settings.get("clean_up_tokenization_spaces") and not isinstance(backend.model, tokenizers.models.BPE):
        refuse_others(settings, {"clean_up_tokenization_spaces": [False]})
    if "added_tokens_decoder" in settings:
        return settings
    older = _read_json(directory / "special_tokens_map.json")
    return {**settings, **older, **{key: settings[key] for key in _EXTRA if settings.get(key)}}


def _special_tokens(
    settings: Mapping[str, Any], defaults: Mapping[str, str]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Returns the special tokens by the names that templates have for them, and those without a name."""
    extra = next((settings[key] for key in _EXTRA if settings.get(key)), [])
    if not isinstance(extra, dict | list):
        raise ValueError(f"{' or '.join(_EXTRA)} {extra!r} must be a list of tokens, or an object of named ones")
    saved = object_at(settings, _OWN)
    values = {key: settings.get(key, defaults.get(key)) for key in NAMED}
    own = {key: settings[key] for key in settings if key.endswith("_token") and key not in NAMED}
    # Transformers ignores the saved ones where there is another name, unless its token is an object.
    names = {key: x for key, x in own.items() if isinstance(x, str)} | (extra if isinstance(extra, dict) else {})
    values |= {key: x for key, x in own.items() if isinstance(x, dict)} | (names or saved)
    named = {key: _token(value, key) for key, value in values.items() if value is not None}
    return named, [] if isinstance(extra, dict) else [_token(value, "extra_special_tokens") for value in extra]


def _token(value: Any, key: str, *, special: bool = True) -> AddedToken:
    """Returns a token, which files write as a string or as an object with `content`. special: it is a special one, also
    if the object does not say so."""
    try:
        flags = {"content": value} if special and isinstance(value, str) else {**value}
        flags.pop("__type", None)
        return AddedToken(flags.pop("content"), **(flags | {"special": True} if special else flags))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{key} {value!r} is no token: correct it") from error


def _listed(
    directory: Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer, *, alone: bool
) -> dict[int, AddedToken]:
    """Returns the added tokens by their ids: those of tokenizer.json, or those that tokenizer_config.json lists with
    flags of its own. alone: the tokenizer has no others."""
    present = backend.get_added_tokens_decoder()
    contents = {token.content for token in present.values()}
    if "added_tokens_decoder" not in settings:
        if lost := _read_json(directory / "added_tokens.json").keys() - contents:
            raise ValueError(f"added_tokens.json has {min(lost)!r}, which tokenizer.json lacks: add it there, too")
        return present
    try:
        entries = (settings["added_tokens_decoder"] or {}).items()
        listed = {int(index): _token(entry, index, special=False) for index, entry in entries}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"added_tokens_decoder is no object of tokens by their ids ({error}): fetch the file again"
        ) from error
    if alone and (lost := contents - {token.content for token in listed.values()}):
        raise ValueError(f"added_tokens_decoder lacks {min(lost)!r}, which tokenizer.json adds: add it there, too")
    return listed


def _add_tokens(
    backend: tokenizers.Tokenizer, listed: Mapping[int, AddedToken], named: Mapping[str, AddedToken]
) -> None:
    """Adds the tokens that are listed. One that is there already gets these flags."""
    contents = {token.content for token in named.values()}
    for index, token in sorted(listed.items(), key=lambda entry: entry[0]):
        token.special = token.special or token.content in contents
        backend.add_tokens([token])
        if (here := backend.token_to_id(token.content)) != index:
            raise ValueError(
                f"added_tokens_decoder gives {token.content!r} the id {index}, but by tokenizer.json it is {here}: the "
                "two files are of different models, fetch them again"
            )


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[AddedToken], *, plain: bool) -> None:
    """Adds special tokens that are not added yet. plain: all of them lose flags such as `lstrip`."""
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    distinct = {repr(token): token for token in tokens}.values()
    backend.add_tokens([token for token in distinct if token.content not in there])
    if plain:
        backend.add_tokens([AddedToken(token.content, special=True) for token in distinct])


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


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name; the files of templates replace those in tokenizer_config.json."""
    files = sorted((directory / TEMPLATES).glob("*.jinja"))
    named: dict[str, Any] = {path.name.removesuffix(".jinja"): path for path in files}
    if (path := directory / "chat_template.jinja").exists():
        named["default"] = path
    for name, path in named.items():
        try:
            check_file(path)
            named[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): fetch the file again") from error
    if named:
        return named
    templates = settings.get("chat_template")
    if templates is None:
        templates = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    templates = {"default": templates} if isinstance(templates, str) else templates or {}
    if not isinstance(templates, dict) or not all(isinstance(text, str) for text in templates.values()):
        raise ValueError("chat_template is neither a template nor a list of objects with name and template: correct it")
    return templates
