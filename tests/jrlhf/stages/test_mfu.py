"""Utilisation: the share of a peak that calls of known work took, by verl's names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import Call, Graph, make_mesh
from jrlhf.meshes.hardware import PEAKS, Peak
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.flops import forward_operations, generation_seconds, training_operations
from jrlhf.models.options import ForwardOptions
from jrlhf.ppo import GRPOConfig, PolicyConfig, PPOConfig
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import CallPlacement, RolePlacement
from jrlhf.stages import mfu
from jrlhf.stages.mfu import Utilisation, utilisation_of

CONFIG = ModelConfig(vocab_size=100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32, max_positions=16)
PROMPTS, RESPONSES = np.array([3, 4], np.int32), np.array([5, 2], np.int32)
PEAK = Peak(1e6, 1e8, 1e7)
SECONDS = {
    f"timing_s/{name}": 2.0
    for name in ("update_actor", "update_critic", "update_cost_critic", "old_log_prob", "ref", "gen")
}
ALL = ("generate", "logprobs", "update")
PPO = PPOConfig(epochs=2, minibatches=2)
REST: Any = {"learned": np.ones(2, bool), "texts": None, "rounds": 1, "stopped_updates": 0.0}


def whole(role: str) -> RolePlacement:
    return RolePlacement.of(make_mesh(2, 2, 2))


def graph(actor: tuple[str, ...] = ALL, *, others: bool = True) -> Graph:
    names = [f"actor.{method}" for method in actor]
    names += ["reference.logprobs", "critic.update", "cost_critic.update"] if others else []
    return Graph("test", (), tuple(Call(name, name.partition(".")[0], "infer", (), ()) for name in names))


def utilisation(
    monkeypatch: pytest.MonkeyPatch,
    peak: Peak = PEAK,
    *,
    lora: LoRAConfig | None = None,
    dtype=jnp.bfloat16,
    ppo: PolicyConfig = PPO,
    calls: Graph | None = None,
    placement_of: Callable[[str], RolePlacement] = whole,
) -> Utilisation:
    monkeypatch.setattr(mfu, "peak_of", lambda device: peak)
    model = Model(Architecture(CONFIG, lora), {})
    deeper = Model(Architecture(replace(CONFIG, layers=4), lora), {})
    models = {"actor": model, "critic": model, "cost_critic": deeper, "reference": model}
    result = utilisation_of(
        calls or graph(), models, ppo, placement_of, Compute(ForwardOptions(dtype=jnp.dtype(dtype)))
    )
    assert result is not None
    return result


def test_shares_of_the_peak_of_all_devices(monkeypatch):
    metrics = utilisation(monkeypatch).metrics(SECONDS, PROMPTS, RESPONSES, **REST)
    lengths, peak = PROMPTS + RESPONSES, 8 * 1e8
    policy: Any = {"predicted": RESPONSES}  # prompts have no head
    generation = generation_seconds(CONFIG, PROMPTS, RESPONSES, bandwidth=8e6, operations=peak, itemsize=2, copies=4)
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
    slower = utilisation(monkeypatch, dtype=jnp.float32).metrics(SECONDS, PROMPTS, RESPONSES, **REST)
    assert slower["perf/mfu/ref"] == pytest.approx(10 * metrics["perf/mfu/ref"])
    # The first of three stopped updates was computed, and the other two of four were not.
    half = utilisation(monkeypatch).metrics(SECONDS, PROMPTS, RESPONSES, **REST | {"stopped_updates": 3.0})
    assert half["perf/mfu/actor"] == pytest.approx(metrics["perf/mfu/actor"] / 2)
    # An adapter and its base in one pass: both are counted in it.
    calls = graph(("generate", "logprobs_with_base"), others=False)
    both = utilisation(monkeypatch, calls=calls).metrics(SECONDS, PROMPTS, RESPONSES, **REST)
    assert both["perf/mfu/actor_infer"] == pytest.approx(2 * metrics["perf/mfu/actor_infer"])
    assert set(both) == {"perf/mfu/actor_infer", "perf/roofline/gen"}


def test_a_call_is_held_against_the_devices_that_it_has(monkeypatch):
    """Half as many for the actor, of which all are for tensors where it generates; a quarter for the critic."""
    devices = jax.devices()
    half, apart = make_mesh(1, 4, 1, devices=devices[:4]), make_mesh(1, 1, 4, devices=devices[:4])
    places = {
        "actor": RolePlacement(CallPlacement(half), {"generate": CallPlacement(apart)}),
        "critic": RolePlacement(CallPlacement(make_mesh(1, 2, 1, devices=devices[4:6]))),
    }
    load = utilisation(monkeypatch, placement_of=lambda role: places.get(role, whole(role)))
    metrics = load.metrics(SECONDS, PROMPTS, RESPONSES, **REST)
    everywhere = utilisation(monkeypatch).metrics(SECONDS, PROMPTS, RESPONSES, **REST)
    shares = {name: metrics[name] / everywhere[name] for name in metrics if name.startswith("perf/mfu/")}
    assert shares == pytest.approx(
        {f"perf/mfu/{name}": 2 for name in ("actor", "actor_infer")}
        | {"perf/mfu/critic": 4, "perf/mfu/cost_critic": 1, "perf/mfu/ref": 1}
    )
    once = generation_seconds(CONFIG, PROMPTS, RESPONSES, bandwidth=4e6, operations=4e8, itemsize=2, copies=1)
    assert metrics["perf/roofline/gen"] == pytest.approx(once / 2)


def test_rows_that_a_budget_leaves_out_do_not_count_and_texts_do(monkeypatch):
    texts = np.zeros((2, 9), bool)
    texts[0, 2:6] = texts[1, 1:3] = True
    own = {"learned": np.array([False, True]), "texts": texts}
    for budget in (None, 64):
        load = utilisation(monkeypatch, ppo=replace(PPO, micro_batch_tokens=budget))
        metrics = load.metrics(SECONDS, PROMPTS, RESPONSES, **REST | own)
        learned = slice(0 if budget is None else 1, 2)
        lengths, responses = (PROMPTS + RESPONSES)[learned], RESPONSES[learned]
        imitated = training_operations(CONFIG, np.array([6, 3]), predicted=np.array([4, 2]))
        actor = training_operations(CONFIG, lengths, predicted=responses) + imitated
        assert metrics["perf/mfu/actor"] == pytest.approx(actor / 8e8)  # two epochs in two seconds
        critic = training_operations(CONFIG, lengths, "scalar")
        assert metrics["perf/mfu/critic"] == pytest.approx(critic / 8e8)


def test_samples_of_a_prompt_share_its_prefill(monkeypatch):
    """Memory so fast that only operations count: twice as many samples are twice the decoding, and the same prefill."""
    prompts, responses = np.array([7, 7, 4, 4], np.int32), np.array([5, 5, 2, 2], np.int32)

    def share(algorithm: PolicyConfig, **rows: Any) -> float:
        load = utilisation(monkeypatch, Peak(1e30, 1e8, 1e7), ppo=algorithm, calls=graph(("generate",), others=False))
        return load.metrics({"timing_s/gen": 1.0}, **rows, **REST)["perf/roofline/gen"]

    singles = {"prompts": prompts[::2], "responses": responses[::2]}
    twice = share(GRPOConfig(samples=2), prompts=prompts, responses=responses)
    once, apart = share(PPO, **singles), share(PPO, prompts=prompts, responses=responses)
    assert apart == pytest.approx(2 * once)
    # One sample lacks the decoding of the second: the forward pass of its responses after prompts that were read.
    prefill = forward_operations(CONFIG, prompts[::2], predicted=np.zeros(2, np.int32)) / 8e8
    assert apart - twice == pytest.approx(prefill)


def test_an_unknown_device_has_no_utilisation():
    assert utilisation_of(graph(), {}, PPO, whole, Compute()) is None
    assert jax.devices()[0].device_kind not in PEAKS


def test_seconds_of_several_generations_are_held_against_no_roofline_of_one(monkeypatch):
    greedy = graph((*ALL, "generate_greedy"))
    for calls, rounds, expected in ((graph(), 1, True), (graph(), 2, False), (greedy, 1, False)):
        metrics = utilisation(monkeypatch, calls=calls).metrics(
            SECONDS, PROMPTS, RESPONSES, **REST | {"rounds": rounds}
        )
        assert ("perf/roofline/gen" in metrics) is expected
