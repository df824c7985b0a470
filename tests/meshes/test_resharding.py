import importlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.hlo import collectives
from jrlhf.meshes import GENERATE, TRAIN, Layout, make_mesh, reshard
from jrlhf.meshes.resharding import host_transfers_refused
from tests.support.live import live_bytes
from tests.support.reshard import lower_reshard

full = pytest.mark.full
MESHES = [(4, 2), pytest.param(1, 8, marks=full)]
LAYERS = 3
AXES = {
    "embedding": ("vocab", "embed"),
    "final_norm": ("norm",),
    "layers": {
        "query": ("layers", "embed", "heads"),
        "out": ("layers", "heads", "embed"),
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "norm": ("layers", "norm"),
    },
}
SIZES = {"vocab": 128, "embed": 32, "heads": 64, "mlp": 96, "norm": 32, "layers": LAYERS}


def is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def decoder() -> dict[str, Any]:
    """Weights of a small decoder, on the host."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda axes: rng.standard_normal([SIZES[axis] for axis in axes], dtype=np.float32), AXES, is_leaf=is_axes
    )


def stacked(mesh: Mesh, layout: Layout) -> dict[str, Any]:
    return jax.tree.map(lambda axes: layout.sharding(mesh, axes), AXES, is_leaf=is_axes)


def by_layer(mesh: Mesh, layout: Layout) -> dict[str, Any]:
    layer = {name: layout.sharding(mesh, axes[1:]) for name, axes in AXES["layers"].items()}
    return {**stacked(mesh, layout), "layers": [layer] * LAYERS}


def unstacked(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "layers": [{name: x[i] for name, x in tree["layers"].items()} for i in range(LAYERS)]}


def in_bfloat16(tree: Any) -> Any:
    """Matrices rounded; vectors as they are."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tree)


def assert_equal_bits(tree: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), expected)


def assert_placed(tree: Any, shardings: Any) -> None:
    assert jax.tree.map(lambda x: x.sharding, tree) == shardings


def bytes_of(tree: Any, shardings: Any, itemsize: int = 4) -> Counter[tuple[int, str]]:
    """Bytes a device by sharding arithmetic."""
    total: Counter[tuple[int, str]] = Counter()
    for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        for device in sharding.device_set:
            total[device.id, "device"] += itemsize * int(np.prod(sharding.shard_shape(x.shape)))
    return total


@contextmanager
def compilations() -> Iterator[list[str]]:
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        monitoring.unregister_event_duration_listener(listen)


# ---- the switch from training to generation


@pytest.mark.parametrize(("fsdp", "tensor"), MESHES)
def test_the_switch(fsdp: int, tensor: int):
    """Values, places, kinds of collectives, guard and recompilation of the one move that PPO makes each step."""
    mesh = make_mesh(fsdp=fsdp, tensor=tensor)
    host = decoder()
    train = jax.device_put(host, stacked(mesh, TRAIN))
    generate = by_layer(mesh, GENERATE)

    with host_transfers_refused(), compilations() as first:
        copy = reshard(train, generate, dtype=jnp.bfloat16)
    assert first, "the listener hears no compilation"
    negative = jax.device_put(jax.tree.map(np.negative, host), stacked(mesh, TRAIN))
    with host_transfers_refused(), compilations() as second:
        other = reshard(negative, generate, dtype=jnp.bfloat16)
    assert not second

    assert_placed(copy, generate)
    assert_equal_bits(copy, in_bfloat16(unstacked(host)))
    assert_equal_bits(jax.tree.map(jnp.negative, other), in_bfloat16(unstacked(host)))
    assert_equal_bits(train, host)

    (program,) = lower_reshard(train, generate, dtype=jnp.bfloat16)
    matrices = 1 + 4 * LAYERS
    assert collectives(program.compile()) == (Counter({"all-gather": matrices}) if fsdp > 1 else Counter())


