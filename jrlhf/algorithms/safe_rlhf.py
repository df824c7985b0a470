"""Safe RLHF: `SafeRLHFConfig`."""

from jrlhf.algorithms.calls import (
    ActorCalls,
    Batch,
    ConstraintCalls,
    CriticCalls,
    EstimatorCalls,
    Number,
    ReferenceCalls,
    Result,
    RewardCalls,
    policy_logprobs,
)


def safe_rlhf(
    actor: ActorCalls,
    critic: CriticCalls,
    cost_critic: CriticCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    cost: RewardCalls,
    constraint: ConstraintCalls,
    estimator: EstimatorCalls,
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
