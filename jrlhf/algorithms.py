"""The algorithms, each as the dataflow of one iteration. What they compute with is in `ppo/`, what is theirs to set in
`ppo/config.py`, whose classes describe them.

A function's parameters name the roles that it needs, and the values that it starts from: `prompts` are a `Batch`,
`kl_coef` is the weight of the KL. A reference that is None is not needed. Every function is also a graph: `graph_of`.
"""

from collections.abc import Callable

from jrlhf.config import Config
from jrlhf.dataflow import trace
from jrlhf.meshes import Graph
from jrlhf.pool import Pool
from jrlhf.roles import Actor, Constraint, Critic, Estimator, Learner, Reference
from jrlhf.scoring import Rewards


def ppo(actor, critic, reference, reward, estimator, prompts, kl_coef):
    """PPO (`PPOConfig`): a critic says what each token adds to the score."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    values, after = critic.values(rollout)
    experience = estimator.experience(rollout, scores, old, ref, values, after, kl_coef)
    return experience, critic.update(experience) | actor.update(experience)


def on_policy(actor, learner, reference, reward, prompts, kl_coef):
    """PPO, GRPO and its kin, REINFORCE++, where a batch gets a single update: the passes that make the experience are
    those that are trained."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    ref = None if reference is None else reference.logprobs(rollout)
    return learner.update(rollout, scores, ref, kl_coef)


def grpo(actor, reference, reward, estimator, prompts, kl_coef):
    """GRPO (`GRPOConfig`): several responses to each prompt are each other's baseline.

    Also Dr. GRPO, GSPO, RLOO and REINFORCE++-baseline, which differ in what the estimator and the loss make of it.
    """
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.group_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)


def dapo(actor, reference, reward, pool, estimator, kl_coef):
    """DAPO (`DAPOConfig`): GRPO on groups that can teach something, drawn until they fill a batch."""
    while pool.wants_more():
        prompts = pool.draw()
        rollout = actor.generate(prompts)
        scores = reward.score(rollout, prompts)
        kept = pool.keep(rollout, scores, prompts)
    rollout, scores = pool.batch(kept)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.group_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)


def reinforce_pp(actor, reference, reward, estimator, prompts, kl_coef):
    """REINFORCE++ (`ReinforcePPConfig`): returns of tokens, whitened over the batch; one response a prompt."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.return_experience(rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)


def remax(actor, reference, reward, estimator, prompts, kl_coef):
    """ReMax (`ReMaxConfig`): the score of the greedy response is the baseline."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    greedy = actor.generate_greedy(prompts)
    baselines = reward.score_baseline(greedy, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.return_experience(rollout, scores, old, ref, kl_coef, baselines)
    return experience, actor.update(experience)


def safe_rlhf(actor, critic, cost_critic, reference, reward, cost, constraint, estimator, prompts, kl_coef):
    """Safe RLHF (`SafeRLHFConfig`): PPO with a cost beside the reward, kept below a limit by a Lagrange multiplier."""
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    costs = cost.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    values = critic.values(rollout)
    cost_values = cost_critic.values(rollout)
    multiplier = constraint.update(costs)
    experience, of_cost = estimator.safe_experience(
        rollout, scores, costs, old, ref, *values, *cost_values, kl_coef, multiplier
    )
    return experience, critic.update(experience) | cost_critic.update(of_cost) | actor.update(experience)


def policy_logprobs(actor, reference, rollout):
    """The rollout's log-probs [B, T] under the actor and under the reference: in one pass where they share weights.

    None for the actor's where those of the rollout serve, and for the reference's where there is none.
    """
    if not actor.recomputes():
        return None, None if reference is None else reference.logprobs(rollout)
    if reference is None:
        return actor.logprobs(rollout), None
    if reference.is_base_of(actor):
        return actor.logprobs_with_base(rollout)
    return actor.logprobs(rollout), reference.logprobs(rollout)


DATAFLOWS: dict[str, Callable] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": grpo,
    "dapo": dapo,
    "gspo": grpo,
    "rloo": grpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": grpo,
    "remax": remax,
    "safe_rlhf": safe_rlhf,
}  # stage -> dataflow

ROLES: dict[str, type] = {
    "actor": Actor,
    "critic": Critic,
    "cost_critic": Critic,
    "reference": Reference,
    "reward": Rewards,
    "cost": Rewards,
    "learner": Learner,
    "estimator": Estimator,
    "pool": Pool,
    "constraint": Constraint,
}


def dataflow_of(config: Config) -> Callable:
    """The dataflow of the config's stage of reinforcement learning."""
    assert config.algorithm is not None
    return on_policy if config.compute.shared_passes else DATAFLOWS[config.algorithm]


def graph_of(config: Config) -> Graph:
    """Its calls, by tracing it."""
    algorithm = config.rl.algorithm
    facts = {
        "actor.recomputes": algorithm.old_logprobs == "recompute",
        "reference.is_base_of": reference_is_base(config),
        **({} if algorithm.needs_reference else {"reference": None}),
    }
    return trace(dataflow_of(config), ROLES, facts, name=config.algorithm)


def reference_is_base(config: Config) -> bool:
    """Whether the reference is the very base under the actor's adapter: what the actor is before anything trains it."""
    fresh = config.lora.path is None and not {"sft", "dpo"} & set(config.stages)
    return config.lora.on and config.roles.reference is None and fresh
