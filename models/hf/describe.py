"""Our numbers as config.json says them to transformers, version 4 or 5. `config.py` is the way back, and the judge.

What a family writes is read again, and only what then computes the same is a description of the model.
"""

import math
from dataclasses import fields, replace
from typing import Any

from jrlhf.models.config import ModelConfig, RopeScaling
from jrlhf.models.hf.config import FAMILIES, GLOBAL, LOCAL, Json, model_of
from jrlhf.models.params import HeadKind


def hf_config(config: ModelConfig, head: HeadKind = "lm", family: str | None = None) -> dict[str, Any]:
    """config.json, but for the special tokens and the dtype, in version 4's keys, which version 5 reads as well.

    family: the `model_type` to prefer, such as the one that the model was loaded as. It is taken if it computes what
        `config` says; otherwise, and with None, the first family that does.

    Raises:
        ValueError: no family computes what this config says.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family {family!r} is not supported: known are {', '.join(FAMILIES)}")
    faults: dict[str, list[str]] = {}
    for name in FAMILIES if family is None else dict.fromkeys([family, *FAMILIES]):
        written = _write(config, name, head)
        faults[name] = _faults(config, written, name)
        if not faults[name]:
            return written
    nearest = min(faults, key=lambda name: len(faults[name]))
    named = ", ".join(f"{field}={getattr(config, field)!r}" for field in faults[nearest])
    raise ValueError(
        f"a model with {named} cannot be exported: no Hugging Face family computes it, and {nearest} is the nearest"
    )


def _faults(config: ModelConfig, written: Json, family: str) -> list[str]:
    """The fields of `config` that `written` does not say."""
    try:
        understood = _canonical(model_of(written, family))
    except ValueError:  # a number that this family cannot have
        return [field.name for field in fields(config)]
    wanted = _canonical(config)
    wrong = [f.name for f in fields(wanted) if not _equal(getattr(wanted, f.name), getattr(understood, f.name))]
    return wrong + (["embed", "heads"] if family in _WHOLE_HEADS and config.embed % config.heads else [])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)  # 24 ** -0.5 and 1 / sqrt(24) are one number
    return one == other


# Whose configs transformers refuses where the heads do not divide the hidden size, head_dim or not.
_WHOLE_HEADS = ("llama", "gemma2", "gemma3_text")


def _canonical(config: ModelConfig) -> ModelConfig:
    """The same computation said in one way."""
    local = config.local_layers or (True,) * config.layers
    window = config.window if any(local) else None
    layers = () if window is None or all(local) else tuple(local)
    scale = None if _equal(config.query_scale, config.head_dim**-0.5) else config.query_scale
    theta = None if window is None else config.local_rope_theta
    return replace(config, window=window, local_layers=layers, local_rope_theta=theta, query_scale=scale)


def _write(config: ModelConfig, family: str, head: HeadKind) -> dict[str, Any]:
    """`config` as this family says it; what the family has no key for is left out."""
    written: dict[str, Any] = {"architectures": [FAMILIES[family].architecture(head)], "model_type": family}
    if head == "scalar":
        written |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    written |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }
    if family == "gpt2":
        return written | {
            "n_embd": config.embed,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.mlp,
            "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
            "scale_attn_weights": config.query_scale != 1.0,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    written |= {
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_scaling": _written_scaling(config.rope_scaling),
    }
    activation = "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation
    local = _canonical(config).local_layers or (config.window is not None,) * config.layers
    types = [LOCAL if each else GLOBAL for each in local]
    if family in ("gemma2", "gemma3_text"):
        scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
        whole = round(scalar)  # version 5 takes no other; where it is not, the caller sees the difference
        written |= {
            "hidden_act": activation,
            "hidden_activation": activation,
            "attention_bias": config.qkv_bias,
            "query_pre_attn_scalar": whole,
            "final_logit_softcapping": config.softcap,
            "attn_logit_softcapping": config.attention_softcap if family == "gemma2" else None,
            "sliding_window": config.window,
            "layer_types": types,
        }
        if family == "gemma3_text":
            written["rope_local_base_freq"] = config.local_rope_theta or 10000.0
            period = next((n + 1 for n, each in enumerate(local) if not each), config.layers + 1)
            if list(local) == [(index + 1) % period != 0 for index in range(config.layers)]:
                written["sliding_window_pattern"] = period  # all that versions before 4.53 read
        return written
    written["hidden_act"] = activation
    if family == "mistral":
        return written | {"sliding_window": config.window}
    if family == "llama":
        return written | {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    written |= {"use_sliding_window": config.window is not None, "sliding_window": config.window, "layer_types": types}
    first = types.index(LOCAL) if LOCAL in types else config.layers
    written["max_window_layers"] = first
    return written | ({"attention_bias": config.qkv_bias} if family == "qwen3" else {})


def _written_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return written
