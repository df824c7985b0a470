"""Suggests what to write in place of a key that a section does not have."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
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
    search = _Search(unknown, root, config)
    return next(sentence for rule in RULES if (sentence := rule(search)))


@dataclass(frozen=True)
class _Search:
    """What the rules know about an unknown key."""

    unknown: UnknownKey
    root: Any
    config: object

    @property
    def key(self) -> str:
        return self.unknown.key

    @cached_property
    def kinds(self) -> Mapping[str, Any]:
        """The keys of the section."""
        return kinds_of(self.unknown.cls)

    @cached_property
    def stages(self) -> set[str]:
        return {name for item in fields(self.root) for name in item.metadata.get("table", ())}

    @cached_property
    def top(self) -> str:
        """The section of the whole config in which the key was given."""
        return re.split(r"[.[]", self.unknown.path)[0]

    @cached_property
    def used(self) -> set[str]:
        """The stages whose settings come before those of others."""
        return {self.top} & self.stages or _stages_of(self.config, self.stages) or self.stages

    @cached_property
    def everywhere(self) -> list[str]:
        """The dotted keys of the whole config, without those of stages that the run does not have."""
        return [inner for inner in paths_of(self.root) if _first(inner) not in self.stages - self.used]

    @cached_property
    def below(self) -> list[str]:
        """The dotted keys of the section, those of the sections inside of it included."""
        return self.everywhere if self.unknown.cls is self.root else paths_of(self.unknown.cls)

    @cached_property
    def written(self) -> str:
        """The key with the names of the sections that were given inside of it."""
        return next(iter(flatten(self.unknown.value, self.key)), self.key)

    @cached_property
    def meaning(self) -> tuple[str, str]:
        """Our key for a peer's, and a note about its value; the key itself if it is no peer's; "" and a sentence."""
        names = {_last(inner) for inner in self.everywhere if _first(inner) in self.used or not self.stages}
        there = {*self.everywhere, *names}
        options = _translated(self.unknown.path, self.key, self.written, self.below)
        in_stage = not self.unknown.path or self.top in self.stages
        if self.stages and in_stage and options[0] not in there and options[0] in IN_OTHER_STAGES:
            options.append(IN_OTHER_STAGES[options[0]])
        for option in options:
            name, _, note = option.partition(", ")
            if " " in name:
                return "", option
            if name in there:
                return name, note
        return self.key, ""

    @property
    def meant(self) -> str:
        return self.meaning[0]

    @property
    def is_itself(self) -> bool:
        return self.meant == self.key

    def first_choice(self, keys: list[str]) -> list[str]:
        """Prefers, for another name than ours, the setting of exactly this name, then those of the run's stages."""
        stages_own = [inner for inner in keys if _first(inner) in self.used]
        return keys if self.is_itself else [self.meant] if self.meant in keys else stages_own or keys


def _derived(search: _Search) -> str:
    """The run itself sets this field from another setting."""
    sources = {item.name: item.metadata["from"] for item in fields(search.unknown.cls) if "from" in item.metadata}
    return f"the run's {sources[search.key]} is used, set that" if sources.get(search.key) else ""


def _explained(search: _Search) -> str:
    """A peer's setting has no key here, but a sentence."""
    meant, sentence = search.meaning
    return "" if meant else sentence


def _in_section(search: _Search) -> str:
    """The section has a key like this one, or a setting of this name further below."""
    key, kinds, written = search.key, search.kinds, search.written
    same = get_close_matches(key, kinds, n=1, cutoff=0.9)
    same = same or [inner for inner in search.below if "." in written and inner.endswith(f".{written}")]
    same = same or [last for last in [_last(written)] if search.top in search.stages and last != key and last in kinds]
    same = same or search.first_choice([inner for inner in search.below if search.meant in (inner, _last(inner))])
    return _did_you_mean((joined(search.unknown.path, inner) for inner in same), search.meaning[1]) if same else ""


def _at_the_top(search: _Search) -> str:
    at_the_top = search.unknown.path and search.is_itself and search.key in kinds_of(search.root)
    return f"did you mean {search.key}, at the top level?" if at_the_top else ""


def _of_other_stages(search: _Search) -> str:
    sections = kinds_of(search.root)
    apart = joined(search.unknown.path, search.written).removeprefix(f"{search.top}.")
    others = [stage for stage in sections if stage in search.stages - search.used]
    owners = [stage for stage in others if apart in paths_of(sections[stage])]
    is_stage = search.top in search.stages and search.is_itself
    return f"it is a setting of {', '.join(owners)} only" if is_stage and owners else ""


def _elsewhere(search: _Search) -> str:
    """Another section has a setting of this name."""
    (meant, note), everywhere, written = search.meaning, search.everywhere, _last(search.written)
    keys = [meant] if meant in everywhere else [inner for inner in everywhere if _last(inner) == meant]
    if not keys and search.is_itself and search.key != written:  # an unknown section with a setting that is known
        keys = [inner for inner in everywhere if _last(inner) == written]
    keys = search.first_choice(keys)
    if 0 < len(keys) <= 4:
        return _did_you_mean(keys, note)
    return _did_you_mean([meant], note) if keys and not search.is_itself else ""


def _of_no_stage(search: _Search) -> str:
    of_a_peer = search.is_itself and {_last(search.written), search.key} & PEERS.keys()
    return "no stage of this run has such a setting, leave it out" if of_a_peer else ""


def _stages_of(config: object, stages: set[str]) -> set[str]:
    """Returns the stages that a config names or, if it names none, those that have a section in it."""
    given = config if isinstance(config, Mapping) else {}
    return stages & set(re.findall(r"\w+", str(given.get("stages")))) or stages & set(given)


def _alike(search: _Search) -> str:
    """Suggests a similar key of the section, or a similar one further below; else lists the section's keys."""
    unknown, below, kinds = search.unknown, search.below, search.kinds
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
