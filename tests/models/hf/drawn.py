"""Draws config.json files over every key that transformers reads for our families, in all their combinations.

A key is drawn from one of three tables: what it changes in a model (`_architecture`), what changes nothing
(`NO_EFFECT`), and what we refuse unless it has a neutral value (`REFUSED`).
"""

import random
from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2")
LOCAL, GLOBAL = "sliding_attention", "full_attention"
VOCAB, POSITIONS = 61, 48

# Keys that transformers reads, or older versions wrote, and values none of which changes a logit.
NO_EFFECT: dict[str, list[Any]] = {
    "attention_dropout": [0.0, 0.4],
    "attn_pdrop": [0.3],
    "embd_pdrop": [0.3],
    "resid_pdrop": [0.3],
    "reorder_and_upcast_attn": [True, False],
    "summary_type": ["first"],
    "summary_use_proj": [False],
    "summary_activation": ["tanh"],
    "summary_proj_to_labels": [False],
    "summary_first_dropout": [0.5],
    "n_ctx": [7],
    "output_cross_attentions": [True],
    "initializer_range": [0.3],
    "use_cache": [True, False],
    "output_attentions": [True, False],
    "output_hidden_states": [True, False],
    "return_dict": [True],
    "chunk_size_feed_forward": [0, 3],
    "pretraining_tp": [1, 2],
    "is_encoder_decoder": [False],
    "is_decoder": [True],
    "gradient_checkpointing": [True],
    "cache_implementation": ["hybrid"],
    "transformers_version": ["4.31.0"],
    "_name_or_path": ["org/model"],
    "name_or_path": ["org/model"],
    "auto_map": [{"AutoConfig": "configuration.Other"}],
    "architectures": [None],
    "problem_type": [None, "regression"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "num_labels": [1, 3],
    "bos_token_id": [None, 0, 5],
    "eos_token_id": [None, 7, [7, 8], 60],
    "pad_token_id": [None, 0, 60],
    "temperature": [0.3],
    "top_k": [4],
    "top_p": [0.2],
    "repetition_penalty": [1.3],
    "num_beams": [3],
    "num_heads": [3],
    "mtp_layer_types": [None],
    "text_encoder": [None, {}],
    "mlp_layer_types": [None],
    "vision_aspect_ratio": ["other"],
    "vision_feature_layer": [1],
    "vision_feature_select_strategy": ["default"],
    "kv_sharing_modes": [None],
    "attention_chunk_size": [None],
    "default_theta": [77.0],
    "default_rope_type": ["default"],
    "fusion_config": [None],
    "quantization_config": [None],
    "tie_last_hidden_states": [False],
    "attn_implementation": ["eager"],
    "_sliding_window_pattern": [2],
    "torch_dtype": ["float32", None],
    "dtype": ["float32", None],
    "max_position_embeddings": [POSITIONS, 16],
    "n_positions": [POSITIONS, 16],
}
# Keys that we do not compute -> (values that mean nothing, values to be refused). The families that read them: None for
# all. In a family that does not read a key, its values change nothing.
REFUSED: dict[str, tuple[list[Any], list[Any], tuple[str, ...] | None]] = {
    "is_causal": ([True], [False, None], None),
    "text_config": ([None], [{"vocab_size": 5}], None),
    "decoder": ([None], [{}], None),
    "generator": ([None], [{}], None),
    "transformers_weights": ([None], ["other.safetensors"], None),
    "per_layer_config": ([None, {}], [{"0": {"intermediate_size": 24, "n_inner": 24}}], None),
    "quantization_config": ([None], [{"quant_method": "gptq"}], None),
    "use_bidirectional_attention": ([None, False], [True], ("gemma2", "gemma3_text")),
    "attn_logit_softcapping": ([None], [20.0], ("gemma3_text",)),
    "add_cross_attention": ([False], [True], ("gpt2",)),
    "scale_attn_by_inverse_layer_idx": ([False], [True], ("gpt2",)),
    "hidden_act": ([], ["gelu", "relu"], ("llama", "mistral", "qwen2", "qwen3")),
    "hidden_activation": ([], ["gelu", "relu"], ("gemma2", "gemma3_text")),
    "activation_function": ([], ["gelu", "relu"], ("gpt2",)),
}
# Further keys that a config.json is drawn with.
DRAWN = (
    "model_type",
    "rope_parameters",
    "rope_scaling",
    "per_layer_config",
    "original_max_position_embeddings",
    "scale_attn_weights",
)


@dataclass
class Drawn:
    """A config.json, and the names of the keys in it that we do not compute: one of them is in the refusal."""

    family: str
    config: dict[str, Any]
    refused: set[str] = field(default_factory=set)


def draw(seed: int) -> Drawn:
    """The config.json of a seed. Of ten, about six have no key that we refuse."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    drawn = Drawn(family, {"model_type": family, "vocab_size": VOCAB})
    (_gpt2 if family == "gpt2" else _rotary)(rng, drawn)
    for key in rng.sample(sorted(NO_EFFECT), rng.randrange(8)):
        drawn.config.setdefault(key, rng.choice(NO_EFFECT[key]))
    for key, (neutral, refused, families) in REFUSED.items():
        reads = families is None or family in families
        if rng.random() < 0.15 and (neutral or not reads):
            drawn.config.setdefault(key, rng.choice(neutral if reads else neutral + refused))
        elif rng.random() < 0.012 and reads:
            drawn.config[key] = rng.choice(refused)
            drawn.refused.add(key)
    return drawn


def _maybe(rng: random.Random, config: dict[str, Any], share: float, key: str, values: list[Any]) -> None:
    if rng.random() < share:
        config[key] = rng.choice(values)


def _gpt2(rng: random.Random, drawn: Drawn) -> None:
    config = drawn.config
    sizes = {"hidden_size": 32, "num_attention_heads": rng.choice([2, 4]), "num_hidden_layers": rng.choice([1, 2, 3])}
    sizes["max_position_embeddings"] = POSITIONS
    own = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    own["max_position_embeddings"] = "n_positions"
    for key, size in sizes.items():  # the general name counts, where both are given
        if rng.random() < 0.2:
            config[key] = size
            _maybe(rng, config, 0.5, own[key], [size * 2])
        else:
            config[own[key]] = size
    _maybe(rng, config, 0.5, "n_inner", [None, 40])
    _maybe(rng, config, 0.5, "activation_function", ["gelu_new", "gelu_pytorch_tanh", "silu", "swish"])
    _maybe(rng, config, 0.5, "layer_norm_epsilon", [1e-5, 0.1])
    _maybe(rng, config, 0.5, "tie_word_embeddings", [True, False])
    _maybe(rng, config, 0.5, "scale_attn_weights", [True, False])
    # What other families read.
    _maybe(rng, config, 0.2, "intermediate_size", [40])
    _maybe(rng, config, 0.2, "num_key_value_heads", [1])
    _maybe(rng, config, 0.2, "head_dim", [4])
    _maybe(rng, config, 0.2, "rms_norm_eps", [0.5])
    _maybe(rng, config, 0.2, "rope_theta", [50.0])
    _maybe(rng, config, 0.2, "layer_types", [[LOCAL] * sizes["num_hidden_layers"]])
    _maybe(rng, config, 0.2, "attention_bias", [False])


def _rotary(rng: random.Random, drawn: Drawn) -> None:
    family, config = drawn.family, drawn.config
    gemma, qwen = family in ("gemma2", "gemma3_text"), family in ("qwen2", "qwen3")
    layers = rng.choice([1, 2, 3])
    config |= {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": layers, "num_attention_heads": 4}
    config["max_position_embeddings"] = POSITIONS
    config["num_key_value_heads"] = rng.choice(
        [1, 2, 4] + [None] * (family not in ("mistral", "gemma2", "gemma3_text"))
    )
    if family == "llama":
        _maybe(rng, config, 0.3, "num_key_value_heads", [None])
    if gemma or family == "qwen3":
        config["head_dim"] = rng.choice([8, 16])
    else:
        _maybe(rng, config, 0.5, "head_dim", [8, 16] + [None] * (family != "qwen2"))
    _maybe(rng, config, 0.5, "rms_norm_eps", [1e-6, 0.1])
    _maybe(rng, config, 0.5, "tie_word_embeddings", [True, False])
    _maybe(
        rng,
        config,
        0.4,
        "hidden_act",
        ["silu", "swish"] if gemma else ["silu", "swish", "gelu_new", "gelu_pytorch_tanh"],
    )
    _maybe(rng, config, 0.4, "hidden_activation", ["gelu_pytorch_tanh", "silu", "gelu_new"])
    _maybe(rng, config, 0.4, "attention_bias", [True, False])
    _maybe(rng, config, 0.4, "mlp_bias", [True, False])
    _maybe(rng, config, 0.9 if gemma else 0.1, "query_pre_attn_scalar", [5, 24])
    _maybe(rng, config, 0.5, "final_logit_softcapping", [None, 2.0])
    if family != "gemma3_text":
        _maybe(rng, config, 0.5, "attn_logit_softcapping", [None, 1.5])
    _windows(rng, drawn, layers, gemma=gemma, qwen=qwen)
    _rope(rng, drawn, layers)
    _maybe(rng, config, 0.1, "scale_attn_weights", [False])
    _maybe(rng, config, 0.1, "n_head", [1])


def _windows(rng: random.Random, drawn: Drawn, layers: int, *, gemma: bool, qwen: bool) -> None:
    """Windows, and the types of the layers."""
    family, config = drawn.family, drawn.config
    if gemma:
        config["sliding_window"] = rng.choice([1, 4, 9, 4096])
    else:
        _maybe(rng, config, 0.7, "sliding_window", [None, 1, 4, 9])
    _maybe(rng, config, 0.8 if qwen else 0.1, "use_sliding_window", [True, True, False])
    _maybe(rng, config, 0.7, "max_window_layers", [-1, 0, 1, 2, 28])
    _maybe(rng, config, 0.4, "sliding_window_pattern", [1, 2, 3])
    if rng.random() < (0.15 if family == "llama" else 0.45):
        types = rng.choice([[GLOBAL] * layers, [LOCAL] * layers, [rng.choice([LOCAL, GLOBAL]) for _ in range(layers)]])
        config["layer_types"] = types
        if family == "mistral":  # transformers makes it Ministral, which needs a head_dim and a window
            config["head_dim"] = config.get("head_dim") or 8
            config["sliding_window"] = config.get("sliding_window") or 4
        windowed = config.get("sliding_window", 4096 if family == "mistral" else None) is not None
        if types and family in ("llama", "mistral"):
            if set(types) != {LOCAL if windowed and family == "mistral" else GLOBAL}:
                drawn.refused.add("layer_types")
        if types and rng.random() < 0.05:
            types[0] = "chunked_attention"
            drawn.refused.add("layer_types")


def _scaling(rng: random.Random, drawn: Drawn, *, local: bool = False) -> dict[str, Any]:
    """The parameters of one kind of layer."""
    kind = rng.choice(["default", "default", "linear", "linear", "llama3"])
    if local:
        kind = "default"
    if rng.random() < 0.04:
        kind = rng.choice(["yarn", "dynamic", "longrope"] + ["linear"] * local)
        drawn.refused.add("rope_type")
    parameters: dict[str, Any] = {}
    if kind != "default" or rng.random() < 0.7:
        parameters[rng.choice(["rope_type", "rope_type", "type"])] = kind
    _maybe(rng, parameters, 0.6, "rope_theta", [20.0, 300.0, 5000])
    if kind != "default":
        parameters["factor"] = rng.choice([2.0, 8.0, 3])
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
        _maybe(rng, parameters, 0.6, "original_max_position_embeddings", [8, 24])
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if rng.random() < 0.03:
        parameters["partial_rotary_factor"] = rng.choice([1.0, 0.5])
        if parameters["partial_rotary_factor"] != 1.0:
            drawn.refused.add("partial_rotary_factor")
    _maybe(rng, parameters, 0.05, "attention_factor", [2.0])  # of yarn alone
    return parameters


def _rope(rng: random.Random, drawn: Drawn, layers: int) -> None:
    config = drawn.config
    _maybe(rng, config, 0.4, "rope_theta", [20.0, 300.0, 5000])
    _maybe(rng, config, 0.4, "rope_local_base_freq", [30.0, 700.0])
    _maybe(rng, config, 0.2, "original_max_position_embeddings", [8, 24])
    if rng.random() < 0.03:
        config["partial_rotary_factor"] = rng.choice([1.0, 0.5])
        if config["partial_rotary_factor"] != 1.0:
            drawn.refused.add("partial_rotary_factor")
    nested = drawn.family == "gemma3_text"
    if rng.random() < 0.5:
        config["rope_scaling"] = rng.choice([None, {}, *[_scaling(rng, drawn)] * 4])
        if nested and "type" in (config["rope_scaling"] or {}):  # which Gemma 3 reads where nothing names a rope_type
            drawn.refused.add("rope_scaling")
    if rng.random() < 0.6:
        if nested and rng.random() < 0.85 or not nested and rng.random() < 0.03:
            parameters = {}
            bare = config.get("rope_scaling") is None  # otherwise transformers needs one for the global layers
            if rng.random() < 0.8 or not bare:
                parameters[GLOBAL] = rng.choice([{}, *[_scaling(rng, drawn)] * 4])
            if rng.random() < 0.8:
                parameters[LOCAL] = _scaling(rng, drawn, local=True)
            if rng.random() < 0.1:
                parameters[rng.choice([GLOBAL, LOCAL]) if bare else LOCAL] = None
            if not nested:
                drawn.refused.add("rope_parameters")
        else:
            parameters = _scaling(rng, drawn)
            if nested:
                drawn.refused.add("rope_parameters")
        config["rope_parameters"] = rng.choice([parameters, parameters, None])
