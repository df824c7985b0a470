"""The JSON Schema of a config file, by which editors complete and check it, read from the classes of the config.

    python -m tools.config_schema > configs/schema.json

It has every key, type, choice and description, and the bounds of most numbers. What settings demand of each other, only
the program itself checks. Old names of keys, which it still reads, are not in the schema.
"""

import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from jrlhf.config import Config
from jrlhf.config.descriptions import descriptions, summary
from jrlhf.config.keys import kinds_of, named_field
from jrlhf.config.stages import STAGES
from jrlhf.ppo.fields import default_of, rules_of

Schema = dict[str, Any]
_TEXT = ["string", "number", "boolean"]  # a text may look like a number
# What the reader takes in quotes, too. YAML 1.1 takes some numbers, such as 3e-4, for text.
_QUOTED = {
    int: r"^[-+]?\d+(_\d+)*$",
    float: r"^[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?$",
    bool: "^([Tt]rue|TRUE|[Ff]alse|FALSE)$",
}


def config_schema() -> str:
    """Returns the schema (draft 7), a line for every setting."""
    definitions: dict[str, Schema] = {}
    root = _section(Config, definitions)
    # A config whose sections all are jrlhf's has no stage but jrlhf's; an editor marks a misspelt one, and lists these.
    known = {"stages": {"type": ["array", "string"], "items": {"enum": [*STAGES]}}}
    usual = {"if": {"propertyNames": {"enum": [*kinds_of(Config)]}}, "then": {"properties": known}}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "The config of a run of jrlhf"}
    return _printed({**head, **root, **usual, "definitions": definitions})


def _section(cls: Any, definitions: dict[str, Schema]) -> Schema:
    texts, rules, properties = descriptions(cls), rules_of(cls), {}
    for name, kind in kinds_of(cls).items():
        setting = {"description": texts[name]} if texts.get(name) else {}
        setting |= _value(kind, rules.get(name, {}), definitions)
        if name in rules and not is_dataclass(default := default_of(cls, name)):
            setting["default"] = default
        properties[name] = setting
    about = {"description": text} if (text := summary(cls)) else {}
    named = named_field(cls)
    others = False if named is None else _named(named.metadata["named"][0], definitions)
    return {**about, "type": ["object", "null"], "additionalProperties": others, "properties": properties}


def _named(cls: Any, definitions: dict[str, Schema]) -> Schema:
    """Returns the schema of a section whose key the user names; it has a key that misspelt sections do not have."""
    needed = "dataflow" if cls in STAGES.values() else "path"
    return {"type": "object", "required": [needed], "allOf": [_reference(cls, definitions)]}


def _value(kind: Any, rules: Mapping[str, Any], definitions: dict[str, Schema]) -> Schema:
    """Returns the schema of the values that `parse.convert` reads as a `kind`, within the bounds of `rules`."""
    origin, inner = get_origin(kind), get_args(kind)
    if "section" in rules:  # a text, or a section with this text
        section = _reference(rules["section"], definitions)
        return {"anyOf": [_value(kind, {}, definitions), section]}
    if origin in (Union, types.UnionType):
        options = [option for option in inner if option is not type(None)]
        lists = [option for option in options if get_origin(option) is tuple]
        if lists and len(options) > 1:  # a section, or a list of such
            return {"anyOf": [_value(option, rules, definitions) for option in options]}
        if len(options) > 1 and is_dataclass(options[0]):
            return _tagged(options, definitions)
        if len(options) > 1:  # a number or a word
            number, word = (_value(option, rules, definitions) for option in options)
            return {"anyOf": [number, {"enum": [*word["enum"], None]}]}
        value = _value(options[0], rules, definitions)
        if "enum" in value:
            value["enum"].append(None)
        elif "type" in value:
            value["type"] = [*([value["type"]] if isinstance(value["type"], str) else value["type"]), "null"]
        return value
    if is_dataclass(kind):
        return _reference(kind, definitions)
    if origin is Literal:
        return {"enum": [*inner]}
    if origin is tuple:
        size = {} if inner[-1] is Ellipsis else {"minItems": len(inner), "maxItems": len(inner)}
        listed = {"type": "array", "items": _value(inner[0], {}, definitions), **size}
        return {"anyOf": [listed, {"type": "string"}]} if inner[0] is str else listed  # one text: a list of one
    if origin is Mapping:
        return {"type": "object"}
    if kind in _QUOTED:
        most = {} if rules.get("most") is None else {"maximum": rules["most"]}
        name = {int: "integer", float: "number", bool: "boolean"}[kind]
        return {"type": [name, "string"], "pattern": _QUOTED[kind], **most, **rules.get("bounds", {})}
    return {"type": _TEXT}


def _reference(cls: Any, definitions: dict[str, Schema]) -> Schema:
    name = next((stage for stage, section in STAGES.items() if section is cls), cls.__name__)
    if name not in definitions:
        definitions[name] = {}  # its place
        definitions[name] = _section(cls, definitions)
    return {"$ref": f"#/definitions/{name}"}


def _tagged(kinds: list[Any], definitions: dict[str, Schema]) -> Schema:
    """Returns the schema of sections that differ in the value of their first key; without it, of the first one."""
    tag = fields(kinds[0])[0].name
    first, *others = kinds
    schema = _reference(first, definitions)
    for kind in others:
        chosen = {"required": [tag], "properties": {tag: {"const": default_of(kind, tag)}}}
        schema = {"if": chosen, "then": _reference(kind, definitions), "else": schema}
    tags = {tag: {"enum": [default_of(kind, tag) for kind in kinds]}}
    return {"type": ["object", "null"], "properties": tags, **schema}


def _printed(schema: object, indent: str = "") -> str:
    """Returns JSON of which a setting is a line."""
    if not isinstance(schema, dict) or not any(isinstance(value, dict) for value in schema.values()):
        return json.dumps(schema, ensure_ascii=False)
    rows = [f"{indent} {json.dumps(key)}: {_printed(value, indent + ' ')}" for key, value in schema.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


if __name__ == "__main__":
    print(config_schema())
