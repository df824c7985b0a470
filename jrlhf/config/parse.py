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
from dataclasses import Field, fields, is_dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml

from jrlhf.config.keys import as_line, classes_of, joined, kinds_of, named_field, paths_of
from jrlhf.config.suggest import UnknownKey, suggestion
from jrlhf.errors import UserError
from jrlhf.ppo.fields import Section, default_of

T = TypeVar("T")
_LARGEST = 1 << 20  # maximum number of characters of YAML, whose parser is slow


class Feature(Section):
    """A section that a config has only if its feature is used; see `in_use`."""

    SWITCHES: ClassVar[tuple[str, ...]]  # the fields that turn the feature on
    OFF: ClassVar[str]  # how messages name a config without the feature; {path} stands for the section's key

    @property
    def on(self) -> bool:
        return any(key in self.SWITCHES for key, _ in changed(self))


class _Quoted(str):
    """A quoted scalar, which is never null."""


class Override(str):
    """The right side of `key=value`: text for a text field, YAML for other fields."""


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
        hint = ", indent with spaces instead" if "'\\t'" in problem else ""
        raise UserError(f"{position}: not valid YAML: {problem}{hint}") from error
    except RecursionError as error:
        raise UserError(f"{source}: not a config: nested too deeply") from error


def override(mapping: dict[str, Any], assignment: str) -> None:
    """Sets `key=value` in a parsed mapping, in place. Dots in the key separate sections."""
    key, equals, value = assignment.lstrip("-").partition("=")
    if not equals or not all(key.strip().split(".")):
        raise UserError(f"override {assignment!r} is not understood: write key=value, for example seed=1")
    section, name = section_with(mapping, key.strip(), f"override {assignment!r}")
    put(section, name, Override(value.strip()))


def put(section: dict[str, Any], name: str, value: object) -> None:
    """Sets a key of a parsed mapping. Null removes the section of a dataflow, which without it names no stage."""
    before = section.get(name)
    if isinstance(before, dict) and "dataflow" in before and parsed(value, name) is None:
        del section[name]
    else:
        section[name] = value


def section_with(mapping: dict[str, Any], key: str, called: str) -> tuple[dict[str, Any], str]:
    """Returns the section of a parsed mapping for a dotted key, and the key in it. Adds missing sections.

    The parts of a list are numbered from 0, as in rewards.0.weight or rewards[0].weight. called: the setting's name in
    messages.
    """
    parts = re.sub(r"\[(\w+)\]", r".\1", key).split(".")
    *sections, name = parts
    inner: Any = mapping
    for depth, part in enumerate(sections, start=1):
        path = ".".join(sections[:depth])
        at: Any = int(part) if isinstance(inner, list) and part.isdigit() else part
        if isinstance(inner, list) and at not in range(len(inner)):
            raise UserError(f"{called}: {_parts_of(path.rpartition('.')[0], len(inner))}")
        value = parsed(inner[at] if isinstance(inner, list) else inner.get(at), path)
        if sections[:depth] == ["roles", part] and isinstance(value, str):  # a path stands for its section
            value = {"path": value}
        inner[at] = ([] if parts[depth].isdigit() else {}) if value is None else value
        inner = inner[at]
        if not isinstance(inner, dict | list):
            raise UserError(f"{called}: {path}={_shown(inner)} is no section, it has no {name}")
    if isinstance(inner, list):
        raise UserError(f"{called}: {_parts_of('.'.join(sections), len(inner))}")
    return inner, name


def _parts_of(path: str, count: int) -> str:
    return (
        f"{path} is a list of {count} part(s), numbered from 0: name a key of one, as in {path}.0.weight=2, or give "
        f"all of it, {path}=[...]"
    )


def _one_text(kind: Any, value: object, path: str) -> object:
    """Returns a parsed value; one text in place of a list of texts as a list of one. A shell removes quotes, so what
    then looks like a comment is text."""
    given = parsed(value, path)
    if get_origin(kind) is not tuple or get_args(kind)[0] is not str:
        return given
    if isinstance(value, Override) and not isinstance(given, _Quoted | list | tuple):
        given = str(value) if isinstance(given, str) or value.startswith("#") else given
    return [given] if isinstance(given, str) else given


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
        named = named_field(type(value))
        values = own if named is None else own | own[named.name]
        mapping, kinds = {}, kinds_of(type(value))
        for name, kind in kinds.items():
            is_tag = get_origin(kind) is Literal and len(get_args(kind)) == 1
            if not (defaults or is_tag) and name in own and own[name] == default_of(type(value), name):
                continue
            absent = classes_of(kind) and values.get(name) is None
            if name in values and (off or not absent):
                mapping[name] = plain(classes_of(kind)[0]() if absent else values[name])
        others = {} if named is None else {name: plain(x) for name, x in own[named.name].items() if name not in kinds}
        return mapping | others

    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, width=1000)


