"""Models that are made from other models: copies, critics and reward models with a new head."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jrlhf.models.init import scalar_from
from jrlhf.models.params import Params, cast_matrices
from jrlhf.roles.model import Model


def frozen_copy(params: Params, dtype: jnp.dtype) -> Params:
    """Returns a copy that is never trained, on the same devices, with its matrices in the compute dtype.

    Results stay the same, because float32 matrices are cast to that dtype wherever they are used.
    """
    shardings = jax.tree.map(lambda x: x.sharding, params)
    return jax.jit(partial(cast_matrices, dtype=dtype), out_shardings=shardings)(params)


def copied(params: Params) -> Params:
    """Copies of all arrays, for a state that a training step will donate."""
    return jax.tree.map(jnp.copy, params)


def scalar_model(policy: Model) -> Model:
    """An untrained critic or reward model: the policy's decoder, with a head that outputs 0. All arrays are copies."""
    if policy.base is None:
        return policy.holding(scalar_from(policy.params))
    kernel = jnp.zeros_like(policy.base["final_norm"]["scale"])
    return policy.holding({**copied(policy.params), "value_head": {"kernel": kernel, "bias": kernel.sum()}})


def stored(model: Model, device: Literal["device", "host"]) -> Model:
    """Moves a frozen model to where it is stored between its calls. With "host" the arrays of `model` are deleted."""
    return model.offloaded() if device == "host" else model
