"""Hugging Face directories in and out: config.json, safetensors, PEFT adapters. No torch."""

from jrlhf.models.hf.adapters import export_adapter, load_adapter, read_adapter_config
from jrlhf.models.hf.config import HFConfig, read_config
from jrlhf.models.hf.describe import hf_config
from jrlhf.models.hf.export import export_hf
from jrlhf.models.hf.load import check_hf, load_hf

__all__ = [
    "HFConfig",
    "check_hf",
    "export_adapter",
    "export_hf",
    "hf_config",
    "load_adapter",
    "load_hf",
    "read_adapter_config",
    "read_config",
]
