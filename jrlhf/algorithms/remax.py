"""ReMax: `ReMaxConfig`."""

from jrlhf.algorithms import Actor, Batch, ExperienceMaker, Number, Reference, Result, Rewards, policy_logprobs


def remax(
    actor: Actor,
    reference: Reference | None,
    reward: Rewards,
    estimator: ExperienceMaker,
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