def build(cls: type[T], mapping: object, path: str = "") -> T:
    """Builds a dataclass from nested dicts. Values are converted by the types of fields; absent keys get defaults.

    Values may be text, as `parse_yaml` returns it, or Python values. path: the dotted key of `mapping`.

    Raises UserError for unknown keys and bad values.
    """
    try:
        return _build(cls, mapping, path)
    except UnknownKey as error:
        raise UserError(f"{error} is not a known key: {suggestion(error, cls, mapping)}") from error


def _build(cls: type[T], mapping: object, path: str) -> T:
    mapping, own = {} if mapping is None else mapping, kinds_of(cls)
    if not isinstance(mapping, Mapping):
        keys, listed = ", ".join(own), path.partition("[")[0]
        written = f"{path}.KEY=VALUE" if listed == path else f"{listed}=[{{KEY: VALUE}}]"
        alone = f"{path}.{keys}={_shown(mapping)}" if len(own) == 1 else f"{written} for one of {keys}"
        raise UserError(f"{path}={_shown(mapping)}: it is a section, write {alone}")
    values, kinds = dict[str, Any](), kinds_of(cls, mapping)
    items = {item.name: item for item in fields(cls) if item.name in own}  # pyright: ignore[reportArgumentType]
    for key, value in mapping.items():
        if key not in kinds:
            if "." in (parts := str(key)) and parts in paths_of(cls):
                nested = reduce(lambda inner, part: {part: inner}, reversed(parts.split(".")), value)
                raise UserError(f"{joined(path, key)}: dots in keys are not read here, write {_shown(nested)}")
            raise UnknownKey(cls, path, str(key), value)
        if key in items:
            written, value = _unfolded(items[key], value, joined(path, key))
            values[key] = convert(kinds[key], value, written)
        elif not (isinstance(value, Override) and parsed(value, str(key)) is None):  # null removes it
            values[str(key)] = convert(kinds[key], value, joined(path, key))
    if (named := named_field(cls)) is not None:
        sections = {key: values.pop(key) for key in [*values] if key not in items}
        values[named.name] = sections
    try:
        return cls(**values)
    except ValueError as error:
        names_a_key = re.match(r"\w+=", str(error))
        raise UserError(joined(path, str(error)) if names_a_key else f"{path}: {error}".lstrip(": ")) from error


def _unfolded(item: Field[Any], value: object, path: str) -> tuple[str, object]:
    """Returns the dotted key and the value of a setting that may also be written as a section with this one key."""
    section = item.metadata.get("section")
    if section is None or not isinstance(given := parsed(value, path), Mapping):
        return path, value
    (only,) = kinds_of(section)
    for key in given:
        if key != only:
            raise UnknownKey(section, path, str(key), given[key])
    return joined(path, only), given.get(only)


def convert(kind: Any, value: object, path: str) -> Any:
    """Converts `value` to `kind`: bool, int, float, str, Literal, X | None, tuple[X, ...], Mapping or dataclasses."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is str and isinstance(value, str) and not _is_text(value):
        raise UserError(f"{path}={value!r}: it must be text, without NUL and halves of surrogate pairs")
    if origin in (Union, types.UnionType):
        return _convert_union([member for member in inner if member is not type(None)], value, path)
    if kind is str and isinstance(value, Override):
        return str(value)
    was_set, value = isinstance(value, Override), _one_text(kind, value, path)
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
        choices = get_args(inner[0]) if get_origin(inner[0]) is Literal else ()
        no_member = choices and value not in choices
        expected = f"a list of {', '.join(choices)}" if no_member else f"a list, write {as_line([value])}"
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
    """Converts to `X | None`, a number or a word, a section or a list of such, or a section chosen by the Literal of
    its first field."""
    given = parsed(value, path)
    lists = [kind for kind in kinds if get_origin(kind) is tuple]
    if lists and len(kinds) > 1:
        if isinstance(given, list | tuple):
            return convert(lists[0], given, path)
        kinds = [kind for kind in kinds if kind not in lists]
    if kinds[0] in (int, float):
        words = [word for kind in kinds[1:] for word in get_args(kind)]
        if given in words:
            return given
        if words and given is not None and not math.isfinite(_number(given)):
            number = "a whole number" if kinds[0] is int else "a finite number"
            raise UserError(f"{path}={_shown(given)}: it must be {number} or {' or '.join(words)}")
        kinds = kinds[:1]
    if len(kinds) > 1:
        return convert(kinds[0], value, path) if given is None else _convert_tagged(kinds, given, path)
    if given is None:
        return None
    if isinstance(given, Mapping) and isinstance(kinds[0], type) and issubclass(kinds[0], Feature):
        overrides = {key: inner for key, inner in given.items() if isinstance(inner, Override)}
        switches = {key: given[key] for key in kinds[0].SWITCHES if key in given}
        if switches.keys() & overrides.keys() and not convert(kinds[0], switches, path).on:
            value = overrides  # they switch it off, so the file's settings do not count
    return in_use(convert(kinds[0], value, path), path)


def in_use(value: Any, path: str) -> Any:
    """Returns a setting, or None for a feature that is off. Refuses changed settings of a feature that is off."""
    if not isinstance(value, Feature) or value.on:
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


def _shown(value: object) -> str:
    text = " ".join(as_line(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
