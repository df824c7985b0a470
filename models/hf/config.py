"""config.json: what transformers, version 4 or 5, says of a model, as our numbers. `describe.py` is the way back.

Hub configs omit keys, so every family has its table of defaults, transformers' own. What a model computes is never
approximated: a value that we have no meaning for is refused by its name.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jrlhf.models.config import ModelConfig, RopeScaling
from jrlhf.models.params import HeadKind

Json = Mapping[str, Any]
_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
_MOST_LAYERS = 10_000  # a config.json may say anything, and each layer has an entry in what is made of it


@dataclass(frozen=True)
class HFConfig:
    """What a Hugging Face directory says of its model.

    model: the decoder.
    family: its `model_type`.
    head: "scalar" for a sequence classifier with one label (a reward model), "lm" otherwise.
    eos_ids, bos_id, pad_id: the tokens that end a response, begin a text and fill a row, of generation_config.json
        where it names them. Empty and None where there is none; an id outside the vocabulary, which nothing can draw,
        is none.
    dtype: what the weights were written in: float32, bfloat16 or float16.
    """

    model: ModelConfig
    family: str
    head: HeadKind
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    dtype: str


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers: its classes by head, and the values of keys that a config.json omits.

    backbone: the class without a head. Its weights make a language model where embeddings are tied.
    """

    causal: str
    classifier: str
    backbone: str
    defaults: Json

    def architecture(self, head: HeadKind) -> str:
        """The name of the class with this head."""
        return self.causal if head == "lm" else self.classifier


_COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN = _7B | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_bidirectional_attention": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _family(prefix: str, *defaults: Json, causal: str = "ForCausalLM", inner: str = "") -> Family:
    merged = {key: value for each in defaults for key, value in each.items()}
    classifier, backbone = f"{prefix}{inner}ForSequenceClassification", f"{prefix}{inner}Model"
    return Family(prefix + causal, classifier, backbone, MappingProxyType(merged))


