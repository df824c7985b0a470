"""Metrics: what is logged is what is read back, bit for bit, and a resume cuts exactly what comes after it."""

import gc
import json
import struct
import sys
import tracemalloc
import warnings
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.errors import UserError
from jrlhf.run.files import append_jsonl, read_jsonl
from jrlhf.run.metrics import MetricsLog, StageRecords, TensorBoardEvents, read_metrics, verl_figures

STAGES = ("sft", "reward_model", "ppo")


def events(directory) -> list[Any]:
    """Every event of every file below a directory, in the order of writing."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    result = []
    for path in sorted(directory.rglob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + length])
            result.append(event)
            data = data[12 + length + 4 :]
    return result


def test_numbers_are_written_exactly_and_returned_as_python_numbers(tmp_path):
    third = jnp.float32(1) / 3
    with MetricsLog(tmp_path) as log:
        metrics = {"a": third, "b": jnp.bfloat16(1.0078125), "c": jnp.int32(7), "d": True, "e": 1e-300}
        returned = log.log("ppo", 3, metrics | {"f": np.float64(0.1), "g": jnp.uint32(2**32 - 1)})
    assert returned == {"a": float(third), "b": 1.0078125, "c": 7, "d": True, "e": 1e-300, "f": 0.1, "g": 2**32 - 1}
    assert [type(value) for value in returned.values()] == [float, float, int, bool, float, float, int]
    (record,) = read_metrics(tmp_path)
    assert record == {"stage": "ppo", "step": 3, **returned}
    assert np.float32(record["a"]) == np.float32(third)
    assert list(record)[:2] == ["stage", "step"]


def test_a_line_is_readable_at_once_and_what_is_not_finite_is_null_and_named(tmp_path):
    log = MetricsLog(tmp_path)
    returned = log.log("sft", 1, {"a": jnp.nan, "b": -jnp.inf, "c": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    values = {"a": None, "b": None, "c": 1.0, "nonfinite": {"a": "nan", "b": "-inf"}}
    assert json.loads(text, parse_constant=refuse) == {"stage": "sft", "step": 1, **values}
    assert np.isnan(returned["a"]) and returned["b"] == -np.inf
    log.close()
    log.close()


def test_a_file_that_cannot_be_opened_leaves_none_open(tmp_path):
    (tmp_path / "timeline.jsonl").mkdir()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(IsADirectoryError):
            MetricsLog(tmp_path)
        gc.collect()
    assert not warned


def test_figures_of_an_iteration_are_counted_as_in_verl():
    """Two rows of 10 + 30 tokens: their sums, `timing_per_token_ms` as verl's compute_timing_metrics divides them."""
    metrics = {"prompt_length/mean": 10.0, "response_length/mean": 30.0, "timing_s/step": 4.0}
    metrics |= {"timing_s/gen": 1.5, "timing_s/update_actor": 0.4, "timing_s/reshard": 0.1}
    expected = {"perf/total_num_tokens": 80.0, "perf/throughput": 80.0 / 4.0 / 8}
    expected |= {"timing_per_token_ms/gen": 1500.0 / 60, "timing_per_token_ms/update_actor": 400.0 / 80}
    assert verl_figures(metrics, rows=2, devices=8) == pytest.approx(expected)
    validated = verl_figures(metrics | {"timing_s/validation": 0.5}, rows=2, devices=8)
    assert validated["timing_s/testing"] == 0.5


def test_reserved_names_and_what_is_no_number_are_refused(tmp_path):
    with MetricsLog(tmp_path) as log:
        for name in ("stage", "step", "nonfinite"):
            with pytest.raises(ValueError, match=name):
                log.log("sft", 1, {name: 1.0})
        for value in (np.zeros(2), "text", None, 1j):
            with pytest.raises(ValueError, match="metric a must be one number"):
                log.log("sft", 1, {"a": value})
    assert read_metrics(tmp_path) == []


def test_device_arrays_are_fetched_in_one_transfer(tmp_path, monkeypatch):
    calls = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(len(tree)) or fetch(tree))
    with MetricsLog(tmp_path) as log, jax.transfer_guard_device_to_host("disallow"):
        log.log("sft", 1, {f"m{index}": jnp.float32(index) for index in range(20)})
    assert calls == [20]


