import re
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.hlo import collectives
from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, ShardingRules, gather, make_mesh
from jrlhf.meshes.layout import dropped_axes

WEIGHTS = [
    ("vocab", "embed"),
    ("layers", "embed", "heads"),
    ("layers", "embed", "kv_heads"),
    ("layers", "heads", "embed"),
    ("layers", "embed", "mlp"),
    ("layers", "mlp", "embed"),
    ("layers", "norm"),
    ("layers", "head_dim"),
    ("embed", None),
]


def test_spec_maps_each_logical_axis():
    rules = ShardingRules(embed="fsdp", heads=("tensor", "micro"))
    assert rules.spec(("layers", "embed", "heads")) == P(None, "fsdp", ("tensor", "micro"))
    assert rules.spec((None, "embed")) == P(None, "fsdp")
    assert rules.spec(()) == P()


def test_unknown_logical_axis_is_refused():
    message = "unknown logical axis 'head': known are embed, head_dim, heads, kv_heads, layers, mlp, norm, vocab"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ShardingRules().spec(("embed", "head"))


def test_collision_is_refused():
    for rules, axes in [
        (ShardingRules(embed="fsdp", mlp="fsdp"), ("embed", "mlp")),
        (ShardingRules(heads="tensor", mlp=("fsdp", "tensor")), ("heads", "mlp")),
        (ShardingRules(embed="fsdp"), ("embed", "embed")),
        (ShardingRules(embed=("fsdp", "fsdp")), ("embed",)),
    ]:
        with pytest.raises(ValueError, match="collide: mesh axes .* appear more than once"):
            rules.spec(axes)


def test_compute_only_drops_axes_of_storage():
    for axes, layout in product(WEIGHTS, [TRAIN, TRAIN_TP, GENERATE, SCORE]):
        storage, compute = layout.storage.spec(axes), layout.compute.spec(axes)
        computed = {name for entry in compute if entry is not None for name in np.atleast_1d(entry)}
        stored = {name for entry in storage if entry is not None for name in np.atleast_1d(entry)}
        dropped = {name for names in dropped_axes(storage, compute, len(axes)) for name in names}
        assert computed | dropped == stored and not computed & dropped


def test_the_layouts():
    axes = ("layers", "embed", "mlp")
    assert TRAIN.storage == TRAIN_TP.storage == SCORE.storage
    assert TRAIN.storage.spec(axes) == P(None, "fsdp", "tensor")
    assert TRAIN.compute.spec(axes) == SCORE.compute.spec(axes) == P(None, None, None)
    assert TRAIN.compute.spec(("vocab", "embed")) == P("tensor", None)
    assert TRAIN_TP.compute.spec(axes) == GENERATE.storage.spec(axes) == GENERATE.compute.spec(axes)
    assert GENERATE.storage.spec(axes) == P(None, None, "tensor")
    assert [layout.tensor_parallel for layout in (TRAIN, TRAIN_TP, GENERATE, SCORE)] == [False, True, True, False]
    assert TRAIN.batch_spec() == SCORE.batch_spec() == P(("data", "fsdp", "tensor"))
    assert TRAIN_TP.batch_spec() == GENERATE.batch_spec() == P(("data", "fsdp"))


def test_dropped_axes_by_dimension():
    for storage, compute in [
        (P("fsdp", "tensor"), P("tensor", None)),  # moved to another dimension
        (P("fsdp"), P("tensor")),  # another axis
        (P(("tensor", "fsdp")), P("fsdp")),  # the major axis dropped, the minor one used
        (P(None), P("fsdp")),  # an axis more
    ]:
        with pytest.raises(ValueError, match="moves axes of storage spec .*: it may only drop them"):
            dropped_axes(storage, compute, 2)
    assert dropped_axes(P(("tensor", "fsdp"), "data"), P("tensor"), 3) == [("fsdp",), ("data",), ()]


def test_gather_has_the_dense_gradient_by_reduce_scatter():
    """Two weights, stored in slices along both dimensions, as in a TRAIN layer; rows over all devices."""
    mesh, draw = make_mesh(2, 2, 2), np.random.default_rng(0)
    x, up, down = (draw.normal(size=size).astype(np.float32) for size in ((16, 8), (8, 32), (32, 8)))
    weights = {"up": up / 3, "down": down / 6}
    axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    storage = {name: TRAIN.storage.spec(axes[name]) for name in weights}
    compute = {name: TRAIN.compute.spec(axes[name]) for name in weights}

    def dense(weights: dict[str, Any], x: Any) -> jax.Array:
        return jnp.tanh(x @ weights["up"]) @ weights["down"]

    @partial(jax.shard_map, mesh=mesh, in_specs=(storage, TRAIN.batch_spec()), out_specs=TRAIN.batch_spec())
    def sharded(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        varying = {name: lax.pcast(w, ("data",), to="varying") for name, w in weights.items()}
        return dense({name: gather(w, storage[name], compute[name]) for name, w in varying.items()}, x)

    def loss(apply, weights: dict[str, Any], x: Any) -> tuple[jax.Array, jax.Array]:
        out = apply(weights, x)
        return jnp.sum(out**2), out

    placed = {name: jax.device_put(w, NamedSharding(mesh, storage[name])) for name, w in weights.items()}
    rows = jax.device_put(x, NamedSharding(mesh, TRAIN.batch_spec()))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(partial(loss, sharded), has_aux=True)).lower(placed, rows).compile()
        gradient, out = compiled(placed, rows)
    expected_gradient, expected_out = jax.jit(jax.grad(partial(loss, dense), has_aux=True))(weights, x)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5)
    for name, expected in expected_gradient.items():
        assert gradient[name].sharding.is_equivalent_to(placed[name].sharding, 2)
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-5, atol=1e-5)

    kinds = collectives(compiled)
    assert kinds["reduce-scatter"] == kinds["all-gather"] == len(weights) * 2
    assert kinds.keys() <= {"reduce-scatter", "all-gather", "all-reduce"}
    # The replicas over `data` add up shards, never whole weights.
    reduced = [
        shape for line in str(compiled.as_text()).splitlines() if " all-reduce(" in line for shape in _shapes(line)
    ]
    assert reduced and all(np.prod(shape) <= weights["up"].size // 4 for shape in reduced)


def _shapes(instruction: str) -> list[tuple[int, ...]]:
    """The shapes of an HLO instruction's results."""
    results = instruction.split(" = ")[1].split(" all-reduce(")[0]
    return [tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"f32\[([\d,]+)\]", results)]


def test_gathered_slices_are_those_of_the_compute_spec():
    mesh = make_mesh(fsdp=4, tensor=2)
    weight = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for storage, compute in [
        (P("fsdp", "tensor"), P("fsdp", "tensor")),
        (P("fsdp", "tensor"), P(None, "tensor")),
        (P("fsdp", "tensor"), P()),
        (P(("tensor", "fsdp")), P("tensor")),
        (P(None, ("tensor", "fsdp")), P()),
    ]:
        local = partial(lambda storage, compute, x: gather(x, storage, compute)[None], storage, compute)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=storage, out_specs=P(("fsdp", "tensor")))
        out = jax.jit(mapped)(jax.device_put(weight, NamedSharding(mesh, storage)))
        slices = NamedSharding(mesh, compute).devices_indices_map(weight.shape)
        for device, part in zip(mesh.devices.flat, np.asarray(out), strict=True):
            np.testing.assert_array_equal(part, weight[slices[device]])
