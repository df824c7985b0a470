"""The settings with which the benchmark of shipped configs runs them."""

import pytest

from benchmarks.configs import SMALL, without_hub
from jrlhf.config import load_config


@pytest.mark.parametrize("name", ["gsm8k-ppo", "qwen3-8b-lora", "llama3-8b-ppo"])
def test_every_config_of_a_model_takes_them(tmp_path, name):
    config = load_config(name, [*SMALL, *without_hub(tmp_path / "model", tmp_path / "rows", tmp_path)])
    assert config.validation is None and config.model.path == str(tmp_path / "model")
