"""`top_logprobs`: the most likely tokens of each distribution, by tiles over tokens in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import varying
from jrlhf.kernels.logprob.api import check_arrays, head_of, tile_of
from jrlhf.kernels.logprob.common import Head, Statistics, finish, merge
from jrlhf.kernels.logprob.xla import by_tile, logits_of, statistics_of


def top_logprobs(
    hidden: Float[Array, "*N D"],
    unembedding: Float[Array, "V D"],
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    axis_name: str | None = None,
    tile: int | None = None,
    limit: int | None = None,
) -> tuple[Int[Array, "*N k"], Float[Array, "*N k"]]:
    """The `k` most likely tokens of each distribution: (ids int32, log-probabilities float32 in nats).

    The most likely comes first; of tokens with equal logits the lower id. The distributions and the arguments are those
    of `token_logprobs`, with one number as temperature. Results have no gradient, and padding is never among them. At
    most `tile` tokens' logits exist at a time.

    limit: ids from here on are never among the results, though they count in the softmax.

    Vocabulary-parallel as `token_logprobs`: each device sends the `k` best of its slice, or all if it has fewer, to the
    others. The results are the same on all devices of `axis_name`.

    Raises ValueError unless 1 <= k <= vocab_size and k <= limit, and for what `token_logprobs` refuses.
    """
    *tokens, embed = hidden.shape
    check_arrays(hidden, unembedding, jnp.zeros(tokens, jnp.int32))
    head = head_of(unembedding, temperature, softcap, vocab_size, axis_name)
    limit = head.vocab_size if limit is None else min(limit, head.vocab_size)
    if not 1 <= k <= limit:
        raise ValueError(f"k={k} must be between 1 and vocab_size={head.vocab_size}, and at most limit={limit}")
    hidden, unembedding = varying(*map(lax.stop_gradient, (hidden.reshape(-1, embed), unembedding)))

    def best(rows: tuple[Array, Array]) -> tuple[Statistics, Array, Array]:
        return _best_of_slice(*rows, unembedding, min(k, unembedding.shape[0]), head, limit)

    no_targets = jnp.zeros(hidden.shape[:1], jnp.int32)
    statistics, logits, ids = by_tile(best, varying(hidden, no_targets), tile_of(unembedding, tile))
    _, _, normaliser = finish(merge(statistics, axis_name))
    if axis_name is not None:
        # Slices are in the order of their ids, and `top_k` prefers what comes first.
        logits, ids = lax.all_gather((logits, ids), axis_name, axis=1, tiled=True, to="invarying")
        logits, place = lax.top_k(logits, k)
        ids = jnp.take_along_axis(ids, place, axis=1)
    logprobs = jax.tree.map(lambda x: x[:, None], normaliser).log_probs(logits)
    return ids.reshape(*tokens, k), logprobs.reshape(*tokens, k)


def _best_of_slice(
    hidden: Float[Array, "n D"],
    targets: Int[Array, "n"],
    unembedding: Float[Array, "V D"],
    count: int,
    head: Head,
    limit: int,
) -> tuple[Statistics, Float[Array, "n k"], Int[Array, "n k"]]:
    """One tile's statistics, and logits and ids of the best of this device's slice of the vocabulary."""
    tile = logits_of(hidden, unembedding, head)
    logits = tile.capped / head.temperature
    # `top_k` takes 0 for more than -0. Padding is less than any number, and its ids are the last ones.
    logits = jnp.where(logits == 0, 0.0, logits)
    if tile.exists is not None:
        logits = jnp.where(tile.exists, logits, -jnp.inf)
    if limit < head.vocab_size:
        logits = jnp.where(tile.token < limit, logits, -jnp.inf)
    logits, columns = lax.top_k(logits, count)
    return statistics_of(tile, targets, head), logits, columns + head.offset(unembedding)
