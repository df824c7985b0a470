"""A model's weights as plain nested dicts: how they begin, their logical axes, and where a mesh keeps them."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import PRNGKeyArray

from jrlhf.meshes import GENERATE, TRAIN, Layout
from jrlhf.models.config import ModelConfig
from jrlhf.models.modules import LanguageModel, ScalarModel, pure

Params = dict[str, Any]
Axes = tuple[str | None, ...]
HeadKind = Literal["lm", "scalar"]


def init_lm(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """A language model's weights, float32.

    {embedding, positions if learned, layers (stacked along L), final_norm, unembedding if untied}
    """
    return pure(LanguageModel(config, rngs=nnx.Rngs(key)))


def init_scalar(config: ModelConfig, key: PRNGKeyArray, *, zero_head: bool = True) -> Params:
    """A decoder with a scalar head, float32: as `init_lm` without unembedding, with value_head = {kernel [D], bias []}.

    zero_head: every output begins at 0; otherwise the kernel is drawn with variance 1 / (D + 1).
    """
    return pure(ScalarModel(config, rngs=nnx.Rngs(key), zero_head=zero_head))


def scalar_from(params: Params, *, keep_head: bool = False) -> Params:
    """A scalar model that starts from another model's decoder; all arrays are copies.

    From a language model (the reward model from the SFT actor) or a scalar one (the critic from the reward model).

    keep_head: take over the other's scalar head; otherwise the head is zero.

    Raises:
        ValueError: `keep_head`, and there is no scalar head.
    """
    if keep_head and "value_head" not in params:
        raise ValueError("keep_head=True needs a model with a scalar head, but these are a language model's parameters")
    backbone = {name: params[name] for name in ("embedding", "positions", "layers", "final_norm") if name in params}
    if keep_head:
        head = params["value_head"]
    else:
        kernel = jnp.zeros_like(params["final_norm"]["scale"])  # has the kernel's shape, and lives where it does
        head = {"kernel": kernel, "bias": kernel.sum()}
    return jax.tree.map(jnp.copy, {**backbone, "value_head": head})


def decoder_axes(config: ModelConfig, tensor: int) -> Params:
    """The logical axes that both kinds of model share."""
    kv_heads = "kv_heads" if config.kv_heads >= tensor else None
    head_norm = {"scale": ("layers", "norm")}
    norm = head_norm | ({"bias": ("layers", "norm")} if config.norm == "layer" else {})
    attention: dict[str, Any] = {
        "wq": ("layers", "embed", "heads", "head_dim"),
        "wk": ("layers", "embed", kv_heads, "head_dim"),
        "wv": ("layers", "embed", kv_heads, "head_dim"),
        "wo": ("layers", "heads", "head_dim", "embed"),
    }
    if config.qkv_bias:
        attention["bq"] = ("layers", "heads", "head_dim")
        attention["bk"] = attention["bv"] = ("layers", kv_heads, "head_dim")
    if config.output_bias:
        attention["bo"] = ("layers", "norm")
    if config.qk_norm:
        attention["query_norm"] = attention["key_norm"] = head_norm
    entrances = ("gate", "up") if config.gated_mlp else ("up",)
    mlp: dict[str, Any] = {name: ("layers", "embed", "mlp") for name in entrances}
    mlp["down"] = ("layers", "mlp", "embed")
    if config.mlp_bias:
        mlp |= {f"{name}_bias": ("layers", "mlp") for name in entrances}
        mlp["down_bias"] = ("layers", "norm")
    layers = {"attention_norm": norm, "attention": attention, "mlp_norm": norm, "mlp": mlp}
    if config.post_norms:
        layers |= {"post_attention_norm": norm, "post_mlp_norm": norm}
    axes = {
        "embedding": ("vocab", "embed"),
        "layers": layers,
        "final_norm": {name: leaf[1:] for name, leaf in norm.items()},
    }
    return axes if config.positions == "rotary" else axes | {"positions": (None, "embed")}


def lm_axes(config: ModelConfig, tensor: int) -> Params:
    """The tree of `init_lm` with each weight's logical axes, for a mesh whose `tensor` axis has this size.

    Key-value heads fewer than `tensor` are not sharded over it: every device keeps all and uses the one that it needs.

    Raises:
        ValueError: heads, key-value heads, mlp or vocabulary do not fit on `tensor`.
    """
    check_tensor(config, tensor)
    axes = decoder_axes(config, tensor)
    return axes if config.tie_embeddings else axes | {"unembedding": ("vocab", "embed")}


def scalar_axes(config: ModelConfig, tensor: int) -> Params:
    """The tree of `init_scalar` with each weight's logical axes; otherwise as `lm_axes`."""
    check_tensor(config, tensor)
    return decoder_axes(config, tensor) | {"value_head": {"kernel": ("norm",), "bias": ()}}


