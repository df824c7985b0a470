"""`InitialModels`: makes the model of each role as the config names it: loaded, fresh, or made from another one."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.data.batches import key_for
from jrlhf.meshes.layout import GENERATE, TRAIN
from jrlhf.meshes.resharding import reshard
from jrlhf.meshes.transfers import to_host
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.init import init_sharded
from jrlhf.models.lora import LoRAConfig, init_lora, lora_shardings
from jrlhf.models.params import Params, param_shardings
from jrlhf.models.quantize import int8_error, to_int8
from jrlhf.roles.derived import copied, frozen_copy, scalar_model, stored
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.pretrained import actor_adapter, describe, fresh_model, load_weights, reward_adapter
from jrlhf.run.console import Console


@dataclass(frozen=True)
class InitialModels:
    """Makes the models of a run as its config names them, on its mesh."""

    config: Config
    mesh: Mesh
    compute: Compute
    console: Console

    def policy(self) -> Model:
        """The actor before any training: `model.path`, or fresh weights. With LoRA these are the base of an adapter."""
        config, adapted = self.config, self.config.lora is not None
        if config.model.path is None:
            size = fresh_model(config.model)
            model = Model(Architecture(size), init_sharded(size, key_for(config.seed, "init"), self.mesh))
            if adapted:
                shardings = param_shardings(size, self.mesh, GENERATE)
                model = model.holding(reshard(model.params, shardings, dtype=self.compute.dtype))
        else:
            layout, dtype = (GENERATE, self.compute.dtype) if adapted else (TRAIN, jnp.dtype(jnp.float32))
            model = self._load(config.model.path, "model.path", layout=layout, dtype=dtype)
        if not adapted:
            return model
        lora, adapter = self._adapter(model.config)
        return Model(Architecture(model.config, lora, shared=True), adapter, self._base(model.params))

    def reference(self, policy: Model) -> Model:
        """The reference of the KL penalty: `roles.reference`, or a copy of the present policy.

        It is the shared base itself where the policy is an adapter that changes nothing yet.
        """
        path, place = self.config.roles.reference, self.config.offloading.reference
        if path is not None:
            return stored(self._load(path, "roles.reference", dtype=self.compute.dtype), place)
        if self.config.reference_is_base:
            assert policy.base is not None
            return Model(Architecture(policy.config, shared=True), policy.base)
        is_adapter = policy.architecture.lora is not None
        params = copied(policy.params) if is_adapter else frozen_copy(policy.params, self.compute.dtype)
        return stored(policy.holding(params), place)

    def frozen(self, path: str, key: str) -> Model:
        """A frozen policy from its directory."""
        return stored(self._load(path, key, dtype=self.compute.dtype), self.config.offloading.reference)

    def critic(self, policy: Model, reward: Model | None) -> Model:
        """The critic: `roles.critic`, else the reward model that the run trained, else the policy with a new head."""
        config, path = self.config, self.config.roles.critic
        if path is None and config.lora is not None and not config.lora.critic:
            path = config.model.path
        if path is not None:
            return self._load(path, "roles.critic", head="scalar", dtype=jnp.dtype(jnp.float32))
        if reward is not None:
            return reward.holding(copied(reward.onloaded().params))
        return scalar_model(policy)

    def reward(self, path: str, key: str) -> Model:
        """A frozen reward model from its directory."""
        return stored(self._load(path, key, head="scalar", dtype=self.compute.dtype), self.config.offloading.reward)

    def reward_adapter(self, policy: Model, path: str, key: str) -> Model:
        """A frozen reward model that is an adapter and a head on the policy's base."""
        lora, adapter = reward_adapter(self.config, path, key, policy.config, self.mesh)
        pad_id, base = None, self.config.model.path
        # PEFT's head has no bias: an adapter with one was trained here, and is read at an answer's end.
        if base is not None and not to_host(adapter["value_head"]["bias"]):
            pad_id = describe(base, "model.path").score_pad_id
        model = Model(Architecture(policy.config, lora, shared=True, pad_id=pad_id), adapter, policy.base)
        return stored(model, self.config.offloading.reward)

    def _base(self, params: Params) -> Params:
        """The frozen base in the dtype of the config. Prints the errors of rounding to int8."""
        assert self.config.lora is not None
        if self.config.lora.base == "auto":
            return params
        first = {**params, "layers": params["layers"][:1]}
        errors = ", ".join(f"{name} {error:.2%}" for name, error in int8_error(first, to_int8(first)).items())
        self.console.line(f"int8 base, relative error of the first layer's matrices: {errors}")
        return to_int8(params, donate=True)

    def _adapter(self, model: ModelConfig) -> tuple[LoRAConfig, Params]:
        """The adapter that the config names, or a fresh one, which changes nothing yet."""
        assert self.config.lora is not None
        lora, adapter = actor_adapter(self.config.lora, model, self.mesh)
        if adapter is None:
            init = jax.jit(partial(init_lora, model, lora), out_shardings=lora_shardings(model, self.mesh, lora))
            adapter = init(key_for(self.config.seed, "lora"))
        return lora, adapter

    def _load(self, path: str, key: str, **options: Any) -> Model:
        with self.console.loading(path) as progress:
            config, params = load_weights(path, key, self.mesh, progress=progress, **options)
        pad_id = config.score_pad_id if config.head == "scalar" else None
        return Model(Architecture(config.model, pad_id=pad_id), params)
