"""The mean gradient of each estimator, by enumeration: that of the objective, or with exactly the known bias.

Nothing is sampled. Two ways to an exact mean: every possible group, its gradient weighed by its probability, for
estimators whose groups are independent; and a batch that holds every response as often as the policy would draw it,
for those that take their statistics from the whole batch. A gradient is one step of gradient descent at rate 1 by
the public functions.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import (
    DrGRPOConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
    SafeRLHFConfig,
    TrainState,
    make_actor_step,
    make_experience,
    make_safe_experience,
)
from tests.support.enumeration import Estimator, Problem, numerical_gradient, objective
from tests.support.tabular import Tables, compiled

BETA = 0.3
slow = pytest.mark.full
TOKENS = Problem.random(prompts=1, vocab=3, limit=1, ends=False, seed=8)
TREES = Problem.random(prompts=1, vocab=2, limit=2, ends=True, seed=8)  # 3 responses, of one token and of two
PAIRS = Problem.random(prompts=1, vocab=3, limit=2, ends=False, seed=9)  # 9 responses, all of two tokens


def logits_of(problem, seed=0):
    return np.random.default_rng(seed).normal(size=problem.reference.shape)


def true_gradient(problem, logits, beta=BETA):
    return numerical_gradient(lambda x: objective(problem, x, beta), logits)


def rollout_of(tables, params, prompt, responses):
    """Rows of these responses [B], indices, to one prompt."""
    problem = tables.problem
    tokens = jnp.pad(jnp.asarray(problem.responses, jnp.int32)[responses], ((0, 0), (1, 0)), constant_values=prompt)
    lengths = jnp.asarray(problem.lengths, jnp.int32)[responses]
    return tables.rollout(params, tokens, lengths, jnp.ones_like(lengths, jnp.bool_))


def ascent(tables, config, params, experience):
    """Minus the gradient of the actor's loss."""
    optimizer = optax.sgd(1.0)
    start = TrainState.create(jnp.copy(params), optimizer)  # a step may take its state's memory
    state, _ = make_actor_step(tables.logprobs, optimizer, config)(start, experience)
    return state.params - params


def expected(problem, config, logits):
    """The mean over all batches of one group (or of one response), of their gradients."""
    tables, params = Tables(problem), jnp.asarray(logits, jnp.float32)
    samples = config.samples if isinstance(config, GRPOConfig) else 1
    groups = np.array(list(product(range(len(problem.responses)), repeat=samples)))

    @compiled
    @jax.vmap
    def gradients(responses):
        rollout = rollout_of(tables, params, 0, responses)
        return ascent(tables, config, params, tables.experience(params, rollout, config))

    probabilities = problem.probabilities(logits)[0, groups].prod(1)
    assert np.isclose(probabilities.sum(), 1)
    return np.einsum("g,gckv->ckv", probabilities, np.asarray(gradients(jnp.asarray(groups)), np.float64))


def close(actual, wanted):
    assert np.max(np.abs(wanted)) > 0.01, "a gradient to speak of"
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=3e-6)


def test_the_oracles_gradient_is_the_objectives():
    for problem in (TOKENS, TREES, PAIRS):
        logits = logits_of(problem)
        exact = Estimator(BETA, "reward").gradient(problem, logits)
        np.testing.assert_allclose(exact, true_gradient(problem, logits), atol=1e-8)


LEAVE_ONE_OUT: dict[str, Any] = dict(kl_coef=BETA, baseline="leave-one-out", divide_by_std=False)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        pytest.param(TREES, RLOOConfig(kl_coef=BETA, samples=3), id="rloo"),
        pytest.param(TREES, ReMaxConfig(kl_coef=BETA), id="remax", marks=slow),
        pytest.param(TOKENS, DrGRPOConfig(**LEAVE_ONE_OUT, samples=3, aggregation_divisor=1), id="k2"),
    ],
)
def test_unbiased(problem, config):
    """The KL in the reward, of whole responses; in the loss with k2's gradient, of single tokens."""
    logits = logits_of(problem)
    close(expected(problem, config, logits), true_gradient(problem, logits))


