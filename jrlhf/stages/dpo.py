"""Direct preference optimisation: the policy learns from pairs that an annotator ranked, tied to a frozen reference."""

from collections.abc import Iterator, Mapping
from functools import cache, partial

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jrlhf.data.batches import batch_indices, pad_rows, put_rows
from jrlhf.data.task import Pairs
from jrlhf.meshes import to_host
from jrlhf.ppo import DPOConfig, PairBatch, TrainState, make_dpo_step, pair_terms, with_reference
from jrlhf.roles import compiled
from jrlhf.roles.compiled import Compute
from jrlhf.roles.graph import call
from jrlhf.roles.model import Model
from jrlhf.roles.optimizers import adamw
from jrlhf.roles.roles import Reference
from jrlhf.run.clock import Clock, timed
from jrlhf.stages.context import Context
from jrlhf.stages.loop import run_stage
from jrlhf.stages.preferences import collect_pairs


class PairActor:
    """The policy that learns from pairs. It generates nothing."""

    state: TrainState  # assigned by whoever runs the steps; `update` replaces it

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        compute: Compute,
        *,
        optimizer: optax.GradientTransformation,
        algorithm: DPOConfig,
        clock: Clock,
    ):
        self._model, self.clock = model.holding({}), clock  # the weights are the state's
        logprobs = compiled.train_logprobs(model.architecture, mesh, compute)
        self._logprobs = compiled.score_logprobs(model.architecture, mesh, compute, temperature=1.0)
        self._update = make_dpo_step(logprobs, optimizer, algorithm)

    def logprobs(self, pairs: PairBatch) -> Float[Array, "2*B T"]:
        """Log-probs of the pairs' tokens under the present weights, to be measured."""
        logprobs, _ = self._logprobs(self.state.params, pairs.tokens, pairs.lengths, *self._model.frozen)
        return logprobs

    @call("train", "metrics")
    @timed("update_actor")
    def update(self, pairs: PairBatch, ref: Float[Array, "2*B T"]) -> dict[str, Array]:
        """Trains on one batch of pairs, given the reference's log-probs of their tokens."""
        self.state, metrics = self._update(self.state, _with_reference(pairs, ref), *self._model.frozen)
        return metrics


def dpo(actor: PairActor, reference: Reference, pairs: PairBatch) -> dict[str, Array]:
    """One step of DPO as a dataflow."""
    ref = reference.logprobs(pairs)
    metrics = actor.update(pairs, ref)
    return metrics


def train_dpo(context: Context, policy: Model) -> Model:
    """Runs the stage, or what of it is not done yet; returns the trained actor. The given policy is used up."""
    config = context.config.dpo
    optimizer, clock = adamw(config, updates=config.steps), Clock(deadline=context.config.deadline)
    reference_model = context.initial.reference(policy)
    on_mesh = (context.mesh, context.compute)
    actor = PairActor(policy, *on_mesh, optimizer=optimizer, algorithm=config.algorithm, clock=clock)
    reference = Reference(reference_model, *on_mesh, temperature=1.0, responses=None, clock=clock)
    measure = jax.jit(partial(pair_terms, config=config.algorithm))
    apart = context.config.roles.reference is not None

    @cache
    def pairs() -> tuple[Pairs, Pairs]:
        return collect_pairs(context, policy if apart else reference_model)

    @cache
    def heldout() -> list[tuple[PairBatch, int]]:
        """The held-out pairs in batches, with the reference's log-probs, and how many of each batch count."""
        batches = _batches(context, pairs()[1], config.batch)
        return [(_with_reference(batch, reference.logprobs(batch)), count) for batch, count in batches]

    def evaluate() -> dict[str, float]:
        terms = [
            jax.tree.map(lambda each, count=count: each[:count], to_host(measure(actor.logprobs(batch), batch)))
            for batch, count in heldout()
        ]
        every = {name: np.concatenate([each[name] for each in terms]) for name in terms[0]}
        return measured_of(every, pairs()[1].clear)

    def advance(state: TrainState, step: int):
        actor.state = state
        train, measured = pairs()
        rows = batch_indices(len(train), config.batch, step, context.config.seed)
        batch = _batch(context, train, rows)
        clock.start()
        metrics = jax.device_get(dpo(actor, reference, batch)) | clock.take()
        if len(measured) and (step == 0 or (step + 1) % config.eval_every == 0 or step + 1 == config.steps):
            metrics |= evaluate()
        return actor.state, metrics

    def init() -> TrainState:
        return TrainState.create(policy.params, optimizer)

    if apart:
        pairs()  # while the policy is there, from which they may be sampled
    meta = {"corpus": context.task.fingerprint, "reference": reference_model.fingerprint()}
    state = run_stage(context, "dpo", config.steps, init, advance, save_every=config.save_every, meta=meta)
    return policy.holding(state.params)


def measured_of(terms: Mapping[str, np.ndarray], clear: np.ndarray | None) -> dict[str, float]:
    """What is made of held-out pairs' terms, `dpo/eval_*`.

    clear: those that the annotator could tell apart, of which the accuracy is; with none there is no accuracy.
    """
    right = terms["rewards/accuracies"]
    metrics = {"eval_loss": terms["dpo/loss"].mean(), "eval_margin": terms["rewards/margins"].mean()}
    if clear is not None:
        metrics["eval_accuracy_with_close_pairs"] = right.mean()
        right = right[clear]
    metrics |= {"eval_accuracy": right.mean()} if len(right) else {}
    metrics["eval_pairs"] = len(right)
    return {f"dpo/{name}": float(value) for name, value in metrics.items()}


_with_reference = jax.jit(with_reference)


def _batch(context: Context, pairs: Pairs, rows: np.ndarray) -> PairBatch:
    chosen = pad_rows([pairs.chosen[row] for row in rows], context.length)
    rejected = pad_rows([pairs.rejected[row] for row in rows], context.length)
    prompt_lengths = np.array([pairs.prompt_lengths[row] for row in rows], np.int32)
    return PairBatch(*put_rows((*chosen, *rejected, prompt_lengths), context.mesh))


def _batches(context: Context, pairs: Pairs, size: int) -> Iterator[tuple[PairBatch, int]]:
    """All pairs, in batches of one size: the last one is filled up with pairs that do not count."""
    for start in range(0, len(pairs), size):
        rows = np.arange(start, start + size) % len(pairs)
        yield _batch(context, pairs, rows), min(size, len(pairs) - start)
