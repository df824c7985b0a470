"""Updates in the stages of a pipeline, and those of actor and critic in one table of operations, on the same devices.

With such a table, an algorithm calls one update after the other. The first one only begins, and its metrics are
pending; once both have begun they take turns, a minibatch of each at a time, until each has ended. A model whose
updates have ended, because it has fewer of them or stopped early, is left out of the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.meshes import Layout, transfer
from jrlhf.meshes.pipeline import Table
from jrlhf.models.pipeline import Gradients, PipelinePlacement, Stages, Task, run
from jrlhf.ppo.updates import Pipeline, Updates, finish
from jrlhf.roles.compiled import CompiledModel, Function
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.placement import CallPlacement, Pending

Metrics = dict[str, jax.Array]


class PendingMetrics(Pending[Metrics]):
    """Metrics of an update that has only begun. As an algorithm returns them, `a | b` are the metrics of both."""

    def on(self, mesh: Mesh) -> "PendingMetrics":
        return self  # updates are computed on meshes of their own

    def __or__(self, other: "Metrics | PendingMetrics") -> "PendingMetrics":
        return PendingMetrics(lambda: self.result() | _ready(other))

    def __ror__(self, other: Metrics) -> "PendingMetrics":
        return PendingMetrics(lambda: other | self.result())


@dataclass(frozen=True)
class PipelinedModel(CompiledModel):
    """The functions that train a model in the stages of a pipeline: those of the last stage, on its mesh."""

    pipeline: PipelinePlacement = field(kw_only=True)

    @property
    def pipelines(self) -> tuple[Stages, ...]:
        """The model in the stages of each of its pipelines."""
        model, layout = self.architecture, self.architecture.layout(self.compute.train_layout)
        shared = layout, self.compute.forward(model), self.pipeline.schedule
        return tuple(Stages(model.config, groups, *shared) for groups in (self.pipeline.groups, *self.pipeline.copies))

    @property
    def runs(self) -> Pipeline:
        """Runs updates in stages. Those of a table of several models are handed on: a `JointUpdate` runs them."""
        if self.pipeline.schedule == "fused":
            return lambda updates: updates
        return partial(finish, gradients_fn=self.pipelines[0].gradients)

    def _make(self, make: Function, layout: Layout, **keywords: Any) -> Function:
        model = self.architecture
        config, mesh = self.pipelines[0].tail, self.mesh.abstract_mesh  # of any pipeline
        return make(config, mesh, model.layout(layout), self.compute.forward(model), **keywords)


@dataclass(frozen=True)
class PipelinedPlacement(CallPlacement):
    """The stages that compute in the place of one mesh; `mesh` is that of the last one, where rows are read."""

    pipeline: PipelinePlacement = field(kw_only=True)

    @property
    def stored(self) -> CallPlacement:
        return CallPlacement(self.pipeline.whole, self.layout)

    def compiled(self, architecture: Architecture, compute: Compute) -> PipelinedModel:
        return PipelinedModel(**vars(super().compiled(architecture, compute)), pipeline=self.pipeline)


@dataclass(frozen=True)
class _Begun:
    """Updates that have begun. mesh: of their rows. keep: takes the state that they end with."""

    updates: Updates
    stages: tuple[Stages, ...]
    mesh: Mesh
    keep: Callable[[Any], None]


class JointUpdate:
    """Runs the updates of two roles in one table.

    table: of both. pipelines: by role: the numbers of its pipelines in the table, in the order of its `stages`.
    """

    def __init__(self, table: Table, pipelines: dict[str, range]):
        self._table, self._pipelines = table, pipelines
        self._begun: dict[str, _Begun] = {}
        self._metrics: dict[str, Metrics] = {}

    def begin(self, role: Any, updates: Updates) -> PendingMetrics:
        """Begins a bound role's updates, whose result is (state, metrics); runs them if the other role's wait."""
        placement = role.placement
        model = role.compiled("update")

        def keep(state: Any) -> None:
            role.state = state

        self._metrics.pop(placement.role, None)
        self._begun[placement.role] = _Begun(updates, model.pipelines, model.mesh, keep)
        end = partial(role.clock.run, "update", self._finish)
        if len(self._begun) == len(self._pipelines):
            end()

        def metrics() -> Metrics:
            if placement.role in self._begun:  # the other role's update was never called
                end()
            return self._metrics[placement.role]

        return PendingMetrics(metrics)

    def _finish(self) -> dict[str, Metrics]:
        """Runs what has begun to its end. Returns only metrics, by role: states are large."""
        begun, self._begun = self._begun, {}
        answers: dict[str, Any] = dict.fromkeys(begun)
        while answers:
            asked = {}
            for role, gradients in answers.items():
                try:
                    with jax.set_mesh(begun[role].mesh):
                        asked[role] = begun[role].updates.send(gradients)
                except StopIteration as end:
                    state, self._metrics[role] = end.value
                    begun[role].keep(state)
            answers = self._gradients({role: (begun[role].stages, *share) for role, share in asked.items()})
        return dict(self._metrics)

    def _gradients(self, asked: dict[str, tuple]) -> dict[str, Gradients]:
        """Differentiates one minibatch of each role. A role's pipelines have equal parts of its micro-batches."""
        tasks = {}
        for role, (copies, loss, params, rows, others, frozen) in asked.items():
            for part, (number, stages) in enumerate(zip(self._pipelines[role], copies, strict=True)):
                last = stages.meshes[-1]
                own, given = transfer((_part(rows, part, len(copies)), others), last)
                tasks[number] = Task(stages, loss, params, own, given, frozen)
        results = run(self._table, tasks)
        return {role: _sum([results[number] for number in self._pipelines[role]]) for role in asked}


def _part(rows: Any, part: int, parts: int) -> Any:
    """Micro-batches `part` of `parts` equal ones of [M, ...]."""
    count = jax.tree.leaves(rows)[0].shape[0] // parts
    return rows if parts == 1 else _on_its_mesh(_sliced, rows, part * count, count)


def _sum(shares: list[Gradients]) -> Gradients:
    return shares[0] if len(shares) == 1 else _on_its_mesh(_added, shares)


def _on_its_mesh(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    with jax.set_mesh(jax.tree.leaves(tree)[0].sharding.mesh):
        return function(tree, *others)


@partial(jax.jit, static_argnums=(1, 2))
def _sliced(rows: Any, start: int, count: int) -> Any:
    return jax.tree.map(lambda x: x[start : start + count], rows)


@jax.jit
def _added(shares: list[Gradients]) -> Gradients:
    return jax.tree.map(lambda *x: sum(x[1:], start=x[0]), *shares)


def _ready(metrics: Metrics | PendingMetrics) -> Metrics:
    return metrics.result() if isinstance(metrics, PendingMetrics) else metrics
