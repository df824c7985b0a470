"""The roles of an algorithm, typed: built once per run, and bound to a state for each iteration."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from jax.sharding import Mesh

from jrlhf.algorithms.dynamic_sampling import DynamicSampler
from jrlhf.config.schema import Config
from jrlhf.config.stages import OptimizerConfig, PPOStageConfig
from jrlhf.data.batches import Batch
from jrlhf.meshes import Graph
from jrlhf.models import SamplingConfig
from jrlhf.ppo import (
    DAPOConfig,
    MultiplierState,
    PolicyConfig,
    RunningMoments,
    SafeRLHFConfig,
    SFTBatch,
    TrainState,
)
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Reference
from jrlhf.roles.compiled import Compute
from jrlhf.roles.critic import CostCritic, Critic, FusedUpdate
from jrlhf.roles.experience import Constraint, ExperienceMaker
from jrlhf.roles.initial import adamw
from jrlhf.roles.model import Model
from jrlhf.roles.offloading import offloader_of
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock

Trained = TypeVar("Trained", Actor, Critic, CostCritic)

ROLES: dict[str, type] = {
    "actor": Actor,
    "critic": Critic,
    "cost_critic": CostCritic,
    "reference": Reference,
    "reward": Rewards,
    "cost": Rewards,
    "learner": FusedUpdate,
    "estimator": ExperienceMaker,
    "pool": DynamicSampler,
    "constraint": Constraint,
}


def known_facts(config: Config) -> dict[str, Any]:
    """What is known of the roles before a run, for `trace`."""
    algorithm = config.rl.algorithm
    facts: dict[str, Any] = {
        "actor.recomputes": algorithm.old_logprobs == "recompute",
        "reference.is_base_of": config.reference_is_base,
    }
    return facts if algorithm.needs_reference else facts | {"reference": None}


@dataclass(frozen=True)
class Roles:
    """The roles of a run. None: the algorithm has no such role."""

    actor: Actor
    reward: Rewards
    estimator: ExperienceMaker
    reference: Reference | None = None
    critic: Critic | None = None
    cost_critic: CostCritic | None = None
    cost: Rewards | None = None
    learner: FusedUpdate | None = None
    pool: DynamicSampler | None = None
    constraint: Constraint | None = None

    @property
    def trained(self) -> dict[str, Actor | Critic]:
        """The roles that are trained, by name."""
        critics = {"critic": self.critic, "cost_critic": self.cost_critic}
        return {"actor": self.actor} | {name: critic for name, critic in critics.items() if critic is not None}

    def bind(
        self,
        states: Mapping[str, TrainState],
        *,
        moments: RunningMoments,
        draws: int,
        multiplier: MultiplierState | None,
        texts: SFTBatch | None,
    ) -> "Roles":
        """The roles of one iteration, which starts from these states. texts: to be imitated in addition."""
        self.reward.start(moments)
        if self.cost is not None:
            self.cost.start(RunningMoments.create())  # costs are not normalised
        if self.pool is not None:
            self.pool.start(draws)
        critics = {name: role.bind(states[name]) for name, role in self.trained.items() if name != "actor"}
        roles = replace(self, actor=self.actor.bind(states["actor"], texts), **critics)
        if self.learner is not None:
            roles = replace(roles, learner=self.learner.bind(states))
        if self.constraint is not None:
            assert multiplier is not None
            roles = replace(roles, constraint=self.constraint.bind(multiplier))
        if (prefetch := self.actor.placement.prefetch) is not None:
            prefetch.bind(vars(roles))
        return roles

    def arguments(self, dataflow: Callable) -> dict[str, Any]:
        """The roles that are parameters of a dataflow."""
        roles = vars(self)
        return {name: roles[name] for name in inspect.signature(dataflow).parameters if name in roles}

    @property
    def states(self) -> dict[str, TrainState]:
        """The present states of the trained roles."""
        fused = {} if self.learner is None else self.learner.states
        return {name: fused[name] if name in fused else role.state for name, role in self.trained.items()}


@dataclass(frozen=True)
class RoleFactory:
    """Builds the roles of a run: each by a method of its own, from what it needs.

    algorithm: the algorithm's settings, with those that the program fills in. placement: of each role, by name.
    """

    config: Config
    algorithm: PolicyConfig
    compute: Compute
    sampling: SamplingConfig
    placement: Callable[[str], RolePlacement]
    clock: Clock

    def trained(
        self, kind: type[Trained], name: str, model: Model, optimizer: OptimizerConfig, **options: Any
    ) -> Trained:
        """A role that is trained, with the micro-batches of its update's placement."""
        algorithm: Any
        algorithm, placement = self.algorithm, self.placement(name)
        if algorithm.micro_batch_tokens is None:
            algorithm = replace(algorithm, micro_batches=placement["update"].parts)
        updates = self.config.rl.iterations * algorithm.epochs * algorithm.minibatches
        return kind(
            model,
            placement,
            self.compute,
            optimizer=adamw(optimizer, updates=updates),
            algorithm=algorithm,
            clock=self.clock,
            offloader=offloader_of(name, self.config.offloading, self.clock),
            **options,
        )

    def actor(self, model: Model) -> Actor:
        """The actor."""
        section = self.config.rl
        options = {"sampling": self.sampling, "samples": section.samples, "schedule": self.config.rollout}
        return self.trained(Actor, "actor", model, section.actor, **options)

    def critic(self, kind: type[Trained], name: str, model: Model | None) -> Trained | None:
        """The critic of the rewards or of the costs, if there is a model for it."""
        if model is None:
            return None
        assert isinstance(self.config.rl, PPOStageConfig)
        return self.trained(kind, name, model, self.config.rl.critic)

    def reference(self, model: Model | None) -> Reference | None:
        """The reference, if there is a model for it."""
        if model is None:
            return None
        return Reference(model, self.placement("reference"), self.compute, clock=self.clock, **self._responses)

    def learner(self, actor: Actor, critic: Critic | None) -> FusedUpdate:
        """The fused update of actor and critic."""
        placement = self.placement("learner")
        return FusedUpdate(actor, critic, placement, self.compute, algorithm=self.algorithm, **self._responses)

    @property
    def _responses(self) -> dict[str, Any]:
        return {"temperature": self.sampling.temperature, "responses": self.sampling.max_new_tokens}

    def roles(
        self,
        graph: Graph,
        models: Mapping[str, Model],
        rewards: Rewards,
        costs: Rewards | None,
        draw: Callable[[Mesh, int], Batch],
    ) -> Roles:
        """All roles of a graph. draw: (mesh, number of a batch) -> prompts."""
        algorithm, placement = self.algorithm, self.placement
        roles = Roles(
            actor=self.actor(models["actor"]),
            reward=rewards,
            estimator=ExperienceMaker(algorithm, self.clock, placement("estimator")),
            reference=self.reference(models.get("reference")),
            critic=self.critic(Critic, "critic", models.get("critic")),
            cost_critic=self.critic(CostCritic, "cost_critic", models.get("cost_critic")),
            cost=costs,
        )
        if "learner" in graph.roles:
            roles = replace(roles, learner=self.learner(roles.actor, roles.critic))
        if isinstance(algorithm, SafeRLHFConfig):
            roles = replace(roles, constraint=Constraint(algorithm, self.clock, placement("constraint")))
        if isinstance(algorithm, DAPOConfig):
            limits = {"samples": algorithm.samples, "max_rounds": algorithm.max_rounds}
            draw_batch = partial(draw, roles.actor.placement["generate"].mesh)
            roles = replace(roles, pool=DynamicSampler(draw_batch, placement("pool"), **limits, clock=self.clock))
        return roles
