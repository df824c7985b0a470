"""PPO: `PPOConfig`."""

from jax import Array

from jrlhf.data.batches import Batch
from jrlhf.ppo import Experience
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Reference, policy_logprobs
from jrlhf.roles.critic import Critic
from jrlhf.roles.experience import ExperienceMaker

TITLES = {"ppo": "PPO"}


def ppo(
    actor: Actor,
    critic: Critic,
    reference: Reference | None,
    reward: Rewards,
    estimator: ExperienceMaker,
    prompts: Batch,
    kl_coef: float | Array,
) -> tuple[Experience, dict[str, Array]]:
    """A critic estimates what each token adds to the score."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    values, after = critic.values(rollout)
    experience = estimator.experience(rollout, scores, old, ref, values, after, kl_coef)
    return experience, critic.update(experience) | actor.update(experience)
