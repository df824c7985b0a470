"""Custom dataflows: `dataflow` in a stage's section names a user's function that replaces the shipped dataflow.

Its parameters are some of those of the shipped dataflow. `estimator.custom_experience` computes custom advantages.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jrlhf.algorithms.factory import algorithm_of
from jrlhf.algorithms.roles import known_facts, roles_of
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.graph import Graph
from jrlhf.meshes.mesh import AXES
from jrlhf.ppo.config.algorithms import DPOConfig, GRPOConfig
from jrlhf.ppo.experience import where_chosen
from jrlhf.ppo.supervised import PairLogprobs, checked_pair_loss
from jrlhf.ppo.token_advantages import make_custom_experience
from jrlhf.ppo.token_losses import LossTokens, checked_loss
from jrlhf.ppo.types import Experience, Rollout
from jrlhf.rewards.user_code import UserCode, explain, load, resolve
from jrlhf.roles.graph import Value, trace

PAIRS = "estimator.pairs_of_group"
OTHERS = PAIRS, "estimator.mix", "estimator.by_source"  # calls of the estimator that return no experience
# Calls that take a function, which is compiled -> the place of this argument.
FUNCTIONS = {"actor.update": 1, "estimator.custom_experience": 0, "estimator.where": 0}


def custom_dataflow(config: Config, shipped: Callable) -> UserCode:
    """Loads the function that the config names. Its parameters must be among those of the shipped dataflow."""
    key, spec = _key(config), config.rl.dataflow
    assert spec is not None
    code = load(resolve(spec, key), key)
    served = [*inspect.signature(shipped).parameters, *config.roles.frozen]
    for name, parameter in inspect.signature(code.function).parameters.items():
        if name not in served or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"{key} has the parameter {parameter}, and stage {config.algorithm} gives {', '.join(served)}: name "
                "only those, or set roles.NAME.path for a frozen policy of this name"
            )
    return code


def custom_graph(config: Config, dataflow: Callable, shipped: Callable) -> Graph:
    """Traces a user's dataflow, and checks that it makes the calls on which the stage relies."""
    given: dict[str, list[tuple]] = defaultdict(list)  # call -> its arguments, each time
    teachers = [f"{name}.top_logprobs" for name in ("reference", *config.roles.frozen)]
    names = *FUNCTIONS, PAIRS, "estimator.mix", *teachers
    watched = {name: partial(_note, given[name]) for name in names}
    traced = partial(trace, _returning_a_pair(dataflow), roles_of(config), known_facts(config), name=config.algorithm)
    try:
        graph = traced(watched=watched)
        again = {name: list[tuple]() for name in FUNCTIONS}
        traced(watched={name: partial(_note, again[name]) for name in FUNCTIONS})
    except Exception as error:
        if isinstance(error, AttributeError) and error.obj is None and not config.rl.algorithm.needs_reference:
            raise UserError(
                f"{_key(config)}: with {config.algorithm}.algorithm.kl_coef=0 there is no reference: name its model "
                f"in roles.NAME.path, and call NAME.{error.name}"
            ) from error
        raise UserError(
            f"{_key(config)} cannot be traced ({explain(error)}): let it only make calls of its roles and hand on what "
            "they return, and give what computes with arrays to estimator.custom_experience"
        ) from error
    _check_calls(config, graph, shipped)
    for arguments in given["estimator.custom_experience"]:
        _check_advantages(config, *arguments)
    bare = "estimator.best_of_group", "estimator.bare_experience", "estimator.mix"
    makers = [call for call in graph if call.kind == "generate" or call.name.startswith(bare)]
    without_advantages = [output for call in makers for output in call.outputs]
    for call in graph:
        if call.name.startswith("estimator.where") and {*call.inputs} & {*without_advantages}:
            without_advantages += call.outputs
    pairs = [output for call in graph if call.name.startswith(PAIRS) for output in call.outputs]
    for chosen, experience in given["estimator.where"]:
        _check_experience(config, graph, "where", experience)
        _check_chosen(config, chosen, compared=experience.name not in without_advantages)
    for (experience,) in given[PAIRS]:
        _check_experience(config, graph, "pairs_of_group", experience)
        _check_groups(config)
        if _is_continued(graph, experience.name):
            raise UserError(f"{_key(config)}: pairs_of_group needs responses to one prompt, and these follow others")
    for data, loss, targets in given["actor.update"]:
        if getattr(data, "name", "") in pairs:
            _check_pair_loss(config, loss, has_targets=targets is not None)
            continue
        compared = getattr(data, "name", "") not in without_advantages
        _check_loss(config, loss, has_targets=targets is not None, compared=compared)
        if loss is None and not compared:
            raise UserError(
                f"{_key(config)}: actor.update gets {data.name}, which has no advantages: make experience by a call of "
                "the estimator that compares scores, or give a loss"
            )
    for name, place in FUNCTIONS.items():
        if any(before[place] is not after[place] for before, after in zip(given[name], again[name], strict=True)):
            raise UserError(
                f"{_key(config)} gives {name} a new function in each iteration, which would compile again each time: "
                "define it outside of the dataflow"
            )
    for _, _, share in given["estimator.mix"]:
        if not (isinstance(share, int | float) and 0 <= share <= 1):
            raise UserError(f"{_key(config)}: estimator.mix gets the share {share!r}: it must be between 0 and 1")
    for _, k in (arguments for name in teachers for arguments in given[name]):
        if type(k) is not int or k < 1:
            raise UserError(f"{_key(config)}: top_logprobs gets k={k!r}: it must be a whole number, at least 1")
    return graph


