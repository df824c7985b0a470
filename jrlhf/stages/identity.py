"""What a run builds on outside its checkpoints: recorded in each of them, and compared by a resume."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jrlhf.errors import UserError
from jrlhf.rewards.facts import MODULES
from jrlhf.run.directory import Run
from jrlhf.run.files import append_jsonl, read_jsonl

FAILURES = "failures.jsonl"  # a file of the run: the reward functions that stopped it
_VERSION = "identity"  # a key that checkpoints of older versions lack


@dataclass(frozen=True)
class Identity:
    """The inputs of a run, as words.

    words: of those that all stages share: the numbers of models, ids of tokens, modules of reward functions.
    functions: keys of reward functions; such a word may change if the function stopped the run.
    accepts: they may change anyway, as the command line says so.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    functions: frozenset[str] = frozenset()
    accepts: bool = False

    def of_stage(self, words: Mapping[str, str]) -> dict[str, str]:
        """Returns all words of a stage, for its checkpoints; those of the modules of functions that it calls."""
        functions = {key: key.removesuffix(MODULES) for key in self.words}
        shared = {key: word for key, word in self.words.items() if functions[key] not in self.functions - {*words}}
        return {_VERSION: "1", **shared, **words}

    def compare(self, run: Run, stage: str, there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
        """Compares the words of a checkpoint with those of this process; refuses another input.

        Notes changes that are accepted in `run.changes`. Yields notices.
        """
        unknown = [] if _VERSION in there else [key for key in here if key not in there]
        for key in {**there, **here}:
            if there.get(key) == here.get(key) or key in unknown:
                continue
            difference = f"another {key} ({there.get(key)} there, {here.get(key)} here)"
            function = key.removesuffix(MODULES)
            if function not in self.functions:
                remedy = (
                    "restore the earlier stages' checkpoints and what the run began with, or delete it to start over"
                )
            elif self.accepts or _stopped(run.path, function, there):
                run.changes.append(f"with {difference}")
                continue
            else:
                remedy = (
                    "bring its code back, or go on with the changed function by --accept-rewards "
                    "(accept_rewards=True in Python)"
                )
            raise UserError(f"the checkpoint of stage {stage} was made with {difference}: {remedy}")
        if unknown:
            names = ", ".join(unknown)
            yield f"the checkpoint of stage {stage} is of an older version, which did not record {names}"


def numbers(name: str, section: Any) -> dict[str, str]:
    """Returns `name.field` -> value for the fields of a dataclass that do not have their default.

    So a field that a later version adds does not change the words of a run that does not use it.
    """
    changed = {item.name: value for item in fields(section) if (value := getattr(section, item.name)) != item.default}
    return {f"{name}.{key}": str(value) for key, value in changed.items()}


def note_failure(run: Run, function: Mapping[str, str], message: str) -> None:
    """Notes that a reward function stopped the run: a resume takes its mended version."""
    if run.writes and function:
        append_jsonl(run.path / FAILURES, [{**function, "message": message}])


def _stopped(run: Path, function: str, there: Mapping[str, str]) -> bool:
    """Tests whether the function with which a checkpoint was made is one that has stopped the run."""
    keys = [key for key in (function, function + MODULES) if key in there]
    records = read_jsonl(run / FAILURES) if function in there else ()
    return any(all(record.get(key) == there[key] for key in keys) for record in records)
