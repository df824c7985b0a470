import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.models import Generation
from jrlhf.ppo import (
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    PPOState,
    Rollout,
    TrainState,
    make_actor_step,
    make_critic_step,
    make_dpo_step,
    make_ppo_step,
    make_sft_step,
)

OPTIMIZER = optax.adamw(optax.linear_schedule(1e-3, 0, 10))


def test_every_leaf_of_a_fresh_state_lies_on_the_mesh_of_its_weights():
    mesh = make_mesh(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("fsdp", "tensor"))
        actor = TrainState.create({"w": jax.device_put(np.ones((8, 4), np.float32), sharding)}, OPTIMIZER)
        state = PPOState.create(actor, jax.tree.map(jnp.copy, actor), kl_coef=0.05)
    for x in jax.tree.leaves(state):
        assert x.sharding == (sharding if x.ndim else NamedSharding(mesh, P()))
    np.testing.assert_allclose(state.kl.coef, 0.05)


def test_actor_and_critic_do_not_share_arrays_which_a_step_would_free_twice():
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    actor = TrainState.create(params, OPTIMIZER)
    for shared in (params, {"w": jnp.ones((8, 4)), "b": params["b"]}):
        with pytest.raises(ValueError, match="actor and critic hold the same arrays"):
            PPOState.create(actor, TrainState.create(shared, OPTIMIZER), kl_coef=0.05)


def test_without_a_mesh_a_state_stays_where_it_is_and_its_shapes_are_known_without_arrays():
    params = {"w": jnp.ones((8, 4))}
    state = TrainState.create(params, OPTIMIZER)
    assert state.params["w"] is params["w"]
    abstract = jax.eval_shape(lambda params: TrainState.create(params, OPTIMIZER), params)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_a_rollout_of_what_a_sampler_drew_has_its_own_copy_of_the_version():
    """A step frees the state that has the number."""
    drawn = Generation(
        jnp.ones((2, 5), jnp.int32), jnp.full(2, 2), jnp.full(2, 3), jnp.zeros((2, 5)), jnp.ones(2, bool)
    )
    step = jnp.array(7)
    rollout = Rollout.of(drawn, step)
    step.delete()
    assert rollout.version == 7 and rollout.versions is None and Rollout.of(drawn).version == 0
    for name, array in vars(drawn).items():
        assert getattr(rollout, name) is array


def test_steps_show_what_they_take_and_return():
    def function(*_: Any) -> Any: ...

    pipeline: Any = function
    for step, state, batch in (
        (make_actor_step(function, OPTIMIZER, GRPOConfig()), TrainState, "experience"),
        (make_actor_step(function, OPTIMIZER, GRPOConfig(), pipeline=pipeline), TrainState, "experience"),
        (make_critic_step(function, OPTIMIZER, PPOConfig()), TrainState, "experience"),
        (make_ppo_step(function, function, OPTIMIZER, OPTIMIZER, PPOConfig()), PPOState, "experience"),
        (make_sft_step(function, OPTIMIZER), TrainState, "batch"),
        (make_dpo_step(function, OPTIMIZER, DPOConfig()), TrainState, "batch"),
    ):
        shown = inspect.signature(step)
        assert [*shown.parameters][:2] == ["state", batch] and shown.parameters["state"].annotation is state
        assert shown.return_annotation.__args__[0] is state
