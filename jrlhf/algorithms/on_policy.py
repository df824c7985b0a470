"""PPO, GRPO and its kin, and REINFORCE++, where a batch gets a single update."""

from jrlhf.algorithms import Actor, Batch, FusedUpdate, Number, Reference, Result, Rewards


def on_policy(
    actor: Actor,
    learner: FusedUpdate,
    reference: Reference | None,
    reward: Rewards,
    prompts: Batch,
    kl_coef: Number,
) -> Result:
    """The passes that make the experience are those that are trained."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    ref = None if reference is None else reference.logprobs(rollout)
    return learner.update(rollout, scores, ref, kl_coef)
