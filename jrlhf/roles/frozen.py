"""Policies that are not trained: the reference, to which a KL penalty ties the actor, and those that a config names."""

from typing import Any

from jaxtyping import Array, Float

from jrlhf.errors import UserError
from jrlhf.ppo.types import Rollout, Targets
from jrlhf.roles.model import Model
from jrlhf.roles.placement import call
from jrlhf.roles.role import Role, Site, responses


class FrozenPolicy(Role):
    """A policy that judges the actor's tokens, such as a teacher.

    temperature: that of the rollouts, which divides its logits, too. responses: maximum response length. tokens: number
    of tokens of the actor, if this model's vocabulary may have more rows; the others are no targets.
    """

    def __init__(self, model: Model, site: Site, *, temperature: float, responses: int, tokens: int | None = None):
        super().__init__(model, site)
        self._tokens = min(tokens or model.config.vocab_size, model.config.vocab_size)
        self._options: dict[str, Any] = {"temperature": temperature, "span": responses}

    @call("infer", "{role}_logprobs", rows="each")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of response tokens; undefined at other positions."""
        return self._scored(f"{self.placement.role}_logprobs", rollout)

    @call("infer", "{role}_targets", rows="each")
    def top_logprobs(self, rollout: Rollout, k: int) -> Targets:
        """The k most likely tokens in the place of each response token, and their log-probs; undefined elsewhere."""
        if k > (limit := self._tokens):
            raise UserError(f"{self.placement.role}.top_logprobs gets k={k}, and there are {limit} tokens: lower it")
        function = self.compiled("top_logprobs").score_top_logprobs(k=k, limit=limit, **self._options)
        name = f"{self.placement.role}_targets"
        return Targets(*self.clock.run(name, self._infer, "top_logprobs", function, *responses(rollout)))

    def _scored(self, name: str, rollout: Rollout) -> Float[Array, "B T"]:
        function = self.compiled("logprobs").score_logprobs(**self._options)
        return self.clock.run(name, self._infer, "logprobs", function, *responses(rollout))[0]


class Reference(FrozenPolicy):
    """The frozen policy to which the KL penalty ties the actor."""

    @call("infer", "ref", rows="each")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of response tokens; undefined at other positions."""
        return self._scored("ref", rollout)

    def is_base_of(self, actor: Role) -> bool:
        """True if the actor is an adapter on this very model, which then needs no separate pass."""
        return self.model.params is actor.model.base
