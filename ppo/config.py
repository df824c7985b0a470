"""The settings of the algorithms. `PolicyConfig` holds what they share; each class adds its own settings and defaults.

A class's docstring describes the algorithm: paper, objective, differences from the paper, and the source of its
defaults.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jrlhf.ppo.fields import Section, between, checked, non_negative, only_if, positive

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
KLPlace = Literal["reward", "loss"]
Truncation = Literal["bootstrap", "zero", "mask"]
Ratio = Literal["token", "sequence", "sequence-mean"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant"]
Surrogate = Literal["ppo", "cispo"]
OldLogprobs = Literal["recompute", "rollout", "interpolate"]
Importance = Literal["token", "sequence"]
Bounds = tuple[float, float]
Baseline = Literal["mean", "leave-one-out"]
PreferenceLoss = Literal["sigmoid", "ipo"]

_POSITIVE = "positive and finite"
_SWITCHED = f"{_POSITIVE}, or null to switch it off"
_KL = only_if(lambda section: section.kl_coef, "{path}.kl_coef=0")
_ADAPTIVE = only_if(lambda section: section.kl_target is not None, "{path}.kl_target=null")
_WEIGHTED = only_if(
    lambda section: section.importance is not None or section.old_logprobs == "rollout",
    "{path}.importance=null and old_logprobs={section.old_logprobs}",
)


def _whole(default: int | None, expected: str = "at least 1", least: int = 1) -> Any:
    return checked(
        default, lambda value: isinstance(value, int) and value >= least, expected, bounds={"minimum": least}
    )


def _bounds() -> Any:
    return checked(
        None,
        lambda value: len(value) == 2 and 0 <= value[0] <= 1 <= value[1] < math.inf,
        "two bounds, the first from 0 to 1 and the second at least 1 and finite, or null",
    )


@dataclass(frozen=True)
class PolicyConfig(Section):
    """Settings shared by all algorithms that train a policy on its own samples."""

    # --- KL to the reference ---
    kl_in: KLPlace = checked("reward", **_KL)  # reward: a penalty on each token's reward; loss: a loss term
    # How the KL is estimated from samples. With + (in the loss only): this value, with the gradient of k2.
    kl_estimator: KLEstimator = checked("k1", **_KL)
    # Weight of the KL (beta); the start value if it adapts. 0 with kl_target null: no reference model is needed.
    kl_coef: float = non_negative(0.05)
    # Goal of the adaptive controller for objective/kl, in nats per sequence; null: kl_coef stays fixed.
    kl_target: float | None = positive(None, _SWITCHED)
    # Time constant of the adaptive controller, in sequences.
    kl_horizon: float = positive(10_000.0, _POSITIVE, **_ADAPTIVE)

    # --- Rewards and advantages ---
    discount: float = between(1.0, 0, 1, "in [0, 1]")  # gamma, per token
    # Divide the tokens' rewards by their standard deviation over the batch, without moving their mean.
    whiten_rewards: bool = False
    whiten_advantages: bool = False  # normalise advantages over all response tokens of the batch
    truncation: Truncation = "zero"
    """The continuation after the last token of a response that the length limit cut off (`finished` False).

    "zero": nothing; the limit counts as an end. "mask": the row is left out of the losses and of the statistics.
    "bootstrap": the critic's value, as if the text went on (Pardo et al. 2018, arXiv:1712.00378). This value replaces
    the score of the whole response, which has no end yet, and any penalty in that score. Scores of single tokens
    still count, because they are about tokens that exist.
    """

    # --- Policy loss ---
    surrogate: Surrogate = "ppo"
    """The policy loss of a token. "ppo": the clipped surrogate, in which a token whose ratio is clipped does not learn.
    "cispo": the clipped ratio is a constant that multiplies log pi, so that every token learns (MiniMax-M1,
    arXiv:2506.13585, which has no lower bound: clip_low=1)."""
    ratio: Ratio = "token"
    """Unit of the ratio pi / pi_old: each token, or the whole response as one action ("sequence": the product over
    its tokens; "sequence-mean": their geometric mean)."""
    clip_low: float = checked(0.2, lambda value: 0 < value <= 1, "in (0, 1]")  # the ratio is clipped from 1 - clip_low
    clip_high: float = positive(0.2, _POSITIVE)  # to 1 + clip_high
    # Above 1: bounds the loss by dual_clip * |A| where A < 0 (arXiv:1912.09729); null: off.
    dual_clip: float | None = checked(None, lambda value: value > 1, "above 1, or null to switch it off")
    entropy_coef: float = checked(0.0, math.isfinite, "finite")  # weight of the entropy bonus
    # Stop the actor's updates on a batch when KL(old, new) in nats per token exceeds this; null: never.
    target_kl: float | None = positive(None, _SWITCHED)
    aggregation: Aggregation = "token-mean"
    """The reduction of token losses to the loss of a minibatch. Every count is over the whole minibatch.

    "token-mean": sum / tokens. "seq-mean-token-sum": sum / sequences. "seq-mean-token-mean": the mean over sequences of
    each sequence's mean over tokens. "constant": sum / (sequences * aggregation_divisor). A sequence without a token
    that counts is not counted.
    """
    # Divisor for aggregation "constant", which needs one: usually the limit on response tokens.
    aggregation_divisor: int | None = _whole(None, "at least 1, or null")

    # --- Between rollout and trainer ---
    old_logprobs: OldLogprobs = "recompute"
    """The denominator of the ratio. "recompute": the trainer computes it with the weights that sampled. "rollout": what
    the rollout recorded, which saves a pass; the ratio then also corrects the difference between the two programs and
    is truncated at importance_cap. "interpolate": no pass either; the denominator lies between the log-probs of the
    rollout and those of the present weights, by the token's age in versions (`losses.proximal_logprobs`)."""
    # Weight tokens or sequences by min(pi_old / pi_rollout, importance_cap); null: no weights.
    importance: Importance | None = None
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
    # Weight 0 for tokens that weights drew which are more than this number of updates older; null: no bound.
    staleness: int | None = checked(
        None, lambda value: isinstance(value, int) and value >= 0, "at least 0, or null", **{"from": ""}
    )

    # --- Updates on one batch of experience ---
    # Weight of the imitation loss on texts, PPO-ptx (arXiv:2203.02155, eq. 2); 0: none.
    ptx_coef: float = checked(0.0, lambda value: value >= 0 and math.isfinite(value), "at least 0")
    epochs: int = _whole(1, "an integer of at least 1")  # passes over a batch
    minibatches: int = _whole(1, "an integer of at least 1")  # optimizer updates in an epoch
    # Parts in which a minibatch is computed; changes memory, not the result.
    micro_batches: int = _whole(1, "an integer of at least 1")
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

    @property
    def needs_reference(self) -> bool:
        """The KL to a reference enters the rewards or the loss."""
        return self.kl_coef > 0

    @property
    def corrections(self) -> tuple[str, ...]:
        """The names of the CORRECTIONS that are set."""
        return tuple(name for name in self.CORRECTIONS if getattr(self, name) is not None)

    @property
    def couples_tokens(self) -> bool:
        """The loss of a token depends on the other tokens of its response."""
        rows = self.importance == "sequence" or {"mask_sequence", "mask_sequence_mean", "mask_k3"} & {*self.corrections}
        return self.ratio != "token" or (self.old_logprobs == "interpolate" and bool(rows))

    def __post_init__(self) -> None:
        super().__post_init__()
        straight = self.kl_in == "loss" or not self.kl_estimator.endswith("+")
        self.require("kl_estimator", straight, "without + in the reward, which has no gradient")
        gradient = self.kl_in == "reward" or self.kl_estimator != "k1"
        self.require("kl_estimator", gradient, "another in the loss, where k1's mean gradient is 0")
        valued = self.has_critic or self.truncation != "bootstrap"
        self.require("truncation", valued, "zero or mask where there is no critic")
        action = self.ratio == "token" or self.aggregation == "seq-mean-token-mean"
        self.require("aggregation", action, f"seq-mean-token-mean with ratio={self.ratio}")
        divided = self.aggregation == "constant" or self.aggregation_divisor is None
        self.require("aggregation_divisor", divided, "null without aggregation=constant")
        for name in self.corrections:
            gap = self.old_logprobs != "rollout"
            self.require(name, gap, "null with old_logprobs=rollout, where there is no gap to weigh")
        whole = self.surrogate == "ppo" or (self.ratio == "token" and self.dual_clip is None)
        self.require("surrogate", whole, "ppo with dual_clip or a ratio of sequences")
        check_one_division(self.micro_batches, self.micro_batch_tokens)
        adaptive = self.kl_target is None or self.kl_coef > 0
        self.require("kl_coef", adaptive, "above 0 with kl_target: the controller multiplies it")

    def _require_plain_rewards(self, why: str) -> None:
        self.require("whiten_rewards", not self.whiten_rewards, f"False where {why}")


@dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """PPO for language models (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155).

        maximise E[score - kl_coef KL(pi, pi_ref)] by the clipped surrogate of A = GAE(reward, V); a critic learns V

    Difference from the papers: advantages are whitened over the batch. Defaults: gae_lambda and the clips are those of
    arXiv:1909.08593's code and of TRL 1.12; kl_coef is TRL's.
    """

    has_critic: ClassVar[bool] = True
    whiten_advantages: bool = True
    gae_lambda: float = between(0.95, 0, 1, "in [0, 1]")  # lambda of generalised advantage estimation
    # Clip the value by this around its old value in the value loss; null: no clipping.
    value_clip: float | None = positive(0.2, f"{_POSITIVE}, or null")


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """GRPO: a group of responses to one prompt is its own baseline (Shao et al. 2024, arXiv:2402.03300, section 4.1).

        A_t = (score - mean of the group) / (std of the group + 1e-6)        loss = clipped surrogate + kl_coef k3

    for every token of a response; no critic. Differences from the paper: k3 is bounded (`kl.kl_estimate`), the
    deviation is unbiased as in verl and TRL, and epsilon is verl's. Defaults: kl_coef 0.04, one update per batch, and
    first the mean over a response's tokens, as in the paper; samples 8 (TRL; the paper has 64). A group with equal
    scores has advantage 0. A response is compared as a whole: discount must be 1, and rewards are not whitened,
    because whitening would spread them over its tokens.
    """

    samples: int = _whole(8, "at least 2", least=2)  # responses to each prompt: a group
    # Subtracted from a score: the group's mean, or the mean of the other responses.
    baseline: Baseline = "mean"
    divide_by_std: bool = True  # divide by the group's standard deviation
    kl_in: KLPlace = "loss"
    kl_estimator: KLEstimator = "k3"
    kl_coef: float = 0.04
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("discount", self.discount == 1, "1 where whole responses are compared")
        self._require_plain_rewards("responses' sums are compared")


