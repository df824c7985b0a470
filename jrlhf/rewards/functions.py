"""Reward functions in worker processes: a deadline for each call, and no failure that goes unnoticed."""

import hashlib
import math
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jrlhf.config.schema import RewardConfig
from jrlhf.errors import UserError
from jrlhf.rewards import builtin
from jrlhf.rewards.process import Worker
from jrlhf.rewards.types import Sample, Scored
from jrlhf.rewards.user_code import resolve
from jrlhf.rewards.worker import GIVEN

LOG_BYTES = 16 << 20  # of the functions' output, kept in the log file
SHOWN = 300  # characters of a text in a message


class RewardFailure(UserError):
    """A reward function failed on a sample, and no setting says which score such samples get."""


@dataclass
class FunctionReward:
    """A function of text as a reward, run in processes of its own. Use it in a `with`; one thread at a time.

    **The function** is `package.module:function`, `path/file.py:function` or the name of a built-in one
    (`jrlhf.rewards.builtin`). Its parameters' names tell how it is called; both ways may be `async def`:

    - TRL's: `f(prompts, completions, completion_ids, log_extra, log_metric, **columns) -> list`, one score per sample.
      It gets the arguments that it names, or all if it takes `**`. Texts are strings, or lists of messages for
      conversations. One call has the rows of one worker.
    - verl's: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`. One call per sample,
      one after the other; coroutines run together. `ground_truth` is `reward_model["ground_truth"]` of the row, or a
      column of that name. In a dict, "score" is the score and further numbers are extras.

    A score is a number (of Python's, NumPy's, a tensor's; booleans are 0 and 1), or one number per response id.

    **Failures** are counted in `Scored.failures` by kind. Their samples get `on_failure`, or stop the run if that is
    None:

    - hang: no answer within `deadline` seconds. The worker and the programs that it started are killed and replaced.
    - crash: the process ended. It is replaced.
    - exception: the function raised one. A `jrlhf.errors.UserError` stops the run instead: it is for bad input.
    - none, nan, infinite, type, length: it returned that, something that is no number, or too few or too many.

    **Randomness.** Before each call Python's `random`, and NumPy's and torch's global state if the function's module
    imported them, are set from `seed`, `step` and the call's first row: a run that was killed and resumed draws alike.

    **Not a sandbox.** The function has this user's rights. What it runs that a model wrote needs a sandbox of its own.
    Workers get JAX_PLATFORMS=cpu, so that a function that uses JAX leaves the accelerators to training; stdin is empty;
    stdout and stderr go to `log` (the first 16 MiB) or nowhere. The processes end with this one, even if that is
    killed: at once, or at the deadline where a call holds the interpreter lock. A program that the function starts
    *and* detaches into a session of its own is not followed. Needs a POSIX system.
    """

    name: str  # for messages and metrics
    spec: str
    _: KW_ONLY
    workers: int = 1  # processes. They get the rows in order: results do not depend on their speed
    deadline: float = 30.0  # seconds that a call may take. A stuck worker costs this long each time
    on_failure: float | None = None  # the score of samples on which the function failed; None: stop
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments, by name
    columns: Mapping[str, str] = field(default_factory=dict)  # parameter -> column of the dataset
    start_deadline: float = 120.0  # seconds in which a worker must have imported the function
    seed: int = 0  # of the function's randomness
    log: Path | str | None = None  # a file to which the functions' output is appended
    kind: Literal["reward", "cost"] = "reward"

    def __post_init__(self) -> None:
        self._called = f"{self.kind} {self.name!r}"
        if not (isinstance(self.workers, int) and self.workers >= 1):
            raise UserError(f"workers={self.workers!r} of {self._called}: it must be an integer of at least 1")
        for key in ("deadline", "start_deadline"):
            if not 0 < (seconds := getattr(self, key)) <= 1e6:
                raise UserError(f"{key}={seconds!r} of {self._called}: it must be positive, in seconds, at most 1e6")
        if self.on_failure is not None and not math.isfinite(self.on_failure):
            raise UserError(
                f"on_failure={self.on_failure!r} of {self._called}: it must be finite, or null to stop the run"
            )
        self.spec = _resolve(self._called, self.spec)
        self._pool: dict[int, Worker] = {}
        self._facts: dict[str, Any] = {}  # about the function, from the first worker that was ready
        self._log_file, self._logged, self._log_lock = None, 0, threading.Lock()
        self._checked = False
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        """Starts the workers and imports the function in each."""
        if self._pool:
            raise RuntimeError(f"{self._called} is started already")
        if self.log is not None:
            try:
                self._log_file = open(self.log, "ab", buffering=0)
            except OSError as error:
                raise UserError(f"log={self.log} of {self._called} cannot be opened: {error}") from error
        try:
            self._on_workers(self._start)
            for parameter in self.columns:
                taken = parameter in GIVEN[self._facts["style"]] or parameter in self.options
                if taken or not (parameter in self._facts["columns"] or self._facts["open_ended"]):
                    raise UserError(
                        f"columns.{parameter} of {self._called}: the parameters of {self.spec} that take a "
                        f"column are {', '.join(self._facts['columns']) or 'none'}"
                    )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers: idle ones run their exit handlers (2 s), others are killed. May be called again."""
        pool, self._pool = list(self._pool.values()), {}
        try:
            for worker in pool:
                worker.dismiss(pickle.dumps(None))
            until = time.monotonic() + 2
            for worker in pool:
                worker.wait(until - time.monotonic())
        finally:
            for worker in pool:
                worker.kill()
            with self._log_lock:
                if self._log_file is not None:
                    self._log_file.close()
                    self._log_file = None

    def describe(self) -> str:
        """One line for the log: what runs, from which file, and what happens if it fails."""
        facts = self._facts
        source = f" ({facts['file']}, sha256 {facts['sha256'][:16]})" if facts.get("sha256") else ""
        failing = "a failure stops the run" if self.on_failure is None else f"{self.on_failure:g} where it fails"
        processes = f"{self.workers} process" + ("es" if self.workers > 1 else "")
        return f"{self.kind} {self.name}: {self.spec}{source} in {processes}, {self.deadline:g} s a call, {failing}"

    @property
    def fingerprint(self) -> str:
        """One word for the function's file and the options that it is called with."""
        ours = self.spec.startswith(f"{builtin.__name__}:")
        source = builtin.IDENTITY if ours else self._facts.get("sha256", "")
        words = [self.spec, source, repr(sorted(self.options.items()))]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Compares the function's parameters with a dataset's columns, before anything is trained."""
        columns = set(columns)
        given = columns | {"data_source", "extra_info"} | ({"ground_truth"} if "reward_model" in columns else set())
        for parameter in [*self._facts["required"], *self.columns]:
            column = self.columns.get(parameter, parameter)
            if column not in given:
                raise UserError(
                    f"{self._called} needs the column {column!r} for {self.spec}, and the dataset has "
                    f"{', '.join(sorted(columns)) or 'none'}: name one of these in columns.{parameter}"
                )
        self._checked = True

    def score(self, samples: Sequence[Sample], step: int = 0) -> Scored:
        """The scores of `samples`, in their order. Raises RewardFailure where a failure stops the run."""
        if not self._pool:
            raise RuntimeError(f"{self._called} is not started: use it in a with statement")
        if not self._checked and samples:
            self.check_columns(set().union(*(sample.columns for sample in samples)))
        results: list[Any] = [None] * len(samples)
        one_by_one = self._facts["style"] == "verl" and not self._facts["async"]

        def work(index: int) -> None:
            share = range(len(samples) * index // self.workers, len(samples) * (index + 1) // self.workers)
            for rows in [range(row, row + 1) for row in share] if one_by_one else [share] if share else []:
                request = self._request(rows, samples, step)
                if self._pool[index].ended:  # in an earlier call, or since
                    self._pool[index].kill()
                    self._start(index)
                answer = self._pool[index].request(request, self.deadline)
                if self._stopping.is_set():
                    return
                self._keep(answer, rows, samples, results)

        self._on_workers(work)
        return self._scored(samples, results)

    # Workers

    def _on_workers(self, job: Callable[[int], None]) -> None:
        """Runs `job` with each worker's index, in a thread of its own.

        After an error the workers that are busy are killed: the next batch would get their answers.
        """
        self._stopping.clear()
        with ThreadPoolExecutor(self.workers, thread_name_prefix=self.kind) as threads:
            futures = {threads.submit(job, index): index for index in range(self.workers)}
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stopping.set()  # first: a worker that is started from here on sees it
                for future, index in futures.items():
                    if not future.done() and index in self._pool:
                        self._pool[index].interrupt()
                raise

    def _start(self, index: int) -> None:
        # Strings hash alike in every worker and every run, and no JAX of the function's takes an accelerator.
        environment = {"PYTHONHASHSEED": str(self.seed % 2**32), **os.environ, "JAX_PLATFORMS": "cpu"}
        deadlines = {"deadline": self.deadline, "start_deadline": self.start_deadline}
        request = self._pickle({"spec": self.spec, "options": self.options, **deadlines}, "its options")
        worker = self._pool[index] = Worker(environment, self._write)
        if self._stopping.is_set():
            worker.interrupt()
        answer = worker.request(request, self.start_deadline)
        if "failure" in answer:
            event = "did not finish importing" if answer["failure"] == "hang" else "ended while importing"
            raise RewardFailure(f"{self._called}: the process {event} {self.spec} ({answer['detail']})")
        if "bad" in answer:
            raise UserError(f"{self._called}: {answer['bad']}")
        self._facts = self._facts or dict(answer["ready"])

    def _write(self, output: bytes) -> None:
        with self._log_lock:
            if self._log_file is not None and self._logged < LOG_BYTES:
                output = output[: LOG_BYTES - self._logged]
                self._logged += len(output)
                full = self._logged == LOG_BYTES
                self._log_file.write(output + b"\n(further output is not kept)\n" if full else output)

    # Calls

    def _request(self, rows: range, samples: Sequence[Sample], step: int) -> bytes:
        chosen = [samples[row] for row in rows]
        if self._facts["style"] == "trl":
            arguments: Any = self._batch_arguments(chosen)
        elif self._facts["async"]:
            arguments = [self._sample_arguments(sample) for sample in chosen]
        else:
            arguments = self._sample_arguments(chosen[0])
        lengths = [len(sample.response_ids) for sample in chosen]
        call = {"arguments": arguments, "lengths": lengths, "seed": f"{self.seed}/{step}/{rows.start}"}
        return self._pickle(call, "the dataset's columns")

    def _pickle(self, message: Any, content: str) -> bytes:
        try:
            return pickle.dumps(message)
        except Exception as error:
            raise UserError(f"{self._called}: {content} cannot be sent to its process ({error})") from error

    def _batch_arguments(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """Arguments of TRL's call: lists of every column that a row has and the function takes; None in other rows."""
        rows = [_columns(sample) for sample in samples]
        present = dict.fromkeys(column for row in rows for column in row)
        lists: dict[str, list[Any]] = {
            "prompts": [_plain(sample.prompt) for sample in samples],
            "completions": [_plain(sample.completion) for sample in samples],
            "completion_ids": [[int(token) for token in sample.response_ids] for sample in samples],
        }
        arguments = {name: x for name, x in lists.items() if self._facts["open_ended"] or name in self._facts["names"]}
        for parameter, column in self._wanted(present).items():
            if column in present or parameter in self._facts["required"]:
                arguments[parameter] = [row.get(column) for row in rows]
        return arguments

    def _sample_arguments(self, sample: Sample) -> dict[str, Any]:
        """Arguments of verl's call: `solution_str`, and the columns that the function names and the row has."""
        row = _columns(sample)
        arguments: dict[str, Any] = {"solution_str": sample.response_text}
        for parameter, column in self._wanted(("data_source", "ground_truth", "extra_info")).items():
            if column in row or parameter in self._facts["required"]:
                arguments[parameter] = row.get(column)
        return arguments

    def _wanted(self, others: Iterable[str]) -> dict[str, str]:
        """Parameter -> column, of the parameters that the function names and, if it takes `**`, of the `others`."""
        parameters: list[str] = [*self._facts["columns"], *self.columns]
        if self._facts["open_ended"]:
            closed = {*self.options, *GIVEN[self._facts["style"]]}
            parameters += [name for name in others if name.isidentifier() and name not in closed]
        return {parameter: self.columns.get(parameter, parameter) for parameter in parameters}

    # Results

    def _keep(self, answer: Mapping[str, Any], rows: range, samples: Sequence[Sample], results: list[Any]) -> None:
        """Notes the results of a call, and stops the run where a failure must."""
        if "bad" in answer:
            raise UserError(f"{self._called}: {answer['bad']}")
        whole = "failure" in answer
        for row, result in zip(rows, [answer] * len(rows) if whole else answer["results"], strict=True):
            results[row] = result
        failed = next((row for row in rows if "failure" in results[row]), None)
        if failed is None:
            return
        story = self._story(samples[failed], results[failed], len(rows) if whole else 1)
        self._write(f"{story}\n".encode("utf-8", "backslashreplace"))
        if self.on_failure is None:
            raise RewardFailure(
                f"{story}: mend the function, or set on_failure of {self._called} to a score for such samples"
            )

    def _story(self, sample: Sample, failure: Mapping[str, str], samples: int) -> str:
        """A failure in one line, with the sample; unprintable characters are escaped."""
        among = f"a call with {samples} samples, the first of them" if samples > 1 else "the sample"
        names = dict.fromkeys(self.columns.get(c, c) for c in self._facts["columns"])
        row = _columns(sample)
        shown = {"prompt": sample.prompt_text, "response": sample.response_text}
        shown |= {column: row[column] for column in names if column in row}
        text = ", ".join(f"{key}={_short(value)}" for key, value in shown.items())
        return f"{self._called} failed ({failure['failure']}: {failure['detail']}) on {among} {text}"

    def _scored(self, samples: Sequence[Sample], results: Sequence[Mapping[str, Any]]) -> Scored:
        values = [result.get("score", self.on_failure) for result in results]
        extras = [result.get("extras", {}) for result in results]
        names = dict.fromkeys(name for row in extras for name in row)
        tokens = None
        if any(isinstance(value, list) for value in values):
            tokens = tuple(_per_token(*row) for row in zip(values, samples, strict=True))
        return Scored(
            scores=np.array([float(np.sum(x)) if isinstance(x, list) else x for x in values], np.float64),
            token_scores=tokens,
            extras={name: np.array([row.get(name, np.nan) for row in extras], np.float64) for name in names},
            failures=Counter(result["failure"] for result in results if "failure" in result),
        )


