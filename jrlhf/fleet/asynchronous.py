"""The rollouts of an asynchronous run, as its iterations see them: batches with their responses, drawn ahead."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.config.stages import RLStageConfig
from jrlhf.data.batches import Batch
from jrlhf.fleet.identity import Identity, trained_identity
from jrlhf.fleet.prompts import PromptStream
from jrlhf.fleet.schedule import Rules
from jrlhf.fleet.slices import FleetState, SliceFleet
from jrlhf.models import SamplingConfig
from jrlhf.models.generation.continuous import Weights
from jrlhf.roles.actor import Actor


@dataclass(frozen=True)
class AsynchronousRollouts:
    """The fleet of a run and its prompts."""

    fleet: SliceFleet
    prompts: PromptStream

    @property
    def state(self) -> FleetState:
        """See `SliceFleet.state`."""
        return self.fleet.state

    def start(self, state: FleetState, actor: Actor) -> None:
        """Goes on from a state, with the actor's weights."""
        if self.fleet.started:
            return  # the state is the fleet's own
        weights, expected = _published(actor)
        with jax.set_mesh(self.fleet.mesh):
            self.fleet.start(state, weights, expected)

    def collect(self, step: int) -> Batch:
        """The next batch, with its rollout."""
        with jax.set_mesh(self.fleet.mesh):
            collected = self.fleet.collect()
            return self.prompts.batch(collected, step, self.fleet.version)

    def publish(self, actor: Actor) -> dict[str, float]:
        """Hands the actor's new weights to the fleet; returns metrics."""
        weights, expected = _published(actor)
        with jax.set_mesh(self.fleet.mesh):
            self.fleet.publish(weights, expected)
        return self.fleet.metrics()


def _published(actor: Actor) -> tuple[Weights, Identity]:
    """The weights as decoding programs take them, and the identity that they must have."""
    params = actor.model.params
    with jax.set_mesh(actor.model.mesh):
        expected = trained_identity(params, dtype=actor.compute.dtype)
    return actor.drawing_weights(), expected


def open_fleet(
    actor: Actor,
    section: RLStageConfig,
    sampling: SamplingConfig,
    config: Config,
    take: Callable[[Mesh, int], Batch],
) -> AsynchronousRollouts:
    """The fleet that the section's `asynchronous` describes, on the devices of `actor.generate`."""
    options, samples = section.asynchronous, section.samples
    assert options is not None
    mesh, groups = actor.placement["generate"].mesh, section.rollout_batch // samples
    stream = PromptStream(lambda number: take(mesh, number), mesh, groups, samples)
    slots = config.rollout.slots or section.rollout_batch
    with jax.set_mesh(mesh):
        batch = actor.compiled("generate").continuous(sampling, config.rollout, samples, slots, config.data.max_prompt)
    rules = Rules(groups, options.staleness, options.update_steps)
    fleet = SliceFleet(
        batch, mesh, rules, options.on_new_weights, stream.prompt, samples=samples, limit=sampling.max_new_tokens
    )
    return AsynchronousRollouts(fleet, stream)
