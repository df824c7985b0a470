"""The reward model: a scalar head on the SFT actor's decoder, learnt from pairs that an annotator ranked."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np

from jrlhf import programs
from jrlhf.batches import batch_indices, key_for, pad_rows, put_rows
from jrlhf.checkpoints import fingerprint_of
from jrlhf.context import Context
from jrlhf.errors import UserError
from jrlhf.models import scalar_from
from jrlhf.optimizers import adamw
from jrlhf.ppo import PreferenceBatch, TrainState, make_preference_step
from jrlhf.preemption import Preempted
from jrlhf.preferences import Pair, build_pairs, with_real_lines, write_pairs
from jrlhf.sampling import sample, score_sequences
from jrlhf.stage import run_stage
from jrlhf.task import Split

Ids = tuple[int, ...]


@dataclass(frozen=True)
class EncodedPairs:
    """Pairs as whole sequences of token ids. A sampled response keeps the ids that were sampled."""

    chosen: list[Ids]
    rejected: list[Ids]
    gaps: np.ndarray  # how far apart the two are in gold score

    def __len__(self) -> int:
        return len(self.chosen)


def train_reward_model(context: Context, sft_params):
    """Runs the stage, or what of it is not done yet; returns the reward model's parameters.

    Its scores are shifted and scaled at the end so that they have mean 0 and deviation 1 over the pairs it learnt from:
    what PPO's KL coefficient is to be weighed against does not depend on the reward model's own scale.
    """
    config = context.config.reward_model
    optimizer = adamw(config, updates=config.steps)
    scores = programs.train_scores(context.model, context.mesh, context.compute)
    step_fn = make_preference_step(scores, optimizer)

    @cache
    def pairs() -> tuple[EncodedPairs, EncodedPairs]:
        return collect_pairs(context, sft_params)

    def advance(state: TrainState, step: int):
        train, heldout = pairs()
        rows = batch_indices(len(train), config.batch, step, context.config.seed)
        state, metrics = step_fn(state, _batch(train, rows, context))
        last = step + 1 == config.steps
        if step == 0 or (step + 1) % config.eval_every == 0 or last:
            metrics = metrics | _accuracy(context, state.params, heldout)
        if last:
            every = score_sequences(context, state.params, train.chosen + train.rejected)
            state = replace(state, params=normalised(state.params, every.mean(), every.std()))
        return state, metrics

    def init() -> TrainState:
        return TrainState.create(scalar_from(sft_params), optimizer)

    meta = {"corpus": context.task.fingerprint, "sft": fingerprint_of(sft_params)}
    state = run_stage(context, "reward_model", config.steps, init, advance, save_every=config.save_every, meta=meta)
    return state.params


def collect_pairs(context: Context, sft_params) -> tuple[EncodedPairs, EncodedPairs]:
    """Ranked pairs to train on, some with the wrong label, and held-out ones in the rubric's own order."""
    config, task = context.config.reward_model, context.task
    # Held-out pairs keep all but exact ties, so that the accuracy can be told with and without the close ones.
    train, texts = _rank(
        context, sft_params, task.train, config.prompts, "preferences", flip=config.label_flip, margin=config.margin
    )
    write_pairs(context.run.path / "preferences.jsonl", texts)
    heldout, _ = _rank(context, sft_params, task.heldout, config.heldout_prompts, "heldout preferences")
    if not len(train) or not (heldout.gaps > config.margin).any():
        raise UserError(
            f"reward_model.margin={config.margin:g} leaves {len(train)} pairs to learn from and {len(heldout)} to "
            "measure with: lower it, or raise reward_model.prompts and reward_model.heldout_prompts"
        )
    return train, heldout


