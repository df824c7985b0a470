"""Which tensor of a Hugging Face file is which of our weights, and in what order it holds the numbers.

Every weight of ours is a view of one tensor: a part of it where several are fused, reshaped, its axes reordered.
Loading and exporting read the same table, in opposite directions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import numpy as np

from jrlhf.models.config import ModelConfig
from jrlhf.models.params import HeadKind, init_lm, init_scalar

TreePath = tuple[str, ...]

_LLAMA: Mapping[TreePath, str] = {
    ("embedding",): "model.embed_tokens.weight",
    ("final_norm", "scale"): "model.norm.weight",
    ("unembedding",): "lm_head.weight",
    ("layers", "attention_norm", "scale"): "model.layers.{layer}.input_layernorm.weight",
    ("layers", "attention", "query_norm", "scale"): "model.layers.{layer}.self_attn.q_norm.weight",
    ("layers", "attention", "key_norm", "scale"): "model.layers.{layer}.self_attn.k_norm.weight",
    ("layers", "mlp_norm", "scale"): "model.layers.{layer}.post_attention_layernorm.weight",
    **{("layers", "attention", f"w{x}"): f"model.layers.{{layer}}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{("layers", "attention", f"b{x}"): f"model.layers.{{layer}}.self_attn.{x}_proj.bias" for x in "qkvo"},
    **{("layers", "mlp", x): f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{("layers", "mlp", f"{x}_bias"): f"model.layers.{{layer}}.mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
}
_GEMMA = {
    **_LLAMA,
    ("layers", "post_attention_norm", "scale"): "model.layers.{layer}.post_attention_layernorm.weight",
    ("layers", "mlp_norm", "scale"): "model.layers.{layer}.pre_feedforward_layernorm.weight",
    ("layers", "post_mlp_norm", "scale"): "model.layers.{layer}.post_feedforward_layernorm.weight",
}
_GPT2: Mapping[TreePath, str] = {
    ("embedding",): "transformer.wte.weight",
    ("positions",): "transformer.wpe.weight",
    ("final_norm", "scale"): "transformer.ln_f.weight",
    ("final_norm", "bias"): "transformer.ln_f.bias",
    ("unembedding",): "lm_head.weight",
    ("layers", "attention_norm", "scale"): "transformer.h.{layer}.ln_1.weight",
    ("layers", "attention_norm", "bias"): "transformer.h.{layer}.ln_1.bias",
    **{("layers", "attention", f"w{x}"): "transformer.h.{layer}.attn.c_attn.weight" for x in "qkv"},
    **{("layers", "attention", f"b{x}"): "transformer.h.{layer}.attn.c_attn.bias" for x in "qkv"},
    ("layers", "attention", "wo"): "transformer.h.{layer}.attn.c_proj.weight",
    ("layers", "attention", "bo"): "transformer.h.{layer}.attn.c_proj.bias",
    ("layers", "mlp_norm", "scale"): "transformer.h.{layer}.ln_2.weight",
    ("layers", "mlp_norm", "bias"): "transformer.h.{layer}.ln_2.bias",
    ("layers", "mlp", "up"): "transformer.h.{layer}.mlp.c_fc.weight",
    ("layers", "mlp", "up_bias"): "transformer.h.{layer}.mlp.c_fc.bias",
    ("layers", "mlp", "down"): "transformer.h.{layer}.mlp.c_proj.weight",
    ("layers", "mlp", "down_bias"): "transformer.h.{layer}.mlp.c_proj.bias",
}
# `score` has no bias in transformers; ours, where it is not zero, goes beside it.
_SCORE: Mapping[TreePath, str] = {("value_head", "kernel"): "score.weight", ("value_head", "bias"): "score.bias"}

# What files carry beside weights: rotary frequencies and causal masks, which older versions saved.
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")

HEAD_TENSORS = ("lm_head.weight", "score.weight", "score.bias")


@dataclass(frozen=True)
class Weight:
    """One weight of ours and the tensor that holds it. All of it is one layer's where `path` begins with "layers".

    path: in the tree of `init_lm` or `init_scalar`.
    name: the tensor's, with {layer} for the layer's number.
    shape: of the tensor's part that holds the weight; `part` of `parts` along the tensor's last axis.
    split: that part's axes, some of them divided: the part reshaped to `split`, its axes taken in `order`, is ours.
    rows: our first axis, where it is padded with zero rows (vocabulary tables); otherwise None.
    """

    path: TreePath
    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    part: int = 0
    parts: int = 1
    rows: int | None = None

    @property
    def layered(self) -> bool:
        """Whether every layer has one."""
        return self.path[0] == "layers"

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.shape if self.parts == 1 else (*self.shape[:-1], self.shape[-1] * self.parts)

    def part_of(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the tensor as `split`: its numbers are still in the file's order."""
        if self.parts > 1:
            size = self.shape[-1]
            tensor = tensor[..., self.part * size : (self.part + 1) * size]
        return tensor.reshape(self.split)

    def split_order(self, ours: Sequence) -> tuple:
        """What belongs to our axes, such as a PartitionSpec's entries, in the order of the axes of `split`."""
        return tuple(ours[self.order.index(axis)] for axis in range(len(self.split)))

    def to_file(self, ours: np.ndarray) -> np.ndarray:
        """Our weight, without padding rows, as the tensor's part; a view where that can be."""
        if self.rows is not None:
            ours = ours[: self.split[0]]
        return ours.transpose([self.order.index(axis) for axis in range(len(self.split))]).reshape(self.shape)


