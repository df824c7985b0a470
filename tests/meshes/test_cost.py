import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import GENERATE, TRAIN, ReshardCost, make_mesh, reshard_cost, tree_reshard_cost

SHAPE, ITEMSIZE = (32, 64), 2
WEIGHT_BYTES = 32 * 64 * 2


def named(axes: dict[str, int], *spec: str | tuple[str, ...] | None) -> NamedSharding:
    mesh = Mesh(np.asarray(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    return NamedSharding(mesh, P(*spec))


def fractions(cost: ReshardCost) -> tuple[set[float], set[float]]:
    """What the devices receive and hold in vain, as fractions of the weight."""
    assert cost.received.keys() == cost.redundant.keys() == set(range(8))
    received, redundant = ({b / WEIGHT_BYTES for b in side.values()} for side in (cost.received, cost.redundant))
    return received, redundant


@pytest.mark.parametrize("fsdp", [1, 2, 4, 8])
@pytest.mark.parametrize("axes", [("embed", "mlp"), ("mlp", "embed"), ("vocab", "embed")])
def test_training_to_generation_is_free_of_waste(fsdp: int, axes: tuple[str, str]):
    """HybridFlow (arXiv 2409.19256), table 2: (t·d - t_g) / (t_g·t·d) of the weight comes in, nothing is redundant."""
    tensor = 8 // fsdp
    mesh = make_mesh(fsdp=fsdp, tensor=tensor)
    cost = reshard_cost(SHAPE, ITEMSIZE, TRAIN.sharding(mesh, axes), GENERATE.sharding(mesh, axes))
    assert fractions(cost) == ({1 / tensor - 1 / (fsdp * tensor)}, {0})


FSDP_TENSOR = {"fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("train", "generate", "received", "redundant"),
    [
        # HybridFlow, figure 8b: the kept factor of tensor parallelism is major.
        (
            named({"dp": 2, "tg": 2, "dg": 2}, None, ("tg", "dg")),
            named({"dp": 2, "tg": 2, "dg": 2}, None, "tg"),
            {0.25},
            {0},
        ),
        # Figure 8a: it is minor, and half of the devices hold a quarter that they do not use.
        (
            named({"dp": 2, "dg": 2, "tg": 2}, None, ("dg", "tg")),
            named({"dp": 2, "dg": 2, "tg": 2}, None, "tg"),
            {0.25, 0.5},
            {0, 0.25},
        ),
        # ZeRO-3 on rows -> tensor parallel columns.
        (named({"zero": 8}, "zero"), named(FSDP_TENSOR, None, "tensor"), {0.4375}, {0.0625}),
        (named(FSDP_TENSOR, "fsdp", "tensor"), named(FSDP_TENSOR, None, "tensor"), {0.375}, {0}),
        (
            named({"fsdp": 2, "tensor": 4}, "fsdp", "tensor"),
            named({"fsdp": 2, "tensor": 4}, None, "tensor"),
            {0.125},
            {0},
        ),
        # A part of fsdp moved to the columns.
        (
            named({"outer": 2, "inner": 2, "tensor": 2}, ("outer", "inner"), "tensor"),
            named({"outer": 2, "inner": 2, "tensor": 2}, None, ("tensor", "inner")),
            {0.1875},
            {0.0625},
        ),
        # The same with that part on the columns from the start.
        (
            named({"outer": 2, "tensor": 2, "inner": 2}, "outer", ("tensor", "inner")),
            named({"outer": 2, "tensor": 2, "inner": 2}, None, ("tensor", "inner")),
            {0.125},
            {0},
        ),
        # DeepSpeed-Chat: gather the whole weight.
        (named({"all": 8}, "all"), named({"all": 8}), {7 / 8}, {0}),
        (named({"all": 8}), named({"all": 8}, "all"), {0}, {7 / 8}),
    ],
    ids=["8b", "8a", "zero3", "fsdp4-tp2", "fsdp2-tp4", "moved", "prepared", "gather", "slice"],
)
def test_known_switches(train: NamedSharding, generate: NamedSharding, received: set[float], redundant: set[float]):
    assert fractions(reshard_cost(SHAPE, ITEMSIZE, train, generate)) == (received, redundant)


@pytest.mark.parametrize("seed", range(4))
def test_equals_counting_elements(seed: int):
    """Box arithmetic against sets of elements, between random shardings on random devices."""
    rng = np.random.default_rng(seed)
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

    for _ in range(5):
        src, dst = random_sharding(), random_sharding()
        cost = reshard_cost(elements.shape, 4, src, dst)
        held = {d.id: set(elements[i].ravel()) for d, i in src.devices_indices_map(elements.shape).items()}
        used = {d.id: set(elements[i].ravel()) for d, i in dst.devices_indices_map(elements.shape).items()}
        devices = held.keys() | used.keys()
        assert cost.received == {d: 4 * len(used.get(d, set()) - held.get(d, set())) for d in devices}
        assert cost.redundant == {d: 4 * len(held.get(d, set()) - used.get(d, set())) for d in devices}


def test_other_devices():
    devices = jax.devices()
    src = NamedSharding(make_mesh(fsdp=4, devices=devices[:4]), P("fsdp"))
    dst = NamedSharding(make_mesh(tensor=4, devices=devices[2:6]), P(None, "tensor"))
    cost = reshard_cost(SHAPE, ITEMSIZE, src, dst)
    quarter, sixteenth = WEIGHT_BYTES // 4, WEIGHT_BYTES // 16
    assert cost.received == {0: 0, 1: 0, 2: quarter - sixteenth, 3: quarter - sixteenth, 4: quarter, 5: quarter}
    assert cost.redundant == {0: quarter, 1: quarter, 2: quarter - sixteenth, 3: quarter - sixteenth, 4: 0, 5: 0}


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


def test_shardings_must_mirror_the_tree():
    mesh = make_mesh(fsdp=8)
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P()))}
    with pytest.raises(
        ValueError, match=re.escape("the sharding at ['v'] has no array: shardings must mirror the tree")
    ):
        tree_reshard_cost(tree, {"v": NamedSharding(mesh, P())})
