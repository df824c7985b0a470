"""`absorb`: the online reduction over blocks of the vocabulary that the Pallas kernels share."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jrlhf.kernels.logprob.common import Statistics


def absorb(
    statistics: Statistics, logits: Array, hits: Array, *, columns: Callable[[Array], Array] | None = None
) -> Statistics:
    """Adds one more block of logits, whose second axis is the vocabulary, to the statistics.

    hits: where a column is the token's target. columns: adds a column axis to a statistic; None: they have one, of
        size 1.
    """
    maximum, total, weighted, label = statistics
    by_token: dict[str, Any] = {"axis": 1, "keepdims": columns is None}
    current = jnp.maximum(maximum, jnp.max(logits, **by_token))
    shift = maximum - current
    scale = jnp.exp(shift)
    shifted = logits - (current if columns is None else columns(current))
    weights = jnp.exp(shifted)
    return Statistics(
        current,
        total * scale + jnp.sum(weights, **by_token),
        (weighted + total * shift) * scale + jnp.sum(weights * shifted, **by_token),
        label + jnp.sum(jnp.where(hits, logits, 0.0), **by_token),
    )
