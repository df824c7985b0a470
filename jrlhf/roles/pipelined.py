"""Calls of pipelined models. Updates may be fused: actor and critic on the same devices with one table of operations.

With fused updates an algorithm still calls one update after the other. The first call only starts, and its metrics are
pending. The second call runs both: one minibatch of each role at a time, until both roles have ended. A role that ends
first, because it has fewer updates or stops early, is then left out of the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.meshes.layout import Layout
from jrlhf.meshes.pipeline import ScheduleName, Table
from jrlhf.meshes.transfers import transfer
from jrlhf.models.params import Params
from jrlhf.models.pipeline import Gradients, Stages, StageTask, run
from jrlhf.ppo.updates import Minibatch, Pipeline, Updates, advance_on_host, draw_on_host, run_on_host
from jrlhf.roles.compiled import CompiledModel, Function
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.placement import CallPlacement, Pending, ready

Metrics = dict[str, jax.Array]


class PendingMetrics(Pending[Metrics]):
    """Metrics of an update that has only begun. `a | b` merges the metrics of two updates, as algorithms do."""

    def __or__(self, other: "Metrics | PendingMetrics") -> "PendingMetrics":
        return PendingMetrics(lambda: self.result() | ready(other))

    def __ror__(self, other: Metrics) -> "PendingMetrics":
        return PendingMetrics(lambda: other | self.result())


@dataclass(frozen=True)
class PipelinedModel(CompiledModel):
    """The functions that train or score with a pipelined model. They get rows on the mesh of the last stage.

    Those that train are functions of the last stage. groups, schedule: as those of a `PipelinedPlacement`.
    """

    groups: tuple[tuple[Mesh, ...], ...] = field(kw_only=True)
    schedule: ScheduleName = field(kw_only=True)

    @property
    def pipelines(self) -> tuple[Stages, ...]:
        """The stages of each of the model's pipelines, for training."""
        return tuple(self._stages(groups, self.compute.train_layout) for groups in self.groups)

    @property
    def runs(self) -> Pipeline:
        """Runs the updates in stages. Fused updates are returned as they are: a `JointUpdate` runs them."""
        if self.schedule == "fused":
            return lambda updates: updates
        return partial(run_on_host, gradients_of=self.pipelines[0].gradients)

    def score_logprobs_with_base(self, *, temperature: float, span: int) -> Function:
        """Makes the function of a whole model in two passes: the second one is that of the bare base."""
        architecture = replace(self.architecture, lora=None)
        adapted, bare = (
            model.score_logprobs(temperature=temperature, span=span)
            for model in (self, replace(self, architecture=architecture))
        )

        def both(adapter: Params, *rows_and_base: Any) -> tuple[jax.Array, ...]:
            *rows, base = rows_and_base
            return *adapted(adapter, *rows, base), bare(base, *rows)[0]

        return both

    def _stages(self, groups: tuple[Mesh, ...], layout: Layout) -> Stages:
        model = self.architecture
        return Stages(model.config, groups, model.layout(layout), self.compute.forward(model), self.schedule)

    def _make(self, make: Function, layout: Layout, **keywords: Any) -> Function:
        model = self.architecture
        config, mesh = self.pipelines[0].tail, self.mesh.abstract_mesh  # the same for all pipelines
        return make(config, mesh, model.layout(layout), self.compute.forward(model), **keywords)

    def _scoring(self, function: Function, *, arrays: int = 0, reads_lengths: bool = False) -> Function:
        stages = self._stages(self.groups[0], self.compute.score_layout)

        def score(params: Params, tokens: jax.Array, lengths: jax.Array, *others: Any) -> Any:
            rows = (tokens, *([lengths] if reads_lengths else []), *others[:arrays])
            return stages.scores(function, params, rows, others[arrays:], self.compute.score_parts)

        return score


