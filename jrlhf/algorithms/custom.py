"""Custom dataflows: `dataflow` in a stage's section names a user's function that replaces the shipped dataflow.

Its parameters are some of those of the shipped dataflow. `estimator.custom_experience` computes custom advantages.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
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
from jrlhf.ppo.token_advantages import make_custom_experience
from jrlhf.ppo.token_losses import LossTokens, checked_loss
from jrlhf.ppo.types import Experience, Rollout
from jrlhf.rewards.user_code import UserCode, explain, load, resolve
from jrlhf.roles.graph import Value, trace


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
                "only those"
            )
    return code


def custom_graph(config: Config, dataflow: Callable, shipped: Callable) -> Graph:
    """Traces a user's dataflow, and checks that it makes the calls on which the stage relies."""
    given: dict[str, list[tuple]] = defaultdict(list)  # call -> its arguments, each time
    teachers = [f"{name}.top_logprobs" for name in ("reference", *config.roles.frozen)]
    names = "estimator.custom_experience", "actor.update", *teachers
    watched = {name: partial(_note, given[name]) for name in names}
    traced = partial(trace, _returning_a_pair(dataflow), roles_of(config), known_facts(config), name=config.algorithm)
    try:
        graph = traced(watched=watched)
        losses = [loss for _, loss, *_ in given["actor.update"]]
        again: list[tuple] = []
        if any(loss is not None for loss in losses):
            traced(watched={"actor.update": partial(_note, again)})
    except Exception as error:
        raise UserError(
            f"{_key(config)} cannot be traced ({explain(error)}): let it only make calls of its roles and hand on what "
            "they return, and give what computes with arrays to estimator.custom_experience"
        ) from error
    _check_calls(config, graph, shipped)
    for arguments in given["estimator.custom_experience"]:
        _check_advantages(config, *arguments)
    for data, loss, targets in given["actor.update"]:
        _check_loss(config, loss, has_targets=targets is not None)
        is_rollout = any(call.kind == "generate" and getattr(data, "name", "") in call.outputs for call in graph)
        if loss is None and is_rollout:
            raise UserError(f"{_key(config)}: actor.update needs experience, from a call of the estimator, or a loss")
    if any(loss is not other for loss, (_, other, *_) in zip(losses, again, strict=False)):
        raise UserError(f"{_key(config)} makes its loss anew each time, which compiles again: make it outside")
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

    return checked


def _check_advantages(config: Config, advantages: Callable, *arguments: Any) -> None:
    """Refuses a function for `custom_experience` that fails, or whose results have other shapes than experience has.

    Where values of a critic enter, their shapes are known in a run only.
    """
    _, _, old, ref, _, *others = arguments
    if others:
        return
    rows, width = config.rl.rollout_batch, config.data.max_prompt + config.data.max_response

    def experience() -> Experience:
        tokens, logprobs = jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows, width))
        finished, version = jnp.ones(rows, jnp.bool_), jnp.zeros((), jnp.int32)
        versions = None if config.asynchronous is None else tokens
        rollout = Rollout(tokens, tokens[:, 0], tokens[:, 0], logprobs, finished, version, versions=versions)
        given = rollout, jnp.zeros(rows), *(None if value is None else logprobs for value in (old, ref))
        return make_custom_experience(*given, advantages=advantages, config=algorithm_of(config), kl_coef=0.0)

    try:
        here = jax.sharding.get_abstract_mesh().shape  # a mesh in a mesh has the same size
        with jax.sharding.use_abstract_mesh(AbstractMesh(tuple(here.get(axis, 1) for axis in AXES), AXES)):
            jax.eval_shape(experience)
    except Exception as error:
        raise UserError(
            f"{_key(config)}: the function that custom_experience gets fails with {rows} rows of {width} tokens "
            f"({explain(error)})"
        ) from error


def _check_loss(config: Config, loss: Any, *, has_targets: bool) -> None:
    """Refuses a loss that fails, or does not return one number for each token."""
    if loss is None and has_targets:
        raise UserError(f"{_key(config)}: actor.update reads targets by a loss alone: give it one, or leave them out")
    if loss is None:
        return
    if not callable(loss):
        raise UserError(f"{_key(config)}: actor.update gets the loss {loss!r}: it must be a function of LossTokens")
    if has_targets and not config.compute.fused_loss:
        raise UserError(f"{_key(config)}: targets need compute.fused_loss, which is false: leave it out")
    number, several = jnp.zeros(2), jnp.zeros((2, 3)) if has_targets else None
    reference = number if config.rl.algorithm.kl_in_loss else None
    tokens = LossTokens(number, number, number, reference, number, several, several)
    try:
        jax.eval_shape(partial(checked_loss, loss), tokens)  # type: ignore[arg-type]
    except Exception as error:
        raise UserError(f"{_key(config)}: the loss that actor.update gets fails ({explain(error)})") from error


def _check_calls(config: Config, graph: Graph, shipped: Callable) -> None:
    """Refuses a graph that lacks a call on which the stage relies, or that makes the same call of a model twice."""
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
    for name in config.roles.frozen:
        if name not in graph.roles:
            raise UserError(f"{key} does not call roles.{name}: give it the parameter {name}, or leave the role out")
    for call in graph:
        method = call.name.partition(".")[2]
        if call.kind != "compute" and not hasattr(roles_of(config)[call.role], method):
            raise UserError(
                f"{key} calls {call.role}.{method.rpartition('_')[0]} more than once: a plan has one place for each"
            )
