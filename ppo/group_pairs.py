"""`pairs_of_group`: the best and the worst response to each prompt, as a pair to learn from (online DPO)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jrlhf.meshes.rows import in_groups
from jrlhf.ppo.masked import masked_sum
from jrlhf.ppo.supervised import PairBatch
from jrlhf.ppo.types import Experience


def pairs_of_group(experience: Experience, samples: int) -> PairBatch:
    """The responses with the highest and the lowest score of each group of `samples` rows; of equal ones the first.

    Guo et al. 2024 (arXiv:2402.04792) rank two responses by an annotator; here the scores rank all of a group. The
    rows that count are those with a token to learn from. A group in which all of them have one score has no pair: its
    lengths are 0, so `make_pair_step` leaves it out.

    Returns one pair per group, with the reference's log-probs if the experience has them.
    """
    counted = in_groups(jnp.any(experience.response_mask, axis=1), samples)
    scores = in_groups(experience.scores, samples)
    highest, lowest = (jnp.where(counted, scores, worst) for worst in (-jnp.inf, jnp.inf))
    best, worst = (_only(jnp.argmax(x, axis=1), samples) for x in (highest, -lowest))
    exists = jnp.max(highest, axis=1) > jnp.min(lowest, axis=1)

    def chosen(x: Array, rows: Bool[Array, "G S"]) -> Array:
        mask = rows if x.ndim == 1 else rows[..., None]
        return jnp.sum(jnp.where(mask, in_groups(x, samples), 0), axis=1, dtype=x.dtype)

    lengths = jnp.where(counted & exists[:, None], in_groups(experience.lengths, samples), 0)
    refs = None, None
    if experience.ref_logprobs is not None:
        sums = masked_sum(experience.ref_logprobs, experience.response_mask, axis=1)
        refs = chosen(sums, best), chosen(sums, worst)
    sides = [(chosen(experience.tokens, rows), jnp.sum(jnp.where(rows, lengths, 0), axis=1)) for rows in (best, worst)]
    return PairBatch(*sides[0], *sides[1], chosen(experience.prompt_lengths, best), *refs)


def _only(index: Array, size: int) -> Bool[Array, "G {size}"]:
    return jnp.arange(size)[None, :] == index[:, None]
