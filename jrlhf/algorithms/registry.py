"""The algorithms, each as the dataflow of one iteration. What they compute with is in `ppo/`, what is theirs to set in
`ppo/config.py`, whose classes describe them.

A function's parameters name the roles that it needs, and the values that it starts from: `prompts` are a `Batch`,
`kl_coef` is the weight of the KL. A reference that is None is not needed. Every function is also a graph: `graph_of`.
It returns the experience and the metrics of its updates. A section's `dataflow` names a function of the user's own in
place of the algorithm's: it takes what that one takes, or a part of it, and computes advantages of its own by
`estimator.custom_experience`.
"""

import functools
import inspect
from collections.abc import Callable

from jrlhf.algorithms.dynamic_sampling import DynamicSampler
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Graph
from jrlhf.rewards.mixture import Rewards
from jrlhf.rewards.user_code import UserCode, explain, load, resolve
from jrlhf.roles.graph import Value, trace
from jrlhf.roles.roles import Actor, Constraint, Critic, ExperienceMaker, FusedUpdate, Reference


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
    """Log-probs [B, T] of a rollout's responses under actor and reference: in one pass where they share weights.

    They mean nothing elsewhere, nor beyond data.max_response tokens of a response.

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

TITLES = {
    "dpo": "DPO",
    "ppo": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++-baseline",
    "remax": "ReMax",
    "safe_rlhf": "Safe RLHF",
}  # stage -> the usual name of its algorithm

ROLES: dict[str, type] = {
    "actor": Actor,
    "critic": Critic,
    "cost_critic": Critic,
    "reference": Reference,
    "reward": Rewards,
    "cost": Rewards,
    "learner": FusedUpdate,
    "estimator": ExperienceMaker,
    "pool": DynamicSampler,
    "constraint": Constraint,
}


def dataflow_of(config: Config) -> Callable:
    """The dataflow of the config's stage of reinforcement learning.

    Raises:
        UserError: it is the user's own, and cannot be used.
    """
    assert config.algorithm is not None
    if config.rl.dataflow is not None:
        return _own(config).function
    return on_policy if config.compute.shared_passes else DATAFLOWS[config.algorithm]


def dataflow_identity(config: Config) -> str | None:
    """One word for the file of a dataflow that is the user's own: a run that goes on with another is not the same."""
    return None if config.rl.dataflow is None else (_own(config).sha256 or "")[:16]


def graph_of(config: Config) -> Graph:
    """Its calls, by tracing it.

    Raises:
        UserError: it is the user's own, and has no such graph as the stage needs.
    """
    algorithm = config.rl.algorithm
    facts = {
        "actor.recomputes": algorithm.old_logprobs == "recompute",
        "reference.is_base_of": config.reference_is_base,
        **({} if algorithm.needs_reference else {"reference": None}),
    }
    dataflow = dataflow_of(config)
    if config.rl.dataflow is None:
        return trace(dataflow, ROLES, facts, name=config.algorithm)
    try:
        graph = trace(_returning_a_pair(dataflow), ROLES, facts, name=config.algorithm)
    except Exception as error:
        raise UserError(
            f"{_key(config)} cannot be traced ({explain(error)}): let it only make calls of its roles and hand on what "
            "they return, and give what computes with arrays to estimator.custom_experience"
        ) from error
    _check_calls(config, graph, DATAFLOWS[graph.name])
    return graph


# A dataflow of the user's own


def _key(config: Config) -> str:
    return f"{config.algorithm}.dataflow={config.rl.dataflow}"


def _own(config: Config) -> UserCode:
    """The function that the config names. It may take what the stage's own takes."""
    key, spec = _key(config), config.rl.dataflow
    assert config.algorithm is not None and spec is not None
    found = load(resolve(spec, key), key)
    served = inspect.signature(DATAFLOWS[config.algorithm]).parameters
    for name, parameter in inspect.signature(found.function).parameters.items():
        if name not in served or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"{key} has the parameter {parameter}, and stage {config.algorithm} gives {', '.join(served)}: name "
                "only those"
            )
    return found


def _returning_a_pair(dataflow: Callable) -> Callable:
    @functools.wraps(dataflow)
    def checked(**arguments):
        returned = dataflow(**arguments)
        if not (isinstance(returned, tuple) and [type(each) for each in returned] == [Value, Value]):
            raise TypeError("it must return the experience and the metrics of the updates")

    return checked


def _check_calls(config: Config, graph: Graph, shipped: Callable) -> None:
    """Whether it makes the calls on which the stage relies, each once.

    Raises:
        UserError: it does not.
    """
    key, calls, parameters = _key(config), [call.name for call in graph], inspect.signature(shipped).parameters
    trained = [f"{role}.update" for role in ("actor", "critic", "cost_critic") if role in parameters]
    for needed in (*trained, "reward.score", *(["pool.batch"] if "pool" in parameters else [])):
        if needed not in calls:
            raise UserError(
                f"{key} does not call {needed}, which stage {graph.name} needs: call it, or name another stage"
            )
    if config.rl.algorithm.needs_reference and not {"reference.logprobs", "actor.logprobs_with_base"} & set(calls):
        raise UserError(
            f"{key} does not call reference.logprobs, and {graph.name}.algorithm.kl_coef="
            f"{config.rl.algorithm.kl_coef:g}: call it, or set that to 0"
        )
    for call in graph:
        method = call.name.partition(".")[2]
        if call.kind != "compute" and not hasattr(ROLES[call.role], method):
            raise UserError(
                f"{key} calls {call.role}.{method.rpartition('_')[0]} more than once: a plan has one place for each"
            )
