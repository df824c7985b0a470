"""The roles of RLHF: parameters, where they live, and the compiled functions that use them.

A role keeps its model's state from one call to the next. What `call` decorates is a call of an algorithm's graph: it
takes and returns arrays whose rows lie over all devices of the mesh that the role's `places` name for it. In which
layout a call sees the model is decided there and in `compiled.py`, and nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jrlhf.data.batches import Batch
from jrlhf.meshes import transfer
from jrlhf.meshes.graph import Kind
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.models.params import Params
from jrlhf.ppo import (
    Experience,
    MultiplierState,
    PairBatch,
    PolicyConfig,
    PPOConfig,
    Rollout,
    SafeRLHFConfig,
    SFTBatch,
    TrainState,
    align_scores,
    make_custom_experience,
    make_experience,
    make_group_experience,
    make_return_experience,
    make_safe_experience,
    update_multiplier,
)
from jrlhf.roles import compiled
from jrlhf.roles.compiled import Compute
from jrlhf.roles.graph import call
from jrlhf.roles.model import Model
from jrlhf.roles.offloading import Offloader
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock, timed


class Actor:
    """The policy: trained in FSDP layout, generating in TP layout. The generation copy lives as long as a rollout.

    Where it is an adapter, training and generation use the same base, and there is no copy.
    """

    state: TrainState  # assigned by whoever runs the iterations; `update` replaces it
    texts: SFTBatch | None = None  # what the next update imitates besides, with ptx_coef; assigned likewise

    def __init__(
        self,
        model: Model,
        where: Mesh | RolePlacement,
        compute: Compute,
        *,
        sampling: SamplingConfig,
        samples: int = 1,
        schedule: Schedule | None = None,
        optimizer: optax.GradientTransformation,
        algorithm: PolicyConfig,
        clock: Clock,
    ):
        architecture = self.architecture = model.architecture
        self._model = model.holding({})  # the weights are the state's: these would be kept for nothing
        self.placement, self._compute = RolePlacement.of(where), compute
        self.clock, self.offloader = clock, Offloader(clock)
        self._algorithm, temperature = algorithm, sampling.temperature
        mesh, apart = self.placement["generate"].mesh, self.placement["generate_greedy"].mesh
        self._generate = compiled.generate(architecture, mesh, compute, sampling, schedule, samples)
        greedy = replace(sampling, temperature=0.0, top_k=None, top_p=None)
        self._generate_greedy = compiled.generate(architecture, apart, compute, greedy, schedule)
        seen = partial(self.placement.resolve, architecture=architecture, compute=compute)
        spanned: Any = {"temperature": temperature, "span": sampling.max_new_tokens}
        self._logprobs = compiled.score_logprobs(*seen("logprobs"), **spanned)
        if architecture.lora is not None:
            self._logprobs_with_base = compiled.score_logprobs_with_base(*seen("logprobs_with_base"), **spanned)
        self._update = compiled.actor_step(
            *seen("update"), optimizer, algorithm, temperature=temperature, responses=sampling.max_new_tokens
        )

    @property
    def model(self) -> Model:
        """The policy with its present weights."""
        return self._model.holding(self.state.params)

    @call("generate", "rollout")
    def generate(self, prompts: Batch) -> Rollout:
        """Samples responses to every prompt: rows of one prompt after one another."""
        return self._sample(self._generate, self._switch("generate"), prompts, self.placement["generate"].mesh)

    @call("generate", "greedy")
    def generate_greedy(self, prompts: Batch) -> Rollout:
        """The most likely response to every prompt, token by token."""
        mesh = self.placement["generate_greedy"].mesh
        return self._sample(self._generate_greedy, self._switch("generate_greedy"), prompts, mesh)

    @timed("reshard")
    def _switch(self, method: str) -> Params:
        awake = self.offloader.onload(self.state.params)
        model, lent = self._model.holding(awake), awake is not self.state.params
        return compiled.generation_weights(model, self.placement[method].mesh, self._compute, donate=lent)

    @timed("gen")
    def _sample(self, generate: Callable, weights: Params, prompts: Batch, mesh: Mesh) -> Rollout:
        version, arrays = transfer((self.state.step, prompts.arrays), mesh)
        generation = generate(weights, *arrays, *self._model.frozen)
        return Rollout(
            tokens=generation.tokens,
            prompt_lengths=generation.prompt_lengths,
            response_lengths=generation.response_lengths,
            logprobs=generation.logprobs,
            finished=generation.finished,
            version=jnp.copy(version),  # `update` donates the state
        )

    def recomputes(self) -> bool:
        """Whether the ratio's denominator is computed here, and not that which the rollout recorded."""
        return self._algorithm.old_logprobs == "recompute"

    @call("infer", "old")
    @timed("old_log_prob")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of the responses' tokens under the present weights; elsewhere they mean nothing."""
        model = self._model.holding(self.offloader.onload(self.state.params))
        weights = self.placement.weights("logprobs", model, self._compute, self.clock)
        logprobs, _ = self._logprobs(weights, *_responses(rollout), *model.frozen)
        return logprobs

    @call("infer", "old", "ref")
    @timed("old_log_prob")
    def logprobs_with_base(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """An adapter's `logprobs`, and those of the base under it, in one pass."""
        params = self.offloader.onload(self.state.params)
        logprobs, _, base = self._logprobs_with_base(params, *_responses(rollout), *self._model.frozen)
        return logprobs, base

    @call("train", "actor_metrics")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        self.state = self.offloader.consume(self.state)
        metrics = self._train(experience)
        self.state = self.offloader.offload(self.state)
        return metrics

    @timed("update_actor")
    def _train(self, experience: Experience) -> dict[str, Array]:
        texts = () if self.texts is None else (self.texts,)
        self.state, metrics = self._update(self.state, experience, *texts, *self._model.frozen)
        return metrics

    def prefetch(self, kind: Kind) -> None:
        """Begins to bring what the next call, of this kind, needs of a state that sleeps."""
        self.offloader.prefetch(self.state if kind == "train" else self.state.params)


class Reference:
    """The frozen policy to which the actor is tied.

    responses: it is asked for those of rollouts only, none of which has more tokens. None: for all tokens of pairs.
    """

    def __init__(
        self,
        model: Model,
        where: Mesh | RolePlacement,
        compute: Compute,
        *,
        temperature: float,
        responses: int | None,
        clock: Clock,
    ):
        self.model, self.placement, self._compute = model, RolePlacement.of(where), compute
        self.clock, self.offloader = clock, Offloader(clock)
        seen = self.placement.resolve("logprobs", model.architecture, compute)
        self._of_responses = responses is not None
        self._logprobs = compiled.score_logprobs(*seen, temperature=temperature, span=responses)

    @call("infer", "ref")
    @timed("ref")
    def logprobs(self, rows: Rollout | PairBatch) -> Float[Array, "B T"]:
        """Log-probs of the pairs' tokens, or of the responses'; then they mean nothing elsewhere."""
        if self._of_responses != isinstance(rows, Rollout):
            of = "responses" if self._of_responses else "pairs"
            raise TypeError(f"a reference of {of} cannot read a {type(rows).__name__}")
        model = self.model.holding(self.offloader.onload(self.model.params))
        weights = self.placement.weights("logprobs", model, self._compute, self.clock)
        read = _responses(rows) if isinstance(rows, Rollout) else (rows.tokens, rows.lengths)
        logprobs, _ = self._logprobs(weights, *read, *model.frozen)
        return logprobs

    def is_base_of(self, actor: Actor) -> bool:
        """Whether the actor is an adapter on this very model, which then needs no pass of its own."""
        return self.model.params is actor.model.base

    def prefetch(self, kind: Kind) -> None:
        """As the actor's."""
        self.offloader.prefetch(self.model.params)


class Critic:
    """A value function: of the reward, or of the cost.

    name: of its calls' times and of its metrics: "critic" has "values" and "update_critic", "cost_critic" has
        "cost_values" and "update_cost_critic".
    """

    state: TrainState  # as the actor's

    def __init__(
        self,
        model: Model,
        where: Mesh | RolePlacement,
        compute: Compute,
        *,
        optimizer: optax.GradientTransformation,
        algorithm: PPOConfig,
        clock: Clock,
        name: str = "critic",
    ):
        self._model, self.clock, self.architecture = model.holding({}), clock, model.architecture
        self._name, self.placement, self._compute = name, RolePlacement.of(where), compute
        self.offloader = Offloader(clock)
        seen = partial(self.placement.resolve, architecture=model.architecture, compute=compute)
        self._values = compiled.score_values(*seen("values"))
        self._update = compiled.critic_step(*seen("update"), optimizer, algorithm)

    @call("infer", "{role}_values", "{role}_after")
    def values(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
        """V before every token, and V after each row's last one, for rows that the length limit cut off."""
        return self.clock.run(self._name.removesuffix("critic") + "values", self._valued, rollout)

    def _valued(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
        model = self._model.holding(self.offloader.onload(self.state.params))
        weights = self.placement.weights("values", model, self._compute, self.clock)
        return self._values(weights, rollout.tokens, rollout.lengths, *model.frozen)

    @call("train", "{role}_metrics")
    def update(self, experience: Experience) -> dict[str, Array]:
        """Trains on one batch of experience."""
        self.state = self.offloader.consume(self.state)
        metrics = self.clock.run(f"update_{self._name}", self._train, experience)
        self.state = self.offloader.offload(self.state)
        return metrics

    def prefetch(self, kind: Kind) -> None:
        """As the actor's."""
        self.offloader.prefetch(self.state if kind == "train" else self.state.params)

    def _train(self, experience: Experience) -> dict[str, Array]:
        self.state, metrics = self._update(self.state, experience, *self._model.frozen)
        return {key.replace("critic/", f"{self._name}/"): value for key, value in metrics.items()}


class FusedUpdate:
    """Actor and critic, if there is one, where a batch gets a single update: one program makes the experience and
    trains."""

    def __init__(
        self,
        actor: Actor,
        critic: Critic | None,
        where: Mesh | RolePlacement,
        compute: Compute,
        *,
        optimizers: Sequence[optax.GradientTransformation],
        algorithm: PolicyConfig,
        temperature: float,
        responses: int,
    ):
        self.clock, self.placement = actor.clock, RolePlacement.of(where)
        _, mesh, compute = self.placement.resolve("update", actor.architecture, compute)
        self._trained: tuple[Actor | Critic, ...] = (actor,) if critic is None else (actor, critic)
        how: Any = {"temperature": temperature, "responses": responses}
        if critic is None:
            model, optimizer = actor.architecture, optimizers[0]
            self._update = compiled.on_policy_actor_step(model, mesh, compute, optimizer, algorithm, **how)
        else:
            assert isinstance(algorithm, PPOConfig) and len(optimizers) == 2
            models, pair = (actor.architecture, critic.architecture), (optimizers[0], optimizers[1])
            self._update = compiled.on_policy_step(*models, mesh, compute, pair, algorithm, **how)

    @call("train", "experience", "metrics")
    def update(
        self, rollout: Rollout, scores: Array, ref: Array | None, kl_coef: float | Array
    ) -> tuple[Experience, dict[str, Array]]:
        """The experience of a rollout, and the models trained on it."""
        for each in self._trained:
            each.state = each.offloader.consume(each.state)
        made = self._train(rollout, scores, ref, kl_coef)
        for each in self._trained:
            each.state = each.offloader.offload(each.state)
        return made

    @timed("update")
    def _train(
        self, rollout: Rollout, scores: Array, ref: Array | None, kl_coef: float | Array
    ) -> tuple[Experience, dict[str, Array]]:
        states = [each.state for each in self._trained]
        *states, experience, metrics = self._update(*states, rollout, placed(rollout, scores), ref, kl_coef)
        for each, state in zip(self._trained, states, strict=True):
            each.state = state
        return experience, metrics

    def prefetch(self, kind: Kind) -> None:
        """As the actor's."""
        for each in self._trained:
            each.prefetch(kind)


def _responses(rollout: Rollout) -> tuple[Array, Array, Array]:
    """What a model needs to score a rollout's responses: tokens, lengths and where the responses begin."""
    return rollout.tokens, rollout.lengths, rollout.prompt_lengths


class Reward:
    """A frozen reward model that reads the actor's tokens."""

    def __init__(self, model: Model, where: Mesh | RolePlacement, compute: Compute, *, clock: Clock):
        self.model, self.placement, self._compute = model, RolePlacement.of(where), compute
        self.clock, self.offloader = clock, Offloader(clock)

    @timed("reward")
    def score(self, rollout: Rollout, method: str = "score") -> Float[Array, "B"]:
        """The learned score of every row, read at its last token. method: which call of the rewards this is."""
        model = self.model.holding(self.offloader.onload(self.model.params))
        weights = self.placement.weights(method, model, self._compute, self.clock)
        scores = compiled.score_sequences(*self.placement.resolve(method, model.architecture, self._compute))
        return scores(weights, rollout.tokens, rollout.lengths, *model.frozen)

    def prefetch(self) -> None:
        """Begins to bring weights that sleep."""
        self.offloader.prefetch(self.model.params)


class ExperienceMaker:
    """The arithmetic between the models: from a rollout and what they say about it to experience."""

    def __init__(self, algorithm: PolicyConfig, clock: Clock, places: RolePlacement | None = None):
        self.clock, self.placement = clock, places
        self._jitted = {
            make: jax.jit(partial(_of_placed, make, config=algorithm))
            for make in (make_experience, make_group_experience, make_return_experience, make_safe_experience)
        }
        custom = partial(_of_placed, make_custom_experience, config=algorithm)
        self._custom = jax.jit(custom, static_argnames="advantages")

    @call("compute", "experience")
    @timed("adv")
    def experience(self, rollout: Rollout, scores, old, ref, values, after, kl_coef) -> Experience:
        """Advantages by GAE."""
        make = self._jitted[make_experience]
        return make(rollout, scores, old, ref, values, kl_coef=kl_coef, bootstrap_values=after)

    @call("compute", "experience")
    @timed("adv")
    def group_experience(self, rollout: Rollout, scores, old, ref, kl_coef) -> Experience:
        """Advantages among the responses to one prompt."""
        return self._jitted[make_group_experience](rollout, scores, old, ref, kl_coef=kl_coef)

    @call("compute", "experience")
    @timed("adv")
    def return_experience(self, rollout: Rollout, scores, old, ref, kl_coef, baselines=None) -> Experience:
        """Returns of tokens, minus a baseline of the prompt."""
        baselines = None if baselines is None else _of_rows(baselines)
        return self._jitted[make_return_experience](rollout, scores, old, ref, baselines, kl_coef=kl_coef)

    @call("compute", "experience")
    @timed("adv")
    def custom_experience(
        self, advantages: Callable[..., Any], rollout: Rollout, scores, old, ref, kl_coef, *others
    ) -> Experience:
        """Advantages by a function of the experience so far, the algorithm's numbers and `others`, which is jitted.

        advantages: as in `make_custom_experience`; the same object in every iteration, or it is compiled anew.
        """
        return self._custom(rollout, scores, old, ref, *others, advantages=advantages, kl_coef=kl_coef)

    @call("compute", "experience", "cost_experience")
    @timed("adv")
    def safe_experience(
        self, rollout: Rollout, scores, costs, old, ref, values, after, cost_values, cost_after, kl_coef, multiplier
    ) -> tuple[Experience, Experience]:
        """Advantages of reward and cost, weighed by the multiplier."""
        return self._jitted[make_safe_experience](
            rollout,
            scores,
            placed(rollout, costs),
            old,
            ref,
            values,
            cost_values,
            kl_coef=kl_coef,
            multiplier=multiplier,
            bootstrap_values=after,
            cost_bootstrap_values=cost_after,
        )


class Constraint:
    """The Lagrange multiplier that keeps the mean cost below its limit."""

    state: MultiplierState  # as the actor's

    def __init__(self, algorithm: SafeRLHFConfig, clock: Clock, places: RolePlacement | None = None):
        self.clock, self.placement = clock, places
        self._update = jax.jit(partial(update_multiplier, config=algorithm))

    @call("compute", "multiplier")
    @timed("adv")
    def update(self, costs: Float[Array, "B"] | Float[Array, "B R"]) -> Float[Array, ""]:
        """The multiplier after an iteration's costs."""
        self.state = self._update(self.state, _of_rows(costs))
        return self.state.value


@jax.jit
def placed(rollout: Rollout, scores: Array) -> Array:
    """Scores of tokens, `[B, R]` from the first response token on, where they stand in `[B, T]`; of rows as is."""
    if scores.ndim == 1:
        return scores
    return align_scores(scores, rollout.prompt_lengths, rollout.tokens.shape[1])


def _of_placed(make: Callable, rollout: Rollout, scores: Array, *others: Any, **options: Any) -> Any:
    """`make` of scores as the rewards give them."""
    return make(rollout, placed(rollout, scores), *others, **options)


@jax.jit
def _of_rows(scores: Float[Array, "B"] | Float[Array, "B R"]) -> Float[Array, "B"]:
    """One number a row: the sum of its tokens'."""
    return scores if scores.ndim == 1 else jnp.sum(scores, axis=1)
