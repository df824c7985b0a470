"""Reward functions in worker processes: a deadline a call, and no failure that goes unnoticed."""

import hashlib
import math
import os
import pickle
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np

from jrlhf.config.schema import RewardConfig
from jrlhf.errors import UserError
from jrlhf.rewards import builtin
from jrlhf.rewards.process import Death, Worker, dismiss, wait
from jrlhf.rewards.types import Sample, Scored
from jrlhf.rewards.user_code import resolve
from jrlhf.rewards.worker import GIVEN

GOODBYE = pickle.dumps(None)
LOG_BYTES = 16 << 20  # of the functions' output, kept in the log file
SHOWN = 300  # characters of a text in a message
NOTHING: Mapping[str, Any] = MappingProxyType({})


class RewardFailure(UserError):
    """A reward function failed on a sample, and nothing says which score such samples get."""


@dataclass(frozen=True)
class Call:
    """What a worker is asked at once: the rows of the batch, and the request that asks for their scores."""

    rows: range
    request: bytes


class FunctionReward:
    """A function of text as a reward, run in processes of its own. Use it in a `with`; one thread at a time.

        with FunctionReward("accuracy", "rewards/gsm8k.py:accuracy", workers=8, on_failure=-1.0) as reward:
            scored = reward.score(samples, step=0)

    **The function** is `package.module:function`, `path/file.py:function` or the name of a built-in one
    (`jrlhf.rewards.builtin`). Its parameters' names tell how it is called; both ways may be `async def`:

    - TRL's: `f(prompts, completions, completion_ids, log_extra, log_metric, **columns) -> list`, a score a sample. It
      gets those that it names, or all if it takes `**`. Texts are strings, or lists of messages for conversations. One
      call has the rows of one worker.
    - verl's: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`. One call a sample,
      one after the other; coroutines run together. `ground_truth` is `reward_model["ground_truth"]` of the row, or a
      column of that name. Of a dict, "score" is the score and further numbers are extras.

    A sample's score is a number (of Python's, NumPy's, a tensor's; booleans are 0 and 1), or one number for each of its
    response's ids.

    **Failures** are of a call (all its samples fail) or of a sample, by kind:

    - hang: no answer within `deadline` seconds. The worker is killed, and so is what it started, and replaced.
    - crash: the process ended. It is replaced.
    - exception: the function raised one. A `jrlhf.errors.UserError` stops the run instead: it is for bad input.
    - none, nan, infinite, type, length: it returned that, something that is no number, or too few or too many.

    Each is counted in `Scored.failures`; its samples get `on_failure`, or stop the run where that is None. No failure
    becomes a score by itself.

    **Randomness.** Before each call Python's `random`, and NumPy's and torch's global state if the function's module
    imported them, are set from `seed`, `step` and the call's first row: a run that was killed and resumed draws alike.

    **Not a sandbox.** The function has this user's rights. What it runs that a model wrote needs a sandbox of its own.
    Workers get JAX_PLATFORMS=cpu, so that a function that uses JAX leaves the accelerators to training; stdin is empty;
    stdout and stderr go to `log` (the first 16 MiB) or nowhere. The processes end with this one, even if that is
    killed: at once, or at the deadline where a call holds the interpreter lock. A program that the function starts
    *and* detaches into a session of its own is not followed. Needs a POSIX system.

    Args:
        name: of this reward, for messages and metrics.
        kind: what messages call it.
        spec: the function.
        workers: processes. The batch is divided among them in order, so that results do not depend on their speed.
        deadline: seconds a call may take. A stuck worker costs this long each time.
        on_failure: the score of samples on which the function failed. None: stop.
        options: further arguments, by name.
        columns: the function's parameter -> the dataset's column that it is given, where their names differ.
        start_deadline: seconds in which a worker must have imported the function.
        seed: of the function's randomness.
        log: a file to which the functions' output is appended.

    Raises:
        UserError: a bad argument.
    """

    def __init__(
        self,
        name: str,
        spec: str,
        *,
        workers: int = 1,
        deadline: float = 30.0,
        on_failure: float | None = None,
        options: Mapping[str, Any] = NOTHING,
        columns: Mapping[str, str] = NOTHING,
        start_deadline: float = 120.0,
        seed: int = 0,
        log: Path | str | None = None,
        kind: Literal["reward", "cost"] = "reward",
    ):
        self._kind, self._called = kind, f"{kind} {name!r}"
        if not (isinstance(workers, int) and workers >= 1):
            raise UserError(f"workers={workers!r} of {self._called}: it must be an integer of at least 1")
        for key, seconds in (("deadline", deadline), ("start_deadline", start_deadline)):
            if not 0 < seconds <= 1e6:
                raise UserError(f"{key}={seconds!r} of {self._called}: it must be positive, in seconds, at most 1e6")
        if on_failure is not None and not math.isfinite(on_failure):
            raise UserError(f"on_failure={on_failure!r} of {self._called}: it must be finite, or null to stop the run")
        self.name, self.spec, self.workers = name, _resolve(self._called, spec), workers
        self.deadline, self.on_failure = deadline, on_failure
        self.options, self.columns = dict(options), dict(columns)
        self._start_deadline, self._seed = start_deadline, seed
        self._log_path, self._log, self._logged = log, None, 0
        self._pool: list[Worker] = []
        self._facts: dict[str, Any] = {}
        self._checked = False

    def __enter__(self) -> Self:
        """Starts the workers and imports the function in each.

        Raises:
            UserError: it cannot be imported, or its parameters do not fit.
        """
        if self._pool:
            raise RuntimeError(f"{self._called} is started already")
        if self._log_path is not None:
            try:
                self._log = open(self._log_path, "ab", buffering=0)
            except OSError as error:
                raise UserError(f"log={self._log_path} of {self._called} cannot be opened: {error}") from error
        try:
            for _ in range(self.workers):
                self._pool.append(self._start())
            while starting := [worker for worker in self._pool if worker.busy]:
                wait(starting, min(worker.seconds_left for worker in starting))
                for worker in starting:
                    self._receive_facts(worker)
            facts = self._pool[0].facts
            assert facts is not None
            self._facts = facts
            for parameter in self.columns:
                taken = parameter in GIVEN[facts["style"]] or parameter in self.options
                if taken or not (parameter in facts["columns"] or facts["open_ended"]):
                    raise UserError(
                        f"columns.{parameter} of {self._called}: the parameters of {self.spec} that take a "
                        f"column are {', '.join(facts['columns']) or 'none'}"
                    )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers: idle ones run their exit handlers (2 s), others are killed. May be called again."""
        pool, self._pool = self._pool, []
        try:
            dismiss(pool, GOODBYE)
        finally:
            for worker in pool:
                worker.kill()
            if self._log is not None:
                self._log.close()
                self._log = None

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers."""
        return [worker.pid for worker in self._pool]

    def describe(self) -> str:
        """One line for the log: what runs, from which file, and what happens if it fails."""
        facts = self._facts
        source = f" ({facts['file']}, sha256 {facts['sha256'][:16]})" if facts.get("sha256") else ""
        failing = "a failure stops the run" if self.on_failure is None else f"{self.on_failure:g} where it fails"
        processes = f"{self.workers} process" + ("es" if self.workers > 1 else "")
        return f"{self._kind} {self.name}: {self.spec}{source} in {processes}, {self.deadline:g} s a call, {failing}"

    @property
    def fingerprint(self) -> str:
        """One word for the function: of its file, and of what it is called with."""
        called = [self.spec, self._facts.get("sha256", ""), repr(sorted(self.options.items()))]
        return hashlib.sha256("\0".join(called).encode()).hexdigest()[:16]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Compares the function's parameters with a dataset's columns, before anything is trained.

        Raises:
            UserError: the function needs a column that is not there.
        """
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

    def score(self, samples: Sequence[Sample], *, step: int = 0) -> Scored:
        """The scores of `samples`, in their order.

        Raises:
            RewardFailure: the function failed on a sample, which is shown, and `on_failure` is None; or it could not
                be started again after a failure.
            UserError: a column is missing, or the function itself says that its input is bad.
        """
        if not self._pool:
            raise RuntimeError(f"{self._called} is not started: use it in a with statement")
        if not self._checked and samples:
            self.check_columns(set().union(*(sample.columns for sample in samples)))
        results: list[Any] = [None] * len(samples)
        queues = self._divide(samples, step)
        asked: dict[int, Call] = {}
        try:
            while asked or any(queues):
                self._ask(queues, asked)
                busy = [worker for worker in self._pool if worker.busy]
                wait(busy, min(worker.seconds_left for worker in busy))
                for index, worker in enumerate(self._pool):
                    if worker.busy and worker.facts is None:
                        self._receive_facts(worker)
                    elif index in asked and (answer := worker.answer()) is not None:
                        self._keep(answer, asked.pop(index), samples, results)
        finally:
            for worker in self._pool:
                if worker.busy:
                    worker.kill()  # or its answer would be taken for the next batch's
        return self._scored(samples, results)

    # Workers

    def _start(self) -> Worker:
        # Strings hash alike in every worker and every run, and no JAX of the function's takes an accelerator.
        environment = {"PYTHONHASHSEED": str(self._seed % 2**32), **os.environ, "JAX_PLATFORMS": "cpu"}
        setup = {
            "spec": self.spec,
            "options": self.options,
            "deadline": self.deadline,
            "start_deadline": self._start_deadline,
        }
        request = self._pickle(setup, "its options")
        worker = Worker(environment, self._write)
        worker.ask(request, self._start_deadline)
        return worker

    def _receive_facts(self, worker: Worker) -> None:
        """Takes note of a worker that is ready, if it is; raises if it will never be."""
        answer = worker.answer()
        if isinstance(answer, Death):
            what = "did not finish importing" if answer.kind == "hang" else "ended while importing"
            raise RewardFailure(f"{self._called}: the process {what} {self.spec} ({answer.detail})")
        if answer is not None and "bad" in answer:
            raise UserError(f"{self._called}: {answer['bad']}")
        if answer is not None:
            worker.facts = dict(answer["ready"])

    def _ask(self, queues: list[deque[Call]], asked: dict[int, Call]) -> None:
        """Gives every idle worker its next call, and every dead one that has calls left a successor."""
        for index, queue in enumerate(queues):
            worker = self._pool[index]
            if not queue or worker.busy:
                continue
            worker.pump()  # it may have died since
            if worker.ended:
                worker.kill()
                self._pool[index] = self._start()
            else:
                asked[index] = queue.popleft()
                worker.ask(asked[index].request, self.deadline)

    def _write(self, output: bytes) -> None:
        if self._log is not None and self._logged < LOG_BYTES:
            kept = output[: LOG_BYTES - self._logged]
            self._logged += len(kept)
            if self._logged == LOG_BYTES:
                kept += b"\n(further output is not kept)\n"
            self._log.write(kept)

    # Calls

    def _divide(self, samples: Sequence[Sample], step: int) -> list[deque[Call]]:
        """The calls of each worker: consecutive rows, as equal in number as can be."""
        bounds = [len(samples) * index // self.workers for index in range(self.workers + 1)]
        shares = [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        one_by_one = self._facts["style"] == "verl" and not self._facts["async"]
        queues = []
        for share in shares:
            calls = [range(row, row + 1) for row in share] if one_by_one else [share] if share else []
            queues.append(deque(Call(rows, self._request(rows, samples, step)) for rows in calls))
        return queues

    def _request(self, rows: range, samples: Sequence[Sample], step: int) -> bytes:
        chosen = [samples[row] for row in rows]
        if self._facts["style"] == "trl":
            arguments: Any = self._batch_arguments(chosen)
        elif self._facts["async"]:
            arguments = [self._sample_arguments(sample) for sample in chosen]
        else:
            arguments = self._sample_arguments(chosen[0])
        lengths = [len(sample.response_ids) for sample in chosen]
        call = {"arguments": arguments, "lengths": lengths, "seed": f"{self._seed}/{step}/{rows.start}"}
        return self._pickle(call, "the dataset's columns")

    def _pickle(self, message: Any, what: str) -> bytes:
        try:
            return pickle.dumps(message)
        except Exception as error:
            raise UserError(f"{self._called}: {what} cannot be sent to its process ({error})") from error

    def _batch_arguments(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """TRL's call: lists, of every column that a row has and the function takes. None where a row lacks it."""
        rows = [_given(sample) for sample in samples]
        present = dict.fromkeys(column for row in rows for column in row)
        lists: dict[str, list[Any]] = {
            "prompts": [_plain(sample.prompt) for sample in samples],
            "completions": [_plain(sample.completion) for sample in samples],
            "completion_ids": [[int(token) for token in sample.response_ids] for sample in samples],
        }
        found = {name: x for name, x in lists.items() if self._facts["open_ended"] or name in self._facts["names"]}
        for parameter, column in self._wanted(present).items():
            if column in present or parameter in self._facts["required"]:
                found[parameter] = [row.get(column) for row in rows]
        return found

    def _sample_arguments(self, sample: Sample) -> dict[str, Any]:
        """verl's call: `solution_str`, and of what the row has that which the function names."""
        row = _given(sample)
        found: dict[str, Any] = {"solution_str": sample.response_text}
        for parameter, column in self._wanted(("data_source", "ground_truth", "extra_info")).items():
            if column in row or parameter in self._facts["required"]:
                found[parameter] = row.get(column)
        return found

    def _wanted(self, others: Iterable[str]) -> dict[str, str]:
        """Parameter -> column: what the function names, and of the `others` what else it takes if it takes `**`."""
        parameters: list[str] = [*self._facts["columns"], *self.columns]
        if self._facts["open_ended"]:
            closed = {*self.options, *GIVEN[self._facts["style"]]}
            parameters += [name for name in others if name.isidentifier() and name not in closed]
        return {parameter: self.columns.get(parameter, parameter) for parameter in parameters}

    # Results

    def _keep(self, answer: Mapping | Death, call: Call, samples: Sequence[Sample], results: list[Any]) -> None:
        """Notes the results of a call, and stops the run where a failure must."""
        if isinstance(answer, Death):
            answer = {"failure": answer.kind, "detail": answer.detail}
        if "bad" in answer:
            raise UserError(f"{self._called}: {answer['bad']}")
        whole = "failure" in answer
        for row, result in zip(call.rows, [answer] * len(call.rows) if whole else answer["results"], strict=True):
            results[row] = result
        failed = [row for row in call.rows if _failed(results[row])]
        if not failed:
            return
        story = self._story(samples[failed[0]], results[failed[0]], len(call.rows) if whole else 1)
        self._write(f"{story}\n".encode("utf-8", "backslashreplace"))
        if self.on_failure is None:
            raise RewardFailure(
                f"{story}: mend the function, or set on_failure of {self._called} to a score for such samples"
            )

    def _story(self, sample: Sample, failure: Mapping[str, str], samples: int) -> str:
        """A failure in one line, with the sample; unprintable characters are escaped."""
        among = f"a call with {samples} samples, the first of them" if samples > 1 else "the sample"
        names = dict.fromkeys(self.columns.get(c, c) for c in self._facts["columns"])
        row = _given(sample)
        shown = {"prompt": sample.prompt_text, "response": sample.response_text}
        shown |= {column: row[column] for column in names if column in row}
        text = ", ".join(f"{key}={_short(value)}" for key, value in shown.items())
        return f"{self._called} failed ({failure['failure']}: {failure['detail']}) on {among} {text}"

    def _scored(self, samples: Sequence[Sample], results: list[Any]) -> Scored:
        failures = Counter(result["failure"] for result in results if _failed(result))
        values, extras = [], []
        for result in results:
            detailed = isinstance(result, dict) and not _failed(result)
            values.append(self.on_failure if _failed(result) else result["score"] if detailed else result)
            extras.append(result["extras"] if detailed else {})
        names = dict.fromkeys(name for row in extras for name in row)
        tokens = None
        if any(isinstance(value, list) for value in values):
            lengths = [len(sample.response_ids) for sample in samples]
            tokens = tuple(_per_token(value, length) for value, length in zip(values, lengths, strict=True))
        scores = [float(np.sum(value)) if isinstance(value, list) else value for value in values]
        return Scored(
            scores=np.asarray(scores, np.float64),
            token_scores=tokens,
            extras={name: np.array([row.get(name, np.nan) for row in extras], np.float64) for name in names},
            failures=failures,
        )


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


def _given(sample: Sample) -> dict[str, Any]:
    """The columns that a function may ask for: the dataset's, and verl's where they are kept elsewhere."""
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


def _failed(result: Any) -> bool:
    return isinstance(result, dict) and "failure" in result


def _per_token(value: float | list[float], length: int) -> np.ndarray:
    if isinstance(value, list):
        return np.asarray(value, np.float64)
    tokens = np.zeros(length)
    tokens[-1:] = value  # where experience would place it; nowhere in an empty response
    return tokens


def _short(value: Any) -> str:
    text = repr(value if not isinstance(value, str) or len(value) <= SHOWN else f"{value[:SHOWN]}...")
    return text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]}..."


def reward_function(
    reward: RewardConfig, seed: int, log: Path | None = None, *, kind: Literal["reward", "cost"] = "reward"
) -> FunctionReward:
    """A reward or cost that is a function, not started yet. log: None for one that is only checked, by one worker."""
    assert reward.function is not None
    return FunctionReward(
        name=reward.name,
        spec=reward.function,
        workers=1 if log is None else reward.workers,
        deadline=reward.deadline,
        on_failure=reward.on_failure,
        options=reward.options,
        columns=reward.columns,
        seed=seed,
        log=log,
        kind=kind,
    )
