"""`Model`: the architecture and the weights of one model. Functions copy weights to other layouts and meshes."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.meshes.layout import GENERATE, SCORE, TRAIN, Layout
from jrlhf.meshes.offload import offload, onload
from jrlhf.meshes.resharding import reshard
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.lora import LoRAConfig, lora_shardings
from jrlhf.models.options import ForwardOptions
from jrlhf.models.params import Params, cast_matrices, param_shardings
from jrlhf.models.weights import HeadKind
from jrlhf.run.fingerprints import fingerprint_of


@dataclass(frozen=True)
class Architecture:
    """The part of a model that its compiled functions depend on: numbers, no arrays.

    lora: the adapter that is trained on a frozen base; None: there is no adapter.
    shared: the weights are stored in GENERATE, where generation, scoring and an adapter's training all use the same
        buffers. Otherwise they are stored in TRAIN.
    pad_id: of a frozen reward model, as in `make_scores`.
    """

    config: ModelConfig
    lora: LoRAConfig | None = None
    shared: bool = False
    pad_id: int | None = None

    def layout(self, otherwise: Layout) -> Layout:
        """Returns the layout of a call's weights: GENERATE if all calls share the buffers, else `otherwise`."""
        return GENERATE if self.shared else otherwise


@dataclass(frozen=True)
class Compute:
    """Settings that all models of a run share: the options of their forward passes, and how calls use them."""

    options: ForwardOptions = ForwardOptions(dtype=jnp.dtype(jnp.float32))
    train_layout: Layout = TRAIN
    score_layout: Layout = SCORE
    score_parts: int = 1  # number of equal parts in which a device scores its rows, one after the other
    fused_loss: bool = True  # computes and differentiates the policy's loss one tile of tokens at a time
    score_tokens: int | None = None  # number of tokens that a device scores at a time; None: the whole batch

    @property
    def dtype(self) -> jnp.dtype:
        return self.options.dtype

    def forward(self, model: Architecture) -> ForwardOptions:
        """The options of the forward passes of a model."""
        return replace(self.options, lora=model.lora)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """The weights of a model, with the architecture that describes them.

    params: all weights, or those of an adapter.
    base: the weights under an adapter, which are never trained, donated or moved.
    """

    architecture: Architecture = field(metadata={"static": True})
    params: Params
    base: Params | None = None

    @property
    def config(self) -> ModelConfig:
        return self.architecture.config

    @property
    def frozen(self) -> tuple[Params, ...]:
        """The last arguments of a compiled function: the base, if there is one."""
        return () if self.base is None else (self.base,)

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the weights are stored."""
        return jax.tree.leaves(self.params)[0].sharding.mesh

    def holding(self, params: Params) -> "Model":
        """The same model with other weights of the same kind."""
        return replace(self, params=params)

    def offloaded(self) -> "Model":
        """Returns the same model with `params` moved to host memory. The arrays of this one are deleted."""
        return self.holding(offload(self.params))

    def onloaded(self) -> "Model":
        """Returns this model if its weights are on the devices, else one with a copy of them there."""
        return self.holding(onload(self.params))

    def fingerprint(self) -> str:
        """A digest of all weights, the base's included."""
        return fingerprint_of((self.params, *self.frozen))

    def is_stored_at(self, architecture: Architecture, mesh: Mesh) -> bool:
        """True if the weights are stored on `mesh` as functions of `architecture` take them."""
        return self.architecture.shared == architecture.shared and self.mesh == mesh


def generation_weights(model: Model, mesh: Mesh, compute: Compute, *, donate: bool = False) -> Params:
    """Returns the weights in the layout GENERATE. See `weights_at`."""
    return weights_at(model, replace(model.architecture, shared=True), mesh, compute, donate=donate)


def weights_at(
    model: Model, architecture: Architecture, mesh: Mesh, compute: Compute, *, donate: bool = False
) -> Params:
    """Returns the weights as functions of `architecture` on `mesh` take them: the model's own, or else a copy of them.

    architecture: the model's, or the same stored in GENERATE. donate: frees the model's own weights during the copy. A
    copy is cast to the compute dtype before it is sent, which halves the bytes.
    """
    if model.is_stored_at(architecture, mesh):
        return model.params
    shardings = _shardings(model, architecture, mesh)
    if architecture.shared:
        return reshard(model.params, shardings, dtype=None if architecture.lora else compute.dtype, donate=donate)
    if compute.dtype == jnp.float32:
        return reshard(model.params, shardings, donate=donate)
    # Layers are stacked here, so `reshard` would take their vectors for matrices and cast them, too.
    with jax.set_mesh(model.mesh):
        cast = _cast(model.params, compute.dtype)
    return reshard(cast, shardings, donate=True)


def relocate(model: Model, architecture: Architecture, mesh: Mesh, *, donate: bool) -> Model:
    """Moves a model's own weights, bit for bit, to where functions of `architecture` on `mesh` store them."""
    return Model(architecture, reshard(model.params, _shardings(model, architecture, mesh), donate=donate), model.base)


def _shardings(model: Model, architecture: Architecture, mesh: Mesh) -> Any:
    return _stored(model.config, architecture, mesh, "scalar" if "value_head" in model.params else "lm")


@lru_cache(maxsize=64)  # a run asks for the same ones in every iteration
def _stored(config: ModelConfig, architecture: Architecture, mesh: Mesh, head: HeadKind) -> Any:
    if architecture.lora is not None:
        return lora_shardings(config, mesh, architecture.lora, head)
    return param_shardings(config, mesh, GENERATE if architecture.shared else SCORE, head)


_cast = jax.jit(cast_matrices, static_argnames="dtype")