def test_live_memory():
    mesh = make_mesh(fsdp=4, tensor=2)
    host = decoder()
    before = live_bytes()

    def added() -> Counter[tuple[int, str]]:
        return live_bytes() - before

    train = jax.device_put(host, stacked(mesh, TRAIN))
    generate = by_layer(mesh, GENERATE)
    source = bytes_of(host, stacked(mesh, TRAIN))
    destination = bytes_of(unstacked(host), generate)
    assert added() == source

    copy = reshard(train, generate)
    assert added() == source + destination
    jax.tree.map(lambda x: x.delete(), copy)
    assert added() == source
    assert_equal_bits(train, host)

    moved = reshard(train, generate, donate=True)
    assert added() == destination
    assert all(x.is_deleted() for x in jax.tree.leaves(train))
    assert_equal_bits(moved, unstacked(host))


def test_equal_placement_still_makes_a_copy():
    """jax.device_put would share the memory, and deleting the copy would delete the source."""
    mesh = make_mesh(fsdp=2, tensor=4)
    source = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("tensor")))
    reshard({"x": source}, {"x": source.sharding})["x"].delete()
    np.testing.assert_array_equal(source, np.arange(8))


def test_donated_memory_is_reused_where_shards_keep_their_size():
    mesh = make_mesh(fsdp=4, tensor=2)
    specs = {
        "grows": (P("fsdp"), P()),
        "moves": (P("fsdp"), P(None, "fsdp")),
        "shrinks": (P("fsdp"), P("fsdp", "tensor")),
        "turns": (P("fsdp", "tensor"), P("tensor", "fsdp")),
        "stays": (P("fsdp"), P("fsdp")),
    }
    host = {name: np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32) for name in specs}
    tree = jax.device_put(host, {name: NamedSharding(mesh, src) for name, (src, _) in specs.items()})
    dst = {name: NamedSharding(mesh, dst) for name, (_, dst) in specs.items()}
    (program,) = lower_reshard(tree, dst, donate=True)
    analysis = program.compile().memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == 64 * 64 * 4 * (1 / 4 + 1 / 8 + 1 / 4)
    moved = reshard(tree, dst, donate=True)
    assert_placed(moved, dst)
    assert_equal_bits(moved, host)
    assert all(x.is_deleted() for x in tree.values())


def test_the_cast_comes_before_the_gather():
    """CPU programs widen bf16 collectives, so this reads the program before XLA compiles it."""
    mesh = make_mesh(fsdp=4, tensor=2)
    train = jax.device_put(decoder(), stacked(mesh, TRAIN))
    (program,) = lower_reshard(train, by_layer(mesh, GENERATE), dtype=jnp.bfloat16)
    body = [
        line for line in program.as_text().splitlines() if "stablehlo." in line or "sdy.sharding_constraint" in line
    ]
    vectors = ("tensor<32xf32>", "tensor<1x32xf32>", f"tensor<{LAYERS}x32xf32>")  # norm scales, which keep their dtype
    with_float32 = [line for line in body if "xf32>" in line and not any(vector in line for vector in vectors)]
    assert len(with_float32) == len([x for x in jax.tree.leaves(train) if x.shape not in ((32,), (LAYERS, 32))])
    assert all("stablehlo.convert %arg" in line for line in with_float32)


def test_only_floating_matrices_are_cast():
    mesh = make_mesh(fsdp=8)
    tree = {
        "step": jnp.int32(3),
        "mask": jnp.ones((8, 8), bool),
        "half": jnp.ones((8, 8), jnp.float16),
        "w": jnp.full((8, 8), 1 / 3),
        "scale": jnp.full(8, 1 / 3),
    }
    placed = jax.device_put(tree, NamedSharding(mesh, P()))
    out = reshard(placed, jax.tree.map(lambda _: NamedSharding(mesh, P()), tree), dtype=jnp.bfloat16)
    assert {name: str(x.dtype) for name, x in out.items()} == {
        "step": "int32",
        "mask": "bool",
        "half": "bfloat16",
        "w": "bfloat16",
        "scale": "float32",
    }
    assert out["step"] == 3


