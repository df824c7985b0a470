"""Experience with advantages from a user's function."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import GRPOConfig, PPOConfig, Rollout, make_custom_experience, make_experience, make_group_experience
from jrlhf.ppo.token_advantages import gae

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROWS, TIME, CONFIG = 8, 6, GRPOConfig(samples=4, kl_in="reward", kl_estimator="k1", divide_by_std=False)


def inputs(seed: int = 0):
    rng = np.random.default_rng(seed)
    logprobs, old, ref = jnp.asarray(-rng.exponential(size=(3, ROWS, TIME)), jnp.float32)
    lengths = jnp.asarray(rng.integers(1, 4, (2, ROWS)), jnp.int32)
    finished = jnp.arange(ROWS) % 3 > 0
    tokens = jnp.asarray(rng.integers(0, 9, (ROWS, TIME)), jnp.int32)
    rollout = Rollout(tokens, lengths[0], lengths[1], logprobs, finished, jnp.int32(0))
    return rollout, jnp.asarray(rng.normal(size=ROWS), jnp.float32), old, ref


def above_the_mean(experience, config):
    """Advantages by a function that knows nothing of meshes: it sorts a group's rows and reads them one by one."""
    rewards = jnp.sum(experience.rewards, axis=1).reshape(-1, config.samples)
    order = jnp.argsort(rewards, axis=1)
    sorted_rewards = jnp.take_along_axis(rewards, order, axis=1)
    return (rewards - jnp.mean(sorted_rewards, axis=1, keepdims=True)).reshape(-1)


@pytest.mark.full
def test_a_function_of_rows_gives_what_the_group_estimator_gives():
    """On a mesh with explicit axes, where the advantages lie as the rows do."""
    mesh, config = make_mesh(1, 4, 2), replace(CONFIG, whiten_advantages=True)
    expected = jax.jit(partial(make_group_experience, config=config))(*inputs(), kl_coef=0.3)
    make = jax.jit(partial(make_custom_experience, advantages=above_the_mean, config=config))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(("data", "fsdp", "tensor")))
        placed = jax.tree.map(lambda x: jax.device_put(x, rows if x.ndim else NamedSharding(mesh, P())), inputs())
        actual = make(*placed, kl_coef=0.3)
    for name, value in vars(expected).items():
        if value is not None:
            np.testing.assert_allclose(vars(actual)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert actual.advantages.sharding.is_equivalent_to(actual.tokens.sharding, 2)


def test_a_critics_targets_may_be_among_what_it_gives():
    rollout, scores, old, ref = inputs()
    config, values = PPOConfig(), jnp.cos(jnp.arange(ROWS * TIME, dtype=jnp.float32)).reshape(ROWS, TIME)

    def by_gae(experience, config, values):
        estimate = jax.vmap(partial(gae, discount=config.discount, lam=config.gae_lambda))
        advantages, returns = estimate(experience.rewards, values, experience.response_mask)
        return {"advantages": advantages, "returns": returns, "values": values}

    arguments = rollout, scores, old, ref, values
    expected = jax.jit(partial(make_experience, config=config))(*arguments, kl_coef=0.3)
    actual = jax.jit(partial(make_custom_experience, advantages=by_gae, config=config))(*arguments, kl_coef=0.3)
    for name in ("advantages", "returns", "values", "rewards"):
        np.testing.assert_allclose(vars(actual)[name], vars(expected)[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_it_gives_is_read_at_response_tokens_only():
    missing = partial(jnp.full, (ROWS, TIME), jnp.nan)
    make = partial(make_custom_experience, advantages=lambda experience, config: missing(), config=CONFIG)
    actual = jax.jit(make)(*inputs(), kl_coef=0.0)
    assert np.array_equal(np.isnan(actual.advantages), actual.response_mask)


def test_another_shape_is_refused():
    make = partial(make_custom_experience, advantages=lambda experience, config: experience.scores[:2], config=CONFIG)
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\): it must be \(8,\) or \(8, 6\)"):
        jax.eval_shape(make, *inputs(), kl_coef=0.0)
