"""What rollouts.jsonl tells of the rows of an asynchronous iteration: which weights drew them, and what counts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.off_policy import row_weights
from jrlhf.ppo.types import Experience


@partial(jax.jit, static_argnames="algorithm")
def weigh(experience: Experience, version: Array | int, *, algorithm: PolicyConfig) -> dict[str, Array]:
    """Returns the versions [B, T] of an experience that was drawn ahead, and the weights of its rows in the loss.

    version: number of updates before the one that learned from it.
    """
    assert experience.versions is not None
    return {"versions": experience.versions} | row_weights(experience, experience.ages(jnp.asarray(version)), algorithm)


def row_records(
    origins: Sequence[tuple[int, int]], fields: Mapping[str, Any], version: int
) -> list[dict[str, int | str | list[list[int]]]]:
    """Returns what rollouts.jsonl holds of an iteration's rows: see docs/asynchronous.md.

    fields: arrays on the host, those of READ and of `weigh`. version: as that of `weigh`.
    """
    records = []
    for row, (group, worker) in enumerate(origins):
        start, count = (int(fields[name][row]) for name in ("prompt_lengths", "response_lengths"))
        versions = np.unique(fields["versions"][row, start : start + count], return_counts=True)
        records.append(
            {"row": row, "group": group, "worker": worker, "version": version, "tokens": count}
            | {"end": "stop" if fields["finished"][row] else "length"}
            | {"versions": np.stack(versions, axis=1).tolist()}
            | {name: int(fields[name][row]) for name in ("counted", "masked", "truncated")}
        )
    return records
