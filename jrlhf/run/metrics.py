"""Metrics of a run: metrics.jsonl, which plots and tests read, and the same as TensorBoard events."""

import html
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrlhf.run.console import clean
from jrlhf.run.directory import SAMPLES
from jrlhf.run.files import Closing, jsonl_lines, read_jsonl, to_json, write_atomic

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
Metrics = dict[str, float | int | bool]


class MetricsLog(Closing):
    """Writes one line of JSON for each iteration, and the same numbers as TensorBoard scalars, one folder a stage.

    A line is `{"stage": ..., "step": ..., metric: number, ...}`, as `to_json` writes it. Numbers of device arrays are
    written exactly.

    A process that is killed loses no line for which `log` has returned. A machine that fails may lose the lines since
    the last `sync`.

    enabled: False in every process of a run but the first: `log` then only returns the numbers.
    """

    def __init__(self, run_dir: Path | str, *, enabled: bool = True):
        self._directory = Path(run_dir)
        self._file = open(self._directory / METRICS, "ab") if enabled else None
        self._synced = time.monotonic()
        self._writers: dict[str, SummaryWriter] = {}

    def log(
        self, stage: str, step: int, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, object]] = ()
    ) -> Metrics:
        """Logs scalars, on device or host, and returns them as Python numbers. All device arrays are fetched at once.

        samples: texts, for TensorBoard only.
        """
        numbers = {name: _number(name, value) for name, value in jax.device_get(dict(metrics)).items()}
        if self._file is None:
            return numbers
        self._file.write(to_json({"stage": stage, "step": int(step), **numbers}))
        self._file.flush()
        if time.monotonic() - self._synced > 1.0:
            self.sync()
        writer = self._writer(stage, step)
        for name, number in numbers.items():
            if math.isfinite(number):
                writer.add_scalar(name, number, step)
        for kind in dict.fromkeys(sample.get("kind", "samples") for sample in samples):
            rows = [sample for sample in samples if sample.get("kind", "samples") == kind]
            writer.add_text(str(kind), markdown_table(rows), step)
        writer.flush()
        return numbers

    def sync(self) -> None:
        """Waits until every line is on disk. Call this before each checkpoint: a resume cuts the log back to it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self.sync()
            self._file.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, stage: str, step: int) -> "SummaryWriter":
        if stage not in self._writers:
            from tensorboardX import SummaryWriter  # takes half a second to import

            # TensorBoard forgets what an earlier process wrote at this step or later. The suffix keeps the writer from
            # overwriting that process's file, whose name is otherwise the same within a second.
            folder = str(self._directory / TENSORBOARD / stage)
            self._writers[stage] = SummaryWriter(folder, purge_step=step, filename_suffix=f".{time.time_ns()}")
        return self._writers[stage]


def truncate_after(run_dir: Path | str, stage: str, step: int) -> None:
    """Drops the records of `stage` after `step` from metrics.jsonl and samples.jsonl; call it before opening the log.

    A torn last line is dropped, too. Each file is replaced atomically, and only if it changes.
    """
    for name in (METRICS, SAMPLES):
        path = Path(run_dir) / name
        if path.exists():
            lines = jsonl_lines(path)
            before = [line for line, record in lines if record.get("stage") != stage or record.get("step", 0) <= step]
            text = b"".join(line + b"\n" for line in before)
            if text != path.read_bytes():
                write_atomic(path, text)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl in order; none if there is no file."""
    return list(read_jsonl(Path(run_dir) / METRICS))


def markdown_table(samples: Sequence[Mapping[str, object]]) -> str:
    """Writes samples as a table for TensorBoard; nothing in a text can leave its cell."""
    names = [name for name in samples[0] if name not in ("stage", "step", "kind")]

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
