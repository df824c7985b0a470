"""Gumbel noise, one key a row: the numbers of `jax.random.gumbel`, computed inside the fusion that uses them.

JAX's generator is an operation of its own, whose bits travel through memory, and on CPUs a loop besides; for a
vocabulary a row and step it is a third of what decoding a small model costs. Written out, XLA fuses it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def gumbel(keys: PRNGKeyArray, size: int) -> Float[Array, "B size"]:
    """Standard Gumbel numbers, float32: row b's are jax.random.gumbel(keys[b], (size,))."""
    data = jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys
    if data.shape[-1] != 2 or not jax.config.jax_threefry_partitionable:  # pyright: ignore  # another generator
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)
    count = jnp.arange(size, dtype=jnp.uint32)[None, :]
    first, second = threefry2x32((data[:, :1], data[:, 1:]), (jnp.zeros_like(count), count))
    # 23 bits as the mantissa of a number in [1, 2), less 1; never 0, whose logarithm is infinite.
    mantissa = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniform * (1 - tiny) + tiny)))


def threefry2x32(
    key: tuple[UInt32[Array, "#*S"], UInt32[Array, "#*S"]], count: tuple[UInt32[Array, "#*S"], UInt32[Array, "#*S"]]
) -> tuple[UInt32[Array, "*S"], UInt32[Array, "*S"]]:
    """The Threefry-2x32 block cipher of 20 rounds (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3)."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = count[0] + keys[0], count[1] + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
