"""Reads values of a JSON object and checks their types; each error names the key."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def boolean(values: Json, key: str) -> bool:
    value = values[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} {value!r} must be true or false")
    return value


def integer(values: Json, key: str, below: int = 2**31) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} {value!r} must be an integer")
    if abs(value) >= below:
        raise ValueError(f"{key} {_digits(value)} is no size of a model")
    return value


def number(values: Json, key: str) -> float:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} {value!r} must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{key} {_digits(value)} is too large for a number") from error


def _digits(value: int | float) -> str:
    return text if len(text := str(value)) < 20 else f"{text[:10]}... ({len(text)} digits)"


def object_at(settings: Json, key: str, absent: Json | None = None) -> dict[str, Any]:
    """Returns the object at a key; a copy of `absent` if it is null, false or missing."""
    value = (absent or {}) if settings.get(key) in (None, False) else settings[key]
    if not isinstance(value, dict):
        raise ValueError(f"{key} {value!r} must be an object")
    return dict(value)


def is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """True if `value` is one of these as JSON, where 0 is not false and 1.0 is not 1."""
    return json.dumps(value) in map(json.dumps, allowed)


def refuse_others(settings: Json, neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuses values that are not neutral. neutral: key -> its values without an effect."""
    for key, allowed in neutral.items():
        if key in settings and not is_one_of(settings[key], allowed):
            wanted = " or ".join(map(json.dumps, allowed))
            raise ValueError(
                f"{key} {reprlib.repr(settings[key])} is not supported: choose a model with {key} {wanted}"
            )
