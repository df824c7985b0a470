"""Parses YAML and `key=value` overrides to frozen dataclasses. An error is one sentence with key, value and remedy.

Every value in a file is text until it is converted to the type of its field, so YAML's surprises (`1e-5` is a string,
`on` a bool, `010` eight) do not occur. This is also why no library converts the values: msgspec refuses unions of
dataclasses, and with cattrs the hooks for these rules and sentences are longer than this module.
"""

import contextlib
import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from jrlhf.config.peers import IN_OTHER_STAGES, PEERS
from jrlhf.errors import UserError
from jrlhf.ppo.fields import Section, default_of

T = TypeVar("T")
_LARGEST = 1 << 20  # maximum number of characters of YAML, whose parser is slow


class Feature(Section):
    """A section that a config has only if its feature is used; see `in_use`."""

    SWITCHES: ClassVar[tuple[str, ...]]  # the fields that turn the feature on
    OFF: ClassVar[str]  # how messages name a config without the feature; {path} stands for the section's key


class _Quoted(str):
    """A quoted scalar, which is never null."""


class Override(str):
    """The right side of `key=value`: text for a text field, YAML for other fields."""


class _UnknownKey(Exception):
    """A section does not have a key (an `_Unknown`). `build` of the whole config knows where else it is."""


class _Unknown(NamedTuple):
    cls: Any  # the section
    path: str
    key: str
    value: object


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not read, write the value out", problem_mark=mark)
        if tag := getattr(self.peek_event(), "tag", None):
            mark, problem = self.peek_event().start_mark, f"tags ({tag}) are not read, write a plain value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)


