"""What both sides of a comparison share. Runs in the peer's environment, too: the standard library and NumPy only.

A side is a module whose `main` gives its cases: functions from a `Job` to a JSON object, which is printed as the last
line of the output.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

LEARNING_RATE = 1e-5
KL_COEF = 0.04
SAMPLES = 2  # of a prompt, in GRPO: half as many prompts as rows
TURN = "waits for its turn"  # a line of the output by which a process says so
SETTLING = 0.05  # seconds until a process's idle threads sleep: OpenMP's first spin, on a core that the next would use
FIRST_ID = 3  # the ids below are a tokenizer's pad, end and unknown: never in a prompt


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model with tied embeddings, all float32. Every role has them."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    max_positions: int = 512
    rope_theta: int = 1_000_000  # Tunix computes with this one whatever its config says
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Job:
    """What one process does.

    directory: holds the weights of every role as Hugging Face directories actor, critic and reward.
    batch, prompt, response: rows, and tokens of each; all responses are as long as the limit, drawn at temperature 1
        from the whole vocabulary.
    variant: which of the side's ways of doing it.
    devices: of ours, over which its rows are divided; they share the machine's cores.
    warmup, repeats: repetitions that do not count, and that do.
    in_turn: whether other processes are alive beside it, so that every repetition waits for its turn.
    """

    case: str
    directory: str
    shape: Shape
    batch: int
    prompt: int
    response: int
    variant: str = ""
    devices: int = 1
    warmup: int = 4
    repeats: int = 12
    in_turn: bool = False

    def model(self, role: str) -> Path:
        return Path(self.directory) / role

    @property
    def steps(self) -> int:
        return self.warmup + self.repeats

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        fields = json.loads(text)
        return Job(**fields | {"shape": Shape(**fields["shape"])})


def prompts(job: Job) -> np.ndarray:
    """The prompts of every step [steps, B, P]: the same on both sides."""
    size = (job.steps, job.batch, job.prompt)
    return np.random.default_rng(0).integers(FIRST_ID, job.shape.vocab, size, dtype=np.int32)


def given_tokens(job: Job) -> np.ndarray:
    """Tokens [B, P+R] on which both sides must compute the same numbers."""
    size = (job.batch, job.prompt + job.response)
    return np.random.default_rng(1).integers(FIRST_ID, job.shape.vocab, size, dtype=np.int32)


def others() -> float:
    """CPU seconds that other processes have taken on this machine since it started, what a hypervisor stole included.

    0 where there is no /proc/stat: then no repeat is ever dropped.
    """
    try:
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except FileNotFoundError:
        return 0.0
    busy = sum(ticks) - ticks[3] - ticks[4]  # less idle and waiting for input
    return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


class Repetitions:
    """The repetitions of a job: how long each took, and what others took of the machine meanwhile, in seconds."""

    def __init__(self, job: Job):
        self._job = job
        self._measured: list[tuple[float, float]] = []
        self._began: tuple[float, float] | None = None

    def next(self) -> None:
        """Ends the repetition under way, if there is one; begins another, in its turn."""
        if self._began is not None:
            began, busy = self._began
            self._measured.append((time.perf_counter() - began, others() - busy))
        if self._job.in_turn:
            wait_for_turn()
        self._began = time.perf_counter(), others()

    def result(self) -> dict[str, list[float]]:
        """Those that count. Every repetition must have ended."""
        assert len(self._measured) == self._job.steps
        seconds, busy = zip(*self._measured[self._job.warmup :], strict=True)
        return {"seconds": list(seconds), "others": list(busy)}


def wait_for_turn() -> None:
    """Says that it waits, and returns once it is told to go on.

    Raises:
        EOFError: nobody is left who would tell.
    """
    time.sleep(SETTLING)
    os.write(1, f"\n{TURN}\n".encode())  # also where Python's own output is turned elsewhere
    if not sys.stdin.readline():
        raise EOFError("nobody tells whose turn it is")


def timed(job: Job, step: Callable[[np.ndarray], None]) -> dict[str, list[float]]:
    """Repetitions of a step, which is called with each step's prompts [B, P] and returns when all is done."""
    repetitions = Repetitions(job)
    repetitions.next()
    for rows in prompts(job):
        step(rows)
        repetitions.next()
    return repetitions.result()


def product_seconds(job: Job, place: Callable[[np.ndarray], Any], product: Callable[[Any, Any], Any]) -> float:
    """The least seconds of a float32 product of 4,096 tokens with a matrix of the mlp.

    place: makes a side's own array. product: returns when it is done.
    """
    draw, sizes = np.random.default_rng(2), ((4096, job.shape.embed), (job.shape.embed, job.shape.mlp))
    x, y = (place(draw.normal(size=size).astype(np.float32)) for size in sizes)
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        product(x, y)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def save_numbers(job: Job, side: str, *, logprobs: Any, values: Any, greedy: Any) -> None:
    """Saves the numbers of the case `check`.

    They are log-probabilities and values of `given_tokens` from the second token on [B, P+R-1], and the greedy
    responses [B, R] to its first P tokens.
    """
    np.savez(Path(job.directory) / f"{side}.npz", logprobs=logprobs, values=values, greedy=greedy)


def main(cases: Mapping[str, Callable[[Job], Mapping[str, Any] | None]], packages: Sequence[str]) -> None:
    """Does the job that the command line says, and prints its result with the versions of these packages."""
    job = Job.from_json(sys.argv[1])
    result = cases[job.case](job)
    versions = {name: importlib.metadata.version(name) for name in packages}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kibibytes on Linux
    print("\n" + json.dumps({**(result or {}), "peak_bytes": peak, "versions": versions}))
