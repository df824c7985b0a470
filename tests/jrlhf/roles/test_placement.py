"""Roles on slices of the devices: weights and rows get to their calls, and nothing else depends on where those are."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.schema import Config
from jrlhf.data.batches import put_rows
from jrlhf.meshes import AXES, GENERATE, SCORE, make_mesh
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import ModelConfig, init_sharded, param_shardings
from jrlhf.models.options import ForwardOptions
from jrlhf.ppo import PPOConfig
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Architecture, Compute, Model, relocate, weights_at
from jrlhf.roles.placement import CallPlacement, RolePlacement, TransferCache, call
from jrlhf.roles.planned_placement import place_roles
from jrlhf.run.clock import Clock
from tests.jrlhf.roles.ppo_roles import Setup
from tests.support.live import live_bytes

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=64, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32, max_positions=16, initializer_range=0.3
)
PPO = PPOConfig(epochs=1, minibatches=2, truncation="bootstrap")
OPTIMIZER = optax.sgd(0.1, momentum=0.9)  # steps are as exact as gradients: Adam would make a step of their rounding
SCALAR, LM = ("scalar", "lm")


def mesh_on(start: int, *sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    return make_mesh(*sizes, devices=jax.devices()[start : start + count])


# ---- weights

PAIRS = {
    "same devices": ((0, 1, 4, 2), (0, 2, 2, 2)),
    "subset": ((0, 1, 4, 2), (2, 1, 2, 1)),
    "disjoint": ((0, 1, 2, 2), (4, 1, 4, 1)),
    "more": ((0, 1, 2, 1), (2, 1, 2, 2)),
}


@pytest.mark.full
@pytest.mark.parametrize(("head", "pairs"), [(LM, ["disjoint"]), (SCALAR, PAIRS)], ids=["some", "all"])
def test_weights_are_brought_to_a_call_bit_for_bit(head, pairs):
    for pair in pairs:
        assert_brought(head, *(mesh_on(*shape) for shape in PAIRS[pair]))


def assert_brought(head: Any, source: Mesh, target: Mesh) -> None:
    params = init_sharded(MODEL, jax.random.key(0), source, head, zero_head=False)
    model, host = Model(Architecture(MODEL), params), jax.device_get(params)
    layers = {name: jax.tree.map(lambda x: x[0], x) for name, x in host["layers"].items()}
    before = live_bytes()
    for shared, layout, expected in ((False, SCORE, host), (True, GENERATE, {**host, "layers": [layers]})):
        with (
            jax.transfer_guard_host_to_device("disallow_explicit"),
            jax.transfer_guard_device_to_host("disallow_explicit"),
        ):
            copy = jax.block_until_ready(weights_at(model, Architecture(MODEL, shared=shared), target, Compute()))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(copy), expected)
        assert jax.tree.map(lambda x: x.sharding, copy) == param_shardings(MODEL, target, layout, head)
        assert live_bytes() - before == live_bytes(copy)
        del copy
        assert live_bytes() == before
    moved = relocate(model, model.architecture, target, donate=True)
    jax.block_until_ready(moved.params)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert live_bytes() - before == live_bytes(moved.params) - live_bytes_of(host, source, head)
    back = relocate(moved, model.architecture, source, donate=False)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.params), host)
    assert RolePlacement.of(source).store(back) is back


def live_bytes_of(host: Any, mesh: Mesh, head: Any):
    return live_bytes(jax.device_put(host, param_shardings(MODEL, mesh, SCORE, head)))


def test_a_copy_in_bfloat16_is_what_a_frozen_model_holds():
    """Matrices are rounded once, before they travel; the norms' scales, though stacked, are not."""
    source, target = mesh_on(0, 1, 2, 2), mesh_on(4, 1, 4, 1)
    params = init_sharded(MODEL, jax.random.key(0), source)
    params["layers"] = jax.tree.map(lambda x: x + 1e-3, params["layers"])
    compute = Compute(ForwardOptions(dtype=jnp.dtype(jnp.bfloat16)))
    copy = weights_at(Model(Architecture(MODEL), params), Architecture(MODEL), target, compute)
    host, moved = jax.device_get((params, copy))
    for (path, x), y in zip(jax.tree.leaves_with_path(host), jax.tree.leaves(moved), strict=True):
        vector = path[-1].key == "scale"
        assert y.dtype == (jnp.float32 if vector else jnp.bfloat16), path
        np.testing.assert_array_equal(x if vector else x.astype(jnp.bfloat16), y)


# ---- iterations


class Placed(Setup):
    """PPO's roles where a plan places them, from the same weights whatever the plan."""

    def __init__(self, *placements: Placement):
        calls = {name.replace("__", "."): placement for name, placement in plan_on(*placements).items()}
        placed = place_roles(Plan("by hand", calls), graph_of(Config()), jax.devices())
        super().__init__(placed, ppo=PPO, temperature=1.0, model=MODEL, optimizer=OPTIMIZER)

    def end(self) -> Any:
        """On the host: the last of two experiences and its metrics, and both models."""
        self.clock.start()
        experience, metrics = [self.iterate(step) for step in range(2)][-1]
        return jax.device_get((experience, metrics, *[state.params for state in self.states.values()]))


