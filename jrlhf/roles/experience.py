"""`ExperienceMaker`: the role that turns a rollout, its scores and its log-probs into experience for the updates."""

import functools
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrlhf.data.batches import Batch, put_rows
from jrlhf.errors import UserError
from jrlhf.ppo.config.algorithms import GRPOConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.experience import bare_experience, make_best_experience, make_group_experience, where_chosen
from jrlhf.ppo.safe import make_safe_experience
from jrlhf.ppo.shaping import align_scores
from jrlhf.ppo.token_advantages import make_custom_experience, make_experience, make_return_experience
from jrlhf.ppo.types import Experience, Rollout
from jrlhf.roles.placement import RolePlacement, call
from jrlhf.run.clock import Clock, timed


class ExperienceMaker:
    """Computes rewards, advantages and returns with the settings of an algorithm."""

    def __init__(self, algorithm: PolicyConfig, clock: Clock, placement: RolePlacement):
        self.clock, self.placement, self._algorithm = clock, placement, algorithm

    @call("compute", "experience")
    @timed("adv")
    def experience(self, rollout: Rollout, scores, old, ref, values, after, kl_coef) -> Experience:
        """Advantages by GAE."""
        critic = {"kl_coef": kl_coef, "bootstrap_values": after}
        return self._call(make_experience, rollout, scores, old, ref, values, **critic)

    @call("compute", "experience")
    @timed("adv")
    def group_experience(self, rollout: Rollout, scores, old, ref, kl_coef) -> Experience:
        """Advantages among the responses to one prompt."""
        return self._call(make_group_experience, rollout, scores, old, ref, kl_coef=kl_coef)

    @call("compute", "experience")
    @timed("adv")
    def best_of_group(self, rollout: Rollout, scores) -> Experience:
        """The response with the highest score to each prompt, for losses that need no advantages."""
        return self._call(make_best_experience, rollout, scores)

    @call("compute", "experience")
    @timed("adv")
    def where(self, chosen: Callable[..., Any], experience: Experience) -> Experience:
        """The experience in which only some rows are learned from, by a user's function of it, which is jitted.

        chosen: as in `where_chosen`; pass the same object in every iteration, else it compiles again.
        """
        return _jitted(where_chosen, chosen=chosen, config=self._algorithm)(experience)

    @call("compute", "pairs")
    @timed("adv")
    def pairs_of_group(self, experience: Experience) -> Any:
        """The best and the worst response to each prompt, as a `PairBatch`."""
        from jrlhf.ppo.group_pairs import pairs_of_group

        assert isinstance(self._algorithm, GRPOConfig), "checked when the dataflow was traced"
        return _jitted(pairs_of_group, samples=self._algorithm.samples)(experience)

    @call("compute", "mixed")
    @timed("adv")
    def mix(self, rollout: Rollout, other: Rollout, share: float) -> Rollout:
        """The rollout in which a share of the rows, evenly spread, are those of another one, such as a teacher's."""
        if rollout.tokens.shape != other.tokens.shape:
            shapes = f"{list(rollout.tokens.shape)} and {list(other.tokens.shape)}"
            raise UserError(f"estimator.mix gets rollouts of the shapes {shapes}: both must have the same prompts")
        ends = np.floor(np.arange(len(rollout.tokens) + 1) * share + 1e-6)
        return self._choose((rollout, other), np.diff(ends).astype(np.int32))

    @call("compute", "chosen")
    @timed("adv")
    def by_source(self, prompts: Batch, values: Mapping[str, Any]) -> Any:
        """The values of the rows by the source of their prompts, such as the targets of several teachers.

        values: source -> a value, all alike. Raises UserError for a prompt of another source.
        """
        sources = [example.source for example in prompts.examples]
        if others := {*sources} - {*values}:
            raise UserError(f"estimator.by_source gets values for {', '.join(values)}, and not for {min(others)}")
        return self._choose(tuple(values.values()), np.array([[*values].index(name) for name in sources], np.int32))

    def _choose(self, values: tuple[Any, ...], numbers: Int[np.ndarray, "B"]) -> Any:
        """The rows of these values by number: `numbers[i]` says of which one row i is."""
        return _of_rows(values, put_rows(numbers, self.placement.home.mesh))

    @call("compute", "experience")
    @timed("adv")
    def bare_experience(self, rollout: Rollout) -> Experience:
        """The rollout as experience without scores and advantages."""
        return bare_experience(rollout, config=self._algorithm)

    @call("compute", "experience")
    @timed("adv")
    def return_experience(self, rollout: Rollout, scores, old, ref, kl_coef, baselines=None) -> Experience:
        """Returns of tokens, minus a baseline of the prompt."""
        baselines = None if baselines is None else sum_rows(baselines)
        return self._call(make_return_experience, rollout, scores, old, ref, baselines, kl_coef=kl_coef)

    @call("compute", "experience")
    @timed("adv")
    def custom_experience(
        self, advantages: Callable[..., Any], rollout: Rollout, scores, old, ref, kl_coef, *others
    ) -> Experience:
        """Advantages by a user's function of the experience so far, the algorithm's config and `others`. It is jitted.

        advantages: as in `make_custom_experience`; pass the same object in every iteration, else it compiles again.
        """
        options = {"advantages": advantages, "kl_coef": kl_coef}
        return self._call(make_custom_experience, rollout, scores, old, ref, *others, **options)

    @call("compute", "experience", "cost_experience")
    @timed("adv")
    def safe_experience(
        self, rollout: Rollout, scores, costs, old, ref, values, after, cost_values, cost_after, kl_coef, multiplier
    ) -> tuple[Experience, Experience]:
        """Advantages of reward and cost, weighted by the multiplier; and the cost critic's experience."""
        critics = {"bootstrap_values": after, "cost_bootstrap_values": cost_after}
        streams = rollout, scores, align_to_tokens(rollout, costs), old, ref, values, cost_values
        return self._call(make_safe_experience, *streams, kl_coef=kl_coef, multiplier=multiplier, **critics)

    def _call(self, make: Callable, *arguments: Any, **options: Any) -> Any:
        return _of_aligned(make, *arguments, config=self._algorithm, **options)


