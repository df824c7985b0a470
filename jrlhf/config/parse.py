"""YAML and `key=value` overrides -> frozen dataclasses, strictly.

Every value in a file is text until its field's type says what it means, so YAML's surprises (`1e-5` a string, `on` a
bool, `010` eight) do not exist. An unknown key, a wrong type or a number out of range is one sentence with a remedy.
"""

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields
from typing import Any, Literal, TypeVar

import yaml

from jrlhf.errors import UserError

T = TypeVar("T")


# --- Fields: a default, and what the value must be ---


def checked(default: object, holds: Callable[[Any], bool], expected: str) -> Any:
    """A field with a default whose value must satisfy `holds`; None, where the type allows it, always does."""
    return field(default=default, metadata={"holds": holds, "expected": expected})


def count(default: int | None) -> Any:
    return checked(default, lambda value: value >= 1, "at least 1")


def natural(default: int | None) -> Any:
    return checked(default, lambda value: value >= 0, "at least 0")


def positive(default: float | None) -> Any:
    return checked(default, lambda value: value > 0 and math.isfinite(value), "above 0 and finite")


def non_negative(default: float | None) -> Any:
    return checked(default, lambda value: value >= 0 and math.isfinite(value), "at least 0 and finite")


def between(default: float | None, low: float, high: float) -> Any:
    return checked(default, lambda value: low <= value <= high, f"from {low:g} to {high:g}")


class Section:
    """A dataclass that checks its fields when it is made.

    Raises:
        ValueError: a value that its field does not allow, as `name=value: it must be ...`.
    """

    def __post_init__(self) -> None:
        for each in fields(self):  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
            value = getattr(self, each.name)
            if value is not None and "holds" in each.metadata and not each.metadata["holds"](value):
                raise ValueError(f"{each.name}={value!r}: it must be {each.metadata['expected']}")


# --- YAML text -> nested dicts and lists of text, and back ---


class _Quoted(str):
    """A scalar that was quoted: never null."""


class _Override(str):
    """The right side of `key=value`: text for a text field, otherwise YAML."""


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = "aliases are not read, write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def parse_yaml(text: str, source: str) -> object:
    """YAML as nested dicts and lists whose scalars are text, or None where nothing stands.

    Raises:
        UserError: not YAML, or a key given twice, with the line.
    """

    def plain(node: yaml.Node) -> object:
        if isinstance(node, yaml.ScalarNode):
            if node.style in ("'", '"', "|", ">"):
                return _Quoted(node.value)
            return None if node.value in ("", "~", "null", "Null", "NULL") else node.value
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        mapping = {}
        for key, value in node.value:
            where = f"{source}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{where}: a key must be a word")
            if key.value in mapping:
                raise UserError(f"{where}: {key.value} is given twice, keep one")
            mapping[key.value] = plain(value)
        return mapping

    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else plain(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}, line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise UserError(f"{where}: not valid YAML: {problem}") from error
    except RecursionError as error:
        raise UserError(f"{source}: not a config: nested too deeply") from error


def flatten(mapping: object, prefix: str = "") -> dict[str, str]:
    """Dotted keys of a parsed config -> their values as text. Lists count as one value."""
    if not isinstance(mapping, dict):
        return {prefix: _flow(mapping)}
    merged = {}
    for key, value in mapping.items():
        merged |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return merged


def override(mapping: dict[str, Any], assignment: str) -> None:
    """Puts `key=value` into a parsed mapping, in place; dots in the key lead into its sections.

    Raises:
        UserError: no `key=value`, or a key that leads through a value.
    """
    key, equals, value = assignment.lstrip("-").partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not all(sections) or not name:
        raise UserError(f"override {assignment!r} is not understood: write key=value, for example seed=1")
    for depth, section in enumerate(sections, start=1):
        path = ".".join(sections[:depth])
        inner = mapping.get(section)
        inner = parse_yaml(inner, path) if isinstance(inner, _Override) else inner
        inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise UserError(f"override {assignment!r}: {path}={_shown(inner)} is no section, it has no {name}")
        mapping[section] = inner
        mapping = inner
    mapping[name] = _Override(value.strip())


def to_yaml(config: object, without: Collection[str] = ()) -> str:
    """A config dataclass as YAML that `load_config` reads back to an equal one.

    without: sections to leave out, which have their defaults.
    """

    def plain(value: object) -> object:
        if dataclasses.is_dataclass(value):
            return {name: plain(getattr(value, name)) for name in _keys(type(value))}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    mapping = plain(config)
    assert isinstance(mapping, dict)
    kept = {name: value for name, value in mapping.items() if name not in without}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1000)


# --- Nested text -> dataclasses ---


