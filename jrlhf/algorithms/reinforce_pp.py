"""REINFORCE++: `ReinforcePPConfig`."""

from jax import Array

from jrlhf.data.batches import Batch
from jrlhf.ppo import Experience
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Reference, policy_logprobs
from jrlhf.roles.experience import ExperienceMaker

TITLES = {"reinforce_pp": "REINFORCE++"}


def reinforce_pp(
    actor: Actor,
    reference: Reference | None,
    reward: Rewards,
    estimator: ExperienceMaker,
    prompts: Batch,
    kl_coef: float | Array,
) -> tuple[Experience, dict[str, Array]]:
    """Returns of tokens are whitened over the batch; one response per prompt."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.return_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
