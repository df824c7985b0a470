"""Optimizer updates: gradients summed over micro-batches, applied only if everything is finite.

A step is one jitted program, unless the model is a pipeline. Then updates are staged: a loop on the host calls the same
functions, each jitted, with rows on the mesh that computes the loss, and weights and optimizer state on another. The
loop is a generator (`Updates`), to which the pipeline sends gradients; so the updates of several models can alternate.
"""

import inspect
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jrlhf.meshes.by_length import ByLength, fold_by_length, row_ends
from jrlhf.meshes.rows import check_divisible, draw_minibatch, split_rows
from jrlhf.meshes.transfers import to_devices, to_host, transfer
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.masked import token_count
from jrlhf.ppo.types import TrainState

PyTree = Any
Metrics = dict[str, Float[Array, ""]]
State = TypeVar("State")
Batch = TypeVar("Batch", contravariant=True)


class Step(Protocol[State, Batch]):
    """A step that trains on a batch. It frees the arrays of the given state."""

    def __call__(self, state: State, batch: Batch, /, *others: PyTree) -> tuple[State, Metrics]:
        """Returns the next state and the metrics. others: texts to imitate if the config has them, frozen weights."""
        ...


Gradients = tuple[Float[Array, ""], Metrics, PyTree]  # loss, metrics, gradients
Updates = Generator[tuple, Gradients, Any]
"""If updates are staged, yields (loss_fn, params, rows, others, frozen) and is sent the `Gradients` of loss_fn(params,
micro-batch, *others, *frozen), summed over micro-batches, on the mesh of `params`. The rows are [M, b, ...], and
micro-batches have `tokens`."""
Pipeline = Callable[[Updates], Any]  # runs staged updates; returns their result, or a pending one
LossFn = Callable[..., tuple[Float[Array, ""], Metrics]]
"""(params, rows, *others) -> (loss, metrics), each the *share* of these rows in the mean over the minibatch: sums
divided by the minibatch's global count. Shares add up, so results do not depend on how rows are divided."""


class Update(NamedTuple):
    """The result of one update."""

    params: PyTree
    opt_state: PyTree
    metrics: Metrics  # the loss's own, and "grad_norm"
    finite: Bool[Array, ""]  # whether loss, gradients and new weights are finite
    sound: Bool[Array, ""]  # finite, and some token counts in the loss; otherwise nothing was applied


def apply_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    rows: PyTree,
    *,
    micro_batches: int | ByLength,
    metric_names: tuple[str, ...],
    counted: Bool[Array, ""] | None = None,
    veto: Callable[[Metrics], Bool[Array, ""]] | None = None,
    others: tuple[PyTree, ...] = (),
    frozen: tuple[PyTree, ...] = (),
    staged: bool = False,
) -> Updates:
    """Differentiates `loss_fn` over `rows`, in `micro_batches` parts or by length; the result is an `Update`.

    loss_fn: (params, rows, *others, *frozen) -> (loss, metrics); `frozen` are weights.

    Weights and optimizer state stay as they were, bit for bit, when the loss, the gradients' norm or the square of a
    weight that the optimizer would make is not finite in float32 (optax.apply_if_finite lets the bad step through
    after a few; clip_by_global_norm turns one inf into NaN everywhere), when `veto(metrics)` holds, or when `counted`
    is False: no token of the rows counts in the loss. (Its gradient would be 0, and an optimizer would still apply
    momentum and weight decay.) `metric_names` are the keys of the loss's metrics.

    A `while_loop` of at most one iteration applies the update, because it writes in place: on GPUs a `cond` copies the
    weights and the optimizer's state. For the same reason the new weights are checked on an extra computation of the
    update, which is never stored. (Their squares are not summed: XLA for CPUs would store the operands of the sum.)
    """
    if not staged:
        share = lambda params, micro: loss_fn(params, micro, *others, *frozen)  # noqa: E731
        gradients = _accumulate(share, params, rows, micro_batches, metric_names)
        return _apply(optimizer, veto, params, opt_state, gradients, counted)
    if isinstance(micro_batches, ByLength):
        raise ValueError(f"micro_batch_tokens={micro_batches.tokens}: a pipeline needs equal parts, set micro_batches")
    gradients = yield loss_fn, params, _split_rows(rows, micro_batches), others, frozen
    home, mesh = (jax.tree.leaves(tree)[0].sharding.mesh for tree in (params, rows))
    counted = transfer(counted, home)
    with jax.set_mesh(home):
        update = _apply_at_home(optimizer, veto, params, opt_state, gradients, counted)
    return update._replace(**transfer({name: getattr(update, name) for name in ("metrics", "finite", "sound")}, mesh))