def weight_table(config: ModelConfig, family: str, head: HeadKind) -> list[Weight]:
    """Every weight of this model, in the order of a file: tables, layers, final norm, head.

    Raises:
        ValueError: a weight that the family has no name for.
    """
    names = _names(family)
    init = init_lm if head == "lm" else init_scalar
    tree = jax.eval_shape(partial(init, config), jax.random.key(0))
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(key.key for key in keys)
        if path not in names:
            raise ValueError(f"a {family} model has no weight {'.'.join(path)}")
        shape = leaf.shape[1:] if path[0] == "layers" else leaf.shape
        found[path] = _weight(config, family, path, names[path], shape)
    return [found[path] for path in names if path in found]


def _names(family: str) -> Mapping[TreePath, str]:
    body = _GPT2 if family == "gpt2" else _GEMMA if family in ("gemma2", "gemma3_text") else _LLAMA
    ends = [path for path in body if path[0] in ("final_norm", "unembedding")]
    starts = [path for path in body if path not in ends]
    starts.sort(key=lambda path: path[0] == "layers")
    return {path: body[path] for path in (*starts, *ends)} | dict(_SCORE)


def _weight(config: ModelConfig, family: str, path: TreePath, name: str, shape: tuple[int, ...]) -> Weight:
    if path[-1] in ("embedding", "unembedding"):
        table = (config.vocab_size, *shape[1:])
        return Weight(path, name, table, table, (0, 1), rows=shape[0])
    if path == ("value_head", "kernel"):
        return Weight(path, name, (1, *shape), shape, (0,))
    fused = family == "gpt2" and path[1:-1] == ("attention",) and path[-1][1] in "qkv"
    part, parts = ("qkv".index(path[-1][1]), 3) if fused else (0, 1)
    matrix = path[1:2] in (("attention",), ("mlp",)) and path[-1] in ("wq", "wk", "wv", "wo", "gate", "up", "down")
    if not matrix:
        flat = (prod(shape),) if path[0] in ("layers", "final_norm", "value_head") else shape
        return Weight(path, name, flat, shape, tuple(range(len(shape))), part, parts)
    inputs = 2 if path[-1] == "wo" else 1
    ins, outs = shape[:inputs], shape[inputs:]
    if family == "gpt2":  # its Conv1D holds [in, out]
        return Weight(path, name, (prod(ins), prod(outs)), shape, tuple(range(len(shape))), part, parts)
    order = (*range(len(outs), len(shape)), *range(len(outs)))  # Linear holds [out, in]
    return Weight(path, name, (prod(outs), prod(ins)), (*outs, *ins), order)


def is_buffer(name: str) -> bool:
    """Whether a tensor of this name is no weight, and nothing is lost without it."""
    return _BUFFERS.fullmatch(name) is not None


def without_prefix(name: str) -> str:
    """A tensor's name in files of the backbone alone (and in gpt2's): without "model." or "transformer."."""
    return name.removeprefix("model.").removeprefix("transformer.")