def _note(seen: list[tuple], *arguments: Any) -> None:
    seen.append(arguments)


def _key(config: Config) -> str:
    return f"{config.algorithm}.dataflow={config.rl.dataflow}"


def _returning_a_pair(dataflow: Callable) -> Callable:
    @functools.wraps(dataflow)
    def checked(**arguments):
        returned = dataflow(**arguments)
        if not (isinstance(returned, tuple) and [type(value) for value in returned] == [Value, Value]):
            raise TypeError("it must return the experience, or the rollout, and the metrics of the updates")
        if returned[0].name.startswith("pairs"):
            raise TypeError("it must return the experience of which the pairs are, and the metrics of the updates")

    return checked


def _check_advantages(config: Config, advantages: Callable, *arguments: Any) -> None:
    """Refuses a function for `custom_experience` that fails, or whose results have other shapes than experience has.

    Where values of a critic enter, their shapes are known in a run only.
    """
    _, _, old, ref, _, *others = arguments
    if not others:
        _try_out(config, "custom_experience", lambda: _experience(config, advantages, old=old, ref=ref))


def _check_chosen(config: Config, chosen: Callable, *, compared: bool) -> None:
    """Refuses a function for `where` that fails, or returns no mask of the rows. compared: there are advantages."""
    ref = 0 if config.rl.algorithm.needs_reference else None

    def tried() -> Experience:
        whole = _experience(config, lambda experience, _: experience.scores, old=0, ref=ref)
        whole = whole if compared else replace(whole, advantages=None)
        return where_chosen(whole, chosen=chosen, config=algorithm_of(config))

    _try_out(config, "where", tried)


def _experience(config: Config, advantages: Callable, *, old: Any, ref: Any) -> Experience:
    """Experience of a batch of the run's shapes. old, ref: None where there are no such log-probs."""
    rows, width = config.rl.rollout_batch, config.data.max_prompt + config.data.max_response
    tokens, logprobs = jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows, width))
    finished, version = jnp.ones(rows, jnp.bool_), jnp.zeros((), jnp.int32)
    versions = None if config.asynchronous is None else tokens
    rollout = Rollout(tokens, tokens[:, 0], tokens[:, 0], logprobs, finished, version, versions=versions)
    given = rollout, jnp.zeros(rows), *(None if value is None else logprobs for value in (old, ref))
    return make_custom_experience(*given, advantages=advantages, config=algorithm_of(config), kl_coef=0.0)


