"""Logical workers in processes of this machine or of a Ray cluster, each with its own devices.

The parent decides what is drawn and when; a process only executes commands. If a process ends or hangs, a successor
repeats the commands since the last recorded state and continues, with the same results. Where states are recorded,
the number of processes may change, because a file of the run's directory asks for another one.
"""

import contextlib
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jrlhf.config.check import fleet_violations
from jrlhf.config.parse import build, parse_yaml
from jrlhf.config.schema import Config
from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure, UserError
from jrlhf.fleet.identity import Identity
from jrlhf.fleet.ray_worker import RayWorker, check_package, lacking
from jrlhf.fleet.shared import AVAILABLE, SharedArrays, delta, read
from jrlhf.fleet.state import DrawnRows, drawn_rows, saved
from jrlhf.fleet.worker import program
from jrlhf.meshes import to_devices, to_host
from jrlhf.models.generation.continuous import ContinuousBatch, Decoding, Progress, Prompt, Weights
from jrlhf.run.child import Worker
from jrlhf.run.directory import FLEET, run_path
from jrlhf.run.files import decode, encode
from jrlhf.run.processes import several

ATTEMPTS = 3  # number of processes in a row that may fail at one command
LEAST = 10.0  # seconds that a process always has for an answer, unless `fleet.deadline` is shorter
RECENT = 32  # number of commands of a kind from which a process's pace follows

T = TypeVar("T")
Place = tuple[int, str]  # number of a process, and its GPUs as CUDA_VISIBLE_DEVICES; empty: all of its environment


def check_processes(section: FleetSection, platform: str, devices: int) -> None:
    """Refuses processes that this machine cannot run. devices: number per process, that of `actor.generate`."""
    named, listed = f"fleet.workers={section.workers}", f"fleet.devices=[{', '.join(section.devices)}]"
    if not AVAILABLE:
        raise UserError(f"{named} needs the memory files of Linux, which this machine lacks: leave fleet out")
    if several():
        raise UserError(f"{named} serves a trainer of one process, and this run has several: leave fleet out")
    if platform == "tpu":
        raise UserError(f"{named} needs GPUs or CPUs, and a TPU serves one process: leave fleet out")
    if section.engine == "ray" and section.devices:
        raise UserError(f"{listed} has no effect with fleet.engine=ray, which chooses the GPUs: leave it out")
    if section.engine == "ray":
        check_package()
    if platform == "cpu" and section.devices:
        raise UserError(f"{listed} has no effect on a CPU, whose devices are simulated: leave it out")
    uneven = any(len(entry.split(",")) != devices for entry in section.devices or [""])
    if platform == "gpu" and section.engine == "local" and uneven:
        raise UserError(
            f"{listed} must name {devices} GPU(s) for each process, as many as actor.generate has in the plan, and "
            "other ones than the trainer's CUDA_VISIBLE_DEVICES: set it"
        )


def asked_places(config: Config, platform: str, devices: int) -> list[Place]:
    """Returns the places of the processes: those of the file FLEET or, without it, of the config.

    Raises UserError if no such processes can run. devices: number per process.
    """
    path, fleet = run_path(config) / FLEET, config.fleet
    assert fleet is not None
    try:
        text = path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        check_processes(fleet, platform, devices)
        return _places(fleet)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): mend or delete it") from error
    content = parse_yaml(text, str(path))
    given = content if isinstance(content, dict) else {}
    if not {"workers"} <= given.keys() <= {"workers", "devices"} or given["workers"] in (None, "null"):
        raise UserError(f"{path} must have the key workers, for GPUs of this machine also devices, and no others")
    try:
        fleet = build(FleetSection, asdict(fleet) | given, "fleet")
        for sentence in fleet_violations(config, fleet):
            raise UserError(sentence)
        check_processes(fleet, platform, devices)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return _places(fleet)


def _places(section: FleetSection) -> list[Place]:
    return list(enumerate(section.devices or [""] * (section.workers or 1)))


