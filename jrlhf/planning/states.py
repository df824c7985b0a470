"""What a role keeps on each device from call to call: exact bytes, from the shapes of shards.

Weights lie as a layout stores them (`meshes.layout`): TRAIN and SCORE over fsdp and tensor, GENERATE over tensor alone,
and over data, or where an axis is not sharded, as whole copies. Nothing is compiled, and no device is needed.
"""

from functools import cache, partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrlhf.meshes import GENERATE, TRAIN, Layout
from jrlhf.meshes.layout import axis_names
from jrlhf.models import LoRAConfig, ModelConfig, init_lm, init_lora, init_scalar
from jrlhf.models.lora import lora_axes
from jrlhf.models.params import Axes, HeadKind, is_axes, lm_axes, scalar_axes
from jrlhf.planning.workload import RoleModel

WIDE = 4  # bytes of a float32
COUNTERS = 8  # AdamW's own: updates so far, for the moments' bias and for the schedule


class Weight(NamedTuple):
    """A weight of a model: of all layers together, where it is one of theirs. axes: what its dimensions are."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: Axes

    @property
    def layered(self) -> bool:
        """Whether each layer has one."""
        return self.path[0] == "layers"

    @property
    def matrix(self) -> bool:
        """Whether a frozen model has it in the compute dtype, as `pretrained.cast_matrices` does."""
        return len(self.shape) > (2 if self.layered else 1)

    def shard(self, layout: Layout, fsdp: int, tensor: int) -> tuple[int, ...]:
        """The shape of one device's part.

        Raises:
            ValueError: it does not divide.
        """
        sizes = {"fsdp": fsdp, "tensor": tensor}
        parts = [prod(sizes[axis] for axis in axis_names(entry)) for entry in layout.storage.spec(self.axes)]
        for size, part in zip(self.shape, parts, strict=True):
            if size % part:
                raise ValueError(f"{'.'.join(self.path)} of shape {self.shape} does not divide over {fsdp} x {tensor}")
        return tuple(size // part for size, part in zip(self.shape, parts, strict=True))


def tiled(shape: tuple[int, ...]) -> int:
    """Numbers of a float32 array in a TPU's row-major tiles: 8 x 128, or fewer rows where the array has 1, 2 or 4."""
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[-2:]
    height = rows if rows in (1, 2, 4) else 8 * ceil(rows / 8)
    return prod(shape[:-2]) * height * 128 * ceil(columns / 128)


@cache
def weights(config: ModelConfig, head: HeadKind, tensor: int) -> tuple[Weight, ...]:
    """All weights of a model, for a `tensor` axis of this size.

    Raises:
        ValueError: the model cannot be divided over it.
    """
    return _joined(_shapes(config, head), (lm_axes if head == "lm" else scalar_axes)(config, tensor))


@cache
def adapter(config: ModelConfig, lora: LoRAConfig, head: HeadKind, tensor: int) -> tuple[Weight, ...]:
    """All weights of an adapter, the scalar head with them."""
    shapes = jax.eval_shape(partial(init_lora, config, lora, head=head), _key())
    return _joined(shapes, lora_axes(config, lora, tensor, head))


@cache
def stored_bytes(config: ModelConfig, head: HeadKind, layout: Layout, fsdp: int, tensor: int, itemsize: int) -> float:
    """Of a model's weights on one device: matrices of this item size, vectors float32."""
    return float(sum(_bytes(each, layout, fsdp, tensor, itemsize) for each in weights(config, head, tensor)))


@cache
def base_bytes(config: ModelConfig, tensor: int, itemsize: int, int8: bool) -> float:
    """Of the base under adapters, a language model's, as GENERATE stores it."""
    if not int8:
        return stored_bytes(config, "lm", GENERATE, 1, tensor, itemsize)
    total = 0
    for each in weights(config, "lm", tensor):
        if not (each.layered and each.path[-1] in _INPUTS):
            total += _bytes(each, GENERATE, 1, tensor, itemsize)
            continue
        shard, summed = each.shard(GENERATE, 1, tensor), _INPUTS[each.path[-1]]
        total += prod(shard) + WIDE * shard[0] * prod(shard[1 + summed :])  # and a scale for each output
    return float(total)


@cache
def adapter_bytes(config: ModelConfig, lora: LoRAConfig, head: HeadKind, tensor: int) -> float:
    """Of an adapter, float32, as GENERATE stores it."""
    return float(sum(_bytes(each, GENERATE, 1, tensor, WIDE) for each in adapter(config, lora, head, tensor)))


def trained_bytes(model: RoleModel, fsdp: int, tensor: int) -> float:
    """Of what a role trains, which is float32: its weights, or its adapter's. So large are its gradients, too."""
    if model.lora is not None:
        return adapter_bytes(model.config, model.lora, model.head, tensor)
    return stored_bytes(model.config, model.head, TRAIN, fsdp, tensor, WIDE)


def resident(model: RoleModel, dtype: Any, fsdp: int, tensor: int, layout: Layout = TRAIN) -> dict[str, float]:
    """What a role keeps of one model on each device of its home. "base" is there once for all roles that share it.

    layout: by which a frozen model of its own is stored.

    Raises:
        ValueError: the model cannot be divided so.
    """
    itemsize = jnp.dtype(dtype).itemsize
    kept: dict[str, float] = {}
    if model.shared:
        kept["base"] = base_bytes(model.config, tensor, itemsize, model.int8)
    if model.trained:
        kept["weights"] = trained_bytes(model, fsdp, tensor)
        kept["optimizer"] = 2 * kept["weights"] + COUNTERS
    elif model.lora is not None:
        kept["weights"] = trained_bytes(model, fsdp, tensor)
    elif not model.is_base:
        size = WIDE if model.wide else itemsize
        kept["weights"] = stored_bytes(model.config, model.head, layout, fsdp, tensor, size)
    return kept


_INPUTS = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "gate": 1, "up": 1, "down": 1}  # dimensions that int8 has no scale for


@cache
def _shapes(config: ModelConfig, head: HeadKind) -> Any:
    return jax.eval_shape(partial(init_lm if head == "lm" else init_scalar, config), _key())


def _joined(shapes: Any, axes: Any) -> tuple[Weight, ...]:
    named = dict(jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0])
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    return tuple(Weight(tuple(step.key for step in path), leaf.shape, named[path]) for path, leaf in leaves)


def _bytes(weight: Weight, layout: Layout, fsdp: int, tensor: int, itemsize: int) -> int:
    return prod(weight.shard(layout, fsdp, tensor)) * (itemsize if weight.matrix else WIDE)


def _key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))
