"""An actor's step on sums of a loss: to the same result as on log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import PPOConfig, TrainState, make_actor_step

CONFIG = PPOConfig(epochs=2, minibatches=2, micro_batches=2, dual_clip=1.5, entropy_coef=0.05, target_kl=5.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_sums_give_the_same_step(toy, frozen):
    def sums(params, tokens, data, terms, *base):
        """Tokens flat, in halves, t = 0 left out."""
        outputs = toy.logprobs(_joined(params, base), tokens)
        flat = [jax.tree.map(lambda x: x[:, 1:].reshape(-1), x) for x in (*outputs, data)]
        half = flat[0].shape[0] // 2
        parts = [terms(*jax.tree.map(lambda x, part=part: x[part], flat)) for part in (slice(half), slice(half, None))]
        first, second = (jax.tree.map(jnp.sum, part) for part in parts)
        return jax.tree.map(jnp.add, first, second)

    def logprobs(params, tokens, *base):
        return toy.logprobs(_joined(params, base), tokens)

    def never(*_):
        raise AssertionError("logprob_fn was called")

    optimizer, experience = optax.sgd(0.5), toy.experience(16, 9)
    base = (jax.tree.map(jnp.ones_like, toy.params()[0]),) if frozen else ()
    results = [
        make_actor_step(logprob_fn, optimizer, CONFIG, sums_fn=sums_fn)(
            TrainState.create(toy.params()[0], optimizer), experience, *base
        )
        for logprob_fn, sums_fn in ((logprobs, None), (never, sums))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    assert results[0][1]["actor/skipped_updates"] == 0


def _joined(params, base):
    return jax.tree.map(jnp.add, params, *base) if base else params
