"""The specification: dense float32 logits, plain autodiff. Read it first: every implementation is tested against it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import varying
from jrlhf.kernels.logprob.common import Head, cap, in_vocabulary


def token_logprobs(
    hidden: Float[Array, "N D"], unembedding: Float[Array, "V D"], targets: Int[Array, "N *K"], head: Head
) -> tuple[Float[Array, "N *K"], Float[Array, "N"]]:
    """Log-probabilities of `targets` [N] or [N, K] and entropies; holds `[N, V]` float32 logits."""
    hidden, unembedding, targets = varying(hidden, unembedding, targets)
    products = jnp.dot(hidden.astype(jnp.float32), unembedding.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    token = head.offset(unembedding) + jnp.arange(unembedding.shape[0])[None, :]
    logits = jnp.where(token < head.vocab_size, cap(products, head) / head.temperature, -jnp.inf)

    exists = token < head.vocab_size

    def over_devices(partial: Array) -> Array:
        return partial if head.axis_name is None else lax.psum(partial, head.axis_name)

    maximum = lax.stop_gradient(jnp.max(logits, axis=-1))
    if head.axis_name is not None:
        maximum = lax.pmax(maximum, head.axis_name)
    shifted = logits - maximum[:, None]  # `maximum + log_total` would lose digits where logits are large
    log_total = jnp.log(over_devices(jnp.sum(jnp.exp(shifted), axis=-1)))
    log_p = jnp.where(exists, shifted - log_total[:, None], 0.0)
    hit = token[None] == (targets if targets.ndim == 2 else targets[:, None])[:, :, None]
    label = jnp.sum(jnp.where(hit, log_p[:, None], 0.0), axis=-1).reshape(targets.shape)
    logprobs = over_devices(jnp.where(in_vocabulary(targets, head), label, -jnp.inf))
    entropy = -over_devices(jnp.sum(jnp.where(exists, jnp.exp(log_p) * log_p, 0.0), axis=-1))
    return logprobs, entropy
