"""Compiles the switch of one decoder layer between meshes of any two shapes, and compares it with arithmetic.

python -m tests.support.switches 16 [FIRST STRIDE]    all pairs of shapes on 16 simulated devices, or a part of them
"""

import sys
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.hlo import received_bytes
from jrlhf.meshes import GENERATE, TRAIN, make_mesh, reshard
from jrlhf.models import ModelConfig
from jrlhf.models.params import Params, param_shardings
from jrlhf.models.weights import weights
from tests.support.reshard import lower_reshard

Shape = tuple[int, int, int]  # data, fsdp, tensor
# Every dimension divides; and few heads, fewer key-value heads and a padded vocabulary, which divide over some meshes.
EVEN = ModelConfig(256, embed=32, layers=1, heads=16, kv_heads=16, head_dim=2, mlp=32, max_positions=8)
UNEVEN = ModelConfig(
    300, embed=48, layers=1, heads=12, kv_heads=2, head_dim=2, mlp=36, max_positions=8, tie_embeddings=False
)


def shapes(devices: int) -> list[Shape]:
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    return [shape for shape in product(sizes, sizes, sizes) if prod(shape) == devices]


def targets(config: ModelConfig, shape: Shape) -> dict[str, Any]:
    """The shardings of both layouts; layers stay stacked in one and are a list in the other."""
    mesh = make_mesh(*shape)
    return {"generate": param_shardings(config, mesh, GENERATE), "train": param_shardings(config, mesh, TRAIN)}


def stored(config: ModelConfig, shape: Shape) -> Params:
    """The weights on the host, every element a different number, and where they are stored."""
    shardings = param_shardings(config, make_mesh(*shape), TRAIN)
    sizes = {weight.path: weight.shape for weight in weights(config, "lm", shape[2])}
    leaves, treedef = jax.tree.flatten_with_path(shardings)
    arrays = []
    for path, sharding in leaves:
        whole = sizes[tuple(key.key for key in path)]
        arrays.append((np.arange(prod(whole), dtype=np.float32).reshape(whole), sharding))
    return treedef.unflatten(arrays)


def needed_bytes(size: Sequence[int], old: NamedSharding, new: NamedSharding) -> list[int]:
    """By device, the elements of its new part that it does not have, counted one by one, in bytes of float32."""
    elements = np.arange(prod(size)).reshape(size)
    before, after = (sharding.devices_indices_map(tuple(size)) for sharding in (old, new))
    return [4 * np.setdiff1d(elements[after[device]], elements[before[device]]).size for device in before]


def check(config: ModelConfig, source: Shape, target: Shape, *, values: bool) -> str:
    """Asserts that the compiled programs send every device the bytes that it needs, in no more temporary memory than
    their arguments and results take, and, with `values`, the right ones. Returns a line that describes them."""
    leaves = stored(config, source)
    is_pair = {"is_leaf": lambda node: isinstance(node, tuple)}
    host = jax.tree.map(lambda pair: pair[0], leaves, **is_pair)
    own = jax.tree.map(lambda pair: pair[1], leaves, **is_pair)
    total, temporary = np.zeros(prod(source)), 0
    for wanted in targets(config, target).values():
        tree = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), host, own)
        programs = [program.compile() for program in lower_reshard(tree, wanted)]
        received = np.sum([received_bytes(program, prod(source)) for program in programs], axis=0)
        is_list = isinstance(wanted["layers"], list)
        flat = {**wanted, "layers": wanted["layers"][0]} if is_list else wanted
        inner = {**host, "layers": jax.tree.map(lambda x: x[0], host["layers"])} if is_list else host
        old = own
        if is_list:
            cut = jax.tree.map(lambda s: NamedSharding(s.mesh, jax.P(*s.spec[1:])), own["layers"])
            old = {**own, "layers": cut}
        needs = jax.tree.map(lambda x, a, b: np.asarray(needed_bytes(x.shape, a, b)), inner, old, flat)
        np.testing.assert_allclose(received, sum(jax.tree.leaves(needs)), rtol=0.01, err_msg=f"{source} {target}")
        total += received
        for program in programs:
            memory = program.memory_analysis()
            assert memory is not None
            limit = memory.output_size_in_bytes + memory.argument_size_in_bytes
            assert memory.temp_size_in_bytes <= limit + 4096, (source, target, memory)
            temporary = max(temporary, memory.temp_size_in_bytes)
        if values:
            moved = reshard(jax.device_put(host, own), wanted)
            result = {**moved, "layers": moved["layers"][0]} if is_list else moved
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), inner)
    return f"{source} -> {target}: {total.max():,.0f} bytes received, {temporary:,} temporary"


def main(devices: int, first: int = 0, stride: int = 1) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    pairs = [pair for pair in product(shapes(devices), repeat=2) if pair[0] != pair[1]]
    for number, (source, target) in enumerate(pairs[first::stride]):
        print(check(EVEN, source, target, values=number % 8 == 0), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
