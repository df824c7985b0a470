"""The architectures of common checkpoints, by their name on the Hugging Face hub.

They are for uses without weights: dry runs, memory plans, tests. `presets.json` has the keys of each checkpoint's
published config.json that differ from the family's defaults; loading a checkpoint reads its own file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.hf.config import model_of

_ROWS = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {name: model_of(row, row["model_type"]) for row in _ROWS for name in row["names"]}
)
