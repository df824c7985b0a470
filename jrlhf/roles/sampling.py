"""Any number of rows through programs of one batch size: responses from a policy, scores from a reward model."""

from collections.abc import Sequence

import jax
import numpy as np

from jrlhf.data.batches import pad_rows, put_rows, row_keys
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Response
from jrlhf.meshes import to_host
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.roles import compiled
from jrlhf.roles.model import Model
from jrlhf.stages.context import Context


def sample(
    context: Context,
    policy: Model,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    sampling: SamplingConfig | None = None,
) -> list[Response]:
    """One response to each prompt, drawn as PPO's rollouts are. The same key draws the same texts.

    sampling: how they are drawn instead.
    """
    mesh, batch = context.mesh, context.config.rl.rollout_batch
    drawn = sampling or context.sampling
    run = compiled.generate(policy.architecture, mesh, context.compute, drawn, schedule_for(context, drawn))
    weights = compiled.generation_weights(policy.awake(), mesh, context.compute)
    responses: list[Response] = []
    for start in range(0, len(prompts), batch):
        chunk = list(prompts[start : start + batch])
        whole = chunk + [prompts[0]] * (batch - len(chunk))  # one shape, so that one program serves
        tokens, lengths = put_rows(pad_rows(whole, context.config.data.max_prompt), mesh)
        keys = row_keys(jax.random.fold_in(key, start), batch, mesh)
        generation = run(weights, tokens, lengths, keys, *policy.frozen)
        responses += read_responses(context.task.tokenizer, to_host(generation), len(chunk))
    return responses


def schedule_for(context: Context, sampling: SamplingConfig) -> Schedule:
    """That of the rollouts; or few programs, where many would be compiled for this alone and all rows have room.

    Then prompts are read in waves, as rollouts read them: all at once they may not fit.
    """
    planned, section, limit = context.config.rollout, context.config.rl, sampling.max_new_tokens
    shared = sampling == context.sampling and section.samples == 1
    if shared or planned.slots is not None or planned.is_one_program(section.rollout_batch, limit):
        return planned
    rows = section.rollout_batch * context.mesh.shape["tensor"] // context.mesh.size  # of a group of devices
    wave = planned.waves(rows, rows, context.config.data.max_prompt)[-1]
    return Schedule(chunk=limit, buckets=1, lengths=1, prefill=wave)


def score_sequences(context: Context, reward: Model, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """The reward model's score of each sequence, prompt and response together."""
    batch, reward = context.config.rl.rollout_batch, reward.awake()
    score = compiled.score_sequences(reward.architecture, context.mesh, context.compute)
    weights = compiled.weights_at(reward, reward.architecture, context.mesh, context.compute)
    scores = []
    for start in range(0, len(sequences), batch):
        chunk = list(sequences[start : start + batch])
        whole = chunk + [chunk[0]] * (batch - len(chunk))
        tokens, lengths = put_rows(pad_rows(whole, context.length), context.mesh)
        scores.append(to_host(score(weights, tokens, lengths, *reward.frozen))[: len(chunk)])
    return np.concatenate(scores)


def read_responses(tokenizer: Tokenizer, rollout, count: int | None = None) -> list[Response]:
    """The responses of a rollout that is on the host, or the first so many."""
    fields = rollout.tokens, rollout.prompt_lengths, rollout.response_lengths, rollout.finished
    responses = []
    for tokens, start, length, finished in zip(*(field[:count] for field in fields), strict=True):
        ids = tuple(int(token) for token in tokens[start : start + length])
        responses.append(Response(ids, tokenizer.decode(ids), bool(finished)))
    return responses
