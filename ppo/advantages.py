"""Advantages of whole responses relative to their group. `token_advantages.py` has advantages of single tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrlhf.meshes.rows import whole
from jrlhf.ppo.config.policy import Baseline

GROUP_EPSILON = 1e-6


@jax.named_scope("advantages")
def group_advantages(
    scores: Float[Array, "B"],
    samples: int,
    *,
    baseline: Baseline = "mean",
    divide_by_std: bool,
    mask: Bool[Array, "B"] | None = None,
) -> Float[Array, "B"]:
    """Compares each response's score with those of the other responses to its prompt; row = prompt * samples + sample.

        A_i = s_i - b_i        b_i = mean of the group ("mean"), or of its other members ("leave-one-out")
        A_i / (std + 1e-6)     with divide_by_std

    (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; Ahmadian et al. 2024, arXiv:2402.14740, eq. 6.) The deviation is
    the group's unbiased one and its epsilon verl's, where TRL has 1e-4 and OpenRLHF 1e-9. A group with a single member
    has advantage 0 (verl's "grpo" and "rloo": the raw score).

    Equal scores have advantage exactly 0, and a deviation that is rounding is not divided by: see `masked_whiten`.

    mask: rows that count; the others are in no mean and have advantage 0. None: all.
    """
    grouped, counted = _groups(scores, samples, mask)
    count = jnp.sum(counted, axis=1, keepdims=True).astype(grouped.dtype)
    # Differences to the largest score are exact where scores are nearly equal; their mean is subtracted afterwards.
    largest = jnp.max(jnp.where(counted, grouped, -jnp.inf), axis=1, keepdims=True)
    differences = jnp.where(counted, grouped - largest, 0)
    mean = jnp.sum(differences, axis=1, keepdims=True) / jnp.maximum(count, 1)
    advantages = jnp.where(counted, differences - mean, 0)
    if divide_by_std:
        variance = jnp.sum(jnp.square(advantages), axis=1, keepdims=True) / jnp.maximum(count - 1, 1)
        std = jnp.sqrt(variance)
        scale = jnp.max(jnp.where(counted, jnp.abs(grouped), 0), axis=1, keepdims=True)
        rounding = std <= 4 * float(jnp.finfo(grouped.dtype).eps) * scale  # False for NaN, which must not become 0
        advantages = jnp.where(rounding, 0, advantages / (std + GROUP_EPSILON))
    if baseline == "leave-one-out":
        advantages = advantages * (count / jnp.maximum(count - 1, 1))
    # A single member is no group, whatever its score.
    advantages = jnp.where(count > 1, advantages, jnp.zeros_like(advantages))
    # Zeros that are made from the scores tell the compiler to divide the result over devices as they are.
    return advantages.reshape(-1) + jnp.zeros_like(scores, grouped.dtype)


def group_spread(
    scores: Float[Array, "B"], samples: int, mask: Bool[Array, "B"] | None = None
) -> tuple[Float[Array, "G"], Bool[Array, "G"]]:
    """Each group's unbiased standard deviation, and whether its scores are all equal; only rows in `mask` count.

    A group with fewer than two rows that count has deviation 0 and counts as equal: nothing is learned from it, either.
    """
    grouped, counted = _groups(scores, samples, mask)
    count = jnp.sum(counted, axis=1)
    largest = jnp.max(jnp.where(counted, grouped, -jnp.inf), axis=1)
    equal = (count < 2) | (largest == jnp.min(jnp.where(counted, grouped, jnp.inf), axis=1))
    number = count.astype(grouped.dtype)[:, None]
    mean = jnp.sum(jnp.where(counted, grouped, 0), axis=1, keepdims=True) / jnp.maximum(number, 1)
    squares = jnp.where(counted, jnp.square(grouped - mean), 0)
    std = jnp.sqrt(jnp.sum(squares, axis=1) / jnp.maximum(number[:, 0] - 1, 1))
    return jnp.where(equal, 0, std), equal


def best_of_group(scores: Float[Array, "B"], samples: int, mask: Bool[Array, "B"] | None = None) -> Bool[Array, "B"]:
    """Marks the row with the highest score of each group, the first one of equals; a group without any row in `mask`,
    or without a finite score, has none."""
    grouped, counted = _groups(scores, samples, mask)
    counted &= jnp.isfinite(grouped)
    best = jnp.argmax(jnp.where(counted, grouped, -jnp.inf), axis=1)
    chosen = counted & (jnp.arange(samples)[None, :] == best[:, None])
    return chosen.reshape(-1) & (scores == scores)  # divided over devices as the scores are; a NaN is never chosen


def group_sums(x: Float[Array, "B"], samples: int) -> Float[Array, "B"]:
    """The sum of `x` over all rows of each row's group."""
    grouped, _ = _groups(x, samples, None)
    return jnp.repeat(jnp.sum(grouped, axis=1), samples) + jnp.zeros_like(x)


def _groups(scores: Array, samples: int, mask: Array | None) -> tuple[Array, Array]:
    """Scores and the rows that count, [B] -> [B / samples, samples], gathered: several devices may share a group."""
    if scores.ndim != 1:
        raise ValueError(f"scores have shape {scores.shape}, but one number for each row is expected")
    if scores.shape[0] % samples:
        raise ValueError(f"{scores.shape[0]} rows do not divide into groups of samples={samples}")
    counted = jnp.ones(scores.shape, jnp.bool_) if mask is None else whole(mask)
    grouped = whole(scores).reshape(-1, samples)
    floats = grouped if jnp.issubdtype(scores.dtype, jnp.floating) else grouped.astype(jnp.float32)
    return floats, counted.reshape(-1, samples)
