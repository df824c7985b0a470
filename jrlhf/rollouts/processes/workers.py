"""Logical workers in processes of this machine or of a Ray cluster, each with its own devices.

The parent decides what is drawn and when; a process only executes commands. If a process ends or hangs, a successor
repeats the record of what happened since the last recorded state, with the same results; if no machine has room for it,
the other processes do so for larger shares. Where states are recorded, the number of processes may change, because a
file of the run's directory asks for another one, or because a Ray cluster has room for more of those asked for.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure, UserError
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.generation.continuous import ContinuousBatch, Decoding, Prompt, RowProgress, Weights
from jrlhf.rollouts.identity import Identity
from jrlhf.rollouts.processes.places import Place, gpus_of
from jrlhf.rollouts.processes.process import ATTEMPTS, LocalWorker, NoRoom, Process
from jrlhf.rollouts.processes.ray_worker import RayWorker, free_places, total_places
from jrlhf.rollouts.processes.record import Event, EventRecord
from jrlhf.rollouts.processes.shared import SharedArrays, SharedPart, WeightUpdate, read
from jrlhf.rollouts.state import DrawnRows, drawn_rows, saved
from jrlhf.run.contents import FLEET
from jrlhf.run.files import encode

PAUSE = 600.0  # minimum seconds until processes that did not start are tried again; or ten times what the try took


class _Pause(NamedTuple):
    """Why absent processes are not tried, until when, and how many processes a Ray cluster has room for in all."""

    reason: str
    until: float
    size: int


class ProcessWorkers:
    """Logical workers in processes. See `Workers`.

    template: a batch of slots like that of a logical worker, for the shapes of its state.
    description: what `worker.describe` returns. folder: of the processes' logs.
    tell: called with a sentence for each process that is lost, for a new number of them, and for one that is refused.
    count: number of logical workers. asked: returns the places of the processes; see `asked_places`.
    """

    own_devices = True

    def __init__(
        self,
        template: ContinuousBatch,
        description: Mapping[str, Any],
        section: FleetSection,
        folder: Path,
        tell: Callable[[str], None],
        count: int,
        asked: Callable[[], Sequence[Place]],
    ):
        self._template, self._count, self._asked = template, count, asked
        self._section, self._folder, self._tell = section, folder, tell
        self._setup = {**description, "deadline": section.deadline}
        self._gpus = template.mesh.size if description["platform"] == "gpu" else 0
        leaves, self._treedef = jax.tree.flatten(saved(template.fresh(), template.mesh))
        self._shardings = [leaf.sharding for leaf in leaves]
        self._record = EventRecord()
        self._processes = [self._process(place) for place in asked()]
        self._wish: Sequence[Place] = ()  # what `asked` returned last
        self._pause: _Pause | None = None  # after a process that did not start
        self._refusal = ""  # why processes were absent when that was told last
        self._threads = ThreadPoolExecutor(count, "workers")
        self._anchor_every = section.anchor_every if section.transfer == "delta" else 1
        self._newest: WeightUpdate | None = None
        self._transfers: list[tuple[int, float]] = []  # (bytes, seconds) of `put` and `take`, in several threads
        self._base: tuple[Any, SharedArrays] | None = None  # the frozen weights under an adapter, and their file
        self.rooms, self.running = [0] * self._count, 0

    def fresh(self) -> list[Decoding]:
        return [saved(self._template.fresh(), self._template.mesh) for _ in range(self._count)]

    def start(self, states: Sequence[Decoding]) -> None:
        self._note_room(self._happens("start", [to_host(jax.tree.leaves(state)) for state in states]))

    def states(self) -> list[Decoding]:
        states = [self._treedef.unflatten(to_devices([*part], self._shardings)) for part in self._recorded()]
        refusal = self._adjust()
        if refusal and refusal != self._refusal:
            self._tell(f"{refusal}; {len(self._processes)} rollout process(es) go on")
        self._refusal = refusal
        return states

    def drawn(self) -> DrawnRows:
        return drawn_rows([self._treedef.unflatten([*part]) for part in self._recorded()])

    def _recorded(self) -> list[SharedPart]:
        """Returns the leaves of each worker's state. Processes will repeat what happens from these states on."""
        files, count = zip(self._ask(Event("states")), self._shares.values(), strict=True), len(self._shardings)
        states = [SharedPart(file, count * place, count) for file, share in files for place in range(len(share))]
        self._record.begin_from(states)
        return states

    @property
    def _shares(self) -> dict[Place, list[int]]:
        """The logical workers of each process."""
        parts = np.array_split(range(self._count), len(self._processes))
        return {process.place: part.tolist() for process, part in zip(self._processes, parts, strict=True)}

    def _adjust(self) -> str:
        """Divides the logical workers over the asked processes, where they start; returns why some are absent, or "".

        Present ones stay if they are asked for. Nobody ends for others that do not start, unless it has their GPUs.
        """
        present = {process.place: process for process in self._processes}
        try:
            asked = self._places(list(present))
        except (UserError, OSError) as error:
            return str(error)
        leaving = [process for place, process in present.items() if place not in asked]
        absent = [place for place in asked if place not in present]
        begin, new, refusal = time.monotonic(), dict[Place, Process](), ""
        if not gpus_of(absent).isdisjoint(gpus_of(process.place for process in leaving)):
            new = {place: self._process(place) for place in absent}
        elif absent:
            new, refusal = self._begin(absent)
        if refusal and leaving:
            _close(new.values())
            return refusal
        if not new and not leaving:
            return refusal
        _close(leaving)
        there = present | new
        try:
            self._divide([there[place] for place in asked if place in there])
            self.identities()  # now all repeat what was recorded
        except (UserError, RunFailure) as error:
            if not (staying := [process for process in self._processes if process.place in present]):
                asked_by = f"{self._folder / FLEET} or fleet.workers asked for {len(asked)} rollout process(es)"
                raise type(error)(f"{error}; {asked_by}") from error
            _close(new.values())
            refusal = str(error)
            self._divide(staying)
        if lost := [place for place, process in new.items() if process not in self._processes]:
            refusal = self._hold(refusal or f"rollout process {lost[0][0]} was lost at its first states", begin)
        if self._processes != list(present.values()):
            number = f" in place of {len(present)}" if len(self._processes) != len(present) else ""
            devices = ", ".join(process.place[1] for process in self._processes)
            gpus = f" with fleet.devices=[{devices}]" if gpus_of(asked) else ""
            self._tell(f"{len(self._processes)} rollout process(es) go on{number}{gpus}")
        return refusal

    def _places(self, present: Sequence[Place]) -> Sequence[Place]:
        """Returns the asked places. Those of Ray are alike, so the present ones are among them."""
        asked = self._asked()
        if asked != self._wish:
            self._wish, self._pause = asked, None
        if self._section.engine != "ray":
            return asked
        return sorted([*present, *(place for place in asked if place not in present)][: len(asked)])

    def _begin(self, absent: Sequence[Place]) -> tuple[dict[Place, Process], str]:
        """Starts the processes at these places at the same time; returns those that start, and why others do not."""
        begin, pause, size = time.monotonic(), self._pause, self._size
        if pause is not None and begin < pause.until and size <= pause.size:
            self._pause = pause._replace(size=size)  # a machine that returns ends the pause
            return {}, pause.reason
        room = free_places(self._gpus) if self._section.engine == "ray" else len(absent)
        new, failures = {place: self._process(place) for place in absent[:room]}, list[str]()
        try:
            errors = [begun.exception() for begun in [self._threads.submit(own.begin) for own in new.values()]]
        except BaseException:  # an interrupt: nobody else knows these processes
            _close(new.values())
            raise
        for place, error in zip(list(new), errors, strict=True):
            if isinstance(error, UserError | RunFailure | OSError | NoRoom):
                failures.append(str(error))
                new.pop(place).close()
            elif error is not None:
                _close(new.values())
                raise error
        if failures:
            return new, self._hold(failures[0], begin)
        lacking = f"the Ray cluster has no room for {len(absent) - len(new)} more rollout process(es)"
        return new, lacking if len(new) < len(absent) else ""

    @property
    def _size(self) -> int:
        return total_places(self._gpus) if self._section.engine == "ray" else 0

    def _hold(self, reason: str, begin: float) -> str:
        """Lets absent processes wait after a try that began then; returns why it failed."""
        now = time.monotonic()
        self._pause = _Pause(reason, now + max(PAUSE, 10 * (now - begin)), self._size)
        return reason

    def _divide(self, processes: list[Process]) -> None:
        """Divides the logical workers over these processes. Each repeats the record before its next command."""
        self._processes = processes
        for process in processes:
            process.forget()

    def _process(self, place: Place) -> Process:
        """Returns a process, which starts at its first command."""
        number, devices = place
        environment, start = dict(os.environ), partial(LocalWorker, "jrlhf.rollouts.processes.worker")
        if self._section.engine == "ray":
            # Programs depend on XLA's flags; everything else is as the cluster sets it.
            environment = {name: value for name, value in os.environ.items() if name == "XLA_FLAGS"}
            start = partial(RayWorker, gpus=self._gpus)
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        log = self._folder / f"worker-{number}.log"
        repeat = lambda ask: self._record.repeat(self._shares.get(place, ()), ask)  # noqa: E731
        return Process(place, self._setup, partial(start, environment), log, self._tell, repeat)

    def put(self, weights: Weights) -> WeightUpdate:
        begin = time.monotonic()
        base, adapter = weights
        if adapter and self._base is None:
            self._base = base, SharedArrays.of(to_host(jax.tree.leaves(base)))
        travelling = adapter or base
        self._shardings_of_update = jax.tree.map(lambda leaf: leaf.sharding, travelling)
        frozen = None if self._base is None else self._base[1]
        self._newest = WeightUpdate.after(
            self._newest, to_host(jax.tree.leaves(travelling)), self._anchor_every, frozen
        )
        self._transfers.append((0, time.monotonic() - begin))
        return self._newest

    def weights(self, handle: WeightUpdate) -> Weights:
        leaves, treedef = jax.tree.flatten(self._shardings_of_update)
        weights = treedef.unflatten(to_devices(read(handle.whole.path), leaves))
        return (weights, {}) if self._base is None else (self._base[0], weights)

    def take(self, weights: WeightUpdate, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        begin = time.monotonic()
        if self._record.present is None and weights.base is not None:
            self._happens("base", weights.base)
        sent, _ = weights.since(self._record.present)
        identities = self._happens("take", (weights, again))
        self._transfers.append((sent.size, time.monotonic() - begin))
        return list({encode(own): own for own in identities}.values())  # those of all workers are equal

    def identities(self) -> list[Identity]:
        return [own for answer in self._ask(Event("identities")) for own in answer]

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        self._note_room(answers := self._happens("decode", prompts))
        return [RowProgress(*row) for answer in answers for row in answer["progress"]]

    def metrics(self) -> dict[str, float]:
        transfers, self._transfers = self._transfers, []
        size, seconds = (float(sum(numbers)) for numbers in zip((0, 0.0), *transfers, strict=True))
        return {"fleet/transfer_bytes": size, "fleet/transfer_seconds": seconds}

    def close(self) -> None:
        _close(self._processes)
        self._threads.shutdown()

    def _happens(self, name: str, argument: Any) -> list:
        """Lets all logical workers do something, and records it when all have; returns their answers. See `Event`."""
        event = Event(name, argument)
        answers = [own for answer in self._ask(event) for own in answer]
        self._record.add(event, answers)
        return answers

    def _ask(self, event: Event) -> list:
        """Sends a command to all processes at the same time; returns their answers in the order of the processes."""
        wait_began: float | None = None
        while True:
            parts = [event.command(share, self._record.present) for share in self._shares.values()]
            asked = [self._threads.submit(own.ask, *part) for own, part in zip(self._processes, parts, strict=True)]
            errors = [answer.exception() for answer in asked]
            for error in errors:
                if error is not None and not isinstance(error, NoRoom):
                    raise error
            without = [own for own, error in zip(self._processes, errors, strict=True) if error is not None]
            if not without:
                if wait_began is not None:
                    self._tell(f"{len(self._processes)} rollout process(es) go on")
                return [answer.result() for answer in asked]
            numbers = ", ".join(str(own.place[0]) for own in without)
            reason = f"{next(filter(None, errors))} for rollout process(es) {numbers}"
            if len(without) < len(self._processes):
                wait_began = None
                others = [own for own in self._processes if own not in without]
                self._tell(f"{reason}; {len(others)} rollout process(es) go on in place of {len(self._processes)}")
                self._divide(others)
            elif wait_began is None:
                wait_began = time.monotonic()
                self._tell(f"{reason}: they wait for one")
            elif time.monotonic() - wait_began > ATTEMPTS * self._section.deadline:
                raise RunFailure(f"{reason}, for {time.monotonic() - wait_began:.0f} s: add one and resume the run")

    def _note_room(self, answers: Sequence[Mapping[str, Any]]) -> None:
        self.rooms = [answer["room"] for answer in answers]
        self.running = sum(answer["running"] for answer in answers)


def _close(processes: Iterable[Process]) -> None:
    for process in processes:
        process.close()
