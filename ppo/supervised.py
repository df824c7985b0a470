"""Jitted steps that learn from texts and pairs: imitation (SFT), preferences for a reward model, losses of pairs (DPO).

They are called like those of `steps.py`: (state, batch, *frozen) -> (state, metrics), one update. They donate the
state. Metrics include PREFIX/grad_norm, PREFIX/skipped_updates (1: something was not finite or no token counted, so
nothing was applied) and PREFIX/nonfinite_updates (1: something was not finite). A step raises ValueError when it is
first called with rows that do not divide into its micro-batches.

The model computes both sequences of all pairs in one call of 2B rows, pair by pair, so that sharded weights are
gathered once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jrlhf.meshes.by_length import ByLength, row_ends
from jrlhf.meshes.rows import check_divisible, in_groups, interleave
from jrlhf.ppo.config.algorithms import DPOConfig
from jrlhf.ppo.config.policy import check_one_division
from jrlhf.ppo.masked import masked_sum, token_count
from jrlhf.ppo.steps import LogprobFn, SumsFn, sums_of
from jrlhf.ppo.types import SFTBatch, TrainState, check_shapes
from jrlhf.ppo.updates import (
    Metrics,
    Minibatch,
    Objective,
    Pipeline,
    Step,
    Update,
    Updates,
    check_output,
    make_step,
)

PyTree = Any
ScoreFn = Callable[..., Float[Array, "B"]]
"""(params, tokens [B, T], lengths [B], *frozen) -> scores of the whole sequences."""
_REWARD_MODEL = ("loss", "accuracy", "margin")
_DPO = (
    "dpo/loss",
    *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")),
    "logps/chosen",
    "logps/rejected",
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PreferenceBatch:
    """Pairs of sequences (prompt and response together); an annotator preferred the first."""

    chosen: Int[Array, "B T"]
    chosen_lengths: Int[Array, "B"]
    rejected: Int[Array, "B T"]
    rejected_lengths: Int[Array, "B"]

    @property
    def tokens(self) -> Int[Array, "2*B T"]:
        """Both sequences of every pair, pair by pair, chosen first."""
        return interleave(self.chosen, self.rejected)

    @property
    def lengths(self) -> Int[Array, "2*B"]:
        """The lengths of the rows of `tokens`, prompt and response together."""
        return interleave(self.chosen_lengths, self.rejected_lengths)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PairBatch(PreferenceBatch):
    """Pairs of answers to one prompt each, the preferred one first, for DPO.

    ref_chosen, ref_rejected: sum of the reference's log-probs over each response; None: not computed yet
        (`with_reference` adds them).
    """

    prompt_lengths: Int[Array, "B"]  # the first tokens of both sequences
    ref_chosen: Float[Array, "B"] | None = None
    ref_rejected: Float[Array, "B"] | None = None

    @property
    def response_mask(self) -> Bool[Array, "2*B T"]:
        """The response tokens of `tokens`. Index 0 has no log-probability and never counts."""
        start = jnp.maximum(interleave(self.prompt_lengths, self.prompt_lengths), 1)[:, None]
        time = jnp.arange(self.chosen.shape[1])[None, :]
        return (start <= time) & (time < self.lengths[:, None])


class PairLogprobs(NamedTuple):
    """What a loss of pairs reads: the log-probabilities of the two responses of each pair, sums over their tokens.

    A field of the reference is None without one.
    """

    chosen: Float[Array, "*n"]  # under the weights in training
    rejected: Float[Array, "*n"]
    ref_chosen: Float[Array, "*n"] | None
    ref_rejected: Float[Array, "*n"] | None
    chosen_tokens: Float[Array, "*n"]  # lengths of the responses
    rejected_tokens: Float[Array, "*n"]


PairLoss = Callable[[PairLogprobs], Float[Array, "*n"]]
"""The loss of each pair. Both responses of a pair are in one micro-batch."""


def make_sft_step(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    *,
    sums_fn: SumsFn | None = None,
    micro_batches: int = 1,
    micro_batch_tokens: int | None = None,
    pipeline: Pipeline | None = None,
) -> Step[TrainState, SFTBatch]:
    """Makes an imitation step: one update on the mean of -log pi over the tokens of an `SFTBatch` in its `loss_mask`.

    logprob_fn: (params, tokens [B, T], *frozen) -> (log-probabilities, entropies), [B, T] each.
    Metrics: sft/loss (nats per token), sft/entropy.

    sums_fn: computes the same loss without `logprob_fn`, as in `make_actor_step`.
    micro_batch_tokens: number of tokens per part and device, in place of `micro_batches`, as in `PPOConfig`.
    """
    check_one_division(micro_batches, micro_batch_tokens)

    sums = sums_of(logprob_fn) if sums_fn is None else sums_fn

    def loss_fn(params: PyTree, rows: SFTBatch, count: Array, *frozen: PyTree) -> tuple[Array, Metrics]:
        loss, metrics = sums(params, rows.tokens, rows.loss_mask, _imitation_terms, *frozen)
        return loss / count, {"loss": loss / count, "entropy": metrics["entropy"] / count}

    objective = Objective(loss_fn, optimizer, ("loss", "entropy"))

    def step(state: TrainState, batch: SFTBatch, *frozen: PyTree) -> Updates:
        check_divisible(batch.tokens, 1, micro_batches)
        mask = batch.loss_mask & (jnp.arange(batch.tokens.shape[1]) > 0)[None, :]
        rows, count, counted = replace(batch, loss_mask=mask), token_count(mask), jnp.any(mask)
        parts = micro_batches if micro_batch_tokens is None else ByLength(row_ends(mask), micro_batch_tokens)
        return _once("sft", objective, state, Minibatch(rows, parts, (count,), counted), frozen)

    return make_step(step, pipeline)


def _imitation_terms(logprobs: Array, entropy: Array, mask: Array) -> tuple[Array, Metrics]:
    return jnp.where(mask, -logprobs, 0), {"entropy": jnp.where(mask, entropy, 0)}


def make_preference_step(
    score_fn: ScoreFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batches: int = 1,
    micro_batch_tokens: int | None = None,
    centre: float = 0.0,
    pipeline: Pipeline | None = None,
) -> Step[TrainState, PreferenceBatch]:
    """Makes a step of reward learning: one update on the mean `bradley_terry_loss` of a `PreferenceBatch`'s pairs.

    score_fn: (params, tokens [2B, T], lengths [2B], *frozen) -> scores [2B]; the rows of a pair are neighbours, chosen
    first.

    Metrics: reward_model/loss, reward_model/accuracy (ties count as wrong), reward_model/margin (mean of r_chosen -
    r_rejected).

    micro_batch_tokens: number of pairs' tokens per part and device, in place of `micro_batches`, as in `PPOConfig`.
    """
    check_one_division(micro_batches, micro_batch_tokens)

    def terms(params: PyTree, rows: PreferenceBatch, *frozen: PyTree) -> dict[str, Array]:
        scores = in_groups(score_fn(params, rows.tokens, rows.lengths, *frozen), 2)
        chosen, rejected = scores[:, 0], scores[:, 1]
        loss = bradley_terry_loss(chosen, rejected, centre=centre)
        return dict(zip(_REWARD_MODEL, (loss, (chosen > rejected).astype(jnp.float32), chosen - rejected), strict=True))

    return _pair_step("reward_model", terms, _REWARD_MODEL, optimizer, micro_batches, micro_batch_tokens, pipeline)


def make_dpo_step(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    config: DPOConfig,
    *,
    pipeline: Pipeline | None = None,
) -> Step[TrainState, PairBatch]:
    """Makes a DPO step: one update on the mean `dpo_loss` of a `PairBatch`, which needs the reference's log-probs.

    logprob_fn: (params, tokens [2B, T], *frozen) -> (log-probabilities, entropies), [2B, T] each; a pair's rows are
    neighbours, chosen first.
    Log-probabilities must be at temperature 1. Metrics, under TRL's names: the means of `pair_terms`.
    """

    parts: Any = {"micro_batches": config.micro_batches, "micro_batch_tokens": config.micro_batch_tokens}
    return make_pair_step(logprob_fn, optimizer, config, prefix="dpo", pipeline=pipeline, **parts)


def make_pair_step(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    loss: DPOConfig | PairLoss,
    *,
    prefix: str = "actor",
    micro_batches: int = 1,
    micro_batch_tokens: int | None = None,
    pipeline: Pipeline | None = None,
) -> Step[TrainState, PairBatch]:
    """Makes a step of a policy that learns from pairs: one update on the mean loss of a `PairBatch`'s pairs.

    A pair whose chosen sequence has length 0 is none: it counts nowhere.

    logprob_fn: as in `make_dpo_step`, whose metrics a `DPOConfig` has. loss: that of DPO or IPO; or a function, whose
        metrics are PREFIX/loss and the mean log-probs of whole responses, logps/chosen and logps/rejected.
    prefix: of the metrics of the update. micro_batch_tokens: as in `make_preference_step`.
    """
    check_one_division(micro_batches, micro_batch_tokens)

    def terms(params: PyTree, rows: PairBatch, *frozen: PyTree) -> dict[str, Array]:
        logprobs, _ = logprob_fn(params, rows.tokens, *frozen)
        check_output("logprob_fn", rows.tokens, logprobs, "log-probabilities")
        if isinstance(loss, DPOConfig):
            return pair_terms(logprobs, rows, config=loss)
        pairs = logprobs_of_pairs(logprobs, rows)
        return dict(zip(names, (checked_pair_loss(loss, pairs), pairs.chosen, pairs.rejected), strict=True))

    names = _DPO if isinstance(loss, DPOConfig) else ("loss", "logps/chosen", "logps/rejected")
    return _pair_step(prefix, terms, names, optimizer, micro_batches, micro_batch_tokens, pipeline)


def _pair_step(
    prefix: str,
    terms_fn: Callable[..., dict[str, Array]],
    names: tuple[str, ...],
    optimizer: optax.GradientTransformation,
    micro_batches: int,
    micro_batch_tokens: int | None,
    pipeline: Pipeline | None,
) -> Step[TrainState, Any]:
    """Makes a step on the mean over pairs of the term names[0]. terms_fn: (params, pairs, *frozen) -> {name: [B]}."""

    def loss_fn(params: PyTree, rows: PreferenceBatch, count: Array, *frozen: PyTree) -> tuple[Array, Metrics]:
        terms = terms_fn(params, rows, *frozen)
        exists = rows.chosen_lengths > 0  # other rows are padding of a micro-batch
        shares = {name: masked_sum(term, exists) / count for name, term in terms.items()}
        return shares[names[0]], shares

    objective = Objective(loss_fn, optimizer, names)

    def step(state: TrainState, batch: PreferenceBatch, *frozen: PyTree) -> Updates:
        others = {name: x for name, x in vars(batch).items() if name not in ("chosen", "rejected")}
        check_shapes(batch.chosen.shape, rejected=batch.rejected)
        check_shapes(batch.chosen.shape[:1], **others)
        check_divisible(batch.chosen, 1, micro_batches)
        exists = batch.chosen_lengths > 0
        parts, count = micro_batches, token_count(exists)
        if micro_batch_tokens is not None:  # a budget for both sequences of a pair
            longer = jnp.maximum(batch.chosen_lengths, batch.rejected_lengths)
            parts = ByLength(longer, max(1, micro_batch_tokens // 2))
        return _once(prefix, objective, state, Minibatch(batch, parts, (count,), jnp.any(exists)), frozen)

    return make_step(step, pipeline)


def _once(
    prefix: str, objective: Objective, state: TrainState, minibatch: Minibatch, frozen: tuple[PyTree, ...]
) -> Updates:
    """Returns a single update. Its metrics get the prefix unless their names have one."""

    def end(update: Update) -> tuple[TrainState, Metrics]:
        metrics = {name if "/" in name else f"{prefix}/{name}": value for name, value in update.metrics.items()}
        metrics[f"{prefix}/skipped_updates"] = (~update.sound).astype(jnp.float32)
        metrics[f"{prefix}/nonfinite_updates"] = (~update.finite).astype(jnp.float32)
        return TrainState(update.params, update.opt_state, state.step + 1), metrics

    start: Any = state  # the carry is the state, then the update
    return Updates(objective, frozen, start, lambda _: minibatch, lambda _, update: update, end)


def pair_terms(logprobs: Float[Array, "2*B T"], batch: PairBatch, *, config: DPOConfig) -> dict[str, Float[Array, "B"]]:
    """DPO's loss and metrics of each pair, given the policy's log-probs of `batch.tokens`.

    dpo/loss; rewards/chosen and rewards/rejected, beta (log pi - log pi_ref) of whole responses, for every loss;
    rewards/accuracies (1 where the chosen one's is higher, ties count as wrong); rewards/margins, their difference;
    logps/chosen and logps/rejected, the policy's log-probs of whole responses.

    Raises ValueError for pairs without the log-probs of the reference.
    """
    if batch.ref_chosen is None or batch.ref_rejected is None:
        raise ValueError("ref_chosen=None: the pairs need the reference's log-probs, put them in by with_reference")
    sums = response_logprobs(logprobs, batch)
    ref = jnp.stack([batch.ref_chosen, batch.ref_rejected], axis=1)
    count = _response_tokens(batch) if config.loss == "ipo" else jnp.ones_like(sums)
    policy, reference = sums / count, ref / count
    loss = dpo_loss(policy[:, 0], policy[:, 1], reference[:, 0], reference[:, 1], config=config)
    rewards = config.beta * (sums - ref)
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    accuracies = (chosen > rejected).astype(jnp.float32)
    terms = (loss, chosen, rejected, accuracies, chosen - rejected, sums[:, 0], sums[:, 1])
    return dict(zip(_DPO, terms, strict=True))


def with_reference(batch: PairBatch, logprobs: Float[Array, "2*B T"]) -> PairBatch:
    """The pairs with the reference's log-probs of their responses, given those of the tokens of `batch.tokens`."""
    sums = response_logprobs(logprobs, batch)
    return replace(batch, ref_chosen=sums[:, 0], ref_rejected=sums[:, 1])


def response_logprobs(logprobs: Float[Array, "2*B T"], batch: PairBatch) -> Float[Array, "B 2"]:
    """Sums over the response tokens of the chosen and of the rejected answers; other tokens do not count."""
    return in_groups(masked_sum(logprobs, batch.response_mask, 1), 2)


def logprobs_of_pairs(logprobs: Float[Array, "2*B T"], batch: PairBatch) -> PairLogprobs:
    """What a loss of pairs reads, given the policy's log-probs of `batch.tokens`."""
    policy, tokens = response_logprobs(logprobs, batch), _response_tokens(batch)
    sums = policy[:, 0], policy[:, 1], batch.ref_chosen, batch.ref_rejected
    return PairLogprobs(*sums, tokens[:, 0], tokens[:, 1])


def _response_tokens(batch: PairBatch) -> Float[Array, "B 2"]:
    return in_groups(token_count(batch.response_mask, 1), 2)


def checked_pair_loss(loss: PairLoss, pairs: PairLogprobs) -> Float[Array, "*n"]:
    """The loss of each pair. Raises TypeError or ValueError for a result of another class or shape."""
    result, wanted = loss(pairs), pairs.chosen.shape
    if getattr(result, "shape", None) != wanted:
        kind = TypeError if not hasattr(result, "shape") else ValueError
        shown = f"shape {result.shape}" if hasattr(result, "shape") else f"a {type(result).__name__}"
        raise kind(f"the loss returned {shown}, but must return one number for each pair, {wanted}")
    return result


def bradley_terry_loss(
    chosen: Float[Array, "*S"], rejected: Float[Array, "*S"], *, centre: float = 0.0
) -> Float[Array, "*S"]:
    """-log sigmoid(r_chosen - r_rejected) + centre (r_chosen + r_rejected)^2, for each pair of scores.

    The likelihood of Bradley & Terry (1952) as in Ouyang et al. 2022 (arXiv:2203.02155, eq. 1). It determines scores up
    to a constant only; a small `centre` pulls their mean to 0 (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).
    """
    loss = jax.nn.softplus(rejected - chosen)
    return loss + centre * jnp.square(chosen + rejected) if centre else loss


def dpo_loss(
    policy_chosen: Float[Array, "*S"],
    policy_rejected: Float[Array, "*S"],
    ref_chosen: Float[Array, "*S"],
    ref_rejected: Float[Array, "*S"],
    *,
    config: DPOConfig,
) -> Float[Array, "*S"]:
    """The loss of a policy on a pair, from the log-probabilities of its two responses under policy and reference.

    `DPOConfig` has the formulas. Log-probabilities are sums over a response's tokens for "sigmoid", means over them for
    "ipo" (whose paper calls beta tau and does not mention length). Label smoothing as in
    https://ericmitchell.ai/cdpo.pdf; TRL 1.16 ignores it in "sigmoid", and its "robust" subtracts the second term and
    divides by 1 - 2 eps, eps = label_smoothing, instead (arXiv:2403.00409).
    """
    margin = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if config.loss == "ipo":
        return jnp.square(margin - 1 / (2 * config.beta))
    h, smoothing = config.beta * margin, config.label_smoothing
    loss = (1 - smoothing) * jax.nn.softplus(-h)
    return loss + smoothing * jax.nn.softplus(h) if smoothing else loss
