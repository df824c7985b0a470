"""Utilisation: the share of a peak that calls of known work took, by verl's names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import make_mesh
from jrlhf.meshes.hardware import PEAKS, Peak
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.flops import forward_operations, generation_seconds, training_operations
from jrlhf.ppo import DAPOConfig, GRPOConfig, PolicyConfig, PPOConfig, ReMaxConfig
from jrlhf.roles.compiled import Compute
from jrlhf.roles.model import Architecture, Model
from jrlhf.roles.placement import CallPlacement, RolePlacement
from jrlhf.stages import mfu
from jrlhf.stages.mfu import utilisation_of

CONFIG = ModelConfig(vocab_size=100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32, max_positions=16)
PROMPTS, RESPONSES = np.array([3, 4], np.int32), np.array([5, 2], np.int32)
CALLS = ("update_actor", "update_critic", "update_cost_critic", "old_log_prob", "ref", "gen")
PPO = PPOConfig(epochs=2, minibatches=2)


def workload(
    monkeypatch,
    peak: Peak | None,
    lora: LoRAConfig | None = None,
    dtype=jnp.bfloat16,
    ppo: PolicyConfig = PPO,
    placement_of: Callable[[str], RolePlacement] = lambda role: RolePlacement.of(make_mesh(2, 2, 2)),
):
    monkeypatch.setattr(mfu, "peak_of", lambda device: peak)
    model = Model(Architecture(CONFIG, lora), {})
    deeper = Model(Architecture(replace(CONFIG, layers=4), lora), {})
    models = {"critic": model, "cost_critic": deeper, "reference": model}
    return utilisation_of(model, models, ppo, placement_of, Compute(jnp.dtype(dtype)))


def test_shares_of_the_peak_of_all_devices(monkeypatch):
    seconds = {f"timing_s/{call}": 2.0 for call in CALLS}
    metrics = workload(monkeypatch, Peak(1e6, 1e8, 1e7)).metrics(seconds, PROMPTS, RESPONSES)
    lengths, peak = PROMPTS + RESPONSES, 8 * 1e8
    policy: Any = {"predicted": RESPONSES}  # prompts have no head
    generation = generation_seconds(CONFIG, PROMPTS, RESPONSES, memory=8e6, operations=peak, itemsize=2, copies=4)
    assert metrics == pytest.approx(
        {
            "perf/mfu/actor": 2 * training_operations(CONFIG, lengths, **policy) / peak / 2,
            "perf/mfu/critic": 2 * training_operations(CONFIG, lengths, "scalar") / peak / 2,
            "perf/mfu/cost_critic": 2 * training_operations(replace(CONFIG, layers=4), lengths, "scalar") / peak / 2,
            "perf/mfu/actor_infer": forward_operations(CONFIG, lengths, **policy) / peak / 2,
            "perf/mfu/ref": forward_operations(CONFIG, lengths, **policy) / peak / 2,
            "perf/roofline/gen": generation / 2,
        }
    )
    slower = workload(monkeypatch, Peak(1e6, 1e8, 1e7), dtype=jnp.float32).metrics(seconds, PROMPTS, RESPONSES)
    assert slower["perf/mfu/ref"] == pytest.approx(10 * metrics["perf/mfu/ref"])


def test_a_call_is_held_against_the_devices_that_it_has(monkeypatch):
    """Half as many for the actor, of which all are for tensors where it generates; a quarter for the critic."""
    devices = jax.devices()
    half, apart = make_mesh(1, 4, 1, devices=devices[:4]), make_mesh(1, 1, 4, devices=devices[:4])
    places = {
        "actor": RolePlacement(CallPlacement(half), {"generate": CallPlacement(apart)}),
        "critic": RolePlacement(CallPlacement(make_mesh(1, 2, 1, devices=devices[4:6]))),
    }
    seconds = {f"timing_s/{call}": 2.0 for call in CALLS}
    peak, whole = Peak(1e6, 1e8, 1e7), RolePlacement.of(make_mesh(2, 2, 2))
    load = workload(monkeypatch, peak, placement_of=lambda role: places.get(role, whole))
    metrics = load.metrics(seconds, PROMPTS, RESPONSES)
    everywhere = workload(monkeypatch, peak).metrics(seconds, PROMPTS, RESPONSES)
    shares = {name: metrics[name] / everywhere[name] for name in metrics if name.startswith("perf/mfu/")}
    assert shares == pytest.approx(
        {f"perf/mfu/{name}": 2 for name in ("actor", "actor_infer")}
        | {"perf/mfu/critic": 4, "perf/mfu/cost_critic": 1, "perf/mfu/ref": 1}
    )
    once = generation_seconds(CONFIG, PROMPTS, RESPONSES, memory=4e6, operations=4e8, itemsize=2, copies=1)
    assert metrics["perf/roofline/gen"] == pytest.approx(once / 2)


def test_updates_that_were_stopped_and_calls_that_were_not_timed_do_not_count(monkeypatch):
    load = workload(monkeypatch, Peak(1e6, 1e8, 1e7), LoRAConfig(rank=2, alpha=1.0))
    timed = {"timing_s/update_actor": 1.0}
    whole = load.metrics(timed, PROMPTS, RESPONSES)
    half = load.metrics(timed | {"actor/stopped_updates": 3.0}, PROMPTS, RESPONSES)  # the first of them was computed
    assert set(whole) == {"perf/mfu/actor"}
    assert half["perf/mfu/actor"] == pytest.approx(whole["perf/mfu/actor"] / 2)


def test_rows_that_a_budget_leaves_out_do_not_count_and_texts_do(monkeypatch):
    for budget in [None, 64]:
        load = workload(monkeypatch, Peak(1e6, 1e8, 1e7), ppo=replace(PPO, micro_batch_tokens=budget))
        texts = np.zeros((2, 9), bool)
        texts[0, 2:6] = texts[1, 1:3] = True
        seconds = {"timing_s/update_actor": 1.0, "timing_s/update_critic": 1.0}
        metrics = load.metrics(seconds, PROMPTS, RESPONSES, learned=np.array([False, True]), texts=texts)
        learned = slice(0 if budget is None else 1, 2)
        lengths, responses = (PROMPTS + RESPONSES)[learned], RESPONSES[learned]
        imitated = training_operations(CONFIG, np.array([6, 3]), predicted=np.array([4, 2]))
        expected = {
            "perf/mfu/actor": 2 * (training_operations(CONFIG, lengths, predicted=responses) + imitated) / 8e8,
            "perf/mfu/critic": 2 * training_operations(CONFIG, lengths, "scalar") / 8e8,
        }
        assert metrics == pytest.approx(expected)


def test_one_pass_over_actor_and_reference_counts_both(monkeypatch):
    load = workload(monkeypatch, Peak(1e6, 1e8, 1e7))
    metrics = load.metrics({"timing_s/old_log_prob": 1.0}, PROMPTS, RESPONSES)
    expected = 2 * forward_operations(CONFIG, PROMPTS + RESPONSES, predicted=RESPONSES) / 8e8
    assert metrics == pytest.approx({"perf/mfu/actor_infer": expected})


def test_samples_of_a_prompt_share_its_prefill(monkeypatch):
    """Memory so fast that only operations count: twice as many samples are twice the decoding, and the same prefill."""
    peak, prompts, responses = Peak(1e30, 1e8, 1e7), np.array([7, 7, 4, 4], np.int32), np.array([5, 5, 2, 2], np.int32)

    def found(algorithm: PolicyConfig, **rows: Any) -> float:
        return workload(monkeypatch, peak, ppo=algorithm).metrics({"timing_s/gen": 1.0}, **rows)["perf/roofline/gen"]

    singles = {"prompts": prompts[::2], "responses": responses[::2]}
    twice = found(GRPOConfig(samples=2), prompts=prompts, responses=responses)
    once, apart = found(PPO, **singles), found(PPO, prompts=prompts, responses=responses)
    assert apart == pytest.approx(2 * once)
    # What one sample lacks to two is decoding alone: the forward pass of its responses after prompts that were read.
    prefill = forward_operations(CONFIG, prompts[::2], predicted=np.zeros(2, np.int32)) / 8e8
    assert apart - twice == pytest.approx(prefill)


def test_an_unknown_device_has_no_utilisation(monkeypatch):
    assert workload(monkeypatch, None).metrics({"timing_s/gen": 1.0}, PROMPTS, RESPONSES) == {}
    assert jax.devices()[0].device_kind not in PEAKS


def test_seconds_of_several_generations_are_held_against_no_roofline_of_one(monkeypatch):
    def found(algorithm: PolicyConfig, **metrics: float) -> set[str]:
        load = workload(monkeypatch, Peak(1e6, 1e8, 1e7), ppo=algorithm)
        return set(load.metrics({"timing_s/gen": 1.0, "timing_s/update_actor": 1.0} | metrics, PROMPTS, RESPONSES))

    both = {"perf/mfu/actor", "perf/roofline/gen"}
    assert found(DAPOConfig(), **{"dapo/rounds": 1.0}) == both
    assert found(DAPOConfig(), **{"dapo/rounds": 2.0}) == found(ReMaxConfig()) == {"perf/mfu/actor"}
