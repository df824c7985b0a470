import math
from typing import Any

import pytest

from jrlhf.ppo import (
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PolicyConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
    SafeRLHFConfig,
)

ALGORITHMS = (
    PPOConfig,
    GRPOConfig,
    DrGRPOConfig,
    DAPOConfig,
    GSPOConfig,
    RLOOConfig,
    ReinforcePPConfig,
    ReinforcePPBaselineConfig,
    ReMaxConfig,
    SafeRLHFConfig,
)


REFUSED: list[tuple[Any, str, dict[str, Any]]] = [
    (PPOConfig, "discount", {"discount": 1.1}),
    (PPOConfig, "gae_lambda", {"gae_lambda": -0.1}),
    (PPOConfig, "truncation", {"truncation": "drop"}),
    (PPOConfig, "clip_low", {"clip_low": 0.0}),
    (PPOConfig, "clip_low", {"clip_low": 1.5}),
    (PPOConfig, "clip_high", {"clip_high": 0}),
    (PPOConfig, "clip_high", {"clip_high": math.inf}),
    (PPOConfig, "dual_clip", {"dual_clip": 1.0}),
    (PPOConfig, "entropy_coef", {"entropy_coef": math.nan}),
    (PPOConfig, "target_kl", {"target_kl": 0.0}),
    (PPOConfig, "value_clip", {"value_clip": -0.2}),
    (PPOConfig, "epochs", {"epochs": 0}),
    (PPOConfig, "minibatches", {"minibatches": 2.0}),
    (PPOConfig, "micro_batches", {"micro_batches": -1}),
    (PPOConfig, "kl_estimator", {"kl_estimator": "k4"}),
    (PPOConfig, "kl_coef", {"kl_coef": -0.1}),
    (PPOConfig, "kl_coef", {"kl_coef": 0.0, "kl_target": 1.0}),  # an adaptive controller cannot start at zero
    (PPOConfig, "kl_target", {"kl_target": 0.0}),
    (PPOConfig, "kl_horizon", {"kl_horizon": 0.0}),
    (PolicyConfig, "kl_estimator", {"kl_estimator": "k3+"}),
    (PolicyConfig, "kl_estimator", {"kl_in": "loss"}),
    (PolicyConfig, "aggregation", {"ratio": "sequence-mean", "aggregation": "constant"}),
    (PolicyConfig, "aggregation_divisor", {"aggregation_divisor": 7}),
    (PolicyConfig, "aggregation_divisor", {"aggregation": "constant", "aggregation_divisor": 0}),
    (PolicyConfig, "importance", {"importance": "row"}),
    (PolicyConfig, "importance", {"importance": "token", "old_logprobs": "rollout"}),
    (PolicyConfig, "importance_cap", {"importance_cap": 0.9}),
    (PolicyConfig, "mask_token", {"mask_token": (0.5,)}),
    (PolicyConfig, "mask_token", {"mask_token": (1.1, 2)}),  # not even the rollout's own policy is within them
    (PolicyConfig, "mask_sequence", {"mask_sequence": (-0.1, 2)}),
    (PolicyConfig, "mask_sequence_mean", {"mask_sequence_mean": (0.5, math.inf)}),
    (PolicyConfig, "mask_k3", {"mask_k3": 0.0}),
    (PolicyConfig, "mask_k3", {"mask_k3": 0.1, "old_logprobs": "rollout"}),
    (PolicyConfig, "staleness", {"staleness": -1}),
    (PolicyConfig, "surrogate", {"surrogate": "cispo", "dual_clip": 3.0}),
    (GSPOConfig, "surrogate", {"surrogate": "cispo"}),
    (PolicyConfig, "ptx_coef", {"ptx_coef": -1.0}),
    (GRPOConfig, "samples", {"samples": 1}),
    (GRPOConfig, "discount", {"discount": 0.99}),
    (GRPOConfig, "whiten_rewards", {"whiten_rewards": True}),
    (DAPOConfig, "max_rounds", {"max_rounds": 0}),
    (RLOOConfig, "samples", {"samples": 1}),
    (ReMaxConfig, "whiten_rewards", {"whiten_rewards": True}),
    (SafeRLHFConfig, "whiten_rewards", {"whiten_rewards": True}),
    (SafeRLHFConfig, "cost_limit", {"cost_limit": math.nan}),
    (SafeRLHFConfig, "multiplier_max", {"multiplier_max": 0.0}),
    (SafeRLHFConfig, "multiplier", {"multiplier": 6.0}),
    (SafeRLHFConfig, "multiplier_rate", {"multiplier_rate": 0.0}),
    (SafeRLHFConfig, "window", {"window": 0}),
    (DPOConfig, "beta", {"beta": 0.0}),
    (DPOConfig, "label_smoothing", {"label_smoothing": 0.5}),
    (DPOConfig, "label_smoothing", {"label_smoothing": 0.1, "loss": "ipo"}),
    (DPOConfig, "micro_batches", {"micro_batches": 0}),
]


def test_what_an_algorithm_refuses_is_named():
    for config, name, options in REFUSED:
        with pytest.raises(ValueError, match=f"^{name}=.*: it must be ") as error:
            config(**options)
        value = options.get(name, getattr(config(), name))
        assert str(error.value).startswith(f"{name}={value!r}: "), (config, options)


def test_what_an_algorithm_allows():
    PPOConfig(discount=0, gae_lambda=1, clip_low=1, kl_coef=0, dual_clip=None, value_clip=None, target_kl=None)
    # Rewards are whitened where one deviation fits all of them.
    assert PPOConfig(whiten_rewards=True).whiten_rewards and ReinforcePPConfig(whiten_rewards=True).whiten_rewards
    # Only algorithms with a critic bootstrap, and only if they are told to.
    assert {config for config in ALGORITHMS if config.has_critic} == {PPOConfig, SafeRLHFConfig}
    for config in ALGORITHMS:
        assert config().truncation == "zero"
        if config.has_critic:
            assert config(truncation="bootstrap").has_critic
        else:
            with pytest.raises(ValueError, match="truncation='bootstrap'"):
                config(truncation="bootstrap")
