"""Losses of single tokens that replace the policy's: of what was drawn, or of a teacher's most likely tokens.

A loss is a function of a `LossTokens`, elementwise over tokens of any shape: it gets no mask, weights or denominators,
because the step has them. These losses are ordinary ones; a function of your own may do the same.

With p_s and p_t the student's and the teacher's probabilities of a teacher's K most likely tokens, the two divergences
are those of unnormalised measures (the generalised Kullback-Leibler divergence),

    forward: sum_k p_t (log p_t - log p_s) - p_t + p_s        reverse: sum_k p_s (log p_s - log p_t) - p_s + p_t

Each summand is at least 0, and is 0 only where p_s = p_t. Over the whole vocabulary the last two terms cancel and they
are KL(p_t, p_s) and KL(p_s, p_t). Without these terms the truncated reverse KL could be lowered by moving mass out of
the K tokens, whatever the teacher thinks of the others. What K tokens do not see is the same sum over the rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class LossTokens(NamedTuple):
    """What a loss reads: float32 arrays with an entry for each of some tokens, log-probabilities in nats.

    A field is None where there is no such number: of a reference, of advantages, or of targets.
    """

    logprobs: Float[Array, "*n"]  # of the token under the weights in training
    entropy: Float[Array, "*n"]  # of the distribution from which it comes
    old_logprobs: Float[Array, "*n"]  # before the update; see `Experience`
    ref_logprobs: Float[Array, "*n"] | None
    advantages: Float[Array, "*n"] | None
    student_logprobs: Float[Array, "*n K"] | None  # of the targets' tokens under the weights in training
    target_logprobs: Float[Array, "*n K"] | None  # of the targets' tokens, as given


TokenLoss = Callable[[LossTokens], Float[Array, "*n"]]
NO_LOGPROB = -1e4  # of a token that cannot be drawn: finite, with probability 0 in float32


def imitation(tokens: LossTokens) -> Float[Array, "*n"]:
    """-log pi of the token itself: supervised learning on what was drawn, such as the best of several answers (RAFT,
    Dong et al. 2023, arXiv:2304.06767)."""
    return -tokens.logprobs


def forward_kl(tokens: LossTokens) -> Float[Array, "*n"]:
    """The generalised KL(teacher, student) over the targets, which spreads the student over all that the teacher may
    say. Raises ValueError without targets."""
    student, teacher = _of_targets(tokens, "forward_kl")
    return jnp.sum(jnp.exp(teacher) * (teacher - student) - jnp.exp(teacher) + jnp.exp(student), axis=-1)


def reverse_kl(tokens: LossTokens) -> Float[Array, "*n"]:
    """The generalised KL(student, teacher) over the targets: on-policy distillation with the student's own texts
    (Agarwal et al. 2024, arXiv:2306.13649), where it makes the student avoid what the teacher would not say. Raises
    ValueError without targets."""
    student, teacher = _of_targets(tokens, "reverse_kl")
    return jnp.sum(jnp.exp(student) * (student - teacher) - jnp.exp(student) + jnp.exp(teacher), axis=-1)


def _of_targets(tokens: LossTokens, name: str) -> tuple[Float[Array, "*n K"], Float[Array, "*n K"]]:
    if tokens.student_logprobs is None or tokens.target_logprobs is None:
        raise ValueError(f"{name} compares with targets, and there are none: pass those of teacher.top_logprobs")
    return tokens.student_logprobs, tokens.target_logprobs


def checked_loss(loss: TokenLoss, tokens: LossTokens) -> Float[Array, "*n"]:
    """The loss of each token. Raises TypeError or ValueError for a result of another class or shape."""
    result, wanted = loss(tokens), tokens.logprobs.shape
    name = f"the loss {getattr(loss, '__name__', '')}".rstrip()
    if not hasattr(result, "shape"):
        raise TypeError(f"{name} returned a {type(result).__name__}, but must return an array of shape {wanted}")
    if result.shape != wanted:
        raise ValueError(f"{name} returned shape {result.shape}, but must return one number for each token, {wanted}")
    return result
