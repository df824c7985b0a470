"""Safe RLHF: `SafeRLHFConfig`."""

from jrlhf.algorithms import (
    Actor,
    Batch,
    Constraint,
    CostCritic,
    Critic,
    ExperienceMaker,
    Number,
    Reference,
    Result,
    Rewards,
    policy_logprobs,
)


def safe_rlhf(
    actor: Actor,
    critic: Critic,
    cost_critic: CostCritic,
    reference: Reference | None,
    reward: Rewards,
    cost: Rewards,
    constraint: Constraint,
    estimator: ExperienceMaker,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """PPO with a cost, which a Lagrange multiplier keeps below a limit."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    costs = cost.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    values = critic.values(rollout)
    cost_values = cost_critic.values(rollout)
    multiplier = constraint.update(costs, rollout)
    experience, cost_experience = estimator.safe_experience(
        rollout, scores, costs, old, ref, *values, *cost_values, kl_coef, multiplier
    )
    return experience, critic.update(experience) | cost_critic.update(cost_experience) | actor.update(experience)
