import math

import pytest

from jrlhf.ppo import PPOConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("discount", 1.1),
        ("gae_lambda", -0.1),
        ("truncation", "drop"),
        ("clip_low", 0.0),
        ("clip_low", 1.5),
        ("clip_high", 0),
        ("clip_high", math.inf),
        ("dual_clip", 1.0),
        ("entropy_coef", math.nan),
        ("target_kl", 0.0),
        ("value_clip", -0.2),
        ("epochs", 0),
        ("minibatches", 2.0),
        ("micro_batches", -1),
        ("kl_estimator", "k4"),
        ("kl_coef", -0.1),
        ("kl_target", 0.0),
        ("kl_horizon", 0.0),
    ],
)
def test_a_bad_number_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value!r}: it must be "):
        PPOConfig(**{name: value})


def test_an_adaptive_controller_cannot_start_at_zero():
    with pytest.raises(ValueError, match="kl_coef=0.0"):
        PPOConfig(kl_coef=0.0, kl_target=1.0)


def test_the_edges_of_the_ranges_are_allowed():
    PPOConfig(discount=0, gae_lambda=1, clip_low=1, kl_coef=0, dual_clip=None, value_clip=None, target_kl=None)