def test_groups_bound_the_temporary_memory():
    """In float32: the CPU's widening of bf16 collectives is no property of the switch."""
    mesh = make_mesh(fsdp=4, tensor=2)
    host = decoder()
    train = jax.device_put(host, stacked(mesh, TRAIN))
    generate = by_layer(mesh, GENERATE)
    group_bytes = 2 * 4 * SIZES["embed"] * SIZES["mlp"] // 2  # two layers of the largest weight, a device
    programs = lower_reshard(train, generate, group_bytes=group_bytes)
    assert len(lower_reshard(train, generate)) == 1 < len(programs) < len(jax.tree.leaves(generate))
    analyses = [program.compile().memory_analysis() for program in programs]
    outputs = [analysis.output_size_in_bytes for analysis in analyses if analysis is not None]
    pointers = 8 * len(jax.tree.leaves(generate))
    assert max(outputs) <= group_bytes + pointers
    assert sum(outputs) <= bytes_of(unstacked(host), generate)[0, "device"] + pointers
    assert max(analysis.temp_size_in_bytes for analysis in analyses if analysis is not None) < max(outputs)
    # A group holds one layer at least, however small it is asked to be.
    assert len(lower_reshard(train, generate, group_bytes=1)) == len(jax.tree.leaves(generate))
    assert_equal_bits(reshard(train, generate, group_bytes=group_bytes, donate=True), unstacked(host))
    assert all(x.is_deleted() for x in jax.tree.leaves(train))


# ---- any sharding to any other


def test_mesh_shapes_on_the_same_devices():
    """The mesh that the caller computes on does not matter."""
    for (src_shape, src_spec), (dst_shape, dst_spec) in [
        (((1, 8, 1), P("fsdp")), ((1, 1, 8), P(None, "tensor"))),
        (((1, 4, 2), P("fsdp", "tensor")), ((1, 2, 4), P("tensor", "fsdp"))),
        (((1, 4, 2), P("tensor", "fsdp")), ((2, 2, 2), P())),
        (((2, 2, 2), P()), ((2, 2, 2), P(("tensor", "data")))),
    ]:
        host = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
        x = jax.device_put(host, NamedSharding(make_mesh(*src_shape), src_spec))
        sharding = NamedSharding(make_mesh(*dst_shape), dst_spec)
        for context in [(1, 8, 1), (2, 2, 2), None]:
            with nullcontext() if context is None else jax.set_mesh(make_mesh(*context)), host_transfers_refused():
                out = reshard(x, sharding, dtype=jnp.bfloat16)
            assert out.sharding == sharding
            np.testing.assert_array_equal(out, host.astype(jnp.bfloat16))


def test_reshard_holds_the_guard_itself(monkeypatch: pytest.MonkeyPatch):
    """A wrong plan, whose copies find no fitting shard at the source, raises instead of going through the host."""
    module = importlib.import_module("jrlhf.meshes.resharding")
    monkeypatch.setattr(module, "_steps", module._steps.__wrapped__)  # a wrong plan is not kept
    monkeypatch.setattr(module, "_stages", lambda move: (rows,))
    rows = NamedSharding(make_mesh(fsdp=4, devices=jax.devices()[:4]), P("fsdp"))
    columns = NamedSharding(make_mesh(fsdp=4, devices=jax.devices()[4:]), P(None, "fsdp"))
    x = jax.device_put(np.zeros((8, 8), np.float32), rows)
    with pytest.raises(Exception, match="Disallowed (host-to-device|device-to-host) transfer"):
        reshard(x, columns)