@dataclass(frozen=True)
class PipelinedPlacement(CallPlacement):
    """The placement of a call that runs in pipeline stages. `mesh` is the mesh of the last stage, which reads rows.

    groups: of each of the model's pipelines, the meshes of its device groups, in the order of layers. Several pipelines
        compute different micro-batches in the same table.
    whole: the mesh of all devices, where weights are stored.
    schedule: the order of the steps, as in a `Placement`.
    """

    groups: tuple[tuple[Mesh, ...], ...] = field(kw_only=True)
    whole: Mesh = field(kw_only=True)
    schedule: ScheduleName = field(kw_only=True)

    @property
    def stored(self) -> CallPlacement:
        return CallPlacement(self.whole, self.layout)

    def compiled(self, architecture: Architecture, compute: Compute) -> PipelinedModel:
        model = super().compiled(architecture, compute)
        return PipelinedModel(**vars(model), groups=self.groups, schedule=self.schedule)


@dataclass(frozen=True)
class _Begun:
    """Updates of a bound role that have begun. make: makes them. mesh: the mesh of their rows."""

    role: Any
    make: Callable[[], Updates]
    stages: tuple[Stages, ...]
    mesh: Mesh


@dataclass(frozen=True)
class _Run:
    """Updates between two tables. rows: those of the minibatch, in micro-batches."""

    updates: Updates
    carry: Any
    minibatch: Minibatch
    rows: Any


class JointUpdate:
    """Runs the updates of two roles by one table of operations.

    pipelines: role -> the numbers of its pipelines in the table, in the order of its `stages`.
    """

    def __init__(self, table: Table, pipelines: dict[str, range]):
        self._table, self._pipelines = table, pipelines
        self._begun: dict[str, _Begun] = {}
        self._metrics: dict[str, Metrics] = {}

    def begin(self, role: Any, make: Callable[[], Updates]) -> PendingMetrics:
        """Begins a bound role's updates, which `make` makes. Runs both roles' once both have begun."""
        name, model = role.placement.role, role.compiled("update")
        self._metrics.pop(name, None)
        self._begun[name] = _Begun(role, make, model.pipelines, model.mesh)
        end = partial(role.clock.run, "update", self._finish)
        if len(self._begun) == len(self._pipelines):
            end()

        def metrics() -> Metrics:
            if name in self._begun:  # the other role's update was never called
                end()
            return self._metrics[name]

        return PendingMetrics(metrics)

    def _finish(self) -> dict[str, Metrics]:
        """Runs the begun updates to their end. Returns only metrics, by role, because states are large."""
        begun, self._begun = self._begun, {}
        runs = dict[str, _Run]()
        for name, own in begun.items():
            with jax.set_mesh(own.mesh):
                updates = own.make()
                runs[name] = _Run(updates, updates.start, *draw_on_host(updates, updates.start))
        while runs:
            gradients = self._gradients(begun, runs)
            for name, present in list(runs.items()):
                with jax.set_mesh(begun[name].mesh):
                    updates = present.updates
                    carry, goes_on = advance_on_host(updates, present.carry, present.minibatch, gradients[name])
                    if goes_on:
                        runs[name] = _Run(updates, carry, *draw_on_host(updates, carry))
                    else:
                        del runs[name]
                        state, self._metrics[name] = updates.end(carry)
                        begun[name].role.replace_state(state)
        return dict(self._metrics)

    def _gradients(self, begun: dict[str, _Begun], runs: dict[str, _Run]) -> dict[str, Gradients]:
        """Differentiates one minibatch of each role. A role's pipelines get equal parts of its micro-batches."""
        tasks = {}
        for name, present in runs.items():
            copies, frozen, loss = begun[name].stages, present.updates.frozen, present.updates.objective.loss
            for part, (number, stages) in enumerate(zip(self._pipelines[name], copies, strict=True)):
                rows = _part(present.rows, part, len(copies))
                own, given = transfer((rows, present.minibatch.others), stages.meshes[-1])
                tasks[number] = StageTask(stages, loss, present.carry.params, own, given, frozen)
        results = run(self._table, tasks)
        return {name: _sum([results[number] for number in self._pipelines[name]]) for name in runs}


def _part(rows: Any, part: int, parts: int) -> Any:
    """Returns part number `part` of `parts` equal parts of the micro-batches [M, ...]."""
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
