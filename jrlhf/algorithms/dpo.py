"""DPO: `DPOConfig`."""

from typing import Protocol

from jaxtyping import Array, Float

from jrlhf.ppo.supervised import PairBatch


class PairPolicyCalls(Protocol):
    """The policy that learns from pairs."""

    def update(self, pairs: PairBatch, ref: Float[Array, "2*B T"]) -> dict[str, Array]: ...


class PairReferenceCalls(Protocol):
    """The policy from which it starts, frozen."""

    def logprobs(self, pairs: PairBatch) -> Float[Array, "2*B T"]: ...


def dpo(actor: PairPolicyCalls, reference: PairReferenceCalls, pairs: PairBatch) -> dict[str, Array]:
    """One step: the policy learns from ranked pairs, relative to a frozen reference."""
    ref = reference.logprobs(pairs)
    return actor.update(pairs, ref)
