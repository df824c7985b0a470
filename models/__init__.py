"""The Flax decoder: its weights, its heads, generation, and Hugging Face export."""

from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.config.rope import RopeScaling
from jrlhf.models.forward import ForwardOptions, make_logprobs, make_logprobs_with_base, make_token_sums
from jrlhf.models.generation.decoding import Generation
from jrlhf.models.generation.engine import Engine, make_generate
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.hf import HFConfig, export_adapter, export_hf, load_adapter, load_hf, read_config
from jrlhf.models.hf.presets import PRESETS
from jrlhf.models.init import init_lm, init_scalar, init_sharded, scalar_from
from jrlhf.models.lora import LoRAConfig, init_lora, lora_shardings, merge
from jrlhf.models.modules import Int8
from jrlhf.models.params import param_shardings
from jrlhf.models.quantize import int8_error, int8_shardings, to_int8
from jrlhf.models.scalars import make_scores, make_values

__all__ = [
    "Engine",
    "ForwardOptions",
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
    "load_adapter",
    "load_hf",
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
    "scalar_from",
    "to_int8",
]
