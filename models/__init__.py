"""The Flax decoder: its weights, its heads, generation, and Hugging Face export."""

from jrlhf.models.config import ModelConfig, RopeScaling
from jrlhf.models.forward import (
    make_logprobs,
    make_logprobs_with_base,
    make_scores,
    make_token_sums,
    make_values,
)
from jrlhf.models.generation.engine import Engine
from jrlhf.models.generation.generate import Generation, make_generate
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.hf import HFConfig, export_adapter, export_hf, load_adapter, load_hf, read_config
from jrlhf.models.lora import LoRAConfig, init_lora, lora_axes, lora_shardings, merge
from jrlhf.models.params import (
    init_lm,
    init_scalar,
    init_sharded,
    lm_axes,
    param_shardings,
    scalar_axes,
    scalar_from,
)
from jrlhf.models.presets import PRESETS
from jrlhf.models.quantize import Int8, int8_error, int8_shardings, to_int8

__all__ = [
    "Engine",
    "Generation",
    "HFConfig",
    "Int8",
    "LoRAConfig",
    "ModelConfig",
    "PRESETS",
    "RopeScaling",
    "SamplingConfig",
    "Schedule",
    "export_adapter",
    "export_hf",
    "init_lm",
    "init_lora",
    "init_scalar",
    "init_sharded",
    "int8_error",
    "int8_shardings",
    "lm_axes",
    "load_adapter",
    "load_hf",
    "lora_axes",
    "lora_shardings",
    "make_generate",
    "make_logprobs",
    "make_logprobs_with_base",
    "make_scores",
    "make_token_sums",
    "make_values",
    "merge",
    "param_shardings",
    "read_config",
    "scalar_axes",
    "scalar_from",
    "to_int8",
]
