"""The devices that a traced function computes on: their platform, and the mesh axes over which arrays vary."""

from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array


def target_platform() -> str:
    """The platform that the current trace is for, "cpu", "gpu" or "tpu": the context mesh's, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def varying(*arrays: Array) -> tuple[Array, ...]:
    """Casts all arrays, inside `shard_map`, to vary over every mesh axis that any of them varies over.

    An array that was the same on all devices of such an axis thereby gets its gradient summed over that axis.
    """
    union = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return tuple(vary(x, sorted(union)) for x in arrays)


def vary(x: Array, axes: str | Sequence[str] | None) -> Array:
    """Casts `x` to a type that varies over `axes`: it may differ between their devices.

    The transpose is a sum over those axes. An explicit cast at the place where a value fans out makes it one sum, where
    implicit casts at each use would sum each use's gradient on its own.
    """
    requested = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    own = jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in requested if axis not in own)
    return lax.pcast(x, missing, to="varying") if missing else x