def model_axes(config: ModelConfig, mesh: Mesh | AbstractMesh, head: HeadKind) -> Params:
    """`lm_axes` or `scalar_axes` for this mesh.

    Raises:
        ValueError: the model does not fit on the mesh.
    """
    if config.embed % mesh.shape["fsdp"]:
        raise ValueError(f"model embed={config.embed} cannot be divided over fsdp={mesh.shape['fsdp']}")
    return (lm_axes if head == "lm" else scalar_axes)(config, mesh.shape["tensor"])


def check_tensor(config: ModelConfig, tensor: int) -> None:
    """Raises a ValueError where the model cannot be divided over a `tensor` axis of this size."""
    for name in ("heads", "mlp", "padded_vocab"):
        if getattr(config, name) % tensor:
            raise ValueError(f"model {name}={getattr(config, name)} cannot be divided over tensor={tensor}")
    if config.kv_heads % tensor and tensor % config.kv_heads:
        raise ValueError(
            f"model kv_heads={config.kv_heads} cannot be divided over tensor={tensor}, nor shared evenly by its devices"
        )


def is_axes(x: Any) -> bool:
    """Whether `x` is one weight's logical axes, a leaf of an axes tree."""
    return isinstance(x, tuple)


def layer_axes(axes: Params) -> Params:
    """One layer's axes, from those of the stack."""
    return jax.tree.map(lambda stacked: stacked[1:], axes["layers"], is_leaf=is_axes)


def param_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, layout: Layout, head: HeadKind = "lm"
) -> dict[str, Any]:
    """Where each weight is stored, in the tree of `init_lm` or `init_scalar`.

    In GENERATE "layers" is a list with one dict a layer: slicing stacked weights inside a decode loop copies every
    weight at every step.

    Raises:
        ValueError: the model does not fit on the mesh.
    """
    axes = model_axes(config, mesh, head)

    def stored(tree: Params) -> Params:
        return jax.tree.map(lambda leaf: NamedSharding(mesh, layout.storage.spec(leaf)), tree, is_leaf=is_axes)

    if layout == GENERATE:
        return stored({**axes, "layers": [layer_axes(axes)] * config.layers})
    return stored(axes)


def spec_tree(shardings: Params) -> Params:
    """The PartitionSpecs of a tree of NamedShardings."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def init_sharded(
    config: ModelConfig, key: PRNGKeyArray, mesh: Mesh, head: HeadKind = "lm", *, zero_head: bool = True
) -> Params:
    """`init_lm` or `init_scalar` stored as TRAIN and SCORE store it; no device makes whole weights.

    The numbers do not depend on the mesh.

    Raises:
        ValueError: the model does not fit on the mesh.
    """
    shardings = param_shardings(config, mesh, TRAIN, head)
    init = partial(init_lm, config) if head == "lm" else partial(init_scalar, config, zero_head=zero_head)
    with jax.set_mesh(mesh):
        if AxisType.Explicit in mesh.axis_types:
            # Under Explicit axes fresh random numbers are replicated: each device would make whole weights.
            specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
            init = jax.sharding.auto_axes(init, axes=mesh.axis_names, out_sharding=specs)
        return jax.jit(init, out_shardings=shardings)(key)
