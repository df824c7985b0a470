"""Optimizer updates: gradients summed over micro-batches, applied only if everything is finite.

The updates of a model on a batch are pure functions (`Updates`). `run` composes them to a loop inside one jitted
program. Where the model is a pipeline, `run_on_host` calls the same functions one after the other, with gradients that
the pipeline computes: rows are then on the mesh that computes the loss, and weights and optimizer state on another. So
the updates of several models can alternate, too.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
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
Carry = Any  # what one update leaves to the next: an object with `params` and `opt_state`
Metrics = dict[str, Float[Array, ""]]
State = TypeVar("State")
Batch = TypeVar("Batch", contravariant=True)


class Step(Protocol[State, Batch]):
    """A step that trains on a batch. It frees the arrays of the given state."""

    def __call__(self, state: State, batch: Batch, /, *others: PyTree) -> tuple[State, Metrics]:
        """Returns the next state and the metrics. others: texts to imitate if the config has them, frozen weights."""
        ...


LossFn = Callable[..., tuple[Float[Array, ""], Metrics]]
"""(params, rows, *others, *frozen) -> (loss, metrics), each the *share* of these rows in the mean over the minibatch:
sums divided by the minibatch's global count. Shares add up, so results do not depend on how rows are divided."""
Gradients = tuple[Float[Array, ""], Metrics, PyTree]
"""Loss, metrics and gradients of a minibatch, summed over its parts; the gradients are on the mesh of the weights."""


@dataclass(frozen=True)
class Objective:
    """What updates lower, and how. It has no arrays; updates on the host need one object for all calls of a step.

    names: the keys of the loss's metrics. veto: (metrics) -> True for an update that is not applied, and is the last.
    """

    loss: LossFn
    optimizer: optax.GradientTransformation
    names: tuple[str, ...]
    veto: Callable[[Metrics], Bool[Array, ""]] | None = None


class Minibatch(NamedTuple):
    """The rows of one update, which are differentiated in parts.

    others: further arguments of the loss. counted: False if no token of the rows counts in the loss.
    """

    rows: PyTree
    parts: int | ByLength
    others: tuple[PyTree, ...] = ()
    counted: Bool[Array, ""] | None = None


class Update(NamedTuple):
    """The result of one update."""

    params: PyTree
    opt_state: PyTree
    metrics: Metrics  # the loss's own, and "grad_norm"
    finite: Bool[Array, ""]  # whether loss, gradients and new weights are finite
    sound: Bool[Array, ""]  # finite, and some token counts in the loss; otherwise nothing was applied


@dataclass(frozen=True)
class Updates:
    """All updates of a model on one batch, as functions of what one update leaves to the next, the carry.

    start: the carry before the first update; each carry has `params` and `opt_state`. minibatch: carry -> the rows of
    the next update. advance: (carry, its update) -> the next carry. goes_on: carry -> whether another update follows;
    None: there is only one. end: the last carry -> (state, metrics). frozen: the last arguments of the loss.
    """

    objective: Objective
    frozen: tuple[PyTree, ...]
    start: Carry
    minibatch: Callable[[Carry], Minibatch]
    advance: Callable[[Carry, Update], Carry]
    end: Callable[[Carry], tuple[TrainState, Metrics]]
    goes_on: Callable[[Carry], Bool[Array, ""]] | None = None


Pipeline = Callable[[Updates], Any]  # runs updates on the host; returns their result, or the updates as they are


def run(updates: Updates) -> tuple[TrainState, Metrics]:
    """Runs updates to their end. Call it in a jitted function: several updates are one loop."""

    def one(carry: Carry) -> Carry:
        minibatch = updates.minibatch(carry)
        update = apply_update(updates.objective, carry.params, carry.opt_state, minibatch, updates.frozen)
        return updates.advance(carry, update)

    if updates.goes_on is None:
        return updates.end(one(updates.start))
    return updates.end(lax.while_loop(updates.goes_on, one, updates.start))


