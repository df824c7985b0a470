"""The update of any optimizer: that of plain optax in place, or none, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import SFTBatch, TrainState, make_sft_step
from jrlhf.ppo.updates import Minibatch, Objective, apply_update

HUGE = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e25], np.float32)
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, 9))),
    "injected": optax.inject_hyperparams(optax.lion)(learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "in steps": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=2).gradient_transformation(),
    "parts": optax.partition({"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
}


def weights():
    return {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.full(3, -0.0)}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optimizer, marks=pytest.mark.full if name in ("adafactor", "parts") else (), id=name)
        for name, optimizer in OPTIMIZERS.items()
    ],
)
def test_an_update_is_plain_optax_or_nothing(optimizer):
    """A sequence of updates, at random one with a number in loss, gradient or rate that float32 cannot bear."""

    def loss(params, gradient):
        return sum(jax.tree.leaves(jax.tree.map(lambda p, g: jnp.sum(p * g), params, gradient)), jnp.zeros(())), {}

    @jax.jit
    def ours(params, state, gradient):
        update = apply_update(Objective(loss, optimizer, ()), params, state, Minibatch(gradient, 1))
        return update.params, update.opt_state, update.finite

    @jax.jit
    def plain(params, state, gradient):
        updates, state = optimizer.update(jax.grad(lambda p: loss(p, gradient)[0])(params), state, params)
        return optax.apply_updates(params, updates), state

    rng, params, skipped = np.random.default_rng(0), weights(), 0
    state = jax.jit(optimizer.init)(params)
    for _ in range(20):
        gradient = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        if bad := rng.random() < 0.5:
            gradient["w"][rng.integers(4), rng.integers(3)] = rng.choice(HUGE)
        before, expected = (params, state), plain(params, state, gradient)
        params, state, finite = ours(params, state, gradient)
        assert finite == (not bad)
        skipped += bad
        for actual, wanted in zip(*map(jax.tree.leaves, ((params, state), before if bad else expected)), strict=True):
            if bad or optimizer is OPTIMIZERS["adamw"]:
                assert np.array(actual).tobytes() == np.array(wanted).tobytes()
            else:  # XLA may round the others' operations another way in another program
                np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-8)
    assert 0 < skipped < 20


def test_an_update_that_would_make_the_squares_of_weights_infinite_is_not_applied(toy):
    tokens, optimizer = jnp.zeros((4, 7), jnp.int32), optax.sgd(1e25)
    state, metrics = make_sft_step(toy.logprobs, optimizer)(
        TrainState.create(toy.params()[0], optimizer), SFTBatch(tokens, jnp.ones_like(tokens, bool))
    )
    np.testing.assert_array_equal(state.params["logits"], toy.params()[0]["logits"])
    assert metrics["sft/skipped_updates"] == metrics["sft/nonfinite_updates"] == 1


def test_an_update_needs_no_copy_of_weights_or_optimizer_state():
    """Memory beside the state: the gradients, and once more as much for the change that is applied."""
    # Of equal shapes, XLA also shares what it stores.
    optimizer, params = OPTIMIZERS["adamw"], dict.fromkeys("ab", jax.ShapeDtypeStruct((512, 256), jnp.float32))

    def step(params, state):
        def loss(p, x):
            return sum((jnp.sum(jnp.square(w) * x) for w in p.values()), jnp.zeros(())), {}

        rows = jnp.ones((512, 1))
        update = apply_update(Objective(loss, optimizer, ()), params, state, Minibatch(rows, 1))
        return update.params, update.opt_state

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(optimizer.init, params))
    memory = lowered.compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= 2.1 * 2 * 512 * 256 * 4
    assert "stablehlo.case" not in lowered.as_text()  # a conditional, whose results a GPU copies
