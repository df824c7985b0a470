"""The compiled programs of `jrlhf.meshes.resharding`, to read their collectives and memory."""

from typing import Any

import jax
from jax.typing import DTypeLike

from jrlhf.meshes.resharding import GROUP_BYTES, _groups, _mesh, _one_device_set, _program_of, _staged, pair


def lower_reshard(
    tree: Any, shardings: Any, *, dtype: DTypeLike | None = None, donate: bool = False, group_bytes: int = GROUP_BYTES
) -> list[jax.stages.Lowered]:
    """Lowers the programs that `reshard` runs on the source's devices, one for each group of arrays.

    Arguments as those of `reshard`; `tree` may hold `jax.ShapeDtypeStruct`s with shardings.
    """
    lowered = []
    for group in _groups(pair(tree, shardings)[0], dtype, group_bytes):
        staged = group if _one_device_set(group) else _staged(group)
        with jax.set_mesh(_mesh(group[0])):
            lowered.append(_program_of(staged, dtype, donate).lower(*(move.source for move in group)))
    return lowered