def run_on_host(updates: Updates, gradients_of: Callable[..., Gradients]) -> tuple[TrainState, Metrics]:
    """Runs updates to their end, one call after the other.

    gradients_of: (loss, params, rows [M, b, ...], others, frozen) -> gradients, as a pipeline computes them. It
        needs micro-batches with `tokens`.
    """
    carry, goes_on = updates.start, True
    while goes_on:
        minibatch, rows = draw_on_host(updates, carry)
        gradients = gradients_of(updates.objective.loss, carry.params, rows, minibatch.others, updates.frozen)
        carry, goes_on = advance_on_host(updates, carry, minibatch, gradients)
    return updates.end(carry)


def draw_on_host(updates: Updates, carry: Carry) -> tuple[Minibatch, PyTree]:
    """Returns the next minibatch, and its rows in micro-batches [M, b, ...]."""
    minibatch = updates.minibatch(carry)
    if isinstance(minibatch.parts, ByLength):
        tokens = minibatch.parts.tokens
        raise ValueError(f"micro_batch_tokens={tokens}: a pipeline needs equal parts, set micro_batches")
    return minibatch, _split_rows(minibatch.rows, minibatch.parts)


def advance_on_host(updates: Updates, carry: Carry, minibatch: Minibatch, gradients: Gradients) -> tuple[Carry, bool]:
    """Applies gradients where the weights are. Returns the next carry, and whether another update follows."""
    home, mesh = (jax.tree.leaves(tree)[0].sharding.mesh for tree in (carry.params, minibatch.rows))
    counted, objective = transfer(minibatch.counted, home), updates.objective
    with jax.set_mesh(home):
        update = _apply_at_home(objective, carry.params, carry.opt_state, gradients, counted)
    read = {name: getattr(update, name) for name in ("metrics", "finite", "sound")}
    carry = updates.advance(carry, update._replace(**transfer(read, mesh)))
    return carry, updates.goes_on is not None and bool(to_host(updates.goes_on(carry)))


def apply_update(
    objective: Objective, params: PyTree, opt_state: PyTree, minibatch: Minibatch, frozen: tuple[PyTree, ...] = ()
) -> Update:
    """Differentiates the loss over the parts of a minibatch, and applies the gradients.

    Weights and optimizer state stay as they were, bit for bit, when the loss, the gradients' norm or the square of a
    weight that the optimizer would make is not finite in float32 (optax.apply_if_finite lets the bad step through
    after a few; clip_by_global_norm turns one inf into NaN everywhere), when the veto holds, or when no token of the
    rows counts in the loss. (Its gradient would be 0, and an optimizer would still apply momentum and weight decay.)

    A `while_loop` of at most one iteration applies the update, because it writes in place: on GPUs a `cond` copies the
    weights and the optimizer's state. For the same reason the new weights are checked on an extra computation of the
    update, which is never stored. (Their squares are not summed: XLA for CPUs would store the operands of the sum.)
    """
    share = lambda params, rows: objective.loss(params, rows, *minibatch.others, *frozen)  # noqa: E731
    gradients = _accumulate(share, params, minibatch.rows, minibatch.parts, objective.names)
    return _apply(objective, params, opt_state, gradients, minibatch.counted)


