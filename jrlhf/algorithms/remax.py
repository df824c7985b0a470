"""ReMax: `ReMaxConfig`."""

from jax import Array

from jrlhf.data.batches import Batch
from jrlhf.ppo import Experience
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Reference, policy_logprobs
from jrlhf.roles.experience import ExperienceMaker

TITLES = {"remax": "ReMax"}


def remax(
    actor: Actor,
    reference: Reference | None,
    reward: Rewards,
    estimator: ExperienceMaker,
    prompts: Batch,
    kl_coef: float | Array,
) -> tuple[Experience, dict[str, Array]]:
    """The score of the greedy response is the baseline."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    greedy = actor.generate_greedy(prompts)
    baselines = reward.score_baseline(greedy, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.return_experience(rollout, scores, old, ref, kl_coef, baselines)
    return experience, actor.update(experience)