def parse_yaml(text: str, source: str) -> object:
    """Returns YAML as nested dicts and lists whose scalars are text, or None for null. Tags and aliases are refused."""

    def plain(node: yaml.Node) -> object:
        if isinstance(node, yaml.ScalarNode):
            if node.style in ("'", '"', "|", ">"):
                return _Quoted(node.value)
            return None if node.value in ("", "~", "null", "Null", "NULL") else node.value
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        mapping = {}
        for key, value in node.value:
            line = f"{source}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{line}: a key must be a word")
            if key.value in mapping:
                raise UserError(f"{line}: {key.value} is given twice, keep one")
            mapping[key.value] = plain(value)
        return mapping

    if len(text) > _LARGEST:
        raise UserError(f"{source}: not a config: it has {len(text)} characters, at most {_LARGEST} are read")
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else plain(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = source if mark is None else f"{source}, line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise UserError(f"{position}: not valid YAML: {problem}") from error
    except RecursionError as error:
        raise UserError(f"{source}: not a config: nested too deeply") from error


def flatten(mapping: object, prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> value as text for a parsed config. A list counts as one value."""
    if not isinstance(mapping, dict):
        return {prefix: _flow(mapping)}
    merged = {}
    for key, value in mapping.items():
        merged |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return merged


def override(mapping: dict[str, Any], assignment: str) -> None:
    """Sets `key=value` in a parsed mapping, in place. Dots in the key separate sections."""
    key, equals, value = assignment.lstrip("-").partition("=")
    if not equals or not all(key.strip().split(".")):
        raise UserError(f"override {assignment!r} is not understood: write key=value, for example seed=1")
    if item := re.match(r"(rewards|costs)[.[]", key):
        raise UserError(f"override {assignment!r} names a part of a list: give all of it, {item[1]}=[...]")
    section, name = section_with(mapping, key.strip(), f"override {assignment!r}")
    section[name] = Override(value.strip())


def section_with(mapping: dict[str, Any], key: str, called: str) -> tuple[dict[str, Any], str]:
    """Returns the section of a parsed mapping for a dotted key, and the key in it. Adds missing sections.

    called: the setting's name in messages.
    """
    *sections, name = key.split(".")
    for depth, part in enumerate(sections, start=1):
        mapping = section_in(mapping, part)
        if not isinstance(mapping, dict):
            path = ".".join(sections[:depth])
            raise UserError(f"{called}: {path}={_shown(mapping)} is no section, it has no {name}")
    return mapping, name


def section_in(mapping: dict[str, Any], name: str) -> Any:
    """Returns the value of a key in a parsed mapping; adds an empty section if there is none."""
    value = parsed(mapping.get(name), name)
    mapping[name] = {} if value is None else value
    return mapping[name]


def parsed(value: object, path: str) -> object:
    return parse_yaml(value, path) if isinstance(value, Override) else value


def config_yaml(config: object, *, off: bool = False, defaults: bool = True) -> str:
    """Returns a config dataclass as YAML, from which `build` makes an equal one.

    off: also write sections of features that are off, with their defaults. defaults: also write settings that have
    their default value.
    """

    def plain(value: Any) -> Any:
        if not is_dataclass(value):
            return [plain(item) for item in value] if isinstance(value, tuple) else value
        own = {item.name: getattr(value, item.name) for item in fields(value)}
        tables = [own[item.name] for item in fields(value) if "table" in item.metadata]  # key -> section
        values, mapping = {key: section for part in (own, *tables) for key, section in part.items()}, {}
        for name, kind in kinds_of(type(value)).items():
            is_tag = get_origin(kind) is Literal and len(get_args(kind)) == 1
            if not (defaults or is_tag) and name in own and own[name] == default_of(type(value), name):
                continue
            absent = classes_of(kind) and values.get(name) is None
            if name in values and (off or not absent):
                mapping[name] = plain(classes_of(kind)[0]() if absent else values[name])
        return mapping

    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, width=1000)


def build(cls: type[T], mapping: object, path: str = "") -> T:
    """Builds a dataclass from nested dicts. Values are converted by the types of fields; absent keys get defaults.

    Values may be text, as `parse_yaml` returns it, or Python values. path: the dotted key of `mapping`.
    """
    try:
        return _build(cls, mapping, path)
    except _UnknownKey as error:
        unknown: _Unknown = error.args[0]
        written = _joined(unknown.path, unknown.key)
        raise UserError(f"{written} is not a known key: {_suggestion(unknown, cls, mapping)}") from error


def _build(cls: type[T], mapping: object, path: str) -> T:
    mapping, kinds = {} if mapping is None else mapping, kinds_of(cls)
    if not isinstance(mapping, Mapping):
        keys = ", ".join(kinds)
        raise UserError(f"{path}={_shown(mapping)}: it is a section, write {path}.KEY=VALUE for one of {keys}")
    mapping, derived = cls.prepare(mapping) if hasattr(cls, "prepare") else (mapping, {})  # pyright: ignore
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in kinds:
            if "." in (parts := str(key)) and parts in _paths(cls):
                nested = reduce(lambda inner, part: {part: inner}, reversed(parts.split(".")), value)
                raise UserError(f"{_joined(path, key)}: dots in keys are not read here, write {_shown(nested)}")
            raise _UnknownKey(_Unknown(cls, path, str(key), value))
        values[key] = convert(kinds[key], value, _joined(path, key))
    for item in fields(cls):  # pyright: ignore[reportArgumentType]
        if "table" in item.metadata:
            values[item.name] = {key: values.pop(key) for key in item.metadata["table"] if key in values}
    try:
        return cls(**values, **derived)
    except ValueError as error:
        names_a_key = re.match(r"\w+=", str(error))
        raise UserError(_joined(path, str(error)) if names_a_key else f"{path}: {error}".lstrip(": ")) from error


def convert(kind: Any, value: object, path: str) -> Any:
    """Converts `value` to `kind`: bool, int, float, str, Literal, X | None, tuple[X, ...], Mapping or dataclasses."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is str and isinstance(value, str) and not _is_text(value):
        raise UserError(f"{path}={value!r}: it must be text, without NUL and halves of surrogate pairs")
    if origin in (Union, types.UnionType):
        return _convert_union([member for member in inner if member is not type(None)], value, path)
    if kind is str and isinstance(value, Override):
        return str(value)
    was_set, value = isinstance(value, Override), parsed(value, path)
    if is_dataclass(kind) and not (was_set and value is None):  # on a command line, null removes a file's section
        return _build(kind, value, path)  # pyright: ignore[reportArgumentType]
    if value is None:
        raise UserError(f"{path} has no value: give it one, or leave the key out for its default")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(inner[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return _untyped(value)
    if origin is Literal and value in inner:
        return str(value)
    if kind is str and isinstance(value, str):
        return str(value)
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    number = _number(value) if kind in (int, float) else math.nan
    if math.isfinite(number) and (kind is float or number.is_integer()):
        with contextlib.suppress(ValueError):  # raised by int("1e3")
            return kind(value)  # pyright: ignore  # a number, or text that float() accepts
    if origin is tuple:
        expected = f"a list, write [{_shown(value)}]"
    elif origin is Mapping:
        expected = "a mapping, write {key: value}"
    elif origin is Literal:
        close = difflib.get_close_matches(str(value).lower(), inner, n=1)
        expected = f"one of {', '.join(inner)}" + (f", did you mean {close[0]}" if close else "")
    elif kind is int:
        expected = "a whole number" + (f", write {int(number)}" if abs(number) < 1e15 and number.is_integer() else "")
    else:
        expected = {bool: "true or false", float: "a finite number", str: "text"}[kind]
    raise UserError(f"{path}={_shown(value)}: it must be {expected}")


def _convert_union(kinds: list[Any], value: object, path: str) -> Any:
    """Converts to `X | None`, a number or a word, or a section chosen by the Literal of its first field."""
    given = parsed(value, path)
    if kinds[0] is int:
        words = [word for kind in kinds[1:] for word in get_args(kind)]
        if given in words:
            return given
        if words and given is not None and not math.isfinite(_number(given)):
            raise UserError(f"{path}={_shown(given)}: it must be a whole number or {' or '.join(words)}")
        kinds = kinds[:1]
    if len(kinds) > 1:
        return convert(kinds[0], value, path) if given is None else _convert_tagged(kinds, given, path)
    if given is None:
        return None
    return in_use(convert(kinds[0], value, path), path)


def in_use(value: Any, path: str) -> Any:
    """Returns a setting, or None for a feature that is off. Refuses changed settings of a feature that is off."""
    if not isinstance(value, Feature) or any(key in value.SWITCHES for key, _ in changed(value)):
        return value
    for key, setting in changed(value):
        raise UserError(f"{path}.{key}={setting} has no effect with {value.OFF.format(path=path)}: leave it out")
    return None


def _convert_tagged(kinds: list[Any], value: object, path: str) -> Any:
    tag = fields(kinds[0])[0].name
    members = {default_of(kind, tag): kind for kind in kinds}
    if value is not None and not isinstance(value, Mapping):
        return _build(kinds[0], value, path)
    given = dict(value or {})
    chosen = convert(Literal[tuple(members)], given.get(tag, next(iter(members))), f"{path}.{tag}")
    for key in [key for key in given if key not in kinds_of(members[chosen])]:
        other = next((kind for kind in kinds if key in kinds_of(kind)), None)
        if other is not None:  # a key of another section is accepted if it has its default value there
            setting = convert(kinds_of(other)[key], given.pop(key), f"{path}.{key}")
            if setting != default_of(other, key):
                raise UserError(other.unread(f"{path}.{key}", setting, f"{path}.{tag}={chosen}"))
    return _build(members[chosen], given, path)


def changed(section: Any) -> Iterator[tuple[str, object]]:
    """Yields (key, value) of settings that differ from the defaults, in a section and its subsections."""
    for item in fields(section):
        value, default = getattr(section, item.name), default_of(type(section), item.name)
        if is_dataclass(value) and type(value) is type(default):
            yield from ((f"{item.name}.{key}", inner) for key, inner in changed(value))
        elif value != default:
            yield item.name, value


def _is_text(value: str) -> bool:
    """False for text that neither a path nor a file can contain."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _untyped(value: object) -> object:
    """Converts a value without a declared type: to text, unless it clearly is a number, true, false or null."""
    if isinstance(value, list):
        return [_untyped(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _untyped(item) for key, item in value.items()}
    if isinstance(value, _Quoted):
        return str(value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if re.fullmatch(r"[-+]?\d+", value):
        return int(value)
    return float(value) if re.fullmatch(r"[-+]?(\d*\.?\d+([eE][-+]?\d+)?|\d+\.)", value) else str(value)


def classes_of(kind: Any) -> list[Any]:
    """Returns the section classes among the types that `kind` allows."""
    return [one for one in (kind, *get_args(kind)) if is_dataclass(one) and get_origin(kind) is not tuple]


def kinds_of(cls: Any) -> dict[str, Any]:
    """Returns key -> type for the keys of a config, without fields that are filled `from` other settings."""
    kinds, hints = {}, get_type_hints(cls)
    for item in fields(cls):
        if "from" not in item.metadata:
            kinds |= item.metadata.get("table") or {item.name: hints[item.name]}
    return kinds


def _suggestion(unknown: _Unknown, root: Any, config: object) -> str:
    """Suggests a setting below the section that has the key, one elsewhere in the config, a similar key, or all keys.

    root: the class of the whole config. config: the whole config as it was given.
    """
    cls, path, key, value = unknown
    sources = {item.name: item.metadata["from"] for item in fields(cls) if "from" in item.metadata}
    if sources.get(key):
        return f"the run's {sources[key]} is used, set that"
    kinds, table = kinds_of(cls), {name for item in fields(root) for name in item.metadata.get("table", ())}
    top = re.split(r"[.[]", path)[0]
    used = {top} & table or (table & set(config) if isinstance(config, Mapping) else set()) or table
    leaves = {inner: inner.rsplit(".", 1)[-1] for inner in _paths(root) if inner.split(".")[0] not in table - used}
    below = leaves if cls is root else {inner: inner.rsplit(".", 1)[-1] for inner in _paths(cls)}
    of_stages = {name for inner, name in leaves.items() if inner.split(".")[0] in used}
    written = next(iter(flatten(value, key)), key)  # with the names of the sections inside
    leaf = written.rsplit(".", 1)[-1]
    word = leaf if leaf in PEERS else key
    peer = PEERS.get(re.sub(r"\[\d+\]", "", _joined(path, written)))
    peer = peer or (word if word in below.values() else PEERS.get(word, word))
    if table and (not path or top in table) and peer not in of_stages:
        peer = IN_OTHER_STAGES.get(peer, peer)
    if " " in peer:
        return peer

    def named(*names: str) -> str:
        return f"did you mean {' or '.join(_joined(path, name) for name in names)}?"

    if close := difflib.get_close_matches(key, kinds, n=1, cutoff=0.9):  # before a setting of this name further below
        return named(*close)
    if "." in written and (same := [inner for inner in below if inner.endswith(f".{written}")]):
        return named(*same)
    if same := [inner for inner, name in below.items() if peer in (inner, name)]:
        return named(*same)
    if path and peer == key in kinds_of(root):
        return f"did you mean {key}, at the top level?"
    apart = _joined(path, written).removeprefix(f"{top}.")
    owners = [stage for stage in kinds_of(root) if stage in table - used and apart in _paths(kinds_of(root)[stage])]
    if top in table and peer == key and owners:
        return f"it is a setting of {', '.join(owners)} only"
    elsewhere = [peer] if peer in leaves else [inner for inner, name in leaves.items() if name == peer]
    if not elsewhere and peer == key and key != leaf:  # a section that is not known, with a setting that is
        elsewhere = [inner for inner, name in leaves.items() if name == leaf]
    if peer != key:  # settings of stages first
        elsewhere = [inner for inner in elsewhere if inner.split(".")[0] in used] or elsewhere
    if 0 < len(elsewhere) <= 3:
        return f"did you mean {' or '.join(elsewhere)}?"
    if peer != key and word in PEERS:
        return f"did you mean {peer}?"
    is_section = isinstance(value, Mapping)
    alike = [name for name in kinds if classes_of(kinds[name])] if is_section else list(kinds)
    if close := difflib.get_close_matches(key, alike, n=1):
        return named(*close)
    if close := difflib.get_close_matches(key, [] if is_section else below.values(), n=1):
        return named(*(inner for inner, name in below.items() if name in close))
    more = "; a function's own arguments are written in options" if "options" in kinds else ""
    return f"known are {', '.join(kinds)}{more}"


def _paths(cls: Any) -> list[str]:
    """Returns the dotted keys of all settings below a section."""
    keys = []
    for name, kind in kinds_of(cls).items():
        inner = [f"{name}.{path}" for section in classes_of(kind) for path in _paths(section)]
        keys += inner or [name]
    return list(dict.fromkeys(keys))


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: object) -> str:
    text = " ".join(_flow(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flow(value: object) -> str:
    """Returns a parsed value as a line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return "null" if value is None else str(value)