def _apply(
    objective: Objective, params: PyTree, opt_state: PyTree, gradients: Gradients, counted: Bool[Array, ""] | None
) -> Update:
    (loss, metrics, grads), veto = gradients, objective.veto
    grad_norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))

    @jax.named_scope("optimizer")
    def apply(grads: PyTree, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = objective.optimizer.update(grads, opt_state, params)
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


_apply_at_home = jax.jit(_apply, static_argnums=0, donate_argnums=(1, 2))


def make_step(update: Callable[..., Updates], pipeline: Pipeline | None) -> Step[TrainState, Any]:
    """Makes a step of update(state, batch, ...): a jitted function, or what a pipeline runs. Donates the state."""
    own = inspect.signature(update).replace(return_annotation=tuple[TrainState, Metrics])

    def shown(step: Callable[..., Any]) -> Any:
        result: Any = wraps(update)(step)
        result.__signature__ = own  # for `help`
        return result

    if pipeline is None:
        return jax.jit(shown(lambda *arguments: run(update(*arguments))), donate_argnums=0)

    def step(state: TrainState, *arguments: PyTree) -> Any:
        number = jnp.asarray(to_host(state.step))  # through the host: the rows are on another mesh
        updates = update(replace(state, step=number), *arguments)

        def end(carry: Carry) -> tuple[TrainState, Metrics]:
            after, metrics = updates.end(carry)
            return replace(after, step=to_devices(after.step, state.step.sharding)), metrics

        return pipeline(replace(updates, end=end))

    return shown(step)


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


class _Progress(NamedTuple):
    """What one of several updates leaves to the next."""

    done: Int[Array, ""]  # number of updates so far
    params: PyTree
    opt_state: PyTree
    stop: Bool[Array, ""]
    finite: Int[Array, ""]  # number of them in which all was finite
    sound: Int[Array, ""]  # number of them that were not skipped
    sums: Metrics  # over the sound ones
    first: Metrics


def repeated(
    objective: Objective,
    config: PolicyConfig,
    state: TrainState,
    batch: tuple[PyTree, ...],
    prepare: Callable[..., Any],
    frozen: tuple[PyTree, ...],
    end: Callable[[TrainState, UpdateResults], tuple[TrainState, Metrics]],
    *,
    of_first: tuple[str, ...] = (),
) -> Updates:
    """Returns epochs x minibatches updates, which end early once the veto holds.

    prepare: (*minibatch of `batch`) -> the rows that the loss gets in parts; a `Partial` of arrays. The loss gets the
        number of tokens in the `mask` of the minibatch's rows, too.
    end: (next state, results) -> (state, metrics). of_first: see `UpdateResults`.
    """
    check_divisible(jax.tree.leaves(batch)[0], config.minibatches, config.micro_batches)
    total, veto = config.epochs * config.minibatches, objective.veto
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)

    def minibatch(carry: _Progress) -> Minibatch:
        rows, count = _draw(config.minibatches, batch, prepare, key, carry.done)
        tokens, computed = config.micro_batch_tokens, rows.computed
        parts = config.micro_batches if tokens is None else ByLength(row_ends(computed), tokens)
        return Minibatch(rows, parts, (count,), jnp.any(computed))

    def advance(carry: _Progress, update: Update) -> _Progress:
        metrics = jax.tree.map(lambda x: x.astype(jnp.float32), update.metrics)  # float64 with jax_enable_x64
        return _Progress(
            done=carry.done + 1,
            params=update.params,
            opt_state=update.opt_state,
            stop=carry.stop if veto is None else update.sound & veto(update.metrics),
            finite=carry.finite + update.finite.astype(jnp.int32),
            sound=carry.sound + update.sound.astype(jnp.int32),
            sums={name: s + jnp.where(update.sound, metrics[name], 0) for name, s in carry.sums.items()},
            first={name: jnp.where(carry.done == 0, metrics[name], f) for name, f in carry.first.items()},
        )

    def results(last: _Progress) -> tuple[TrainState, Metrics]:
        means = jax.tree.map(lambda s: s / last.sound.astype(jnp.float32), last.sums)
        counts = {
            "skipped_updates": last.done - last.sound,
            "nonfinite_updates": last.done - last.finite,
            "stopped_updates": jnp.where(last.stop, total - last.done + 1, 0),
        }
        counts = {name: count.astype(jnp.float32) for name, count in counts.items()}
        return end(TrainState(last.params, last.opt_state, state.step + 1), UpdateResults(means, last.first, counts))

    none = jnp.zeros((), jnp.int32)
    zeros = dict.fromkeys((*objective.names, "grad_norm"), jnp.zeros((), jnp.float32))
    first = {name: zeros.pop(name) for name in of_first}
    start = _Progress(none, state.params, state.opt_state, jnp.zeros((), jnp.bool_), none, none, zeros, first)
    goes_on = lambda carry: (carry.done < total) & ~carry.stop  # noqa: E731
    return Updates(objective, frozen, start, minibatch, advance, results, goes_on)


@partial(jax.jit, static_argnums=0, inline=True)  # jitted for updates on the host
def _draw(
    minibatches: int, batch: tuple[PyTree, ...], prepare: Callable[..., Any], key: Array, index: Array
) -> tuple[Any, Array]:
    """The rows of minibatch `index` of all epochs, and the number of its tokens."""
    epoch, minibatch = index // minibatches, index % minibatches
    rows = prepare(*draw_minibatch(batch, jax.random.fold_in(key, epoch), minibatch, minibatches))
    return rows, token_count(rows.mask)


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
