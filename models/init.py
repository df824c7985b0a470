"""Initial weights of a model: drawn, or copied from another model's decoder."""

from dataclasses import replace
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from jrlhf.meshes.layout import TRAIN
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.params import Params, made_in_place, nested, param_shardings
from jrlhf.models.weights import HeadKind, WeightInfo, weights


def init_lm(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Returns the initial weights of a language model, float32.

    {embedding, positions if learned, layers (stacked along L), final_norm, unembedding if untied}
    """
    return _initial(config, "lm", key)


def init_scalar(config: ModelConfig, key: PRNGKeyArray, *, zero_head: bool = True) -> Params:
    """Returns the initial weights of a decoder with a scalar head, float32: `init_lm` without unembedding, and
    value_head = {kernel [D], bias []}.

    zero_head: every output starts at 0; otherwise the kernel is drawn with variance 1 / (D + 1).
    """
    return _initial(config, "scalar", key, zero_head=zero_head)


def _initial(config: ModelConfig, head: HeadKind, key: PRNGKeyArray, *, zero_head: bool = False) -> Params:
    """Draws each weight with its own key: number n of the stream of the model, or of the weight's layer."""
    numbers, layer_numbers = count(), count()
    layer_keys = None

    def fresh(weight: WeightInfo) -> Array:
        nonlocal layer_keys
        if weight.layered and layer_keys is None:  # all layers together use one number of the model's stream
            layer_keys = jax.random.split(jax.random.fold_in(key, next(numbers)), config.layers)
        if weight.init[0] == "constant":
            return jnp.full(weight.shape, weight.init[1], jnp.float32)
        if weight.path == ("value_head", "kernel") and zero_head:
            weight = replace(weight, init=("normal", 0.0))
        if layer_keys is None or not weight.layered:
            return draw(weight, jax.random.fold_in(key, next(numbers)))
        number = next(layer_numbers)
        return jax.vmap(lambda layer_key: draw(weight, jax.random.fold_in(layer_key, number)))(layer_keys)

    return nested((weight.path, fresh(weight)) for weight in weights(config, head))


def draw(weight: WeightInfo, key: PRNGKeyArray) -> Array:
    """Draws a normally distributed weight, for one layer if layers have it. Padding rows are zero and never get a
    gradient."""
    rows, *others = weight.layer_shape
    drawn = weight.init[1] * jax.random.normal(key, (rows - weight.padding, *others))
    return jnp.pad(drawn, ((0, weight.padding), *((0, 0) for _ in others))) if weight.padding else drawn


def scalar_from(params: Params, *, keep_head: bool = False) -> Params:
    """Returns a scalar model that starts from another model's decoder; all arrays are copies.

    The other is a language model (the reward model starts from the SFT actor) or a scalar model (the critic starts from
    the reward model).

    keep_head: copy the other's scalar head, too; otherwise the head is zero.

    Raises ValueError for a head that cannot be kept.
    """
    if keep_head and "value_head" not in params:
        raise ValueError("keep_head=True needs a model with a scalar head, but these are a language model's parameters")
    backbone = {name: params[name] for name in ("embedding", "positions", "layers", "final_norm") if name in params}
    if keep_head:
        head = params["value_head"]
    else:
        kernel = jnp.zeros_like(params["final_norm"]["scale"])  # has the kernel's shape and devices
        head = {"kernel": kernel, "bias": kernel.sum()}
    return jax.tree.map(jnp.copy, {**backbone, "value_head": head})


def init_sharded(
    config: ModelConfig, key: PRNGKeyArray, mesh: Mesh, head: HeadKind = "lm", *, zero_head: bool = True
) -> Params:
    """`init_lm` or `init_scalar` in the storage of TRAIN and SCORE. Each device computes only its shards.

    The numbers do not depend on the mesh.
    """
    shardings = param_shardings(config, mesh, TRAIN, head)
    init = partial(init_lm, config) if head == "lm" else partial(init_scalar, config, zero_head=zero_head)
    with jax.set_mesh(mesh):
        return made_in_place(init, shardings, mesh)(key)
