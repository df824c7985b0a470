"""DPO: `DPOConfig`."""

from jax import Array

from jrlhf.ppo import PairBatch
from jrlhf.roles.actor import Reference
from jrlhf.roles.pair_actor import PairActor

TITLES = {"dpo": "DPO"}


def dpo(actor: PairActor, reference: Reference, pairs: PairBatch) -> dict[str, Array]:
    """One step: the policy learns from ranked pairs, tied to a frozen reference."""
    ref = reference.logprobs(pairs)
    metrics = actor.update(pairs, ref)
    return metrics
