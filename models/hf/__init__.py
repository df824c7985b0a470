"""Reads and writes Hugging Face directories: config.json, safetensors, PEFT adapters. Does not need torch."""

from jrlhf.models.hf.adapters import export_adapter as export_adapter
from jrlhf.models.hf.adapters import load_adapter as load_adapter
from jrlhf.models.hf.adapters import read_adapter_config as read_adapter_config
from jrlhf.models.hf.config import HFConfig as HFConfig
from jrlhf.models.hf.config import drawn_with as drawn_with
from jrlhf.models.hf.config import hf_config as hf_config
from jrlhf.models.hf.config import read_config as read_config
from jrlhf.models.hf.export import export_hf as export_hf
from jrlhf.models.hf.load import check_hf as check_hf
from jrlhf.models.hf.load import load_hf as load_hf
