"""Suggests what to write in place of a key that a section does not have."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from jrlhf.config.keys import classes_of, flatten, joined, kinds_of, paths_of
from jrlhf.config.peers import IN_OTHER_STAGES, PEERS


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
    used = {top} & stages or (stages & set(config) if isinstance(config, Mapping) else set()) or stages
    everywhere = [inner for inner in paths_of(root) if _first(inner) not in stages - used]
    below = everywhere if cls is root else paths_of(cls)
    written = next(iter(flatten(unknown.value, key)), key)  # with the names of the sections inside
    meant = _translated(path, key, written, below)
    if stages and (not path or top in stages) and meant not in {_last(x) for x in everywhere if _first(x) in used}:
        meant = IN_OTHER_STAGES.get(meant, meant)
    if " " in meant:
        return meant

    # A similar key of the section comes before a setting of this name further below.
    same = get_close_matches(key, kinds, n=1, cutoff=0.9)
    same = same or [inner for inner in below if "." in written and inner.endswith(f".{written}")]
    if same := same or [inner for inner in below if meant in (inner, _last(inner))]:
        return _did_you_mean(joined(path, inner) for inner in same)
    if path and meant == key in sections:
        return f"did you mean {key}, at the top level?"
    apart = joined(path, written).removeprefix(f"{top}.")
    owners = [stage for stage in sections if stage in stages - used and apart in paths_of(sections[stage])]
    if top in stages and meant == key and owners:
        return f"it is a setting of {', '.join(owners)} only"
    elsewhere = [meant] if meant in everywhere else [inner for inner in everywhere if _last(inner) == meant]
    if not elsewhere and meant == key != _last(written):  # a section that is not known, with a setting that is
        elsewhere = [inner for inner in everywhere if _last(inner) == _last(written)]
    if meant != key:
        elsewhere = [inner for inner in elsewhere if _first(inner) in used] or elsewhere
    if 0 < len(elsewhere) <= 3:
        return _did_you_mean(elsewhere)
    if meant != key and {_last(written), key} & PEERS.keys():
        return _did_you_mean([meant])

    is_section = isinstance(unknown.value, Mapping)
    similar = get_close_matches(key, [name for name in kinds if classes_of(kinds[name]) or not is_section], n=1)
    if not similar and not is_section:
        near = get_close_matches(key, map(_last, below), n=1)
        similar = [inner for inner in below if _last(inner) in near]
    if similar:
        return _did_you_mean(joined(path, inner) for inner in similar)
    more = "; a function's own arguments are written in options" if "options" in kinds else ""
    return f"known are {', '.join(kinds)}{more}"


def _translated(path: str, key: str, written: str, below: Iterable[str]) -> str:
    """Returns our name of a peer's setting, or a sentence about it; the key itself if it is no peer's."""
    word = _last(written) if _last(written) in PEERS else key
    of_section = PEERS.get(re.sub(r"\[\d+\]", "", joined(path, written)))
    return of_section or (word if word in map(_last, below) else PEERS.get(word, word))


def _did_you_mean(keys: Iterable[str]) -> str:
    return f"did you mean {' or '.join(keys)}?"


def _first(path: str) -> str:
    return path.split(".")[0]


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
