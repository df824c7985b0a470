"""The DPO stage: the policy learns from ranked pairs, relative to a frozen reference."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from jrlhf.algorithms.dpo import dpo
from jrlhf.algorithms.optimizers import make_optimizer
from jrlhf.algorithms.pair_actor import PairActor, PairReference, add_reference
from jrlhf.algorithms.registry import optimizer_identity, stage_graph
from jrlhf.data.batches import put_rows, whole_batches
from jrlhf.data.order import Order
from jrlhf.data.types import Pairs
from jrlhf.meshes.transfers import to_host
from jrlhf.ppo.supervised import PairBatch, pair_terms
from jrlhf.ppo.types import TrainState
from jrlhf.roles.model import Model
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock, calling
from jrlhf.stages.context import Context
from jrlhf.stages.loop import CALLS, run_stage
from jrlhf.stages.preferences import accuracies, collect_pairs, put_pairs


def train_dpo(context: Context, policy: Model, reference_model: Model) -> Model:
    """Runs the stage, or its remaining steps, and returns the trained actor. The arrays of `policy` are freed."""
    config = context.config.dpo
    clock = Clock(deadline=context.config.deadline)
    optimizer = make_optimizer(config, "dpo", updates=config.steps)
    placement = context.placements["dpo"]
    actor_site, reference_site = (
        Site(replace(placement, role=role), context.compute, clock) for role in ("actor", "reference")
    )
    mesh = placement["update"].mesh
    built = PairActor(policy, actor_site, optimizer=optimizer, algorithm=config.algorithm)
    reference = PairReference(reference_model, reference_site)
    measure = jax.jit(partial(pair_terms, config=config.algorithm))
    apart = context.config.roles.reference is not None

    @cache
    def pairs() -> tuple[Pairs, Pairs]:
        return collect_pairs(context, policy if apart else reference_model)

    @cache
    def heldout() -> list[tuple[PairBatch, int]]:
        """The held-out pairs in batches, with the reference's log-probs, and the number of pairs that count in each.

        They stay on the host: the memory of devices is predicted without them.
        """
        measured, batches = pairs()[1], []
        for rows, count in whole_batches(len(measured), config.batch):
            batch = PairBatch(*put_pairs(context, measured, rows, mesh))
            batches.append((to_host(add_reference(batch, reference.logprobs(batch))), count))
        return batches

    def evaluate(actor: PairActor) -> dict[str, float]:
        moved = ((put_rows(batch, mesh), count) for batch, count in heldout())
        batches = [(to_host(measure(actor.logprobs(batch), batch)), count) for batch, count in moved]
        terms = {name: np.concatenate([terms[name][:count] for terms, count in batches]) for name in batches[0][0]}
        return heldout_metrics(terms, pairs()[1].clear)

    def advance(state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        actor = built.bind(state)
        trained, measured = pairs()
        order = Order(len(trained), config.batch, context.config.seed)
        batch = PairBatch(*put_pairs(context, trained, order.draw(step), mesh))
        clock.start()
        metrics = to_host(dpo(actor, reference, batch)) | clock.take() | {CALLS: clock.calls(context.mesh)}
        metrics |= order.begun(step)
        if len(measured) and config.evaluates(step):
            with jax.set_mesh(mesh), calling("dpo.evaluate"):
                metrics |= evaluate(actor)
        return actor.state, metrics

    if apart:
        pairs()  # collected now, because pairs may be sampled from the policy, whose arrays training frees
    meta = {"reference": reference_model.fingerprint(), **optimizer_identity(context.config, "dpo")}
    calls = [call.name for call in stage_graph(context.config, "dpo")]
    init = partial(built.create, policy.params)
    state = run_stage(context, "dpo", init, advance, meta=meta, announced=(*calls, "dpo.evaluate"))
    return policy.holding(state.params)


def heldout_metrics(terms: Mapping[str, np.ndarray], clear: np.ndarray | None) -> dict[str, float]:
    """The metrics `dpo/eval_*` of held-out pairs, from the terms of each pair. clear: see `accuracies`."""
    metrics = {"eval_loss": terms["dpo/loss"].mean(), "eval_margin": terms["rewards/margins"].mean()}
    metrics |= accuracies(terms["rewards/accuracies"], clear)
    return {f"dpo/{name}": float(value) for name, value in metrics.items()}
