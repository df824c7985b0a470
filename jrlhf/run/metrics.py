"""Writes the metrics of a run to metrics.jsonl, which plots and tests read, and to TensorBoard."""

import hashlib
import html
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrlhf.run.console import shown_columns
from jrlhf.run.contents import SAMPLES
from jrlhf.run.files import Closing, jsonl_lines, read_jsonl, to_json, write_atomic
from jrlhf.run.text import clean

METRICS, TIMELINE, TENSORBOARD = "metrics.jsonl", "timeline.jsonl", "tensorboard"
Metrics = dict[str, float | int | bool]
PER_TOKEN = "gen", "ref", "values", "adv", "update_critic", "update_actor"  # calls whose times verl logs per token


class MetricsLog(Closing):
    """Writes one line of JSON per iteration, and the same numbers as TensorBoard scalars, in one folder per stage.

    A line is `{"stage": ..., "step": ..., metric: number, ...}`, as `to_json` writes it. Numbers of device arrays are
    written exactly. The calls of an iteration are a line of timeline.jsonl, which the report draws.

    If the process is killed, no line is lost for which `log` has returned. If the machine fails, lines since the last
    `sync` may be lost.

    enabled: False in every process but the first, which then writes nothing; `log` only returns the numbers.
    """

    def __init__(self, run_dir: Path | str, *, enabled: bool = True):
        self._directory = Path(run_dir)
        with ExitStack() as files:  # if the second cannot be opened, the first is closed
            names = (METRICS, TIMELINE) if enabled else ()
            self._files = [files.enter_context(open(self._directory / name, "ab")) for name in names]
            files.pop_all()
        self._synced = time.monotonic()
        self._writers: dict[str, TensorBoardEvents] = {}

    def log(
        self,
        stage: str,
        step: int,
        metrics: Mapping[str, Any],
        samples: Sequence[Mapping[str, object]] = (),
        calls: Sequence[Mapping[str, object]] = (),
    ) -> Metrics:
        """Logs scalars, on device or host, and returns them as Python numbers. All device arrays are fetched at once.

        samples: texts, for TensorBoard only. calls: each a mapping, for timeline.jsonl.
        """
        numbers = {name: _number(name, value) for name, value in jax.device_get(dict(metrics)).items()}
        if not self._files:
            return numbers
        whose, (lines, timeline) = {"stage": stage, "step": int(step)}, self._files
        lines.write(to_json(whose | numbers))
        lines.flush()
        if calls:
            timeline.write(to_json({**whose, "calls": list(calls)}))
            timeline.flush()
        if time.monotonic() - self._synced > 1.0:
            self.sync()
        tables = defaultdict[str, list[Mapping[str, object]]](list)
        for sample in samples:
            tables[str(sample.get("kind", "samples"))].append(sample)
        texts = {kind: markdown_table(table) for kind, table in tables.items()}
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        if stage not in self._writers:
            self._writers[stage] = TensorBoardEvents(self._directory / TENSORBOARD / stage, step)
        self._writers[stage].add(int(step), finite, texts)
        return numbers

    def sync(self) -> None:
        """Waits until every line is on disk. Call this before each checkpoint: a resume cuts the log back to it."""
        for file in self._files:
            os.fsync(file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if any(not file.closed for file in self._files):
            self.sync()
        for file in self._files:
            file.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def verl_figures(metrics: Mapping[str, float], rows: int, devices: int) -> Metrics:
    """Returns tokens, throughput and milliseconds per token of an iteration, counted and named as in verl.

    Tokens of ReMax's greedy responses and of groups that DAPO dropped do not count; the seconds of a step include its
    validation ("testing" in verl). `timing_per_token_ms/gen` is per response token, the others are per token.
    """
    responses = rows * metrics["response_length/mean"]
    tokens = rows * metrics["prompt_length/mean"] + responses
    seconds = {name: metrics[f"timing_s/{name}"] for name in PER_TOKEN if f"timing_s/{name}" in metrics}
    counts = {name: responses if name == "gen" else tokens for name in seconds}
    return {
        "perf/total_num_tokens": tokens,
        "perf/throughput": tokens / metrics["timing_s/step"] / devices,
        **({"timing_s/testing": metrics["timing_s/validation"]} if "timing_s/validation" in metrics else {}),
        **{f"timing_per_token_ms/{name}": 1e3 * seconds[name] / counts[name] for name in seconds if counts[name]},
    }


@contextmanager
def _not_installed(package: str) -> Iterator[None]:
    """Makes imports of a package that is not imported yet fail, as if it was not installed."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


class TensorBoardEvents(Closing):
    """A TensorBoard file. tensorboardX's own `SummaryWriter` writes in a thread, which hangs the run on a full disk."""

    def __init__(self, folder: Path, step: int):
        with _not_installed("torch"):  # tensorboardX imports it where it can, which takes seconds
            from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        # The suffix avoids overwriting an earlier process's file, whose name is the same within a second.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        # Makes TensorBoard drop what an earlier process wrote at this step or later.
        self._write(step, session_log={"status": 1})

    def add(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Writes the values of a step; waits until the system has them."""
        from tensorboardX.summary import scalar, text

        summaries = [scalar(name, value) for name, value in scalars.items()]
        for summary in [*summaries, *(text(name, value) for name, value in texts.items())]:
            self._write(step, summary=summary)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))


class StageRecords:
    """The lines of a stage in metrics.jsonl, samples.jsonl and timeline.jsonl, or in these `files`.

    Checkpoints record their number and a checksum. The constructor drops the records of the stage after `step`, and a
    torn last line; call it before opening the log. Each file is replaced atomically, and only if it changes.

    writers: names of the stages of the run, and of others that write lines. enabled: as in `MetricsLog`.
    """

    def __init__(
        self,
        run_dir: Path | str,
        stage: str,
        step: int,
        *,
        files: Collection[str] = (METRICS, SAMPLES, TIMELINE),
        writers: Collection[str] = (),
        enabled: bool = True,
    ):
        # path -> (number of bytes read, number of the stage's lines, their hash)
        self._files: dict[Path, tuple[int, int, Any]] = {}
        self._strays: dict[str, int] = {}  # name of a file -> number of lines that name no writer
        paths = [Path(run_dir) / name for name in files] if enabled else []
        for path in paths:  # all are read before one is changed
            size, count, digest, self._strays[path.name] = 0, 0, hashlib.sha256(), 0
            for line, record in _remaining(path, stage, step):
                size += len(line)
                if record.get("stage") == stage:
                    count += 1
                    digest.update(line)
                self._strays[path.name] += record.get("stage") not in (stage, *writers)
            self._files[path] = size, count, digest
        for path, (size, *_) in self._files.items():
            if path.exists() and path.stat().st_size != size:  # a dropped line is longer than an added line end
                write_atomic(path, (line for line, _ in _remaining(path, stage, step)))

    def tally(self) -> dict[str, list[Any]]:
        """Returns file -> (number of lines, checksum) of the stage, with all lines that were appended since."""
        for path, (size, count, digest) in self._files.items():
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(size)
                    digest.update(text := file.read())
                self._files[path] = size + len(text), count + text.count(b"\n"), digest
        return {path.name: [count, digest.hexdigest()] for path, (_, count, digest) in self._files.items()}

    def differences(self, saved: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yields a sentence for each file that differs from the tally that a checkpoint saved."""
        for name, (count, digest) in self.tally().items():
            before, strays = saved.get(name, (0, ""))[0], self._strays[name]
            if count < before:
                lost = f"{count} of {before} lines are left"
            elif name in saved and saved[name] != [count, digest]:
                lost = "lines were changed"
            elif name in saved and strays:
                lost = f"{strays} line(s) name none of its stages"
            else:
                continue
            yield f"{name} is not what the run wrote ({lost}): its figures and the report tell what is left"


def _remaining(path: Path, stage: str, step: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the lines of a file, with their ends, and their records, without those of the stage after `step`."""
    for line, record in jsonl_lines(path):
        number = record.get("step", 0)
        if record.get("stage") != stage or not isinstance(number, int | float) or number <= step:
            yield line + b"\n", record


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl in order; none if there is no file."""
    return list(read_jsonl(Path(run_dir) / METRICS))


def markdown_table(samples: Sequence[Mapping[str, object]]) -> str:
    """Writes samples as a Markdown table for TensorBoard. Texts are escaped, so that they stay in their cells."""
    names = shown_columns(samples[0])

    def cell(value: object) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else html.escape(clean(str(value)), quote=False)
        return " ".join(text.replace("|", "&#124;").replace("`", "&#96;").split())

    rows = [names, ["---"] * len(names), *([sample.get(name, "") for name in names] for sample in samples)]
    return "\n".join("|".join(("", *map(cell, row), "")) for row in rows)


def _number(name: str, value: object) -> float | int | bool:
    if name in ("stage", "step", "nonfinite"):
        raise ValueError(f"a metric cannot be named {name!r}: the record has a field of that name")
    array = np.asarray(value)
    kinds = (np.bool_, np.integer, np.floating)
    if array.ndim != 0 or not any(jax.dtypes.issubdtype(array.dtype, kind) for kind in kinds):
        raise ValueError(f"metric {name} must be one number, but it is {array.dtype} of shape {array.shape}")
    if array.dtype == bool:
        return bool(array)
    return int(array) if jax.dtypes.issubdtype(array.dtype, np.integer) else float(array)
