"""Draws the next token of each row, with its log-probability."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from jrlhf.models.config.checks import is_count, positive
from jrlhf.models.generation.stops import StopTable
from jrlhf.models.generation.truncation import restrict

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@dataclass(frozen=True)
class SamplingConfig:
    """The settings with which responses are drawn.

    max_new_tokens: the length limit R of a response, a stop token included.
    temperature: divides the logits; 0 draws the most likely token, with the log-probabilities of temperature 1.
    top_k: only the k most likely tokens are drawn.
    top_p: only the most likely tokens that together have this probability are drawn; after `top_k`, renormalised.
    min_p: only tokens with at least this share of the most likely token's probability are drawn.
    min_new_tokens: number of tokens before a stop token may be drawn.
    stop_ids: a row is finished once it drew one of these, which is part of its response.
    stops: finds stop strings in the drawn tokens (`stop_table`). A row is finished by the token that completes one of
        them, which is part of its response; strings that are completed before `min_new_tokens` tokens finish nothing.
    token_limit: ids from this one on are never drawn: the tokenizer has no tokens for these rows of the model's table.

    Raises ValueError for numbers out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stops: StopTable | None = None
    token_limit: int | None = None

    def __post_init__(self) -> None:
        if not is_count(self.max_new_tokens):
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} must be an integer of at least 1")
        least = self.min_new_tokens
        if not (is_count(least) or least == 0) or least > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={least!r} must be an integer between 0 and max_new_tokens={self.max_new_tokens}"
            )
        if not (self.temperature == 0 or positive(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive and finite")
        if self.top_k is not None and not is_count(self.top_k):
            raise ValueError(f"top_k={self.top_k!r} must be an integer of at least 1, or null for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or null for no limit")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be above 0 and at most 1, or null for no limit")
        if self.token_limit is not None:
            if not is_count(self.token_limit):
                raise ValueError(f"token_limit={self.token_limit!r} must be an integer of at least 1, or null for none")
            for stop in self.stop_ids:
                if stop >= self.token_limit:
                    raise ValueError(f"stop id {stop} is never drawn: it must be below token_limit={self.token_limit}")

    @property
    def restricted(self) -> bool:
        """`top_k`, `top_p` or `min_p` leaves tokens out."""
        return self.temperature > 0 and any(one is not None for one in (self.top_k, self.top_p, self.min_p))


def largest(x: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The index of each row's largest number, the first of several; 0 where one is NaN.

    Two plain reductions, which every compiler vectorises, unlike argmax's of pairs.
    """
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    # "Not less" rather than "equal", so that a NaN, which compares to nothing, still gives an index.
    return jnp.min(jnp.where(~(x < jnp.max(x, axis=-1, keepdims=True)), index, x.shape[-1]), axis=-1)


def sample(
    logits: Float[Array, "B V"],
    keys: PRNGKeyArray,
    config: SamplingConfig,
    *,
    vocab_size: int,
    may_stop: Bool[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws one token a row -> (tokens, log-probabilities).

    The log-probability is that of the whole softmax at `temperature`, in float32: `top_k`, `top_p`, `min_p`,
    `min_new_tokens` and `token_limit` only decide which token is drawn.

    logits: before temperature, float32; columns from vocab_size on are padding and are never drawn.
    keys: one key a row. A row's draw depends on its own key and logits only.
    may_stop: whether a row's stop ids may be drawn.
    """
    scaled, possible = drawable(logits, config, vocab_size, may_stop)
    allowed = restrict(possible, config.top_k, config.top_p, config.min_p) if config.restricted else possible
    if config.temperature > 0:
        # The largest of logits plus Gumbel noise is a draw from their softmax, as in jax.random.categorical.
        allowed = allowed + gumbel(keys, logits.shape[-1])
    drawn = largest(allowed)
    chosen = jnp.take_along_axis(scaled, drawn[:, None], axis=-1)[:, 0]
    return drawn, chosen - jax.nn.logsumexp(scaled, axis=-1)


def drawable(
    logits: Float[Array, "B V"], config: SamplingConfig, vocab_size: int, may_stop: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """Returns the logits at the temperature, and these with -inf for tokens that must not be drawn."""
    token = jnp.arange(logits.shape[-1])[None, :]
    scaled = logits / config.temperature if config.temperature > 0 else logits
    scaled = allowed = jnp.where(token < vocab_size, scaled, -jnp.inf)
    if config.token_limit is not None and config.token_limit < vocab_size:
        allowed = jnp.where(token < config.token_limit, allowed, -jnp.inf)
    if config.min_new_tokens > 0:
        allowed = jnp.where(is_stop(token, config) & ~may_stop[:, None], -jnp.inf, allowed)
    return scaled, allowed


def is_stop(token: Int[Array, "*S"], config: SamplingConfig) -> Bool[Array, "*S"]:
    stops = jnp.zeros_like(token, dtype=bool)
    for stop in config.stop_ids:
        stops = stops | (token == stop)
    return stops


def gumbel(keys: PRNGKeyArray, size: int) -> Float[Array, "B size"]:
    """Standard Gumbel numbers, float32: row b's are jax.random.gumbel(keys[b], (size,)).

    JAX's generator is a separate operation (on CPUs with a loop) that writes its bits to memory. For a whole vocabulary
    per row and step this takes a third of the time of decoding with a small model. XLA fuses the code written out here.
    """
    data = jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys
    if data.shape[-1] != 2 or not jax.config.jax_threefry_partitionable:  # pyright: ignore  # another generator
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)
    count = jnp.arange(size, dtype=jnp.uint32)[None, :]
    first, second = threefry2x32((data[:, :1], data[:, 1:]), (jnp.zeros_like(count), count))
    # 23 bits as the mantissa of a number in [1, 2), less 1; never 0, whose logarithm is infinite.
    mantissa = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniform * (1 - tiny) + tiny)))


def threefry2x32(
    key: tuple[UInt32[Array, "#*S"], UInt32[Array, "#*S"]], count: tuple[UInt32[Array, "#*S"], UInt32[Array, "#*S"]]
) -> tuple[UInt32[Array, "*S"], UInt32[Array, "*S"]]:
    """The Threefry-2x32 block cipher of 20 rounds (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3)."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = count[0] + keys[0], count[1] + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
