"""Optimizers other than AdamW, which may be code of the user's own: their directions, and what their states hold."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrlhf.config.stages import OptimizerConfig
from jrlhf.errors import UserError
from jrlhf.models.weights import Path
from jrlhf.rewards.user_code import UserCode, explain, load, resolve
from jrlhf.roles.directions import muon, placed, weight_like

_COUNTER = 4  # bytes of the schedule's count of updates


class StateSizes(NamedTuple):
    """What an optimizer stores. like: of each array that is stored as a weight is, the path of that weight and the
    bytes of a number. others: bytes of all other arrays, which every device has whole.
    """

    like: tuple[tuple[Path, int], ...]
    others: int


def direction_of(config: OptimizerConfig, key: str) -> optax.GradientTransformation:
    """Returns the direction that a section names: Muon, or one of the user's own.

    key: of the section, such as `ppo.actor`. Raises UserError for a function that makes none.
    """
    return placed(muon(config) if config.optimizer == "muon" else _own(config, key))


def own_code(config: OptimizerConfig, key: str) -> UserCode | None:
    """Loads the function that a section names; None: it names an optimizer of jrlhf."""
    called = _called(config, key)
    if config.optimizer in ("adamw", "muon"):
        return None
    if ":" not in config.optimizer:
        raise UserError(f"{called}: it must be adamw, muon, path/file.py:function or package.module:function")
    return load(resolve(config.optimizer, called), called)


def state_sizes(config: OptimizerConfig, key: str, params: Any) -> StateSizes:
    """Returns what an optimizer that is not AdamW stores for weights of these shapes, of which it computes nothing.

    Raises UserError for an optimizer that fails on them, changes shapes or dtypes, or itself goes down the gradient.
    """
    direction, called = direction_of(config, key), _called(config, key)
    try:
        state = jax.eval_shape(direction.init, params)
        moved, after = jax.eval_shape(direction.update, params, state, params)
    except Exception as error:
        raise UserError(f"{called} cannot be applied to the weights: {explain(error)}") from error
    for what, given, returned in (("gradients", params, moved), ("its state", state, after)):
        if difference := _difference(given, returned):
            raise UserError(
                f"{called} turns {what} into another tree ({difference}): keep structure, shapes and dtypes"
            )
    like, weights, others = weight_like(params), list[tuple[Path, int]](), _COUNTER
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != np.bool_:
            raise UserError(f"{called} keeps an array of {leaf.dtype} in its state: keep jax.random.key_data of a key")
        if not leaf.size or jnp.issubdtype(leaf.dtype, np.complexfloating):
            kind = f"{leaf.dtype}{list(leaf.shape)}"
            raise UserError(f"{called} keeps an array {kind} in its state, which no checkpoint can hold: keep another")
        if (weight := like(path, leaf)) is None:
            others += leaf.size * leaf.dtype.itemsize
        else:
            weights.append((tuple(part.key for part in weight), leaf.dtype.itemsize))
    if _descends(direction, params):
        raise UserError(
            f"{called} returns steps down the gradient, as optax.adamw does: return a direction such as "
            "optax.scale_by_adam, because jrlhf multiplies it by the negative learning rate"
        )
    return StateSizes(tuple(weights), others)


def _descends(direction: optax.GradientTransformation, params: Any) -> bool:
    """Whether a direction is already multiplied by a negative learning rate, tried on a few positive numbers."""
    small = jax.tree.map(lambda x: np.full([min(size, 2) for size in x.shape], 0.1, x.dtype), params)
    try:
        moved, _ = direction.update(small, direction.init(small), small)
    except Exception:  # it needs the weights' own shapes
        return False
    return sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(moved)) < 0


def _called(config: OptimizerConfig, key: str) -> str:
    return f"{key}.optimizer={config.optimizer}"


def _own(config: OptimizerConfig, key: str) -> optax.GradientTransformation:
    code, called = own_code(config, key), _called(config, key)
    assert code is not None
    try:
        direction = code.function(config)
    except (Exception, SystemExit) as error:
        raise UserError(f"{called} makes no optimizer: {explain(error)}") from error
    if not isinstance(direction, optax.GradientTransformation):
        raise UserError(f"{called} returned a {type(direction).__name__}: return an optax.GradientTransformation")
    return direction


def _difference(given: Any, returned: Any) -> str:
    """Returns the first difference between two trees of arrays; "" if there is none."""
    if jax.tree.structure(given) != jax.tree.structure(returned):
        return "of another structure"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(returned), strict=True):
        before, after = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in (a, b))
        if before != after:
            return f"{jax.tree_util.keystr(path, simple=True, separator='.')} is {after} and was {before}"
    return ""
