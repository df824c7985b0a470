"""One update a batch, with shared passes, against the same in separate calls."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import (
    GRPOConfig,
    PPOConfig,
    Rollout,
    TrainState,
    make_actor_step,
    make_critic_step,
    make_experience,
    make_group_experience,
    make_on_policy_actor_step,
    make_on_policy_step,
)

OPTIMIZER = optax.adamw(1e-2)
KL_COEF = 0.07


def every_value(toy):
    def values(params, tokens):
        following = jax.nn.one_hot(tokens, toy.vocab) @ params["values"]  # the value after each token
        return jnp.pad(following, ((0, 0), (1, 0))).at[:, 0].set(toy.values(params, tokens)[:, 0])

    return values


def at_responses(logprobs, *, entropy_derivative=True):
    """A model's log-probabilities and entropies, and NaN before each row's response, which must not be read.

    Without a derivative of the entropy, that of its square root is NaN and must not be computed.
    """

    def read(params, tokens, starts):
        inside = jnp.arange(tokens.shape[1])[None, :] >= starts[:, None]
        scored, entropy = logprobs(params, tokens)
        entropy = entropy if entropy_derivative else entropy + jnp.sqrt(0 * entropy)
        return jnp.where(inside, scored, jnp.nan), jnp.where(inside, entropy, jnp.nan)

    return read


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
    experience = jax.jit(partial(make_experience, config=config))(
        rollout,
        scores,
        toy.logprobs(actor.params, rollout.tokens)[0],
        ref,
        values[:, :-1],
        kl_coef=KL_COEF,
        bootstrap_values=jnp.take_along_axis(values, rollout.lengths[:, None], axis=1)[:, 0],
    )
    actor, actor_metrics = make_actor_step(toy.logprobs, OPTIMIZER, config)(actor, experience)
    before = lambda params, tokens: every_value(toy)(params, tokens)[:, :-1]  # noqa: E731
    critic, critic_metrics = make_critic_step(before, OPTIMIZER, config)(critic, experience)
    return actor, critic, experience, actor_metrics | critic_metrics


OPTIONS = PPOConfig(
    truncation="mask",
    entropy_coef=0.1,
    value_clip=None,
    target_kl=0.1,
    importance="token",
    kl_in="loss",
    kl_estimator="k3",
    aggregation="seq-mean-token-mean",
)
ROLLOUT = PPOConfig(kl_coef=0.0, old_logprobs="rollout")


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(truncation="bootstrap"),
        pytest.param(OPTIONS, marks=pytest.mark.full),
        pytest.param(ROLLOUT, marks=pytest.mark.full),
    ],
    ids=["defaults", "options", "rollout without a reference"],
)
def test_shared_passes_give_what_separate_calls_give(toy, batch, config):
    """In one run of each model."""
    calls = {"actor": 0, "critic": 0}

    def counted(name, function):
        def run(params, tokens):
            jax.debug.callback(lambda: calls.__setitem__(name, calls[name] + 1))
            return function(params, tokens)

        return run

    actor = at_responses(counted("actor", toy.logprobs), entropy_derivative=config.entropy_coef != 0)
    step: Any = make_on_policy_step(actor, counted("critic", every_value(toy)), OPTIMIZER, OPTIMIZER, config)
    if not config.needs_reference:
        batch = (*batch[:2], None)
    actual = jax.block_until_ready(step(*states(toy), *batch, KL_COEF))
    jax.effects_barrier()
    assert calls == {"actor": 1, "critic": 1}
    expected = separately(toy, config, *batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), actual, expected)
    assert (float(actual[3]["actor/ratio"]) == 1.0) == (config.old_logprobs == "recompute")
    assert float(actual[3]["actor/grad_norm"]) > 0 and float(actual[3]["critic/grad_norm"]) > 0


def test_the_value_after_the_last_token_is_found_among_the_values_of_replicated_arrays(toy, batch):
    """On a mesh with Explicit axes, where only the tokens are divided over the devices."""
    rollout, scores, ref = batch
    config, values = PPOConfig(truncation="bootstrap"), every_value(toy)(toy.params()[1], rollout.tokens)
    expected = separately(toy, config, rollout, scores, ref)[2]
    old = toy.logprobs(toy.params()[0], rollout.tokens)[0]
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        everywhere = jax.device_put((rollout, scores, old, ref, values), NamedSharding(mesh, P()))
        rollout, *others = everywhere
        rollout = replace(rollout, tokens=jax.device_put(rollout.tokens, NamedSharding(mesh, P("fsdp"))))
        actual = make_experience(rollout, *others, config=config, kl_coef=KL_COEF)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), actual, expected)
    assert not np.all(np.asarray(rollout.finished))


def test_several_updates_parts_and_texts_are_refused(toy):
    single, texts = "a single update on a whole batch needs 1, 1, 1 and null", "ptx_coef=0.5"
    refused: list[dict[str, Any]] = [{"epochs": 2}, {"minibatches": 2}, {"micro_batches": 2}]
    refused += [{"micro_batch_tokens": 64}, {"ptx_coef": 0.5}]
    models = at_responses(toy.logprobs), toy.values
    for change in refused:
        message = texts if "ptx_coef" in change else single
        with pytest.raises(ValueError, match=message):
            make_on_policy_step(*models, OPTIMIZER, OPTIMIZER, PPOConfig(**change))
        with pytest.raises(ValueError, match=message):
            make_on_policy_actor_step(models[0], OPTIMIZER, GRPOConfig(**change), make_group_experience)


def test_without_a_critic(toy, batch):
    rollout, scores, ref = batch
    config, (actor, _), (alone, _) = GRPOConfig(samples=2), states(toy), states(toy)
    model = at_responses(toy.logprobs, entropy_derivative=False)
    step: Any = make_on_policy_actor_step(model, OPTIMIZER, config, make_group_experience)
    actual = step(actor, *batch, KL_COEF)
    old, _ = toy.logprobs(alone.params, rollout.tokens)
    make = jax.jit(partial(make_group_experience, config=config, kl_coef=KL_COEF))
    experience = make(rollout, scores, old, ref)
    alone, metrics = make_actor_step(toy.logprobs, OPTIMIZER, config)(alone, experience)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, (alone, experience, metrics)
    )
    assert float(metrics["actor/grad_norm"]) > 0
