"""Converts between `ModelConfig` and the config.json of transformers, version 4 or 5.

Hub configs omit keys, so every family has a table of transformers' defaults. A model is never approximated: a value
that is not supported is refused by its name. A written config is read again, and is used only if it describes the same
computation.
"""

import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jrlhf.models.config.decoder import MOST_LAYERS, ModelConfig
from jrlhf.models.config.rope import RopeScaling
from jrlhf.models.hf.files import read_object
from jrlhf.models.hf.values import Json, boolean, integer, number, object_at, refuse_others
from jrlhf.models.weights import HeadKind

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
ENDS = "answers_end_with"  # a key of reward models that runs export; "eos": a score is read at an answer's end-of-text


@dataclass(frozen=True)
class HFConfig:
    """A Hugging Face directory's description of its model.

    model: the decoder.
    family: its `model_type`.
    head: "scalar" for a sequence classifier with one label (a reward model), "lm" otherwise.
    eos_ids, bos_id, pad_id: the tokens that end a response, begin a text and fill a row, from generation_config.json
        if it names them. Empty or None if there is none; ids outside the vocabulary are dropped, because they cannot be
        drawn.
    score_pad_id: the pad in config.json. A classifier of transformers reads its score at the last token that is not it.
        None for one with the key `ENDS`.
    dtype: dtype of the written weights: float32, bfloat16 or float16.
    generation: the content of generation_config.json; without one, the generation settings in config.json, where older
        versions of transformers wrote them.
    """

    model: ModelConfig
    family: str
    head: HeadKind
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    dtype: str
    generation: Json = field(default_factory=dict)
    score_pad_id: int | None = None

    @property
    def sampling(self) -> Json:
        """Returns the settings of `generation` that `SamplingConfig` has, by its names; temperature 0 for greedy."""
        named = {key: value for key in _SAMPLING if (value := self.generation.get(key)) is not None}
        if self.generation.get("do_sample") is False:
            return {key: value for key, value in named.items() if key in _LENGTHS} | {"temperature": 0.0}
        return {key: value for key, value in named.items() if (key, value) not in _NO_LIMITS}


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers: its classes by head, and the meaning of its config.json.

    backbone: the class without a head. With tied embeddings its weights are a language model.
    keys: a field of ModelConfig -> the corresponding key, for reading and writing.
    constants: fields of ModelConfig that the family fixes.
    defaults: the values of keys that a config.json omits.
    neutral: unsupported keys of transformers -> their values without an effect; other values are refused.
    aliases: other names of keys; if a config.json has both, the other name counts.

    All other keys have no effect on the computation.
    """

    causal: str
    classifier: str
    backbone: str
    keys: Mapping[str, str]
    constants: Json
    defaults: Json = field(repr=False)
    neutral: Mapping[str, list[Any]]
    aliases: Mapping[str, str] = field(default_factory=dict)


# The meaning of a null, computed from fields that were read before.
_FILLED: Mapping[str, Callable[[Json], int]] = {
    "num_key_value_heads": lambda values: values["heads"],
    "head_dim": lambda values: values["embed"] // values["heads"],
    "n_inner": lambda values: 4 * values["embed"],
}


# families.json: model_type -> family, in the order in which an export prefers them; under "neutral", what all have.
_TABLE = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
_NEUTRAL = _TABLE.pop("neutral")
FAMILIES: Mapping[str, Family] = {
    name: Family(**{**row, "neutral": _NEUTRAL | row.get("neutral", {})}) for name, row in _TABLE.items()
}
# Families whose configs transformers refuses where the heads do not divide the hidden size, head_dim or not.
_WHOLE_HEADS = ("llama", "gemma2", "gemma3_text")
_GEMMAS = ("gemma2", "gemma3_text")
# Settings of generation in transformers 4 and 5 that say which tokens are drawn, token ids excepted.
_GENERATION = (
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty penalty_alpha dola_layers guidance_scale temperature top_k top_p top_h min_p "
    "typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids constraints sequence_bias "
    "renormalize_logits remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "forced_bos_token_id forced_eos_token_id num_return_sequences token_healing"
).split()
_LENGTHS = "max_new_tokens", "min_new_tokens"
_NO_LIMITS = ("top_k", 0), ("top_p", 1), ("min_p", 0)
_SAMPLING = (*_LENGTHS, "temperature", "top_k", "top_p", "min_p")


def drawn_with(generation: Json, sampling: Json) -> Json:
    """Returns the settings of a generation_config.json with which transformers draws as `sampling` says.

    generation: settings of which those that say nothing on drawing are kept. sampling: fields of `SamplingConfig`; null
    is no limit. top_k and top_p are always written, because transformers has defaults of its own, such as top_k 50.
    """
    others = {key: value for key, value in generation.items() if key not in _GENERATION}
    limits = {"top_k": 0, "top_p": 1.0} | {key: value for key, value in sampling.items() if value is not None}
    return {**others, "do_sample": True, **limits}


# ---- reading


def read_config(directory: str | os.PathLike[str]) -> HFConfig:
    """Reads config.json and, if it exists, generation_config.json.

    Raises FileNotFoundError without a config.json, and ValueError for a model that is not supported.
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
        settings = _read_json(generation) if generation.is_file() else _legacy_settings(raw)
        chosen = {key: value for key, value in settings.items() if value is not None}
        values = {**FAMILIES[name].defaults, **raw}
        eos_ids = _eos_ids(chosen, model) or _eos_ids(values, model)
        bos_id, pad_id = (_token_id(key, (values | chosen)[key], model) for key in ("bos_token_id", "pad_token_id"))
        score_pad_id = None if ENDS in raw else _token_id("pad_token_id", values["pad_token_id"], model)
        return HFConfig(model, name, head, eos_ids, bos_id, pad_id, dtype, settings, score_pad_id)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _legacy_settings(raw: Json) -> Json:
    """Returns the settings of generation in a config.json, as `GenerationConfig.from_model_config` finds them."""
    inner = raw.get("text_config")
    settings = {**(inner if isinstance(inner, dict) else {}), **raw}
    return {key: settings[key] for key in _GENERATION if settings.get(key) is not None}


