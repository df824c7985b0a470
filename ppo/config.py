"""Every number of the algorithm."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

KLEstimator = Literal["k1", "k2", "k3"]
Truncation = Literal["bootstrap", "zero", "mask"]


@dataclass(frozen=True)
class PPOConfig:
    """PPO for language models (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155).

    Raises:
        ValueError: a number out of its range, with its name, its value and the range.
    """

    # Advantages
    discount: float = 1.0  # gamma, a token
    gae_lambda: float = 0.95
    whiten_advantages: bool = True  # over all response tokens of the batch
    truncation: Truncation = "bootstrap"
    """What follows the last token of a row that the length limit cut off (`finished` False).

    "bootstrap": the critic's value there, as the text would have gone on (Pardo et al. 2018, arXiv:1712.00378);
    "zero": nothing, the limit counts as an end; "mask": the row is left out of the losses and of the statistics.
    """

    # Policy loss
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float | None = None  # > 1: bounds the loss at dual_clip * |A| where A < 0 (arXiv:1912.09729)
    entropy_coef: float = 0.0
    target_kl: float | None = None  # stop this batch's actor updates when KL(old, new) in nats a token exceeds it

    # Value loss
    value_clip: float | None = 0.2  # None: not clipped

    # Updates on one batch of experience
    epochs: int = 1
    minibatches: int = 1  # optimizer updates an epoch
    micro_batches: int = 1  # parts in which a minibatch is computed; changes memory, not the result
    micro_batch_tokens: int | None = None
    """Compute a minibatch in parts of about so many tokens a device instead, padding included (verl's
    ppo_max_token_len_per_gpu). Rows of similar length are computed together and no wider than they need: `budget.py`.
    Changes time and memory, not the result; compiles the model up to four times over. Where layers are computed in
    slices (adapters with mesh.tensor > 1) a device computes its slice for `tensor` times as many.
    """
    seed: int = 0  # of the shuffles

    # KL to the reference
    kl_estimator: KLEstimator = "k1"
    kl_coef: float = 0.05  # beta, its start if adaptive
    kl_target: float | None = None  # None: fixed; otherwise the goal for objective/kl, in nats a sequence
    kl_horizon: float = 10_000.0  # of the adaptive controller, in sequences

    def __post_init__(self) -> None:
        _require("discount", self.discount, 0 <= self.discount <= 1, "in [0, 1]")
        _require("gae_lambda", self.gae_lambda, 0 <= self.gae_lambda <= 1, "in [0, 1]")
        _require("truncation", self.truncation, self.truncation in get_args(Truncation), _one_of(Truncation))
        _require("clip_low", self.clip_low, 0 < self.clip_low <= 1, "in (0, 1]")
        _require("clip_high", self.clip_high, _positive(self.clip_high), "positive and finite")
        _require("entropy_coef", self.entropy_coef, math.isfinite(self.entropy_coef), "finite")
        _require("kl_estimator", self.kl_estimator, self.kl_estimator in get_args(KLEstimator), _one_of(KLEstimator))
        _require("kl_coef", self.kl_coef, self.kl_coef >= 0 and math.isfinite(self.kl_coef), "at least 0 and finite")
        _require("kl_horizon", self.kl_horizon, _positive(self.kl_horizon), "positive and finite")
        if self.dual_clip is not None:
            _require("dual_clip", self.dual_clip, self.dual_clip > 1, "above 1, or null to switch it off")
        for name in ("value_clip", "target_kl", "kl_target"):
            value = getattr(self, name)
            if value is not None:
                _require(name, value, _positive(value), "positive and finite, or null to switch it off")
        for name in ("epochs", "minibatches", "micro_batches"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, int) and value >= 1, "an integer of at least 1")
        if self.micro_batch_tokens is not None:
            tokens, whole = self.micro_batch_tokens, self.micro_batches == 1
            _require("micro_batch_tokens", tokens, isinstance(tokens, int) and tokens >= 1, "at least 1, or null")
            _require("micro_batches", self.micro_batches, whole, "1 with micro_batch_tokens, which has its place")
        if self.kl_target is not None:
            _require("kl_coef", self.kl_coef, self.kl_coef > 0, "above 0 with kl_target: the controller multiplies it")


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _one_of(literal: object) -> str:
    return "one of " + ", ".join(get_args(literal))


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: it must be {expected}")
