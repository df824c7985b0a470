"""Losses that replace the policy's: of what was drawn, or of a teacher's most likely tokens.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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


class LossRows(NamedTuple):
    """What a loss of responses reads: a float32 number for each row. Log-probabilities, in nats, are of all its tokens
    together. An empty response has 0 everywhere, and its loss counts nowhere.

    A field is None where there is no such number: of a reference, or of advantages.
    """

    logprobs: Float[Array, "B"]  # under the weights in training
    old_logprobs: Float[Array, "B"]  # before the update; see `Experience`
    ref_logprobs: Float[Array, "B"] | None
    advantages: Float[Array, "B"] | None  # the mean over its tokens
    lengths: Float[Array, "B"]  # number of tokens to learn from


@dataclass(frozen=True)
class OfRows:
    """A loss of whole responses, which `of_rows` makes. Each token of a response has the loss of the response, so
    `aggregation` says how they add up: with "seq-mean-token-mean" to the mean over responses."""

    function: Callable[[LossRows], Float[Array, "B"]]


TokenLoss = Callable[[LossTokens], Float[Array, "*n"]] | OfRows
NO_LOGPROB = -1e4  # of a token that cannot be drawn: finite, with probability 0 in float32


def of_rows(function: Callable[[LossRows], Float[Array, "B"]]) -> OfRows:
    """Decorates a loss of responses: a function of `LossRows` that returns one number for each row.

    A response is computed whole in one micro-batch, without fused sums, as GSPO's. It reads no targets.
    """
    return OfRows(function)


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
    assert not isinstance(loss, OfRows)
    return _checked(loss, tokens, "token")


def loss_of_rows(loss: OfRows, tokens: LossTokens, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The loss of each response at its tokens. mask: those to learn from. Raises as `checked_loss`."""
    lengths = jnp.sum(mask, axis=1, dtype=jnp.float32)

    def total(x: Array | None) -> Any:
        return None if x is None else jnp.sum(jnp.where(mask, x, 0), axis=1)

    advantages = None if tokens.advantages is None else total(tokens.advantages) / jnp.maximum(lengths, 1)
    rows = LossRows(total(tokens.logprobs), total(tokens.old_logprobs), total(tokens.ref_logprobs), advantages, lengths)
    return jnp.where(mask, _checked(loss.function, rows, "row")[:, None], 0)


def _checked(loss: Callable[[Any], Array], given: LossTokens | LossRows, of: str) -> Array:
    result, wanted = loss(given), given.logprobs.shape
    name = f"the loss {getattr(loss, '__name__', '')}".rstrip()
    if not hasattr(result, "shape"):
        raise TypeError(f"{name} returned a {type(result).__name__}, but must return an array of shape {wanted}")
    if result.shape != wanted:
        raise ValueError(f"{name} returned shape {result.shape}, but must return one number for each {of}, {wanted}")
    return result
