"""What a fused schedule has to train, and bounds of its time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from jrlhf.meshes.pipeline import Pipeline, Step


@dataclass(frozen=True)
class Model:
    """One model in its own pipeline.

    depth: stages, each on one device. micro_batches: of one pipeline. forward, backward: seconds of a micro-batch on a
    stage. activations: of a micro-batch in flight on a stage, in any unit.
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
        model = self.models[step.model]
        return model.forward if step.kind == "forward" else model.backward

    @property
    def bound(self) -> float:
        """Returns seconds that no schedule can undercut: the larger of two bounds (RLHFuse, arXiv 2409.13221).

        - A pipeline alone: its fullest stage works without a break, between the first forwards and the last backwards.
        - A device: all its work, after the shortest way of a first micro-batch to it, before the shortest way of a last
          micro-batch back to a first stage.
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
    """Returns the problem in which the critic's pipelines run against the actor's on the same devices.

    The smallest group of devices that both depths divide is cut into whole pipelines of each model.
    """
    devices = range(lcm(actor.depth, critic.depth))
    pipelines = [*_cut(actor, devices), *_cut(critic, devices[::-1])]
    models = [actor] * (len(devices) // actor.depth) + [critic] * (len(devices) // critic.depth)
    return Problem(tuple(models), tuple(pipelines))


def _cut(model: Model, devices: Sequence[int]) -> list[Pipeline]:
    starts = range(0, len(devices), model.depth)
    return [Pipeline(tuple(devices[start : start + model.depth]), model.micro_batches) for start in starts]