def test_tensorboard_is_written_without_torch(tmp_path, monkeypatch):
    """tensorboardX imports torch where it is installed, which takes seconds of every run."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorboardX", "torch")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    monkeypatch.syspath_prepend(tmp_path)
    TensorBoardEvents(tmp_path / "sft", 1).close()
    assert "torch" not in sys.modules and "tensorboardX.writer" in sys.modules


def test_tensorboard_gets_the_same_numbers_and_purges_what_a_resume_repeats(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.log("sft", step, {"sft/loss": 1.0 / step, "bad": float("nan")})
        log.log("ppo", 1, {"actor/entropy": 2.0})
    with MetricsLog(tmp_path) as log:
        log.log("sft", 3, {"sft/loss": 0.25})
    written = events(tmp_path / "tensorboard" / "sft")
    scalars = [(event.step, value.tag, value.simple_value) for event in written for value in event.summary.value]
    assert scalars == [
        (1, "sft/loss", 1.0),
        (2, "sft/loss", 0.5),
        (3, "sft/loss", pytest.approx(1 / 3)),
        (3, "sft/loss", 0.25),
    ]
    purges = [event.step for event in written if event.HasField("session_log")]
    assert purges == [1, 3]  # TensorBoard drops what was written before at these steps or later
    (value,) = [value for event in events(tmp_path / "tensorboard" / "ppo") for value in event.summary.value]
    assert (value.tag, value.simple_value) == ("actor/entropy", 2.0)


def test_a_resume_cuts_back_both_files_and_a_torn_line(tmp_path):
    with MetricsLog(tmp_path) as log:
        for stage in STAGES:
            for step in (1, 2, 3, 4):
                log.log(stage, step, {"loss": step / 3})
    samples = [{"stage": stage, "step": step, "response": "ü\n"} for stage in ("sft", "ppo") for step in (2, 4)]
    append_jsonl(tmp_path / "samples.jsonl", samples)
    before = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"stage": "ppo", "step": 5, "lo')

    StageRecords(tmp_path, "ppo", 4)
    assert (tmp_path / "metrics.jsonl").read_bytes().split(b"\n") == before
    StageRecords(tmp_path, "ppo", 3)
    StageRecords(tmp_path, "sft", 2)
    remaining = before[:2] + before[4:11]
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(remaining) + b"\n"
    survivors = [(sample["stage"], sample["step"]) for sample in read_jsonl(tmp_path / "samples.jsonl")]
    assert survivors == [("sft", 2), ("ppo", 2)]
    with MetricsLog(tmp_path) as log:
        log.log("sft", 3, {"loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(remaining) + (
        b'\n{"stage": "sft", "step": 3, "loss": 1.0}\n'
    )
    for stage in STAGES:
        StageRecords(tmp_path, stage, 0)
    assert read_metrics(tmp_path) == [] and (tmp_path / "samples.jsonl").read_bytes() == b""


def test_a_line_whose_stage_is_damaged_is_told(tmp_path):
    """It is not the stage's any more: neither is it dropped with the steps after a checkpoint, nor is it missed."""
    with MetricsLog(tmp_path) as log:
        log.log("sft", 1, {"loss": 1.0})
        saved = StageRecords(tmp_path, "sft", 1).tally()
        log.log("sft", 2, {"loss": 1.0})
    path, sound = tmp_path / "metrics.jsonl", StageRecords(tmp_path, "sft", 2, writers=("sft", "ppo")).tally()
    path.write_bytes(path.read_bytes().replace(b'"sft", "step": 2', b'"sgt", "step": 2'))
    assert list(StageRecords(tmp_path, "sft", 1).differences({})) == []
    (sentence,) = StageRecords(tmp_path, "sft", 1, writers=("sft", "ppo")).differences(saved)
    assert sentence.startswith("metrics.jsonl is not what the run wrote (1 line(s) name none of its stages)")
    (sentence,) = StageRecords(tmp_path, "sft", 2).differences(sound)
    assert "1 of 2 lines are left" in sentence


def test_a_cut_touches_no_file_that_needs_none_and_stops_at_an_unreadable_line(tmp_path):
    StageRecords(tmp_path, "sft", 1)
    assert list(tmp_path.iterdir()) == []
    with MetricsLog(tmp_path) as log:
        log.log("sft", 1, {"loss": 1.0})
    written = attrgetter("st_ino", "st_mtime_ns", "st_ctime_ns")  # not the time of access: it is read
    before = written((tmp_path / "metrics.jsonl").stat())
    StageRecords(tmp_path, "sft", 1)
    assert written((tmp_path / "metrics.jsonl").stat()) == before
    line = b'{"stage": "sft", "step": 1, "text": "%s"}\n' % (b"x" * 10_000)
    (tmp_path / "metrics.jsonl").write_bytes(line * 300 + line.replace(b": 1,", b": 2,"))
    tracemalloc.start()
    StageRecords(tmp_path, "sft", 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").read_bytes() == line * 300
    assert peak < 1_000_000  # bytes: files of long runs take hundreds of MB
    (tmp_path / "metrics.jsonl").write_text('{"stage"\n{"stage": "sft", "step": 1}\n')
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        StageRecords(tmp_path, "sft", 1)
