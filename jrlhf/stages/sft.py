"""Supervised fine-tuning: the actor learns to answer a prompt as the data does."""

import numpy as np

from jrlhf.data.batches import batch_indices, pad_rows, put_rows
from jrlhf.data.encode import Sequences
from jrlhf.meshes import to_host
from jrlhf.ppo import SFTBatch, TrainState, make_sft_step
from jrlhf.roles import compiled
from jrlhf.roles.initial import adamw
from jrlhf.roles.model import Model
from jrlhf.stages.context import Context
from jrlhf.stages.loop import run_stage


def train_sft(context: Context, policy: Model) -> Model:
    """Runs the stage, or what of it is not done yet; returns the trained policy. The given one is used up."""
    config, data = context.config.sft, context.task.sft
    assert data is not None
    optimizer = adamw(config, updates=config.steps)
    logprobs = compiled.train_logprobs(policy.architecture, context.mesh, context.compute)
    step_fn = make_sft_step(
        logprobs, optimizer, micro_batches=config.micro_batches, micro_batch_tokens=config.micro_batch_tokens
    )
    score = compiled.score_logprobs(policy.architecture, context.mesh, context.compute, temperature=1.0)

    def advance(state: TrainState, step: int):
        rows = batch_indices(data.count, config.batch, step, context.config.seed)
        batch = SFTBatch(*put_rows(sft_rows(data.batch(rows, step), context.length), context.mesh))
        state, metrics = step_fn(state, batch, *policy.frozen)
        if data.heldout.ids and (step == 0 or (step + 1) % config.eval_every == 0 or step + 1 == config.steps):
            metrics = metrics | {"sft/eval_loss": _mean_loss(context, score, policy.holding(state.params))}
        return state, metrics

    def init() -> TrainState:
        return TrainState.create(policy.params, optimizer)

    meta = {"corpus": context.task.fingerprint, "start": policy.fingerprint()}
    state = run_stage(context, "sft", config.steps, init, advance, save_every=config.save_every, meta=meta)
    return policy.holding(state.params)


def sft_rows(texts: Sequences, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] of the texts, and the mask of what is learnt."""
    tokens, _ = pad_rows(texts.ids, width)
    learn, _ = pad_rows(texts.learn, width)
    return tokens, learn.astype(bool)


def _mean_loss(context: Context, score, policy: Model) -> float:
    """Nats a learnt token over the held-out texts."""
    assert context.task.sft is not None
    batch = context.config.sft.batch
    heldout = context.task.sft.heldout
    tokens, mask = sft_rows(heldout, context.length)
    lengths = np.array([len(ids) for ids in heldout.ids], np.int32)
    mask[:, 0] = False  # predicted from nothing
    total = 0.0
    for start in range(0, len(tokens), batch):
        rows = np.arange(start, start + batch) % len(tokens)  # the last batch is filled up with rows that do not count
        batch_rows = put_rows((tokens[rows], lengths[rows]), context.mesh)
        logprobs, _ = score(policy.params, *batch_rows, *policy.frozen)
        counted = mask[rows] & (np.arange(start, start + batch) < len(tokens))[:, None]
        total -= to_host(logprobs)[counted].sum(dtype=np.float64)
    return float(total / mask.sum())
