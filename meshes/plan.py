"""`Plan`: the devices and the partitioning of each call of a graph, as plain data."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import yaml

from jrlhf.meshes.pipeline import ScheduleName

LayoutName = Literal["train", "train_tp", "generate", "score"]
_SIZES = ("data", "fsdp", "tensor", "pipeline", "micro_batches")  # the sizes of a placement


@dataclass(frozen=True, order=True)
class Slice:
    """Neighbouring devices of a run: `count` of them, from number `start` on."""

    start: int
    count: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1:
            raise ValueError(f"devices {self}: start must be at least 0 and count at least 1")

    def __str__(self) -> str:
        return str(self.start) if self.count == 1 else f"{self.start}-{self.stop - 1}"

    @classmethod
    def of(cls, text: Any) -> "Slice":
        """Parses the result of `str`. Raises ValueError for other texts."""
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", str(text), re.ASCII)
        if match is None:
            raise ValueError(f"devices={str(text)[:20]} must be a number or a range such as 0-7")
        start, last = int(match[1]), int(match[2] or match[1])
        return cls(start, last + 1 - start)

    @property
    def stop(self) -> int:
        """One more than the index of the last device."""
        return self.start + self.count

    def first(self, count: int) -> "Slice":
        """Returns the first devices of these."""
        return Slice(self.start, count)

    def overlaps(self, other: "Slice") -> bool:
        """True if a device is in both."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Placement:
    """The devices of one call, and how its model and rows are divided over them.

    devices: the slice; `data * fsdp * tensor * pipeline` is its count.
    layout: the name of a layout in `meshes.layout`. data, fsdp, tensor: sizes of the mesh axes.
    pipeline: number of groups of neighbouring devices, each with a mesh data x fsdp x tensor, over which the layers are
        divided. schedule: the order of an update; see `meshes.pipeline`.
    micro_batches: number of parts in which a device computes its rows (of a minibatch, if the call trains).
    """

    devices: Slice
    layout: LayoutName
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    schedule: ScheduleName = "1f1b"

    def __post_init__(self) -> None:
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor, "pipeline": self.pipeline}
        for name, size in (sizes | {"micro_batches": self.micro_batches}).items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if self.schedule not in ScheduleName.__args__:
            raise ValueError(f"schedule={self.schedule} must be one of {', '.join(ScheduleName.__args__)}")
        if self.pipeline == 1 and self.schedule != "1f1b":
            raise ValueError(f"schedule={self.schedule} has no effect with pipeline=1: leave it out")
        if prod(sizes.values()) != self.devices.count:
            described = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(
                f"devices {self.devices} are {self.devices.count}, and {described} is {prod(sizes.values())}: choose "
                f"sizes whose product is {self.devices.count}"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Mesh shape as (data, fsdp, tensor)."""
        return self.data, self.fsdp, self.tensor

    @property
    def groups(self) -> int:
        """The number of groups of `tensor` devices, each of which generates rows of its own."""
        return self.devices.count // self.tensor

    @property
    def slices(self) -> int:
        """The number of devices that compute a layer in slices and share their rows; 1 if each computes it whole."""
        return self.tensor if self.layout in ("generate", "train_tp") else 1

    @property
    def stored(self) -> tuple[int, int, int]:
        """Shape of the mesh on which weights are stored between calls: `fsdp` spans the stages of a pipeline."""
        return self.data, self.fsdp * self.pipeline, self.tensor


@dataclass(frozen=True)
class Plan:
    """A placement for every call of a graph that has a model. Arithmetic between them runs where the actor trains.

    name: "colocate", "split", "standalone", or how it was made.
    """

    name: str
    placements: Mapping[str, Placement] = field(default_factory=dict)  # by the call's name

    def __getitem__(self, call: str) -> Placement:
        return self.placements[call]

    @property
    def fused(self) -> tuple[str, ...]:
        """The calls that train by a common table."""
        return tuple(sorted(name for name, place in self.placements.items() if place.schedule == "fused"))

    @property
    def devices(self) -> int:
        """The number of devices that the plan needs: one more than the index of the last."""
        return max(placement.devices.stop for placement in self.placements.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data from which `plan_of` makes an equal plan."""
        calls = {}
        for name, placement in self.placements.items():
            sizes = {axis: getattr(placement, axis) for axis in _SIZES if getattr(placement, axis) != 1}
            schedule = {"schedule": placement.schedule} if placement.schedule != "1f1b" else {}
            calls[name] = {"devices": str(placement.devices), "layout": placement.layout, **sizes, **schedule}
        return {"name": self.name, "calls": calls}

    def to_yaml(self) -> str:
        """Returns the plan as a run writes it and a user may write it."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def plan_of(mapping: Any) -> Plan:
    """Parses a plan that `as_dict` or a user wrote; numbers may be text. Raises ValueError, one sentence, for wrong
    entries."""
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("calls"), Mapping) or not mapping["calls"]:
        raise ValueError("a plan must hold `name` and `calls`, the calls' placements by name")
    unknown = sorted(mapping.keys() - {"name", "calls"})
    if unknown:
        raise ValueError(f"a plan holds `name` and `calls`, not {', '.join(unknown)}")
    return Plan(str(mapping.get("name", "file")), {str(k): _placement(str(k), v) for k, v in mapping["calls"].items()})


def _placement(call: str, mapping: Any) -> Placement:
    if not isinstance(mapping, Mapping) or not {"devices", "layout"} <= mapping.keys():
        raise ValueError(f"call {call} of the plan must hold `devices` (0-7) and `layout`")
    unknown = sorted(mapping.keys() - {"devices", "layout", *_SIZES, "schedule"})
    if unknown:
        raise ValueError(
            f"call {call} of the plan holds devices, layout, {', '.join(_SIZES)}, schedule, not {', '.join(unknown)}"
        )
    if mapping["layout"] not in LayoutName.__args__:
        raise ValueError(
            f"call {call} of the plan has layout={mapping['layout']}: it must be {', '.join(LayoutName.__args__)}"
        )
    written = {axis: str(mapping.get(axis, 1)) for axis in _SIZES}
    for axis, size in written.items():
        if not re.fullmatch(r"-?\d{1,9}", size, re.ASCII):
            raise ValueError(f"call {call} of the plan has {axis}={size[:20]}: it must be a whole number")
    try:
        sizes = {axis: int(size) for axis, size in written.items()}
        schedule: Any = str(mapping.get("schedule", "1f1b"))
        return Placement(Slice.of(mapping["devices"]), mapping["layout"], **sizes, schedule=schedule)
    except ValueError as error:
        raise ValueError(f"call {call} of the plan: {error}") from None


def segments(slices: Iterable[Slice]) -> list[Slice]:
    """Divides the devices of these slices into the fewest groups that each slice contains whole or not at all."""
    ranges = set(slices)
    bounds = sorted({bound for devices in ranges for bound in (devices.start, devices.stop)})
    groups = [Slice(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [group for group in groups if any(group.overlaps(devices) for devices in ranges)]


def nested(slices: Sequence[Slice]) -> bool:
    """Returns whether any two slices are equal, disjoint, or one within the other."""
    return not any(one.start < two.start < one.stop < two.stop for one in slices for two in slices)
