"""What each role starts from: a model directory, fresh weights, or another role's weights."""

from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jrlhf.data.batches import key_for
from jrlhf.errors import UserError
from jrlhf.meshes import GENERATE, TRAIN
from jrlhf.models import (
    LoRAConfig,
    ModelConfig,
    init_lora,
    init_sharded,
    int8_error,
    lora_shardings,
    scalar_from,
    to_int8,
)
from jrlhf.models.hf import load_adapter
from jrlhf.models.params import HeadKind, Params
from jrlhf.roles.model import Architecture, Model
from jrlhf.roles.pretrained import check_reward_adapter, copied, fresh_model, frozen_copy, load_weights, share
from jrlhf.stages.context import Context


def start_policy(context: Context) -> Model:
    """The actor before any training: `model.path`, or fresh weights. With LoRA: an adapter on them as a frozen base."""
    config, mesh = context.config, context.mesh
    adapted = config.lora.on
    if config.model.path is None:
        model = fresh_model(config.model)
        params = init_sharded(model, key_for(config.seed, "init"), mesh)
        params = share(params, model, mesh, context.compute.dtype) if adapted else params
    else:
        layout, dtype = (GENERATE, context.compute.dtype) if adapted else (TRAIN, jnp.dtype(jnp.float32))
        model, params = _load(context, config.model.path, "model.path", layout=layout, dtype=dtype)
    if not adapted:
        return Model(Architecture(model), params)
    lora, adapter = _adapter(context, model)
    return Model(Architecture(model, lora, shared=True), adapter, _base(context, params))


def _base(context: Context, params: Params) -> Params:
    """The frozen base as the config stores it; says what rounding to int8 costs."""
    if context.config.lora.base == "auto":
        return params
    first = {**params, "layers": params["layers"][:1]}
    errors = ", ".join(f"{name} {error:.2%}" for name, error in int8_error(first, to_int8(first)).items())
    context.console.line(f"int8 base, relative error of the first layer's matrices: {errors}")
    return to_int8(params, donate=True)


def _adapter(context: Context, model: ModelConfig) -> tuple[LoRAConfig, Params]:
    """The adapter that the config names, or a fresh one, which changes nothing yet."""
    section, mesh = context.config.lora, context.mesh
    try:
        if section.path is not None:
            lora, adapter = load_adapter(Path(section.path), model, mesh)
            if "value_head" in adapter:
                raise ValueError(f"path={section.path} is a reward model's adapter: name one of a language model")
            return lora, adapter
        assert section.rank is not None
        lora = LoRAConfig(rank=section.rank, alpha=section.alpha, targets=section.targets, rslora=section.rslora)
        placed = jax.jit(partial(init_lora, model, lora), out_shardings=lora_shardings(model, mesh, lora))
        return lora, placed(key_for(context.config.seed, "lora"))
    except (ValueError, OSError) as error:
        raise UserError(f"lora: {error}") from error


def start_reward(policy: Model) -> Model:
    """The reward model before it learns: the policy's decoder with a head that says 0."""
    return policy.holding(_with_head(policy))


def _with_head(policy: Model) -> Params:
    """The policy's weights, or its adapter's, with a scalar head that is zero. All arrays are copies."""
    if policy.base is None:
        return scalar_from(policy.params)
    kernel = jnp.zeros_like(policy.base["final_norm"]["scale"])
    return {**copied(policy.params), "value_head": {"kernel": kernel, "bias": kernel.sum()}}


def _frozen(context: Context, policy: Model) -> Model:
    """The policy as it is now, in arrays that nobody trains.

    Where the policy is an adapter that nothing has trained yet, it is the base itself.
    """
    where = context.config.sleep.reference
    if policy.architecture.lora is None:
        return at_rest(policy.holding(frozen_copy(policy.params, context.compute.dtype)), where)
    if {"sft", "dpo"} & set(context.config.stages) or context.config.lora.path is not None:
        return at_rest(policy.holding(copied(policy.params)), where)
    assert policy.base is not None
    return Model(Architecture(policy.config, shared=True), policy.base)


def start_reference(context: Context, policy: Model) -> Model:
    """What the actor is tied to: `roles.reference`, or the policy as it is now. The policy stays as it is."""
    path, where = context.config.roles.reference, context.config.sleep.reference
    if path is None:
        return _frozen(context, policy)
    return at_rest(_load_frozen(context, path, "roles.reference"), where)


def start_critic(context: Context, policy: Model, reward: Model | None) -> Model:
    """The critic: `roles.critic`, else the reward model that the run learnt, else the policy with a new head."""
    config = context.config
    path = config.roles.critic
    if path is None and config.lora.on and not config.lora.critic:
        path = config.model.path
    if path is not None:
        model, params = _load(context, path, "roles.critic", head="scalar", dtype=jnp.dtype(jnp.float32))
        return Model(Architecture(model), params)
    if reward is not None:
        return reward.holding(copied(reward.awake().params))
    return policy.holding(_with_head(policy))


def start_cost_critic(policy: Model) -> Model:
    """The critic of the costs: the policy with a new head, which says 0."""
    return policy.holding(_with_head(policy))


def load_reward(context: Context, path: str, key: str) -> Model:
    """A frozen reward model from its directory."""
    return at_rest(_load_frozen(context, path, key, head="scalar"), context.config.sleep.reward)


def load_reward_adapter(context: Context, policy: Model, path: str, key: str) -> Model:
    """A frozen reward model that is an adapter and a head on the policy's base."""
    lora, adapter = check_reward_adapter(context.config, path, key, policy.config, context.mesh)
    model = Model(Architecture(policy.config, lora, shared=True), adapter, policy.base)
    return at_rest(model, context.config.sleep.reward)


def at_rest(model: Model, where: Literal["device", "host"]) -> Model:
    """A frozen model where it is between its calls. The given one is used up if that is the host."""
    return model.asleep() if where == "host" else model


def _load_frozen(context: Context, path: str, key: str, head: HeadKind = "lm") -> Model:
    model, params = _load(context, path, key, head=head, dtype=context.compute.dtype)
    return Model(Architecture(model), params)


def _load(context: Context, path: str, key: str, **how) -> tuple[ModelConfig, Params]:
    with context.console.loading(path) as progress:
        found, params = load_weights(path, key, context.mesh, progress=progress, **how)
    return found.model, params
