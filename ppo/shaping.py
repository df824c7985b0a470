"""Shapes a reward's raw scores for the algorithm: running normalisation, clipping, penalties. Pure and jittable."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrlhf.ppo.config.score import ScoreConfig
from jrlhf.ppo.masked import masked_mean

LARGEST = 1e15  # limit of scores in `RunningMoments`: float32 can hold the sum of 2^24 squares of their differences


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of all scores so far; saved with the run."""

    count: Float[Array, ""]
    mean: Float[Array, ""]
    m2: Float[Array, ""]

    @classmethod
    def create(cls) -> "RunningMoments":
        return cls(*(jnp.zeros((), jnp.float32) for _ in range(3)))

    def add(self, x: Float[Array, "B"]) -> "RunningMoments":
        """Adds elements up to LARGEST; larger ones would dominate forever. Two-pass, as in Chan et al. 1979 (2.1)."""
        fits = jnp.abs(x) <= LARGEST
        x = jnp.where(fits, x, 0).astype(jnp.float32)
        n = jnp.sum(fits).astype(jnp.float32)
        mean = jnp.sum(x) / jnp.maximum(n, 1)
        m2 = jnp.sum(jnp.where(fits, jnp.square(x - mean), 0))
        count = self.count + n
        share = n / jnp.maximum(count, 1)
        delta = mean - self.mean
        return RunningMoments(count, self.mean + delta * share, self.m2 + m2 + jnp.square(delta) * self.count * share)

    @property
    def std(self) -> Float[Array, ""]:
        """The unbiased standard deviation; 1 for fewer than two scores."""
        return jnp.where(self.count >= 2, jnp.sqrt(self.m2 / jnp.maximum(self.count - 1, 1)), 1)


def shape_scores(
    scores: Float[Array, "B"] | Float[Array, "B R"],
    response_lengths: Int[Array, "B"],
    finished: Bool[Array, "B"],
    moments: RunningMoments,
    *,
    config: ScoreConfig,
    max_response: int,
    counted: Bool[Array, "B"] | None = None,
) -> tuple[Float[Array, "B"] | Float[Array, "B R"], RunningMoments, dict[str, Float[Array, ""]]]:
    """Returns shaped scores, the moments updated with this batch, and metrics.

        s <- (s - mean) / max(std, 1e-4 max(1, |mean|))                       normalise: moments of all batches, this
                                                                              one included
        s <- clip(s, -clip, clip)                                             clip: unless the score is not finite
        s <- s - missing_eos_penalty [not finished] - length_penalty n        n response tokens
               - overlong_penalty min(max(n - (L - b), 0), b) / b             b the overlong_buffer, L max_response

    The order: scaling by running moments and then clipping is that of TRL's first PPO (0.11, use_score_scaling,
    use_score_norm, score_clip). Penalties come last: TRL subtracts its missing_eos_penalty from, and verl adds its
    overlong penalty to, the score that enters the advantages, so they are in units of that score. OpenRLHF and AReaL
    clip after their penalties; here a clip guards against outliers of a learned score only, because a penalty that is
    clipped away at the lower bound teaches nothing. The soft overlong punishment is DAPO's (Yu et al. 2025,
    arXiv:2503.14476, eq. 13) with a factor, as in verl and OpenRLHF; its 4096 of 20480 tokens are a buffer of 0.2.

    The floor under the deviation keeps rounding of equal scores from being blown up to order 1.

    Args:
        scores: of whole responses; or of response tokens, the first one at index 0; columns beyond a response are
            ignored. Then the sum of a row is normalised, clipped and penalised: all its tokens get the same scale, and
            the last token gets the rest of the change.
        max_response: L, the limit on response tokens.
        counted: mask of the rows whose scores enter the moments (`PolicyConfig.counts`); None: all.

    Raises ValueError for shapes and lengths that do not fit.
    """
    rows = response_lengths.shape[0]
    if scores.ndim not in (1, 2) or scores.shape[0] != rows or finished.shape != (rows,):
        raise ValueError(f"scores has shape {scores.shape} and finished {finished.shape}, but there are {rows} lengths")
    buffer = config.overlong_tokens(max_response)
    if buffer is not None and buffer > max_response:
        raise ValueError(f"overlong_buffer={buffer}: it must be at most max_response={max_response}")

    scores = scores.astype(jnp.float32)
    tokens = None
    if scores.ndim == 2:
        clock = jnp.arange(scores.shape[1])[None, :]
        tokens = jnp.where(clock < response_lengths[:, None], scores, 0)
        scores = jnp.sum(tokens, axis=1)
    raw, finite, lengths = scores, jnp.isfinite(scores), response_lengths.astype(jnp.float32)
    metrics = {"score/raw/mean": masked_mean(raw, finite)}
    factor = jnp.ones((), jnp.float32)
    if config.normalise:
        moments = moments.add(scores if counted is None else jnp.where(counted, scores, jnp.nan))
        factor = 1 / jnp.maximum(moments.std, 1e-4 * jnp.maximum(1, jnp.abs(moments.mean)))
        scores = (scores - moments.mean) * factor
        metrics |= {"score/running_mean": moments.mean, "score/running_std": moments.std}
        metrics["score/beyond_moments"] = jnp.sum(~(jnp.abs(raw) <= LARGEST), dtype=jnp.float32)
    if config.clip is not None:
        metrics["score/clip_fraction"] = jnp.mean(finite & (jnp.abs(scores) > config.clip), dtype=jnp.float32)
        scores = jnp.where(finite, jnp.clip(scores, -config.clip, config.clip), scores)
    for name, penalty in _penalties(lengths, finished, config, max_response).items():
        metrics[f"score/{name}"] = jnp.mean(penalty)
        scores = scores - penalty
    if tokens is None:
        return scores, moments, metrics
    return tokens * factor + on_last_token(scores - raw * factor, response_lengths, tokens.shape[1]), moments, metrics