def build(cls: type[T], mapping: object, where: str = "", base: T | None = None) -> T:
    """A dataclass from nested dicts, each value converted by its field's type. Absent keys keep their defaults.

    The default of a section's key is what the section's own default says: `base`, where it is given.

    Values may be text, as `parse_yaml` gives it, or Python values. `where` is the dotted path of `mapping`.

    Raises:
        UserError: an unknown key, a value that the type does not allow, or that `__post_init__` refuses.
    """
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where}={_shown(mapping)}: it is a section, write {where}.KEY=VALUE for one of {_names(cls)}")
    hints = typing.get_type_hints(cls)
    known = _keys(cls)
    values = {}
    for key, value in mapping.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            raise UserError(f"{path} is not a known key: {_suggestion(cls, str(key), where)}")
        values[key] = convert(hints[key], value, path, getattr(base or cls, key, None))
    try:
        return cls(**values) if base is None else dataclasses.replace(base, **values)  # pyright: ignore
    except TypeError as error:
        missing = [each.name for each in fields(cls) if _required(each) and each.name not in values]  # pyright: ignore[reportArgumentType]
        if not missing:
            raise
        raise UserError(f"{where or 'the config'} lacks {missing[0]}: give it a value") from error
    except ValueError as error:
        prefix = "" if not where else f"{where}." if re.match(r"\w+=", str(error)) else f"{where}: "
        raise UserError(f"{prefix}{error}") from error


def convert(kind: Any, value: object, path: str, default: object = None) -> Any:
    """`value` as a `kind`: bool, int, float, str, Literal, X | None, tuple[X, ...], Mapping or a dataclass.

    default: of a dataclass, for the keys that `value` does not give.

    Raises:
        UserError: the value is none.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (some,) = [each for each in inner if each is not type(None)]
        nothing = value is None or (isinstance(value, _Override) and parse_yaml(value, path) is None)
        return None if nothing else convert(some, value, path)
    if isinstance(value, _Override) and kind is not str:
        value = parse_yaml(value, path)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, path, default if isinstance(default, kind) else None)  # pyright: ignore
    if value is None:
        raise UserError(f"{path} has no value: give it one, or leave the key out for its default")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{path}={_shown(value)}: it must be a list, write [{_shown(value)}]")
        return tuple(convert(inner[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise UserError(f"{path}={_shown(value)}: it must be a mapping, write {{key: value}}")
        return {str(key): _plain(item) for key, item in value.items()}
    if origin is Literal:
        if value not in inner:
            close = difflib.get_close_matches(str(value), inner, n=1)
            hint = f", did you mean {close[0]}" if close else ""
            raise UserError(f"{path}={_shown(value)}: it must be one of {', '.join(inner)}{hint}")
        return str(value)
    return _scalar(kind, value, path)


def _scalar(kind: type, value: object, path: str) -> Any:
    if kind is str and isinstance(value, str):
        return str(value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise UserError(f"{path}={_shown(value)}: it must be true or false")
    if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
            if kind is float and math.isfinite(number):
                return number
            if kind is int and number.is_integer():
                return int(value)
        except (ValueError, OverflowError):
            pass
        hint = f", write {int(float(value))}" if kind is int and _whole(value) else ""
        raise UserError(f"{path}={_shown(value)}: it must be {_KINDS[kind]}{hint}")
    raise UserError(f"{path}={_shown(value)}: it must be {_KINDS[kind]}")


def _plain(value: object) -> object:
    """A value whose type nothing tells: text, but for what plainly is a number, true, false or null."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, str) or isinstance(value, _Quoted):
        return str(value) if isinstance(value, str) else value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        if re.fullmatch(r"[-+]?(\d+|\d*\.?\d+([eE][-+]?\d+)?|\d+\.)", value):
            with contextlib.suppress(ValueError):
                return kind(value)
    return str(value)


_KINDS = {int: "a whole number", float: "a finite number", str: "text"}


def _whole(value: str | int | float) -> bool:
    try:
        return float(value).is_integer()
    except (ValueError, OverflowError):
        return False


def _required(each: dataclasses.Field) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING


def _keys(cls: type) -> list[str]:
    """The fields that a config may give: not those that the program fills in `from` another key."""
    return [each.name for each in fields(cls) if each.init and "from" not in each.metadata]  # pyright: ignore[reportArgumentType]


def _names(cls: type) -> str:
    return ", ".join(_keys(cls))


def _suggestion(cls: type, key: str, where: str) -> str:
    """Where below this section the key is at home, or the nearest key, or all keys."""
    filled = {each.name: each.metadata["from"] for each in fields(cls) if "from" in each.metadata}  # pyright: ignore[reportArgumentType]
    if key in filled:
        return f"the run's {filled[key]} is used, set that"
    prefix = f"{where}." if where else ""
    below = {path: path.rsplit(".", 1)[-1] for path in _paths(cls)}
    meant = [path for path, name in below.items() if name == key]
    if not meant:
        meant = difflib.get_close_matches(key, _keys(cls), n=1)
    if not meant:
        near = difflib.get_close_matches(key, below.values(), n=1)
        meant = [path for path, name in below.items() if name in near]
    if not meant:
        return f"known are {_names(cls)}"
    return f"did you mean {' or '.join(prefix + path for path in meant)}?"


def _paths(cls: type, prefix: str = "") -> list[str]:
    found, hints = [], typing.get_type_hints(cls)
    for name in _keys(cls):
        kind = hints[name]
        found += _paths(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [f"{prefix}{name}"]  # pyright: ignore[reportArgumentType]
    return found


def _shown(value: object) -> str:
    text = " ".join(_flow(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flow(value: object) -> str:
    """A parsed value as a line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return "null" if value is None else str(value)