def plan_on(generate: Placement, score: Placement, critic: Placement, train: Placement) -> dict[str, Placement]:
    def seen(placement: Placement, layout: Any) -> Placement:
        return Placement(placement.devices, layout, *placement.sizes)

    return {
        "actor__generate": seen(generate, "generate"),
        "reward__score": seen(score, "score"),
        "actor__logprobs": seen(score, "score"),
        "reference__logprobs": seen(score, "score"),
        "critic__values": seen(critic, "score"),
        "critic__update": seen(critic, "train"),
        "actor__update": seen(train, "train"),
    }


FIRST, SECOND = (Placement(Slice(start, 4), "score", 1, 2, 2) for start in (0, 4))
ALL, PART = Placement(Slice(0, 8), "score", 1, 4, 2), Placement(Slice(2, 2), "score", 1, 2, 1)


@pytest.fixture(scope="module")
def half():
    """Colocated on four devices."""
    return Placed(FIRST, FIRST, FIRST, FIRST).end()


@pytest.mark.proof("runs")
def test_equal_meshes_on_other_devices_give_the_same_bits(half):
    setup = Placed(FIRST, FIRST, SECOND, FIRST)
    jax.tree.map(np.testing.assert_array_equal, setup.end(), half)
    assert {x.sharding.mesh for x in jax.tree.leaves(setup.states["critic"])} == {mesh_on(4, 1, 2, 2)}
    timed = {name.removeprefix("timing_s/") for name in setup.clock.take()}
    assert timed == set(
        "transfer reshard gen reward old_log_prob ref values adv update_critic update_actor step".split()
    )


@pytest.mark.full
def test_any_placement_gives_the_same_training(half):
    """Generation on all devices, scoring on one half, the critic on the other, the actor trained on two."""
    setup = Placed(ALL, FIRST, SECOND, PART)
    experience, *others = setup.end()
    expected, *of_half = half
    np.testing.assert_array_equal(experience.tokens, expected.tokens)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), (experience, others), (expected, of_half)
    )
    # No copy outlives its call: an iteration leaves the states as large as they were, and its own results.
    before = live_bytes()
    experience, metrics = setup.iterate(2)
    during = live_bytes()
    # A rollout has the version of the weights that drew it, wherever those were trained; the next ones say otherwise.
    assert int(experience.version) == int(setup.states["actor"].step) - 1 == 2
    arrays = (
        experience.logprobs,
        experience.old_logprobs,
        setup.actor.bind(setup.states["actor"]).logprobs(experience),
        experience.response_mask,
    )
    drawn, own, newer, mask = jax.device_get(arrays)
    assert np.abs(drawn - own)[mask].max() < 1e-5 < 1e-3 < np.abs(drawn - newer)[mask].max()
    del experience, metrics, newer, arrays
    assert during != before and live_bytes() == before


# ---- at the same time


class Meeting:
    """Stands for a role: a call ends only once a call of another role has begun, too."""

    def __init__(self, places: RolePlacement, clock: Clock, met: threading.Barrier):
        self.placement, self.clock, self._met = places, clock, met

    @call("infer", "{role}_values")
    def values(self, rows: jax.Array) -> jax.Array:
        return self.clock.run("values", self._program, rows)

    @call("train", "{role}_metrics")
    def update(self, rows: jax.Array) -> jax.Array:
        return self.clock.run("update", self._program, rows)

    def _program(self, rows: jax.Array) -> jax.Array:
        def meet(index: Any) -> Any:
            if np.asarray(index) == 0:
                self._met.wait(10)
            return np.float32(0)

        def on_device(x: jax.Array) -> jax.Array:
            index = sum(jax.lax.axis_index(axis) for axis in AXES)
            return x + jax.pure_callback(meet, jax.ShapeDtypeStruct((), jnp.float32), index)

        spec = jax.P(AXES)
        return jax.jit(jax.shard_map(on_device, in_specs=spec, out_specs=spec, check_vma=False))(rows)


def meeting(critic, actor, rows):
    values = critic.values(rows)
    old = actor.values(rows)
    return critic.update(old), actor.update(values)


def test_calls_on_disjoint_slices_run_at_the_same_time():
    """A slice of several devices and one of a single one: of larger ones a simulated CPU runs one at a time. Every call
    waits for the other role's: were they not handed over before, or what they read not sent on before, none would end.
    """
    several, one = mesh_on(0, 1, 2, 2), mesh_on(4, 1, 1, 1)
    met, clock, courier = threading.Barrier(2), Clock(blocking=False), TransferCache()
    both = several, one
    roles = {
        name: Meeting(RolePlacement(CallPlacement(mesh), {}, {"values": both}, courier), clock, met)
        for name, mesh in (("critic", several), ("actor", one))
    }
    rows = put_rows(np.zeros((8, 2), np.float32), roles["critic"].placement.home.mesh)
    for mesh in both:
        courier.bring(rows, mesh, Clock(blocking=True))
    results = meeting(**roles, rows=rows)
    assert [x.sharding.mesh for x in results] == [several, one]
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros((8, 2))), results)
    clock.take()


def test_places_default_to_the_home():
    mesh, other = mesh_on(0, 1, 2, 2), mesh_on(4, 1, 2, 2)
    places = RolePlacement(CallPlacement(mesh), {"values": CallPlacement(other)})
    assert places["values"].mesh == other and places["update"].mesh == mesh
    assert RolePlacement.of(mesh)["anything"] == CallPlacement(mesh)
    compiled = places["update"].compiled(Architecture(MODEL), Compute())
    assert compiled == CompiledModel(Architecture(MODEL), mesh, Compute())
