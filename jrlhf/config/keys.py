"""The keys of sections: their types, and the dotted keys of all settings below a section."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml


def classes_of(kind: Any) -> list[Any]:
    """Returns the section classes among the types that `kind` allows."""
    return [one for one in (kind, *get_args(kind)) if is_dataclass(one) and get_origin(kind) is not tuple]


def kinds_of(cls: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns key -> type for the keys of a config, without fields that are filled `from` other settings.

    given: a config, for also the sections whose keys the user names in it.
    """
    kinds, hints = {}, get_type_hints(cls)
    for item in fields(cls):
        if not {"from", "named"} & item.metadata.keys():
            kinds[item.name] = hints[item.name]
        kinds |= item.metadata.get("table", {})
    if given is not None and (named := named_field(cls)) is not None:
        section, is_name = named.metadata["named"]
        kinds |= {key: section for key in given if key not in kinds and is_name(key, given)}
    return kinds


def named_field(cls: Any) -> Any:
    """Returns the field with the sections whose keys the user names, or None.

    Its `metadata["named"]` is their class, and a function of a key and of the config that contains it: True for a name.
    """
    return next((item for item in fields(cls) if "named" in item.metadata), None)


def paths_of(cls: Any, given: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the dotted keys of all settings below a section. given: as in `kinds_of`."""
    keys = []
    for name, kind in kinds_of(cls, given).items():
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
