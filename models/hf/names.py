"""Maps our weights to the tensors of Hugging Face files, and the order of their numbers.

Every weight of ours is a view of one tensor: a part of it where several are fused, reshaped, its axes reordered.
Loading and exporting read the same table, in opposite directions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.weights import HeadKind, WeightInfo, weights
from jrlhf.models.weights import Path as TreePath

# Tensors of files that are no weights: rotary frequencies and causal masks, which older versions saved.
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")

HEAD_TENSORS = ("lm_head.weight", "score.weight", "score.bias")


@dataclass(frozen=True)
class TensorView:
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
        """True if every layer has one."""
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
        """Entries of our axes, such as those of a PartitionSpec, in the order of the axes of `split`."""
        return tuple(ours[self.order.index(axis)] for axis in range(len(self.split)))

    def to_file(self, ours: np.ndarray) -> np.ndarray:
        """Our weight, without padding rows, as the tensor's part; a view where that can be."""
        if self.rows is not None:
            ours = ours[: self.split[0]]
        return ours.transpose([self.order.index(axis) for axis in range(len(self.split))]).reshape(self.shape)


def weight_table(config: ModelConfig, family: str, head: HeadKind) -> list[TensorView]:
    """Every weight of this model, in the order of a file: tables, layers, final norm, head."""
    dialect = {"gpt2": "gpt2", "gemma2": "gemma", "gemma3_text": "gemma"}.get(family, "llama")
    table = weights(config, head)
    for weight in table:
        if dialect not in weight.names:
            raise ValueError(f"a {family} model has no weight {'.'.join(weight.path)}")
    return [_weight(weight, dialect) for weight in table]


def _weight(weight: WeightInfo, dialect: str) -> TensorView:
    path, name, shape = weight.path, weight.names[dialect], weight.layer_shape
    order = tuple(range(len(shape)))
    if weight.axes[:1] == ("vocab",):
        table = (shape[0] - weight.padding, *shape[1:])
        return TensorView(path, name, table, table, order, rows=shape[0])
    if path == ("value_head", "kernel"):
        return TensorView(path, name, (1, *shape), shape, order)
    fused = "attn.c_attn" in name  # GPT-2 has queries, keys and values in one tensor
    part, parts = ("qkv".index(path[-1][1]), 3) if fused else (0, 1)
    ins, outs = shape[: weight.inputs], shape[weight.inputs :]
    if not weight.inputs:
        return TensorView(path, name, shape if path == ("positions",) else (prod(shape),), shape, order, part, parts)
    if dialect == "gpt2":  # its Conv1D holds [in, out]
        return TensorView(path, name, (prod(ins), prod(outs)), shape, order, part, parts)
    order = (*range(len(outs), len(shape)), *range(len(outs)))  # Linear holds [out, in]
    return TensorView(path, name, (prod(outs), prod(ins)), (*outs, *ins), order)


def is_buffer(name: str) -> bool:
    """True if a tensor of this name is no weight, and nothing is lost without it."""
    return _BUFFERS.fullmatch(name) is not None


def without_prefix(name: str) -> str:
    """A tensor's name in files of the backbone alone (and in gpt2's): without "model." or "transformer."."""
    return name.removeprefix("model.").removeprefix("transformer.")
