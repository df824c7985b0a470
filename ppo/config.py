"""Every number of the algorithms. What they share is in `PolicyConfig`; each adds what is its own, and its defaults.

A class's docstring is the algorithm's: paper, objective, what differs from the paper, and where the defaults are from.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
KLPlace = Literal["reward", "loss"]
Truncation = Literal["bootstrap", "zero", "mask"]
Ratio = Literal["token", "sequence", "sequence-mean"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant"]
OldLogprobs = Literal["recompute", "rollout"]
Importance = Literal["token", "sequence"]
Baseline = Literal["mean", "leave-one-out"]
PreferenceLoss = Literal["sigmoid", "ipo"]


@dataclass(frozen=True)
class PolicyConfig:
    """What all algorithms share that train a policy on its own samples.

    Raises:
        ValueError: a number out of its range, with its name, its value and the range.
    """

    # KL to the reference
    kl_in: KLPlace = "reward"  # a penalty on each token's reward, or a term of the loss
    kl_estimator: KLEstimator = "k1"  # with +, in the loss only: this value, and k2's gradient
    kl_coef: float = 0.05  # beta, its start if adaptive; 0 with kl_target null: no reference is needed
    kl_target: float | None = None  # null: fixed; otherwise the goal for objective/kl, in nats a sequence
    kl_horizon: float = 10_000.0  # of the adaptive controller, in sequences

    # Rewards and advantages
    discount: float = 1.0  # gamma, a token
    whiten_rewards: bool = False  # tokens' rewards are divided by their deviation over the batch, means kept
    whiten_advantages: bool = False  # over all response tokens of the batch
    truncation: Truncation = "zero"
    """What follows the last token of a row that the length limit cut off (`finished` False).

    "zero": nothing, the limit counts as an end; "mask": the row is left out of the losses and of the statistics.
    "bootstrap": the critic's value there, as the text would have gone on (Pardo et al. 2018, arXiv:1712.00378). That
    value stands for the score of a whole response, which comes at its end: the row's own, of a text that has no end
    yet, is then no part of its rewards (nor is a penalty in it). Scores of tokens are, since they are of what is there.
    """

    # Policy loss
    ratio: Ratio = "token"
    """Of pi and pi_old: each token's; the whole response's, which is one action then (the product over its tokens, or
    their geometric mean)."""
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float | None = None  # > 1: bounds the loss at dual_clip * |A| where A < 0 (arXiv:1912.09729)
    entropy_coef: float = 0.0
    target_kl: float | None = None  # stop this batch's actor updates when KL(old, new) in nats a token exceeds it
    aggregation: Aggregation = "token-mean"
    """How tokens' losses become the minibatch's. Every count is of the whole minibatch.

    "token-mean": sum / tokens; "seq-mean-token-sum": sum / sequences; "seq-mean-token-mean": mean over sequences of the
    mean over a sequence's tokens; "constant": sum / (sequences * aggregation_divisor). Sequences without a token that
    counts are not counted.
    """
    aggregation_divisor: int | None = None  # of "constant", which needs it: usually the limit on response tokens

    # Between rollout and trainer
    old_logprobs: OldLogprobs = "recompute"
    """The ratio's denominator: what the trainer computes for the weights that sampled, or what the rollout recorded
    (a pass less; the ratio then corrects the gap itself, truncated at importance_cap)."""
    importance: Importance | None = None  # weights min(pi_old / pi_rollout, importance_cap), a token or a sequence
    importance_cap: float = 2.0

    # Updates on one batch of experience
    ptx_coef: float = 0.0  # weight of the imitation loss on texts, PPO-ptx (arXiv:2203.02155, eq. 2); 0: none
    epochs: int = 1
    minibatches: int = 1  # optimizer updates an epoch
    micro_batches: int = 1  # parts in which a minibatch is computed; changes memory, not the result
    micro_batch_tokens: int | None = None
    """Compute a minibatch in parts of about so many tokens a device instead, padding included (verl's
    ppo_max_token_len_per_gpu). Rows of similar length are computed together and no wider than they need: `budget.py`.
    Changes time and memory, not the result; compiles the model up to four times over. Where layers are computed in
    slices (adapters with mesh.tensor > 1) a device computes its slice for `tensor` times as many.
    """
    seed: int = field(default=0, metadata={"from": "seed"})  # of the shuffles; of a run, whose config has one seed

    has_critic: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to a reference enters anything."""
        return self.kl_coef > 0

    def __post_init__(self) -> None:
        _require("kl_in", self.kl_in, self.kl_in in get_args(KLPlace), _one_of(KLPlace))
        _require("kl_estimator", self.kl_estimator, self.kl_estimator in get_args(KLEstimator), _one_of(KLEstimator))
        straight = self.kl_in == "loss" or not self.kl_estimator.endswith("+")
        _require("kl_estimator", self.kl_estimator, straight, "without + in the reward, which has no gradient")
        gradient = self.kl_in == "reward" or self.kl_estimator != "k1"
        _require("kl_estimator", self.kl_estimator, gradient, "another in the loss, where k1's mean gradient is 0")
        _require("kl_coef", self.kl_coef, self.kl_coef >= 0 and math.isfinite(self.kl_coef), "at least 0 and finite")
        _require("kl_horizon", self.kl_horizon, _positive(self.kl_horizon), "positive and finite")
        _require("discount", self.discount, 0 <= self.discount <= 1, "in [0, 1]")
        _require("truncation", self.truncation, self.truncation in get_args(Truncation), _one_of(Truncation))
        valued = self.has_critic or self.truncation != "bootstrap"
        _require("truncation", self.truncation, valued, "zero or mask where there is no critic")
        _require("ratio", self.ratio, self.ratio in get_args(Ratio), _one_of(Ratio))
        _require("clip_low", self.clip_low, 0 < self.clip_low <= 1, "in (0, 1]")
        _require("clip_high", self.clip_high, _positive(self.clip_high), "positive and finite")
        _require("entropy_coef", self.entropy_coef, math.isfinite(self.entropy_coef), "finite")
        _require("aggregation", self.aggregation, self.aggregation in get_args(Aggregation), _one_of(Aggregation))
        action = self.ratio == "token" or self.aggregation == "seq-mean-token-mean"
        _require("aggregation", self.aggregation, action, f"seq-mean-token-mean with ratio={self.ratio}")
        divided = self.aggregation == "constant" or self.aggregation_divisor is None
        _require("aggregation_divisor", self.aggregation_divisor, divided, "null without aggregation=constant")
        _require("old_logprobs", self.old_logprobs, self.old_logprobs in get_args(OldLogprobs), _one_of(OldLogprobs))
        weighed = self.importance is None or self.importance in get_args(Importance)
        _require("importance", self.importance, weighed, f"{_one_of(Importance)}, or null")
        gap = self.importance is None or self.old_logprobs == "recompute"
        _require("importance", self.importance, gap, "null with old_logprobs=rollout, where there is no gap to weigh")
        _require("importance_cap", self.importance_cap, self.importance_cap >= 1, "at least 1")
        _require("ptx_coef", self.ptx_coef, self.ptx_coef >= 0 and math.isfinite(self.ptx_coef), "at least 0")
        if self.dual_clip is not None:
            _require("dual_clip", self.dual_clip, self.dual_clip > 1, "above 1, or null to switch it off")
        for name in ("target_kl", "kl_target"):
            value = getattr(self, name)
            if value is not None:
                _require(name, value, _positive(value), "positive and finite, or null to switch it off")
        for name in ("epochs", "minibatches", "micro_batches"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, int) and value >= 1, "an integer of at least 1")
        if self.aggregation_divisor is not None:
            divisor = self.aggregation_divisor
            _require("aggregation_divisor", divisor, isinstance(divisor, int) and divisor >= 1, "at least 1, or null")
        check_one_division(self.micro_batches, self.micro_batch_tokens)
        if self.kl_target is not None:
            _require("kl_coef", self.kl_coef, self.kl_coef > 0, "above 0 with kl_target: the controller multiplies it")


@dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """PPO for language models (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155).

        maximise E[score - kl_coef KL(pi, pi_ref)] by the clipped surrogate of A = GAE(reward, V); a critic learns V

    Differs from the papers: advantages are whitened over the batch. Defaults: gae_lambda and clips are those of
    arXiv:1909.08593's code and of TRL 1.12, kl_coef is TRL's.
    """

    has_critic: ClassVar[bool] = True
    whiten_advantages: bool = True
    gae_lambda: float = 0.95
    value_clip: float | None = 0.2  # of the value loss; null: not clipped

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("gae_lambda", self.gae_lambda, 0 <= self.gae_lambda <= 1, "in [0, 1]")
        if self.value_clip is not None:
            _require("value_clip", self.value_clip, _positive(self.value_clip), "positive and finite, or null")


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """GRPO: a group of responses to one prompt is its own baseline (Shao et al. 2024, arXiv:2402.03300, section 4.1).

        A_t = (score - mean of the group) / (std of the group + 1e-6)        loss = clipped surrogate + kl_coef k3

    for every token of a response; no critic. Differs from the paper in the bound on k3 (`kl.kl_estimate`); the
    deviation is unbiased as in its peers (verl, TRL), epsilon is verl's. Defaults: kl_coef 0.04, one update a batch,
    mean over a response's tokens first, as in the paper; samples 8 (TRL; the paper has 64). A group whose scores are
    all equal has advantage 0. A response is compared as a whole, so discount must be 1, and rewards are not whitened:
    they would be spread over its tokens.
    """

    samples: int = 8  # responses to each prompt: a group
    baseline: Baseline = "mean"
    divide_by_std: bool = True
    kl_in: KLPlace = "loss"
    kl_estimator: KLEstimator = "k3"
    kl_coef: float = 0.04
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("samples", self.samples, isinstance(self.samples, int) and self.samples >= 2, "at least 2")
        _require("discount", self.discount, self.discount == 1, "1 where whole responses are compared")
        _require_plain_rewards(self, "responses' sums are compared")
        _require("baseline", self.baseline, self.baseline in get_args(Baseline), _one_of(Baseline))


