"""Critics, reward models that read tokens, Safe RLHF's constraint, and the fused update of actor and critic."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import jax
import optax
from jaxtyping import Array, Float

from jrlhf.meshes.graph import Kind
from jrlhf.ppo.config.algorithms import GRPOConfig, PPOConfig, SafeRLHFConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.critic import make_critic_step, make_on_policy_actor_step, make_on_policy_step
from jrlhf.ppo.experience import make_group_experience
from jrlhf.ppo.safe import MultiplierState, update_multiplier
from jrlhf.ppo.token_advantages import make_return_experience
from jrlhf.ppo.types import Experience, Rollout, TrainState
from jrlhf.roles.actor import Actor
from jrlhf.roles.compiled import CompiledModel, Function
from jrlhf.roles.experience import align_to_tokens, sum_rows
from jrlhf.roles.model import Model
from jrlhf.roles.placement import RolePlacement, call
from jrlhf.roles.role import Role, Site, TrainedRole
from jrlhf.run.clock import Clock, timed


def critic_step(model: CompiledModel, optimizer: optax.GradientTransformation, algorithm: PPOConfig) -> Function:
    """(state, experience) -> (state, metrics), jitted: all of the critic's updates on a batch."""
    return make_critic_step(model.train_all_values(), optimizer, algorithm, pipeline=model.runs)


class Critic(TrainedRole):
    """The value function of the reward. `CostCritic` is that of the cost."""

    timed_values = "values"

    def __init__(self, model: Model, site: Site, *, optimizer: optax.GradientTransformation, algorithm: PPOConfig):
        super().__init__(model, site, optimizer)
        self._values = self.compiled("values").score_values()
        self._update = critic_step(self.compiled("update"), optimizer, algorithm)

    @call("infer", "{role}_values", "{role}_after", rows="each")
    def values(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
        """V before every token, and V after each row's last token, for rows that the length limit cut off."""
        rows = rollout.tokens, rollout.lengths
        return self.clock.run(self.timed_values, self._infer, "values", self._values, *rows)

    @call("train", "{role}_metrics")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        return self._train("update_critic", self._update, experience)


class CostCritic(Critic):
    """The value function of the cost. Its times and metrics have other names than the critic's."""

    timed_values = "cost_values"

    @call("train", "{role}_metrics")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience of the cost."""
        metrics = self._train("update_cost_critic", self._update, experience)
        return {f"cost_{name}": value for name, value in metrics.items()}


class Reward(Role):
    """A frozen reward model that reads the actor's tokens."""

    @timed("reward")
    def score(self, rollout: Rollout, method: str = "score") -> Float[Array, "B"]:
        """The learned score of every row, read at its last token. method: the method of `Rewards` that calls this."""
        return self._infer(method, self.compiled(method).score_sequences(), rollout.tokens, rollout.lengths)


class Constraint:
    """The Lagrange multiplier that keeps the mean cost below its limit."""

    state: MultiplierState  # set by `bind`, replaced by `update`

    def __init__(self, algorithm: SafeRLHFConfig, clock: Clock, placement: RolePlacement):
        self.clock, self.placement = clock, placement
        self._update = jax.jit(partial(update_multiplier, config=algorithm))

    def bind(self, state: MultiplierState) -> Self:
        """Returns a copy of this constraint with the state of an iteration."""
        bound = copy.copy(self)
        bound.state = state
        return bound

    @call("compute", "multiplier")
    @timed("adv")
    def update(
        self, costs: Float[Array, "B"] | Float[Array, "B R"], rollout: Rollout | None = None
    ) -> Float[Array, ""]:
        """The multiplier after an iteration's costs. rollout: tells the rows that `truncation` leaves out."""
        self.state = self._update(self.state, sum_rows(costs), None if rollout is None else rollout.finished)
        return self.state.value

    def metrics(self) -> dict[str, Array]:
        """Returns the metric of the present state."""
        return {"safe/multiplier": self.state.value}


class FusedUpdate:
    """Trains the actor, and the critic if there is one, by one program, which also makes the experience.

    It is for algorithms that update once per batch. responses: maximum number of tokens of a response.
    """

    states: Mapping[str, TrainState]  # by role; set by `bind`, replaced by `update`

    def __init__(
        self,
        actor: Actor,
        critic: Critic | None,
        site: Site,
        *,
        algorithm: PolicyConfig,
        temperature: float,
        responses: int,
    ):
        self._trained: dict[str, Actor | Critic] = {"actor": actor}
        self.clock, self.placement = site.clock, site.placement
        update, compute = self.placement["update"], site.compute
        logprobs = update.compiled(actor.architecture, compute).train_logprobs(temperature=temperature, span=responses)
        self._update: Callable[..., Any]
        if critic is None:
            make = make_group_experience if isinstance(algorithm, GRPOConfig) else make_return_experience
            self._update = make_on_policy_actor_step(logprobs, actor.optimizer, algorithm, make)
        else:
            assert isinstance(algorithm, PPOConfig)
            self._trained["critic"] = critic
            values = update.compiled(critic.architecture, compute).train_all_values()
            self._update = make_on_policy_step(logprobs, values, actor.optimizer, critic.optimizer, algorithm)

    def bind(self, states: Mapping[str, TrainState]) -> Self:
        """Returns a copy of this update for one iteration. It donates these states and replaces its `.states`."""
        bound = copy.copy(self)
        bound.states = {name: states[name] for name in self._trained}
        return bound

    @call("train", "experience", "metrics")
    def update(
        self, rollout: Rollout, scores: Array, ref: Array | None, kl_coef: float | Array
    ) -> tuple[Experience, dict[str, Array]]:
        """The experience of a rollout, and the metrics of the models trained on it."""
        self.states = {name: role.offloader.consume(self.states[name]) for name, role in self._trained.items()}
        experience, metrics = self._train(rollout, scores, ref, kl_coef)
        self.states = {name: role.offloader.offload(self.states[name]) for name, role in self._trained.items()}
        return experience, metrics

    @timed("update")
    def _train(
        self, rollout: Rollout, scores: Array, ref: Array | None, kl_coef: float | Array
    ) -> tuple[Experience, dict[str, Array]]:
        scores = align_to_tokens(rollout, scores)
        *states, experience, metrics = self._update(*self.states.values(), rollout, scores, ref, kl_coef)
        self.states = dict(zip(self._trained, states, strict=True))
        return experience, metrics

    def prefetch(self, kind: Kind) -> None:
        """Starts bringing the offloaded states to the devices."""
        for name, role in self._trained.items():
            role.offloader.prefetch(self.states[name])
