"""`RoleFactory`: builds the models and the roles of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jrlhf.algorithms.dynamic_sampling import DynamicSampler
from jrlhf.algorithms.optimizers import make_optimizer
from jrlhf.algorithms.roles import Roles
from jrlhf.config.schema import Config, SleepConfig
from jrlhf.meshes.graph import Graph
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.ppo.config.algorithms import DAPOConfig, SafeRLHFConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor
from jrlhf.roles.critic import Constraint, CostCritic, Critic, FusedUpdate
from jrlhf.roles.derived import scalar_model
from jrlhf.roles.experience import ExperienceMaker
from jrlhf.roles.frozen import FrozenPolicy, Reference
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Compute, Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.role import Offloader, Site
from jrlhf.run.clock import Clock
from jrlhf.run.fingerprints import fingerprint_of

Trained = TypeVar("Trained", Actor, Critic, CostCritic)


def algorithm_of(config: Config) -> PolicyConfig:
    """Returns the algorithm's settings, completed with those that other sections determine."""
    asynchronous = config.asynchronous
    staleness = None if asynchronous is None else asynchronous.staleness
    algorithm = replace(config.rl.algorithm, seed=config.seed, staleness=staleness)
    if algorithm.aggregation == "constant" and algorithm.aggregation_divisor is None:
        return replace(algorithm, aggregation_divisor=config.data.max_response)
    return algorithm


def offloader_of(role: str, config: SleepConfig, clock: Clock) -> Offloader:
    """Returns what offloads the parts of a trained role's state that the config names."""
    return Offloader(clock, weights=config.weights_of(role), optimizer=config.optimizer == "host")


@dataclass(frozen=True)
class RoleFactory:
    """Builds the roles of a run from its settings.

    algorithm: as `algorithm_of` returns it. placement: of each role, by name.
    """

    config: Config
    algorithm: PolicyConfig
    compute: Compute
    sampling: SamplingConfig
    placement: Callable[[str], RolePlacement]
    clock: Clock

    def models(
        self, initial: InitialModels, policy: Model, rewards: Rewards, graph: Graph
    ) -> tuple[dict[str, Model], dict[str, str]]:
        """Returns the models of actor, reference and critics, stored as placed; and digests of the frozen ones.

        The policy and the reward model that the run trained are moved last, because the others are made from them.
        """
        models, identities, home = {}, {}, self.placement
        if "reference" in graph.roles or "actor.logprobs_with_base" in (call.name for call in graph):
            reference = initial.reference(policy)
            identities["reference"] = reference.fingerprint()
            models["reference"] = reference if reference.params is policy.base else home("reference").store(reference)
        elif policy.base is not None:
            identities["base"] = fingerprint_of(policy.base)
        if self.config.rl.algorithm.has_critic:
            models["critic"] = home("critic").store(initial.critic(policy, rewards.trained))
            if "cost_critic" in graph.roles:
                models["cost_critic"] = home("cost_critic").store(scalar_model(policy))
        for name, role in self.config.roles.frozen.items():
            models[name] = home(name).store(initial.frozen(role.path, f"roles.{name}.path"))
            identities[name] = models[name].fingerprint()
        rewards.free_original()
        return {"actor": home("actor").store(policy)} | models, identities

    def roles(self, graph: Graph, models: Mapping[str, Model], rewards: Rewards, costs: Rewards | None) -> Roles:
        """All roles of a graph."""
        algorithm, placement, clock = self.algorithm, self.placement, self.clock
        rollouts: Any = {"sampling": self.sampling, "schedule": self.config.rollout}
        actor = self._trained(Actor, "actor", models["actor"], **rollouts)
        optional: dict[str, Any] = {"cost": costs}
        if "reference" in models:
            optional["reference"] = self._frozen(Reference, "reference", models)
        for name, kind in (("critic", Critic), ("cost_critic", CostCritic)):
            if name in models:
                optional[name] = self._trained(kind, name, models[name])
        if "learner" in graph.roles:
            trained = actor, optional.get("critic")
            lengths = {"temperature": self.sampling.temperature, "responses": self.sampling.max_new_tokens}
            optional["learner"] = FusedUpdate(*trained, self._site("learner"), algorithm=algorithm, **lengths)
        if isinstance(algorithm, SafeRLHFConfig):
            optional["constraint"] = Constraint(algorithm, clock, placement("constraint"))
        if isinstance(algorithm, DAPOConfig):
            optional["pool"] = DynamicSampler(placement("pool"), algorithm, clock, rewards)
        own = self.config.roles.frozen
        optional["frozen"] = {name: self._frozen(FrozenPolicy, name, models) for name in own}
        arithmetic = placement("estimator" if "estimator" in graph.roles else "arithmetic")
        return Roles(actor, rewards, ExperienceMaker(algorithm, clock, arithmetic), **optional)

    def _site(self, role: str, offloader: Offloader | None = None) -> Site:
        return Site(self.placement(role), self.compute, self.clock, offloader)

    def _frozen(self, kind: type[FrozenPolicy], name: str, models: Mapping[str, Model]) -> FrozenPolicy:
        """Builds a policy that is not trained. It draws no ids that the actor's vocabulary lacks."""
        sampling, actors = self.sampling, models["actor"].config.vocab_size
        if sampling.token_limit is None and models[name].config.vocab_size > actors:
            sampling = replace(sampling, token_limit=actors)
        return kind(models[name], self._site(name), sampling=sampling, schedule=self.config.rollout)

    def _trained(self, kind: type[Trained], name: str, model: Model, **options: Any) -> Trained:
        """Builds a trained role, with the micro-batches of its update's placement."""
        section, algorithm = self.config.rl, self.algorithm
        if algorithm.micro_batch_tokens is None:
            algorithm = replace(algorithm, micro_batches=self.placement(name)["update"].parts)
        site = self._site(name, offloader_of(name, self.config.offloading, self.clock))
        key = f"{self.config.algorithm}.{'actor' if name == 'actor' else 'critic'}"
        optimizer = make_optimizer(section.optimizer_of(name), key, updates=section.updates)
        options |= {"optimizer": optimizer, "algorithm": algorithm}
        return kind(model, site, **options)
