"""`Problem`: the models that a fused schedule trains, with lower bounds of its time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from jrlhf.meshes.pipeline import Pipeline, Step


@dataclass(frozen=True)
class Model:
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
    """Pipelines that share devices. models: the model of each pipeline."""

    models: tuple[Model, ...]
    pipelines: tuple[Pipeline, ...]

    @property
    def devices(self) -> int:
        return 1 + max(device for pipeline in self.pipelines for device in pipeline.devices)

    @property
    def activations(self) -> list[float]:
        return [model.activations for model in self.models]

    def seconds(self, step: Step) -> float:
        return self.pipelines[step.model].seconds(step.kind)

    @property
    def bound(self) -> float:
        """Returns a lower bound of the seconds of all schedules: the larger of two bounds (RLHFuse, arXiv 2409.13221).

        - A pipeline alone: its fullest stage works without a break, between the first forwards and the last backwards.
        - A device: all its work, plus the shortest time until a first micro-batch reaches it, plus the shortest time
          from there back to a first stage for a last micro-batch.
        """
        alone = [(model.micro_batches + model.depth - 1) * (model.forward + model.backward) for model in self.models]
        return max(alone + [self._busy(device) for device in range(self.devices)])

    def _busy(self, device: int) -> float:
        here = [
            (model, pipeline.devices.index(device))
            for model, pipeline in zip(self.models, self.pipelines, strict=True)
            if device in pipeline.devices
        ]
        return (
            min(stage * model.forward for model, stage in here)
            + sum(model.micro_batches * (model.forward + model.backward) for model, _ in here)
            + min(stage * model.backward for model, stage in here)
        )

    @property
    def least_memory(self) -> float:
        """Returns the activations in flight on the fullest device if each pipeline ran 1F1B alone."""
        return max(min(model.depth, model.micro_batches) * model.activations for model in self.models)


def fuse(actor: Model, critic: Model) -> Problem:
    """Returns the problem in which the critic's pipelines run in the opposite direction of the actor's.

    The smallest number of devices that both depths divide is cut into whole pipelines of each model.
    """
    devices = range(lcm(actor.depth, critic.depth))
    pipelines = [*_cut(actor, devices), *_cut(critic, devices[::-1])]
    models = [actor] * (len(devices) // actor.depth) + [critic] * (len(devices) // critic.depth)
    return Problem(tuple(models), tuple(pipelines))


def _cut(model: Model, devices: Sequence[int]) -> list[Pipeline]:
    stages = (tuple(devices[start : start + model.depth]) for start in range(0, len(devices), model.depth))
    return [Pipeline(own, model.micro_batches, forward=model.forward, backward=model.backward) for own in stages]