@dataclass(frozen=True)
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO: GRPO without its two biases (Liu et al. 2025, arXiv:2503.20783, section 3.2).

        A_t = score - mean of the group        loss = sum over all tokens / (sequences * a constant)

    No division by the group's deviation, which weighs easy and hard prompts more; none by the response's length, which
    favours long wrong ones. Defaults: no KL, as in the paper; with one, k2, whose gradient is that of the KL. The
    constant, aggregation_divisor, is the limit on response tokens; the training program fills it in.
    """

    divide_by_std: bool = False
    kl_estimator: KLEstimator = "k2"
    kl_coef: float = 0.0
    aggregation: Aggregation = "constant"


@dataclass(frozen=True)
class DAPOConfig(GRPOConfig):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO with clip-higher, a mean over tokens, and dynamic sampling.

    Groups whose scores are all equal teach nothing: prompts are drawn until the batch is full of other ones (eq. 11).
    Groups are judged by the scores as the rewards gave them, before they are shaped and penalised. Its soft overlong
    punishment is a `ScoreConfig`. Defaults are the paper's: clip_high 0.28, no KL, no entropy bonus; samples 8 rather
    than 16. Differs: after `max_rounds` (verl's max_num_gen_batches) the batch is filled with what there is, counted in
    `dapo/filled`; verl raises.
    """

    clip_high: float = 0.28
    kl_coef: float = 0.0
    aggregation: Aggregation = "token-mean"
    max_rounds: int = 10  # of generation, for one batch; 1: no dynamic sampling

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("max_rounds", self.max_rounds, isinstance(self.max_rounds, int) and self.max_rounds >= 1, "at least 1")


@dataclass(frozen=True)
class GSPOConfig(GRPOConfig):
    """GSPO: GRPO whose ratio and clip are of whole sequences (Zheng et al. 2025, arXiv:2507.18071, eq. 5-7).

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

    A response is one action: its ratio is the product over its tokens, as in TRL (the paper takes one gradient step a
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

    Deviations are the batch's, not the group's: a group whose scores hardly differ is not blown up. Defaults: samples
    8; k2 is the paper's, kl_coef 0.001 is verl's of its KL loss.
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

    One more generation, greedy, and one more scoring; no critic. Differs from the paper in the clipped ratio, which is
    1 in its one update a batch. Sequences are averaged and tokens summed, as its objective does. Default kl_coef:
    0.05, that of PPO and RLOO. Rewards are not whitened: the greedy score would be in other units than they.
    """

    aggregation: Aggregation = "seq-mean-token-sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_plain_rewards(self, "the baseline is in their units")


