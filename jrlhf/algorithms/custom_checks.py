"""What a stage requires of a custom dataflow: refused before anything runs, each in a sentence."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jrlhf.algorithms.factory import algorithm_of
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.graph import Graph
from jrlhf.meshes.mesh import AXES
from jrlhf.ppo.config.algorithms import DPOConfig, GRPOConfig
from jrlhf.ppo.experience import where_chosen
from jrlhf.ppo.supervised import PairLogprobs, checked_pair_loss
from jrlhf.ppo.token_advantages import make_custom_experience
from jrlhf.ppo.token_losses import LossTokens, OfRows, checked_loss, loss_of_rows
from jrlhf.ppo.types import Experience, Rollout
from jrlhf.rewards.user_code import explain

PAIRS = "estimator.pairs_of_group"
OTHERS = PAIRS, "estimator.mix", "estimator.by_source"  # calls of the estimator that return no experience


def key_of(config: Config) -> str:
    """The setting that names the dataflow, for messages."""
    return f"{config.algorithm}.dataflow={config.rl.dataflow}"


def check_arguments(config: Config, graph: Graph, given: Mapping[str, Sequence[tuple]]) -> None:
    """Refuses arguments of calls that cannot be. given: name of a call -> its arguments, each time."""
    for arguments in given["estimator.custom_experience"]:
        _check_advantages(config, *arguments)
    bare = "estimator.best_of_group", "estimator.bare_experience", "estimator.mix", "estimator.by_source"
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
            raise UserError(f"{key_of(config)}: pairs_of_group needs responses to one prompt, and these follow others")
    _check_rows(config, graph)
    for data, loss, targets in given["actor.update"]:
        if getattr(data, "name", "") in pairs:
            _check_pair_loss(config, loss, has_targets=targets is not None)
            continue
        compared = getattr(data, "name", "") not in without_advantages
        _check_loss(config, loss, has_targets=targets is not None, compared=compared)
        if loss is None and not compared:
            raise UserError(
                f"{key_of(config)}: actor.update gets {data.name}, which has no advantages: make experience by a call "
                "of the estimator that compares scores, or give a loss"
            )
    for _, _, share in given["estimator.mix"]:
        if not (isinstance(share, int | float) and 0 <= share <= 1):
            raise UserError(f"{key_of(config)}: estimator.mix gets the share {share!r}: it must be between 0 and 1")
    for _, k in (arguments for name in given if name.endswith(".top_logprobs") for arguments in given[name]):
        if type(k) is not int or k < 1:
            raise UserError(f"{key_of(config)}: top_logprobs gets k={k!r}: it must be a whole number, at least 1")


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
            f"{key_of(config)}: the function that {method} gets fails with {rows} rows of {width} tokens "
            f"({explain(error)})"
        ) from error


def _check_loss(config: Config, loss: Any, *, has_targets: bool, compared: bool) -> None:
    """Refuses a loss that fails, or does not return one number for each token. compared: there are advantages."""
    if loss is None and has_targets:
        raise UserError(f"{key_of(config)}: actor.update reads targets by a loss alone: give it one, or leave them out")
    if loss is None:
        return
    if isinstance(loss, DPOConfig):
        raise UserError(
            f"{key_of(config)}: actor.update gets the loss {loss!r}, which is of pairs: give it {PAIRS}(...)"
        )
    of_rows = isinstance(loss, OfRows)
    if not (of_rows or callable(loss)):
        raise UserError(f"{key_of(config)}: actor.update gets the loss {loss!r}: it must be a function of LossTokens")
    if has_targets and of_rows:
        raise UserError(f"{key_of(config)}: actor.update reads targets by a loss of tokens, and gets one of rows")
    if has_targets and not config.compute.fused_loss:
        raise UserError(f"{key_of(config)}: targets need compute.fused_loss=true")
    number, several = jnp.zeros((2, 2) if of_rows else 2), jnp.zeros((2, 3)) if has_targets else None
    reference = number if config.rl.algorithm.kl_in_loss else None
    tokens = LossTokens(number, number, number, reference, number if compared else None, several, several)
    check = partial(loss_of_rows, loss, mask=number > 0) if of_rows else partial(checked_loss, loss)  # type: ignore[arg-type]
    try:
        jax.eval_shape(check, tokens)
    except Exception as error:
        raise UserError(f"{key_of(config)}: the loss that actor.update gets fails ({explain(error)})") from error


def _check_experience(config: Config, graph: Graph, method: str, value: Any) -> None:
    """Refuses an argument of a call of the estimator that is no experience."""
    makers = [call for call in graph if call.role == "estimator" and not call.name.startswith(OTHERS)]
    if getattr(value, "name", "") not in [output for call in makers for output in call.outputs]:
        raise UserError(f"{key_of(config)}: {method} needs experience, as estimator.group_experience returns it")


def _rollout_of(graph: Graph, name: str) -> str | None:
    """The rollout whose rows a value has, itself if it is one; None for prompts, metrics and values of no rows."""
    made_by = next((call for call in graph if name in call.outputs), None)
    if made_by is None or made_by.role == "prompts" or made_by.kind == "train":
        return None
    first = made_by.inputs[0] if made_by.inputs else ""
    if made_by.kind == "generate" or made_by.role == "pool" or made_by.name.startswith("estimator.mix"):
        return name
    if made_by.name.startswith("estimator.by_source"):  # of rollouts a rollout, of targets targets
        rows = {_rollout_of(graph, value) for value in made_by.inputs[1:]}
        return name if {*made_by.inputs[1:]} == rows else rows.pop() if len(rows) == 1 else None
    return _rollout_of(graph, first)


def _check_rows(config: Config, graph: Graph) -> None:
    """Refuses values of one rollout where another one is learned from, except scores, which a judge may give."""
    key = key_of(config)
    for call in graph:
        if call.name == "actor.update" or call.role == "estimator" and not call.name.startswith(OTHERS):
            data, *others = call.inputs
            rows, makers = _rollout_of(graph, data), {output: one for one in graph for output in one.outputs}
            if rows is None or makers[data].kind == "infer":
                if not makers.get(data, call).name.startswith(PAIRS):
                    raise UserError(f"{key}: {call.name} gets {data}, which is no rollout, experience or pairs")
            for other in others:
                maker = makers.get(other)
                scores = maker is not None and maker.role in ("reward", "cost", "pool")
                if maker is None or scores and _rollout_of(graph, other) in (rows, None):
                    continue
                if scores:
                    _check_judged(config)
                elif maker.kind == "infer" and _rollout_of(graph, other) != rows:
                    raise UserError(f"{key}: {call.name} gets {other}, which belongs to another rollout than {data}")
    loops = [call.name for call in graph if call.role == "pool"]
    again = [call.name for call in graph if call.name != f"{call.role}.{call.method}" or call.role == "prompts"]
    again += [call.name for call in graph if call.name == "estimator.by_source"]
    if loops and again:
        raise UserError(f"{key} calls {again[0]}, which the rounds of a pool do not support: leave it out")


def _check_judged(config: Config) -> None:
    """Refuses settings that would look at the lengths of a judge's responses."""
    scores = config.rl.scores
    for name in ("missing_eos_penalty", "length_penalty", "overlong_buffer"):
        if getattr(scores, name):
            raise UserError(
                f"{key_of(config)} scores other responses than it learns from, and {config.algorithm}.scores.{name} "
                "would look at the lengths of those: leave it out"
            )


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
    key, algorithm = key_of(config), config.rl.algorithm
    if not isinstance(algorithm, GRPOConfig):
        raise UserError(f"{key}: pairs_of_group needs groups, which stage {config.algorithm} has not: use grpo")
    if algorithm.epochs * algorithm.minibatches > 1:
        raise UserError(
            f"{key}: one update learns from the pairs of an iteration: leave epochs and minibatches of "
            f"{config.algorithm}.algorithm at 1"
        )


def _check_pair_loss(config: Config, loss: Any, *, has_targets: bool) -> None:
    """Refuses a loss of pairs that fails, or does not return one number for each pair."""
    key, has_reference = key_of(config), config.rl.algorithm.needs_reference
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
            f"{key_of(config)} never calls reward.score, so only functions may be rewards, which then measure answers "
            f"to held-out prompts; but {wrong[0]}: call reward.score, or leave it out"
        )


def check_calls(config: Config, graph: Graph, shipped: Callable) -> None:
    """Refuses a graph that lacks a call on which the stage relies, or that makes the same call of a model twice."""
    key, calls, parameters = key_of(config), [call.name for call in graph], inspect.signature(shipped).parameters
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
