"""The Flax decoder: its weights, its heads, generation, and Hugging Face export."""

from jrlhf.models.config import ModelConfig
from jrlhf.models.forward import make_logprobs, make_scores, make_values
from jrlhf.models.generate import Generation, make_generate
from jrlhf.models.hf import export_hf
from jrlhf.models.params import (
    init_lm,
    init_scalar,
    init_sharded,
    lm_axes,
    param_shardings,
    scalar_axes,
    scalar_from,
)
from jrlhf.models.sampling import SamplingConfig

__all__ = [
    "Generation",
    "ModelConfig",
    "SamplingConfig",
    "export_hf",
    "init_lm",
    "init_scalar",
    "init_sharded",
    "lm_axes",
    "make_generate",
    "make_logprobs",
    "make_scores",
    "make_values",
    "param_shardings",
    "scalar_axes",
    "scalar_from",
]