@dataclass(frozen=True)
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO: GRPO without its two biases (Liu et al. 2025, arXiv:2503.20783, section 3.2).

        A_t = score - mean of the group        loss = sum over all tokens / (sequences * a constant)

    It does not divide by the group's deviation, which gives easy and hard prompts more weight, nor by the response's
    length, which favours long wrong responses. Defaults: no KL, as in the paper; if there is one, k2, whose gradient is
    that of the KL. The constant, aggregation_divisor, is the limit on response tokens; a run fills it in.
    """

    divide_by_std: bool = False
    kl_estimator: KLEstimator = "k2"
    kl_coef: float = 0.0
    aggregation: Aggregation = "constant"


@dataclass(frozen=True)
class DAPOConfig(GRPOConfig):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO with clip-higher, a mean over tokens, and dynamic sampling.

    A group with equal scores teaches nothing: prompts are drawn until the batch is full of other groups (eq. 11).
    Groups are judged by the scores that the rewards gave, before shaping and penalties. The soft overlong punishment
    is a `ScoreConfig`. Defaults are the paper's: clip_high 0.28, no KL, no entropy bonus; samples 8 instead of 16.
    Difference: after `max_rounds` (verl's max_num_gen_batches) the batch is filled with the groups collected so far,
    counted in `dapo/filled`; verl raises an error.
    """

    clip_high: float = 0.28
    kl_coef: float = 0.0
    aggregation: Aggregation = "token-mean"
    max_rounds: int = _whole(10)  # rounds of generation for one batch; 1: no dynamic sampling


@dataclass(frozen=True)
class GSPOConfig(GRPOConfig):
    """GSPO: GRPO with ratio and clip of whole sequences (Zheng et al. 2025, arXiv:2507.18071, eq. 5-7).

        s = exp(mean over tokens of log pi - log pi_old)        loss = -mean over sequences of min(s A, clip(s) A)

    Defaults are the paper's: clips of 3e-4 and 4e-4, no KL.
    """

    ratio: Ratio = "sequence-mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_coef: float = 0.0


@dataclass(frozen=True)
class RLOOConfig(GRPOConfig):
    """RLOO: REINFORCE with the mean of the other responses as baseline (Ahmadian et al. 2024, arXiv:2402.14740, eq. 6).

        A = R - mean of the others' R        R = score - kl_coef sum_t log pi / pi_ref

    A response is one action: its ratio is the product over its tokens, as in TRL (the paper takes one gradient step per
    batch, where all ratios are 1). Defaults: kl_coef 0.05 and clip 0.2 are TRL's; samples 4 (the paper has 2 and 4).
    """

    samples: int = 4
    baseline: Baseline = "leave-one-out"
    divide_by_std: bool = False
    kl_in: KLPlace = "reward"
    kl_estimator: KLEstimator = "k1"
    kl_coef: float = 0.05
    ratio: Ratio = "sequence"


