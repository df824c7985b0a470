"""What a dataflow may call: the calls of each role, as protocols.

The classes in `jrlhf/roles/`, `jrlhf/rewards/` and `dynamic_sampling.py` have these calls. A dataflow's file names only
protocols, so reading, testing or importing it needs none of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxtyping import Array, Float

from jrlhf.data.batches import Batch
from jrlhf.ppo.types import Experience, Rollout, Targets

Number = float | Array
Metrics = dict[str, Array]
Result = tuple[Rollout, Metrics]  # a dataflow's result: the experience, or the rollout, and the metrics of its updates
Scores = Float[Array, "B"] | Float[Array, "B R"]  # of rows, or of the tokens of responses
OfTokens = Float[Array, "B T"]
Values = tuple[OfTokens, Float[Array, "B"]]  # V before every token, and V after each row's last token


class ActorCalls(Protocol):
    """The policy in training."""

    def generate(self, prompts: Batch) -> Rollout: ...
    def generate_greedy(self, prompts: Batch) -> Rollout: ...
    def recomputes(self) -> bool: ...
    def logprobs(self, rollout: Rollout) -> OfTokens: ...
    def logprobs_with_base(self, rollout: Rollout) -> tuple[OfTokens, OfTokens]: ...

    # data: experience; or a rollout, or pairs, with a loss of its own. See `make_actor_step` and `make_pair_step`.
    def update(self, data: Any, loss: Any = None, targets: Targets | None = None) -> Metrics: ...


class FrozenPolicyCalls(Protocol):
    """A frozen policy that the config names, such as a teacher."""

    def generate(self, prompts: Batch) -> Rollout: ...
    def logprobs(self, rollout: Rollout) -> OfTokens: ...
    def top_logprobs(self, rollout: Rollout, k: int) -> Targets: ...


class ReferenceCalls(FrozenPolicyCalls, Protocol):
    """The frozen policy to which the KL penalty ties the actor."""

    def is_base_of(self, actor: Any) -> bool: ...


class CriticCalls(Protocol):
    """A value function of the reward, or of the cost."""

    def values(self, rollout: Rollout) -> Values: ...
    def update(self, experience: Experience) -> Metrics: ...


class RewardCalls(Protocol):
    """The rewards, or the costs, of a config."""

    def score(self, rollout: Rollout, prompts: Batch) -> Any: ...
    def score_baseline(self, rollout: Rollout, prompts: Batch) -> Any: ...


class EstimatorCalls(Protocol):
    """Computes experience with the algorithm's settings. old, ref: of actor and reference, or None."""

    def experience(
        self,
        rollout: Rollout,
        scores: Scores,
        old: OfTokens | None,
        ref: OfTokens | None,
        values: OfTokens,
        after: Float[Array, "B"],
        kl_coef: Number,
    ) -> Experience: ...

    def group_experience(
        self, rollout: Rollout, scores: Scores, old: OfTokens | None, ref: OfTokens | None, kl_coef: Number
    ) -> Experience: ...

    def best_of_group(self, rollout: Rollout, scores: Scores) -> Experience: ...
    def where(self, chosen: Callable[..., Any], experience: Experience) -> Experience: ...
    def pairs_of_group(self, experience: Experience) -> Any: ...  # a `PairBatch`
    def bare_experience(self, rollout: Rollout) -> Experience: ...
    def mix(self, rollout: Rollout, other: Rollout, share: float) -> Rollout: ...
    def by_source(self, prompts: Batch, values: Mapping[str, Any]) -> Any: ...  # as each of the values

    def return_experience(
        self,
        rollout: Rollout,
        scores: Scores,
        old: OfTokens | None,
        ref: OfTokens | None,
        kl_coef: Number,
        baselines: Scores | None = None,
    ) -> Experience: ...

    def custom_experience(
        self,
        advantages: Callable[..., Any],
        rollout: Rollout,
        scores: Scores,
        old: OfTokens | None,
        ref: OfTokens | None,
        kl_coef: Number,
        *others: Any,
    ) -> Experience: ...

    def safe_experience(
        self,
        rollout: Rollout,
        scores: Scores,
        costs: Scores,
        old: OfTokens | None,
        ref: OfTokens | None,
        values: OfTokens,
        after: Float[Array, "B"],
        cost_values: OfTokens,
        cost_after: Float[Array, "B"],
        kl_coef: Number,
        multiplier: Number,
    ) -> tuple[Experience, Experience]: ...


class LearnerCalls(Protocol):
    """One program that makes the experience and trains on it."""

    def update(self, rollout: Rollout, scores: Scores, ref: OfTokens | None, kl_coef: Number) -> Result: ...


class PoolCalls(Protocol):
    """Fills a batch with informative groups, round by round. `batch` takes what `keep` returned last."""

    def wants_more(self) -> bool: ...
    def draw(self) -> Batch: ...
    def keep(self, rollout: Rollout, scores: Scores, prompts: Batch) -> Any: ...
    def batch(self, batch: Any) -> tuple[Rollout, Scores]: ...


class ConstraintCalls(Protocol):
    """The Lagrange multiplier that keeps the mean cost below its limit."""

    def update(self, costs: Scores, rollout: Rollout | None = None) -> Array: ...


def policy_logprobs(
    actor: ActorCalls, reference: ReferenceCalls | None, rollout: Rollout
) -> tuple[OfTokens | None, OfTokens | None]:
    """Log-probs [B, T] of a rollout's responses under actor and reference: in one pass if they share weights.

    They are undefined outside the responses, and beyond data.max_response tokens of a response. The actor's are None
    if the algorithm uses those of the rollout; the reference's are None if there is no reference.
    """
    if not actor.recomputes():
        return None, None if reference is None else reference.logprobs(rollout)
    if reference is None:
        return actor.logprobs(rollout), None
    if reference.is_base_of(actor):
        return actor.logprobs_with_base(rollout)
    return actor.logprobs(rollout), reference.logprobs(rollout)