@dataclass(frozen=True)
class SafeRLHFConfig(PPOConfig):
    """Safe RLHF: reward under a limit on cost (Dai et al. 2024, arXiv:2310.12773, section 3.3).

        maximise E[score] subject to E[cost] <= cost_limit        A = (A_reward - lambda A_cost) / (1 + lambda)
        ln lambda <- ln lambda + multiplier_rate * lambda * (mean cost - cost_limit), at most ln multiplier_max

    A cost model and a cost critic beside those of the reward; the mean is over the last `window` episodes. The KL
    penalty, kl_coef in all, enters the reward's stream as -kl_coef k1 and the cost's as +kl_coef k1, so that its weight
    does not depend on lambda. Rewards are not whitened: each stream by its own deviation would change what lambda
    means. Defaults of the multiplier are those of the authors' code: lambda starts at 1, its rate is 0.1, at most 5;
    cost_limit 0 means as many harmless as harmful under their cost model. All others are PPO's here.
    """

    cost_limit: float = 0.0
    multiplier: float = 1.0  # lambda, at the start
    multiplier_rate: float = 0.1
    multiplier_max: float = 5.0
    window: int = 128  # episodes whose mean cost is compared with the limit

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_plain_rewards(self, "lambda weighs two streams of them")
        _require("cost_limit", self.cost_limit, math.isfinite(self.cost_limit), "finite")
        _require("multiplier_max", self.multiplier_max, _positive(self.multiplier_max), "positive and finite")
        within = 0 < self.multiplier <= self.multiplier_max
        _require("multiplier", self.multiplier, within, f"above 0 and at most multiplier_max={self.multiplier_max:g}")
        _require("multiplier_rate", self.multiplier_rate, _positive(self.multiplier_rate), "positive and finite")
        _require("window", self.window, isinstance(self.window, int) and self.window >= 1, "at least 1")


@dataclass(frozen=True)
class DPOConfig:
    """DPO: a policy from pairs, without a reward model or samples (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

        h = beta [(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]
        sigmoid: L = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)
        ipo:     L = (h / beta - 1 / (2 beta))^2, of means over tokens

    label_smoothing is conservative DPO's (Mitchell 2023: the share of labels that are wrong). "ipo" is Azar et al. 2023
    (arXiv:2310.12036, eq. 17), with log-probabilities averaged over a response's tokens as its authors recommend and
    TRL does. Defaults are TRL's.
    """

    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    micro_batches: int = 1  # parts in which a batch is computed; changes memory, not the result
    micro_batch_tokens: int | None = None  # parts of about so many tokens a device in its place, as in PolicyConfig

    def __post_init__(self) -> None:
        _require("loss", self.loss, self.loss in get_args(PreferenceLoss), _one_of(PreferenceLoss))
        _require("beta", self.beta, _positive(self.beta), "positive and finite")
        _require("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 0.5, "in [0, 0.5)")
        smooth = self.label_smoothing == 0 or self.loss == "sigmoid"
        _require("label_smoothing", self.label_smoothing, smooth, f"0 with loss={self.loss}")
        whole = isinstance(self.micro_batches, int) and self.micro_batches >= 1
        _require("micro_batches", self.micro_batches, whole, "an integer of at least 1")
        check_one_division(self.micro_batches, self.micro_batch_tokens)


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _one_of(literal: object) -> str:
    return "one of " + ", ".join(get_args(literal))


def check_one_division(micro_batches: int, micro_batch_tokens: int | None) -> None:
    """Raise ValueError where a budget of tokens is no positive integer, or micro-batches are counted, too."""
    tokens, whole = micro_batch_tokens, isinstance(micro_batch_tokens, int) and micro_batch_tokens >= 1
    if tokens is not None:
        _require("micro_batch_tokens", tokens, whole, "at least 1, or null")
        _require("micro_batches", micro_batches, micro_batches == 1, "1 with micro_batch_tokens, which has its place")


def _require_plain_rewards(config: PolicyConfig, why: str) -> None:
    _require("whiten_rewards", config.whiten_rewards, not config.whiten_rewards, f"False where {why}")


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: it must be {expected}")
