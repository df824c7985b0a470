"""configs/schema.json says of every setting what the reader of configs says."""

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import jsonschema
import pytest
import yaml

from jrlhf.config import Config, build, config_yaml
from jrlhf.config.keys import classes_of, kinds_of
from jrlhf.config.parse import Feature
from jrlhf.config.schema import DataConfig
from jrlhf.config.stages import STAGES
from jrlhf.errors import UserError
from jrlhf.ppo.fields import default_of, rules_of
from tools.config_schema import config_schema

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SCHEMA = jsonschema.Draft7Validator(json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8")))
Steps = tuple[str | int, ...]
# What a feature needs to be in use, by its first switch.
IN_USE = {
    "rank": 4,
    "optimizer": "host",
    "every": 5,
    "metric": "critic/score/mean",
    "project": "runs",
    "workers": 2,
    "iterations": [1],
    "stages": 2,
    "path": "a.jsonl",
    "url": "http://host/v1",
}


def settings(
    cls: Any = Config, path: Steps = (), above: tuple[Any, ...] = ()
) -> Iterator[tuple[Steps, Any, tuple[Any, ...]]]:
    """Yields the path, the type and the sections, from the outermost to its own, of every setting and section."""
    for name, kind in kinds_of(cls).items():
        here, classes = (*path, name), (*above, cls)
        yield here, kind, classes
        for section in classes_of(kind):
            yield from settings(section, here, classes)
        for listed in (one for one in (kind, *get_args(kind)) if get_origin(one) is tuple):
            if is_dataclass(item := get_args(listed)[0]):
                yield from settings(item, (*here, 0), (*classes, list))


def config_with(path: Steps, classes: tuple[Any, ...], value: object) -> dict[str, Any]:
    """Returns a config that gives the setting, and all that the reader asks for where it is given."""
    config: dict[str, Any] = {"stages": [path[0]]} if path[0] in STAGES else {}
    section: Any = config
    for index, cls in enumerate(classes):
        if cls is not list and issubclass(cls, Feature):
            section[cls.SWITCHES[0]] = IN_USE[cls.SWITCHES[0]]
        if cls is not list and issubclass(cls, DataConfig):
            section["source"] = default_of(cls, "source")
        if index + 1 < len(classes):
            inner = [] if classes[index + 1] is list else {}
            section.append(inner) if cls is list else section.update({path[index]: inner})
            section = inner
    section[path[-1]] = value
    return config


def understood(config: dict[str, Any]) -> bool:
    try:
        build(Config, config)
    except UserError:
        return False
    return True


def candidates(kind: Any, rules: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Returns values of a type, of which the reader takes some, and values of other types or beyond the bounds."""
    origin, inner, text, table = get_origin(kind), get_args(kind), "no-such-choice", {"no_such_key": 1}
    if origin in (Union, types.UnionType):
        (right, wrong), lists = candidates(inner[0], rules), [one for one in inner[1:] if get_origin(one) is tuple]
        right += [value for one in lists for value in candidates(one, {})[0]]
        return [*right, None], wrong
    if is_dataclass(kind):
        return [{}, None], [3, text, [1], table]
    if origin is Literal:
        return [*inner], [text, [text], table]
    if origin is tuple and inner[-1] is Ellipsis:
        right, wrong = candidates(inner[0], {})
        alone = ["word"] if inner[0] is str else []  # a list of one
        other = [] if alone else [text]
        return [[], *alone, *([value] for value in right if value)], [3, *other, table, *([value] for value in wrong)]
    if origin is tuple:
        return [[0.5, 2.0]], [3, text, table, [1.0], [1.0, text], [0.5, 1.0, 2.0]]
    if origin is Mapping:
        return [{"key": 1}, {}], [3, text, [1]]
    if kind is bool:
        return [True, False, "true"], [text, "1", 3, [True], table]
    if kind is str:
        return ["word", "host:1", "http://host/v1", "WORD", 7, True], [["word"], table]
    bounds, most = rules.get("bounds", {}), rules.get("most")
    most = bounds.get("maximum", most)
    beyond = [bounds["minimum"] - 1] if "minimum" in bounds else [bounds.get("exclusiveMinimum")]
    beyond += [] if most is None else [2 * most + 1]
    right = [1, 2, 0, "1", "1_0", *([0.5, 0.05, "3e-4", "1.", ".5"] if kind is float else [])]
    right += [] if most is None else [most]
    return right, [
        text,
        "nan",
        True,
        [1],
        table,
        *([1.5, "1.5"] if kind is int else []),
        *(one for one in beyond if one is not None),
    ]


def test_the_file_is_made_from_the_classes():
    jsonschema.Draft7Validator.check_schema(SCHEMA.schema)
    assert config_schema() + "\n" == (CONFIGS / "schema.json").read_text(encoding="utf-8")


def test_every_packaged_config_is_valid():
    files = sorted(CONFIGS.glob("*.yaml"))
    assert len(files) > 10
    for file in files:
        assert list(SCHEMA.iter_errors(yaml.safe_load(file.read_text(encoding="utf-8")))) == [], file


def test_every_default_is_valid():
    sources = [{"data": {"source": source}} for source in ("arithmetic", "datasets")]
    for config in ({"stages": ["sft"]} | more for more in [*sources, *({"stages": [stage]} for stage in STAGES)]):
        written = config_yaml(build(Config, config), off=True)
        assert list(SCHEMA.iter_errors(yaml.safe_load(written))) == [], config


@pytest.mark.full
def test_the_schema_takes_what_the_reader_takes_of_every_setting():
    """A value that the reader takes is valid, a wrong one is neither; each setting has values of both kinds."""
    every, seen = list(settings()), set()
    assert len(every) > 700
    for path, kind, classes in every:
        right, wrong = candidates(kind, rules_of(classes[-1]).get(str(path[-1]), {}))
        if (setting := (classes[-1], path[-1])) in seen:  # in another section: one value of either kind
            right, wrong = [next(x for x in right if understood(config_with(path, classes, x)))], wrong[:1]
        seen.add(setting)
        configs = [config_with(path, classes, value) for value in right]
        taken = [config for config in configs if understood(config)]
        assert taken, path
        assert [config for config in taken if not SCHEMA.is_valid(config)] == []
        configs = [config_with(path, classes, value) for value in wrong]
        assert [config for config in configs if understood(config) or SCHEMA.is_valid(config)] == []


def test_a_stage_of_ones_own_is_in_the_schema_and_a_misspelt_one_is_not():
    mine = {"dataflow": "d.py:f", "iterations": 3}
    for right in ({"stages": ["sft", "mine"], "mine": mine}, {"roles": {"critic": {"path": "a"}, "t": {"path": "b"}}}):
        assert SCHEMA.is_valid(right) and understood(right)
    for wrong in (
        {"stages": ["gppo"]},
        {"stages": ["mine"], "mine": {"iterations": 3}},
        {"stages": ["mine"], "mine": mine | {"iteratons": 3}},
        {"stages": ["mine"], "mine": mine | {"critic": {}}},
        {"roles": {"critic": {"pth": "a"}}},
        {"roles": {"t": {}}},
    ):
        assert not SCHEMA.is_valid(wrong) and not understood(wrong), wrong


def test_unknown_keys_and_those_of_another_kind_of_data_are_not_in_the_schema():
    assert not SCHEMA.is_valid({"polymer": 1}) and not SCHEMA.is_valid({"data": {"source": "datasets", "terms": 2}})
    assert SCHEMA.is_valid({"data": {"source": "arithmetic", "terms": 2}}) and not SCHEMA.is_valid(
        {"data": {"renaming": 2.0}}
    )