def _rank(
    context: Context, sft_params, split: Split, prompts: int, purpose: str, *, flip: float = 0.0, margin: float = 0.0
) -> tuple[EncodedPairs, list[Pair]]:
    """Samples of the SFT actor for the first so many shuffled prompts, ranked against each other and real lines."""
    config, task, seed = context.config.reward_model, context.task, context.config.seed
    count = min(prompts, len(split.examples))
    rows = batch_indices(len(split.examples), count, 0, seed)
    examples = [split.examples[row] for row in rows]
    prompt_ids = [split.tokens.prompts[row] for row in rows]
    ids: dict[tuple[str, str], Ids] = {}
    samples: list[list[str]] = [[] for _ in rows]
    for number in range(config.samples_per_prompt):
        context.console.line(f"sampling {purpose}: {number * count} of {config.samples_per_prompt * count} responses")
        if context.preemption.requested:
            raise Preempted("the reward model stage stopped before its first step; earlier stages are saved")
        responses = sample(context, sft_params, prompt_ids, key_for(seed, purpose, number))
        for example, prompt, texts, response in zip(examples, prompt_ids, samples, responses, strict=True):
            texts.append(response.text)
            ids.setdefault((example.prompt, response.text), prompt + response.ids)
    rng = np.random.default_rng((seed, len(purpose)))
    candidates = with_real_lines(examples, samples, rng, foreign=config.foreign_lines)
    signatures = [example.signature for example in examples]
    pairs = build_pairs(signatures, candidates, task.rubric, rng, flip=flip, margin=margin)
    ids_of = {example.prompt: prompt for example, prompt in zip(examples, prompt_ids, strict=True)}

    def encode(pair: Pair, text: str) -> Ids | None:
        known = ids.get((pair.prompt, text))
        if known is not None:
            return known
        response = task.tokenizer.encode(text)
        fits = len(response) < context.config.data.max_response
        return (*ids_of[pair.prompt], *response, task.tokenizer.eos_id) if fits else None

    def gap(pair: Pair) -> float:
        signature = pair.prompt.removesuffix("\n")
        return abs(task.rubric.score(signature, pair.chosen) - task.rubric.score(signature, pair.rejected))

    encoded = [(encode(pair, pair.chosen), encode(pair, pair.rejected), pair) for pair in pairs]
    fitting = [(chosen, rejected, gap(pair)) for chosen, rejected, pair in encoded if chosen and rejected]
    chosen, rejected, gaps = zip(*fitting, strict=True) if fitting else ((), (), ())
    return EncodedPairs(list(chosen), list(rejected), np.array(gaps)), pairs


def normalised(params, mean: float, deviation: float):
    """A scalar model whose outputs have this mean and deviation -> one whose outputs have 0 and 1."""
    kernel, bias = params["value_head"]["kernel"], params["value_head"]["bias"]
    scale = np.float32(1.0 / max(float(deviation), 1e-6))
    # On the host: the head is one small vector, and a loop that has settled compiles nothing.
    head = {
        "kernel": jax.device_put(np.asarray(kernel) * scale, kernel.sharding),
        "bias": jax.device_put((np.asarray(bias) - np.float32(mean)) * scale, bias.sharding),
    }
    return params | {"value_head": head}


def _accuracy(context: Context, params, pairs: EncodedPairs) -> dict[str, float]:
    """How often the order is the rubric's: over pairs that the annotator could tell apart, and over all."""
    chosen, rejected = (score_sequences(context, params, ids) for ids in (pairs.chosen, pairs.rejected))
    right, clear = chosen > rejected, pairs.gaps > context.config.reward_model.margin
    return {
        "reward_model/eval_accuracy": float(right[clear].mean()),
        "reward_model/eval_pairs": int(clear.sum()),
        "reward_model/eval_accuracy_with_close_pairs": float(right.mean()),
    }


def _batch(pairs: EncodedPairs, rows, context: Context) -> PreferenceBatch:
    chosen = put_rows(pad_rows([pairs.chosen[row] for row in rows], context.length), context.mesh)
    rejected = put_rows(pad_rows([pairs.rejected[row] for row in rows], context.length), context.mesh)
    return PreferenceBatch(*chosen, *rejected)
