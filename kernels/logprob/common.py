"""Shared by all implementations: the head's numbers, the logit's transform, and the reductions over the vocabulary.

One token's quantities over the vocabulary, or over one slice of it, are four numbers, computed online:

    maximum = max_v z_v     total = Σ_v e^{z_v − maximum}     weighted = Σ_v e^{z_v − maximum} (z_v − maximum)
    label   = z_y where the slice holds the target y, else 0

Slices merge exactly. With M the maximum of maxima, total and weighted of a slice are rescaled by e^{maximum − M}:

    log p_v = (z_v − M) − log Σ total     z_y = Σ label     entropy = log Σ total − Σ weighted / Σ total

M and log Σ total stay two numbers: float32 holds their sum only to 2^-10 where logits reach 2^14, and e^{…} turns that
into the same relative error of every probability.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Stands for −inf among logits: e^{MASKED − m} is exactly 0 in float32, and no inf − inf can arise where a whole slice
# is padding. It is far enough from the largest float32 that products with it stay finite.
MASKED = -1e30


Terms = Callable[[Array, Array, Any], tuple[Array, dict[str, Array]]]
"""(logprobs [n] or [n, K], entropy [n], data of these tokens) -> (loss [n], {name: [n]}): see `token_sums`."""


@dataclass(frozen=True)
class Head:
    """The static numbers of one call; see `token_logprobs` for their meaning."""

    temperature: float
    softcap: float | None
    vocab_size: int
    axis_name: str | None

    def offset(self, unembedding: Array) -> int | Array:
        """The global index of the first row of this device's vocabulary slice."""
        return 0 if self.axis_name is None else lax.axis_index(self.axis_name) * unembedding.shape[0]

    def padded(self, unembedding: Array) -> bool:
        """True if any row of the vocabulary, on any device of the axis, is padding."""
        slices = 1 if self.axis_name is None else lax.axis_size(self.axis_name)
        return self.vocab_size < slices * unembedding.shape[0]

    def in_slice(self, unembedding: Array, targets: Array) -> tuple[Int[Array, "1"], Int[Array, "N"]]:
        """The first padding row of this device's vocabulary slice, and the targets as row numbers in the slice."""
        offset = self.offset(unembedding)
        limit = jnp.full((1,), jnp.minimum(self.vocab_size - offset, unembedding.shape[0]), jnp.int32)
        return limit, targets.astype(jnp.int32) - offset


class Statistics(NamedTuple):
    """One token's reductions over a vocabulary slice (see the module's text), float32."""

    maximum: Float[Array, "N"]
    total: Float[Array, "N"]
    weighted: Float[Array, "N"]
    label: Float[Array, "N"] | Float[Array, "N K"]  # like the targets


def cap(products: Float[Array, "..."], head: Head) -> Float[Array, "..."]:
    """h·w -> the logit before temperature: softcap·tanh(h·w / softcap)."""
    return products if head.softcap is None else head.softcap * jnp.tanh(products / head.softcap)


def merge(statistics: Statistics, axis_name: str | None) -> Statistics:
    """Merges the vocabulary slices of the devices along `axis_name`; the result is the same on all of them."""
    if axis_name is None:
        return statistics
    maximum = lax.pmax(statistics.maximum, axis_name)
    shift = statistics.maximum - maximum
    scale = jnp.exp(shift)
    total, weighted, label = lax.psum(
        (statistics.total * scale, (statistics.weighted + statistics.total * shift) * scale, statistics.label),
        axis_name,
    )
    return Statistics(maximum, total, weighted, label)


class Normaliser(NamedTuple):
    """One token's softmax over the whole vocabulary, float32: log p_v = (z_v − maximum) − log_total."""

    maximum: Float[Array, "..."]
    log_total: Float[Array, "..."]

    def log_probs(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns log-probabilities of logits, which broadcast with the token's numbers."""
        return (logits - self.maximum) - self.log_total


def finish(statistics: Statistics) -> tuple[Float[Array, "N *K"], Float[Array, "N"], Normaliser]:
    """Merged statistics -> (log-probabilities, entropies, normalisers)."""
    normaliser = Normaliser(statistics.maximum, jnp.log(statistics.total))
    entropy = normaliser.log_total - statistics.weighted / statistics.total
    of_token = normaliser if statistics.label.ndim == 1 else jax.tree.map(lambda x: x[:, None], normaliser)
    return of_token.log_probs(statistics.label), entropy, normaliser


def gradient_of_products(
    capped: Float[Array, "..."],
    d_label: Float[Array, "..."],
    exists: Bool[Array, "..."] | None,
    normaliser: Normaliser,
    entropy: Float[Array, "..."],
    d_logprob: Float[Array, "..."],
    d_entropy: Float[Array, "..."] | None,
    head: Head,
) -> Float[Array, "..."]:
    """dL/d(h·w) of a block of tokens and vocabulary, in either orientation: arrays of tokens broadcast.

    With p = softmax(z), cotangents g of the log-probability and e of the entropy H:

        dL/dz_v = g (1[v = y] − p_v) − e p_v (log p_v + H)

    capped: the logits before temperature. d_label: g where the vocabulary's row is the token's target, else 0. exists:
    False for rows of padding; None: all exist. d_logprob: g. d_entropy: None for e = 0. For several targets of a token
    d_label and d_logprob are sums over them.
    """
    log_p = normaliser.log_probs(capped / head.temperature)
    p = jnp.exp(log_p)
    if exists is not None:
        p = jnp.where(exists, p, 0.0)
    factor = d_logprob if d_entropy is None else d_logprob + d_entropy * (log_p + entropy)
    d_products = (d_label - p * factor) / head.temperature
    if head.softcap is not None:
        d_products = d_products * (1.0 - jnp.square(capped / head.softcap))
    return d_products


def evaluate(terms: Terms, logprobs: Array, entropy: Array, data: Any) -> tuple[Array, dict[str, Array]]:
    """Evaluates `terms` for some tokens, in float32; its metrics have no gradient."""
    loss, metrics = terms(logprobs, entropy, data)
    for name, x in [("the loss", loss), *metrics.items()]:
        if x.shape != entropy.shape:
            raise ValueError(f"terms returned {name} of shape {x.shape} for tokens of shape {entropy.shape}")
    metrics = {name: lax.stop_gradient(x.astype(jnp.float32)) for name, x in metrics.items()}
    return loss.astype(jnp.float32), metrics


def once(x: Array, axis_name: str | None) -> Array:
    """Makes `x`, which all devices of the axis have computed alike, unvarying over the axis in its type."""
    if axis_name is None or axis_name not in jax.typeof(x).manual_axis_type.varying:
        return x
    return lax.psum(jnp.where(lax.axis_index(axis_name) == 0, x, 0.0), axis_name)


def in_vocabulary(targets: Int[Array, "N *K"], head: Head) -> Bool[Array, "N *K"]:
    """True for targets that exist. The others have probability 0, and no gradient."""
    return (targets >= 0) & (targets < head.vocab_size)
