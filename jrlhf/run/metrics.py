"""Metrics of a run: metrics.jsonl, the truth for plots and tests, and TensorBoard events beside it."""

import html
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrlhf.run.console import clean
from jrlhf.run.directory import SAMPLES
from jrlhf.run.files import jsonl_lines, read_jsonl, write_atomic

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
Metrics = dict[str, float | int | bool]


class MetricsLog:
    """Writes one line of JSON an iteration, and the same numbers as TensorBoard scalars, one TensorBoard run a stage.

    A line is `{"stage": ..., "step": ..., metric: number, ...}`. JSON has no word for NaN and infinities: such a metric
    is null, and `"nonfinite"` says which it was. Numbers of device arrays are written exactly.

    A line is with the operating system when `log` returns, and on disk within a second or after `sync`; so a killed
    process loses no line, and a failing machine none that came before a `sync`.

    enabled: False in every process of a run but the first: `log` then only returns the numbers.
    """

    def __init__(self, run_dir: Path | str, *, enabled: bool = True):
        self._directory = Path(run_dir)
        self._file = open(self._directory / METRICS, "ab") if enabled else None
        self._synced = time.monotonic()
        self._writers: dict[str, SummaryWriter] = {}

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def log(
        self, stage: str, step: int, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, object]] = ()
    ) -> Metrics:
        """Logs scalars, on device or host. All device arrays are fetched at once; returns them as Python numbers.

        samples: texts, for TensorBoard only.

        Raises:
            ValueError: a metric is not a number, or is named `stage`, `step` or `nonfinite`.
        """
        numbers = {name: _number(name, value) for name, value in jax.device_get(dict(metrics)).items()}
        if self._file is None:
            return numbers
        nonfinite = {name: str(number) for name, number in numbers.items() if not math.isfinite(number)}
        record: dict[str, object] = {"stage": stage, "step": int(step), **numbers, **dict.fromkeys(nonfinite)}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > 1.0:
            self.sync()
        writer = self._writer(stage, step)
        for name, number in numbers.items():
            if name not in nonfinite:
                writer.add_scalar(name, number, step)
        for kind in dict.fromkeys(sample.get("kind", "samples") for sample in samples):
            rows = [sample for sample in samples if sample.get("kind", "samples") == kind]
            writer.add_text(str(kind), markdown_table(rows), step)
        writer.flush()
        return numbers

    def sync(self) -> None:
        """Waits until every line is on disk. To be called before the checkpoint that a resume would cut back to."""
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
    """Drops what metrics.jsonl and samples.jsonl hold of `stage` after `step`; the other stages' records stay.

    A torn last line is dropped, too. Each file is replaced atomically, and only if it changes. To be called before a
    `MetricsLog` is opened.

    Raises:
        UserError: an unreadable line within a file.
    """
    for name in (METRICS, SAMPLES):
        path = Path(run_dir) / name
        if path.exists():
            kept = [
                line + b"\n"
                for line, record in jsonl_lines(path)
                if record.get("stage") != stage or record.get("step", 0) <= step
            ]
            text = b"".join(kept)
            if text != path.read_bytes():
                write_atomic(path, text)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl in order; none where there is no file."""
    return list(read_jsonl(Path(run_dir) / METRICS))


def markdown_table(samples: Sequence[Mapping[str, object]]) -> str:
    """Samples as a table that TensorBoard shows; nothing in a text can leave its cell."""
    names = [name for name in samples[0] if name not in ("stage", "step", "kind")]

    def row(cells: Iterable[object]) -> str:
        return "|".join(("", *(_cell(cell) for cell in cells), ""))

    lines = [row(names), row("-" * 3 for _ in names), *(row(each.get(name, "") for name in names) for each in samples)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else html.escape(clean(str(value)), quote=False)
    return " ".join(text.replace("|", "&#124;").replace("`", "&#96;").split())


_KINDS = (np.bool_, np.integer, np.floating)


def _number(name: str, value: object) -> float | int | bool:
    if name in ("stage", "step", "nonfinite"):
        raise ValueError(f"a metric cannot be named {name!r}: the record has a field of that name")
    array = np.asarray(value)
    if array.ndim != 0 or not any(jax.dtypes.issubdtype(array.dtype, kind) for kind in _KINDS):
        raise ValueError(f"metric {name} must be one number, but it is {array.dtype} of shape {array.shape}")
    if array.dtype == bool:
        return bool(array)
    return int(array) if jax.dtypes.issubdtype(array.dtype, np.integer) else float(array)
