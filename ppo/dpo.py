"""Direct preference optimisation: a policy learns from pairs, without a reward model and without samples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jrlhf.ppo.budget import pair_parts
from jrlhf.ppo.config import DPOConfig
from jrlhf.ppo.losses import dpo_loss
from jrlhf.ppo.masked import masked_sum, token_count
from jrlhf.ppo.minibatches import check_divisible
from jrlhf.ppo.steps import LogprobFn
from jrlhf.ppo.types import PairBatch, TrainState
from jrlhf.ppo.updates import Metrics, check_output, update_once

PyTree = Any
_MEANS = (
    "dpo/loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


def make_dpo_step(
    logprob_fn: LogprobFn, optimizer: optax.GradientTransformation, config: DPOConfig
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted step of DPO: (state, batch, *frozen) -> (state, metrics), one update on the mean `losses.dpo_loss`.

    Both sequences of a pair go through `logprob_fn` in one call of 2B rows, pair by pair, so that sharded weights are
    gathered once. Log-probabilities must be of temperature 1. Donates the state.

    Metrics, under TRL's names: `pair_terms`' means, dpo/grad_norm, dpo/skipped_updates (1: something was not finite,
    nothing was applied).

    Raises (when first called with a shape):
        ValueError: the pairs do not divide into micro_batches, or have no log-probs of the reference.
    """

    def step(state: TrainState, batch: PairBatch, *frozen: PyTree) -> tuple[TrainState, Metrics]:
        check_divisible(batch.chosen, 1, config.micro_batches)
        pairs = batch.chosen.shape[0]

        def loss_fn(params: PyTree, rows: PairBatch) -> tuple[Array, Metrics]:
            logprobs, _ = logprob_fn(params, rows.tokens, *frozen)
            check_output("logprob_fn", rows.tokens, logprobs)
            terms, there = pair_terms(logprobs, rows, config=config), rows.chosen_lengths > 0  # others fill it up
            shares = {name: masked_sum(term, there) / pairs for name, term in terms.items()}
            return shares["dpo/loss"], shares

        parts = pair_parts(batch, config.micro_batches, config.micro_batch_tokens)
        return update_once("dpo", loss_fn, optimizer, state, batch, parts, _MEANS)

    return jax.jit(step, donate_argnums=0)


def pair_terms(logprobs: Float[Array, "2*B T"], batch: PairBatch, *, config: DPOConfig) -> dict[str, Float[Array, "B"]]:
    """What DPO says of each pair, given the policy's log-probs of `batch.tokens`.

    dpo/loss; rewards/chosen and rewards/rejected, beta (log pi - log pi_ref) of whole responses whatever the loss;
    rewards/accuracies (1 where the chosen one's is higher, ties count as wrong); rewards/margins, their difference;
    logps/chosen and logps/rejected, the policy's log-probs of whole responses.

    Raises:
        ValueError: `batch` has no log-probs of the reference.
    """
    if batch.ref_chosen is None or batch.ref_rejected is None:
        raise ValueError("ref_chosen=None: the pairs need the reference's log-probs, put them in by with_reference")
    sums = response_logprobs(logprobs, batch)
    ref = jnp.stack([batch.ref_chosen, batch.ref_rejected], axis=1)
    count = token_count(batch.response_mask, 1).reshape(sums.shape) if config.loss == "ipo" else jnp.ones_like(sums)
    policy, reference = sums / count, ref / count
    loss = dpo_loss(policy[:, 0], policy[:, 1], reference[:, 0], reference[:, 1], config=config)
    rewards = config.beta * (sums - ref)
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    accuracies = (chosen > rejected).astype(jnp.float32)
    return dict(
        zip(_MEANS, (loss, chosen, rejected, accuracies, chosen - rejected, sums[:, 0], sums[:, 1]), strict=True)
    )


def with_reference(batch: PairBatch, logprobs: Float[Array, "2*B T"]) -> PairBatch:
    """The pairs with the reference's log-probs of their responses, given those of the tokens of `batch.tokens`."""
    sums = response_logprobs(logprobs, batch)
    return replace(batch, ref_chosen=sums[:, 0], ref_rejected=sums[:, 1])


def response_logprobs(logprobs: Float[Array, "2*B T"], batch: PairBatch) -> Float[Array, "B 2"]:
    """Sums over the response tokens of the chosen and of the rejected answers. What stands elsewhere does not count."""
    return masked_sum(logprobs, batch.response_mask, 1).reshape(-1, 2)
