"""Any number of rows through programs of one batch size: responses from a policy, scores from a reward model."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jrlhf import programs
from jrlhf.batches import pad_rows, put_rows, row_keys
from jrlhf.context import Context


@dataclass(frozen=True)
class Response:
    """One response as it was sampled; its ids are never tokenised again."""

    ids: tuple[int, ...]
    text: str
    finished: bool


def sample(context: Context, params, prompts: Sequence[Sequence[int]], key: jax.Array) -> list[Response]:
    """One response to each prompt, drawn as PPO's rollouts are. The same key draws the same texts."""
    mesh, batch = context.mesh, context.config.ppo.rollout_batch
    run = programs.generate(context.model, mesh, context.compute, context.sampling)
    weights = programs.generation_weights(params, context.model, mesh, context.compute)
    responses: list[Response] = []
    for start in range(0, len(prompts), batch):
        chunk = list(prompts[start : start + batch])
        whole = chunk + [prompts[0]] * (batch - len(chunk))  # one shape, so that one program serves
        tokens, lengths = put_rows(pad_rows(whole, context.config.data.max_prompt), mesh)
        keys = row_keys(jax.random.fold_in(key, start), batch, mesh)
        responses += read_responses(context, jax.device_get(run(weights, tokens, lengths, keys)))[: len(chunk)]
    return responses


def score_sequences(context: Context, params, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """The reward model's score of each sequence, prompt and response together."""
    batch = context.config.ppo.rollout_batch
    score = programs.score_sequences(context.model, context.mesh, context.compute)
    scores = []
    for start in range(0, len(sequences), batch):
        chunk = list(sequences[start : start + batch])
        whole = chunk + [chunk[0]] * (batch - len(chunk))
        tokens, lengths = put_rows(pad_rows(whole, context.length), context.mesh)
        scores.append(jax.device_get(score(params, tokens, lengths))[: len(chunk)])
    return np.concatenate(scores)


def read_responses(context: Context, rollout) -> list[Response]:
    """The responses of a rollout that is on the host."""
    responses = []
    for tokens, start, length, finished in zip(
        rollout.tokens, rollout.prompt_lengths, rollout.response_lengths, rollout.finished, strict=True
    ):
        ids = tuple(int(token) for token in tokens[start : start + length])
        responses.append(Response(ids, context.task.tokenizer.decode(ids).strip(), bool(finished)))
    return responses
