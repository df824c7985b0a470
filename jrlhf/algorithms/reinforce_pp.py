"""REINFORCE++: `ReinforcePPConfig`."""

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


def reinforce_pp(
    actor: ActorCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    estimator: EstimatorCalls,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """Returns of tokens are whitened over the batch; one response per prompt."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.return_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