@slow
def test_a_groups_mean_as_baseline_weakens_what_is_in_the_advantage():
    """The factor is (n - 1) / n, for a response's own share in its baseline. It does not weaken a KL in the loss."""
    logits = logits_of(TREES)
    config = RLOOConfig(kl_coef=BETA, samples=2, baseline="mean")
    close(expected(TREES, config, logits), 1 / 2 * true_gradient(TREES, logits))
    logits = logits_of(TOKENS)
    config = DrGRPOConfig(kl_coef=BETA, samples=3, aggregation_divisor=1)
    rewards, everything = true_gradient(TOKENS, logits, 0.0), true_gradient(TOKENS, logits)
    close(expected(TOKENS, config, logits), 2 / 3 * rewards + (everything - rewards))


@slow
def test_k2_in_the_loss_omits_what_a_token_does_to_the_kl_of_later_ones():
    """The bias of several tokens is -beta E[sum over t < u of d_u grad log pi_t], d_u = log pi / ref of token u.

    Of u < t the mean is zero, of u = t it is k2's gradient; without the rest of E[sum d grad sum log pi] the gradient
    is not that of the KL. A constant divisor divides rewards and penalty alike.
    """
    logits = logits_of(PAIRS, seed=2)
    d, slopes = PAIRS.logprobs(logits) - PAIRS.logprobs(PAIRS.reference), PAIRS.slopes(logits)
    omitted = np.einsum("cs,cs,cskv->ckv", PAIRS.probabilities(logits), d[..., 1], slopes[..., 0, :, :])
    assert np.max(np.abs(BETA * omitted)) > 0.1
    config = DrGRPOConfig(**LEAVE_ONE_OUT, samples=2, aggregation_divisor=5)
    close(5 * expected(PAIRS, config, logits), true_gradient(PAIRS, logits) + BETA * omitted)


@slow
def test_k3_in_the_loss_has_the_gradient_of_the_other_kl():
    """The gradient is that of KL(ref, pi), for a single token; no response of this problem reaches the bound on k3."""
    logits, p = logits_of(TOKENS), TOKENS.probabilities(TOKENS.reference)
    assert np.min(TOKENS.logprobs(logits) - TOKENS.logprobs(TOKENS.reference)) > -2.5

    def reverse(x):
        return float(np.sum(p * (np.log(p) - np.log(TOKENS.probabilities(x)))))

    config = DrGRPOConfig(**LEAVE_ONE_OUT, kl_estimator="k3", samples=2, aggregation_divisor=1)
    wanted = true_gradient(TOKENS, logits, 0.0) - BETA * numerical_gradient(reverse, logits)
    close(expected(TOKENS, config, logits), wanted)


@slow
def test_division_by_deviation_and_length_is_biased_as_the_formula_says():
    problem, config, logits = TREES, GRPOConfig(kl_coef=BETA, samples=3), logits_of(TREES)
    estimator = Estimator(BETA, "k3", config.samples, divide_by_std=True, weights="length")
    wanted = estimator.gradient(problem, logits)
    close(expected(problem, config, logits), wanted)
    truth = true_gradient(problem, logits)
    along = truth * np.sum(truth * wanted) / np.sum(truth**2)
    assert np.max(np.abs(wanted - along)) > 0.01, "not even its direction"


# A batch of 64 rows that holds every response as often as the policy draws it.
COUNTS = np.array([20, 5, 9, 2, 8, 3, 4, 12, 1])


def population():
    logits = PAIRS.logits(COUNTS[None] / 64)
    params = jnp.asarray(logits, jnp.float32)
    tables = Tables(PAIRS)
    return (
        logits,
        params,
        tables,
        compiled(partial(rollout_of, tables, prompt=0, responses=np.repeat(np.arange(9), COUNTS)))(params),
    )


def returns_of(logits, rewards, beta):
    """[S, 2]: of each response, what is left of its reward and its penalty from each token on."""
    d = (PAIRS.logprobs(logits) - PAIRS.logprobs(PAIRS.reference))[0]
    return rewards[0, :, None] - beta * np.cumsum(d[:, ::-1], 1)[:, ::-1]


def test_reinforce_pp_over_the_whole_population_is_the_gradient_over_the_deviation():
    """Whitening is one positive factor and a shift, and the shift a baseline. The mean is over 2 tokens a response."""
    logits, params, tables, rollout = population()
    config = ReinforcePPConfig(kl_coef=BETA)
    gradient = compiled(lambda x: ascent(tables, config, x, tables.experience(x, rollout, config)))(params)
    scale = np.sqrt(np.repeat(returns_of(logits, PAIRS.rewards, BETA), COUNTS, axis=0).var(ddof=1) + 1e-8) * 2
    close(gradient, true_gradient(PAIRS, logits) / scale)


