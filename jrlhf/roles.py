"""The four roles of RLHF: parameters, where they live, and the compiled functions that use them.

A role is the only stateful object of the program. Its methods take and return arrays whose rows lie over all devices;
in which layout a call sees the model is decided in `programs.py` and nowhere else.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jrlhf import programs
from jrlhf.clock import Clock, timed
from jrlhf.model import Model
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.ppo import Experience, PPOConfig, Rollout, TrainState
from jrlhf.programs import Compute


class Actor:
    """The policy: trained in FSDP layout, generating in TP layout. The generation copy lives as long as a rollout.

    Where it is an adapter, training and generation use the same base, and there is no copy.
    """

    state: TrainState  # assigned by whoever runs the iterations; `update` replaces it

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        compute: Compute,
        *,
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
        optimizer: optax.GradientTransformation,
        ppo: PPOConfig,
        clock: Clock,
    ):
        self.architecture = model.architecture
        self._model = model.holding({})  # the weights are the state's: these would be kept for nothing
        self._mesh, self._compute = mesh, compute
        self.clock = clock
        architecture = model.architecture
        self._generate = programs.generate(architecture, mesh, compute, sampling, schedule)
        self._logprobs = programs.score_logprobs(architecture, mesh, compute, temperature=sampling.temperature)
        if architecture.lora is not None:
            self._logprobs_with_base = programs.score_logprobs_with_base(
                architecture, mesh, compute, temperature=sampling.temperature
            )
        self._update = programs.actor_step(
            architecture, mesh, compute, optimizer, ppo, temperature=sampling.temperature
        )

    @property
    def model(self) -> Model:
        """The policy with its present weights."""
        return self._model.holding(self.state.params)

    def generate(self, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], keys: jax.Array) -> Rollout:
        """Samples a response to every prompt."""
        return self._sample(self._switch(), prompts, lengths, keys)

    @timed("reshard")
    def _switch(self):
        return programs.generation_weights(self.model, self._mesh, self._compute)

    @timed("gen")
    def _sample(self, weights, prompts, lengths, keys) -> Rollout:
        generation = self._generate(weights, prompts, lengths, keys, *self._model.frozen)
        return Rollout(
            tokens=generation.tokens,
            prompt_lengths=generation.prompt_lengths,
            response_lengths=generation.response_lengths,
            logprobs=generation.logprobs,
            finished=generation.finished,
            version=jnp.copy(self.state.step),  # `update` donates the state
        )

    @timed("old_log_prob")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of the rollout's tokens under the present weights."""
        logprobs, _ = self._logprobs(self.state.params, rollout.tokens, rollout.lengths, *self._model.frozen)
        return logprobs

    @timed("old_log_prob")
    def logprobs_with_base(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """An adapter's `logprobs`, and those of the base under it, in one pass."""
        logprobs, _, base = self._logprobs_with_base(
            self.state.params, rollout.tokens, rollout.lengths, *self._model.frozen
        )
        return logprobs, base

    @timed("update_actor")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        self.state, metrics = self._update(self.state, experience, *self._model.frozen)
        return metrics


class Reference:
    """The frozen policy to which the KL penalty ties the actor."""

    def __init__(self, model: Model, mesh: Mesh, compute: Compute, *, temperature: float, clock: Clock):
        self.model, self.clock = model, clock
        self._logprobs = programs.score_logprobs(model.architecture, mesh, compute, temperature=temperature)

    @timed("ref")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of the rollout's tokens."""
        logprobs, _ = self._logprobs(self.model.params, rollout.tokens, rollout.lengths, *self.model.frozen)
        return logprobs

    def is_base_of(self, actor: Actor) -> bool:
        """Whether the actor is an adapter on this very model, which then needs no pass of its own."""
        return self.model.params is actor.model.base


class Critic:
    """The value function."""

    state: TrainState  # as the actor's

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        compute: Compute,
        *,
        optimizer: optax.GradientTransformation,
        ppo: PPOConfig,
        clock: Clock,
    ):
        self._model, self.clock, self.architecture = model.holding({}), clock, model.architecture
        self._values = programs.score_values(model.architecture, mesh, compute)
        self._update = programs.critic_step(model.architecture, mesh, compute, optimizer, ppo)

    @timed("values")
    def values(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
        """V before every token, and V after each row's last one, for rows that the length limit cut off."""
        return self._values(self.state.params, rollout.tokens, rollout.lengths, *self._model.frozen)

    @timed("update_critic")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        self.state, metrics = self._update(self.state, experience, *self._model.frozen)
        return metrics


class Learner:
    """Actor and critic where a batch gets a single update: one program makes the experience and trains both."""

    def __init__(
        self,
        actor: Actor,
        critic: Critic,
        mesh: Mesh,
        compute: Compute,
        *,
        optimizers: tuple[optax.GradientTransformation, optax.GradientTransformation],
        ppo: PPOConfig,
        temperature: float,
    ):
        self._actor, self._critic, self.clock = actor, critic, actor.clock
        models = actor.architecture, critic.architecture
        self._update = programs.on_policy_step(*models, mesh, compute, optimizers, ppo, temperature=temperature)

    @timed("update")
    def update(
        self, rollout: Rollout, scores: Array, ref: Array, kl_coef: float | Array
    ) -> tuple[Experience, dict[str, Array]]:
        """The experience of a rollout, and both models trained on it."""
        states = self._actor.state, self._critic.state
        actor, critic, experience, metrics = self._update(*states, rollout, scores, ref, kl_coef)
        self._actor.state, self._critic.state = actor, critic
        return experience, metrics


class Reward:
    """A frozen reward model that reads the actor's tokens."""

    def __init__(self, model: Model, mesh: Mesh, compute: Compute, *, clock: Clock):
        self.model, self.clock = model, clock
        self._scores = programs.score_sequences(model.architecture, mesh, compute)

    @timed("reward")
    def score(self, rollout: Rollout) -> Float[Array, "B"]:
        """The learned score of every row, read at its last token."""
        return self._scores(self.model.params, rollout.tokens, rollout.lengths, *self.model.frozen)
