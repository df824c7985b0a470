"""A rollout process, which is replaced if it is lost."""

import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jrlhf.errors import RunFailure, UserError
from jrlhf.rollouts.processes.places import Place
from jrlhf.rollouts.processes.ray_worker import NO_ROOM, RayWorker
from jrlhf.rollouts.processes.shared import SharedArrays
from jrlhf.rollouts.processes.worker import program
from jrlhf.run.child import Worker
from jrlhf.run.files import decode, encode

ATTEMPTS = 3  # number of processes in a row that may fail at one command
LEAST = 10.0  # seconds that a process always has for an answer, unless `fleet.deadline` is shorter
RECENT = 32  # number of commands of a kind from which a process's pace follows

T = TypeVar("T")


class LocalWorker(Worker):
    """A rollout process of this machine. If it answers with a path, `request` returns {"shared": the arrays there}."""

    longest = math.inf  # an answer has the tokens of all rows that end in a chunk

    def request(self, body: bytes, seconds: float, shared: SharedArrays | None = None) -> Mapping[str, Any]:
        answer = super().request(body, seconds)
        path = decode(answer.get("answer", "null"))
        if not isinstance(path, str):
            return answer
        try:
            return {"shared": SharedArrays.opened(path)}
        except OSError:
            self.kill()
            return {"failure": "crash", "detail": "ended before its arrays were read"}


class Process:
    """A process that is replaced if it ends or hangs.

    repeat: is called before the first command, also after a loss and after `forget`. It brings the process to the
    present by means of its argument, which does what `ask` does; returns False if an answer is not that of before.

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
        repeat: Callable[[Callable[..., Any]], bool],
    ):
        self.place, self._number = place, place[0]
        self._deadline, self._start, self._log = setup["deadline"], start, log
        self._tell, self._worker, self._closed = tell, None, False
        self._setup, self._repeat, self._is_present = setup, repeat, False
        self._patience = 1.0
        # Seconds of the present process's first command of each kind; of the others, of all processes.
        self._first = dict[tuple, float]()
        self._seconds = defaultdict[tuple, deque[float]](partial(deque, maxlen=RECENT))
        program()  # takes the digest of the program's files now, before anybody edits them

    def ask(self, command: Mapping[str, Any], shared: SharedArrays | None = None) -> Any:
        """Returns the answer to a command. shared: the arrays whose path it contains."""
        return self._tried(lambda: self._send(self._started(), command, shared))

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

    def forget(self) -> None:
        """Lets the process repeat before its next command, for other logical workers, and forgets former times."""
        self._is_present = False
        self._first.clear()
        self._seconds.clear()

    def close(self) -> None:
        """Ends the process. A command that waits for its answer fails."""
        self._closed = True
        if (worker := self._worker) is not None:  # read once: a thread whose request fails sets it to None
            worker.kill()

    def _started(self) -> LocalWorker | RayWorker:
        if self._worker is None:
            self._worker, self._first, self._is_present = self._start(self._write), {}, False
            if self._closed:  # closed while the process started
                self._worker.kill()
            facts = self._send(self._worker, self._setup, kind=("setup",))
            if facts["program"] != program():
                raise UserError(
                    f"rollout process {self._number} runs another version of jrlhf or JAX than the trainer, or their "
                    "files were changed since the trainer started: install one version everywhere and resume the run"
                )
        worker = self._worker
        if not self._is_present and not self._repeat(partial(self._send, worker)):
            raise RunFailure(
                f"rollout process {self._number} does not repeat what the one before it drew: nothing was learned "
                "from it; see that all processes run on devices of one kind"
            )
        self._is_present = True
        return worker

    def _send(
        self, worker: LocalWorker | RayWorker, command: Mapping[str, Any], shared: Any = None, kind: tuple = ()
    ) -> Any:
        kind, begin = kind or _kind(command), time.monotonic()
        answer = worker.request(encode(command).encode(), self._allowance(kind), shared)
        if "failure" in answer:
            self._worker = None
            if self._closed:
                raise RunFailure(f"rollout process {self._number} was ended")
            raise (NoRoom if answer["failure"] == NO_ROOM else _Lost)(answer["detail"])
        seconds = time.monotonic() - begin
        if kind in self._first:
            self._seconds[kind].append(seconds)
        else:
            self._first[kind] = seconds
        return answer["shared"] if "shared" in answer else decode(answer["answer"])

    def _allowance(self, kind: tuple) -> float:
        """Returns how many seconds the process has for a command of this kind."""
        if kind not in self._first:
            return self._deadline
        pace = 10 * max(self._seconds[kind], default=self._first[kind])
        return min(self._deadline, self._patience * max(LEAST, pace))

    def _write(self, output: bytes) -> None:
        with contextlib.suppress(OSError), open(self._log, "ab") as log:  # on a full disk the log loses lines
            log.write(output)


def _kind(command: Mapping[str, Any]) -> tuple:
    """Returns what decides which programs a command runs: its name, and how many prompts each worker prefills, because
    waves of prompts have a few sizes, each with its own program, which is compiled when it is needed."""
    again = command.get("take", {}).get("again") or []
    return *command, *(len(prompts) for prompts in command.get("decode") or [again])


class _Lost(Exception):
    """A process ended or hung; the argument says how."""


class NoRoom(Exception):
    """No machine has room for a process; the argument says for what."""