@slow
def test_reinforce_pp_baseline_whitens_the_rewards_but_not_the_penalty():
    logits, params, tables, rollout = population()
    config = ReinforcePPBaselineConfig(kl_coef=BETA, samples=64)  # one group of all
    gradient = compiled(lambda x: ascent(tables, config, x, tables.experience(x, rollout, config)))(params)
    deviation = np.sqrt(np.repeat(PAIRS.rewards[0], 2 * COUNTS).var(ddof=1) + 1e-8)
    rewards = Estimator(0.0, "reward").gradient(PAIRS, logits)
    everything = Estimator(BETA, "k2").gradient(PAIRS, logits)
    close(gradient, (rewards / deviation + everything - rewards) / 2)


def values_of(logits, rewards, beta):
    """[K]: the true value of each node: the mean of what is left from there on."""
    p, left = PAIRS.probabilities(logits)[0], returns_of(logits, rewards, beta)
    values = np.zeros(PAIRS.nodes)
    for node in range(PAIRS.nodes):
        here = PAIRS.at == node
        values[node] = (p[:, None] * left)[here].sum() / np.broadcast_to(p[:, None], here.shape)[here].sum()
    return values


@pytest.mark.full
def test_ppo_is_unbiased_with_any_critic_at_lambda_1_and_with_the_true_one_at_any():
    logits, params, tables, rollout = population()
    exact = values_of(logits, PAIRS.rewards, BETA)
    wrong = np.random.default_rng(1).normal(size=exact.shape)

    def gradients(values):
        results = []
        for gae_lambda in (1.0, 0.5):
            options: Any = {"gae_lambda": gae_lambda, "truncation": "zero", "whiten_advantages": False}
            config = PPOConfig(kl_coef=BETA, **options)
            experience = make_experience(
                rollout,
                tables.lookup(PAIRS.rewards, rollout.tokens),
                rollout.logprobs,
                tables.logprobs(tables.reference, rollout.tokens)[0],
                tables.values(values, rollout.tokens),
                config=config,
                kl_coef=BETA,
            )
            results.append(ascent(tables, config, params, experience))
        return results

    critics = jnp.asarray(np.stack([exact, wrong])[:, None], jnp.float32)
    (monte_carlo, wrong_monte_carlo), (bootstrapped, wrong_bootstrapped) = compiled(jax.vmap(gradients))(critics)
    truth = true_gradient(PAIRS, logits) / 2  # a mean over two tokens a response
    for gradient in (monte_carlo, wrong_monte_carlo, bootstrapped):
        close(gradient, truth)
    assert np.max(np.abs(wrong_bootstrapped - truth)) > 0.05


@slow
def test_safe_rlhf_ascends_the_lagrangian_with_a_penalty_of_the_same_weight():
    """E[(r - lambda c) / (1 + lambda)] - beta KL for any lambda."""
    logits, params, tables, rollout = population()
    config = SafeRLHFConfig(kl_coef=BETA, truncation="zero", whiten_advantages=False)
    reward_values = jnp.asarray(values_of(logits, PAIRS.rewards, BETA)[None], jnp.float32)
    cost_values = jnp.asarray(values_of(logits, PAIRS.costs, -BETA)[None], jnp.float32)

    @compiled
    @jax.vmap
    def gradients(multiplier):
        experience, _ = make_safe_experience(
            rollout,
            tables.lookup(PAIRS.rewards, rollout.tokens),
            tables.lookup(PAIRS.costs, rollout.tokens),
            rollout.logprobs,
            tables.logprobs(tables.reference, rollout.tokens)[0],
            tables.values(reward_values, rollout.tokens),
            tables.values(cost_values, rollout.tokens),
            config=config,
            kl_coef=BETA,
            multiplier=multiplier,
        )
        return ascent(tables, config, params, experience)

    multipliers = np.array([0.2, 1.5, 5.0])
    for multiplier, gradient in zip(multipliers, gradients(jnp.asarray(multipliers, jnp.float32)), strict=True):
        combined = (PAIRS.rewards - multiplier * PAIRS.costs) / (1 + multiplier)
        close(gradient, true_gradient(replace(PAIRS, rewards=combined), logits) / 2)
