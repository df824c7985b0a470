"""Combines the scores of several rewards: weights, sums and shapes them, with statistics of each. Callers jit it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrlhf.ppo.advantages import group_advantages
from jrlhf.ppo.masked import masked_extremes, masked_mean
from jrlhf.ppo.shaping import RunningMoments, on_last_token
from jrlhf.rewards.types import Kind

RowsOrTokens = Float[Array, "B"] | Float[Array, "B R"]


class Combined(NamedTuple):
    """The results of one scoring on the devices."""

    shaped: RowsOrTokens
    moments: RunningMoments  # updated with these scores
    raw: Float[Array, "B"]  # each row's sum of rewards before it was shaped: verl's critic/score
    parts: dict[str, Float[Array, "B"]]  # scores of each token reward model
    learned: dict[str, Array]  # statistics of each, with the number of its non-finite scores
    extremes: dict[str, Array]  # extremes of `raw`
    shaping: dict[str, Array]  # metrics of the shaping


def combine(
    shape: Callable[..., tuple[RowsOrTokens, RunningMoments, dict[str, Array]]],
    kind: Kind,
    weights: Mapping[str, float],
    on_failure: Mapping[str, float],
    learned: Mapping[str, Float[Array, "B"]],
    texts: RowsOrTokens | Mapping[str, Float[Array, "B"]] | None,
    response_lengths: Int[Array, "B"],
    finished: Bool[Array, "B"],
    moments: RunningMoments,
    *,
    samples: int | None = None,
    counts: Callable[[Array], Array] = jnp.ones_like,
) -> Combined:
    """Adds the weighted scores of token reward models to `texts`, the sum of the text rewards, and shapes the result.

    on_failure: replaces a model's non-finite scores. A row whose sum is not finite is not learned from.
    samples: number of rows of a group, in which the scores of each reward are normalised before they are summed; None:
        they are not. If given, `texts` has the scores of each text reward by name, NaN for a row that it does not
        judge: that row is in no mean of this reward, and gets 0 from it.
    counts: `finished` -> the mask of the rows whose scores enter moments and groups.
    """
    counted = counts(finished)
    failed = {name: ~jnp.isfinite(scores) for name, scores in learned.items()}
    learned = {name: jnp.where(failed[name], on_failure[name], scores) for name, scores in learned.items()}
    of_texts = texts if isinstance(texts, Mapping) else {}
    parts = {**learned, **of_texts}
    # Rows that a reward does not judge get 0 from it, and one of weight 0, which is only measured, adds nothing.
    zero = {name: jnp.isnan(scores) for name, scores in of_texts.items()}
    zero |= {name: ~jnp.isfinite(scores) for name, scores in parts.items() if not weights[name]}
    addends = {name: jnp.where(zero[name], 0, scores) if name in zero else scores for name, scores in parts.items()}
    rows = sum((weights[name] * scores for name, scores in addends.items()), jnp.zeros_like(finished, jnp.float32))
    scores = rows
    if texts is not None and not isinstance(texts, Mapping):
        scores = texts + (rows if texts.ndim == 1 else on_last_token(rows, response_lengths, texts.shape[1]))
    raw = scores if scores.ndim == 1 else jnp.sum(scores, axis=1)
    if samples is not None:
        normalise, rated = partial(group_advantages, samples=samples, divide_by_std=True), counted & jnp.isfinite(raw)
        normalised = jnp.zeros_like(raw)
        for name, part in parts.items():
            normalised += weights[name] * normalise(part, mask=rated & jnp.isfinite(part))
        scores = jnp.where(jnp.isfinite(raw), normalised, raw)
    shaped, moments, shaping = shape(scores, response_lengths, finished, moments, counted=counted)
    statistics = {}
    for name, own in learned.items():
        failures = jnp.sum(failed[name], dtype=jnp.float32)
        finite = jnp.isfinite(own)  # a row that is excluded has no score
        mean = masked_mean(own, finite)
        deviation = jnp.sqrt(masked_mean(jnp.square(own - mean), finite))
        numbers = {"mean": mean, "std": deviation, "failures": failures, "failures/nan": failures}
        statistics |= named(f"{kind}s/{name}", numbers)
    return Combined(shaped, moments, raw, learned, statistics, extremes(raw), shaping)


@jax.jit
def extremes(scores: Float[Array, "B"]) -> dict[str, Array]:
    """Min, mean and max of the finite scores, and the number of non-finite ones."""
    finite = jnp.isfinite(scores)
    return masked_extremes(scores, finite) | {"nonfinite": jnp.sum(~finite, dtype=jnp.float32)}


def named(name: str, numbers: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{name}/{key}": number for key, number in numbers.items()}
