"""The steps before RL: imitation (SFT) and the reward model's preference learning.

They are called as those of `steps.py`: (state, batch) or (state, batch, frozen).
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jrlhf.ppo.budget import ByLength, pair_parts, row_ends
from jrlhf.ppo.config import check_one_division
from jrlhf.ppo.losses import bradley_terry_loss
from jrlhf.ppo.masked import masked_sum, token_count
from jrlhf.ppo.minibatches import check_divisible, interleave
from jrlhf.ppo.steps import LogprobFn
from jrlhf.ppo.types import PreferenceBatch, SFTBatch, TrainState
from jrlhf.ppo.updates import Metrics, check_output, update_once

PyTree = Any


class ScoreFn(Protocol):
    """(params, tokens, lengths) or (params, tokens, lengths, frozen) -> scores of the whole sequences."""

    def __call__(
        self, params: PyTree, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], /, *frozen: Any, **_: Any
    ) -> Float[Array, "B"]: ...


def make_sft_step(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batches: int = 1,
    micro_batch_tokens: int | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted step of imitation: one update on the mean of -log pi over the tokens in `loss_mask`. Donates the state.

    The mean is over the tokens of the whole batch, whatever the micro-batches. Metrics: sft/loss (nats a token),
    sft/entropy, sft/grad_norm, sft/skipped_updates (1: something was not finite or no token counted, nothing was
    applied).

    micro_batch_tokens: parts of so many tokens a device in place of `micro_batches`, as in `PPOConfig`.

    Raises:
        ValueError: both are given, or a budget that is no positive integer; or, when first called with a shape, the
            rows do not divide into micro_batches.
    """
    check_one_division(micro_batches, micro_batch_tokens)

    def step(state: TrainState, batch: SFTBatch, *frozen: PyTree) -> tuple[TrainState, Metrics]:
        check_divisible(batch.tokens, 1, micro_batches)
        mask = batch.loss_mask & (jnp.arange(batch.tokens.shape[1]) > 0)[None, :]
        count = token_count(mask)

        def loss_fn(params: PyTree, rows: tuple[Array, Array]) -> tuple[Array, Metrics]:
            tokens, mask = rows
            logprobs, entropy = logprob_fn(params, tokens, *frozen)
            check_output("logprob_fn", tokens, logprobs, entropy)
            loss = -masked_sum(logprobs, mask) / count
            return loss, {"loss": loss, "entropy": masked_sum(entropy, mask) / count}

        names = ("loss", "entropy")
        parts = micro_batches if micro_batch_tokens is None else ByLength(row_ends(mask), micro_batch_tokens)
        return update_once("sft", loss_fn, optimizer, state, (batch.tokens, mask), parts, names, jnp.any(mask))

    return jax.jit(step, donate_argnums=0)


def make_preference_step(
    score_fn: ScoreFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batches: int = 1,
    micro_batch_tokens: int | None = None,
    centre: float = 0.0,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted step of reward learning: one update on the mean `losses.bradley_terry_loss` of the pairs.

    Both sequences of a pair go through `score_fn` in one call of 2B rows, pair by pair, so that sharded weights are
    gathered once. Donates the state. Metrics: reward_model/loss, reward_model/accuracy (ties count as wrong),
    reward_model/margin (mean of r_chosen - r_rejected), reward_model/grad_norm, reward_model/skipped_updates.

    micro_batch_tokens: parts of so many tokens of pairs a device in place of `micro_batches`, as in `PPOConfig`.

    Raises:
        ValueError: both are given, or a budget that is no positive integer; or, when first called with a shape, the
            pairs do not divide into micro_batches.
    """
    check_one_division(micro_batches, micro_batch_tokens)

    def step(state: TrainState, batch: PreferenceBatch, *frozen: PyTree) -> tuple[TrainState, Metrics]:
        check_divisible(batch.chosen, 1, micro_batches)
        pairs = batch.chosen.shape[0]

        def loss_fn(params: PyTree, rows: PreferenceBatch) -> tuple[Array, Metrics]:
            tokens = interleave(rows.chosen, rows.rejected)
            lengths = interleave(rows.chosen_lengths, rows.rejected_lengths)
            scores = score_fn(params, tokens, lengths, *frozen).reshape(-1, 2)
            chosen, rejected = scores[:, 0], scores[:, 1]
            terms = {
                "loss": bradley_terry_loss(chosen, rejected, centre=centre),
                "accuracy": (chosen > rejected).astype(jnp.float32),
                "margin": chosen - rejected,
            }
            there = rows.chosen_lengths > 0  # others fill a micro-batch up
            shares = {name: masked_sum(term, there) / pairs for name, term in terms.items()}
            return shares["loss"], shares

        parts = pair_parts(batch, micro_batches, micro_batch_tokens)
        return update_once("reward_model", loss_fn, optimizer, state, batch, parts, ("loss", "accuracy", "margin"))

    return jax.jit(step, donate_argnums=0)