# model_type -> family, in the order in which an export prefers them.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _family(
            "Llama",
            _COMMON | _7B,
            {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
            {"bos_token_id": 1, "eos_token_id": 2},
        ),
        "qwen2": _family("Qwen2", _COMMON, _QWEN),
        "qwen3": _family("Qwen3", _COMMON, _QWEN, {"head_dim": 128}),
        "mistral": _family(
            "Mistral",
            _COMMON | _7B,
            {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072},
            {"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "gemma2": _family(
            "Gemma2",
            _COMMON | _GEMMA,
            {"vocab_size": 256000, "max_position_embeddings": 8192},
            {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        ),
        "gemma3_text": _family(
            "Gemma3",
            _COMMON | _GEMMA,
            {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
            {"final_logit_softcapping": None, "attn_logit_softcapping": None},
            inner="Text",
        ),
        "gpt2": _family(
            "GPT2",
            {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
            {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02},
            {"tie_word_embeddings": True, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
            {"add_cross_attention": False, "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None},
            causal="LMHeadModel",
        ),
    }
)


# ---- reading


def read_config(directory: str | os.PathLike[str]) -> HFConfig:
    """Reads config.json and, where there is one, generation_config.json.

    Raises:
        FileNotFoundError: no such directory, or it holds no config.json.
        ValueError: a file that is not JSON, a family or a setting that we do not compute, a value of the wrong type.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(_no_config(directory))
    raw = _read_json(path)
    try:
        name = _known_family(raw)
        model = model_of(raw, name)
        head = _head(raw, FAMILIES[name])
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown: known are {', '.join(_DTYPES)}")
        generation = directory / "generation_config.json"
        said = _read_json(generation) if generation.is_file() else {}
        chosen = {key: value for key, value in said.items() if value is not None}
        defaults = FAMILIES[name].defaults
        told = {**defaults, **raw, **chosen}
        return HFConfig(
            model=model,
            family=name,
            head=head,
            eos_ids=_eos_ids(chosen, {}, model) or _eos_ids(raw, defaults, model),
            bos_id=_token_id("bos_token_id", told["bos_token_id"], model),
            pad_id=_token_id("pad_token_id", told["pad_token_id"], model),
            dtype=dtype,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _no_config(directory: Path) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}: name one that holds a model's config.json and safetensors"
    if (directory / "adapter_config.json").is_file():
        base = _read_json(directory / "adapter_config.json").get("base_model_name_or_path")
        return f"{directory} holds only an adapter: load its base model, {base}, and then the adapter onto it"
    return f"{directory} holds no config.json: name a directory that a model was saved to with save_pretrained"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where an object is expected: fetch the file again")
    return content


def _known_family(raw: Json) -> str:
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type {name!r} is not supported: choose a model of {', '.join(sorted(FAMILIES))}")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(f"quantization_config ({method}) is not supported: choose the model's unquantized weights")
    return name


def _head(raw: Json, family: Family) -> HeadKind:
    known: dict[str, HeadKind] = {family.causal: "lm", family.backbone: "lm", family.classifier: "scalar"}
    architectures = raw.get("architectures") or [family.causal]
    if architectures not in ([name] for name in known):
        raise ValueError(f"architectures {architectures} are not supported: known are {', '.join(known)}")
    head = known[architectures[0]]
    named = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # two labels unless it says otherwise
    if not isinstance(named, dict):
        raise ValueError(f"id2label {named!r} must be an object")
    labels = raw.get("num_labels", len(named))
    if head == "scalar" and labels != 1:
        raise ValueError(f"num_labels {labels} is not supported: a reward model has 1")
    return head


def model_of(raw: Json, family: str) -> ModelConfig:
    """The decoder that a config.json of this family describes."""
    values = _Values(raw, FAMILIES[family].defaults)
    return ModelConfig(**(_gpt2(values) if family == "gpt2" else _llama_like(values, family)))


@dataclass(frozen=True)
class _Values:
    """A config.json with its family's defaults; every value is checked for its type where it is read."""

    raw: Json
    defaults: Json

    def integer(self, key: str, below: int = 2**31) -> int:
        return _integer(key, self[key], below)

    def number(self, key: str) -> float:
        return _number(key, self[key])

    def flag(self, key: str) -> bool:
        value = self[key]
        if not isinstance(value, bool):
            raise ValueError(f"{key} {value!r} must be true or false")
        return value

    def activation(self, key: str) -> str:
        value = self[key]
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ValueError(f"{key} {value!r} is not supported: known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def __getitem__(self, key: str) -> Any:
        return self.raw[key] if key in self.raw else self.defaults[key]


def _integer(key: str, value: Any, below: int = 2**31) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} {value!r} must be an integer")
    if abs(value) >= below:
        raise ValueError(f"{key} {_digits(value)} is no size of a model")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} {value!r} must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{key} {_digits(value)} is too large for a number") from error


def _digits(value: int | float) -> str:
    return text if len(text := str(value)) < 20 else f"{text[:10]}... ({len(text)} digits)"


def _llama_like(values: _Values, family: str) -> dict[str, Any]:
    gemma = family in ("gemma2", "gemma3_text")
    embed, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    if values["head_dim"] is None and (heads < 1 or embed % heads):
        raise ValueError(
            f"hidden_size {embed} cannot be divided by num_attention_heads {heads}, and no head_dim is given"
        )
    head_dim = embed // heads if values["head_dim"] is None else values.integer("head_dim")
    layers = values.integer("num_hidden_layers", _MOST_LAYERS)
    # Qwen2 has them always and Mistral never; elsewhere one key gives them to all four projections.
    biased = family not in ("qwen2", "mistral") and values.flag("attention_bias")
    found = {
        "vocab_size": values.integer("vocab_size"),
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if values["num_key_value_heads"] is None else values.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "mlp": values.integer("intermediate_size"),
        "max_positions": values.integer("max_position_embeddings"),
        "norm_eps": values.number("rms_norm_eps"),
        "initializer_range": values.number("initializer_range"),
        "tie_embeddings": values.flag("tie_word_embeddings"),
        "activation": values.activation("hidden_activation" if gemma else "hidden_act"),
        "qk_norm": family in ("qwen3", "gemma3_text"),
        "qkv_bias": family == "qwen2" or biased,
        "output_bias": biased,
        "mlp_bias": family == "llama" and values.flag("mlp_bias"),
    }
    windows = _windows(values, family, layers)
    found |= windows | _positions(values, family, local=windows["window"] is not None)
    if gemma:
        if values["use_bidirectional_attention"]:
            raise ValueError("use_bidirectional_attention is not supported: choose a causal model")
        scalar = values.number("query_pre_attn_scalar")
        if not scalar > 0:
            raise ValueError(f"query_pre_attn_scalar {scalar} must be positive")
        found |= {
            "norm_offset": True,
            "post_norms": True,
            "embed_scale": embed**0.5,
            "query_scale": scalar**-0.5,
        }
        for ours, theirs in (("softcap", "final_logit_softcapping"), ("attention_softcap", "attn_logit_softcapping")):
            found[ours] = None if values[theirs] is None else values.number(theirs)
        if family == "gemma3_text" and found["attention_softcap"] is not None:
            # transformers' Gemma 3 takes the key and does nothing with it.
            raise ValueError(f"attn_logit_softcapping {found['attention_softcap']} is not supported: set it to null")
    return found


def _windows(values: _Values, family: str, layers: int) -> dict[str, Any]:
    """Which layers are local, and how far they see."""
    window = None if values["sliding_window"] is None else values.integer("sliding_window")
    types = values["layer_types"]
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ValueError(f"layer_types must list one type for each of the {layers} layers")
        unknown = sorted({str(each) for each in types} - {LOCAL, GLOBAL})
        if unknown:
            raise ValueError(f"layer_types {', '.join(unknown)} are not supported: known are {LOCAL}, {GLOBAL}")
    if family == "llama":
        window = None
    if family in ("qwen2", "qwen3") and not values.flag("use_sliding_window"):
        window = None
    if family in ("llama", "mistral"):
        if types is not None and set(types) != {GLOBAL if window is None else LOCAL}:
            raise ValueError(f"layer_types are not supported in a {family} model, whose layers are all alike")
        return {"window": window}
    if types is not None:
        local = [each == LOCAL for each in types]
    elif family == "gemma2":
        local = [index % 2 == 0 for index in range(layers)]
    elif family == "gemma3_text":
        pattern = values.integer("sliding_window_pattern")
        if pattern < 1:
            raise ValueError(f"sliding_window_pattern {pattern} must be positive")
        local = [(index + 1) % pattern != 0 for index in range(layers)]
    else:
        local = [index >= values.integer("max_window_layers") for index in range(layers)]
    if window is None and any(local) and family in ("gemma2", "gemma3_text"):
        raise ValueError(f"{sum(local)} layers are local, but there is no sliding_window")
    if window is None or not any(local):
        return {"window": None}
    return {"window": window, "local_layers": () if all(local) else tuple(local)}


def _positions(values: _Values, family: str, *, local: bool) -> dict[str, Any]:
    """The rotary bases and their scaling, of either dialect: version 5 has one object with both, for Gemma 3 one for
    each type of layer.

    local: whether there are local layers.
    """
    raw = values.raw
    theta = _number("rope_theta", raw.get("rope_theta", 1e6 if family == "gemma3_text" else 1e4))
    local_theta = _number("rope_local_base_freq", raw.get("rope_local_base_freq", 1e4))
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters {parameters!r} must be an object")
    nested = sorted({LOCAL, GLOBAL} & parameters.keys())
    if family == "gemma3_text":
        if nested:
            inner = parameters.get(LOCAL) or {}
            parameters = parameters.get(GLOBAL) or {}
            if not isinstance(inner, dict) or not isinstance(parameters, dict):
                raise ValueError(f"rope_parameters of {LOCAL} and {GLOBAL} must be objects")
            if _rope_type(inner) != "default":
                raise ValueError(f"rope_type {_rope_type(inner)!r} is not supported in the local layers")
            local_theta = _number("rope_theta", inner.get("rope_theta", local_theta))
    elif nested:
        raise ValueError(f"rope_parameters of their own for {', '.join(nested)} are not supported in a {family} model")
    for place in (raw, parameters):
        if place.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor {place['partial_rotary_factor']} is not supported: only 1.0 is")
    scaling = _scaling(parameters, raw.get("original_max_position_embeddings"), values)
    found = {"rope_theta": _number("rope_theta", parameters.get("rope_theta", theta)), "rope_scaling": scaling}
    return found | ({"local_rope_theta": local_theta} if local and family == "gemma3_text" else {})


def _rope_type(parameters: Json) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def _scaling(parameters: Json, original: Any, values: _Values) -> RopeScaling | None:
    kind = _rope_type(parameters)
    if kind == "default":
        return None

    def number(key: str) -> float:
        if key not in parameters:
            raise ValueError(f"rope_type {kind} needs a {key}")
        return _number(key, parameters[key])

    if kind == "linear":
        return RopeScaling(kind="linear", factor=number("factor"))
    if kind == "llama3":
        if original is None:
            original = parameters.get("original_max_position_embeddings", values.integer("max_position_embeddings"))
        return RopeScaling(
            kind="llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_positions=_integer("original_max_position_embeddings", original),
        )
    raise ValueError(f"rope_type {kind!r} is not supported: known are default, linear, llama3")


def _gpt2(values: _Values) -> dict[str, Any]:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if values.flag(key):
            raise ValueError(f"{key} is not supported: choose a model without it")
    embed, heads = values.integer("n_embd"), values.integer("n_head")
    if heads < 1 or embed % heads:
        raise ValueError(f"n_embd {embed} cannot be divided by n_head {heads}")
    return {
        "vocab_size": values.integer("vocab_size"),
        "embed": embed,
        "layers": values.integer("n_layer", _MOST_LAYERS),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": embed // heads,
        "mlp": 4 * embed if values["n_inner"] is None else values.integer("n_inner"),
        "max_positions": values.integer("n_positions"),
        "norm_eps": values.number("layer_norm_epsilon"),
        "initializer_range": values.number("initializer_range"),
        "tie_embeddings": values.flag("tie_word_embeddings"),
        "activation": values.activation("activation_function"),
        "gated_mlp": False,
        "norm": "layer",
        "positions": "learned",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "query_scale": None if values.flag("scale_attn_weights") else 1.0,
    }


def _eos_ids(raw: Json, defaults: Json, model: ModelConfig) -> tuple[int, ...]:
    ids = raw.get("eos_token_id", defaults.get("eos_token_id"))
    found = [_token_id("eos_token_id", token, model) for token in (ids if isinstance(ids, list) else [ids])]
    return tuple(token for token in found if token is not None)


def _token_id(key: str, token: Any, model: ModelConfig) -> int | None:
    if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
        raise ValueError(f"{key} {token!r} must be an integer")
    return token if token is not None and 0 <= token < model.vocab_size else None
