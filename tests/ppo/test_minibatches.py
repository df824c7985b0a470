import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo.parts import check_divisible, draw_minibatch, split_rows

ROWS, PARTS = 32, 4


def draw_all(rows, key):
    return jnp.stack([draw_minibatch(rows, key, index, PARTS) for index in range(PARTS)])


def test_every_row_once_and_one_of_every_group_in_each_minibatch():
    drawn = np.asarray(jax.jit(draw_all)(jnp.arange(ROWS), jax.random.key(0)))
    assert drawn.shape == (PARTS, ROWS // PARTS)
    np.testing.assert_array_equal(np.sort(drawn.ravel()), np.arange(ROWS))
    np.testing.assert_array_equal(drawn // PARTS, np.tile(np.arange(ROWS // PARTS), (PARTS, 1)))


def test_rows_of_a_tree_stay_together_and_keys_differ():
    rows = {"id": jnp.arange(ROWS), "wide": jnp.arange(ROWS)[:, None, None] * jnp.ones((1, 3, 2), jnp.int32)}
    draw = jax.jit(lambda key: draw_minibatch(rows, key, 1, PARTS))
    drawn, other = draw(jax.random.key(0)), draw(jax.random.key(1))
    assert drawn["wide"].shape == (ROWS // PARTS, 3, 2)
    np.testing.assert_array_equal(drawn["wide"][:, 2, 1], drawn["id"])
    assert np.any(drawn["id"] != other["id"])


def test_the_shuffle_is_uniform():
    groups = 4000
    drawn = draw_minibatch(jnp.arange(groups * PARTS), jax.random.key(2), 0, PARTS)
    counts = np.bincount(np.asarray(drawn) % PARTS, minlength=PARTS)
    sigma = np.sqrt(groups / PARTS * (1 - 1 / PARTS))
    assert np.all(np.abs(counts - groups / PARTS) < 5 * sigma)


def test_micro_batches_are_strided():
    parts = split_rows(jnp.arange(12), 3)
    np.testing.assert_array_equal(parts, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_micro_batches_of_one_row(axis_type):
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1], axis_type=axis_type)
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.arange(8), NamedSharding(mesh, P(("data", "fsdp", "tensor"))))
        scanned = jax.jit(lambda rows: jax.lax.scan(lambda sum, row: (sum + row.sum(), row), 0, split_rows(rows, 8)))
        total, parts = scanned(rows)
    assert total == 28
    np.testing.assert_array_equal(parts, np.arange(8)[:, None])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_nothing_is_communicated_and_the_mesh_does_not_matter(axis_type):
    def split(rows, key, index):
        return split_rows(draw_minibatch(rows, key, index, PARTS), 2)

    host = np.arange(64 * 3).reshape(64, 3)
    expected = jax.jit(split)(host, jax.random.key(5), 3)
    mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=axis_type)
    with jax.set_mesh(mesh):
        rows = jax.device_put(host, NamedSharding(mesh, P(("data", "fsdp", "tensor"), None)))
        compiled = jax.jit(split).lower(rows, jax.random.key(5), 3).compile()
        text = compiled.as_text()
        assert text is not None
        for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter"):
            assert collective not in text
        parts = jax.jit(split)(rows, jax.random.key(5), 3)
        assert not parts.is_fully_replicated
        np.testing.assert_array_equal(parts, expected)


def test_rows_that_do_not_divide_are_one_clear_error():
    with pytest.raises(ValueError, match=r"^30 rows do not divide into minibatches=4 x micro_batches=2: .* of 8 rows$"):
        check_divisible(jnp.zeros(30), 4, 2)
    check_divisible(jnp.zeros(32), 4, 2)
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.zeros(32), NamedSharding(mesh, P(("data", "fsdp"))))
        check_divisible(rows, 2, 2)
        with pytest.raises(ValueError, match=r"make 4 a micro-batch, .* over 8 devices: .* a multiple of 64 rows$"):
            check_divisible(rows, 4, 2)