def _gpus_of(places: Iterable[Place]) -> set[str]:
    return {gpu.strip() for _, devices in places for gpu in devices.split(",") if gpu}


class LocalWorker(Worker):
    """A rollout process of this machine. It reads shared arrays from the file that a request names."""

    longest = math.inf  # an answer has the tokens of all rows that end in a chunk

    def request(self, body: bytes, seconds: float, shared: SharedArrays | None = None) -> Mapping[str, Any]:
        answer = super().request(body, seconds)
        named = decode(answer.get("answer", "null"))
        if not isinstance(named, str):
            return answer
        try:
            self._shared = SharedArrays.opened(named)
        except OSError:
            self.kill()
            return {"failure": "crash", "detail": "ended before its arrays were read"}
        return {"answer": encode(self._shared.path)}


@dataclass(frozen=True)
class Update:
    """Published weights. changes: the differences from the update before (number - 1); None: send all weights.

    whole: all weights. base: the frozen weights under an adapter.
    """

    number: int
    whole: SharedArrays
    changes: SharedArrays | None
    base: SharedArrays | None = None

    @classmethod
    def after(
        cls, last: "Update | None", arrays: Sequence[np.ndarray], anchor_every: int, base: SharedArrays | None = None
    ) -> "Update":
        """Returns these weights as the update after `last`. Every `anchor_every`-th update has no `changes`."""
        number, whole, changes = 0 if last is None else last.number + 1, SharedArrays.of(arrays), None
        if last is not None and number % anchor_every:
            changes = SharedArrays.of(delta(read(last.whole.path), arrays))
        return cls(number, whole, changes if changes and changes.size < whole.size else None, base)

    def command(
        self, present: "Update | None", again: Mapping[int, Prompt] | None = None
    ) -> tuple[dict[str, Any], SharedArrays]:
        """Returns the command to replace the update `present` by this one, and the file that it names."""
        sent, base = self.whole, None
        if self.changes is not None and present is not None and present.number + 1 == self.number:
            sent, base = self.changes, present.number
        prompts = None if again is None else [astuple(prompt) for prompt in again.values()]
        return {"take": {"path": sent.path, "number": self.number, "base": base, "again": prompts}}, sent


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
        self._processes = [self._process(place) for place in asked()]
        self._refusal = ""  # the last one of `asked`
        self._failed: Sequence[Place] = ()  # asked places whose processes did not start
        self._threads = ThreadPoolExecutor(count, "workers")
        self._anchor_every = section.anchor_every if section.transfer == "delta" else 1
        self._newest: Update | None = None
        self._present: Update | None = None  # the update with which all processes draw
        self._transfers: list[tuple[int, float]] = []  # (bytes, seconds) of `put` and `take`, in several threads
        self._base: tuple[Any, SharedArrays] | None = None  # the frozen weights under an adapter, and their file
        self.rooms, self.running = [0] * self._count, 0

    def fresh(self) -> list[Decoding]:
        return [saved(self._template.fresh(), self._template.mesh) for _ in range(self._count)]

    def start(self, states: Sequence[Decoding]) -> None:
        shares = [jax.tree.leaves([states[worker] for worker in share]) for share in self._shares]
        shared = [SharedArrays.of(to_host(leaves)) for leaves in shares]
        self._note_room(self._ask([{"start": arrays.path} for arrays in shared], shared))

    def states(self) -> list[Decoding]:
        states = [self._treedef.unflatten(to_devices(arrays, self._shardings)) for arrays in self._arrays()]
        present = [process.place for process in self._processes]
        if (places := self._asked_or(present)) == present:
            self._failed = ()
        elif places != self._failed:
            self._divide(states, places)
        return states

    def drawn(self) -> DrawnRows:
        return drawn_rows([self._treedef.unflatten(arrays) for arrays in self._arrays()])

    def _arrays(self) -> Iterator[list[np.ndarray]]:
        """Yields the leaves of each worker's state. Successors of processes will start from these states."""
        assert self._present is not None
        base, take = self._present.base, self._present.command(None)
        bases = [] if base is None else [({"base": base.path}, base)]
        for process, share in zip(self._processes, self._shares, strict=True):
            shared = SharedArrays.opened(process.ask({"states": None}))
            arrays, count = read(shared.path), len(self._shardings)
            yield from (arrays[first : first + count] for first in range(0, count * len(share), count))
            process.repeat_from([*bases, ({"start": shared.path}, shared), take])

    @property
    def _shares(self) -> list[np.ndarray]:
        """The logical workers of each process."""
        return np.array_split(range(self._count), len(self._processes))

    def _asked_or(self, present: Sequence[Place]) -> Sequence[Place]:
        """Returns the asked places, or those of the present processes if the asked ones are refused."""
        try:
            places = self._asked()
            more = self._section.engine == "ray" and len(places) > len(present)
            if more and (too_few := lacking(len(places), self._gpus)):
                raise UserError(too_few)
        except (UserError, OSError) as error:
            if str(error) != self._refusal:
                self._refusal = str(error)
                self._tell(f"{error}; {len(present)} rollout process(es) go on")
            return present
        self._refusal = ""
        return places

    def _divide(self, states: Sequence[Decoding], places: Sequence[Place]) -> None:
        """Divides the logical workers over processes at these places. Those that are there already go on there.

        If new processes do not start, the present ones go on, unless one of them must end first to free its GPUs.
        """
        present = {process.place: process for process in self._processes}
        leaving = [process for place, process in present.items() if place not in places]
        new = {place: self._process(place) for place in places if place not in present}
        if _gpus_of(new).isdisjoint(_gpus_of(process.place for process in leaving)):
            try:
                self._begin(list(new.values()))
            except (UserError, RunFailure, OSError) as error:
                self._failed = places
                self._tell(f"{error}; {len(present)} rollout process(es) go on")
                return
        for process in leaving:
            process.close()
        self._processes = [present.get(place) or new[place] for place in places]
        for process in self._processes:
            process.forget()
        update, self._present = self._present, None  # new processes have no weights
        assert update is not None
        try:
            self.start(states)
            self.take(update, None)
        except (UserError, RunFailure) as error:
            asked = f"{self._folder / FLEET} asked for {len(places)} rollout process(es)"
            raise type(error)(f"{error}; {asked}") from error
        number = f" in place of {len(present)}" if len(places) != len(present) else ""
        gpus = f" with fleet.devices=[{', '.join(devices for _, devices in places)}]" if _gpus_of(places) else ""
        self._failed = ()
        self._tell(f"{len(places)} rollout process(es) go on{number}{gpus}")

    def _begin(self, processes: Sequence["_Process"]) -> None:
        """Starts new processes at the same time. Ends all of them if one does not start."""
        try:
            list(self._threads.map(_Process.begin, processes))
        except BaseException:  # also an interrupt: nobody else knows these processes
            for process in processes:
                process.close()
            raise

    def _process(self, place: Place) -> "_Process":
        """Returns a process, which starts at its first command."""
        number, devices = place
        environment, start = dict(os.environ), partial(LocalWorker, "jrlhf.fleet.worker")
        if self._section.engine == "ray":
            # Programs depend on XLA's flags; everything else is as the cluster sets it.
            environment = {name: value for name, value in os.environ.items() if name == "XLA_FLAGS"}
            start = partial(RayWorker, gpus=self._gpus)
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        log = self._folder / f"worker-{number}.log"
        return _Process(place, self._setup, partial(start, environment), log, self._tell)

    def put(self, weights: Weights) -> Update:
        begin = time.monotonic()
        base, adapter = weights
        if adapter and self._base is None:
            self._base = base, SharedArrays.of(to_host(jax.tree.leaves(base)))
        travelling = adapter or base
        self._shardings_of_update = jax.tree.map(lambda leaf: leaf.sharding, travelling)
        frozen = None if self._base is None else self._base[1]
        self._newest = Update.after(self._newest, to_host(jax.tree.leaves(travelling)), self._anchor_every, frozen)
        self._transfers.append((0, time.monotonic() - begin))
        return self._newest

    def weights(self, handle: Update) -> Weights:
        leaves, treedef = jax.tree.flatten(self._shardings_of_update)
        weights = treedef.unflatten(to_devices(read(handle.whole.path), leaves))
        return (weights, {}) if self._base is None else (self._base[0], weights)

    def take(self, weights: Update, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        begin, count = time.monotonic(), len(self._processes)
        if self._present is None and weights.base is not None:
            self._ask([{"base": weights.base.path}] * count, [weights.base] * count)
        command, sent = weights.command(self._present, again)
        identities = self._ask([command] * count, [sent] * count)
        self._present = weights
        self._transfers.append((sent.size, time.monotonic() - begin))
        return identities

    def identities(self) -> list[Identity]:
        return [own for answer in self._ask([{"identities": None}] * len(self._processes)) for own in answer]

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[Progress]:
        commands = [
            {"decode": [[astuple(prompt) for prompt in prompts[worker]] for worker in share]} for share in self._shares
        ]
        answers = self._ask(commands)
        self._note_room(answers)
        return [Progress(*row) for answer in answers for row in answer["progress"]]

    def metrics(self) -> dict[str, float]:
        transfers, self._transfers = self._transfers, []
        size, seconds = (float(sum(numbers)) for numbers in zip((0, 0.0), *transfers, strict=True))
        return {"fleet/transfer_bytes": size, "fleet/transfer_seconds": seconds}

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._threads.shutdown()

    def _ask(self, commands: Sequence[Mapping[str, Any]], shared: Iterable[SharedArrays | None] = repeat(None)) -> list:
        """Sends a command to each process at the same time; returns the answers in the order of the processes."""
        return list(self._threads.map(_Process.ask, self._processes, commands, shared))

    def _note_room(self, answers: Sequence[Mapping[str, Any]]) -> None:
        self.rooms = [room for answer in answers for room in answer["rooms"]]
        self.running = sum(answer["running"] for answer in answers)


class _Process:
    """A process that is replaced if it ends or hangs. Its successor repeats the commands since the last state.

    A process hangs if it does not answer in time. For its first command of a kind, which compiles, it has
    `fleet.deadline`. Later it has 10 times the longest of the last commands of that kind, at least `LEAST` and at most
    `fleet.deadline`. A successor at the same command has twice that, and the last of `ATTEMPTS` has `fleet.deadline`,
    so a process that is only slow is not replaced until the run ends; its time counts for the commands after it.
    """

    def __init__(
        self,
        place: Place,
        setup: Mapping[str, Any],
        start: Callable[[Callable[[bytes], None]], LocalWorker | RayWorker],
        log: Path,
        tell: Callable[[str], None],
    ):
        self.place, self._number = place, place[0]
        self._deadline, self._start, self._log = setup["deadline"], start, log
        self._tell, self._worker, self._closed = tell, None, False
        self._setup = encode(setup)
        self._patience = 1.0
        # Seconds of the present process's first command of each kind; of the others, of all processes.
        self._first = dict[tuple, float]()
        self._seconds = defaultdict[tuple, deque[float]](partial(deque, maxlen=RECENT))
        self._commands: list[_Command] = []  # which a successor repeats
        program()  # takes the digest of the program's files now, before anybody edits them

    def ask(self, command: Mapping[str, Any], shared: SharedArrays | None = None) -> Any:
        """Returns the answer to a command. shared: the arrays whose path it contains."""
        sent = _Command.of(command, shared)
        answer = self._tried(lambda: self._send(self._started(), sent))
        self._commands.append(sent._replace(answer=answer))
        return decode(answer)

    def begin(self) -> None:
        """Starts the process now, before its first command."""
        self._tried(self._started)

    def _tried(self, act: Callable[[], T]) -> T:
        """Returns the result of `act`, which is repeated with another process if one is lost."""
        reason = ""
        for attempt in range(1, ATTEMPTS + 1):
            self._patience = math.inf if attempt == ATTEMPTS else 2.0 ** (attempt - 1)
            try:
                return act()
            except _Lost as lost:
                reason = str(lost)
                self._tell(f"rollout process {self._number} was lost ({reason}); another one takes its place")
        raise RunFailure(
            f"{ATTEMPTS} times in a row rollout process {self._number} was lost ({reason}): see {self._log}"
        )

    def repeat_from(self, commands: Sequence[tuple[Mapping[str, Any], SharedArrays]]) -> None:
        """Makes a successor begin with these commands instead of all commands so far."""
        self._commands = [_Command.of(command, shared) for command, shared in commands]

    def forget(self) -> None:
        """Forgets all commands and their times, because the process draws for other logical workers from now on."""
        self.repeat_from([])
        self._first.clear()
        self._seconds.clear()

    def close(self) -> None:
        """Ends the process. A command that waits for its answer fails."""
        self._closed = True
        if (worker := self._worker) is not None:  # read once: a thread whose request fails sets it to None
            worker.kill()

    def _started(self) -> LocalWorker | RayWorker:
        if self._worker is None:
            self._worker, self._first = self._start(self._write), {}
            if self._closed:  # closed while the process started
                self._worker.kill()
            facts = decode(self._send(self._worker, _Command(self._setup, ("setup",))))
            if facts["program"] != program():
                raise UserError(
                    f"rollout process {self._number} runs another version of jrlhf or JAX than the trainer, or their "
                    "files were changed since the trainer started: install one version everywhere and resume the run"
                )
            for command in self._commands:
                if self._send(self._worker, command) != command.answer and command.answer is not None:
                    raise RunFailure(
                        f"rollout process {self._number} was replaced and does not repeat what the one before it drew: "
                        "nothing was learned from it; see that all processes run on devices of one kind"
                    )
        return self._worker

    def _send(self, worker: LocalWorker | RayWorker, command: "_Command") -> str:
        kind, begin = command.kind, time.monotonic()
        answer = worker.request(command.text.encode(), self._allowance(kind), command.shared)
        if "failure" in answer:
            self._worker = None
            if self._closed:
                raise RunFailure(f"rollout process {self._number} was ended")
            raise _Lost(answer["detail"])
        seconds = time.monotonic() - begin
        if kind in self._first:
            self._seconds[kind].append(seconds)
        else:
            self._first[kind] = seconds
        return answer["answer"]

    def _allowance(self, kind: tuple) -> float:
        """Returns how many seconds the process has for a command of this kind."""
        if kind not in self._first:
            return self._deadline
        pace = 10 * max(self._seconds[kind], default=self._first[kind])
        return min(self._deadline, self._patience * max(LEAST, pace))

    def _write(self, output: bytes) -> None:
        with contextlib.suppress(OSError), open(self._log, "ab") as log:  # on a full disk the log loses lines
            log.write(output)


class _Command(NamedTuple):
    """A command to a process. kind: what decides which programs it runs: its name, and how many prompts each worker
    prefills, because waves of prompts have a few sizes, each with its own program, which is compiled when it is needed.
    answer: None if it is not to be checked. shared: the file that the command names.
    """

    text: str
    kind: tuple
    answer: str | None = None
    shared: SharedArrays | None = None

    @classmethod
    def of(cls, command: Mapping[str, Any], shared: SharedArrays | None) -> "_Command":
        again = command.get("take", {}).get("again") or []
        kind = *command, *(len(prompts) for prompts in command.get("decode") or [again])
        return cls(encode(command), kind, shared=shared)


class _Lost(Exception):
    """A process ended or hung; the argument says how."""
