"""Finds and loads configs, by file or by name of a packaged config, with `key=value` overrides."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from jrlhf.config.parse import Override, build, override, parse_yaml, put, section_with
from jrlhf.config.places import expanded
from jrlhf.config.schema import Config
from jrlhf.errors import UserError, alike, beside, refuse_unknown_options, user_errors


def load_config(path_or_name: str, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a YAML file, or of a name among the packaged ones, with `key=value` overrides.

    A run without a name gets the name of its file.
    """

    def change(mapping: dict[str, Any]) -> None:
        for assignment in overrides:
            override(mapping, assignment)

    return _build_file(path_or_name, change)


def make_config(source: str | Path | Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a file, a packaged name or a nested mapping, with some settings changed.

    Keys of mappings may be dotted. A mapping in `changes` changes only the keys of a section that it contains.

    Raises UserError for a source of another type, and for bad settings.
    """
    if not isinstance(source, str | Path | Mapping) or source == "":
        raise UserError(f"config={source!r}: it must be the name of a config, a YAML file, or a dict of settings")

    def change(mapping: dict[str, Any]) -> None:
        _merge(mapping, plain_value(changes or {}))

    if not isinstance(source, Mapping):
        return _build_file(str(source), change)
    mapping: dict[str, Any] = {"name": "run"}
    _merge(mapping, plain_value(source))
    change(mapping)
    return build(Config, mapping)


def _merge(mapping: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Puts the changes into a parsed mapping, in place."""
    for key, value in changes.items():
        section, name = section_with(mapping, key, key)
        is_section = isinstance(section.get(name), dict)
        if isinstance(value, Mapping):
            section[name] = section[name] if is_section else {}
            _merge(section[name], value)
        else:  # null in place of a section is refused, unless the feature may be off
            put(section, name, Override("null") if value is None and is_section else value)


def plain_value(value: Any) -> Any:
    """Converts a Python value to the form of a config file: paths become text, tuples lists, numbers Python's own."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):  # such as jnp.bfloat16
        return np.dtype(value).name
    return value.item() if hasattr(value, "dtype") and value.ndim == 0 else value


def _build_file(path_or_name: str, change: Callable[[dict[str, Any]], None]) -> Config:
    source = _find(path_or_name)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"config {path_or_name} cannot be read: {reason}") from error
    mapping = parse_yaml(text, path_or_name)
    empty, mapping = not mapping, {} if mapping is None else mapping
    if not isinstance(mapping, dict):
        raise UserError(f"config {path_or_name} must hold `key: value` lines, but it holds no keys")
    change(mapping)
    if isinstance(source, Path):
        mapping.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", source.stem).lstrip(".-") or "run")
    if empty and "stages" not in mapping:
        raise UserError(f"config {path_or_name} is empty: name the run's stages, for example stages: [sft, ppo]")
    return build(Config, mapping)


def settings_of(text: str) -> dict[str, str]:
    """Returns key -> value, as `make_config` takes them, of `key=value` words with blanks between them.

    A value with blanks is quoted as in a shell.

    Raises UserError for a word that is not key=value.
    """
    with user_errors(f"the settings {text!r}"):
        pairs = [word.partition("=") for word in shlex.split(text)]
    for key, equals, _ in pairs:
        if not equals:
            raise UserError(f"{key!r} in the settings {text!r} is not key=value: put a value with blanks in quotes")
    return {key: Override(value) for key, _, value in pairs}


def parse_with_settings(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line. Words `key=value` or `--key=value` are settings and go to the list `overrides`."""
    help_text = "settings in place of the file's: seed=1"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=help_text)
    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-") and "=" not in words[0] and "--config" in parser._option_string_actions:
        parser.error(f"{words[0]} is no setting: did you mean --config {words[0]}?")
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and name in (actions := parser._option_string_actions) and actions[name].nargs == 0:
            choices = [option for option in actions if option.partition("=")[0] == name]
            if word not in choices:
                parser.error(f"{word} is no option: write {' or '.join(choices)}")
    typed = [word for word in words if "=" not in word]
    refuse_unknown_options(parser, typed, lambda word: f"; a setting is written {word.lstrip('-')}=VALUE")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    options.overrides += unknown
    return options


def config_names() -> list[str]:
    """Returns the names of the packaged configs, which `--config NAME` finds."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _packaged().iterdir() if entry.name.endswith(".yaml"))


def _packaged() -> Traversable:
    return resources.files("jrlhf.configs")


def _find(path_or_name: str) -> Path | Traversable:
    path = expanded(path_or_name, "config")
    if path.is_file():
        return path
    names = config_names()
    if path_or_name in names:
        return _packaged() / f"{path_or_name}.yaml"
    remedy = f"name a YAML file, or one of {', '.join(names)}"
    if path.is_dir():
        remedy = f"did you mean {path / 'config.yaml'}?" if (path / "config.yaml").is_file() else remedy
        raise UserError(f"config {path_or_name} is a directory: {remedy}")
    if path.exists():
        raise UserError(f"config {path_or_name} is no regular file: {remedy}")
    raise UserError(f"config {path_or_name} does not exist: {beside(path, alike(path.stem, names, remedy))}")