def _apply(
    optimizer: optax.GradientTransformation,
    veto: Callable[[Metrics], Bool[Array, ""]] | None,
    params: PyTree,
    opt_state: PyTree,
    gradients: Gradients,
    counted: Bool[Array, ""] | None,
) -> Update:
    loss, metrics, grads = gradients
    grad_norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))

    @jax.named_scope("optimizer")
    def apply(grads: PyTree, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & _squares_finite(apply(grads, params, opt_state)[0])
    sound = finite if counted is None else finite & counted
    metrics = {**metrics, "grad_norm": grad_norm}
    accepted = sound if veto is None else sound & ~veto(metrics)

    def turn(carry: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
        # Otherwise XLA moves what depends on gradients alone out of the loop and stores it: two copies of them.
        inside, pending = lax.optimization_barrier((grads, carry[0]))
        return (~pending, *apply(inside, *carry[1:]))

    _, params, opt_state = lax.while_loop(lambda carry: carry[0], turn, (accepted, params, opt_state))
    return Update(params, opt_state, metrics, finite, sound)


_apply_at_home = jax.jit(_apply, static_argnums=(0, 1), donate_argnums=(2, 3))


def finish(updates: Updates, gradients_fn: Any = None) -> Any:
    """Runs updates to their end and returns their result. gradients_fn: computes the gradients of staged ones."""
    gradients: Any = None
    try:
        while True:
            gradients = gradients_fn(*updates.send(gradients))
    except StopIteration as end:
        return end.value


def make_step(update: Callable[..., Updates], pipeline: Pipeline | None) -> Step[TrainState, Any]:
    """Makes a step of `update`: a jitted function, or a loop on the host that a pipeline runs. Donates the state."""
    own = inspect.signature(update).replace(return_annotation=tuple[TrainState, Metrics])

    def shown(run: Callable[..., Any]) -> Any:
        result: Any = wraps(update)(run)
        result.__signature__ = own  # for `help`
        return result

    if pipeline is None:
        return jax.jit(shown(lambda *arguments: finish(update(*arguments))), donate_argnums=0)

    def step(state: TrainState, *arguments: PyTree) -> Updates:
        number = jnp.asarray(to_host(state.step))  # through the host: the rows are on another mesh
        after, metrics = yield from update(replace(state, step=number), *arguments)
        return replace(after, step=to_devices(after.step, state.step.sharding)), metrics

    return shown(lambda *arguments: pipeline(step(*arguments)))


def check_output(name: str, tokens: Array, output: Any, *fields: str) -> Any:
    """Returns the output of a given function: an array of the shape of `tokens`, or a tuple of one for each field."""
    shapes = [getattr(x, "shape", None) for x in (output if isinstance(output, tuple | list) else (output,))]
    if shapes != [tokens.shape] * len(fields):
        wanted = fields[0] if len(fields) == 1 else f"({', '.join(fields)})"
        raise ValueError(
            f"{name} returned shapes {', '.join(map(str, shapes))} for tokens of shape {tokens.shape}: it must return "
            f"{wanted}, with a number for each token"
        )
    return output


class UpdateResults(NamedTuple):
    """The result of all updates on one batch."""

    means: Metrics  # means over the updates that were not skipped
    first: Metrics  # those of `of_first`, in the first update
    counts: Metrics  # numbers of updates that were not applied, by reason


class _Carry(NamedTuple):
    index: Int[Array, ""]  # updates computed so far
    params: PyTree
    opt_state: PyTree
    stop: Bool[Array, ""]
    finite: Int[Array, ""]  # number of them in which all was finite
    sound: Int[Array, ""]  # number of them that were not skipped
    sums: Metrics  # over the sound ones
    first: Metrics


def run_updates(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    config: PolicyConfig,
    state: TrainState,
    batch: tuple[PyTree, ...],
    prepare: Callable[..., Any],
    frozen: tuple[PyTree, ...],
    *,
    names: tuple[str, ...],
    of_first: tuple[str, ...] = (),
    veto: Callable[[Metrics], Bool[Array, ""]] | None = None,
    staged: bool = False,
) -> Updates:
    """epochs x minibatches updates in one loop, which ends early once `veto` holds. Result: (state, `UpdateResults`).

    prepare: (*minibatch of `batch`) -> the rows that the loss gets in parts; a `Partial` of arrays.
    loss_fn: (params, rows, count, *frozen) -> (loss, metrics `names`); count is the number of tokens in the `mask` of
        the minibatch's rows.
    of_first: metrics whose value in the first update is returned instead of their mean.
    """
    check_divisible(jax.tree.leaves(batch)[0], config.minibatches, config.micro_batches)
    total = config.epochs * config.minibatches
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    draw = _drawn if staged else _draw
    apply = partial(apply_update, loss_fn, optimizer, metric_names=names, veto=veto, frozen=frozen, staged=staged)

    def one(carry: _Carry) -> Updates:
        rows, count = draw(config, batch, prepare, key, carry.index)
        tokens, computed = config.micro_batch_tokens, rows.computed
        parts = config.micro_batches if tokens is None else ByLength(row_ends(computed), tokens)
        update = yield from apply(
            carry.params, carry.opt_state, rows, micro_batches=parts, others=(count,), counted=jnp.any(computed)
        )
        metrics = jax.tree.map(lambda x: x.astype(jnp.float32), update.metrics)  # float64 with jax_enable_x64
        return _Carry(
            index=carry.index + 1,
            params=update.params,
            opt_state=update.opt_state,
            stop=carry.stop if veto is None else update.sound & veto(update.metrics),
            finite=carry.finite + update.finite.astype(jnp.int32),
            sound=carry.sound + update.sound.astype(jnp.int32),
            sums={name: s + jnp.where(update.sound, metrics[name], 0) for name, s in carry.sums.items()},
            first={name: jnp.where(carry.index == 0, metrics[name], f) for name, f in carry.first.items()},
        )

    none = jnp.zeros((), jnp.int32)
    zeros = dict.fromkeys((*names, "grad_norm"), jnp.zeros((), jnp.float32))
    first = {name: zeros.pop(name) for name in of_first}
    end = _Carry(none, state.params, state.opt_state, jnp.zeros((), jnp.bool_), none, none, zeros, first)
    goes_on = lambda carry: (carry.index < total) & ~carry.stop  # noqa: E731
    if not staged:
        end = lax.while_loop(goes_on, lambda carry: finish(one(carry)), end)
    while staged and to_host(goes_on(end)):
        end = yield from one(end)
    means = jax.tree.map(lambda s: s / end.sound.astype(jnp.float32), end.sums)
    counts = {
        "skipped_updates": end.index - end.sound,
        "nonfinite_updates": end.index - end.finite,
        "stopped_updates": jnp.where(end.stop, total - end.index + 1, 0),
    }
    run = UpdateResults(means, end.first, {name: count.astype(jnp.float32) for name, count in counts.items()})
    return TrainState(end.params, end.opt_state, state.step + 1), run


def _draw(
    config: PolicyConfig, batch: tuple[PyTree, ...], prepare: Callable[..., Any], key: Array, index: Array
) -> tuple[Any, Array]:
    """The rows of minibatch `index` of all epochs, and the number of its tokens."""
    epoch, minibatch = index // config.minibatches, index % config.minibatches
    rows = prepare(*draw_minibatch(batch, jax.random.fold_in(key, epoch), minibatch, config.minibatches))
    return rows, token_count(rows.mask)


_drawn = jax.jit(_draw, static_argnums=0)
_split_rows = jax.jit(split_rows, static_argnums=1)


def _accumulate(
    loss_fn: LossFn, params: PyTree, rows: PyTree, micro_batches: int | ByLength, metric_names: tuple[str, ...]
) -> tuple[Array, Metrics, PyTree]:
    """Loss, metrics and gradients of all rows. Gradients of micro-batches are summed in at least float32, and returned
    in the dtypes of `params`. (Within a micro-batch, devices sum in bfloat16 if the model computes in it.)"""
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if micro_batches == 1:  # without the second set of gradients that a sum needs
        (loss, metrics), grads = grad_fn(params, rows)
        assert set(metrics) == set(metric_names), (set(metrics), metric_names)
        return loss, metrics, grads

    def add(total: PyTree, micro: PyTree) -> PyTree:
        (loss, metrics), grads = grad_fn(params, micro)
        # XLA for TPUs would move the gradients' reductions behind the loop, which stores whole gradients on each device
        # and makes the compiler abort for an unembedding (libtpu 0.0.42 to 0.0.50).
        grads = lax.optimization_barrier(grads)
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, (loss, metrics, grads))

    zero = jnp.zeros((), jnp.float32)
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params)
    start = (zero, dict.fromkeys(metric_names, zero), zeros)
    if isinstance(micro_batches, ByLength):
        loss, metrics, grads = fold_by_length(add, start, rows, micro_batches)
    else:
        parts = split_rows(rows, micro_batches)
        (loss, metrics, grads), _ = lax.scan(lambda total, micro: (add(total, micro), None), start, parts)
    return loss, metrics, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _squares_finite(tree: PyTree) -> Bool[Array, ""]:
    """Tests whether the square of every number in all leaves is finite in float32."""
    flags = [jnp.all(jnp.isfinite(jnp.square(x.astype(jnp.float32)))) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(flags))
