"""PPO's four roles, small, with their states: on one mesh or as a plan places them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jrlhf.algorithms.factory import offloader_of
from jrlhf.algorithms.ppo import ppo as run_ppo
from jrlhf.config.schema import SleepConfig
from jrlhf.data.batches import Batch, key_for, put_rows, row_keys
from jrlhf.models import ModelConfig, SamplingConfig, init_sharded
from jrlhf.ppo import PPOConfig
from jrlhf.roles.actor import Actor
from jrlhf.roles.critic import Critic, Reward
from jrlhf.roles.derived import stored
from jrlhf.roles.experience import ExperienceMaker
from jrlhf.roles.frozen import Reference
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import CallPlacement, Pending, RolePlacement, call
from jrlhf.roles.planned_placement import Prefetch
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock

MODEL = ModelConfig(
    vocab_size=100, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32, max_positions=16, initializer_range=0.3
)
ROWS, PROMPT, RESPONSE = 16, 6, 8
PPO = PPOConfig(epochs=2, minibatches=2, truncation="bootstrap")
OPTIMIZER = optax.adamw(1e-2)


class Scored:
    """Rewards that are one reward model, as it is."""

    def __init__(self, reward: Reward):
        self.reward, self.clock, self.placement = reward, reward.clock, reward.placement

    @call("infer", "scores")
    def score(self, rollout, prompts):
        def scores():
            with jax.set_mesh(self.placement["score"].mesh):
                return self.reward.score(rollout)

        return Pending(scores)


class Setup:
    """Four roles and their states. Actor and reference, critic and reward model begin equal.

    placement: one mesh for all calls, or the roles' placements by name.
    """

    def __init__(
        self,
        placement: Mesh | Mapping[str, RolePlacement],
        clock: Clock | None = None,
        ppo: PPOConfig = PPO,
        *,
        temperature: float = 0.5,
        model: ModelConfig = MODEL,
        optimizer: optax.GradientTransformation = OPTIMIZER,
        sleep: SleepConfig | None = None,
        prefetch: Prefetch | None = None,
    ):
        self.clock, self._model, self._prefetch = clock or Clock(), model, prefetch
        compute, sleep = Compute(), sleep or SleepConfig()

        def at(role: str) -> RolePlacement:
            if isinstance(placement, Mesh):
                return RolePlacement(CallPlacement(placement), role=role, prefetch=prefetch)
            return placement[role]

        def initial(role: str, head: Any, seed: int) -> Model:
            mesh = at("actor").home.mesh
            with jax.set_mesh(mesh):
                params = init_sharded(model, jax.random.key(seed), mesh, head, zero_head=False)
            return at(role).store(Model(Architecture(model), params))

        def site(role: str) -> Site:
            offloader = offloader_of(role, sleep, self.clock) if role in ("actor", "critic") else None
            return Site(at(role), compute, self.clock, offloader)

        policy, value = initial("actor", "lm", 0), initial("critic", "scalar", 1)
        sampling = SamplingConfig(max_new_tokens=RESPONSE, temperature=temperature, stop_ids=(1,))
        trained: Any = {"optimizer": optimizer, "algorithm": ppo}
        self.actor = Actor(policy, site("actor"), sampling=sampling, **trained)
        self.critic = Critic(value, site("critic"), **trained)
        reference = stored(initial("reference", "lm", 0), sleep.reference)
        self.reference = Reference(reference, site("reference"), sampling=sampling)
        reward = stored(initial("reward", "scalar", 1), sleep.reward)
        self.reward = Reward(reward, site("reward"))
        self.states = {"actor": self.actor.create(policy.params), "critic": self.critic.create(value.params)}
        self._apart = not isinstance(placement, Mesh)
        arithmetic = RolePlacement.of(placement) if isinstance(placement, Mesh) else at("arithmetic")
        self.estimator = ExperienceMaker(ppo, self.clock if self._apart else Clock(), arithmetic)

    @property
    def policy(self) -> Model:
        """The actor's model with its present weights."""
        return self.actor.bind(self.states["actor"]).model

    def iterate(self, step: int) -> Any:
        """One iteration of PPO: the experience and the metrics."""
        rng = np.random.default_rng(step)
        tokens = rng.integers(2, self._model.vocab_size, (ROWS, PROMPT)).astype(np.int32)
        lengths = rng.integers(1, PROMPT + 1, ROWS).astype(np.int32)
        tokens[np.arange(PROMPT)[None, :] >= lengths[:, None]] = 0
        roles: dict[str, Any] = {"actor": self.actor.bind(self.states["actor"])}
        roles |= {"critic": self.critic.bind(self.states["critic"]), "reference": self.reference}
        if self._prefetch is not None:
            self._prefetch.bind(roles | {"reward": self.reward})
        mesh, rewards = self.actor.placement["generate"].mesh, cast(Any, Scored(self.reward))
        if not self._apart:  # on one mesh the scores are made at once
            rewards = cast(Any, SimpleNamespace(score=lambda rollout, _: self.reward.score(rollout)))
        with jax.set_mesh(mesh):
            prompts = (*put_rows((tokens, lengths), mesh), row_keys(key_for(0, "test", step), ROWS, mesh))
            batch = Batch(prompts, (), (), step)
            result = run_ppo(**roles, reward=rewards, estimator=self.estimator, prompts=batch, kl_coef=0.1)
            self.states = {name: roles[name].state for name in ("actor", "critic")}
        return result
