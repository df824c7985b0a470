"""Suggests what to write in place of a key that a section does not have."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

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
    search = _search(unknown, root, config)
    return next(sentence for rule in RULES if (sentence := rule(search)))


class _Search(NamedTuple):
    """What the rules know about an unknown key."""

    unknown: UnknownKey
    sections: Mapping[str, Any]  # the keys of the whole config
    stages: set[str]  # the names of all stages
    used: set[str]  # the stages whose settings are proposed first
    top: str  # the section of the whole config in which the key was given
    everywhere: list[str]  # all dotted keys, without those of stages that the run does not have
    below: list[str]  # those of the key's section
    written: str  # the key, with the names of sections that were given inside of it
    meant: str  # our key for a peer's; the key itself if it is no peer's; "" if only a sentence explains it
    note: str  # about the value, or that sentence

    @property
    def is_itself(self) -> bool:
        return self.meant == self.unknown.key

    def first_choice(self, keys: list[str]) -> list[str]:
        """Prefers, for another name than ours, the setting of exactly this name, then those of the run's stages."""
        stages_own = [inner for inner in keys if _first(inner) in self.used]
        return keys if self.is_itself else [self.meant] if self.meant in keys else stages_own or keys


def _search(unknown: UnknownKey, root: Any, config: object) -> _Search:
    given = config if isinstance(config, Mapping) else {}
    sections = kinds_of(root, given)
    stages = {name for item in fields(root) for name in item.metadata.get("table", ())}
    stages |= sections.keys() - kinds_of(root).keys()  # the user's own
    top = re.split(r"[.[]", unknown.path)[0]
    used = {top} & stages or _stages_of(config, stages) or stages
    everywhere = [inner for inner in paths_of(root, given) if _first(inner) not in stages - used]
    below = everywhere if unknown.cls is root else paths_of(unknown.cls)
    written = next(iter(flatten(unknown.value, unknown.key)), unknown.key)
    there = {*everywhere, *(_last(inner) for inner in everywhere if _first(inner) in used or not stages)}
    options, (meant, note) = _translated(unknown.path, unknown.key, written, below), (unknown.key, "")
    in_stage = stages and (not unknown.path or top in stages)
    if in_stage and options[0] not in there and options[0] in IN_OTHER_STAGES:
        options.append(IN_OTHER_STAGES[options[0]])
    for option in options:
        name, _, about = option.partition(", ")
        if " " in name:  # a sentence
            meant, note = "", option
            break
        if name in there:
            meant, note = name, about
            break
    return _Search(unknown, sections, stages, used, top, everywhere, below, written, meant, note)


def _derived(search: _Search) -> str:
    """The run itself sets this field from another setting."""
    unknown = search.unknown
    sources = {item.name: item.metadata["from"] for item in fields(unknown.cls) if "from" in item.metadata}
    return f"the run's {sources[unknown.key]} is used, set that" if sources.get(unknown.key) else ""


def _explained(search: _Search) -> str:
    """A peer's setting has no key here, but a sentence."""
    return "" if search.meant else search.note


def _in_section(search: _Search) -> str:
    """The section has a key like this one, or a setting of this name further below."""
    key, kinds, written = search.unknown.key, kinds_of(search.unknown.cls), search.written
    same = get_close_matches(key, kinds, n=1, cutoff=0.9)
    same = same or [inner for inner in search.below if "." in written and inner.endswith(f".{written}")]
    same = same or [last for last in [_last(written)] if search.top in search.stages and last != key and last in kinds]
    same = same or search.first_choice([inner for inner in search.below if search.meant in (inner, _last(inner))])
    return _did_you_mean((joined(search.unknown.path, inner) for inner in same), search.note) if same else ""


def _at_the_top(search: _Search) -> str:
    key = search.unknown.key
    at_the_top = search.unknown.path and search.is_itself and key in search.sections
    return f"did you mean {key}, at the top level?" if at_the_top else ""


def _of_other_stages(search: _Search) -> str:
    apart = joined(search.unknown.path, search.written).removeprefix(f"{search.top}.")
    others = [stage for stage in search.sections if stage in search.stages - search.used]
    owners = [stage for stage in others if apart in paths_of(search.sections[stage])]
    in_stage = search.top in search.stages and search.is_itself
    return f"it is a setting of {', '.join(owners)} only" if in_stage and owners else ""


def _elsewhere(search: _Search) -> str:
    """Another section has a setting of this name."""
    meant, everywhere, written = search.meant, search.everywhere, _last(search.written)
    keys = [meant] if meant in everywhere else [inner for inner in everywhere if _last(inner) == meant]
    if not keys and search.is_itself and meant != written:  # an unknown section with a setting that is known
        keys = [inner for inner in everywhere if _last(inner) == written]
    keys = search.first_choice(keys)
    if 0 < len(keys) <= 4:
        return _did_you_mean(keys, search.note)
    return _did_you_mean([meant], search.note) if keys and not search.is_itself else ""


def _of_no_stage(search: _Search) -> str:
    of_a_peer = search.is_itself and {_last(search.written), search.unknown.key} & PEERS.keys()
    return "no stage of this run has such a setting, leave it out" if of_a_peer else ""


def _stages_of(config: object, stages: set[str]) -> set[str]:
    """Returns the stages that a config names or, if it names none, those that have a section in it."""
    given = config if isinstance(config, Mapping) else {}
    return stages & set(re.findall(r"\w+", str(given.get("stages")))) or stages & set(given)


def _alike(search: _Search) -> str:
    """Suggests a similar key of the section, or a similar one further below; else lists the section's keys."""
    unknown, below, kinds = search.unknown, search.below, kinds_of(search.unknown.cls)
    names = [name for name in kinds if name not in search.stages - search.used]
    key, is_section = unknown.key, isinstance(unknown.value, Mapping)
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


# What is suggested, in this order: the first rule with a sentence counts, and the last one always has one.
RULES: tuple[Callable[[_Search], str], ...] = (
    _derived,
    _explained,
    _in_section,
    _at_the_top,
    _of_other_stages,
    _elsewhere,
    _of_no_stage,
    _alike,
)
