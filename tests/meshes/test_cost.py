from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import GENERATE, TRAIN, make_mesh, reshard_cost, tree_reshard_cost


def test_training_to_generation_is_free_of_waste():
    """HybridFlow (arXiv 2409.19256), table 2: (t·d - t_g) / (t_g·t·d) of the weight comes in, nothing is redundant."""
    for fsdp, axes in product([1, 2, 4, 8], [("embed", "mlp"), ("mlp", "embed"), ("vocab", "embed")]):
        tensor = 8 // fsdp
        mesh = make_mesh(fsdp=fsdp, tensor=tensor)
        cost = reshard_cost((32, 64), 2, TRAIN.sharding(mesh, axes), GENERATE.sharding(mesh, axes))
        assert cost.received == dict.fromkeys(range(8), 32 * 64 * 2 * (1 / tensor - 1 / (fsdp * tensor)))
        assert cost.redundant == dict.fromkeys(range(8), 0)


def test_equals_counting_elements():
    """Box arithmetic against sets of elements, between random shardings on random devices."""
    rng = np.random.default_rng(0)
    elements = np.arange(16 * 8 * 24).reshape(16, 8, 24)

    def random_sharding() -> NamedSharding:
        count = int(rng.choice([4, 8]))
        devices = rng.permutation(np.asarray(jax.devices()))[:count]
        mesh = Mesh(devices.reshape(2, 2, count // 4), ("a", "b", "c"))
        entries: list[list[str]] = [[], [], []]
        for axis in rng.permutation(["a", "b", "c"]):
            if rng.random() < 0.8:
                entries[rng.integers(3)].append(str(axis))
        return NamedSharding(mesh, P(*(tuple(entry) if entry else None for entry in entries)))

    for _ in range(20):
        src, dst = random_sharding(), random_sharding()
        cost = reshard_cost(elements.shape, 4, src, dst)
        old = {d.id: set(elements[i].ravel()) for d, i in src.devices_indices_map(elements.shape).items()}
        new = {d.id: set(elements[i].ravel()) for d, i in dst.devices_indices_map(elements.shape).items()}
        devices = old.keys() | new.keys()
        assert cost.received == {d: 4 * len(new.get(d, set()) - old.get(d, set())) for d in devices}
        assert cost.redundant == {d: 4 * len(old.get(d, set()) - new.get(d, set())) for d in devices}


def test_a_tree_costs_what_its_arrays_cost_in_the_dtype_that_travels():
    mesh = make_mesh(fsdp=4, tensor=2)

    def struct(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=TRAIN.sharding(mesh, axes))

    tree = {
        "layers": {"up": struct((3, 32, 64), "float32", "layers", "embed", "mlp")},
        "table": struct((64, 32), "float32", "vocab", "embed"),
        "counts": struct((64, 32), "int32", "vocab", "embed"),
    }
    up, table = GENERATE.sharding(mesh, ("embed", "mlp")), GENERATE.sharding(mesh, ("vocab", "embed"))
    dst = {"layers": [{"up": up}, {"up": up}, {"up": up}], "table": table, "counts": table}
    in_float32, in_bfloat16 = tree_reshard_cost(tree, dst), tree_reshard_cost(tree, dst, dtype=jnp.bfloat16)
    share = 1 / 2 - 1 / 8
    assert in_float32.received == dict.fromkeys(range(8), share * 4 * (3 + 1 + 1) * 32 * 64)
    assert in_bfloat16.received == dict.fromkeys(range(8), share * (2 * 3 + 2 + 4) * 32 * 64)
    assert in_float32.redundant == in_bfloat16.redundant == dict.fromkeys(range(8), 0)

    by_dict_of_lists = {**dst, "layers": {"up": (up, up, up)}}
    assert tree_reshard_cost(tree, by_dict_of_lists) == in_float32
