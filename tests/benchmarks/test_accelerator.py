"""The accelerator benchmark: its rows, its order under a budget, and that it runs."""

import jax
import numpy as np
import pytest

from benchmarks import accelerator, parts
from benchmarks.accelerator import FULL, PARTS, SMALL, Part, main, plan
from benchmarks.parts import Ceilings
from jrlhf.meshes import make_mesh
from jrlhf.meshes.hardware import PEAKS

H200 = PEAKS["NVIDIA H200"]
TOP = Ceilings(copy=4e12, matmul=800e12, peak=H200)


def full_plan() -> list[Part]:
    device = jax.devices()[0]
    return plan(FULL, make_mesh(1, 1, 1, devices=[device]), TOP, device)


def test_everything_that_is_promised_is_planned_and_the_most_important_comes_first():
    all_parts = full_plan()
    assert {part.name for part in all_parts} == set(PARTS)
    assert {part.shape for part in all_parts if part.name == "decode"} == {
        f"{name} x {batch} x 512 + 512" for name in ("1.7B", "8B") for batch in (64, 128, 256)
    }
    assert [part.name for part in all_parts[:3]] == ["decode", "train", "iteration"]
    shapes = {part.shape for part in all_parts if part.name == "train"}
    assert {"1.7B x 16 x 1024 full", "1.7B x 8 x 2048 full", "1.7B x 8 x 2048 gather"} <= shapes


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
