"""RL mathematics and jitted steps over functions and arrays: bring any model that gives log-probs and values."""

from jrlhf.ppo.advantages import gae
from jrlhf.ppo.budget import ByLength, bucket_widths, map_by_length
from jrlhf.ppo.config import PPOConfig
from jrlhf.ppo.experience import experience_metrics, make_experience, sequence_kl
from jrlhf.ppo.kl import kl_estimate, update_kl
from jrlhf.ppo.losses import bradley_terry_loss, policy_loss, value_loss
from jrlhf.ppo.masked import masked_mean, masked_variance, masked_whiten, response_mask
from jrlhf.ppo.onpolicy import make_on_policy_step
from jrlhf.ppo.pretraining import make_preference_step, make_sft_step
from jrlhf.ppo.shaping import RunningMoments, ScoreConfig, align_scores, shape_scores
from jrlhf.ppo.steps import make_actor_step, make_critic_step, make_ppo_step
from jrlhf.ppo.types import Experience, KLState, PPOState, PreferenceBatch, Rollout, SFTBatch, TrainState

__all__ = [
    "ByLength",
    "Experience",
    "KLState",
    "PPOConfig",
    "PPOState",
    "PreferenceBatch",
    "Rollout",
    "RunningMoments",
    "SFTBatch",
    "ScoreConfig",
    "TrainState",
    "align_scores",
    "bradley_terry_loss",
    "bucket_widths",
    "experience_metrics",
    "gae",
    "kl_estimate",
    "make_actor_step",
    "make_critic_step",
    "make_experience",
    "make_on_policy_step",
    "make_ppo_step",
    "make_preference_step",
    "make_sft_step",
    "map_by_length",
    "masked_mean",
    "masked_variance",
    "masked_whiten",
    "policy_loss",
    "response_mask",
    "sequence_kl",
    "shape_scores",
    "update_kl",
    "value_loss",
]
