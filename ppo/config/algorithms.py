"""The settings of each algorithm. `policy.py` has the settings that all share.

A class's docstring gives the paper, the objective, the differences from the paper, and the source of the defaults.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from jrlhf.ppo.config.policy import (
    POSITIVE,
    Aggregation,
    Baseline,
    KLEstimator,
    KLPlace,
    PolicyConfig,
    Ratio,
    check_one_division,
)
from jrlhf.ppo.fields import Section, between, checked, count, positive


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
    value_clip: float | None = positive(0.2, f"{POSITIVE}, or null")


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """GRPO: the responses to one prompt are each other's baseline (Shao et al. 2024, arXiv:2402.03300, section 4.1).

        A_t = (score - mean of the group) / (std of the group + 1e-6)        loss = clipped surrogate + kl_coef k3

    for every token of a response; no critic. Differences from the paper: k3 is bounded (`losses.kl_estimate`), the
    deviation is unbiased as in verl and TRL, and epsilon is verl's. Defaults: kl_coef 0.04, one update per batch, and
    first the mean over a response's tokens, as in the paper; samples 8 (TRL; the paper has 64). A group with equal
    scores has advantage 0. A response is compared as a whole: discount must be 1, and rewards are not whitened,
    because whitening would spread them over its tokens.
    """

    samples: int = count(8, "at least 2", least=2)  # responses to each prompt: a group
    # Subtracted from a score: the group's mean, or the mean of the other responses.
    baseline: Baseline = "mean"
    divide_by_std: bool = True  # divide by the group's standard deviation
    # What becomes of groups with equal scores, which say nothing about the reward. drop: they are left out of the loss,
    # KL and entropy included, and of the statistics, so the others weigh more (ScaleRL's filter, arXiv:2510.13786).
    equal_groups: Literal["keep", "drop"] = "keep"
    kl_in: KLPlace = "loss"
    kl_estimator: KLEstimator = "k3"
    kl_coef: float = 0.04
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discount != 1:
            self.refuse("discount", "1 where whole responses are compared")
        self._refuse_whitened_rewards("responses' sums are compared")


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

    A group with equal scores has no gradient: prompts are drawn until other groups fill the batch (eq. 11). Groups are
    compared by the scores of the rewards, before shaping and penalties. The soft overlong punishment is a
    `ScoreConfig`. Defaults are the paper's: clip_high 0.28, no KL, no entropy bonus; samples 8 instead of 16.
    Difference: after `max_rounds` (verl's max_num_gen_batches) the batch is filled with the groups collected so far,
    counted in `dapo/filled`; verl raises an error.
    """

    clip_high: float = 0.28
    kl_coef: float = 0.0
    aggregation: Aggregation = "token-mean"
    max_rounds: int = count(10)  # rounds of generation for one batch; 1: no dynamic sampling


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

    The deviation is the batch's, not the group's, so nearly equal scores of a group are not blown up. Defaults: samples
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
        self._refuse_whitened_rewards("the baseline is in their units")


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
    multiplier_rate: float = positive(0.1, POSITIVE)  # learning rate of ln lambda
    multiplier_max: float = positive(5.0, POSITIVE)  # upper bound of lambda
    window: int = count(128)  # number of episodes whose mean cost is compared with the limit

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_whitened_rewards("lambda weighs two streams of them")
        if not 0 < self.multiplier <= self.multiplier_max:
            self.refuse("multiplier", f"above 0 and at most multiplier_max={self.multiplier_max:g}")


@dataclass(frozen=True)
class DPOConfig(Section):
    """DPO: a policy from pairs, without a reward model or samples (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

        h = beta [(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]
        sigmoid: L = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)
        ipo:     L = (h / beta - 1 / (2 beta))^2, of means over tokens

    label_smoothing is that of conservative DPO (Mitchell 2023). "ipo" is Azar et al. 2023 (arXiv:2310.12036, eq. 17),
    with log-probabilities averaged over a response's tokens, as its authors recommend and TRL does. Defaults are TRL's.
    """

    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # the loss of the DPO paper, or of IPO (arXiv:2310.12036)
    beta: float = positive(0.1, POSITIVE)  # a larger value keeps the policy closer to the reference
    # Share of the labels that are assumed to be wrong.
    label_smoothing: float = checked(0.0, lambda value: 0 <= value < 0.5, "in [0, 0.5)")
    # Parts in which a batch is computed; changes memory, not the result.
    micro_batches: int = count(1, "an integer of at least 1")
    # Parts of about this number of tokens per device instead, as in ppo.algorithm; null: off.
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss != "sigmoid":
            self.refuse("label_smoothing", f"0 with loss={self.loss}")
        check_one_division(self.micro_batches, self.micro_batch_tokens)
