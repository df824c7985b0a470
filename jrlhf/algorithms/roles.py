"""`Roles`: a typed record of an algorithm's roles, which are built once per run and bound to a state per iteration."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from jrlhf.algorithms.dynamic_sampling import DynamicSampler
from jrlhf.config.schema import Config
from jrlhf.data.batches import Batch
from jrlhf.ppo.safe import MultiplierState
from jrlhf.ppo.shaping import RunningMoments
from jrlhf.ppo.types import SFTBatch, TrainState
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor, Draw
from jrlhf.roles.critic import Constraint, CostCritic, Critic, FusedUpdate
from jrlhf.roles.experience import ExperienceMaker
from jrlhf.roles.frozen import FrozenPolicy, Reference


def known_facts(config: Config) -> dict[str, Any]:
    """The facts about roles that are known before a run, for `trace`."""
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
    frozen: Mapping[str, FrozenPolicy] = field(default_factory=dict)  # those that the config names

    @property
    def by_name(self) -> dict[str, Any]:
        """All roles, by the name of a dataflow's parameter."""
        own = dict(vars(self))
        return own.pop("frozen") | own

    @property
    def trained(self) -> dict[str, Actor | Critic]:
        critics = {"critic": self.critic, "cost_critic": self.cost_critic}
        return {"actor": self.actor} | {name: critic for name, critic in critics.items() if critic is not None}

    def bind(
        self,
        states: Mapping[str, TrainState],
        draws: int,
        take: Callable[[int], Batch],
        draw: Draw,
        *,
        moments: RunningMoments,
        multiplier: MultiplierState | None,
        texts: SFTBatch | None,
    ) -> "Roles":
        """Returns the roles of one iteration, which starts from these states.

        draws: number of batches drawn before it. take: number of a batch -> its prompts. draw: where the actor's
            rollouts come from. texts: imitated in addition (ptx).
        """
        for role in self.by_name.values():
            if role is not None:
                role.placement.begun.clear()
        self.reward.start(moments)
        if self.cost is not None:
            self.cost.start(RunningMoments.create())  # costs are not normalised
        if self.pool is not None:
            self.pool.start(draws, take)
        bound: dict[str, Any] = {name: role.bind(states[name]) for name, role in self.trained.items()}
        bound["actor"] = self.actor.bind(states["actor"], texts, draw)
        if self.learner is not None:
            bound["learner"] = self.learner.bind(states)
        if self.constraint is not None:
            assert multiplier is not None
            bound["constraint"] = self.constraint.bind(multiplier)
        roles = replace(self, **bound)
        if (prefetch := self.actor.placement.prefetch) is not None:
            prefetch.bind(roles.by_name)
        return roles

    def arguments(self, dataflow: Callable, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the roles and of these values that are parameters of a dataflow."""
        given = {**self.by_name, **values}
        return {name: given[name] for name in inspect.signature(dataflow).parameters}

    @property
    def states(self) -> dict[str, TrainState]:
        """The present states of the trained roles."""
        fused = {} if self.learner is None else self.learner.states
        return {name: fused[name] if name in fused else role.state for name, role in self.trained.items()}


# Name of a role -> its class. An optional role's field has the type `X | None`, whose first argument is X.
ROLES: dict[str, type] = {
    name: (*get_args(kind), kind)[0] for name, kind in get_type_hints(Roles).items() if name != "frozen"
}


def roles_of(config: Config) -> dict[str, type]:
    """Returns the class of each role that a dataflow of the config may call, by the name of its parameter."""
    return ROLES | dict.fromkeys(config.roles.frozen, FrozenPolicy)
