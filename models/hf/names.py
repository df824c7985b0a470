"""Maps our weights to the tensors of Hugging Face files, and the order of their numbers.

Each of our weights is a view of one tensor, or of a part of it if several are fused, with its axes reshaped and
reordered. Loading and exporting use the same table, in opposite directions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.weights import HeadKind, WeightInfo, weights
from jrlhf.models.weights import Path as TreePath

# Tensors in files that are not weights: rotary frequencies and causal masks, which older versions saved.
BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")

HEAD_TENSORS = ("lm_head.weight", "score.weight", "score.bias")


@dataclass(frozen=True)
class TensorView:
    """One of our weights and the tensor that contains it. If `path` begins with "layers", it describes one layer.

    path: path in the tree of `init_lm` or `init_scalar`.
    name: name of the tensor, with {layer} for the layer's number.
    shape: shape of the tensor's part with the weight; it is `part` of `parts` along the tensor's last axis.
    split, order: our weight is the part reshaped to `split`, with its axes in the order `order`.
    rows: size of our first axis if it is padded with zero rows (vocabulary tables); otherwise None.
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
        """True if every layer has such a weight."""
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
        """Reorders entries of our axes, such as those of a PartitionSpec, to the order of the axes of `split`."""
        return tuple(ours[self.order.index(axis)] for axis in range(len(self.split)))

    def to_file(self, ours: np.ndarray) -> np.ndarray:
        """Converts our weight, without padding rows, to the tensor's part; returns a view if possible."""
        if self.rows is not None:
            ours = ours[: self.split[0]]
        return ours.transpose(self.split_order(range(ours.ndim))).reshape(self.shape)


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


def without_prefix(name: str) -> str:
    """A tensor's name in files of the backbone alone (and in gpt2's): without "model." or "transformer."."""
    return name.removeprefix("model.").removeprefix("transformer.")
