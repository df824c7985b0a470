"""Places an algorithm's roles as a plan says, and other stages in their pipelines; prefetches their offloaded arrays.

Pipelines are imported where a plan has one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.meshes.graph import Call, Graph, Kind
from jrlhf.meshes.layout import GENERATE, SCORE, TRAIN, TRAIN_TP, Layout
from jrlhf.meshes.mesh import Device, make_mesh
from jrlhf.meshes.pipeline import FusedUpdates
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.roles.graph import home_of
from jrlhf.roles.placement import CallPlacement, RolePlacement, TransferCache

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (TRAIN, TRAIN_TP, GENERATE, SCORE)}


def place_roles(
    plan: Plan, graph: Graph, devices: Sequence[Device], *, fused: FusedUpdates | None = None, prefetch: bool = False
) -> dict[str, RolePlacement]:
    """Returns the placement of every role of a graph. "arithmetic", for calls without models, is the actor's mesh.

    fused: the updates that the plan fuses; None: it fuses none.
    """
    joint = None
    if fused is not None:
        from jrlhf.roles.pipelined import JointUpdate

        joint = JointUpdate(fused.table, {graph[name].role: numbers for name, numbers in fused.pipelines.items()}).begin

    def placed(name: str, placement: Placement) -> CallPlacement:
        if fused is None or name not in fused.pipelines:
            return call_placement(placement, devices)
        orders = [fused.table.pipelines[number].devices for number in fused.pipelines[name]]
        return call_placement(placement, devices, orders, joint)

    calls = {name: placed(name, placement) for name, placement in plan.placements.items()}
    trained = home_of(graph, "actor", plan)
    assert trained is not None, "every algorithm trains an actor"
    arithmetic, transfers = CallPlacement(calls[trained.name].mesh), TransferCache()
    ahead = Prefetch(graph) if prefetch else None

    def readers(call: Call) -> tuple[Mesh, ...]:
        reading = (other for other in graph if set(call.outputs) & set(other.inputs))
        return tuple(dict.fromkeys(calls.get(other.name, arithmetic).mesh for other in reading))

    def placement(role: str) -> RolePlacement:
        home = home_of(graph, role, plan)
        methods = {call.name.partition(".")[2]: call for call in graph if call.role == role}
        own = {method: calls[call.name] for method, call in methods.items() if call.name in calls}
        sent = {method: readers(call) for method, call in methods.items()}
        stored = arithmetic if home is None else calls[home.name].stored
        return RolePlacement(stored, own, sent, transfers, role, ahead)

    # A fused update trains the actor and, if there is one, the critic, which then has no separate call.
    return {role: placement(role) for role in dict.fromkeys(("actor", "critic", "arithmetic", *graph.roles))}


def call_placement(
    placement: Placement,
    devices: Sequence[Device],
    orders: Sequence[Sequence[int]] = (),
    joint: Callable[..., Any] | None = None,
) -> CallPlacement:
    """Returns the placement of a call on its part of the devices.

    orders: for each of several pipelines, the device groups of its stages; (): one pipeline, with a stage on each
    group. joint: see `CallPlacement`.
    """
    own = devices[placement.devices.start : placement.devices.stop]
    data, fsdp, tensor = placement.sizes
    whole = make_mesh(*placement.stored, devices=own)
    layout, parts = LAYOUTS[placement.layout], placement.micro_batches
    if placement.pipeline == 1:
        return CallPlacement(whole, layout, parts)
    from jrlhf.roles.pipelined import PipelinedPlacement

    orders = orders or [range(placement.pipeline)]
    count = data * fsdp * tensor // len(orders)
    starts = range(0, len(own), count)
    meshes = [make_mesh(data // len(orders), fsdp, tensor, devices=own[start : start + count]) for start in starts]
    groups = tuple(tuple(meshes[group] for group in order) for order in orders)
    last, parts = groups[0][-1], parts * len(orders)
    return PipelinedPlacement(last, layout, parts, joint, groups=groups, whole=whole, schedule=placement.schedule)


def place_stage(config: Config, stage: str, mesh: Mesh) -> RolePlacement:
    """Returns the placement of a stage that learns from fixed rows: its updates and scores run in the pipeline stages
    that its section sets, or on the whole mesh, where weights are stored in any case."""
    devices = list(mesh.devices.flat)
    whole = Placement(Slice(0, len(devices)), "train", *mesh.devices.shape)
    update, score = (call_placement(staged(config, stage, kind, whole), devices) for kind in ("train", "infer"))
    return RolePlacement(CallPlacement(mesh), {"update": update, "logprobs": score, "score": score})


def staged(config: Config, stage: str, kind: Kind, placement: Placement) -> Placement:
    """Returns the placement of a stage's calls of a kind, in the pipeline stages that the stage's section sets.

    placement: on all devices. The stages divide its `fsdp`, so weights are stored as without them.
    """
    section = config.sections[stage]
    pipeline, stages = getattr(section, "pipeline", None), getattr(section, "pipeline_stages", 1)
    if pipeline is None or stages == 1 or kind == "compute":
        return placement
    schedule, parts = pipeline.schedule if kind == "train" else "1f1b", config.update_section(stage)[1].micro_batches
    sizes = {"fsdp": placement.fsdp // stages, "pipeline": stages}
    return replace(placement, **sizes, micro_batches=parts, schedule=schedule)


class Prefetch:
    """Before each call, starts to copy to the devices the offloaded arrays of the next call, if it is another role's.

    Arrays of the same role are not prefetched: they would be on the devices twice until the call has ended.
    """

    def __init__(self, graph: Graph):
        calls = [call for call in graph if call.kind != "compute"]
        self._following = {earlier.name: later for earlier, later in pairwise(calls) if earlier.role != later.role}
        self._roles: Mapping[str, Any] = {}

    def bind(self, roles: Mapping[str, Any]) -> None:
        """Begins an iteration with these roles, by name."""
        self._roles = roles

    def before(self, role: str, method: str) -> None:
        """Starts to copy what the call after `role.method` needs. Does not wait."""
        following = self._following.get(f"{role}.{method}")
        if following is not None and following.role in self._roles:
            self._roles[following.role].prefetch(following.kind)
