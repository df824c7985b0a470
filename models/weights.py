"""The table of a model's weights: shape, axes, initialization, and names in files and adapters.

Initialization (`init`), sharding, adapters (`lora`), int8 (`quantize`), Hugging Face files (`hf/names`), operations
(`flops`) and planned memory all use this table. It needs no device and compiles nothing:

    weights(config, head, tensor)                       a model, for a mesh whose `tensor` axis has this size
    lora.adapter_weights(config, lora, head, tensor)    an adapter, as rows of the same kind
    weight.shape, weight.shard(layout, fsdp, tensor)    the whole weight, and one device's part; layers are stacked
    weight.inputs > 0                                   matrices of layers: adapted, int8, counted as operations
    weight.vector                                       small weights that stay float32 in a model of another dtype
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal, get_args

from jrlhf.meshes.layout import Layout, axis_names
from jrlhf.models.config.decoder import ModelConfig

Path = tuple[str, ...]
Axes = tuple[str | None, ...]
HeadKind = Literal["lm", "scalar"]
Init = tuple[Literal["normal", "uniform", "constant"], float]  # (distribution, its standard deviation, bound or value)


@dataclass(frozen=True)
class WeightInfo:
    """One weight of a model. A weight of the layers is stacked for all layers along a first axis "layers".

    path: keys in the nested dict of parameters.
    axes: logical axis of each dimension (`meshes.layout.ShardingRules`); None: never sharded.
    padding: zero rows at the end of the first dimension, with which a table divides over devices.
    inputs: number of dimensions, after the layers', that a layer's matrix sums over; 0: not a matrix of a layer. The
        other dimensions are outputs; int8 has one scale for each output.
    lora: the projection's name in PEFT, if it can be adapted.
    names: dialect (llama, gemma, gpt2) -> name of the tensor in a Hugging Face file; {layer} is the layer's number.
    """

    path: Path
    shape: tuple[int, ...]
    axes: Axes
    init: Init
    padding: int = 0
    inputs: int = 0
    lora: str | None = None
    names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def layered(self) -> bool:
        """True if each layer has such a weight."""
        return self.path[0] == "layers"

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape for one layer; for a weight that belongs to no layer, its whole shape."""
        return self.shape[1:] if self.layered else self.shape

    @property
    def vector(self) -> bool:
        """True if `layer_shape` has at most one dimension: norms, the scalar head, most biases."""
        return len(self.layer_shape) < 2

    def shard(self, layout: Layout, fsdp: int, tensor: int) -> tuple[int, ...]:
        """The shape of the part that one device stores."""
        sizes = {"fsdp": fsdp, "tensor": tensor}
        parts = [prod(sizes[axis] for axis in axis_names(entry)) for entry in layout.storage.spec(self.axes)]
        if any(size % part for size, part in zip(self.shape, parts, strict=True)):
            raise ValueError(f"{'.'.join(self.path)} of shape {self.shape} does not divide over {fsdp} x {tensor}")
        return tuple(size // part for size, part in zip(self.shape, parts, strict=True))


@dataclass(frozen=True)
class _Row:
    """A weight that a model may have.

    dims: one letter of `_DIMS` for each dimension.
    llama, gpt2: name of its tensor in files of these dialects, without the prefix of a layer. gemma: the same, if it
        differs from Llama's.
    needs: switches of `_switches` that must all be on for a model to have it.
    """

    path: str
    dims: str
    init: Literal["normal", "residual", "scale", "zero", "head"]
    llama: str | None
    gpt2: str | None = None
    needs: str = ""
    inputs: int = 0
    gemma: str | None = None


# Letter -> logical axis, and the field of ModelConfig with its size. Norms and biases of the residual stream ("norm")
# are never sharded.
_DIMS = {
    "L": ("layers", "layers"),
    "D": ("embed", "embed"),
    "N": ("heads", "heads"),
    "K": ("kv_heads", "kv_heads"),
    "H": ("head_dim", "head_dim"),
    "F": ("mlp", "mlp"),
    "V": ("vocab", "padded_vocab"),
    "T": (None, "max_positions"),
    "d": ("norm", "embed"),
    "h": ("norm", "head_dim"),
}


_PREFIXES = {"llama": "model.layers.{layer}.", "gemma": "model.layers.{layer}.", "gpt2": "transformer.h.{layer}."}


_POST_ATTENTION = "post_attention_layernorm.weight"  # Llama's name of the norm that follows the attention's addition


# In the order of files. Initial weights are drawn in this order, so it must not change: seeds would give other models.
_ROWS = (
    _Row("embedding", "VD", "normal", "model.embed_tokens.weight", "transformer.wte.weight"),
    _Row("positions", "TD", "normal", None, "transformer.wpe.weight", "learned"),
    _Row("layers.attention_norm.scale", "Ld", "scale", "input_layernorm.weight", "ln_1.weight"),
    _Row("layers.attention_norm.bias", "Ld", "zero", None, "ln_1.bias", "layer_norm"),
    _Row("layers.attention.query_norm.scale", "Lh", "scale", "self_attn.q_norm.weight", None, "qk_norm"),
    _Row("layers.attention.key_norm.scale", "Lh", "scale", "self_attn.k_norm.weight", None, "qk_norm"),
    _Row(
        "layers.mlp_norm.scale", "Ld", "scale", _POST_ATTENTION, "ln_2.weight", gemma="pre_feedforward_layernorm.weight"
    ),
    _Row("layers.mlp_norm.bias", "Ld", "zero", None, "ln_2.bias", "layer_norm"),
    _Row("layers.attention.wq", "LDNH", "normal", "self_attn.q_proj.weight", "attn.c_attn.weight", inputs=1),
    _Row("layers.attention.wk", "LDKH", "normal", "self_attn.k_proj.weight", "attn.c_attn.weight", inputs=1),
    _Row("layers.attention.wv", "LDKH", "normal", "self_attn.v_proj.weight", "attn.c_attn.weight", inputs=1),
    _Row("layers.attention.wo", "LNHD", "residual", "self_attn.o_proj.weight", "attn.c_proj.weight", inputs=2),
    _Row("layers.attention.bq", "LNH", "zero", "self_attn.q_proj.bias", "attn.c_attn.bias", "qkv_bias"),
    _Row("layers.attention.bk", "LKH", "zero", "self_attn.k_proj.bias", "attn.c_attn.bias", "qkv_bias"),
    _Row("layers.attention.bv", "LKH", "zero", "self_attn.v_proj.bias", "attn.c_attn.bias", "qkv_bias"),
    _Row("layers.attention.bo", "Ld", "zero", "self_attn.o_proj.bias", "attn.c_proj.bias", "output_bias"),
    _Row("layers.mlp.gate", "LDF", "normal", "mlp.gate_proj.weight", None, "gated_mlp", inputs=1),
    _Row("layers.mlp.up", "LDF", "normal", "mlp.up_proj.weight", "mlp.c_fc.weight", inputs=1),
    _Row("layers.mlp.down", "LFD", "residual", "mlp.down_proj.weight", "mlp.c_proj.weight", inputs=1),
    _Row("layers.mlp.gate_bias", "LF", "zero", "mlp.gate_proj.bias", None, "gated_mlp mlp_bias"),
    _Row("layers.mlp.up_bias", "LF", "zero", "mlp.up_proj.bias", "mlp.c_fc.bias", "mlp_bias"),
    _Row("layers.mlp.down_bias", "Ld", "zero", "mlp.down_proj.bias", "mlp.c_proj.bias", "mlp_bias"),
    _Row("layers.post_attention_norm.scale", "Ld", "scale", None, needs="post_norms", gemma=_POST_ATTENTION),
    _Row("layers.post_attention_norm.bias", "Ld", "zero", None, needs="post_norms layer_norm"),
    _Row(
        "layers.post_mlp_norm.scale", "Ld", "scale", None, needs="post_norms", gemma="post_feedforward_layernorm.weight"
    ),
    _Row("layers.post_mlp_norm.bias", "Ld", "zero", None, needs="post_norms layer_norm"),
    _Row("final_norm.scale", "d", "scale", "model.norm.weight", "transformer.ln_f.weight"),
    _Row("final_norm.bias", "d", "zero", None, "transformer.ln_f.bias", "layer_norm"),
    _Row("unembedding", "VD", "normal", "lm_head.weight", "lm_head.weight", "unembedding"),
    # `score` of transformers has no bias; ours is written in addition if it is not zero.
    _Row("value_head.kernel", "d", "head", "score.weight", "score.weight", "scalar"),
    _Row("value_head.bias", "", "zero", "score.bias", "score.bias", "scalar"),
)


def _lora_name(row: _Row) -> str | None:
    return row.llama.split(".")[1] if row.inputs and row.llama else None


PROJECTIONS = tuple(name for row in _ROWS if (name := _lora_name(row)))  # names in PEFT


# Last keys of norms and biases: vectors of the computation, whatever dimensions their arrays have.
VECTORS = frozenset(row.path.split(".")[-1] for row in _ROWS if row.init in ("scale", "zero"))
# By last key of a layer's matrix, its numbers of dimensions for inputs, and for outputs.
INPUTS: Mapping[str, int] = {row.path.split(".")[-1]: row.inputs for row in _ROWS if row.inputs}
OUTPUTS: Mapping[str, int] = {row.path.split(".")[-1]: len(row.dims) - 1 - row.inputs for row in _ROWS if row.inputs}


@cache
def weights(config: ModelConfig, head: HeadKind = "lm", tensor: int = 1) -> tuple[WeightInfo, ...]:
    """All weights of a model, for a mesh whose `tensor` axis has this size.

    If there are fewer key-value heads than `tensor`, they are not sharded: every device stores all and uses one.
    """
    if head not in get_args(HeadKind):
        raise ValueError(f"head={head!r} must be 'lm' or 'scalar'")
    check_tensor(config, tensor)
    switches = _switches(config, head)
    return tuple(_weight(config, row, tensor) for row in _ROWS if switches.issuperset(row.needs.split()))


def _switches(config: ModelConfig, head: HeadKind) -> set[str]:
    on = {"layer_norm": config.norm == "layer", "learned": config.positions == "learned", "scalar": head == "scalar"}
    on |= {"unembedding": head == "lm" and not config.tie_embeddings}
    flags = ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "gated_mlp", "post_norms")
    on |= {name: getattr(config, name) for name in flags}
    return {name for name, value in on.items() if value}


