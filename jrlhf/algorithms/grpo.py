"""GRPO and its variants: their configs, `GRPOConfig` and its subclasses, change the advantages and the loss."""

from jrlhf.algorithms.calls import (
    ActorCalls,
    Batch,
    EstimatorCalls,
    Number,
    ReferenceCalls,
    Result,
    RewardCalls,
    policy_logprobs,
)


def grpo(
    actor: ActorCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    estimator: EstimatorCalls,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """Uses the responses to one prompt as each other's baseline."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.group_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