def _try_out(config: Config, method: str, function: Callable[[], Experience]) -> None:
    """Refuses the function that a call of the estimator gets, if it fails with arrays of the run's shapes."""
    try:
        here = jax.sharding.get_abstract_mesh().shape  # a mesh in a mesh has the same size
        with jax.sharding.use_abstract_mesh(AbstractMesh(tuple(here.get(axis, 1) for axis in AXES), AXES)):
            jax.eval_shape(function)
    except Exception as error:
        rows, width = config.rl.rollout_batch, config.data.max_prompt + config.data.max_response
        raise UserError(
            f"{_key(config)}: the function that {method} gets fails with {rows} rows of {width} tokens "
            f"({explain(error)})"
        ) from error


def _check_loss(config: Config, loss: Any, *, has_targets: bool, compared: bool) -> None:
    """Refuses a loss that fails, or does not return one number for each token. compared: there are advantages."""
    if loss is None and has_targets:
        raise UserError(f"{_key(config)}: actor.update reads targets by a loss alone: give it one, or leave them out")
    if loss is None:
        return
    if isinstance(loss, DPOConfig):
        raise UserError(f"{_key(config)}: actor.update gets the loss {loss!r}, which is of pairs: give it {PAIRS}(...)")
    if not callable(loss):
        raise UserError(f"{_key(config)}: actor.update gets the loss {loss!r}: it must be a function of LossTokens")
    if has_targets and not config.compute.fused_loss:
        raise UserError(f"{_key(config)}: targets need compute.fused_loss=true")
    number, several = jnp.zeros(2), jnp.zeros((2, 3)) if has_targets else None
    reference = number if config.rl.algorithm.kl_in_loss else None
    tokens = LossTokens(number, number, number, reference, number if compared else None, several, several)
    try:
        jax.eval_shape(partial(checked_loss, loss), tokens)  # type: ignore[arg-type]
    except Exception as error:
        raise UserError(f"{_key(config)}: the loss that actor.update gets fails ({explain(error)})") from error


def _check_experience(config: Config, graph: Graph, method: str, value: Any) -> None:
    """Refuses an argument of a call of the estimator that is no experience."""
    makers = [call for call in graph if call.role == "estimator" and not call.name.startswith(OTHERS)]
    if getattr(value, "name", "") not in [output for call in makers for output in call.outputs]:
        raise UserError(f"{_key(config)}: {method} needs experience, as estimator.group_experience returns it")


def _is_continued(graph: Graph, name: str) -> bool:
    """Whether a value has the rows of a rollout whose prompts follow another one."""
    made_by = next((call for call in graph if name in call.outputs), None)
    if made_by is None or made_by.role == "prompts":
        return made_by is not None
    if made_by.kind == "generate":
        return _is_continued(graph, made_by.inputs[0])
    rollouts = made_by.inputs[: 2 if made_by.name.startswith("estimator.mix") else 1]
    return made_by.role == "estimator" and any(_is_continued(graph, rollout) for rollout in rollouts)


def _check_groups(config: Config) -> None:
    """Refuses pairs in a stage that draws no groups, or that updates more than once."""
    key, algorithm = _key(config), config.rl.algorithm
    if not isinstance(algorithm, GRPOConfig):
        raise UserError(f"{key}: pairs_of_group needs groups, which stage {config.algorithm} has not: use grpo")
    if algorithm.epochs * algorithm.minibatches > 1:
        raise UserError(
            f"{key}: one update learns from the pairs of an iteration: leave epochs and minibatches of "
            f"{config.algorithm}.algorithm at 1"
        )


