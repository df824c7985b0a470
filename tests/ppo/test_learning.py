"""PPO reaches optima that are known in closed form, on a plain-JAX table of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import PPOConfig, PPOState, Rollout, TrainState, make_experience, make_ppo_step

CONTEXTS, ACTIONS, ROWS = 3, 6, 512
REWARDS, REFERENCE = jnp.asarray(np.random.default_rng(0).uniform(size=(2, CONTEXTS, ACTIONS)), jnp.float32)


def logprob_fn(params, tokens):
    """The prompt is one token, the context; a response of one token, the action."""
    logp = jax.nn.log_softmax(params)[tokens[:, 0]]
    chosen = jnp.take_along_axis(logp, tokens[:, 1:], axis=1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, 1, keepdims=True)
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


def value_fn(params, tokens):
    return jnp.pad(params[tokens[:, :1]], ((0, 0), (1, 0)))


def trainer(config):
    """`run(kl_coef)` trains from the reference and returns the last state and metrics; it compiles once."""
    optimizer = optax.adam(optax.cosine_decay_schedule(0.08, 120 * config.minibatches))
    step = make_ppo_step(logprob_fn, value_fn, optimizer, optimizer, config)

    @jax.jit
    def sample(state, key):
        context = jnp.arange(ROWS, dtype=jnp.int32) % CONTEXTS
        action = jax.random.categorical(key, state.actor.params[context]).astype(jnp.int32)
        tokens = jnp.stack([context, action], axis=1)
        old, _ = logprob_fn(state.actor.params, tokens)
        ones, finished = jnp.ones(ROWS, jnp.int32), jnp.ones(ROWS, bool)
        rollout = Rollout(tokens, ones, ones, old, finished, state.actor.step)
        ref, _ = logprob_fn(REFERENCE, tokens)
        values = value_fn(state.critic.params, tokens)
        scores = REWARDS[context, action]
        return make_experience(rollout, scores, old, ref, values, config=config, kl_coef=state.kl.coef)

    def run(kl_coef):
        actor = TrainState.create(jnp.copy(REFERENCE), optimizer)
        state = PPOState.create(actor, TrainState.create(jnp.zeros(CONTEXTS), optimizer), kl_coef=kl_coef)
        for iteration in range(120):
            state, metrics = step(state, sample(state, jax.random.key(iteration)))
        return state, metrics

    return run


@pytest.fixture(scope="module")
def run():
    return trainer(PPOConfig(minibatches=4, gae_lambda=1.0, truncation="zero"))


def test_without_a_penalty_the_reward_reaches_its_maximum(run):
    state, _ = run(kl_coef=0.0)
    start, end = (np.mean(np.sum(jax.nn.softmax(x) * REWARDS, 1)) for x in (REFERENCE, state.actor.params))
    optimum = np.mean(np.max(REWARDS, 1))
    assert end > start + 0.95 * (optimum - start)


def test_with_a_penalty_it_reaches_the_tilted_reference_and_the_critic_its_value(run):
    """E[r] - beta KL(pi, ref) is maximal at pi ~ ref exp(r / beta), where it is beta log E_ref[exp(r / beta)]."""
    beta = 0.3
    state, metrics = run(kl_coef=beta)
    reference = jax.nn.log_softmax(REFERENCE)
    tilted = reference + REWARDS / beta
    optimum, value = jax.nn.softmax(tilted), beta * jax.nn.logsumexp(tilted, 1)

    def distance(policy):  # total variation
        return np.max(np.sum(np.abs(policy - optimum), 1)) / 2

    assert distance(jax.nn.softmax(state.actor.params)) < 0.1 * distance(jnp.exp(reference))
    np.testing.assert_allclose(state.critic.params, value, atol=0.02)
    kl = np.mean(np.sum(optimum * (jnp.log(optimum) - reference), 1))
    np.testing.assert_allclose(metrics["objective/kl"], kl, rtol=0.15)


def test_the_adaptive_controller_holds_its_target():
    run = trainer(PPOConfig(minibatches=4, kl_target=0.2, kl_horizon=1000, truncation="zero"))
    state, _ = run(kl_coef=0.05)
    policy = jax.nn.log_softmax(state.actor.params)
    kl = np.mean(np.sum(jnp.exp(policy) * (policy - jax.nn.log_softmax(REFERENCE)), 1))
    np.testing.assert_allclose(kl, 0.2, rtol=0.25)
