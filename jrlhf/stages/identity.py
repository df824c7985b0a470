"""`Identity`: digests of a run's inputs (models, tokenizer, code). Checkpoints record it; a resume compares it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jrlhf import __version__
from jrlhf.errors import UserError
from jrlhf.rewards.types import MODULES
from jrlhf.run.directory import RunDirectory
from jrlhf.run.files import read_jsonl, to_json, write_atomic

FAILURES = "failures.jsonl"  # a file of the run: the reward functions that stopped it
_VERSION = "jrlhf"  # the key of the program's version, which may differ


@dataclass(frozen=True)
class Identity:
    """Identifies the inputs of a run by words: input -> a value or a digest of it.

    words: the inputs that all stages share: the data, sizes of models, ids of tokens, modules of reward functions; and
        of each reward function its word.
    functions: keys of reward functions; their words may change if the function stopped the run.
    accepts: their words may change in any case (--accept-rewards).
    """

    words: Mapping[str, str] = field(default_factory=dict)
    functions: frozenset[str] = frozenset()
    accepts: bool = False

    def of_stage(self, words: Mapping[str, str]) -> dict[str, str]:
        """Returns all words of a stage, for its checkpoints. Modules count only for functions that the stage calls."""
        functions = {key: key.removesuffix(MODULES) for key in self.words}
        shared = {key: word for key, word in self.words.items() if functions[key] not in self.functions - {*words}}
        return {_VERSION: __version__, **shared, **words}

    def compare(
        self, run: RunDirectory, stage: str, there: Mapping[str, str], here: Mapping[str, str], *, ended: bool = False
    ) -> None:
        """Compares the words of a checkpoint, `there`, with those of this process. Refuses inputs that differ.

        Appends accepted changes to `run.changes`. ended: see `_changes`.
        """
        run.changes += self._changes(run.path, stage, there, here, ended)

    def check_known(
        self, run: Path, stage: str, there: Mapping[str, str], functions: Collection[str], *, ended: bool
    ) -> None:
        """Refuses what `compare` will refuse, as far as it is known before the stage begins.

        there: the `meta` of a checkpoint. functions: keys of the reward functions that the stage calls.
        """
        here = self.of_stage({key: word for key, word in self.words.items() if key in functions})
        words = {key: word for key, word in there.items() if key in here or key.removesuffix(MODULES) in functions}
        list(self._changes(run, stage, words, here, ended))

    def _changes(
        self, run: Path, stage: str, there: Mapping[str, str], here: Mapping[str, str], ended: bool
    ) -> Iterator[str]:
        """Yields clauses on accepted changes; refuses others. ended: the stage is done, so that a changed function
        would only judge a model that never learnt from it."""
        if there and _VERSION in here and _VERSION not in there:
            raise UserError(
                f"the checkpoint of stage {stage} is of a jrlhf that recorded no version, and this is {__version__}: "
                "resume with the program that wrote it, or start a new run"
            )
        for key in {**there, **here} if there else ():  # without words: a damaged checkpoint, which a restore tells
            if there.get(key) == here.get(key) or key == _VERSION:
                continue
            difference = f"another {key} ({there.get(key)} there, {here.get(key)} here)"
            function = key.removesuffix(MODULES)
            if function not in self.functions:
                remedy = (
                    "restore the earlier stages' checkpoints and what the run began with, or delete it to start over"
                )
            elif _stopped(run, function, there) or (self.accepts and not ended):
                yield f"with {difference}"
                continue
            elif ended:
                remedy = "bring its code back, or train with the changed function in a new run, by another name="
            else:
                remedy = (
                    "bring its code back, or go on with the changed function by --accept-rewards "
                    "(accept_rewards=True in Python)"
                )
            if (version := there.get(_VERSION)) not in (None, __version__):
                difference += f", by jrlhf {version}, and this is {__version__}"
            raise UserError(f"the checkpoint of stage {stage} was made with {difference}: {remedy}")


def numbers(name: str, section: Any) -> dict[str, str]:
    """Returns `name.field` -> value for the fields of a dataclass that do not have their default.

    So a new field changes no words of runs that do not use it.
    """
    changed = {item.name: value for item in fields(section) if (value := getattr(section, item.name)) != item.default}
    return {f"{name}.{key}": str(value) for key, value in changed.items()}


def note_failure(run: RunDirectory, function: Mapping[str, str], message: str) -> None:
    """Records that a reward function stopped the run, so that a resume accepts its corrected version."""
    if run.writes and function:
        path = run.path / FAILURES
        before = path.read_bytes() if path.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]  # without a torn last line, to which the record would be glued
        write_atomic(path, whole + to_json({**function, "message": message}))


def _stopped(run: Path, function: str, there: Mapping[str, str]) -> bool:
    """True if the function, in the version that the checkpoint names, has stopped the run."""
    keys = [key for key in (function, function + MODULES) if key in there]
    records = read_jsonl(run / FAILURES) if function in there else ()
    return any(all(there[key] == record.get(key) for key in keys) for record in records)