def _check_pair_loss(config: Config, loss: Any, *, has_targets: bool) -> None:
    """Refuses a loss of pairs that fails, or does not return one number for each pair."""
    key, has_reference = _key(config), config.rl.algorithm.needs_reference
    if has_targets:
        raise UserError(f"{key}: actor.update reads no targets with pairs: leave them out")
    algorithm = config.rl.algorithm
    for name in ("ptx_coef", "entropy_coef", "target_kl", *algorithm.corrections):
        if getattr(algorithm, name):
            raise UserError(f"{key}: {config.algorithm}.algorithm.{name} has no effect on pairs: leave it out")
    if isinstance(loss, DPOConfig):
        if not has_reference:
            raise UserError(f"{key}: DPO compares with a reference: set {config.algorithm}.algorithm.kl_coef above 0")
        if (loss.micro_batches, loss.micro_batch_tokens) != (1, None):
            raise UserError(f"{key}: {config.algorithm}.algorithm divides the batch: leave it out of DPOConfig")
        return
    if not callable(loss):
        raise UserError(f"{key}: actor.update gets pairs and the loss {loss!r}: give DPOConfig() or a function")
    number = jnp.zeros(2)
    reference = number if has_reference else None
    pairs = PairLogprobs(number, number, reference, reference, number, number)
    try:
        jax.eval_shape(partial(checked_pair_loss, loss), pairs)  # type: ignore[arg-type]
    except Exception as error:
        raise UserError(f"{key}: the loss of pairs that actor.update gets fails ({explain(error)})") from error


def _check_unscored(config: Config) -> None:
    """Refuses settings that need scores of the rollouts. Rewards then only measure answers to held-out prompts."""
    models = [f"rewards[{number}]" for number, part in enumerate(config.rewards) if part.function is None]
    models += ["stage reward_model"] if "reward_model" in config.stages else []
    solved = [f"{config.algorithm}.solved_score={config.rl.solved_score}"] if config.rl.solved_score is not None else []
    if wrong := [*(f"{model} is a model" for model in models), *(f"{key} needs scores" for key in solved)]:
        raise UserError(
            f"{_key(config)} never calls reward.score, so only functions may be rewards, which then measure answers to "
            f"held-out prompts; but {wrong[0]}: call reward.score, or leave it out"
        )


def _check_calls(config: Config, graph: Graph, shipped: Callable) -> None:
    """Refuses a graph that lacks a call on which the stage relies, or that makes the same call of a model twice."""
    key, calls, parameters = _key(config), [call.name for call in graph], inspect.signature(shipped).parameters
    trained = [f"{role}.update" for role in ("actor", "critic", "cost_critic") if role in parameters]
    others = ["reward.score", "pool.batch"] if "pool" in parameters else []
    for needed in (*trained, *others):
        if needed not in calls:
            raise UserError(
                f"{key} does not call {needed}, which stage {graph.name} needs: call it, or name another stage"
            )
    if {"reward.score", "reward.score_baseline"} & {*calls} and not (config.rewards or "reward_model" in config.stages):
        raise UserError(f"{key} calls reward.score, and there are no rewards: give rewards, or leave the call out")
    if "reward.score" not in calls:
        _check_unscored(config)
    if config.rl.algorithm.needs_reference and not {"reference.logprobs", "actor.logprobs_with_base"} & set(calls):
        raise UserError(
            f"{key} does not call reference.logprobs, and {graph.name}.algorithm.kl_coef="
            f"{config.rl.algorithm.kl_coef:g}: call it, or set that to 0"
        )
    for name in config.roles.frozen:
        if name not in graph.roles:
            raise UserError(
                f"{key} never calls {name}, which roles.{name} names: give it that parameter and call "
                f"{name}.logprobs or {name}.top_logprobs, or leave the role out"
            )
    for call in graph:
        once = call.kind == "train" or call.role in ("reward", "cost")
        if once and call.name != f"{call.role}.{call.method}":
            raise UserError(
                f"{key} calls {call.role}.{call.method} more than once: an iteration trains a role once, and scores "
                "once what it learns from"
            )
