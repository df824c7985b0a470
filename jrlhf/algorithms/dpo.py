"""DPO: `DPOConfig`."""

from jax import Array

from jrlhf.algorithms import PairActor, Reference
from jrlhf.ppo import PairBatch


def dpo(actor: PairActor, reference: Reference, pairs: PairBatch) -> dict[str, Array]:
    """One step: the policy learns from ranked pairs, tied to a frozen reference."""
    ref = reference.logprobs(pairs)
    metrics = actor.update(pairs, ref)
    return metrics