@jax.jit
def align_to_tokens(rollout: Rollout, scores: Array) -> Array:
    """Scatters response-token scores `[B, R]` into sequence positions `[B, T]`; row scores `[B]` pass through."""
    if scores.ndim == 1:
        return scores
    return align_scores(scores, rollout.prompt_lengths, rollout.tokens.shape[1])


@partial(jax.jit, static_argnums=0, static_argnames=("config", "advantages"))
def _of_aligned(make: Callable, rollout: Rollout, scores: Array, *others: Any, **options: Any) -> Any:
    """Calls `make` with the rewards' scores aligned to token positions."""
    return make(rollout, align_to_tokens(rollout, scores), *others, **options)


@jax.jit
def _of_rows(values: tuple[Any, ...], numbers: Int[Array, "B"]) -> Any:
    def chosen(first: Array, *others: Array) -> Array:
        if first.ndim == 0:  # the version of the weights
            return first
        at = numbers.reshape(-1, *[1] * (first.ndim - 1))
        return functools.reduce(lambda own, rest: jnp.where(at == rest[0], rest[1], own), enumerate(others, 1), first)

    return jax.tree.map(chosen, *values)


@cache
def _jitted(function: Callable, **options: Any) -> Callable:
    return jax.jit(partial(function, **options))


@jax.jit
def sum_rows(scores: Float[Array, "B"] | Float[Array, "B R"]) -> Float[Array, "B"]:
    """One number per row: the sum of its tokens' scores."""
    return scores if scores.ndim == 1 else jnp.sum(scores, axis=1)