# Positions in jax.devices(), and the mesh over them as (fsdp, tensor).
DEVICES = {
    "reordered": ([0, 1, 2, 3], [2, 0, 3, 1]),
    "subset": ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]),
    "superset": ([4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
    "more": ([0, 1], [4, 5, 6, 7]),
    "overlap": ([0, 1, 2, 3, 4, 5], [4, 5, 6, 7]),
    "to one": ([0, 1, 2, 3], [5]),
    "from one": ([5], [0, 1, 2, 3]),
    "odd": ([0, 1, 2], [4, 5, 6, 7]),
}


@pytest.mark.parametrize(
    ("case", "donate"),
    [
        ("subset", False),
        ("odd", True),
        *(pytest.param(case, False, marks=full) for case in ("reordered", "overlap", "from one")),
        *(pytest.param(case, True, marks=full) for case in ("superset", "to one", "more")),
    ],
)
def test_between_device_sets(case: str, donate: bool):
    """Bit for bit, never through the host, on meshes of every shape that divides."""
    source_devices, target_devices = ([jax.devices()[i] for i in ids] for ids in DEVICES[case])
    host = {"w": np.random.default_rng(0).standard_normal((2, 24, 48), dtype=np.float32), "n": np.arange(5)}
    src_mesh = make_mesh(fsdp=-1, tensor=2 - len(source_devices) % 2, devices=source_devices)
    src = {"w": NamedSharding(src_mesh, P(None, "fsdp", "tensor")), "n": NamedSharding(src_mesh, P())}
    dst_mesh = make_mesh(fsdp=-1, tensor=2 - len(target_devices) % 2, devices=target_devices)
    whole = NamedSharding(dst_mesh, P())
    for spec in (P("fsdp", "tensor"), P(None, "tensor"), P(("tensor", "fsdp"))):
        dst = {"w": [NamedSharding(dst_mesh, spec)] * 2, "n": whole}
        tree = jax.device_put(host, src)
        with jax.set_mesh(src_mesh), host_transfers_refused():
            out = reshard(tree, dst, donate=donate)
        assert_placed(out, dst)
        assert_equal_bits(out, {"w": list(host["w"]), "n": host["n"]})
        assert [x.is_deleted() for x in jax.tree.leaves(tree)] == [donate] * 2
        if not donate:  # nothing is shared where the device sets overlap
            jax.tree.map(lambda x: x.delete(), out)
            assert_equal_bits(tree, host)


def test_between_device_sets_the_source_drops_axes_and_moves_none():
    """Training on four devices, generation on others, with no more tensor parallelism than in training."""
    host = decoder()
    train = jax.device_put(host, stacked(make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]), TRAIN))
    mesh = make_mesh(fsdp=2, tensor=1, devices=jax.devices()[6:8])
    (program,) = lower_reshard(train, by_layer(mesh, GENERATE), dtype=jnp.bfloat16)
    assert collectives(program.compile()).keys() == {"all-gather"}
    copy = reshard(train, by_layer(mesh, GENERATE), dtype=jnp.bfloat16)
    assert_equal_bits(copy, in_bfloat16(unstacked(host)))
    with compilations() as second:
        reshard(train, by_layer(mesh, GENERATE), dtype=jnp.bfloat16)
    assert not second


def test_arrays_of_different_devices_in_one_tree():
    one, all_of_them = jax.devices()[0], make_mesh(fsdp=8)
    host = {"a": np.arange(8.0), "b": np.arange(16.0), "c": np.arange(3), "d": np.arange(24.0)}
    sharded = NamedSharding(all_of_them, P("fsdp"))
    tree = jax.device_put(host, {"a": one, "b": sharded, "c": one, "d": sharded})
    dst = {name: NamedSharding(all_of_them, P() if name == "c" else P("fsdp")) for name in host}
    out = reshard(tree, dst)
    assert_placed(out, dst)
    assert_equal_bits(out, jax.tree.map(jnp.asarray, host))


# ---- the structure of shardings


def test_both_forms_of_unstacking():
    mesh = make_mesh(fsdp=4, tensor=2)
    x, s = jnp.arange(2 * 8 * 4, dtype=jnp.float32).reshape(2, 8, 4), NamedSharding(mesh, P(None, "tensor"))
    t = NamedSharding(mesh, P("fsdp"))
    tree = jax.device_put({"a": x, "b": -x}, NamedSharding(mesh, P(None, "fsdp", "tensor")))
    dict_of_lists = reshard(tree, {"a": [s, t], "b": (t, s)})
    list_of_dicts = reshard(tree, [{"a": s, "b": t}, {"a": t, "b": s}])
    assert_placed(dict_of_lists, {"a": [s, t], "b": (t, s)})
    assert_placed(list_of_dicts, [{"a": s, "b": t}, {"a": t, "b": s}])
    assert_equal_bits(dict_of_lists, {"a": [x[0], x[1]], "b": (-x[0], -x[1])})
    assert_equal_bits(list_of_dicts, [{"a": x[0], "b": -x[0]}, {"a": x[1], "b": -x[1]}])


