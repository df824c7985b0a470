"""The architectures of common checkpoints, by their name on the Hugging Face hub.

For what needs shapes and no weights: dry runs, memory plans, tests. The numbers are those of each checkpoint's
config.json; whoever loads a checkpoint reads them from there.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jrlhf.models.config import ModelConfig, RopeScaling


def _llama(
    embed: int, layers: int, heads: int, kv_heads: int, mlp: int, *, vocab_size: int = 128256, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        vocab_size,
        embed,
        layers,
        heads,
        kv_heads,
        head_dim=embed // heads,
        mlp=mlp,
        max_positions=4096 if vocab_size == 32000 else 8192,
        rope_theta=10000.0 if vocab_size == 32000 else 500000.0,
        norm_eps=1e-5,
        tie_embeddings=tied,
    )


def _longer(config: ModelConfig, factor: float) -> ModelConfig:
    """A Llama 3 trained on for long contexts (3.1, 3.2, 3.3)."""
    scaling = RopeScaling("llama3", factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    return replace(config, max_positions=131072, rope_scaling=scaling)


def _mistral(vocab_size: int, *, rope_theta: float = 1000000.0, window: int | None = None) -> ModelConfig:
    return ModelConfig(
        vocab_size,
        embed=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14336,
        max_positions=32768,
        rope_theta=rope_theta,
        norm_eps=1e-5,
        tie_embeddings=False,
        window=window,
    )


def _qwen2_5(
    embed: int, layers: int, heads: int, kv_heads: int, mlp: int, *, max_positions: int, norm_eps: float = 1e-6
) -> ModelConfig:
    tied = embed <= 2048
    return ModelConfig(
        vocab_size=151936 if tied else 152064,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=embed // heads,
        mlp=mlp,
        max_positions=max_positions,
        rope_theta=1000000.0,
        norm_eps=norm_eps,
        qkv_bias=True,
        tie_embeddings=tied,
    )


def _qwen3(embed: int, layers: int, heads: int, mlp: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        mlp=mlp,
        max_positions=40960,
        rope_theta=1000000.0,
        qk_norm=True,
        tie_embeddings=embed <= 2560,
    )


def _gemma(
    vocab_size: int,
    embed: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    *,
    max_positions: int,
    query_scalar: int,
    window: int,
    period: int,
    **further: Any,
) -> ModelConfig:
    """Every `period`-th layer is global."""
    return ModelConfig(
        vocab_size,
        embed,
        layers,
        heads,
        kv_heads,
        head_dim,
        mlp,
        max_positions,
        activation="gelu_tanh",
        norm_offset=True,
        post_norms=True,
        window=window,
        local_layers=tuple((index + 1) % period != 0 for index in range(layers)),
        query_scale=query_scalar**-0.5,
        embed_scale=embed**0.5,
        **further,
    )


def _gemma2(
    embed: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, *, query_scalar: int = 256
) -> ModelConfig:
    sizes = (256000, embed, layers, heads, kv_heads, head_dim, mlp)
    return _gemma(
        *sizes,
        max_positions=8192,
        query_scalar=query_scalar,
        window=4096,
        period=2,
        attention_softcap=50.0,
        softcap=30.0,
    )


def _gemma3(embed: int, layers: int, mlp: int) -> ModelConfig:
    return _gemma(
        262144,
        embed,
        layers,
        4,
        1,
        256,
        mlp,
        max_positions=32768,
        query_scalar=256,
        window=512,
        period=6,
        qk_norm=True,
        rope_theta=1000000.0,
        local_rope_theta=10000.0,
    )


def _gpt2(embed: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        mlp=4 * embed,
        max_positions=1024,
        norm_eps=1e-5,
        norm="layer",
        positions="learned",
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _named(configs: Mapping[str, ModelConfig], suffix: str) -> dict[str, ModelConfig]:
    """The same architectures under the names of their instruction-tuned checkpoints too."""
    return {f"{name}{end}": config for name, config in configs.items() for end in ("", suffix)}


_LLAMA_2 = {
    "7b": _llama(4096, 32, 32, 32, 11008, vocab_size=32000),
    "13b": _llama(5120, 40, 40, 40, 13824, vocab_size=32000),
    "70b": _llama(8192, 80, 64, 8, 28672, vocab_size=32000),
}
_LLAMA_8B = _llama(4096, 32, 32, 8, 14336)
_LLAMA_70B = _llama(8192, 80, 64, 8, 28672)
_LONG_70B = _longer(_LLAMA_70B, 8.0)
_LLAMA = {
    "Meta-Llama-3-8B": _LLAMA_8B,
    "Meta-Llama-3-70B": _LLAMA_70B,
    "Llama-3.1-8B": _longer(_LLAMA_8B, 8.0),
    "Llama-3.1-70B": _LONG_70B,
    "Llama-3.2-1B": _longer(_llama(2048, 16, 32, 8, 8192, tied=True), 32.0),
    "Llama-3.2-3B": _longer(_llama(3072, 28, 24, 8, 8192, tied=True), 32.0),
}
_NEMO = replace(_mistral(131072), embed=5120, layers=40, max_positions=128000)
_MISTRAL = {
    "Mistral-7B-v0.1": _mistral(32000, rope_theta=10000.0, window=4096),
    "Mistral-7B-Instruct-v0.1": _mistral(32000, rope_theta=10000.0, window=4096),
    "Mistral-7B-Instruct-v0.2": _mistral(32000),
    "Mistral-7B-v0.3": _mistral(32768),
    "Mistral-7B-Instruct-v0.3": _mistral(32768),
    "Mistral-Nemo-Base-2407": _NEMO,
    "Mistral-Nemo-Instruct-2407": _NEMO,
}
_QWEN_2_5_SIZES = {
    "0.5B": (896, 24, 14, 2, 4864),
    "1.5B": (1536, 28, 12, 2, 8960),
    "3B": (2048, 36, 16, 2, 11008),
    "7B": (3584, 28, 28, 4, 18944),
    "14B": (5120, 48, 40, 8, 13824),
    "32B": (5120, 64, 40, 8, 27648),
    "72B": (8192, 80, 64, 8, 29568),
}
_QWEN_2_5 = {
    name: _qwen2_5(
        *sizes,
        max_positions=32768 if name in ("0.5B", "3B") else 131072,
        norm_eps=1e-5 if name in ("14B", "32B", "72B") else 1e-6,
    )
    for name, sizes in _QWEN_2_5_SIZES.items()
} | {f"{name}-Instruct": _qwen2_5(*sizes, max_positions=32768) for name, sizes in _QWEN_2_5_SIZES.items()}
_QWEN_3 = {
    "0.6B": _qwen3(1024, 28, 16, 3072),
    "1.7B": _qwen3(2048, 28, 16, 6144),
    "4B": _qwen3(2560, 36, 32, 9728),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
}
_GEMMA_2 = {
    "gemma-2-2b": _gemma2(2304, 26, 8, 4, 256, 9216),
    "gemma-2-9b": _gemma2(3584, 42, 16, 8, 256, 14336),
    "gemma-2-27b": _gemma2(4608, 46, 32, 16, 128, 36864, query_scalar=144),
}
_GEMMA_3_270M, _GEMMA_3_1B = _gemma3(640, 18, 2048), _gemma3(1152, 26, 6912)
# The smallest one's base has no "-pt".
_GEMMA_3 = {
    "gemma-3-270m": _GEMMA_3_270M,
    "gemma-3-270m-it": _GEMMA_3_270M,
    "gemma-3-1b-pt": _GEMMA_3_1B,
    "gemma-3-1b-it": _GEMMA_3_1B,
}
_GPT_2 = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
}

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {f"meta-llama/Llama-2-{name}-hf": config for name, config in _LLAMA_2.items()}
    | {f"meta-llama/Llama-2-{name}-chat-hf": config for name, config in _LLAMA_2.items()}
    | {f"meta-llama/{name}": config for name, config in _named(_LLAMA, "-Instruct").items()}
    | {"meta-llama/Llama-3.3-70B-Instruct": _LONG_70B}
    | {f"mistralai/{name}": config for name, config in _MISTRAL.items()}
    | {f"Qwen/Qwen2.5-{name}": config for name, config in _QWEN_2_5.items()}
    | {f"Qwen/Qwen3-{name}": config for name, config in _QWEN_3.items()}
    | {f"google/{name}": config for name, config in _named(_GEMMA_2, "-it").items()}
    | {f"google/{name}": config for name, config in _GEMMA_3.items()}
    | {f"openai-community/{name}": config for name, config in _GPT_2.items()}
    | {
        "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": _LLAMA["Llama-3.1-8B"],
        "Skywork/Skywork-Reward-Gemma-2-27B-v0.2": _GEMMA_2["gemma-2-27b"],
    }
)
