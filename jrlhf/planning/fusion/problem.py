"""`Problem`: the models that a fused schedule trains, with lower bounds of its time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from jrlhf.meshes.pipeline import Pipeline, PipelineStep


@dataclass(frozen=True)
class FusedModel:
    """One model in its own pipeline.

    depth: number of stages, each on one device. micro_batches: number per pipeline. forward, backward: seconds of a
    micro-batch on a stage. activations: memory of a micro-batch in flight on a stage, in any unit.
    """

    depth: int
    micro_batches: int
    forward: float
    backward: float
    activations: float = 1.0


@dataclass(frozen=True)
class Problem:
    """Pipelines that share devices. activations: of each pipeline, the memory of a micro-batch in flight on a stage."""

    pipelines: tuple[Pipeline, ...]
    activations: tuple[float, ...]

    @property
    def devices(self) -> int:
        return 1 + max(device for pipeline in self.pipelines for device in pipeline.devices)

    def seconds(self, step: PipelineStep) -> float:
        return self.pipelines[step.model].seconds(step.kind)

    @property
    def bound(self) -> float:
        """Returns a lower bound of the seconds of all schedules: the larger of two bounds (RLHFuse, arXiv 2409.13221).

        - A pipeline alone: its fullest stage works without a break, between the first forwards and the last backwards.
        - A device: all its work, plus the shortest time until a first micro-batch reaches it, plus the shortest time
          from there back to a first stage for a last micro-batch.
        """
        alone = [(one.micro_batches + len(one.devices) - 1) * (one.forward + one.backward) for one in self.pipelines]
        return max(alone + [self._busy(device) for device in range(self.devices)])

    def _busy(self, device: int) -> float:
        here = [(one, one.devices.index(device)) for one in self.pipelines if device in one.devices]
        return (
            min(stage * one.forward for one, stage in here)
            + sum(one.micro_batches * (one.forward + one.backward) for one, _ in here)
            + min(stage * one.backward for one, stage in here)
        )

    @property
    def least_memory(self) -> float:
        """Returns the activations in flight on the fullest device if each pipeline ran 1F1B alone."""
        pairs = zip(self.pipelines, self.activations, strict=True)
        return max(min(len(one.devices), one.micro_batches) * size for one, size in pairs)


def fuse(actor: FusedModel, critic: FusedModel) -> Problem:
    """Returns the problem in which the critic's pipelines run in the opposite direction of the actor's.

    The smallest number of devices that both depths divide is cut into whole pipelines of each model.
    """
    devices = range(lcm(actor.depth, critic.depth))
    first, second = _cut(actor, devices), _cut(critic, devices[::-1])
    activations = [actor.activations] * len(first) + [critic.activations] * len(second)
    return Problem((*first, *second), tuple(activations))


def _cut(model: FusedModel, devices: Sequence[int]) -> list[Pipeline]:
    stages = (tuple(devices[start : start + model.depth]) for start in range(0, len(devices), model.depth))
    return [Pipeline(own, model.micro_batches, forward=model.forward, backward=model.backward) for own in stages]