def test_one_sharding_is_for_all_arrays():
    mesh = make_mesh(fsdp=8)
    rows, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    tree = jax.device_put({"a": np.arange(8.0), "b": [np.arange(16.0).reshape(8, 2)]}, rows)
    moved = reshard(tree, whole)
    assert jax.tree.structure(moved) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(tree), strict=True):
        assert one.sharding == whole
        np.testing.assert_array_equal(one, other)


def test_lists_of_the_tree_are_mirrored():
    mesh = make_mesh(fsdp=8)
    s = NamedSharding(mesh, P("fsdp"))
    tree = jax.device_put([np.arange(8.0), (np.arange(16.0), {})], NamedSharding(mesh, P()))
    assert_placed(reshard(tree, [s, (s, {})]), [s, (s, {})])
    assert reshard({}, {}) == {}


def test_trees_and_shardings_that_do_not_fit():
    s = NamedSharding(make_mesh(fsdp=8), P())
    tree = jax.device_put({"w": np.zeros((3, 8)), "b": np.float32(0)}, s)
    for shardings, message in [
        ({"w": s}, "the array at ['b'] has no sharding: shardings must mirror the tree"),
        ({"w": s, "b": s, "c": s}, "the sharding at ['c'] has no array: shardings must mirror the tree"),
        ({"w": [s, s], "b": s}, "the array at ['w'], shape (3, 8), is unstacked into 2 shardings"),
        ({"w": [s] * 4, "b": s}, "the array at ['w'], shape (3, 8), is unstacked into 4 shardings"),
        ({"w": s, "b": [s]}, "the array at ['b'], shape (), is unstacked into 1 shardings"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            reshard(tree, shardings)
    rows = NamedSharding(make_mesh(fsdp=8), P("fsdp"))
    for array, moved in (("w", {"w": rows, "b": s}), ("b", {"w": s, "b": rows})):
        with pytest.raises(
            ValueError, match=rf"^the array at \['{array}'\] has shape .*, which does not divide as P\('fsdp'"
        ):
            reshard(tree, moved)
    with pytest.raises(ValueError, match=r"^the array at \['b'\] is also the array at \['a'\]: donate=True"):
        reshard({"a": tree["w"], "b": tree["w"]}, s, donate=True)
    for wrong, shardings, message in [
        (
            {"w": np.zeros(8)},
            {"w": s},
            "the array at ['w'] is a ndarray on no device: place it by jax.device_put first",
        ),
        (tree, P("fsdp"), "the sharding is of class P"),
        (tree, {"w": s, "b": jax.sharding.SingleDeviceSharding(jax.devices()[0])}, "the sharding at ['b'] is of class"),
        (tree, make_mesh(fsdp=8), "the sharding is of class Mesh: give a NamedSharding"),
        (tree, {"w": s, "b": tree["b"]}, "the sharding at ['b'] is of class ArrayImpl"),  # it has no hash
    ]:
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            reshard(wrong, shardings)
    with pytest.raises(TypeError, match="is traced: .* in a jitted function use jax.device_put"):
        jax.jit(lambda tree: reshard(tree, s))(tree)


def test_keys_move_with_the_weights():
    mesh = make_mesh(fsdp=8)
    state = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 8), "w": jnp.ones((8, 8))}
    shardings = {"key": NamedSharding(mesh, P()), "keys": NamedSharding(mesh, P("fsdp")), "w": NamedSharding(mesh, P())}
    moved = reshard(state, shardings, dtype=jnp.bfloat16)
    fewer = Mesh(np.array(jax.devices()[:2]), ("x",))
    moved = reshard(moved, NamedSharding(fewer, P()), donate=True)
    assert moved["w"].dtype == jnp.bfloat16 and moved["keys"].sharding.mesh == fewer
    for name in ("key", "keys"):
        assert moved[name].dtype == state[name].dtype
        np.testing.assert_array_equal(jax.random.key_data(moved[name]), jax.random.key_data(state[name]))
