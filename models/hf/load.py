"""Loads a Hugging Face directory onto a mesh, without torch and without a second copy of the model.

Files are memory-mapped, and each process copies only what its own devices store, in the file's order; the devices
reorder and cast it. Only the accessed pages are read from disk (more than the slice if it is strided). One layer is
loaded at a time, and is written into the stacked weights in place.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jrlhf.meshes.layout import TRAIN, Layout
from jrlhf.models.hf.config import HFConfig, read_config
from jrlhf.models.hf.files import DTYPES, NOT_FINITE, Tensor, find_tensors
from jrlhf.models.hf.names import BUFFERS, HEAD_TENSORS, TensorView, TreePath, weight_table, without_prefix
from jrlhf.models.params import Params, leaf_at, made_in_place, nested, param_shardings
from jrlhf.models.weights import HeadKind

Progress = Callable[[int, int], None]
Report = Callable[[Sequence[TensorView], int | None], None]


def load_hf(
    directory: str | os.PathLike[str],
    mesh: Mesh,
    *,
    layout: Layout = TRAIN,
    head: HeadKind = "lm",
    dtype: DTypeLike | None = jnp.float32,
    keep_head: bool = True,
    config: HFConfig | None = None,
    progress: Progress | None = None,
) -> tuple[HFConfig, Params]:
    """Loads config.json and safetensors into the tree of `init_sharded`, in the storage of `layout`.

    head: "lm" for an actor or a reference, "scalar" for a critic or a reward model. A scalar model takes its head from
        a sequence classifier's `score`; from a language model it takes all but the head, which is then zero.
    dtype: dtype of the weights; vectors (norm scales, most biases, the scalar head) are then float32, in which they are
        applied. None: every weight keeps the file's dtype.
    keep_head: False: the head is zero even if the model is a reward model.
    config: the result of `read_config(directory)`, if it is known already or has been changed.
    progress: called with (bytes done, total bytes) of the files' tensors, before the first one and after each layer and
        table.

    Returns what config.json says, and the weights. Padding rows of vocabulary tables are zero.

    Raises FileNotFoundError if files are missing, and ValueError for an unknown head or dtype, a model that is not
    supported or does not fit on the mesh, and tensors that config.json does not describe or that are not finite.
    """
    name = getattr(dtype, "__name__", str(dtype))
    if name not in ("None", "float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={name!r} must be None or one of floats, such as 'float32' or 'bfloat16'")
    config, source = _inspect(Path(directory), head, config, keep_head=keep_head)
    shardings = param_shardings(config.model, mesh, layout, head)
    done = 0

    def report(weights: Sequence[TensorView], layer: int | None) -> None:
        nonlocal done
        done += sum(source.bytes_of(weight, layer) for weight in weights)
        if progress is not None:
            progress(done, source.total)

    def dtype_of(weight: TensorView) -> np.dtype:
        if dtype is None:
            return source.dtype(weight)
        return np.dtype(dtype if len(weight.split) > 1 else np.float32)

    leaves: dict[TreePath, jax.Array] = {}
    report((), None)
    with jax.set_mesh(mesh):
        for weight in source.single:
            array = _read(weight, source.tensor(weight), leaf_at(shardings, weight.path))
            if array.dtype != dtype_of(weight):  # no table or vector has its axes in another order in the file
                array = jax.jit(partial(_ours, weight, dtype_of(weight)))(array)
            source.check_finite({weight: _finite(array)})
            leaves[weight.path] = array
            report([weight], None)
        absent = {weight.path: jax.ShapeDtypeStruct(weight.split, np.float32) for weight in source.absent}
        leaves |= _zeros(absent, {path: leaf_at(shardings, path) for path in absent}, mesh)
        return config, nested(leaves.items()) | {"layers": _layers(source, shardings["layers"], mesh, dtype_of, report)}


def check_hf(directory: str | os.PathLike[str], *, head: HeadKind = "lm", numbers: bool = False) -> HFConfig:
    """Checks config.json and the headers of the weights, as `load_hf` does before it reads the numbers.

    numbers: reads them, too, on the host, and refuses any that is not finite.
    """
    config, source = _inspect(Path(directory), head, None, keep_head=True)
    for name, tensor in source.tensors.items() if numbers else ():
        flat, step = tensor.view().reshape(-1), 2**24
        if not all(np.isfinite(flat[start : start + step]).all() for start in range(0, len(flat), step)):
            raise ValueError(f"{tensor.file} holds {name!r} with {NOT_FINITE}")
    return config


# ---- which tensors


@dataclass(frozen=True)
class _Source:
    """The weights of one model and the tensors that contain them, all checked before the first is read.

    absent: the parts of a scalar head that no file contains.
    """

    layers: int
    single: tuple[TensorView, ...]
    layered: tuple[TensorView, ...]
    absent: tuple[TensorView, ...]
    tensors: Mapping[str, Tensor]

    @property
    def total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def tensor(self, weight: TensorView, layer: int | None = None) -> Tensor:
        return self.tensors[weight.name.format(layer=layer)]

    def check_finite(self, finite: Mapping[TensorView, jax.Array], layer: int | None = None) -> None:
        """Raises ValueError for the first weight with numbers that are not finite, according to `finite`."""
        for weight, is_finite in finite.items():
            if not is_finite:
                tensor = self.tensor(weight, layer)
                raise ValueError(f"{tensor.file} holds {weight.name.format(layer=layer)!r} with {NOT_FINITE}")

    def bytes_of(self, weight: TensorView, layer: int | None) -> int:
        return self.tensor(weight, layer).nbytes // weight.parts

    def dtype(self, weight: TensorView) -> np.dtype:
        """The dtype in the file; if layers differ, one that can represent the numbers of all."""
        layers = range(self.layers) if weight.layered else (None,)
        return np.dtype(reduce(jnp.promote_types, {DTYPES[self.tensor(weight, layer).dtype] for layer in layers}))


def _inspect(directory: Path, head: HeadKind, config: HFConfig | None, *, keep_head: bool) -> tuple[HFConfig, _Source]:
    config = read_config(directory) if config is None else config
    if head == "lm" and config.head == "scalar":
        raise ValueError(
            f"{directory} holds a reward model, which scores no tokens: choose a language model for this role"
        )
    tensors = find_tensors(directory)
    table = weight_table(config.model, config.family, head)
    first = table[0].name
    if first not in tensors and without_prefix(first) in tensors:  # the backbone, saved alone
        prefix = first.removesuffix(without_prefix(first))
        tensors = {name if name in HEAD_TENSORS else prefix + name: tensor for name, tensor in tensors.items()}
    absent = [weight for weight in table if weight.path[0] == "value_head"]
    if keep_head and config.head == "scalar":  # the kernel must be there, the bias may
        absent = [weight for weight in absent if weight.path[-1] == "bias" and weight.name not in tensors]
    present = [weight for weight in table if weight not in absent]
    single = tuple(weight for weight in present if not weight.layered)
    layered = tuple(weight for weight in present if weight.layered)
    checked = _checked(directory, config, head, present, tensors)
    return config, _Source(config.model.layers, single, layered, tuple(absent), checked)


def _checked(
    directory: Path, config: HFConfig, head: HeadKind, weights: Sequence[TensorView], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors for the weights. Refuses missing, wrong or superfluous tensors."""
    needed = {
        weight.name.format(layer=layer): weight
        for weight in weights
        for layer in (range(config.model.layers) if weight.layered else (None,))
    }
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ValueError(
            f"{directory} has no tensor {missing[0]!r}{_more(missing)}, which a {config.family} model of "
            f"{config.model.layers} layers has: fetch the weights that belong to its config.json"
        )
    for name, weight in needed.items():
        tensor = tensors[name]
        if tensor.shape != weight.file_shape:
            raise ValueError(
                f"{tensor.file} holds {name!r} of shape {tensor.shape}, where config.json asks for "
                f"{weight.file_shape}: fetch the weights that belong to it"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{tensor.file} holds {name!r} in dtype {tensor.dtype}: choose weights in {', '.join(DTYPES)}"
            )
    rest = [name for name in tensors if name not in needed and not BUFFERS.fullmatch(name)]
    if head == "scalar":  # a language model's head is not wanted, nor perhaps a reward model's
        others = HEAD_TENSORS if config.head == "scalar" else HEAD_TENSORS[:1]
        rest = [name for name in rest if name not in others]
    elif "lm_head.weight" in rest and config.model.tie_embeddings:
        rest.remove("lm_head.weight")
        if not _same(tensors["lm_head.weight"], tensors[weights[0].name]):
            raise ValueError(
                f"{tensors['lm_head.weight'].file} holds a 'lm_head.weight' of its own, but config.json says "
                "tie_word_embeddings: set it to false, or remove the tensor"
            )
    if rest:
        raise ValueError(
            f"{tensors[rest[0]].file} holds {rest[0]!r}{_more(rest)}, which a {config.family} model has no use for: "
            "its config.json is not all that computes it"
        )
    return {name: tensors[name] for name in needed}


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (tensor.view().reshape(-1).view(np.uint8) for tensor in (one, other))
    step = 2**26
    return all(np.array_equal(a[start : start + step], b[start : start + step]) for start in range(0, len(a), step))


