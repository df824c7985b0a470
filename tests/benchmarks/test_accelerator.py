"""The accelerator benchmark: its rows, its order under a budget, and that it runs."""

import json
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import accelerator, parts
from benchmarks.accelerator import FULL, NO_TIME, PARTS, SMALL, Part, attempt, line, main, plan
from benchmarks.parts import Ceilings
from benchmarks.records import provenance
from jrlhf.meshes import make_mesh
from jrlhf.meshes.hardware import PEAKS

H200 = PEAKS["NVIDIA H200"]
TOP = Ceilings(copy=4e12, matmul=800e12, peak=H200)


def test_everything_that_is_promised_is_planned_and_the_most_important_comes_first():
    device = jax.devices()[0]
    all_parts = plan(FULL, make_mesh(1, 1, 1, devices=[device]), TOP, device)
    assert {part.name for part in all_parts} == set(PARTS)
    assert {part.shape for part in all_parts if part.name == "decode"} == {
        f"{name} x {batch} x 512 + 512" for name in ("1.7B", "8B") for batch in (64, 128, 256)
    }
    assert [part.name for part in all_parts[:4]] == ["decode", "train", "train", "iteration"]
    shapes = {part.shape for part in all_parts if part.name == "train"}
    assert {"1.7B x 16 x 1024 full", "1.7B x 8 x 2048 full", "1.7B x 8 x 2048 gather"} <= shapes


def test_a_part_that_fails_or_would_not_end_in_time_is_a_row():
    def fails(message: str) -> Any:
        raise RuntimeError(message)

    part = partial(Part, "train", "tiny", {"batch": 2}, 10.0)
    row = {"part": "train", "shape": "tiny", "batch": 2, "seconds": 0.33333}
    assert attempt(part(lambda: {"seconds": 1 / 3}), 11.0) == row
    assert attempt(part(lambda: fails("never")), 9.0)["error"] == NO_TIME
    assert attempt(part(lambda: fails("RESOURCE_EXHAUSTED: 1 GB")), 11.0)["error"] == "out of memory"
    row = attempt(part(lambda: fails("something\nelse")), 11.0)
    assert row["error"] == "RuntimeError: something else" and row["error"] in line(row)


def test_rates_are_shares_of_both_ceilings():
    assert TOP.moving(2.4e12, 1.0) == {"tb_s": 2.4, "of_nominal": 0.5, "of_measured": 0.6}
    assert TOP.computing(4e14, 1.0) == {"tflops": 400.0, "of_nominal": 400 / 989, "of_measured": 0.5}
    unknown = Ceilings(copy=4e12, matmul=8e14, peak=None)
    assert "of_nominal" not in unknown.moving(1.0, 1.0) | unknown.computing(1.0, 1.0)


def test_the_roofline_of_an_iteration_is_that_of_its_calls():
    config = FULL.models["1.7B"]
    least = parts.least_seconds(config, TOP, np.full(256, 512), np.full(256, 512))
    tokens, head = 256 * 1024, 2048 * 151936
    weights = 28 * (2 * 2048 * 128 * (16 + 8) + 3 * 2048 * 6144) + head
    # Half of the tokens are prompts, which have no head.
    forward = (2 * (weights - head / 2) * tokens + 28 * 2 * 16 * 128 * 256 * 1024**2) / 989e12
    assert least["old_log_prob"] == least["ref"] == pytest.approx(forward, rel=0.002)
    assert least["update_actor"] == pytest.approx(3 * forward + 28 * weights / 4.8e12, rel=0.002)
    assert least["values"] == pytest.approx(forward - head * tokens / 989e12, rel=0.002)  # without unembedding
    prefill = (forward - head * tokens / 989e12) / 2
    decode = 512 * (2 * weights + 256 * 768 * 114688) / 4.8e12
    assert least["gen"] == pytest.approx(prefill + decode, rel=0.01)


def test_rows_are_written_one_after_the_other_and_join_those_of_an_earlier_run(tmp_path, monkeypatch):
    path, now = tmp_path / "found.json", provenance("jax", "flax")
    old_row = {"part": "score", "shape": "b", "seconds": 1.0, "date": "2026-01-02"}
    switch, old_form = {"part": "switch", "shape": "a", "seconds": 9.0}, {"part": "train", "model": "old form"}
    once: list[Any] = [old_row, switch, old_form]
    path.write_text(json.dumps({"results": once}))

    def measure() -> dict[str, float]:
        written.append(json.loads(path.read_text())["results"])
        return {"seconds": 2.0}

    written: list[Any] = []
    planned = (("switch", "a", 0), ("train", "c", 0), ("score", "b", 1e9), ("score", "d", 1e9))
    planned_parts = [Part(name, shape, {}, expected, measure) for name, shape, expected in planned]
    monkeypatch.setattr(accelerator, "plan", lambda *_: planned_parts)
    monkeypatch.setattr(accelerator, "line", str)
    rows = main(SMALL, PARTS, 100.0, path)
    assert [row.get("error") for row in rows] == [None, None, NO_TIME, NO_TIME]
    replaced = {"part": "switch", "shape": "a", "seconds": 2.0, **now}
    added = {"part": "train", "shape": "c", "seconds": 2.0, **now}
    late = {"part": "score", "shape": "d", "error": NO_TIME, **now}
    assert written == [once, [old_row, replaced]]
    assert json.loads(path.read_text())["results"] == [old_row, replaced, added, late]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("switch", "logprob", "score"), marks=pytest.mark.full),
        pytest.param(("decode", "train", "iteration"), marks=pytest.mark.proof("runs")),
    ],
)
def test_it_runs_at_tiny_shapes(capsys, monkeypatch, chosen):
    """Runs the first row of each part: the others differ in their shapes or the policy of remat."""
    monkeypatch.setattr(accelerator, "plan", lambda *sizes: {part.name: part for part in plan(*sizes)[::-1]}.values())
    rows = main(SMALL, chosen, 1e9, None)
    assert {row["part"] for row in rows} == set(chosen)
    assert not [row for row in rows if "error" in row]
    printed = capsys.readouterr().out
    # Of decoding, the difference of two: on a busy machine it may even be negative.
    assert all(row["seconds"] > 0 for row in rows if row["part"] != "decode")
    assert all(f"{row['part']:9} {row['shape']}" in printed for row in rows)
