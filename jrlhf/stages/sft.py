"""The stage of supervised fine-tuning: the actor learns the answers of the data."""

from functools import partial

import jax
import numpy as np

from jrlhf.algorithms.optimizers import make_optimizer
from jrlhf.algorithms.registry import optimizer_identity
from jrlhf.data.batches import put_rows, sft_rows, whole_batches
from jrlhf.data.order import Order
from jrlhf.meshes.transfers import to_host
from jrlhf.ppo.supervised import make_sft_step
from jrlhf.ppo.types import SFTBatch, TrainState
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Model
from jrlhf.roles.role import fresh_state
from jrlhf.run.clock import calling
from jrlhf.stages.context import Context
from jrlhf.stages.loop import run_stage

UPDATE, EVALUATE = "sft.update", "sft.evaluate"


def train_sft(context: Context, policy: Model) -> Model:
    """Runs the stage, or its remaining steps, and returns the trained policy. The arrays of `policy` are freed."""
    config, data = context.config.sft, context.task.sft
    assert data is not None
    optimizer = make_optimizer(config, "sft", updates=config.steps)
    placement, order = context.placements["sft"], Order(data.count, config.batch, context.config.seed)
    training, scoring = (
        placement[method].compiled(policy.architecture, context.compute) for method in ("update", "logprobs")
    )
    parts = {"micro_batches": config.micro_batches, "micro_batch_tokens": config.micro_batch_tokens}
    sums_fn = training.train_sums(entropy_gradient=False)
    step_fn = make_sft_step(training.train_logprobs(), optimizer, sums_fn=sums_fn, **parts, pipeline=training.runs)

    def advance(state: TrainState, step: int):
        rows = order.draw(step)
        batch = SFTBatch(*put_rows(sft_rows(data.batch(rows, step), context.length), training.mesh))
        with jax.set_mesh(training.mesh), calling(UPDATE):
            state, metrics = step_fn(state, batch, *policy.frozen)
        metrics = to_host(metrics) | order.begun(step)
        if data.heldout.ids and config.evaluates(step):
            with calling(EVALUATE):
                loss = _mean_loss(context, scoring, policy.holding(state.params))
            metrics = metrics | {"sft/eval_loss": loss}
        return state, metrics

    init = partial(fresh_state, policy.params, optimizer)
    meta = {"start": policy.fingerprint(), **optimizer_identity(context.config, "sft")}
    calls = (UPDATE, EVALUATE) if data.heldout.ids else (UPDATE,)
    state = run_stage(context, "sft", init, advance, meta=meta, announced=calls)
    return policy.holding(state.params)


def _mean_loss(context: Context, compiled: CompiledModel, policy: Model) -> float:
    """The mean loss of the learned tokens of the held-out texts, in nats."""
    assert context.task.sft is not None
    heldout, score = context.task.sft.heldout, compiled.score_logprobs(temperature=1.0)
    tokens, mask = sft_rows(heldout, context.length)
    lengths = np.array([len(ids) for ids in heldout.ids], np.int32)
    mask[:, 0] = False  # the first token has no log-probability
    total = 0.0
    for rows, count in whole_batches(len(tokens), context.config.sft.batch):
        logprobs, _ = score(policy.params, *put_rows((tokens[rows], lengths[rows]), compiled.mesh), *policy.frozen)
        total -= to_host(logprobs)[:count][mask[rows[:count]]].sum(dtype=np.float64)
    return float(total / mask.sum())
