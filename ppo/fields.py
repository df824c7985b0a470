"""Fields of configuration classes: a default, the allowed values, and the condition for having an effect."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

MOST = 2**31 - 1  # default maximum of an integer field, because sizes and steps are int32 in programs
LONGEST = 1e9  # seconds (about thirty years); operating systems cannot wait much longer


def checked(default: Any = MISSING, holds: Callable[[Any], bool] | None = None, expected: str = "", **more: Any) -> Any:
    """Returns a dataclass field whose value must satisfy `holds`, or is None where the type allows it.

    more: further metadata, such as `most` (the largest value), `bounds` (as JSON Schema names them), or
        `**only_if(...)`.
    """
    return field(default=default, metadata={"holds": holds, "expected": expected, **more})


def only_if(holds: Callable[[Any], object], reason: str) -> dict[str, Any]:
    """Returns metadata of a field that has an effect only if its section satisfies `holds`.

    reason: names why the field has no effect; `{path}` stands for the section's path, `{section}` for the section.
    """
    return {"only_if": (holds, reason)}


def count(default: int | None, expected: str = "at least 1", *, least: int = 1, **more: Any) -> Any:
    def holds(value: Any) -> bool:
        return hasattr(value, "__index__") and value >= least  # an integer of Python's or NumPy's

    return checked(default, holds, expected, bounds={"minimum": least}, **more)


def natural(default: int | None, expected: str = "at least 0", **more: Any) -> Any:
    return count(default, expected, least=0, **more)


def positive(default: float | None, expected: str = "above 0 and finite", **more: Any) -> Any:
    return checked(default, lambda value: 0 < value < math.inf, expected, bounds={"exclusiveMinimum": 0}, **more)


def non_negative(default: float | None, **more: Any) -> Any:
    expected = "at least 0 and finite"
    return checked(default, lambda value: 0 <= value < math.inf, expected, bounds={"minimum": 0}, **more)


def between(default: float | None, low: float, high: float, expected: str = "", **more: Any) -> Any:
    expected, bounds = expected or f"from {low:g} to {high:g}", {"minimum": low, "maximum": high}
    return checked(default, lambda value: low <= value <= high, expected, bounds=bounds, **more)


class Section:
    """Base class of dataclasses that check their fields when they are created.

    A subclass that gives a field another default keeps the field's rules of its base class.

    Raises:
        ValueError: a value that its field does not allow, as `name=value: it must be ...`.
    """

    def __post_init__(self) -> None:
        for name, rules in rules_of(type(self)).items():
            value = getattr(self, name)
            if value is None and rules["optional"]:
                continue
            choices = rules["choices"]
            if value in choices:
                continue
            if choices and not rules.get("holds"):
                self.refuse(name, f"one of {', '.join(choices)}" + ", or null" * rules["optional"])
            if rules.get("holds") and not rules["holds"](value):
                self.refuse(name, " or ".join([rules["expected"], *choices]))
            if rules["most"] is not None and not value <= rules["most"]:  # NaN is not
                self.refuse(name, f"at most {rules['most']:.10g}")

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises ValueError: the value of this field must be as `expected`."""
        raise ValueError(f"{name}={getattr(self, name)!r}: it must be {expected}")


@cache
def rules_of(cls: type[Section]) -> dict[str, dict[str, Any]]:
    """Returns field -> its metadata, also from base classes, its choices, and whether it may be None."""
    rules: dict[str, dict[str, Any]] = {}
    for base in reversed(cls.__mro__):
        for item in base.__dict__.get("__dataclass_fields__", {}).values():
            rules.setdefault(item.name, {}).update(item.metadata)
    for name, kind in get_type_hints(cls).items():
        if name in rules:
            literal = next((option for option in (kind, *get_args(kind)) if get_origin(option) is Literal), None)
            is_tuple = get_origin(kind) is tuple  # its items are checked by the parser
            rules[name] |= {
                "choices": () if literal is None or is_tuple else get_args(literal),
                "optional": type(None) in get_args(kind),
                "most": rules[name].get("most", MOST if int in (kind, *get_args(kind)) and not is_tuple else None),
            }
    return rules


def default_of(cls: Any, name: str) -> Any:
    """The default value of a field."""
    item = cls.__dataclass_fields__[name]
    return item.default if item.default_factory is MISSING else item.default_factory()


def without_effect(section: Any, path: str = "") -> Iterator[tuple[str, object, str]]:
    """Yields (key, value, reason) of every setting that has no effect with the others of its section."""
    rules = rules_of(type(section))
    for item in fields(section):
        value, key = getattr(section, item.name), f"{path}.{item.name}".lstrip(".")
        if "only_if" in rules[item.name] and value != default_of(type(section), item.name):
            holds, reason = rules[item.name]["only_if"]
            if not holds(section):
                yield key, value, reason.format(path=path, section=section)
        inner = {key: value}
        if isinstance(value, Mapping):
            inner = value  # the stages' sections, which are at the top level
        elif isinstance(value, tuple):
            inner = {f"{key}[{index}]": entry for index, entry in enumerate(value)}
        for name, entry in inner.items():
            if hasattr(entry, "__dataclass_fields__"):
                yield from without_effect(entry, name)
