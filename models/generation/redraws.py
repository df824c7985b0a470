"""Draws tokens again from the logits of a scoring pass, to see whether they were drawn as the settings say."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.models.collectives import TENSOR
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.generation.sampling import SamplingConfig, drawable, gumbel
from jrlhf.models.generation.truncation import least_kept

ROUNDING = 2.0  # another program of the compute dtype may round this many times as much as the scoring pass
HOPELESS = 30.0  # nats below the most likely token; two of float32's Gumbel numbers differ by at most 20.5


class Redraws(NamedTuple):
    """Tokens to draw again, K of each row: with fold_in(its key, position), as decoding does."""

    keys: Any  # [B, ...]: data of the rows' PRNG keys
    prompt_lengths: Any  # [B]
    at: Any  # [B, K]: positions
    rounding: Any  # of scores, in nats, at least
    rounded: Any = None  # [B, K, V]: logits there, by a pass of the compute dtype; None: there is no more rounding


def differ(
    config: ModelConfig,
    sampling: SamplingConfig,
    logits: Float[Array, "b K v"],
    tokens: Int[Array, "b T"],
    redraws: Redraws,
) -> Bool[Array, "b K"]:
    """Whether the token's score falls short of that of the token drawn again by more than rounding (`shortfall`).

    Rounding is measured at the place itself: log-probabilities of likely tokens tell little of it, because they hardly
    change when the logits do. It is added to `redraws.rounding`: a false alarm ends a run, while a missed fault shows
    at another token.
    """

    def whole(logits: Float[Array, "b K v"]) -> Float[Array, "b*K V"]:
        return lax.all_gather(logits.reshape(-1, logits.shape[-1]), TENSOR, axis=1, tiled=True)

    may_stop = (redraws.at - redraws.prompt_lengths[:, None] >= sampling.min_new_tokens).reshape(-1)
    allowed: dict[str, Any] = {"vocab_size": config.vocab_size, "may_stop": may_stop}
    logits, rounding = whole(logits), jnp.broadcast_to(redraws.rounding, may_stop.shape)
    if redraws.rounded is not None:
        rounding += ROUNDING * spread(logits, whole(redraws.rounded), sampling, **allowed)
    keys = jax.vmap(lambda key, at: jax.vmap(partial(jax.random.fold_in, jax.random.wrap_key_data(key)))(at))
    short = shortfall(
        tokens[jnp.arange(tokens.shape[0])[:, None], redraws.at].reshape(-1),
        logits,
        keys(redraws.keys, redraws.at).reshape(-1),
        sampling,
        **allowed,
        rounding=rounding,
    )
    return lax.pmax((short - rounding).reshape(redraws.at.shape), TENSOR) > 0  # all have the same


def shortfall(
    drawn: Int[Array, "B"],
    logits: Float[Array, "B V"],
    keys: PRNGKeyArray,
    config: SamplingConfig,
    *,
    vocab_size: int,
    may_stop: Bool[Array, "B"],
    rounding: Float[Array, ""] | Float[Array, "B"],
) -> Float[Array, "B"]:
    """Returns how much lower the score (logit plus noise) of a drawn token is than that of `sample`'s token, in nats.

    It is at most `rounding` if `sample` drew the token from logits that differ from these by at most half of `rounding`
    after division by the temperature. A number by which all logits differ does not count. It is infinite if the token
    must not be drawn. If `top_k`, `top_p` or `min_p` leaves the token out for all such logits, it is more than
    `rounding`. Tokens that only some of them keep are no better ones. The other arguments are those of
    `sampling.sample`.
    """
    _, possible = drawable(logits, config, vocab_size, may_stop)
    noise = gumbel(keys, logits.shape[-1]) if config.temperature > 0 else jnp.zeros_like(logits)
    own, score = (jnp.take_along_axis(x, drawn[:, None], axis=-1)[:, 0] for x in (possible, possible + noise))
    rounding = jnp.broadcast_to(rounding, drawn.shape)[:, None]
    sure, missing = possible, jnp.where(jnp.isneginf(own), jnp.inf, -jnp.inf)
    if config.restricted:
        odds = jnp.exp(jnp.minimum(rounding, 20.0))  # more would not be finite
        limits = config.top_k, config.top_p, config.min_p
        fewest, most = (least_kept(possible, *limits, odds=one) for one in (1 / odds, odds))
        if fewest is not None and most is not None:
            sure = jnp.where(possible > fewest + rounding, possible, -jnp.inf)
            missing = jnp.maximum(missing, most[:, 0] - own)
    best = jnp.max(sure + noise, axis=-1)  # -inf if no token is kept in any case
    return jnp.maximum(jnp.where(jnp.isneginf(best), best, best - score), missing)


def spread(
    logits: Float[Array, "B V"],
    others: Float[Array, "B V"],
    config: SamplingConfig,
    *,
    vocab_size: int,
    may_stop: Bool[Array, "B"],
) -> Float[Array, "B"]:
    """Returns the largest difference of two tokens' changes from `logits` to `others`, at the temperature, in nats.

    A change that all tokens share changes no draw. Tokens that cannot be drawn from either of the logits do not count:
    those that must not be drawn, and those `HOPELESS` nats below the most likely one. The other arguments are those of
    `sampling.sample`.
    """
    (before, allowed), (after, also) = (drawable(x, config, vocab_size, may_stop) for x in (logits, others))
    near = jnp.logical_or(*(x > jnp.max(x, axis=-1, keepdims=True) - HOPELESS for x in (allowed, also)))
    most, least = jnp.where(near, after - before, -jnp.inf), jnp.where(near, after - before, jnp.inf)
    return jnp.max(most, axis=-1) - jnp.min(least, axis=-1)
