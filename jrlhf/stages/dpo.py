"""The stage of DPO: the policy learns from ranked pairs, tied to a frozen reference."""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from jrlhf.algorithms.dpo import dpo
from jrlhf.data.batches import batch_indices, pad_rows, put_rows
from jrlhf.data.task import Pairs
from jrlhf.meshes import to_host
from jrlhf.ppo import PairBatch, TrainState, pair_terms
from jrlhf.roles.actor import Reference
from jrlhf.roles.initial import adamw
from jrlhf.roles.model import Model
from jrlhf.roles.pair_actor import PairActor, add_reference
from jrlhf.run.clock import Clock
from jrlhf.stages.context import Context
from jrlhf.stages.loop import run_stage
from jrlhf.stages.preferences import collect_pairs


def train_dpo(context: Context, policy: Model) -> Model:
    """Runs the stage, or the rest of it; returns the trained actor. The given policy is used up."""
    config = context.config.dpo
    optimizer, clock = adamw(config, updates=config.steps), Clock(deadline=context.config.deadline)
    reference_model = context.initial.reference(policy)
    on_mesh = (context.mesh, context.compute)
    built = PairActor(policy, *on_mesh, optimizer=optimizer, algorithm=config.algorithm, clock=clock)
    reference = Reference(reference_model, *on_mesh, temperature=1.0, responses=None, clock=clock)
    measure = jax.jit(partial(pair_terms, config=config.algorithm))
    apart = context.config.roles.reference is not None

    @cache
    def pairs() -> tuple[Pairs, Pairs]:
        return collect_pairs(context, policy if apart else reference_model)

    @cache
    def heldout() -> list[tuple[PairBatch, int]]:
        """The held-out pairs in batches, with the reference's log-probs, and the number of pairs that count in each."""
        batches = _batches(context, pairs()[1], config.batch)
        return [(add_reference(batch, reference.logprobs(batch)), count) for batch, count in batches]

    def evaluate(actor: PairActor) -> dict[str, float]:
        batches = [(to_host(measure(actor.logprobs(batch), batch)), count) for batch, count in heldout()]
        terms = {name: np.concatenate([terms[name][:count] for terms, count in batches]) for name in batches[0][0]}
        return heldout_metrics(terms, pairs()[1].clear)

    def advance(state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        actor = built.bind(state)
        trained, measured = pairs()
        batch = _batch(context, trained, batch_indices(len(trained), config.batch, step, context.config.seed))
        clock.start()
        metrics = jax.device_get(dpo(actor, reference, batch)) | clock.take()
        if len(measured) and (step == 0 or (step + 1) % config.eval_every == 0 or step + 1 == config.steps):
            metrics |= evaluate(actor)
        return actor.state, metrics

    if apart:
        pairs()  # while the policy is there, from which they may be sampled
    meta = {"corpus": context.task.fingerprint, "reference": reference_model.fingerprint()}
    init = partial(built.create, policy.params)
    state = run_stage(context, "dpo", config.steps, init, advance, save_every=config.save_every, meta=meta)
    return policy.holding(state.params)


def heldout_metrics(terms: Mapping[str, np.ndarray], clear: np.ndarray | None) -> dict[str, float]:
    """The metrics `dpo/eval_*` of held-out pairs, from the terms of each pair.

    clear: mask of the pairs counted in the accuracy (gold gap above the margin). Without any there is no accuracy.
    """
    right = terms["rewards/accuracies"]
    metrics = {"eval_loss": terms["dpo/loss"].mean(), "eval_margin": terms["rewards/margins"].mean()}
    if clear is not None:
        metrics["eval_accuracy_with_close_pairs"] = right.mean()
        right = right[clear]
    metrics |= {"eval_accuracy": right.mean()} if len(right) else {}
    metrics["eval_pairs"] = len(right)
    return {f"dpo/{name}": float(value) for name, value in metrics.items()}


def _batch(context: Context, pairs: Pairs, rows: np.ndarray) -> PairBatch:
    chosen = pad_rows([pairs.chosen[row] for row in rows], context.length)
    rejected = pad_rows([pairs.rejected[row] for row in rows], context.length)
    prompt_lengths = np.array([pairs.prompt_lengths[row] for row in rows], np.int32)
    return PairBatch(*put_rows((*chosen, *rejected, prompt_lengths), context.mesh))


def _batches(context: Context, pairs: Pairs, size: int) -> Iterator[tuple[PairBatch, int]]:
    """All pairs in batches of one size, with the number of pairs that count. The last batch is padded."""
    for start in range(0, len(pairs), size):
        rows = np.arange(start, start + size) % len(pairs)
        yield _batch(context, pairs, rows), min(size, len(pairs) - start)
