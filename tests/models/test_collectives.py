"""What happens between devices, and what is summed there."""

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.meshes import make_mesh
from jrlhf.models.collectives import lookup, total

TIMES = 5000


def test_a_token_that_comes_often_has_its_whole_gradient_in_bfloat16():
    """Added up in bfloat16, ones would stay at 256."""
    mesh = make_mesh(1, 1, 2, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        table = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), jax.NamedSharding(mesh, jax.P("tensor")))
        tokens = jax.device_put(np.full((1, TIMES), 3, np.int32), jax.NamedSharding(mesh, jax.P()))
        embed = jax.shard_map(
            lambda table, tokens: total(lookup(table, tokens), "tensor"),
            mesh=mesh,
            in_specs=(jax.P("tensor"), jax.P()),
            out_specs=jax.P(),
        )
        gradient = jax.jit(jax.grad(lambda table: jnp.sum(embed(table, tokens).astype(jnp.float32))))(table)
    expected = np.zeros((8, 4), np.float32)
    expected[3] = TIMES
    np.testing.assert_allclose(np.asarray(gradient, np.float32), expected, rtol=2**-8)
