"""PPO: `PPOConfig`."""

from jrlhf.algorithms.calls import (
    ActorCalls,
    Batch,
    CriticCalls,
    EstimatorCalls,
    Number,
    ReferenceCalls,
    Result,
    RewardCalls,
    policy_logprobs,
)


def ppo(
    actor: ActorCalls,
    critic: CriticCalls,
    reference: ReferenceCalls | None,
    reward: RewardCalls,
    estimator: EstimatorCalls,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """A critic estimates what each token adds to the score."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    values, after = critic.values(rollout)
    experience = estimator.experience(rollout, scores, old, ref, values, after, kl_coef)
    return experience, critic.update(experience) | actor.update(experience)
