"""GRPO and its kin, whose configs change the advantages and the loss: `GRPOConfig` and its subclasses."""

from jax import Array

from jrlhf.data.batches import Batch
from jrlhf.ppo import Experience
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Reference, policy_logprobs
from jrlhf.roles.experience import ExperienceMaker

TITLES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "reinforce_pp_baseline": "REINFORCE++-baseline",
}


def grpo(
    actor: Actor,
    reference: Reference | None,
    reward: Rewards,
    estimator: ExperienceMaker,
    prompts: Batch,
    kl_coef: float | Array,
) -> tuple[Experience, dict[str, Array]]:
    """Several responses to each prompt are each other's baseline."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.group_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