def on_last_token(
    scores: Float[Array, "B"], response_lengths: Int[Array, "B"], length: int
) -> Float[Array, "B {length}"]:
    """Places scores of rows at each response's last token, 0 elsewhere."""
    last = jnp.arange(length)[None, :] == response_lengths[:, None] - 1
    return jnp.where(last, scores[:, None], 0)


def align_scores(
    scores: Float[Array, "B R"], prompt_lengths: Int[Array, "B"], length: int
) -> Float[Array, "B {length}"]:
    """Moves scores of response tokens to the positions of the tokens in rows of prompt and response.

    `scores[b, i]` goes to `[b, prompt_lengths[b] + i]` of a row of `length` (T) tokens; scores beyond it are dropped,
    and the prompt's tokens have 0. `make_experience` reads response tokens only.
    """
    source = jnp.arange(length)[None, :] - prompt_lengths[:, None]
    inside = (0 <= source) & (source < scores.shape[1])
    taken = jnp.take_along_axis(scores, jnp.clip(source, 0, scores.shape[1] - 1), axis=1)
    return jnp.where(inside, taken, 0)


def _penalties(
    lengths: Float[Array, "B"], finished: Bool[Array, "B"], config: ScoreConfig, max_response: int
) -> dict[str, Float[Array, "B"]]:
    """The penalties to subtract from each score, by name, without those that are switched off."""
    penalties = {}
    if config.missing_eos_penalty:
        penalties["missing_eos_penalty"] = jnp.where(finished, 0.0, config.missing_eos_penalty)
    if config.length_penalty:
        penalties["length_penalty"] = config.length_penalty * lengths
    if (buffer := config.overlong_tokens(max_response)) is not None:
        exceeding = jnp.clip(lengths - (max_response - buffer), 0, buffer)
        penalties["overlong_penalty"] = config.overlong_penalty * exceeding / buffer
    return penalties
