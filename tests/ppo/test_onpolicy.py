"""One update a batch, with shared passes, against the same in separate calls."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import (
    PPOConfig,
    Rollout,
    TrainState,
    make_actor_step,
    make_critic_step,
    make_experience,
    make_on_policy_step,
)

OPTIMIZER = optax.adamw(1e-2)
KL_COEF = 0.07


def every_value(toy):
    def values(params, tokens):
        following = jax.nn.one_hot(tokens, toy.vocab) @ params["values"]  # the value after each token
        return jnp.pad(following, ((0, 0), (1, 0))).at[:, 0].set(toy.values(params, tokens)[:, 0])

    return values


@pytest.fixture
def batch(toy):
    experience = toy.experience()
    names = ("tokens", "prompt_lengths", "response_lengths", "logprobs", "finished", "version")
    return Rollout(**{name: getattr(experience, name) for name in names}), experience.scores, experience.ref_logprobs


def states(toy):
    actor, critic = toy.params()
    return TrainState.create(actor, OPTIMIZER), TrainState.create(critic, OPTIMIZER)


def separately(toy, config, rollout, scores, ref):
    actor, critic = states(toy)
    values = every_value(toy)(critic.params, rollout.tokens)
    experience = make_experience(
        rollout,
        scores,
        toy.logprobs(actor.params, rollout.tokens)[0],
        ref,
        values[:, :-1],
        config=config,
        kl_coef=KL_COEF,
        bootstrap_values=jnp.take_along_axis(values, rollout.lengths[:, None], axis=1)[:, 0],
    )
    actor, actor_metrics = make_actor_step(toy.logprobs, OPTIMIZER, config)(actor, experience)
    before = lambda params, tokens: every_value(toy)(params, tokens)[:, :-1]  # noqa: E731
    critic, critic_metrics = make_critic_step(before, OPTIMIZER, config)(critic, experience)
    return actor, critic, experience, actor_metrics | critic_metrics


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(),
        PPOConfig(truncation="mask", entropy_coef=0.1, kl_estimator="k2", value_clip=None, target_kl=0.1),
    ],
    ids=["defaults", "options"],
)
def test_shared_passes_give_what_separate_calls_give(toy, batch, config):
    step = make_on_policy_step(toy.logprobs, every_value(toy), OPTIMIZER, OPTIMIZER, config)
    found = step(*states(toy), *batch, KL_COEF)
    expected = separately(toy, config, *batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)
    assert float(found[3]["actor/ratio"]) == 1.0
    assert float(found[3]["actor/grad_norm"]) > 0 and float(found[3]["critic/grad_norm"]) > 0


def test_each_model_is_run_once(toy, batch):
    calls = {"actor": 0, "critic": 0}

    def counted(name, function):
        def run(params, tokens):
            jax.debug.callback(lambda: calls.__setitem__(name, calls[name] + 1))
            return function(params, tokens)

        return run

    models = counted("actor", toy.logprobs), counted("critic", every_value(toy))
    jax.block_until_ready(
        make_on_policy_step(*models, OPTIMIZER, OPTIMIZER, PPOConfig())(*states(toy), *batch, KL_COEF)
    )
    jax.effects_barrier()
    assert calls == {"actor": 1, "critic": 1}


def test_a_bad_score_never_reaches_the_weights(toy, batch):
    rollout, scores, ref = batch
    step = make_on_policy_step(toy.logprobs, every_value(toy), OPTIMIZER, OPTIMIZER, PPOConfig())
    actor, critic, _, metrics = step(*states(toy), rollout, scores.at[2].set(jnp.nan), ref, KL_COEF)
    for state, fresh in zip((actor, critic), states(toy), strict=True):
        jax.tree.map(np.testing.assert_array_equal, state.params, fresh.params)
    assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 1


@pytest.mark.parametrize(
    "change", [{"epochs": 2}, {"minibatches": 2}, {"micro_batches": 2}, {"micro_batch_tokens": 64}]
)
def test_several_updates_or_parts_are_refused(toy, change):
    with pytest.raises(ValueError, match="a single update on a whole batch needs 1, 1, 1 and null"):
        make_on_policy_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, replace(PPOConfig(), **change))
