"""PPO, GRPO and its kin, and REINFORCE++, where a batch gets a single update."""

from jax import Array

from jrlhf.data.batches import Batch
from jrlhf.ppo import Experience
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Reference
from jrlhf.roles.critic import FusedUpdate


def on_policy(
    actor: Actor,
    learner: FusedUpdate,
    reference: Reference | None,
    reward: Rewards,
    prompts: Batch,
    kl_coef: float | Array,
) -> tuple[Experience, dict[str, Array]]:
    """The passes that make the experience are those that are trained."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    ref = None if reference is None else reference.logprobs(rollout)
    return learner.update(rollout, scores, ref, kl_coef)
