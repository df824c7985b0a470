"""Each algorithm, trained on its own samples through the public functions, ends where theory says it must.

The oracle is `enumeration`: NumPy, all responses at once. Two problems: single tokens, and trees of up to three tokens
that an end token may cut short. Policies are tables, so a policy can be every distribution over the responses.
"""

import numpy as np
import pytest

from jrlhf.ppo import (
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
    SafeRLHFConfig,
)
from tests.support.enumeration import Estimator, Problem, total_variation
from tests.support.tabular import train

TOKENS = Problem.random(prompts=3, vocab=5, limit=1, ends=False, seed=1)
TREES = Problem.random(prompts=2, vocab=3, limit=3, ends=True, seed=3)
ROWS = {id(TOKENS): 1536, id(TREES): 2048}  # every prompt's share is the same
BETA = 0.5
slow = pytest.mark.full


def trained(problem, config, iterations=200):
    return train(problem, config, rows=ROWS[id(problem)], iterations=iterations)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PPOConfig(kl_coef=BETA, truncation="zero", minibatches=4), id="ppo", marks=slow),
        pytest.param(RLOOConfig(kl_coef=BETA), id="rloo"),
        pytest.param(ReMaxConfig(kl_coef=BETA), id="remax", marks=slow),
        pytest.param(ReinforcePPConfig(kl_coef=BETA), id="reinforce_pp", marks=slow),
    ],
)
def test_with_the_kl_in_the_reward_the_tilted_reference_is_reached(config):
    """E[r] - beta KL(pi, ref) is maximal at pi* ~ ref exp(r / beta).

    PPO and REINFORCE++ whiten. The expected update is zero where E[A grad log pi] = 0; the shift is a baseline and adds
    nothing, the division rescales reward and penalty alike, for both are in A. So the fixed point is that of the
    advantages that were not whitened: beta keeps its meaning. At pi* itself r - beta log pi / ref is the same for all
    responses, so there is no noise there either, and no more than 0.01 is left.
    """
    optimum = TREES.optimum(BETA)
    assert total_variation(TREES.probabilities(TREES.reference), optimum) > 0.25
    assert total_variation(trained(TREES, config).policy, optimum) < 0.01


def near(policy, fixed, optimum):
    """Within 0.02 of the fixed point, and nearer to it than to the optimum wherever that lies."""
    return total_variation(policy, fixed) < min(0.02, total_variation(fixed, optimum) / 2)


def test_dr_grpo_with_k2_is_at_the_optimum_up_to_its_groups_mean():
    """k2's gradient is the KL's, where a response is one token; the group's mean weakens the rewards by (n - 1) / n.

    (A response's own score is in its baseline. The penalty is in the loss and not weakened.) So the fixed point is
    ref exp((n - 1) / n r / beta), within 0.05 of the optimum.
    """
    config, optimum = DrGRPOConfig(kl_coef=BETA, aggregation_divisor=1), TOKENS.optimum(BETA)
    weaker = TOKENS.optimum(BETA, (config.samples - 1) / config.samples * TOKENS.rewards)
    policy = trained(TOKENS, config).policy
    assert total_variation(policy, optimum) < 0.05
    assert near(policy, weaker, optimum)


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


@pytest.mark.parametrize(
    ("problem", "config", "estimator", "distance"),
    [
        pytest.param(
            TOKENS,
            GRPOConfig(kl_coef=BETA, kl_estimator="k2"),
            Estimator(BETA, "k2", 8, divide_by_std=True),
            0.607,
            id="std",
            marks=slow,
        ),
        pytest.param(
            TOKENS,
            GRPOConfig(kl_coef=BETA, divide_by_std=False),
            Estimator(BETA, "k3", 8),
            0.056,
            id="k3",
            marks=slow,
        ),
        pytest.param(
            TOKENS,
            GRPOConfig(kl_coef=BETA),
            Estimator(BETA, "k3", 8, divide_by_std=True),
            0.443,
            id="std-k3",
            marks=slow,
        ),
        pytest.param(
            TREES,
            DrGRPOConfig(kl_coef=BETA, samples=4, aggregation_divisor=3),
            Estimator(BETA, "k2", 4),
            0.065,
            id="k2-trees",
            marks=slow,
        ),
        pytest.param(
            TREES,
            GSPOConfig(kl_coef=BETA, samples=4),
            Estimator(BETA, "k3", 4, divide_by_std=True, weights="length"),
            0.311,
            id="gspo-trees",
            marks=slow,
        ),
    ],
)
def test_the_others_reach_another_fixed_point(problem, config, estimator, distance):
    """Known by enumeration of all groups, and `distance` in total variation from the optimum: a number of this problem.

    Divided by the group's deviation rewards weigh more against the same penalty. k3's mean gradient is that of
    KL(ref, pi). And where a response has several tokens a KL in the loss is each token's own: what a token does to the
    KL of those after it is in no gradient, so k2 has the optimum for its fixed point with single tokens only.
    """
    fixed, optimum = estimator.fixed_point(problem), problem.optimum(BETA)
    assert total_variation(fixed, optimum) == pytest.approx(distance, abs=5e-4)
    assert near(trained(problem, config).policy, fixed, optimum)


@slow
@pytest.mark.parametrize("config", [ReinforcePPBaselineConfig(), DAPOConfig()], ids=["reinforce_pp_baseline", "dapo"])
def test_with_a_small_penalty_or_none_the_best_response_is_found(config):
    """Where whitening divides A but not the penalty (REINFORCE++-baseline) there is no other fixed point to speak of.

    The surer the policy, the smaller the deviation that it is divided by and the weaker the penalty. Of what there is
    to gain over the reference nine tenths are gained.
    """
    policy = trained(TREES, config).policy
    best = TREES.rewards.max(1)
    reference = (TREES.probabilities(TREES.reference) * TREES.rewards).sum(1)
    assert np.all((policy * TREES.rewards).sum(1) - reference > 0.9 * (best - reference))


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
