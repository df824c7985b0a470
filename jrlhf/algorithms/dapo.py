"""DAPO: `DAPOConfig`."""

from jrlhf.algorithms import Actor, DynamicSampler, ExperienceMaker, Number, Reference, Result, Rewards, policy_logprobs


def dapo(
    actor: Actor,
    reference: Reference | None,
    reward: Rewards,
    pool: DynamicSampler,
    estimator: ExperienceMaker,
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
