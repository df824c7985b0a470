"""Which token is drawn, and with what log-probability."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn.

    max_new_tokens: the length limit R of a response, a stop token included.
    temperature: divides the logits; 0 draws the most likely token, with the log-probabilities of temperature 1.
    top_k: only the k most likely tokens are drawn.
    top_p: only the most likely tokens that together have this probability are drawn; after `top_k`, renormalised.
    min_new_tokens: so many tokens come before a stop token may be drawn.
    stop_ids: a row is finished once it drew one of these, which is part of its response.

    Raises:
        ValueError: a number out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must be between 0 and max_new_tokens={self.max_new_tokens}"
            )
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or null for no limit")


def restrict(logits: Float[Array, "B V"], top_k: int | None, top_p: float | None) -> Float[Array, "B V"]:
    """Sets the logits of tokens that must not be drawn to -inf.

    Keeps the `top_k` largest; of these, by falling probability, the fewest that together reach `top_p` (Holtzman et al.
    2020, section 3.1). The most likely token always stays, and so do tokens that tie with the least likely one kept.
    """
    size = logits.shape[-1]
    kept = size if top_k is None else min(top_k, size)
    if kept == size and (top_p is None or top_p == 1):
        return logits
    best, _ = lax.top_k(logits, kept)
    least = best[:, -1:]
    if top_p is not None and top_p < 1:
        probabilities = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.min(jnp.where(before < top_p, best, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def sample(
    logits: Float[Array, "B V"],
    keys: PRNGKeyArray,
    config: SamplingConfig,
    *,
    vocab_size: int,
    may_stop: Bool[Array, ""],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws one token a row -> (tokens, log-probabilities).

    The log-probability is that of the whole softmax at `temperature`, in float32: `top_k`, `top_p` and `min_new_tokens`
    only decide which token is drawn.

    Args:
        logits: before temperature, float32; columns from vocab_size on are padding and are never drawn.
        keys: one key a row. A row's draw depends on its own key and logits only.
        may_stop: whether stop ids may be drawn at this step.
    """
    token = jnp.arange(logits.shape[-1])[None, :]
    scaled = logits / config.temperature if config.temperature > 0 else logits
    scaled = jnp.where(token < vocab_size, scaled, -jnp.inf)
    allowed = scaled
    if config.min_new_tokens > 0:
        stops = jnp.zeros_like(token, dtype=bool)
        for stop in config.stop_ids:
            stops = stops | (token == stop)
        allowed = jnp.where(stops & ~may_stop, -jnp.inf, scaled)
    if config.temperature > 0:
        drawn = jax.vmap(jax.random.categorical)(keys, restrict(allowed, config.top_k, config.top_p))
    else:
        drawn = jnp.argmax(allowed, axis=-1)
    chosen = jnp.take_along_axis(scaled, drawn[:, None], axis=-1)[:, 0]
    return drawn.astype(jnp.int32), chosen - jax.nn.logsumexp(scaled, axis=-1)
