"""What the logical workers of a lane did since their last recorded state, for any processes that repeat it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np

from jrlhf.rollouts.processes.shared import SharedArrays, WeightUpdate
from jrlhf.run.files import encode


class Event(NamedTuple):
    """A command to all processes, in terms of logical workers.

    argument: of `start` the leaves of each worker's state on the host, read whenever the command is made; of `base` the
    file of weights; of `take` the update, and the prompts of the rows whose caches are computed again, or None; of
    `decode` the prompts that enter each worker. Other commands only read, and are not recorded.
    """

    name: str
    argument: Any = None

    def command(self, share: Sequence[int], present: WeightUpdate | None) -> tuple[Mapping[str, Any], Any]:
        """Returns the command to a process with this share of the workers, and the file that it names, or None.

        present: the update that the process draws with.
        """
        name, argument = self
        if name == "take":
            update, again = argument
            sent, base = update.since(present)
            prompts = None if again is None else [astuple(prompt) for prompt in again.values()]
            return {name: {"path": sent.path, "number": update.number, "base": base, "again": prompts}}, sent
        if name == "decode":
            return {name: [[astuple(prompt) for prompt in argument[worker]] for worker in share]}, None
        if name == "start":
            argument = SharedArrays.of([leaf for worker in share for leaf in argument[worker]])
        return {name: argument and argument.path}, argument


class EventRecord:
    """The events since the last recorded state, each with the answers by worker, or without any to compare with.

    present: the update that all workers draw with.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Event, list[str]]] = []
        self.present: WeightUpdate | None = None

    def add(self, event: Event, answers: Sequence[Any]) -> None:
        """Appends an event that all processes have answered. answers: by worker."""
        self._events.append((event, [encode(answer) for answer in answers]))
        self.present = event.argument[0] if event.name == "take" else self.present

    def begin_from(self, states: Sequence[Iterable[np.ndarray]]) -> None:
        """Makes repeats begin with these states of all workers, and with the present weights. states: see `Event`."""
        assert self.present is not None, "states without weights"
        bases = [event for event, _ in self._events if event.name == "base"]
        # The base comes after the states: then a process that goes on has freed its former weights.
        events = Event("start", states), *bases, Event("take", (self.present, None))
        self._events = [(event, []) for event in events]

    def repeat(self, share: Sequence[int], ask: Callable[..., Any]) -> bool:
        """Brings a process with this share of the workers to the present, whatever it did before. Threads may do so.

        ask: takes a command and its file, and returns the answers. Returns False as soon as one is not as recorded.
        """
        present = None
        for event, recorded in self._events if len(share) else ():
            answers = ask(*event.command(share, present))
            if recorded and [encode(own) for own in answers] != [recorded[worker] for worker in share]:
                return False
            present = event.argument[0] if event.name == "take" else present
        return True
