"""ReMax: `ReMaxConfig`."""

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


def remax(
    actor: ActorCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    estimator: EstimatorCalls,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """The score of the greedy response is the baseline."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    greedy = actor.generate_greedy(prompts)
    baselines = reward.score_baseline(greedy, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.return_experience(rollout, scores, old, ref, kl_coef, baselines)
    return experience, actor.update(experience)