def reward_function(
    reward: RewardConfig, seed: int, log: Path | None = None, *, kind: Literal["reward", "cost"] = "reward"
) -> FunctionReward:
    """A reward or cost that is a function, not started yet. log: None for one that is only checked, by one worker."""
    assert reward.function is not None
    settings = {key: getattr(reward, key) for key in ("deadline", "on_failure", "options", "columns")}
    workers = 1 if log is None else reward.workers
    return FunctionReward(reward.name, reward.function, workers=workers, seed=seed, log=log, kind=kind, **settings)


def _resolve(called: str, spec: str) -> str:
    """The spec as a worker takes it, as far as it can be checked without running anything."""
    if ":" in spec:
        return resolve(spec, called)
    if spec not in builtin.NAMES:
        raise UserError(
            f"{called}: {spec!r} is none of the built-in rewards ({', '.join(builtin.NAMES)}); write others "
            "as package.module:function or path/file.py:function"
        )
    if spec == "math_verify" and find_spec("math_verify") is None:
        raise UserError(f"{called}: math_verify needs its extra, pip install 'jrlhf[math]'")
    return f"{builtin.__name__}:{spec}"


def _columns(sample: Sample) -> dict[str, Any]:
    """The columns that a function may ask for: the dataset's, and verl's where they are stored elsewhere."""
    row = {c: value for c, value in sample.columns.items() if c not in ("prompt", "completion", "completion_ids")}
    row.setdefault("data_source", sample.source)
    judge = row.get("reward_model")
    if isinstance(judge, Mapping) and "ground_truth" in judge:
        row.setdefault("ground_truth", judge["ground_truth"])
    row["extra_info"] = row.get("extra_info") or {}
    return row


def _plain(text: Any) -> Any:
    """A string, or a list of messages as TRL's functions expect them."""
    return text if isinstance(text, str) else [dict(message) for message in text]


def _per_token(value: float | list[float], sample: Sample) -> np.ndarray:
    if isinstance(value, list):
        return np.asarray(value, np.float64)
    tokens = np.zeros(len(sample.response_ids))
    tokens[-1:] = value  # where experience would place it; nowhere in an empty response
    return tokens


def _short(value: Any) -> str:
    text = repr(value if not isinstance(value, str) or len(value) <= SHOWN else f"{value[:SHOWN]}...")
    return text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]}..."
