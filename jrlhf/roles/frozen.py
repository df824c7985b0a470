"""Policies that are not trained: the reference, to which a KL penalty ties the actor, and those that a config names."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float

from jrlhf.data.batches import Batch, other_keys
from jrlhf.errors import UserError
from jrlhf.meshes.transfers import transfer
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.ppo.types import Rollout, Targets
from jrlhf.roles.generating import check_positions, engine_of
from jrlhf.roles.model import Model, generation_weights
from jrlhf.roles.placement import call
from jrlhf.roles.role import Role, Site, responses
from jrlhf.run.processes import to_all_hosts


class FrozenPolicy(Role):
    """A policy that judges the actor's tokens, such as a teacher.

    sampling, schedule: of the rollouts. Their temperature divides its logits, too. Ids from token_limit on are neither
    drawn nor targets.
    """

    def __init__(self, model: Model, site: Site, *, sampling: SamplingConfig, schedule: Schedule | None = None):
        super().__init__(model, site)
        self._options: dict[str, Any] = {"temperature": sampling.temperature, "span": sampling.max_new_tokens}
        self._sampling, self._schedule = sampling, schedule

    @call("generate", "{role}_rollout")
    def generate(self, prompts: Batch) -> Rollout:
        """Samples its own responses to every prompt, with their log-probs under this policy."""
        name, architecture = self.placement.call_of("generate"), self._model.architecture
        mesh, role = self.placement["generate"].mesh, self.placement.role
        check_positions(role, architecture, prompts, self._sampling)
        tokens, lengths, keys = transfer(prompts.arrays, mesh)
        keys = other_keys(keys, f"{role}.{name}")  # draws other responses than the actor
        engine = engine_of(architecture, mesh, self.compute, self._sampling, self._schedule, prompts.samples)
        model = self._model.holding(self.offloader.onload(self._model.params))
        weights = self.clock.run("reshard", generation_weights, model, mesh, self.compute)
        read = partial(to_all_hosts, seconds=self.clock.deadline)
        arguments = weights, tokens, lengths, keys, *self._frozen("generate")
        return Rollout.of(self.clock.run("gen", engine, *arguments, watch=self.clock.watch, read=read))

    @call("infer", "{role}_logprobs", rows="each")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of response tokens; undefined at other positions."""
        return self._scored(f"{self.placement.role}_logprobs", rollout)

    @call("infer", "{role}_targets", rows="each")
    def top_logprobs(self, rollout: Rollout, k: int) -> Targets:
        """The k most likely tokens in the place of each response token, and their log-probs; undefined elsewhere."""
        vocabulary = self.model.config.vocab_size
        if k > (limit := min(self._sampling.token_limit or vocabulary, vocabulary)):
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
