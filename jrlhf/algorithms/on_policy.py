"""PPO, GRPO and its variants, and REINFORCE++, where a batch gets a single update."""

from jrlhf.algorithms.calls import ActorCalls, Batch, LearnerCalls, Number, ReferenceCalls, Result, RewardCalls


def on_policy(
    actor: ActorCalls,
    learner: LearnerCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """One program computes the experience and trains on it, so no pass is computed twice."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    ref = None if reference is None else reference.logprobs(rollout)
    return learner.update(rollout, scores, ref, kl_coef)
