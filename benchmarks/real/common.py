"""What all sides of a run on the real model share. Runs in the peers' environments, too, which have no JAX.

A side is a module that trains once, as its `Job` says, and writes into the job's folder the trained weights in Hugging
Face form and a `Trained`. The score of a response is the same function on all sides, `numeric_answer` of jrlhf.
"""

import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jrlhf.rewards.builtin import numeric_answer

Rows = Sequence[Mapping[str, Any]]  # with prompt, answer and ids
Conversation = list[dict[str, str]]


def scores(completions: Sequence[Any], rows: Rows) -> list[float]:
    """The scores of one response to each row, by the reward of the configs."""
    return [float(score or 0.0) for score in numeric_answer(completions, [row["answer"] for row in rows])]


@dataclass(frozen=True)
class Job:
    """What one process does.

    algorithm: grpo or ppo. model: the directory from which the run starts. folder: for its results; it has
    `steps.json`, the rows of every step [iterations, prompts] in the order in which they are to be asked, each with its
    question, its answer and its token ids. settings: numbers of the config (`settings_of`). changes: of the config, for
    our side, which reads it itself.
    """

    algorithm: str
    model: str
    folder: str
    seed: int
    settings: Mapping[str, Any]
    changes: Mapping[str, Any]

    @property
    def steps(self) -> list[list[dict[str, Any]]]:
        return json.loads((Path(self.folder) / "steps.json").read_text())

    @property
    def trained(self) -> Path:
        """The directory of the trained weights."""
        return Path(self.folder) / "model"


@dataclass(frozen=True)
class Trained:
    """One run.

    curve: the mean score of each step's responses. seconds: of each step, whatever else the machine did. resumed: it
    was interrupted, so that the process which ended it saw a part of it only.
    """

    curve: Sequence[float]
    seconds: Sequence[float]
    resumed: bool = False


class Watch:
    """Scores the responses of a peer, once a step, and keeps the curve and the times between two steps' scores."""

    def __init__(self, job: Job) -> None:
        self.curve: list[float] = []
        self._times: list[float] = []
        self._job, self._steps = job, iter(job.steps)

    def rows(self) -> list[dict[str, Any]]:
        """The next step's rows, each as often as it is answered."""
        return [row for row in next(self._steps) for _ in range(self._job.settings["samples"])]

    def score(self, completions: Sequence[Any], rows: Rows) -> list[float]:
        points = scores(completions, rows)
        self.curve.append(sum(points) / len(points))
        self._times.append(time.monotonic())
        print(f"step {len(self.curve)}: {self.curve[-1]:.3f}", flush=True)
        return points

    def result(self) -> Trained:
        return Trained(self.curve, [after - before for before, after in pairwise(self._times)])


def conversation(question: str, system: str) -> Conversation:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def check_ids(tokenizer: Any, job: Job) -> None:
    """Refuses to run where the peer's tokenizer and template make other tokens of the first step's questions."""
    for row in job.steps[0]:
        messages = conversation(row["prompt"], job.settings["system"])
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        if list(ids) != row["ids"]:
            raise SystemExit(f"{row['prompt']!r} has the tokens {list(ids)}, with ours {row['ids']}")


def main(train: Callable[[Job], Trained], packages: Sequence[str]) -> None:
    """Does the job that the command line says, and writes result.json into its folder."""
    job, started = Job(**json.loads(sys.argv[1])), time.monotonic()
    trained = train(job)
    assert len(trained.curve) == job.settings["iterations"], f"{len(trained.curve)} steps"
    used = resource.getrusage(resource.RUSAGE_SELF)
    result = asdict(trained) | {"wall": time.monotonic() - started, "cpu": used.ru_utime + used.ru_stime}
    result |= {"peak_gb": used.ru_maxrss * 1024 / 1e9}
    result |= {"versions": {name: importlib.metadata.version(name) for name in packages}}
    (Path(job.folder) / "result.json").write_text(json.dumps(result))
