"""Frozen weights that a step's functions read, such as the base under an adapter.

The toy's tables are split into frozen ones and trained differences from them. Gradient descent on a difference is
gradient descent on the table, so every step has to end where the step that trains the tables does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import (
    PPOConfig,
    PPOState,
    PreferenceBatch,
    SFTBatch,
    TrainState,
    make_actor_step,
    make_ppo_step,
    make_preference_step,
    make_sft_step,
)

OPTIMIZER = optax.sgd(0.5)
CONFIG = PPOConfig(epochs=2, minibatches=2, micro_batches=2, entropy_coef=0.05)


def on(frozen_fn):
    """`frozen_fn` of the sum of trained differences and frozen tables: the frozen tables come last."""

    def function(params, *arguments):
        *batch, frozen = arguments
        return frozen_fn({name: frozen[name] + difference for name, difference in params.items()}, *batch)

    return function


def cases(toy):
    """name -> (the step over tables, the step over differences, its batch)."""
    experience = toy.experience()
    tokens, lengths = experience.tokens, experience.prompt_lengths + experience.response_lengths
    sft = SFTBatch(tokens, experience.response_mask)
    pairs = PreferenceBatch(tokens[::2], lengths[::2], tokens[1::2], lengths[1::2])

    def both(make, function, *arguments, **keywords):
        return tuple(make(f, OPTIMIZER, *arguments, **keywords) for f in (function, on(function)))

    def sums(params, tokens, data, terms, *frozen):
        """Tokens flat, in halves, t = 0 left out."""
        outputs = on(toy.logprobs)(params, tokens, *frozen)
        flat = [jax.tree.map(lambda x: x[:, 1:].reshape(-1), x) for x in (*outputs, data)]
        half = flat[0].shape[0] // 2
        parts = [terms(*jax.tree.map(lambda x, part=part: x[part], flat)) for part in (slice(half), slice(half, None))]
        return jax.tree.map(jnp.add, *(jax.tree.map(jnp.sum, part) for part in parts))

    def never(*_):
        raise AssertionError("logprob_fn was called")

    plain = make_actor_step(toy.logprobs, OPTIMIZER, CONFIG)
    return {
        "sums": (plain, make_actor_step(never, OPTIMIZER, CONFIG, sums_fn=sums), experience),
        "sft": (*both(make_sft_step, toy.logprobs, micro_batches=2), sft),
        "preferences": (*both(make_preference_step, toy.scores, micro_batches=2), pairs),
    }


@pytest.mark.full
@pytest.mark.parametrize("name", ["sums", "sft", "preferences"])
def test_differences_train_as_the_tables_do(toy, name):
    plain, split, batch = cases(toy)[name]
    tables = toy.params()[1 if name == "preferences" else 0]
    frozen, before = jax.tree.map(jnp.copy, tables), jax.device_get(tables)
    pointers = jax.tree.map(lambda x: x.unsafe_buffer_pointer(), frozen)
    differences = jax.tree.map(jnp.zeros_like, tables)

    expected, expected_metrics = plain(TrainState.create(tables, OPTIMIZER), batch)
    state, metrics = split(TrainState.create(differences, OPTIMIZER), batch, frozen)
    for table, value in before.items():
        moved = np.asarray(expected.params[table]) - value
        assert np.abs(moved).max() > 1e-2
        np.testing.assert_allclose(state.params[table], moved, rtol=1e-4, atol=1e-5)
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)

    # The state is gone, the frozen tables are where they were and what they were.
    assert all(x.is_deleted() for x in jax.tree.leaves(differences))
    assert jax.tree.map(lambda x: x.unsafe_buffer_pointer(), frozen) == pointers
    jax.tree.map(np.testing.assert_array_equal, frozen, before)


@pytest.mark.full
def test_actor_and_critic_share_what_is_frozen(toy):
    """One tree under both."""
    frozen = toy.params()[0] | toy.params()[1]

    def after(models, params, *frozen) -> dict[str, Any]:
        actor, critic = (TrainState.create(x, OPTIMIZER) for x in params)
        step = make_ppo_step(models[0], models[1], OPTIMIZER, OPTIMIZER, CONFIG)
        state, _ = step(PPOState.create(actor, critic, kl_coef=CONFIG.kl_coef), toy.experience(), *frozen)
        return {**state.actor.params, **state.critic.params}

    tables = after((toy.logprobs, toy.values), toy.params())
    differences = after((on(toy.logprobs), on(toy.values)), jax.tree.map(jnp.zeros_like, toy.params()), frozen)
    for name, table in tables.items():
        moved = np.asarray(table - frozen[name])
        assert np.abs(moved).max() > 1e-2
        np.testing.assert_allclose(differences[name], moved, rtol=1e-4, atol=1e-5)


def test_a_step_makes_no_copy_of_what_is_frozen(toy):
    """The loops over updates and micro-batches carry it along in place."""
    big = {"logits": jax.ShapeDtypeStruct((1000, toy.vocab, toy.vocab), jnp.float32)}

    def logprobs(params, tokens, frozen):
        return toy.logprobs({"logits": params["logits"] + frozen["logits"][tokens[0, 0]]}, tokens)

    state = jax.eval_shape(lambda: TrainState.create(toy.params()[0], OPTIMIZER))
    step = jax.jit(make_actor_step(logprobs, OPTIMIZER, CONFIG), donate_argnums=0)
    memory: Any = step.lower(state, toy.experience(), big).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < big["logits"].size * 4 / 2
