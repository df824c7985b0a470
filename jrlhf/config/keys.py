"""The keys of sections: their types, and the dotted keys of all settings below a section."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml


def classes_of(kind: Any) -> list[Any]:
    """Returns the section classes among the types that `kind` allows."""
    return [one for one in (kind, *get_args(kind)) if is_dataclass(one) and get_origin(kind) is not tuple]


def kinds_of(cls: Any) -> dict[str, Any]:
    """Returns key -> type for the keys of a config, without fields that are filled `from` other settings, or with keys
    that the user names."""
    kinds, hints = {}, get_type_hints(cls)
    for item in fields(cls):
        if not {"from", "named"} & item.metadata.keys():
            kinds |= item.metadata.get("table") or {item.name: hints[item.name]}
    return kinds


def named_field(cls: Any) -> Any:
    """Returns the field with the sections whose keys the user names, of the class `metadata["named"]`; or None."""
    return next((item for item in fields(cls) if "named" in item.metadata), None)


def paths_of(cls: Any) -> list[str]:
    """Returns the dotted keys of all settings below a section."""
    keys = []
    for name, kind in kinds_of(cls).items():
        inner = [f"{name}.{path}" for section in classes_of(kind) for path in paths_of(section)]
        keys += inner or [name]
    return list(dict.fromkeys(keys))


def joined(path: str, key: object) -> str:
    """Returns the dotted key of a section's key. path: that of the section; empty for the whole config."""
    return f"{path}.{key}" if path else str(key)


def flatten(mapping: object, prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> value as text for a parsed config. A list counts as one value."""
    if not isinstance(mapping, dict):
        return {prefix: as_line(mapping)}
    merged = {}
    for key, value in mapping.items():
        merged |= flatten(value, joined(prefix, key))
    return merged


def as_line(value: object) -> str:
    """Returns a parsed value as a line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_part(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_part, value)) + "]"
    return "null" if value is None else str(value)


def _part(value: object) -> str:
    """Returns a part of a list or a mapping, with quotes if YAML would read a text as something else without them."""
    if not isinstance(value, str):
        return as_line(value)
    try:
        is_plain = yaml.load(f"[{value}]", yaml.BaseLoader) == [value] and value not in ("~", "null", "Null", "NULL")
    except yaml.YAMLError:
        is_plain = False
    return str(value) if is_plain else json.dumps(value)
