"""DAPO: `DAPOConfig`."""

from jrlhf.algorithms.calls import (
    ActorCalls,
    EstimatorCalls,
    Number,
    PoolCalls,
    ReferenceCalls,
    Result,
    RewardCalls,
    policy_logprobs,
)


def dapo(
    actor: ActorCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    pool: PoolCalls,
    estimator: EstimatorCalls,
    kl_coef: Number,
) -> Result:
    """GRPO on informative groups: prompts are drawn until groups with different scores fill a batch."""
    batch = None
    while pool.wants_more():
        prompts = pool.draw()
        rollout = actor.generate(prompts)
        scores = reward.score(rollout, prompts)
        batch = pool.keep(rollout, scores, prompts)
    assert batch is not None, "the pool wants at least one round"
    rollout, scores = pool.batch(batch)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.group_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
