"""DPO: `DPOConfig`."""

from jax import Array

from jrlhf.algorithms import PairActor, PairReference
from jrlhf.ppo import PairBatch


def dpo(actor: PairActor, reference: PairReference, pairs: PairBatch) -> dict[str, Array]:
    """One step: the policy learns from ranked pairs, relative to a frozen reference."""
    ref = reference.logprobs(pairs)
    return actor.update(pairs, ref)