@dataclass(frozen=True)
class ReinforcePPConfig(PolicyConfig):
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): returns of tokens, whitened over the batch, under PPO's clip; no critic.

        A_t = sum over s >= t of discount^(s - t) r_s        r_t = score at the last token - kl_coef k1_t

    Defaults: discount 1 and clip 0.2 are the paper's, kl_coef 0.01 is OpenRLHF's.
    """

    kl_coef: float = 0.01
    whiten_advantages: bool = True


@dataclass(frozen=True)
class ReinforcePPBaselineConfig(GRPOConfig):
    """REINFORCE++-baseline (arXiv:2501.03262): the group's mean is subtracted, then whitening over the whole batch.

        A = score - mean of the group, whitened over all tokens of the batch        KL in the loss, by k2

    The deviation is the batch's, not the group's: a group with nearly equal scores is not blown up. Defaults: samples
    8; k2 is the paper's; kl_coef 0.001 is that of verl's KL loss.
    """

    divide_by_std: bool = False
    whiten_advantages: bool = True
    kl_estimator: KLEstimator = "k2"
    kl_coef: float = 0.001
    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True)
class ReMaxConfig(PolicyConfig):
    """ReMax: REINFORCE with the greedy response's score as baseline (Li et al. 2024, arXiv:2310.10505, algorithm 1).

        A_t = sum over s >= t of r_s - score of the greedy response        r_t = score at the last - kl_coef k1_t

    It needs one more generation, which is greedy, and one more scoring, but no critic. Difference from the paper: the
    clipped ratio, which is 1 in the one update per batch. Losses are summed over tokens and averaged over sequences,
    as in its objective. Default kl_coef: 0.05, as in PPO and RLOO. Rewards are not whitened, because the greedy score
    would then be in other units.
    """

    aggregation: Aggregation = "seq-mean-token-sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_plain_rewards("the baseline is in their units")


@dataclass(frozen=True)
class SafeRLHFConfig(PPOConfig):
    """Safe RLHF: reward under a limit on cost (Dai et al. 2024, arXiv:2310.12773, section 3.3).

        maximise E[score] subject to E[cost] <= cost_limit        A = (A_reward - lambda A_cost) / (1 + lambda)
        ln lambda <- ln lambda + multiplier_rate * lambda * (mean cost - cost_limit), at most ln multiplier_max

    There are a cost model and a cost critic in addition to those of the reward; the mean is over the last `window`
    episodes. The KL penalty enters the rewards as -kl_coef k1 and the costs as +kl_coef k1, so that its total weight
    does not depend on lambda. Rewards are not whitened: dividing each stream by its own deviation would change the
    meaning of lambda. The defaults of the multiplier are those of the authors' code: lambda starts at 1, its rate is
    0.1, its maximum 5; cost_limit 0 means that their cost model calls as many answers harmless as harmful. All other
    defaults are PPO's.
    """

    cost_limit: float = checked(0.0, math.isfinite, "finite")  # the mean cost is kept below this
    multiplier: float = 1.0  # lambda at the start
    multiplier_rate: float = positive(0.1, _POSITIVE)  # learning rate of ln lambda
    multiplier_max: float = positive(5.0, _POSITIVE)  # upper bound of lambda
    window: int = _whole(128)  # number of episodes whose mean cost is compared with the limit

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_plain_rewards("lambda weighs two streams of them")
        within = 0 < self.multiplier <= self.multiplier_max
        self.require("multiplier", within, f"above 0 and at most multiplier_max={self.multiplier_max:g}")


@dataclass(frozen=True)
class DPOConfig(Section):
    """DPO: a policy from pairs, without a reward model or samples (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

        h = beta [(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]
        sigmoid: L = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)
        ipo:     L = (h / beta - 1 / (2 beta))^2, of means over tokens

    label_smoothing is that of conservative DPO (Mitchell 2023). "ipo" is Azar et al. 2023 (arXiv:2310.12036, eq. 17),
    with log-probabilities averaged over a response's tokens, as its authors recommend and TRL does. Defaults are TRL's.
    """

    loss: PreferenceLoss = "sigmoid"  # the formula of the loss, see above
    beta: float = positive(0.1, _POSITIVE)  # a larger value keeps the policy closer to the reference
    # Share of the labels that are assumed to be wrong.
    label_smoothing: float = checked(0.0, lambda value: 0 <= value < 0.5, "in [0, 0.5)")
    # Parts in which a batch is computed; changes memory, not the result.
    micro_batches: int = _whole(1, "an integer of at least 1")
    # Parts of about this number of tokens per device instead, as in PolicyConfig; null: off.
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        smooth = self.label_smoothing == 0 or self.loss == "sigmoid"
        self.require("label_smoothing", smooth, f"0 with loss={self.loss}")
        check_one_division(self.micro_batches, self.micro_batch_tokens)


def check_one_division(micro_batches: int, micro_batch_tokens: int | None) -> None:
    """Raises ValueError for a budget of tokens that is no positive integer, or that is given with micro_batches."""
    tokens = micro_batch_tokens
    if tokens is not None and not (isinstance(tokens, int) and tokens >= 1):
        raise ValueError(f"micro_batch_tokens={tokens!r}: it must be at least 1, or null")
    if tokens is not None and micro_batches != 1:
        raise ValueError(f"micro_batches={micro_batches!r}: it must be 1 with micro_batch_tokens, which has its place")
