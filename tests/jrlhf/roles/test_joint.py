"""Actor and critic trained in one table end as they do one after the other."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.meshes import AXES
from jrlhf.meshes.pipeline import violation
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import ModelConfig, SamplingConfig, init_sharded
from jrlhf.planning.fusion.updates import fused_updates
from jrlhf.planning.workload import workload_of
from jrlhf.ppo import Experience, PPOConfig
from jrlhf.roles.actor import Actor
from jrlhf.roles.critic import Critic
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import Pending
from jrlhf.roles.planned_placement import place_roles
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES: Any = {"embed": 16, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32}
MODEL = ModelConfig(vocab_size=64, max_positions=16, initializer_range=0.3, tie_embeddings=True, **SIZES)
ROWS, LENGTH = 16, 8
# Steps are as exact as gradients: Adam would make a step of their rounding.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))
# Four stages up the devices; two pipelines of two stages down.
DEEP = Placement(Slice(0, 4), "train", pipeline=4, micro_batches=4, schedule="fused")
SHALLOW = Placement(Slice(0, 4), "train", data=2, pipeline=2, micro_batches=2, schedule="fused")


def experience(unsound: bool) -> Experience:
    """Responses from token 3 on. unsound: one row's returns are NaN."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, MODEL.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    lengths = generator.integers(4, LENGTH + 1, ROWS).astype(np.int32)
    place = np.arange(LENGTH)[None, :]
    mask = (place >= 3) & (place < lengths[:, None])
    x = generator.normal(size=(5, ROWS, LENGTH)).astype(np.float32)
    old = 0.1 * x[0] - 4
    names = ("values", "rewards", "advantages", "returns")
    masked: Any = {name: np.where(mask, x[i], 0) for i, name in enumerate(names, 1)}
    if unsound:
        masked["returns"][3, 3] = np.nan
    single: Any = {"finished": np.ones(ROWS, bool), "version": np.int32(0)}
    starts = np.full(ROWS, 3, np.int32)
    given: Any = {"tokens": tokens, "prompt_lengths": starts, "response_lengths": lengths - 3, "logprobs": old}
    given |= {"scores": x[0, :, 0], "response_mask": mask, "old_logprobs": old, "ref_logprobs": old + 0.1 * x[1]}
    return Experience(**given, **single, **masked)


def on(mesh: Mesh, rows: Experience) -> Experience:
    """An experience on a mesh, its rows divided over all devices."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(AXES) if np.ndim(x) else P())), rows)


def trained(actor: Placement, critic: Placement, ppo: PPOConfig, rows: Experience) -> Any:
    """Metrics, states and times of one update of both, from the same weights."""
    config = build(Config, {"stages": ["ppo"], "rewards": [{"name": "words", "function": "word_count"}]})
    graph, plan = graph_of(config), Plan("by hand", {"actor.update": actor, "critic.update": critic})
    models: dict[str, ModelConfig] = dict.fromkeys(("actor", "critic", "reference"), MODEL)
    fused = fused_updates(workload_of(config, graph, models), plan)
    assert fused is None or violation(fused.table) is None
    placed, clock = place_roles(plan, graph, jax.devices(), fused=fused), Clock()

    def role(kind: Any, name: str, head: Any, **options: Any) -> Any:
        mesh = placed[name].home.mesh
        with jax.set_mesh(mesh):
            params = init_sharded(MODEL, jax.random.key(len(name)), mesh, head, zero_head=False)
        algorithm = replace(ppo, micro_batches=placed[name]["update"].parts)
        site, model = Site(placed[name], Compute(), clock), Model(Architecture(MODEL), params)
        built = kind(model, site, optimizer=OPTIMIZER, algorithm=algorithm, **options)
        return built.bind(built.create(params))

    sampling = SamplingConfig(max_new_tokens=LENGTH - 3, stop_ids=(1,))
    roles = role(Critic, "critic", "scalar"), role(Actor, "actor", "lm", sampling=sampling)
    metrics = [one.update(on(one.placement["update"].mesh, rows)) for one in roles]
    metrics = metrics[0] | metrics[1]
    if isinstance(metrics, Pending):
        metrics = metrics.result()
    return jax.device_get((metrics, [one.state for one in roles])), clock.take()


DEEP_ACTOR, DEEP_CRITIC = "a deep actor, the critic in two pipelines", "a deep critic, the actor in two pipelines"
CASES: dict[str, tuple[Placement, Placement, dict[str, Any], bool]] = {
    DEEP_ACTOR: (DEEP, SHALLOW, {"epochs": 2, "target_kl": 0.6}, True),
    DEEP_CRITIC: (SHALLOW, DEEP, {}, False),
}


@pytest.mark.proof("families")
@pytest.mark.parametrize("case", [DEEP_ACTOR, DEEP_CRITIC])
def test_joint_updates_are_those_of_one_after_the_other(case):
    """In the first case the actor stops before the critic, which skips the minibatch whose returns are not numbers."""
    actor, critic, settings, unsound = CASES[case]
    ppo, rows = PPOConfig(minibatches=2, **settings), experience(unsound)
    serial, _ = trained(replace(actor, schedule="1f1b"), replace(critic, schedule="1f1b"), ppo, rows)
    fused, times = trained(actor, critic, ppo, rows)
    assert set(times) == {"timing_s/update", "timing_s/step"}
    assert fused[0].keys() == serial[0].keys()
    if unsound:
        assert fused[0]["critic/skipped_updates"] == 2 and 0 < fused[0]["actor/stopped_updates"] < 4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), fused, serial)
