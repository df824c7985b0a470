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
from jrlhf.models import ModelConfig, SamplingConfig
from jrlhf.ppo import Experience, PPOConfig, Rollout, TrainState, make_actor_step, make_critic_step
from jrlhf.programs import Compute


class Actor:
    """The policy: trained in FSDP layout, generating in TP layout. The generation copy lives as long as a rollout."""

    state: TrainState  # assigned by whoever runs the iterations; `update` replaces it

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        compute: Compute,
        *,
        sampling: SamplingConfig,
        optimizer: optax.GradientTransformation,
        ppo: PPOConfig,
        clock: Clock,
    ):
        self.config, self.mesh, self.compute = config, mesh, compute
        self.clock = clock
        self._generate = programs.generate(config, mesh, compute, sampling)
        self._logprobs = programs.score_logprobs(config, mesh, compute, temperature=sampling.temperature)
        trained = programs.train_logprobs(config, mesh, compute, temperature=sampling.temperature)
        self._update = make_actor_step(trained, optimizer, ppo)

    def generate(self, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], keys: jax.Array) -> Rollout:
        """Samples a response to every prompt."""
        return self._sample(self._switch(), prompts, lengths, keys)

    @timed("reshard")
    def _switch(self):
        return programs.generation_weights(self.state.params, self.config, self.mesh, self.compute)

    @timed("gen")
    def _sample(self, weights, prompts, lengths, keys) -> Rollout:
        generation = self._generate(weights, prompts, lengths, keys)
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
        logprobs, _ = self._logprobs(self.state.params, rollout.tokens)
        return logprobs

    @timed("update_actor")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        self.state, metrics = self._update(self.state, experience)
        return metrics


class Reference:
    """The frozen policy to which the KL penalty ties the actor."""

    def __init__(self, config: ModelConfig, mesh: Mesh, compute: Compute, params, *, temperature: float, clock: Clock):
        self.params, self.clock = params, clock
        self._logprobs = programs.score_logprobs(config, mesh, compute, temperature=temperature)

    @timed("ref")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of the rollout's tokens."""
        logprobs, _ = self._logprobs(self.params, rollout.tokens)
        return logprobs


class Critic:
    """The value function."""

    state: TrainState  # as the actor's

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        compute: Compute,
        *,
        optimizer: optax.GradientTransformation,
        ppo: PPOConfig,
        clock: Clock,
    ):
        self.clock = clock
        self._values = programs.score_values(config, mesh, compute)
        self._update = make_critic_step(programs.train_values(config, mesh, compute), optimizer, ppo)

    @timed("values")
    def values(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
        """V before every token, and V after each row's last one, for rows that the length limit cut off."""
        return self._values(self.state.params, rollout.tokens, rollout.prompt_lengths + rollout.response_lengths)

    @timed("update_critic")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        self.state, metrics = self._update(self.state, experience)
        return metrics


class Reward:
    """The frozen reward model."""

    def __init__(self, config: ModelConfig, mesh: Mesh, compute: Compute, params, *, clock: Clock):
        self.params, self.clock = params, clock
        self._scores = programs.score_sequences(config, mesh, compute)

    @timed("reward")
    def score(self, rollout: Rollout) -> Float[Array, "B"]:
        """The learned score of every row, read at its last token."""
        return self._scores(self.params, rollout.tokens, rollout.prompt_lengths + rollout.response_lengths)