def _weight(config: ModelConfig, row: _Row, tensor: int) -> WeightInfo:
    names = {"llama": row.llama, "gemma": row.gemma or row.llama, "gpt2": row.gpt2}
    layered = row.path.startswith("layers.")
    axes, sizes = zip(*(_DIMS[letter] for letter in row.dims), strict=True) if row.dims else ((), ())
    return WeightInfo(
        path=tuple(row.path.split(".")),
        shape=tuple(getattr(config, size) for size in sizes),
        axes=tuple(None if axis == "kv_heads" and config.kv_heads < tensor else axis for axis in axes),
        init=_init(config, row),
        padding=config.padded_vocab - config.vocab_size if row.dims.startswith("V") else 0,
        inputs=row.inputs,
        lora=_lora_name(row),
        names={dialect: (_PREFIXES[dialect] if layered else "") + name for dialect, name in names.items() if name},
    )


def _init(config: ModelConfig, row: _Row) -> Init:
    match row.init:
        case "normal":
            return "normal", config.initializer_range
        case "residual":
            # The 2L projections that add to the residual stream start smaller, so that its variance does not grow with
            # depth (Radford et al. 2019, section 2.3).
            return "normal", config.initializer_range / (2 * config.layers) ** 0.5
        case "head":
            # Variance 1 / (D + 1), as Stiennon et al. 2020 initialise the reward model's head.
            return "normal", (config.embed + 1) ** -0.5
        case "scale":
            return "constant", 0.0 if config.norm_offset else 1.0
        case "zero":
            return "constant", 0.0


def check_tensor(config: ModelConfig, tensor: int) -> None:
    """Raises a ValueError if the model cannot be divided over a `tensor` axis of this size."""
    for name in ("heads", "mlp", "padded_vocab"):
        if getattr(config, name) % tensor:
            raise ValueError(f"model {name}={getattr(config, name)} cannot be divided over tensor={tensor}")
    if config.kv_heads % tensor and tensor % config.kv_heads:
        raise ValueError(
            f"model kv_heads={config.kv_heads} cannot be divided over tensor={tensor}, nor shared evenly by its devices"
        )
