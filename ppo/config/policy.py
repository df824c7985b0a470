"""`PolicyConfig`: the settings that all algorithms share. `algorithms.py` has the settings of single algorithms."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jrlhf.ppo.fields import Section, between, checked, count, natural, non_negative, only_if, positive

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
KLPlace = Literal["reward", "loss"]
Ratio = Literal["token", "sequence", "sequence-mean"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant", "prompt-mean"]
Bounds = tuple[float, float]
Baseline = Literal["mean", "leave-one-out"]

POSITIVE = "positive and finite"
_SWITCHED = f"{POSITIVE}, or null to switch it off"
_KL = only_if(lambda section: section.kl_coef, "{path}.kl_coef=0")
_ADAPTIVE = only_if(lambda section: section.kl_target is not None, "{path}.kl_target=null")
_WEIGHTED = only_if(
    lambda section: section.importance is not None or section.old_logprobs == "rollout",
    "{path}.importance=null and old_logprobs={section.old_logprobs}",
)


def _bounds() -> Any:
    return checked(
        None,
        lambda value: len(value) == 2 and 0 <= value[0] <= 1 <= value[1] < math.inf,
        "two bounds, the first from 0 to 1 and the second at least 1 and finite, or null",
    )


@dataclass(frozen=True)
class PolicyConfig(Section):
    """Settings shared by all algorithms that train a policy on its own samples.

    docs/configuration.md explains each field, in the table `ppo.algorithm`.
    """

    # --- KL to the reference ---
    kl_in: KLPlace = checked("reward", **_KL)  # reward: a penalty on each token's reward; loss: a loss term
    # How the KL is estimated from samples. With + (in the loss only): this value, with the gradient of k2.
    kl_estimator: KLEstimator = checked("k1", **_KL)
    # Weight of the KL (beta); the start value if it adapts. 0 with kl_target null: no reference model is needed.
    kl_coef: float = non_negative(0.05)
    # Goal of the adaptive controller for objective/kl, in nats per sequence; null: kl_coef stays fixed. That KL is of
    # the weights that drew the tokens if old_logprobs is "rollout".
    kl_target: float | None = positive(None, _SWITCHED)
    # Time constant of the adaptive controller, in sequences.
    kl_horizon: float = positive(10_000.0, POSITIVE, **_ADAPTIVE)

    # --- Rewards and advantages ---
    discount: float = between(1.0, 0, 1, "in [0, 1]")  # gamma, per token
    # Divide the tokens' rewards by their standard deviation over the batch, without moving their mean.
    whiten_rewards: bool = False
    whiten_advantages: bool = False  # normalise advantages over all response tokens of the batch
    truncation: Literal["bootstrap", "zero", "mask"] = "zero"
    """The continuation after the last token of a response that the length limit cut off (`finished` False).

    "zero": nothing; the limit counts as an end. "mask": the row is left out of the losses and of the statistics.
    "bootstrap": the critic's value, as if the text went on (Pardo et al. 2018, arXiv:1712.00378). This value replaces
    the score of the whole response, which has no end yet, and any penalty in that score. Scores of single tokens
    still count, because they are about tokens that exist; so do scores and penalties of responses added to them.
    """

    # --- Policy loss ---
    surrogate: Literal["ppo", "cispo"] = "ppo"
    """The policy loss of a token. "ppo": the clipped surrogate, in which a token whose ratio is clipped does not learn.
    "cispo": the clipped ratio is a constant that multiplies log pi, so that every token learns (MiniMax-M1,
    arXiv:2506.13585, which has no lower bound: clip_low=1)."""
    ratio: Ratio = "token"
    """Unit of the ratio pi / pi_old: each token, or the whole response as one action ("sequence": the product over
    its tokens; "sequence-mean": their geometric mean)."""
    clip_low: float = checked(0.2, lambda value: 0 < value <= 1, "in (0, 1]")  # the ratio is clipped from 1 - clip_low
    clip_high: float = positive(0.2, POSITIVE)  # to 1 + clip_high
    # Above 1: bounds the loss by dual_clip * |A| where A < 0 (arXiv:1912.09729); null: off.
    dual_clip: float | None = checked(None, lambda value: value > 1, "above 1, or null to switch it off")
    entropy_coef: float = checked(0.0, math.isfinite, "finite")  # weight of the entropy bonus
    # Stop the actor's updates on a batch when KL(old, new) in nats per token exceeds this; null: never.
    target_kl: float | None = positive(None, _SWITCHED)
    aggregation: Aggregation = "token-mean"
    """The reduction of token losses to the loss of a minibatch. Every count is over the whole minibatch.

    "token-mean": sum / tokens. "seq-mean-token-sum": sum / sequences. "seq-mean-token-mean": the mean over sequences of
    each sequence's mean over tokens. "constant": sum / (sequences * aggregation_divisor). A sequence without a token
    that counts is not counted. "prompt-mean", where prompts have several responses: the mean over prompts of each
    prompt's mean over the tokens of all its responses (ScaleRL, arXiv:2510.13786); in a part of a batch, a prompt
    counts by its share of tokens there.
    """
    # Divisor for aggregation "constant", which needs one: usually the limit on response tokens.
    aggregation_divisor: int | None = count(None, "at least 1, or null")

    # --- Between rollout and trainer ---
    old_logprobs: Literal["recompute", "rollout", "interpolate"] = "recompute"
    """The denominator of the ratio. "recompute": the trainer computes it before its updates. "rollout": what
    the rollout recorded, which saves a pass; the ratio then also corrects the difference between the two programs and
    is truncated at importance_cap. "interpolate": no pass either; the denominator lies between the log-probs of the
    rollout and those of the present weights, by the token's age in versions (`off_policy.proximal_logprobs`)."""
    # Weight tokens or sequences by min(pi_old / pi_rollout, importance_cap); null: no weights.
    importance: Literal["token", "sequence"] | None = None
    # Upper bound of these weights.
    importance_cap: float = checked(2.0, lambda value: value >= 1, "at least 1", **_WEIGHTED)
    # Weight 0 for tokens whose rho = pi_old / pi_rollout is outside these two bounds; null: no such mask.
    mask_token: Bounds | None = _bounds()
    # Weight 0 for all tokens of a response whose product of rho is outside these bounds (verl's Seq-MIS).
    mask_sequence: Bounds | None = _bounds()
    # The same by the geometric mean of rho, which does not depend on the length (verl's Geo-RS).
    mask_sequence_mean: Bounds | None = _bounds()
    # The same where the mean of rho - 1 - log rho is above this number (verl's K3-RS); usually 0.001 to 0.01.
    mask_k3: float | None = positive(None, _SWITCHED)
    # Weight 0 for tokens that were drawn by weights more than this number of updates older; null: no bound.
    staleness: int | None = natural(None, "at least 0, or null", **{"from": ""})

    # --- Updates on one batch of experience ---
    # Weight of the imitation loss on texts, PPO-ptx (arXiv:2203.02155, eq. 2); 0: none.
    ptx_coef: float = checked(0.0, lambda value: value >= 0 and math.isfinite(value), "at least 0")
    epochs: int = count(1, "an integer of at least 1")  # passes over a batch
    minibatches: int = count(1, "an integer of at least 1")  # optimizer updates in an epoch
    # Parts in which a minibatch is computed; changes memory, not the result.
    micro_batches: int = count(1, "an integer of at least 1")
    micro_batch_tokens: int | None = None
    """Compute a minibatch in parts of about this number of tokens per device instead, padding included (verl's
    ppo_max_token_len_per_gpu); null: off. Rows of similar length are computed together and are no wider than they need
    to be: `meshes/by_length.py`. Changes time and memory, not the result; compiles the model up to four times. Where
    layers are computed in slices (adapters with mesh.tensor > 1), a device computes its slice for `tensor` times as
    many tokens.
    """
    # Seed of the shuffles. In a run it is the run's seed.
    seed: int = field(default=0, metadata={"from": "seed"})

    has_critic: ClassVar[bool] = False

    # The settings that weigh or mask tokens by pi_old / pi_rollout.
    CORRECTIONS: ClassVar = ("importance", "mask_token", "mask_sequence", "mask_sequence_mean", "mask_k3")

    def counts(self, finished: Any) -> Any:
        """Returns the mask of the rows that `truncation` does not leave out of losses and statistics. finished: [B]."""
        return finished | (self.truncation != "mask")

    @property
    def needs_reference(self) -> bool:
        """The KL to a reference enters the rewards or the loss."""
        return self.kl_coef > 0

    @property
    def corrections(self) -> tuple[str, ...]:
        """The names of the CORRECTIONS that are set."""
        return tuple(name for name in self.CORRECTIONS if getattr(self, name) is not None)

    @property
    def kl_in_loss(self) -> bool:
        """The KL to a reference is a term of the loss."""
        return self.kl_in == "loss" and self.needs_reference

    @property
    def weighs_in_experience(self) -> bool:
        """The CORRECTIONS are computed when experience is made, which then has weights."""
        return bool(self.corrections) and self.old_logprobs == "recompute"

    @property
    def weighs_in_loss(self) -> bool:
        """The CORRECTIONS are computed in the update's own forward pass."""
        return bool(self.corrections) and self.old_logprobs == "interpolate"

    @property
    def couples_tokens(self) -> bool:
        """The loss of a token depends on the other tokens of its response."""
        return self.ratio != "token" or self.weighs_rows_in_loss

    @property
    def weighs_rows(self) -> bool:
        """The weight of a token depends on the other tokens of its response."""
        of_rows = {"mask_sequence", "mask_sequence_mean", "mask_k3"}
        return self.importance == "sequence" or not of_rows.isdisjoint(self.corrections)

    @property
    def weighs_rows_in_loss(self) -> bool:
        """The update computes such weights, because it computes the old log-probs."""
        return self.old_logprobs == "interpolate" and self.weighs_rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "reward" and self.kl_estimator.endswith("+"):
            self.refuse("kl_estimator", "without + in the reward, which has no gradient")
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            self.refuse("kl_estimator", "another in the loss, where k1's mean gradient is 0")
        if self.truncation == "bootstrap" and not self.has_critic:
            self.refuse("truncation", "zero or mask where there is no critic")
        if self.ratio != "token" and self.aggregation != "seq-mean-token-mean":
            self.refuse("aggregation", f"seq-mean-token-mean with ratio={self.ratio}")
        if self.aggregation == "prompt-mean" and not hasattr(self, "samples"):
            self.refuse("aggregation", "another where a prompt has one response")
        if self.aggregation != "constant" and self.aggregation_divisor is not None:
            self.refuse("aggregation_divisor", "null without aggregation=constant")
        if self.old_logprobs == "rollout" and self.corrections:
            self.refuse(self.corrections[0], "null with old_logprobs=rollout, where there is no gap to weigh")
        if self.surrogate == "cispo" and (self.ratio != "token" or self.dual_clip is not None):
            self.refuse("surrogate", "ppo with dual_clip or a ratio of sequences")
        check_one_division(self.micro_batches, self.micro_batch_tokens)
        if self.kl_target is not None and self.kl_coef == 0:
            self.refuse("kl_coef", "above 0 with kl_target: the controller multiplies it")

    def _refuse_whitened_rewards(self, why: str) -> None:
        if self.whiten_rewards:
            self.refuse("whiten_rewards", f"False where {why}")


def check_one_division(micro_batches: int, micro_batch_tokens: int | None) -> None:
    """Raises ValueError for a budget of tokens that is no positive integer, or that is given with micro_batches."""
    tokens = micro_batch_tokens
    if tokens is not None and not (isinstance(tokens, int) and tokens >= 1):
        raise ValueError(f"micro_batch_tokens={tokens!r}: it must be at least 1, or null")
    if tokens is not None and micro_batches != 1:
        raise ValueError(f"micro_batches={micro_batches!r}: it must be 1 with micro_batch_tokens, which has its place")