# ---- one tensor, one layer


def _read(weight: TensorView, tensor: Tensor, sharding: NamedSharding) -> jax.Array:
    """Returns the tensor's part on the mesh, in the file's order and dtype, with the division of our weight."""
    entries = (*sharding.spec, *(None,) * (len(weight.split) - len(sharding.spec)))
    divided = NamedSharding(sharding.mesh, P(*weight.split_order(entries)))
    shape = weight.split if weight.rows is None else (weight.rows, *weight.split[1:])
    view = weight.part_of(tensor.view())
    slices: dict[Any, np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:  # a slice for each axis
        key = tuple((part.start, part.stop) for part in index)
        if key not in slices:  # devices that store the same share one copy on the host
            slices[key] = _padded(view, index, shape)
        return slices[key]

    return jax.make_array_from_callback(shape, divided, piece, dtype=view.dtype)


def _padded(view: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Copies view[index] from the file, with zeros where `shape` is larger than the view."""
    read = np.array(view[index], order="C")
    full = tuple(len(range(size)[part]) for part, size in zip(index, shape, strict=True))
    return read if read.shape == full else np.pad(read, [(0, n - m) for n, m in zip(full, read.shape, strict=True)])


def _ours(weight: TensorView, dtype: np.dtype, array: jax.Array) -> jax.Array:
    """Converts a tensor's part in the file's order to our weight."""
    return array.transpose(weight.order).astype(dtype)


@jax.jit
def _finite(array: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(array))


def _layers(
    source: _Source, shardings: Any, mesh: Mesh, dtype_of: Callable[[TensorView], np.dtype], report: Report
) -> Params | list[Params]:
    """Loads all layers: as a list if `shardings` is one; otherwise each is written into stacked weights in place."""
    weights = {weight.path[1:]: weight for weight in source.layered}
    dtypes = {path: dtype_of(weight) for path, weight in weights.items()}
    listed = isinstance(shardings, list)
    stored = {path: leaf_at(shardings[0] if listed else shardings, path) for path in weights}
    specs = {path: sharding.spec if listed else P(*sharding.spec[1:]) for path, sharding in stored.items()}
    one = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}

    def ours(layer: dict[TreePath, jax.Array]) -> tuple[dict[TreePath, jax.Array], dict[TreePath, jax.Array]]:
        new = {path: _ours(weights[path], dtypes[path], array) for path, array in layer.items()}
        return new, {path: _finite(array) for path, array in new.items()}

    both = stored, NamedSharding(mesh, P())

    @partial(jax.jit, donate_argnums=0, out_shardings=both)
    def write(stacks: dict[TreePath, jax.Array], layer: dict[TreePath, jax.Array], index: jax.Array):
        new, finite = ours(layer)
        return {path: lax.dynamic_update_index_in_dim(stacks[path], new[path], index, axis=0) for path in new}, finite

    place = jax.jit(ours, out_shardings=both)
    shapes = {path: tuple(weight.split[axis] for axis in weight.order) for path, weight in weights.items()}
    whole = {path: jax.ShapeDtypeStruct((source.layers, *shapes[path]), dtypes[path]) for path in weights}
    stacks = {} if listed else _zeros(whole, stored, mesh)
    layers = []
    for index in range(source.layers):  # waits for each layer: otherwise several would be on their way
        layer = {path: _read(weight, source.tensor(weight, index), one[path]) for path, weight in weights.items()}
        if listed:
            placed, finite = jax.block_until_ready(place(layer))
            layers.append(nested(placed.items()))
        else:
            stacks, finite = jax.block_until_ready(write(stacks, layer, np.int32(index)))
        source.check_finite({weights[path]: is_finite for path, is_finite in finite.items()}, index)
        report(source.layered, index)
    return layers if listed else nested(stacks.items())


def _zeros(shapes: dict[TreePath, Any], shardings: dict[TreePath, NamedSharding], mesh: Mesh) -> dict[TreePath, Any]:
    """Returns zeros, created where they are stored."""
    make = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return made_in_place(make, shardings, mesh)() if shapes else {}
