"""RL mathematics and jitted steps over functions and arrays: bring any model that gives log-probs and values."""

from jrlhf.ppo.advantages import gae, group_advantages, returns_to_go
from jrlhf.ppo.budget import ByLength, bucket_widths, map_by_length
from jrlhf.ppo.config import (
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
from jrlhf.ppo.dpo import make_dpo_step, pair_terms, response_logprobs, with_reference
from jrlhf.ppo.experience import (
    experience_metrics,
    make_custom_experience,
    make_experience,
    make_group_experience,
    make_return_experience,
    make_safe_experience,
    sequence_kl,
)
from jrlhf.ppo.kl import kl_estimate, update_kl
from jrlhf.ppo.losses import bradley_terry_loss, dpo_loss, loss_weights, policy_loss, value_loss
from jrlhf.ppo.masked import masked_mean, masked_variance, masked_whiten, response_mask
from jrlhf.ppo.minibatches import map_parts
from jrlhf.ppo.onpolicy import make_on_policy_actor_step, make_on_policy_step
from jrlhf.ppo.pretraining import make_preference_step, make_sft_step
from jrlhf.ppo.safe import MultiplierState, update_multiplier
from jrlhf.ppo.shaping import RunningMoments, ScoreConfig, align_scores, shape_scores
from jrlhf.ppo.steps import make_actor_step, make_critic_step, make_ppo_step
from jrlhf.ppo.types import Experience, KLState, PairBatch, PPOState, PreferenceBatch, Rollout, SFTBatch, TrainState

__all__ = [
    "ByLength",
    "DAPOConfig",
    "DPOConfig",
    "DrGRPOConfig",
    "Experience",
    "GRPOConfig",
    "GSPOConfig",
    "KLState",
    "MultiplierState",
    "PPOConfig",
    "PPOState",
    "PairBatch",
    "PolicyConfig",
    "PreferenceBatch",
    "RLOOConfig",
    "ReMaxConfig",
    "ReinforcePPBaselineConfig",
    "ReinforcePPConfig",
    "Rollout",
    "RunningMoments",
    "SFTBatch",
    "SafeRLHFConfig",
    "ScoreConfig",
    "TrainState",
    "align_scores",
    "bradley_terry_loss",
    "bucket_widths",
    "dpo_loss",
    "experience_metrics",
    "gae",
    "group_advantages",
    "kl_estimate",
    "loss_weights",
    "make_actor_step",
    "make_critic_step",
    "make_custom_experience",
    "make_dpo_step",
    "make_experience",
    "make_group_experience",
    "make_on_policy_actor_step",
    "make_on_policy_step",
    "make_ppo_step",
    "make_preference_step",
    "make_return_experience",
    "make_safe_experience",
    "make_sft_step",
    "map_by_length",
    "map_parts",
    "masked_mean",
    "masked_variance",
    "masked_whiten",
    "pair_terms",
    "policy_loss",
    "response_logprobs",
    "response_mask",
    "returns_to_go",
    "sequence_kl",
    "shape_scores",
    "update_kl",
    "update_multiplier",
    "value_loss",
    "with_reference",
]
