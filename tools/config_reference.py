"""The reference of all settings, as markdown: key, default and effect, read from the classes of the config.

python -m tools.config_reference > docs/configuration.md
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jrlhf.config import Config
from jrlhf.config.descriptions import descriptions, summary
from jrlhf.config.stages import ALGORITHMS, STAGES
from jrlhf.ppo.fields import default_of

HEADING = """\
# Configuration

A config is a YAML file. `python -m jrlhf.train --config FILE-or-NAME key=value` overrides single keys, with dots
between the names of sections: `ppo.algorithm.kl_target=2`. A stage has a section if and only if it is in `stages`.
Unknown keys are refused with the nearest known one; names of TRL and verl lead to ours. `--dry-run` prints the settings
that are not the defaults, with `--all` all of them. Old names of keys still work and print a notice.

Every algorithm of reinforcement learning has a section with the keys of `ppo`; the keys `critic`, `gae_lambda` and
`value_clip` exist only with a critic. The tables of the other algorithms list only further keys and other defaults.

Editors complete and check a config by `configs/schema.json`, which does not have the old names. In VS Code install the
YAML extension and begin the config with `# yaml-language-server: $schema=PATH-TO/configs/schema.json`, as `jrlhf init`
does.

This page is made from the classes by `python -m tools.config_reference > docs/configuration.md`.

"""


def reference_table() -> str:
    """Returns a heading, a description and a table for every section.

    The sections of the algorithms after the first list only what differs from the first one's.
    """
    first, *others = ALGORITHMS
    tables = list(_tables("", Config))
    for stage in ("sft", "reward_model", "dpo", first):
        tables += _tables(stage, STAGES[stage])
    for stage in others:
        tables += _tables(stage, STAGES[stage], STAGES[first])
    return HEADING + "\n".join(tables)


def _tables(path: str, cls: Any, base: Any = None) -> Iterator[str]:
    """Yields the table of a section, then those of the sections in it. base: a class whose settings are left out."""
    rows, texts, hints = [], descriptions(cls), get_type_hints(cls)
    inner: dict[tuple[Any, Any], list[str]] = {}  # (section, its base class) -> the keys that are such a section
    for item in dataclasses.fields(cls):
        if {"from", "table", "named"} & item.metadata.keys():
            continue
        kind, key = hints[item.name], f"{path}.{item.name}".lstrip(".")
        kinds, sections = [kind, *get_args(kind)], list(_sections(kind))
        for section in sections:
            same = None if base is None else next(_sections(get_type_hints(base).get(item.name)), None)
            listed = any(get_origin(one) is tuple and section in get_args(one) for one in kinds)
            inner.setdefault((section, same), []).append(f"{key}[]" if listed else key)
        default = default_of(cls, item.name)
        shared = base is not None and item.name in base.__dataclass_fields__
        if not sections and not (shared and default_of(base, item.name) == default):
            choices = [str(choice) for part in kinds if get_origin(part) is Literal for choice in get_args(part)]
            allowed = f" ({', '.join(choices)})" if choices else ""
            rows.append(f"| `{item.name}` | `{json.dumps(default)}` | {texts.get(item.name, '')}{allowed} |")
    if rows:
        about = f"{summary(cls)}\n\n".lstrip()
        rule = "\n".join(["| key | default | effect |", "|---|---|---|", *rows])
        yield f"## {path or 'The run'}\n\n{about}{rule}\n"
    for (section, same), keys in inner.items():
        for number, table in enumerate(_tables(keys[0], section, same)):
            yield table if number else table.replace(keys[0], ", ".join(keys), 1)


def _sections(kind: Any) -> Iterator[Any]:
    """Yields the sections that a value of this type may be."""
    for part in (kind, *get_args(kind)):
        if dataclasses.is_dataclass(part):
            yield part
        elif get_origin(part) is tuple and part is not kind:
            yield from _sections(part)


if __name__ == "__main__":
    print(reference_table())
