"""Checks the sizes and switches of a decoder, which may come from untrusted files."""

import sys
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

MOST_STOP_BYTES = 256  # of all stop strings together


def check_decoder(config: Any) -> None:
    """Raises a ValueError that names the first invalid number or switch of a `ModelConfig`."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int and not is_count(value):
            raise ValueError(f"model {field.name}={value!r} must be a positive integer")
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            raise ValueError(f"model {field.name}={value!r}: known are {', '.join(get_args(field.type))}")
    for name in ("rope_theta", "norm_eps", "initializer_range"):
        if not positive(getattr(config, name)):
            raise ValueError(f"model {name}={getattr(config, name)!r} must be positive")
    for name in ("softcap", "attention_softcap", "local_rope_theta", "query_scale", "embed_scale"):
        value = getattr(config, name)
        if value is not None and not positive(value):
            raise ValueError(f"model {name}={value!r} must be positive, or null for none")
    if config.heads % config.kv_heads:
        raise ValueError(f"model kv_heads={config.kv_heads} must divide heads={config.heads}")
    if config.positions == "rotary" and config.head_dim % 2:
        raise ValueError(f"model head_dim={config.head_dim} must be even: rotary positions turn pairs")
    if config.norm == "layer" and config.norm_offset:
        raise ValueError("model norm_offset=True needs norm='rms': a LayerNorm multiplies by its scale alone")
    if config.window is not None and not is_count(config.window):
        raise ValueError(f"model window={config.window!r} must be a positive integer, or null for none")
    if not isinstance(config.local_layers, tuple) or not all(isinstance(flag, bool) for flag in config.local_layers):
        raise ValueError(f"model local_layers={config.local_layers!r} must be a tuple of booleans")
    if config.local_layers and len(config.local_layers) != config.layers:
        raise ValueError(
            f"model local_layers has {len(config.local_layers)} flags for layers={config.layers}: it needs one a layer"
        )
    if config.window is None and (config.local_layers or config.local_rope_theta is not None):
        raise ValueError("model local_layers and local_rope_theta need a window: without one no layer is local")
    if config.positions == "learned" and (config.rope_scaling is not None or config.local_rope_theta is not None):
        raise ValueError("model rope_scaling and local_rope_theta need positions='rotary'")


def positive(value: float) -> bool:
    """True if a number is positive, and finite as a float."""
    return 0 < value <= sys.float_info.max


def is_count(value: object) -> bool:
    """True for a positive integer, but not for True."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
