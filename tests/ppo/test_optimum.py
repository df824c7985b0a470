"""Algorithms, trained on their own samples through the public functions, reach the optimum that theory predicts.

The oracle is `enumeration`: NumPy, all responses at once. Two problems: single tokens, and trees of up to three tokens
that an end token may cut short. Policies are tables, so a policy can be every distribution over the responses.
"""

import numpy as np
import pytest

from jrlhf.ppo import DPOConfig, GRPOConfig, PPOConfig, RLOOConfig, SafeRLHFConfig
from tests.support.enumeration import Estimator, Problem, total_variation
from tests.support.tabular import train

TOKENS = Problem.random(prompts=3, vocab=5, limit=1, ends=False, seed=1)
TREES = Problem.random(prompts=2, vocab=3, limit=3, ends=True, seed=3)
ROWS = {id(TOKENS): 1536, id(TREES): 2048}  # every prompt's share is the same
BETA = 0.5
slow = pytest.mark.full


def trained(problem, config, iterations=200):
    return train(problem, config, rows=ROWS[id(problem)], iterations=iterations)


@slow
def test_with_the_kl_in_the_reward_the_tilted_reference_is_reached():
    """E[r] - beta KL(pi, ref) is maximal at pi* ~ ref exp(r / beta).

    At pi* itself r - beta log pi / ref is the same for all responses, so there is no noise there, and no more than 0.01
    is left.
    """
    optimum = TREES.optimum(BETA)
    assert total_variation(TREES.probabilities(TREES.reference), optimum) > 0.25
    assert total_variation(trained(TREES, RLOOConfig(kl_coef=BETA)).policy, optimum) < 0.01


def test_the_oracles_fixed_points_have_closed_forms_where_nothing_is_divided_by_a_deviation():
    """The fixed points for single tokens, where m = (n - 1) / n for the group's mean as baseline and 1 for the others':

    k2: pi ~ ref exp(m r / beta). k3, whose mean gradient is that of KL(ref, pi): m (r - E[r]) pi = beta (pi - ref), so
    pi = beta ref / (beta - m r + m E[r]), with the E[r] at which it sums to 1.
    """
    optimum = TOKENS.optimum(BETA)
    others = Estimator(BETA, "k2", 8, "leave-one-out").fixed_point(TOKENS)
    np.testing.assert_allclose(others, optimum, atol=1e-8)
    weaker = TOKENS.optimum(BETA, 7 / 8 * TOKENS.rewards)
    np.testing.assert_allclose(Estimator(BETA, "k2", 8).fixed_point(TOKENS), weaker, atol=1e-8)
    other = Estimator(BETA, "k3", 8).fixed_point(TOKENS)
    mean = (other * TOKENS.rewards).sum(1, keepdims=True)
    reference = TOKENS.probabilities(TOKENS.reference)
    np.testing.assert_allclose(other, BETA * reference / (BETA - 7 / 8 * (TOKENS.rewards - mean)), atol=1e-8)


@slow
def test_grpo_reaches_another_fixed_point():
    """The fixed point is known by enumeration of all groups, and 0.443 in total variation from the optimum.

    Divided by the group's deviation, rewards weigh more against the same penalty. k3's mean gradient is that of
    KL(ref, pi). The gradients of the other estimators are enumerated in `test_unbiased.py`.
    """
    fixed, optimum = Estimator(BETA, "k3", 8, divide_by_std=True).fixed_point(TOKENS), TOKENS.optimum(BETA)
    assert total_variation(fixed, optimum) == pytest.approx(0.443, abs=5e-4)
    policy = trained(TOKENS, GRPOConfig(kl_coef=BETA)).policy
    assert total_variation(policy, fixed) < 0.02  # far less than the distance of the optimum


@pytest.mark.full
def test_the_kl_controller_settles_where_the_optimums_kl_is_its_target():
    """KL(pi*, ref) falls with beta: so the target names one beta, at which the controller rests, and one optimum.

    PPO whitens. The expected update is zero where E[A grad log pi] = 0; the shift is a baseline and adds nothing, the
    division rescales reward and penalty alike, for both are in A. So beta keeps its meaning.
    """
    optimum, reference = TOKENS.optimum(BETA), TOKENS.probabilities(TOKENS.reference)
    target = float((optimum * np.log(optimum / reference)).sum(1).mean())
    config = PPOConfig(kl_coef=4 * BETA, kl_target=target, kl_horizon=6 * 768, truncation="zero")
    result = train(TOKENS, config, rows=768, iterations=150)
    np.testing.assert_allclose(result.metrics["objective/kl_coef"][-50:].mean(), BETA, rtol=0.02)
    np.testing.assert_allclose(result.metrics["objective/kl"][-50:].mean(), target, rtol=0.02)
    assert total_variation(result.policy, optimum) < 0.01


@slow
def test_dpo_reaches_the_optimum_from_pairs():
    """Pairs that the reference drew and Bradley-Terry judged: the likelihood is maximal at ref exp(r / beta)."""
    policy = trained(TREES, DPOConfig(beta=BETA)).policy
    assert total_variation(policy, TREES.optimum(BETA)) < 0.05


@slow
def test_safe_rlhf_meets_its_limit_and_the_multiplier_settles():
    """For a fixed lambda A is the advantage of (r - lambda c) / (1 + lambda) - beta log pi / ref, hence

        pi_lambda ~ ref exp((r - lambda c) / ((1 + lambda) beta))

    Whitening changes its scale only. lambda rests where E[c] under pi_lambda is the limit; here the limit is made so
    that it is 1.5, half again as much as at the start and far from its bound of 5. Among all policies whose mean cost
    is within the limit pi_lambda is the one that maximises E[r] - (1 + lambda) beta KL: the Lagrangian's optimum with
    the weight of the KL that (1 + lambda) gives it.
    """
    beta, settled = 0.2, 1.5

    def optimum(multiplier):
        combined = (TREES.rewards - multiplier * TREES.costs) / (1 + multiplier)
        return TREES.optimum(beta, combined)

    def cost(policy):
        return float((policy * TREES.costs).sum(1).mean())

    limit = cost(optimum(settled))
    assert cost(optimum(1.0)) > 1.05 * limit, "where it starts is no answer"
    config = SafeRLHFConfig(
        kl_coef=beta, truncation="zero", cost_limit=limit, multiplier_rate=0.5, window=ROWS[id(TREES)]
    )
    result = trained(TREES, config, iterations=250)
    last = result.metrics["multiplier"][-100:]
    assert abs(cost(result.policy) - limit) < 0.02 * limit
    assert np.ptp(last) < 0.1 * settled
    np.testing.assert_allclose(last.mean(), settled, rtol=0.05)
    assert total_variation(result.policy, optimum(settled)) < 0.01
