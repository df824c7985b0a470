"""Suggests what to write in place of a key that a section does not have."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from jrlhf.config.keys import classes_of, flatten, joined, kinds_of, paths_of
from jrlhf.config.peers import IN_OTHER_STAGES, PEERS

_ALIKE = 0.75  # similarity of a key to what was given; a wrong guess is worse than none
_LISTED = 14  # number of keys that are listed where none is similar; no section but the whole config has many more


class UnknownKey(Exception):
    """A section does not have a key. Who reads the whole config knows where else the key is."""

    def __init__(self, cls: Any, path: str, key: str, value: object):
        """cls, path: the section's class and dotted key. value: what was given for `key`."""
        super().__init__(joined(path, key))
        self.cls, self.path, self.key, self.value = cls, path, key, value


def suggestion(unknown: UnknownKey, root: Any, config: object) -> str:
    """Suggests a setting below the section that has the key, one elsewhere in the config, a similar key, or all keys.

    root: the class of the whole config. config: the whole config as it was given; its stages come before others.
    """
    cls, path, key = unknown.cls, unknown.path, unknown.key
    sources = {item.name: item.metadata["from"] for item in fields(cls) if "from" in item.metadata}
    if sources.get(key):
        return f"the run's {sources[key]} is used, set that"
    kinds, sections = kinds_of(cls), kinds_of(root)
    stages = {name for item in fields(root) for name in item.metadata.get("table", ())}
    top = re.split(r"[.[]", path)[0]
    used = {top} & stages or _stages_of(config, stages) or stages
    everywhere = [inner for inner in paths_of(root) if _first(inner) not in stages - used]
    below = everywhere if cls is root else paths_of(cls)
    written = next(iter(flatten(unknown.value, key)), key)  # with the names of the sections inside
    there = {*everywhere, *(_last(inner) for inner in everywhere if _first(inner) in used or not stages)}
    meant, note = key, ""
    options = _translated(path, key, written, below)
    if stages and (not path or top in stages) and options[0] not in there and options[0] in IN_OTHER_STAGES:
        options.append(IN_OTHER_STAGES[options[0]])
    for option in options:
        name, _, about = option.partition(", ")
        if " " in name:
            return option
        if name in there:
            meant, note = name, about
            break

    def first_choice(keys: list[str]) -> list[str]:
        """Prefers, for another name than ours, the setting of exactly this name, then those of the run's stages."""
        stages_own = [inner for inner in keys if _first(inner) in used]
        return keys if meant == key else [meant] if meant in keys else stages_own or keys

    # A similar key of the section comes before a setting of this name further below.
    same = get_close_matches(key, kinds, n=1, cutoff=0.9)
    same = same or [inner for inner in below if "." in written and inner.endswith(f".{written}")]
    same = same or [last for last in [_last(written)] if top in stages and last != key and last in kinds]
    if same := same or first_choice([inner for inner in below if meant in (inner, _last(inner))]):
        return _did_you_mean((joined(path, inner) for inner in same), note)
    if path and meant == key in sections:
        return f"did you mean {key}, at the top level?"
    apart = joined(path, written).removeprefix(f"{top}.")
    owners = [stage for stage in sections if stage in stages - used and apart in paths_of(sections[stage])]
    if top in stages and meant == key and owners:
        return f"it is a setting of {', '.join(owners)} only"
    elsewhere = [meant] if meant in everywhere else [inner for inner in everywhere if _last(inner) == meant]
    if not elsewhere and meant == key != _last(written):  # a section that is not known, with a setting that is
        elsewhere = [inner for inner in everywhere if _last(inner) == _last(written)]
    elsewhere = first_choice(elsewhere)
    if 0 < len(elsewhere) <= 4:
        return _did_you_mean(elsewhere, note)
    if elsewhere and meant != key:
        return _did_you_mean([meant], note)

    if meant == key and {_last(written), key} & PEERS.keys():
        return "no stage of this run has such a setting, leave it out"
    return _alike(unknown, [name for name in kinds if name not in stages - used], below)


def _stages_of(config: object, stages: set[str]) -> set[str]:
    """Returns the stages that a config names or, if it names none, those that have a section in it."""
    given = config if isinstance(config, Mapping) else {}
    return stages & set(re.findall(r"\w+", str(given.get("stages")))) or stages & set(given)


def _alike(unknown: UnknownKey, names: list[str], below: Iterable[str]) -> str:
    """Suggests a similar key of the section (names), or a similar one further below; else lists the section's keys."""
    key, kinds, is_section = unknown.key, kinds_of(unknown.cls), isinstance(unknown.value, Mapping)
    similar = get_close_matches(key, [name for name in names if classes_of(kinds[name]) or not is_section], 1, _ALIKE)
    if not similar and not is_section:
        near = get_close_matches(key, map(_last, below), 1, _ALIKE)
        similar = [inner for inner in below if _last(inner) in near]
    if similar:
        return _did_you_mean(joined(unknown.path, inner) for inner in similar)
    listed, others = ", ".join(names[:_LISTED]), len(names) - _LISTED
    listed += f", and {others} more, all in docs/configuration.md" if others > 0 else ""
    return f"known are {listed}" + ("; a function's own arguments are written in options" if "options" in kinds else "")


def _translated(path: str, key: str, written: str, below: Iterable[str]) -> list[str]:
    """Returns our names of a peer's setting, or a sentence about it; the key itself if it is no peer's."""
    word = _last(written) if _last(written) in PEERS else key
    dotted = re.sub(r"\[\d+\]", "", joined(path, written))
    if "." in dotted and dotted in PEERS:
        ours = PEERS[dotted]
    else:
        ours = word if word in map(_last, below) else PEERS.get(word, word)
    return [ours] if isinstance(ours, str) else [*ours]


def _did_you_mean(keys: Iterable[str], note: str = "") -> str:
    return f"did you mean {' or '.join(keys)}{note and f', {note}'}?"


def _first(path: str) -> str:
    return path.split(".")[0]


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
