"""A small model of every family."""

from typing import Any

import pytest

from jrlhf.models import ModelConfig
from jrlhf.models.config.rope import RopeScaling

_SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "embed": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "mlp": 48,
    "max_positions": 64,
}
_GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_offset": True,
    "post_norms": True,
    "embed_scale": 32**0.5,
    "query_scale": 24**-0.5,
    "window": 16,
}
_ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}

# The first word of a name is its family.
CONFIGS = {
    "llama": ModelConfig(**_SIZES, tie_embeddings=False),
    "llama bands": ModelConfig(**_SIZES, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    "llama biased": ModelConfig(**_SIZES, **_ALL_BIASES, rope_scaling=RopeScaling("linear", 2.0)),
    "mistral": ModelConfig(**_SIZES, window=16, tie_embeddings=False),
    "qwen2": ModelConfig(**_SIZES, qkv_bias=True),
    "qwen3": ModelConfig(**_SIZES, qk_norm=True, window=16, local_layers=(False, True, True)),
    "gemma2": ModelConfig(**_SIZES, **_GEMMA, local_layers=(True, False, True), softcap=30.0, attention_softcap=50.0),
    "gemma3_text": ModelConfig(
        **_SIZES,
        **_GEMMA,
        qk_norm=True,
        local_layers=(True, True, False),
        rope_theta=1e6,
        rope_scaling=RopeScaling("linear", 8.0),
        local_rope_theta=1e4,
    ),
    "gpt2": ModelConfig(
        **{**_SIZES, "kv_heads": 4, "head_dim": 8, "mlp": 128},
        **_ALL_BIASES,
        gated_mlp=False,
        norm="layer",
        norm_eps=1e-5,
        positions="learned",
        activation="gelu_tanh",
    ),
}


@pytest.fixture(scope="session")
def configs():
    return CONFIGS
