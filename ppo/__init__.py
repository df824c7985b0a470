"""RL mathematics and jitted steps over functions and arrays, for any model that computes log-probs and values."""

from jrlhf.meshes.by_length import ByLength, bucket_widths, map_by_length
from jrlhf.meshes.rows import map_parts
from jrlhf.ppo.advantages import group_advantages
from jrlhf.ppo.config.algorithms import (
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
    SafeRLHFConfig,
)
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.critic import (
    PPOState,
    make_critic_step,
    make_on_policy_actor_step,
    make_on_policy_step,
    make_ppo_step,
    value_loss,
)
from jrlhf.ppo.experience import experience_metrics, make_group_experience, sequence_kl, update_kl
from jrlhf.ppo.losses import cispo_loss, kl_estimate, loss_weights, policy_loss
from jrlhf.ppo.masked import masked_mean, masked_variance, masked_whiten, response_mask
from jrlhf.ppo.off_policy import age_metrics, importance_weights, proximal_logprobs
from jrlhf.ppo.safe import MultiplierState, make_safe_experience, update_multiplier
from jrlhf.ppo.shaping import RunningMoments, ScoreConfig, align_scores, shape_scores
from jrlhf.ppo.steps import make_actor_step
from jrlhf.ppo.supervised import (
    PairBatch,
    PreferenceBatch,
    bradley_terry_loss,
    dpo_loss,
    make_dpo_step,
    make_preference_step,
    make_sft_step,
    pair_terms,
    response_logprobs,
    with_reference,
)
from jrlhf.ppo.token_advantages import (
    gae,
    make_custom_experience,
    make_experience,
    make_return_experience,
    returns_to_go,
)
from jrlhf.ppo.types import Experience, KLState, Rollout, SFTBatch, TrainState
from jrlhf.ppo.updates import Step

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
    "Step",
    "TrainState",
    "age_metrics",
    "align_scores",
    "bradley_terry_loss",
    "bucket_widths",
    "cispo_loss",
    "dpo_loss",
    "experience_metrics",
    "gae",
    "group_advantages",
    "importance_weights",
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
    "proximal_logprobs",
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