def _no_config(directory: Path) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}: name one that holds a model's config.json and safetensors"
    if (directory / "adapter_config.json").is_file():
        base = _read_json(directory / "adapter_config.json").get("base_model_name_or_path")
        return f"{directory} holds only an adapter: load its base model, {base}, and then the adapter onto it"
    return f"{directory} holds no config.json: name a directory that a model was saved to with save_pretrained"


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "fetch the file again", "an object is expected: fetch the file again")


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
    heads: dict[str, HeadKind] = {family.causal: "lm", family.backbone: "lm", family.classifier: "scalar"}
    architectures = raw.get("architectures") or [family.causal]
    if architectures not in ([name] for name in heads):
        raise ValueError(f"architectures {architectures} are not supported: known are {', '.join(heads)}")
    head = heads[architectures[0]]
    names = raw.get("id2label")
    if not isinstance(names, dict | None):
        raise ValueError(f"id2label {names!r} must be an object")
    labels = len(names) if names else raw.get("num_labels", 2)  # as transformers counts them
    if head == "scalar" and labels != 1:
        raise ValueError(f"num_labels {labels} is not supported: a reward model has 1")
    return head


def model_of(raw: Json, family: str) -> ModelConfig:
    """The decoder that a config.json of this family describes."""
    kind = FAMILIES[family]
    refuse_others(raw, kind.neutral)
    own = {kind.aliases[key]: raw[key] for key in kind.aliases if key in raw}
    values = {**kind.defaults, **raw, **own}
    for layer in object_at(raw, "per_layer_config").values():
        if not isinstance(layer, dict) or any(values.get(key, value) != value for key, value in layer.items()):
            raise ValueError(f"per_layer_config {reprlib.repr(layer)} is not supported: all layers have the same sizes")
    embed, heads = (integer(values, kind.keys[name]) for name in ("embed", "heads"))
    if (family == "gpt2" or values["head_dim"] is None) and (heads < 1 or embed % heads):
        keys = f"{kind.keys['embed']} {embed} cannot be divided by {kind.keys['heads']} {heads}"
        raise ValueError(keys if family == "gpt2" else f"{keys}, and no head_dim is given")
    settings = dict(kind.constants)
    for name, key in kind.keys.items():
        settings[name] = _field(values, name, key, settings)
    if family == "gpt2":
        scale = None if boolean(values, "scale_attn_weights") else 1.0
        return ModelConfig(**settings, kv_heads=heads, head_dim=embed // heads, query_scale=scale)
    settings.setdefault("output_bias", "attention_bias" in kind.keys.values() and settings["qkv_bias"])
    windows = _windows(values, family, settings["layers"])
    local = windows.get("local_layers") or [windows["window"] is not None]
    settings |= windows | _positions(values, family, {LOCAL if flag else GLOBAL for flag in local})
    if family in _GEMMAS:
        scalar = number(values, "query_pre_attn_scalar")
        if not scalar > 0:
            raise ValueError(f"query_pre_attn_scalar {scalar} must be positive")
        settings |= {"embed_scale": embed**0.5, "query_scale": scalar**-0.5}
    return ModelConfig(**settings)


_TYPES = {field.name: field.type for field in fields(ModelConfig)}


def _field(values: Json, name: str, key: str, settings: Json) -> Any:
    """A field of ModelConfig from the value at `key`. settings: the fields that were read before."""
    kind, value = _TYPES[name], values[key]
    if value is None and key in _FILLED:
        return _FILLED[key](settings)
    if kind is bool:
        return boolean(values, key)
    if kind is int:
        return integer(values, key, MOST_LAYERS if name == "layers" else 2**31)
    if name == "activation":
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ValueError(f"{key} {value!r} is not supported: known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]
    return None if value is None and kind is not float else number(values, key)


def _windows(values: Json, family: str, layers: int) -> dict[str, Any]:
    """Reads which layers are local, and how far they see."""
    window = None if values["sliding_window"] is None else integer(values, "sliding_window")
    types = values["layer_types"]
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ValueError(f"layer_types must list one type for each of the {layers} layers")
        unknown = sorted(set(map(str, types)) - {LOCAL, GLOBAL})
        if unknown:
            raise ValueError(f"layer_types {', '.join(unknown)} are not supported: known are {LOCAL}, {GLOBAL}")
    if family == "llama" or (family in ("qwen2", "qwen3") and not boolean(values, "use_sliding_window")):
        window = None
    if family in ("llama", "mistral"):
        local = [window is not None] * layers
        if types is not None and set(types) != {GLOBAL if window is None else LOCAL}:
            raise ValueError(f"layer_types are not supported in a {family} model, whose layers are all alike")
    elif types is not None:
        local = [kind == LOCAL for kind in types]
    elif family == "gemma2":
        local = [index % 2 == 0 for index in range(layers)]
    elif family == "gemma3_text":
        pattern = integer(values, "sliding_window_pattern")
        if pattern < 1:
            raise ValueError(f"sliding_window_pattern {pattern} must be positive")
        local = [(index + 1) % pattern != 0 for index in range(layers)]
    else:
        first = integer(values, "max_window_layers")
        local = [window is not None and index >= first for index in range(layers)]
    if not any(local):
        return {"window": None}
    if window is None:
        raise ValueError(
            f"{sum(local)} layers are local, but there is no sliding_window: give one, or other layer_types"
        )
    return {"window": window, "local_layers": () if all(local) else tuple(local)}


def _positions(values: Json, family: str, kinds: set[str]) -> dict[str, Any]:
    """The rotary bases and their scaling, of either dialect: version 5 has one object with both, for Gemma 3 one for
    each type of layer.

    kinds: the types of the layers that there are.
    """
    scaling, parameters = (object_at(values, key) for key in ("rope_scaling", "rope_parameters"))
    written = scaling or parameters
    nested = sorted({LOCAL, GLOBAL} & written.keys())
    refuse_others(object_at(written, GLOBAL) if nested else written, _NEUTRAL)  # partial_rotary_factor
    if family != "gemma3_text":
        if nested:
            raise ValueError(
                f"rope_parameters of their own for {', '.join(nested)} are not supported in a {family} model"
            )
        theta, rope_scaling = _rope(written, values, original=values.get("original_max_position_embeddings"))
        return {"rope_theta": theta, "rope_scaling": rope_scaling}
    rope, given = [], [key for key in ("rope_scaling", "rope_parameters") if values.get(key) is not None]
    no_place = len(given) == 2 and parameters.get(GLOBAL) is None  # transformers puts the scaling there
    for kind, base in ((GLOBAL, "rope_theta"), (LOCAL, "rope_local_base_freq")):
        own = object_at(parameters, kind, {"rope_type": "default"}) | (scaling if kind == GLOBAL else {})
        if kind == LOCAL and _rope_type(own) != "default":
            raise ValueError(f"rope_type {_rope_type(own)!r} is not supported in the local layers")
        rope.append(_rope(own, values, base))
        # What transformers leaves unread and older versions did not: flat parameters, a nested scaling, a lone `type`.
        unread = object_at(written, kind) if nested else written if kind == GLOBAL else {}
        meant = own | unread | {"rope_type": _rope_type(unread, _rope_type(own))}
        if no_place or kind in kinds and _rope(meant, values, base) != rope[-1]:
            raise ValueError(
                f"{'rope_scaling' if scaling else 'rope_parameters'} {reprlib.repr(written)} is not supported in a "
                f"{family} model: give rope_parameters of {GLOBAL} and of {LOCAL}, each with its rope_type"
            )
    (theta, rope_scaling), (local_theta, _) = rope
    local_theta = local_theta if LOCAL in kinds else None
    return {"rope_theta": theta, "rope_scaling": rope_scaling, "local_rope_theta": local_theta}


def _rope_type(parameters: Json, absent: str = "default") -> str:
    return str(parameters.get("rope_type", parameters.get("type", absent)))


def _rope(
    parameters: Json, values: Json, base: str = "rope_theta", original: Any = None
) -> tuple[float, RopeScaling | None]:
    """The rotary base and the scaling that `parameters` give.

    base: the key of config.json that holds the base where they have none.
    original: original_max_position_embeddings of config.json, which counts before theirs; None where it is not read.
    """
    theta = number(parameters, "rope_theta") if "rope_theta" in parameters else number(values, base)
    kind: Any = _rope_type(parameters)
    if kind == "default":
        return theta, None
    refuse_others(parameters, _NEUTRAL)
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if kind not in needed:
        raise ValueError(f"rope_type {kind!r} is not supported: known are default, linear, llama3")
    settings: dict[str, Any] = {}
    for key in needed[kind]:
        if key not in parameters:
            raise ValueError(f"rope_type {kind} needs a {key}")
        settings[key] = number(parameters, key)
    if kind == "llama3":
        key = "original_max_position_embeddings"
        places = {key: values["max_position_embeddings"], **parameters} | ({} if original is None else {key: original})
        settings["original_max_positions"] = integer(places, key)
    return theta, RopeScaling(kind, **settings)


def _eos_ids(settings: Json, model: ModelConfig) -> tuple[int, ...]:
    ids = settings.get("eos_token_id")
    tokens = (_token_id("eos_token_id", token, model) for token in (ids if isinstance(ids, list) else [ids]))
    return tuple(token for token in tokens if token is not None)


def _token_id(key: str, token: Any, model: ModelConfig) -> int | None:
    if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
        raise ValueError(f"{key} {token!r} must be an integer")
    return token if token is not None and 0 <= token < model.vocab_size else None


# ---- writing


def hf_config(config: ModelConfig, head: HeadKind = "lm", family: str | None = None) -> dict[str, Any]:
    """Returns config.json without special tokens and dtype, in version 4's keys, which version 5 reads as well.

    family: the preferred `model_type`, such as that of the loaded model. It is used if it can describe `config`;
        otherwise, and with None, the first family that can.

    Raises ValueError for a model that no Hugging Face family computes.
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
    """Returns the fields of `config` that `written` does not describe."""
    try:
        understood = _canonical(model_of(written, family))
    except ValueError:  # a number that this family cannot have
        return [field.name for field in fields(config)]
    own = _canonical(config)
    wrong = [f.name for f in fields(own) if not _equal(getattr(own, f.name), getattr(understood, f.name))]
    return wrong + (["embed", "heads"] if family in _WHOLE_HEADS and config.embed % config.heads else [])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)  # 24 ** -0.5 and 1 / sqrt(24) are one number
    return one == other


def _canonical(config: ModelConfig) -> ModelConfig:
    """Returns a canonical config of the same computation."""
    local = config.local_layers or (True,) * config.layers
    window = config.window if any(local) else None
    layers = () if window is None or all(local) else tuple(local)
    scale = None if _equal(config.query_scale, config.head_dim**-0.5) else config.query_scale
    theta = None if window is None else config.local_rope_theta
    return replace(config, window=window, local_layers=layers, local_rope_theta=theta, query_scale=scale)


def _write(config: ModelConfig, family: str, head: HeadKind) -> dict[str, Any]:
    """Returns `config` in the keys of this family, without fields for which the family has no key."""
    kind = FAMILIES[family]
    written: dict[str, Any] = {"architectures": [kind.causal], "model_type": family}
    if head == "scalar":
        labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        written |= {"architectures": [kind.classifier], **labels}
    for name, key in kind.keys.items():
        value = getattr(config, name)
        written[key] = float(value) if type(value) is int and _TYPES[name] is not int else value  # 1 is no float there
    activation = config.activation
    if activation == "gelu_tanh":
        activation = "gelu_new" if family == "gpt2" else "gelu_pytorch_tanh"
    written[kind.keys["activation"]] = activation
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return written | {"scale_attn_weights": config.query_scale != 1.0, **dropouts}
    names = {"kind": "rope_type", "original_max_positions": "original_max_position_embeddings"}
    scaling = {} if config.rope_scaling is None else vars(config.rope_scaling)
    scaling = {names.get(name, name): value for name, value in scaling.items() if value is not None}
    written |= {"attention_dropout": 0.0, "rope_theta": config.rope_theta, "rope_scaling": scaling or None}
    local = _canonical(config).local_layers or (config.window is not None,) * config.layers
    types = [LOCAL if flag else GLOBAL for flag in local]
    if family in _GEMMAS:
        scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
        written |= {
            "hidden_act": activation,
            "query_pre_attn_scalar": round(scalar),  # version 5 takes only integers; `_faults` sees the difference
            "layer_types": types,
        }
        if config.window is not None:  # transformers makes the mask of local layers even where there are none
            written["sliding_window"] = config.window
        if family == "gemma3_text":
            written |= {"attn_logit_softcapping": None, "rope_local_base_freq": config.local_rope_theta or 10000.0}
            period = next((n + 1 for n, flag in enumerate(local) if not flag), config.layers + 1)
            if list(local) == [(index + 1) % period != 0 for index in range(config.layers)]:
                written["sliding_window_pattern"] = period  # all that versions before 4.53 read
    elif family == "mistral":
        written["sliding_window"] = config.window
    elif family in ("qwen2", "qwen3"):
        written |= {"use_sliding_window": config.window is not None, "sliding_window": config.window}
        first = types.index(LOCAL) if LOCAL in types else config.layers
        written |= {"layer_types": types, "max_window_layers": first}
    return written
