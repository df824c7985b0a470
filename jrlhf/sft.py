"""Supervised fine-tuning: the actor learns to answer a prompt as the corpus does."""

from collections.abc import Sequence

import jax
import numpy as np

from jrlhf import programs
from jrlhf.batches import batch_indices, key_for, pad_rows, put_rows
from jrlhf.context import Context
from jrlhf.docstrings import Example
from jrlhf.models import init_sharded
from jrlhf.optimizers import adamw
from jrlhf.ppo import SFTBatch, TrainState, make_sft_step
from jrlhf.renaming import rename, renaming_words
from jrlhf.stage import run_stage
from jrlhf.tokenizer import TokenPairs, encode_pairs


def train_sft(context: Context):
    """Runs the stage, or what of it is not done yet; returns the actor's parameters."""
    config = context.config.sft
    optimizer = adamw(config, updates=config.steps)
    logprobs = programs.train_logprobs(context.model, context.mesh, context.compute)
    step_fn = make_sft_step(logprobs, optimizer)
    score = programs.score_logprobs(context.model, context.mesh, context.compute, temperature=1.0)
    examples = context.task.train.examples
    vocabulary = renaming_words(examples)

    def advance(state: TrainState, step: int):
        rows = batch_indices(len(examples), config.batch, step, context.config.seed)
        pairs = renamed(context, [examples[row] for row in rows], vocabulary, step)
        state, metrics = step_fn(state, SFTBatch(*put_rows(sft_rows(pairs, context.length), context.mesh)))
        if step == 0 or (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            metrics = metrics | {"sft/eval_loss": _mean_loss(score, state.params, context)}
        return state, metrics

    def init() -> TrainState:
        params = init_sharded(context.model, key_for(context.config.seed, "init"), context.mesh)
        return TrainState.create(params, optimizer)

    meta = {"corpus": context.task.fingerprint}
    return run_stage(context, "sft", config.steps, init, advance, save_every=config.save_every, meta=meta).params


def renamed(context: Context, examples: Sequence[Example], vocabulary: Sequence[str], step: int) -> TokenPairs:
    """The examples' token ids. A share of them speak of other things than in the corpus, new ones each time.

    An example that would no longer fit keeps its own words.
    """
    data, tokenizer = context.config.data, context.task.tokenizer
    rng = np.random.default_rng((context.config.seed, step))
    changed = [
        rename(example, vocabulary, rng) if rng.random() < context.config.sft.renaming else example
        for example in examples
    ]
    both = [*changed, *examples]
    pairs = encode_pairs(
        tokenizer, [e.prompt for e in both], [e.summary for e in both], data.max_prompt, data.max_response
    )
    place = {index: row for row, index in enumerate(pairs.index)}
    rows = [place.get(row, place[row + len(examples)]) for row in range(len(examples))]
    return TokenPairs(
        index=tuple(range(len(rows))),
        prompts=tuple(pairs.prompts[row] for row in rows),
        responses=tuple(pairs.responses[row] for row in rows),
    )


def sft_rows(pairs: TokenPairs, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] of the pairs, prompt and response, and the mask of what is learnt: the response."""
    both = zip(pairs.prompts, pairs.responses, strict=True)
    tokens, lengths = pad_rows([prompt + response for prompt, response in both], width)
    prompt_lengths = np.array([len(prompt) for prompt in pairs.prompts])
    time = np.arange(width)[None, :]
    return tokens, (time >= prompt_lengths[:, None]) & (time < lengths[:, None])


def _mean_loss(score, params, context: Context) -> float:
    """Nats a response token over the held-out pairs."""
    batch = context.config.sft.batch
    tokens, mask = sft_rows(context.task.heldout.tokens, context.length)
    total = 0.0
    for start in range(0, len(tokens), batch):
        rows = np.arange(start, start + batch) % len(tokens)  # the last batch is filled up with rows that do not count
        logprobs, _ = jax.device_get(score(params, put_rows(tokens[rows], context.mesh)))
        counted = mask[rows] & (np.arange(start, start + batch) < len(tokens))[:, None]
        total -= logprobs[counted].sum(dtype=np.float64)
    return float(total / mask.sum())
