"""`FunctionReward`: a user's reward function in worker processes. Calls have a deadline; failures are counted."""

import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np

from jrlhf.config.schema import RewardConfig
from jrlhf.errors import RewardFailure, UserError
from jrlhf.rewards import builtin
from jrlhf.rewards.concurrent import ConcurrentWorker
from jrlhf.rewards.facts import Facts
from jrlhf.rewards.types import INVALID, Kind, Sample, Scored, on_last_token
from jrlhf.rewards.user_code import as_it_is, resolve, shipped
from jrlhf.rewards.worker import InProcess
from jrlhf.run.files import Closing

LOG_BYTES = 16 << 20  # maximum output of a function in the log file
NO_SCORE = {"failure": "none", "detail": "returned None"}  # the result of None without `skip_none` or `abstain`
START_SECONDS = 120.0  # deadline for a worker to import the function
TOGETHER = 64  # calls of a coroutine function that are at work at a time


class FunctionReward(Closing):
    """A function of text as a reward, run in its own processes. Use it in a `with` block, from any threads.

    docs/data-and-rewards.md tells how functions are called, what they may return, and what becomes of their failures.

    log: a file to which the functions' output is appended; None: the function is only checked, by one worker.
    steps, epochs: the number of iterations, and the epochs of each, for functions that ask for a `trainer_state`.
    """

    def __init__(
        self,
        config: RewardConfig,
        seed: int = 0,
        log: Path | None = None,
        *,
        kind: Kind = "reward",
        steps: int = 0,
        epochs: float = 0.0,
    ):
        assert config.function is not None
        self._config, self._seed, self._steps, self._epochs = config, seed, steps, epochs
        self._kind: Kind = kind
        self._called = f"{kind} {config.name!r}"
        self.on_failure = INVALID if config.on_failure == "exclude" else config.on_failure
        self._columns = config.columns
        self._spec = (resolve if ":" in config.function else builtin.spec_of)(config.function, self._called)
        self._shipped, self._starts = None, ConcurrentWorker
        if config.in_process:
            self._starts = partial(InProcess, as_it_is(self._spec, self._called))
        else:
            self._shipped = shipped(self._spec, self._called)
        self.workers = 1 if log is None else config.workers
        self._pool: dict[int, ConcurrentWorker | InProcess] = {}
        self._starting = [threading.Lock() for _ in range(self.workers)]  # held while a worker is replaced
        self._free = SimpleQueue[int]()  # workers that no call uses; each as often as it may be used at a time
        for index in range(self.workers):
            self._free.put(index)
        self._log, self._log_file, self._logged, self._log_lock = log, None, 0, threading.Lock()
        self._broken: BaseException | None = None  # the first error of the calls at work
        self._calls = set[threading.Event]()  # of the calls at work; each is set to end its call

    def __enter__(self) -> Self:
        """Starts the workers and imports the function in each. Asks the endpoint of `client` for its models before."""
        if (client := self._config.client) is not None:
            from jrlhf.rewards.client import check_endpoint

            client = replace(client, url=str(client.url).rstrip("/"))
            client = replace(client, model=check_endpoint(vars(client), self._called))
            self._config = replace(self._config, client=client)
        if self._log is not None:
            try:
                self._log_file = open(self._log, "ab", buffering=0)
            except OSError as error:
                raise UserError(f"log={self._log} of {self._called} cannot be opened: {error}") from error
        try:
            self._on_workers([self._start] * self.workers)
            ordered = sorted(self._free.get() for _ in range(self.workers))  # whatever started first
            for index in ordered * (self.calls // self.workers):
                self._free.put(index)
            if self._config.in_process:
                self._write(f"{self.facts.describe()}\n".encode())
        except BaseException:
            self.close()
            raise
        return self

    @property
    def calls(self) -> int:
        """The number of calls that may be at work at a time: one in each worker; several of a coroutine function. Only
        process 0 starts the workers, and makes calls."""
        several = bool(self._pool) and self.facts.asynchronous and not self._config.in_process
        return self.workers * max(1, TOGETHER // self.workers) if several else self.workers

    def close(self) -> None:
        """Ends the workers: idle ones run their exit handlers (2 s), others are killed. May be called again."""
        for ended in tuple(self._calls):  # in other threads
            ended.set()
        pool, self._pool = list(self._pool.values()), {}
        try:
            for worker in pool:
                worker.dismiss()
            until = time.monotonic() + 2
            for worker in pool:
                worker.ended(until - time.monotonic())
        finally:
            for worker in pool:
                worker.kill()
            with self._log_lock:
                if self._log_file is not None:
                    self._log_file.close()
                    self._log_file = None

    def score(self, samples: Sequence[Sample], step: int = 0, first: int = 0) -> Scored:
        """Returns the scores of `samples`, in their order. Raises RewardFailure where a failure stops the run.

        Random numbers in a call depend on the seed, the step, and the index of the call's first sample. `first` is the
        index of the first of `samples`.
        """
        samples = [sample.marked for sample in samples] if self._config.special_tokens else samples
        results: list[Any] = [None] * len(samples)
        one_by_one = self.facts.style == "verl" and not self.facts.asynchronous
        borders = _borders(samples, whole_prompts=self.facts.style == "trl")
        cuts = [borders[(len(borders) - 1) * number // self.workers] for number in range(self.workers + 1)]

        def work(rows: slice, index: int, ended: threading.Event) -> None:
            size = 1 if one_by_one else rows.stop - rows.start
            for row in range(rows.start, rows.stop, size):
                chosen = samples[row : row + size]
                request = self._request(chosen, step, first + row)
                with self._starting[index]:
                    if self._pool[index].ended():  # in an earlier call, or since
                        self._pool[index].kill()
                        self._start(index, ended)
                answer = self._pool[index].request(request, self._config.deadline)
                if ended.is_set():
                    return
                if "failure" in answer and self._broken is not None:  # another call's error has killed the worker
                    raise self._broken
                results[row : row + size] = self._checked_results(answer, chosen)

        self._on_workers([partial(work, slice(*part)) for part in pairwise(cuts) if part[0] < part[1]])
        return self._scored(samples, results)

    def _on_workers(self, jobs: Sequence[Callable[[int, threading.Event], None]]) -> None:
        """Runs all jobs at the same time, each with the index of a worker, and the event that ends this call.

        After an error the busy workers of this call are killed, so that nobody waits for them.
        """
        ended, busy = threading.Event(), list[int]()

        def run(job: Callable[[int, threading.Event], None]) -> None:
            index = self._free.get()
            busy.append(index)
            try:
                if not ended.is_set():
                    job(index, ended)
            finally:
                busy.remove(index)
                self._free.put(index)

        if not self._calls:
            self._broken = None
        self._calls.add(ended)
        with ThreadPoolExecutor(self.workers, thread_name_prefix=self._kind) as threads:
            try:
                for future in as_completed([threads.submit(run, job) for job in jobs]):
                    future.result()
            except BaseException as error:
                self._broken = self._broken or error
                ended.set()  # set first, so that a worker that starts later sees it
                for index in {*busy} & self._pool.keys():
                    self._pool[index].interrupt()
                raise
            finally:
                self._calls.remove(ended)

    def _start(self, index: int, ended: threading.Event) -> None:
        # Strings hash alike in every worker and every run, and JAX in a function never takes an accelerator.
        environment = {"PYTHONHASHSEED": str(self._seed % 2**32), **os.environ, "JAX_PLATFORMS": "cpu"}
        what: dict[str, Any] = {"spec": self._spec, "shipped": self._shipped, "options": self._config.options}
        what |= {"deadline": self._config.deadline, "start_deadline": START_SECONDS, "client": self._client(index)}
        request = self._pickle(what, "its options")
        worker = self._pool[index] = self._starts("jrlhf.rewards.worker", environment, self._write)
        if ended.is_set():
            worker.interrupt()
        answer = worker.request(request, START_SECONDS)
        if "failure" in answer:
            event = "did not finish importing" if answer["failure"] == "hang" else "ended while importing"
            raise RewardFailure(f"{self._called}: the process {event} {self._spec} ({answer['detail']})")
        if "bad" in answer:
            raise UserError(f"{self._called}: {answer['bad']}")
        if not hasattr(self, "facts"):
            self.facts = Facts(self._config, self._kind, self._spec, **answer["ready"])

    def _client(self, index: int) -> dict[str, Any] | None:
        """Returns the arguments of a worker's client, with its share of the requests in flight."""
        if (client := self._config.client) is None:
            return None
        share = client.concurrent // self.workers + (index < client.concurrent % self.workers)
        file = "" if self._log is None else str(self._log.absolute().with_suffix(".answers.jsonl"))
        return {**vars(client), "concurrent": max(share, 1), "cache": file if client.cache else None}

    def _write(self, output: bytes) -> None:
        with self._log_lock:
            if self._log_file is not None and self._logged < LOG_BYTES:
                output = output[: LOG_BYTES - self._logged]
                self._logged += len(output)
                full = self._logged == LOG_BYTES
                self._log_file.write(output + b"\n(further output is not kept)\n" if full else output)

    def _request(self, samples: Sequence[Sample], step: int, first: int) -> bytes:
        if self.facts.style == "trl":
            arguments: Any = self._arguments(samples)
        else:
            calls = [{name: value for name, (value,) in self._arguments([sample]).items()} for sample in samples]
            arguments = calls if self.facts.asynchronous else calls[0]
        lengths = [len(sample.response.ids) for sample in samples]
        call = {"arguments": arguments, "lengths": lengths, "seed": f"{self._seed}/{step}/{first}"}
        call["state"] = {"global_step": step, "max_steps": self._steps, "epoch": step * self._epochs}
        return self._pickle(call, "the dataset's columns")

    def _pickle(self, message: Any, content: str) -> bytes:
        try:
            return pickle.dumps(message)
        except Exception as error:
            raise UserError(f"{self._called}: {content} cannot be sent to its process ({error})") from error

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """Returns the function's arguments, lists with one entry per sample: texts, and columns that some row has.

        A row without a column that others have gives None. A function with `**` gets all columns in TRL's style, and
        the three columns of verl's interface in verl's style.
        """
        facts, rows = self.facts, [sample.columns for sample in samples]
        texts: dict[str, Callable[[Sample], Any]] = {
            "prompts": lambda sample: _plain(sample.example.prompt),
            "completions": lambda sample: _plain(sample.completion),
            "completion_ids": lambda sample: [int(token) for token in sample.response.ids],
            "solution_str": lambda sample: sample.response.text,
        }
        arguments = {name: [texts[name](sample) for sample in samples] for name in facts.texts}
        present = dict.fromkeys(chain.from_iterable(rows))
        parameters: list[str] = [*facts.columns, *self._columns]
        if facts.open_ended:
            others: Sequence[str] = ("data_source", "ground_truth", "extra_info")
            if facts.style == "trl":  # all columns, but not verl's two that `Sample.columns` adds to data without them
                read = {name for sample in samples for name in sample.example.columns} | present.keys() - {*others[::2]}
                others = [name for name in present if name in read or any(row[name] for row in rows)]
            closed = {*self._config.options, *facts.given}
            parameters += [name for name in others if name.isidentifier() and name not in closed]
        for parameter in parameters:
            column = self._columns.get(parameter, parameter)
            if column in present or parameter in facts.required:
                arguments[parameter] = [row.get(column) for row in rows]
        return arguments

    def _checked_results(self, answer: Mapping[str, Any], samples: Sequence[Sample]) -> Sequence[Mapping[str, Any]]:
        """Returns the results of a call, one for each sample. Raises RewardFailure where a failure stops the run."""
        if "bad" in answer:
            raise RewardFailure(f"{self._called}: {answer['bad']}", self.facts.identity)
        whole = "failure" in answer
        results = [answer] * len(samples) if whole else answer["results"]
        if not (self._config.skip_none or self._config.abstain):
            results = [NO_SCORE if result.get("score", 0) is None else result for result in results]
        failed = next((pair for pair in zip(samples, results, strict=True) if "failure" in pair[1]), None)
        if failed is not None:
            story = self.facts.story(*failed, len(samples) if whole else 1)
            self._write(f"{story}\n".encode("utf-8", "backslashreplace"))
            if self.on_failure is None:
                late = f"raise deadline of {self._called}, " if failed[1]["failure"] == "hang" else ""
                output = "" if self._config.in_process else f"; what it printed is in {self._log}"
                skips = failed[1] is NO_SCORE
                none = f"set skip_none=true or abstain=true of {self._called} if that is meant, " if skips else ""
                resume = "" if self._log is None else f", and resume the run{output}"
                raise RewardFailure(
                    f"{story}: {late}mend the function, {none}or set on_failure of {self._called} to a score for such "
                    f"samples, or to exclude{resume}",
                    self.facts.identity,
                )
        return results

    def _scored(self, samples: Sequence[Sample], results: Sequence[Mapping[str, Any]]) -> Scored:
        values = [result.get("score", self.on_failure) for result in results]
        nones = sum(value is None for value in values)
        if self._config.abstain:
            values = [INVALID if value is None else value for value in values]
        extras = [result.get("extras", {}) for result in results]
        names = dict.fromkeys(name for row in extras for name in row)
        tokens = None
        if any(isinstance(value, list) for value in values):
            lengths = [len(sample.response.ids) for sample in samples]
            rows = zip(values, lengths, strict=True)
            tokens = [np.array(x) if isinstance(x, list) else on_last_token(x or 0.0, length) for x, length in rows]
        return Scored(
            scores=np.array([float(np.sum(x)) if isinstance(x, list) else x for x in values], np.float64),
            token_scores=tokens,
            extras={name: np.array([row.get(name, np.nan) for row in extras], np.float64) for name in names},
            failures=Counter(result["failure"] for result in results if "failure" in result),
            last_failure=next((str(result["detail"]) for result in reversed(results) if "failure" in result), ""),
            abstained=nones if self._config.abstain else 0,
        )


def _borders(samples: Sequence[Sample], *, whole_prompts: bool) -> list[int]:
    """Returns the places where samples may be divided; with `whole_prompts` not between neighbours of one prompt."""
    texts = [sample.prompt_text for sample in samples]
    inner = (row for row in range(1, len(texts)) if not whole_prompts or texts[row] != texts[row - 1])
    return [0, *inner, len(texts)] if texts else [0]


def _plain(text: Any) -> Any:
    """Returns a string, or a list of messages as TRL's functions expect them."""
    return text if isinstance(text, str) else [dict(message) for message in text]
