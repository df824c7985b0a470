"""Pipelines: cuts a model into stages of consecutive layers, each on its own mesh, and runs a table of operations.

Between two calls a model is stored whole, on the mesh of all devices of its stages. For an update each stage gets a
copy of its layers (the first one also the embeddings, the last one final norm and head), and its gradients are sent
back. If embeddings are tied, the last stage has a copy of them, too, and the gradients of both are summed. For an
adapter only its own weights are copied: a stage's part of the base is a view of the base on its devices. A call that
scores has a table of forwards; its copies are in the compute dtype.

A stage keeps the input of a micro-batch from the forward to the last backward operation, which repeats the forward
pass, so memory in flight follows from the table alone (`meshes.pipeline.peak`). The last stage computes in its backward
operation only, or scores. `ForwardOptions.remat` decides what a backward operation keeps within its stage.

Programs are dispatched in the order of the table and run when their inputs are ready. A result is sent to another stage
when both stages are expected to be between two operations, because sending between processes is a joint program of both
(`meshes.pipeline.actions`). All processes walk through the whole table; in a process without a device of a stage its
programs do nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jrlhf.meshes.exchange import copied
from jrlhf.meshes.layout import Layout
from jrlhf.meshes.pipeline import SCHEDULES, Pipeline, PipelineStep, ScheduleName, Table, actions, forwards
from jrlhf.meshes.rows import join_rows, split_rows
from jrlhf.meshes.transfers import transfer
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.forward import ShardedForward
from jrlhf.models.lora import base_on
from jrlhf.models.options import ForwardOptions
from jrlhf.models.params import Params, cast_matrices

Loss = Callable[..., tuple[Array, dict[str, Array]]]  # (params, micro-batch, *others, *frozen) -> (loss, metrics)
_FIRST, _LAST = ("embedding", "positions"), ("final_norm", "unembedding", "value_head")


@dataclass(frozen=True)
class Stages:
    """The stages of a model.

    config: of the whole model. groups: meshes of the same shape; each has one stage, or several if interleaved.
    """

    config: ModelConfig
    groups: tuple[Mesh, ...]
    layout: Layout
    options: ForwardOptions = ForwardOptions()
    schedule: ScheduleName = "1f1b"

    def __post_init__(self) -> None:
        if len(self.meshes) > self.config.layers:
            raise ValueError(f"{self.config.layers} layers do not fill {len(self.meshes)} stages: use fewer stages")

    def table(self, micro_batches: int) -> Table:
        """The operations of a minibatch."""
        return SCHEDULES[self.schedule](len(self.groups), micro_batches)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each stage."""
        return tuple(self.groups[group] for group in self.table(len(self.groups)).pipelines[0].devices)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.meshes) - 1

    @property
    def tail(self) -> ModelConfig:
        """The config of the last stage."""
        return self.part(self.last)

    def layers(self, stage: int) -> range:
        """The layers of a stage. The numbers of layers of two stages differ by at most one."""
        return range(*(self.config.layers * number // len(self.meshes) for number in (stage, stage + 1)))

    def part(self, stage: int) -> ModelConfig:
        """The config of a stage."""
        layers, flags = self.layers(stage), self.config.local_layers
        return replace(self.config, layers=len(layers), local_layers=flags[layers.start : layers.stop])

    def cut(self, params: Params, stage: int, *, head: bool, dtype: Any = None) -> Params:
        """Returns a stage's part of weights, of an adapter or of its base, on the stage's mesh. head: whether the last
        stage needs tied embeddings as its head. dtype: of the copy's matrices; None: as they are stored.

        Every device has the base already, in the layout GENERATE, so a stage's part of it shares its memory.
        """
        names = (*(_FIRST if stage == 0 else ()), *(_LAST if stage == self.last else ()))
        if stage == self.last and head and self.config.tie_embeddings:
            names += ("embedding",)
        part = {name: params[name] for name in names if name in params}
        layers, own = params["layers"], self.layers(stage)
        if isinstance(layers, list):
            return base_on({**part, "layers": layers[own.start : own.stop]}, self.meshes[stage])
        part["layers"] = _on(_mesh(layers), _sliced, layers, own.start, own.stop)
        part = part if dtype is None else _on(_mesh(layers), _cast, part, dtype)
        return transfer(part, self.meshes[stage])

    def scores(
        self,
        function: Callable[..., Any],
        params: Params,
        rows: tuple[Array, ...],
        frozen: tuple[Params, ...],
        parts: int,
    ) -> Any:
        """Returns the results [B, ...] of a function of the last stage: (params, *rows, *frozen) -> arrays [b, ...].

        rows: tokens [B, T] and other arrays [B, ...] on the mesh of the last stage, where the results are, too. They
            are computed in `parts` strided parts, as by `map_parts`. frozen: the base under an adapter.
        """
        tokens, *others = _on(self.meshes[-1], _split, rows, parts)
        task = StageTask(self, function, params, _Rows(tokens, tuple(others)), (), frozen)
        return run(forwards(len(self.groups), parts), {0: task})[0]

    def gradients(
        self, loss: "Loss", params: Params, rows: Any, others: tuple[Any, ...], frozen: tuple[Params, ...]
    ) -> "Gradients":
        """Returns loss, metrics and gradients of a minibatch. See `StageTask` for the arguments."""
        task = StageTask(self, loss, params, rows, others, frozen)
        return run(self.table(task.micro_batches), {0: task})[0]


@dataclass(frozen=True)
class StageTask:
    """The training of one model on the micro-batches of one minibatch, or scores of micro-batches.

    loss: is differentiated by the weights of the last stage, which include its input, "hidden". Pass the same object
        for all minibatches, so that it compiles once.
    rows: a tree of arrays [M, b, ...] on the mesh of the last stage. Each micro-batch has `tokens` [b, T].
    others: further arguments of the loss, on that mesh. frozen: the base under an adapter.
    """

    stages: Stages
    loss: Loss
    params: Params
    rows: Any
    others: tuple[Any, ...] = ()
    frozen: tuple[Params, ...] = ()

    @property
    def micro_batches(self) -> int:
        """The number M of micro-batches."""
        return jax.tree.leaves(self.rows)[0].shape[0]


class Gradients(NamedTuple):
    loss: Array
    metrics: dict[str, Array]
    gradients: Params


class _Rows(NamedTuple):
    """The arguments of a function that scores."""

    tokens: Array
    others: tuple[Array, ...]


def run(table: Table, tasks: Mapping[int, StageTask]) -> dict[int, Any]:
    """Runs a table. Returns the `Gradients` of each task, sums over its micro-batches, on the mesh of its weights;
    gradients have the form of the weights. A task whose pipeline does not train has the loss's results for all rows.

    tasks: number of a pipeline of the table -> its task, with as many stages and micro-batches. Operations of pipelines
        without a task are left out.
    """
    running = {number: _Running(task, table.pipelines[number]) for number, task in tasks.items()}
    for step, sends in actions(table):
        if step.model in running:
            (running[step.model].send if sends else running[step.model].compute)(step)
    return {number: running.pop(number).result() for number in tasks}  # each frees its stages for the next one


class _Running:
    """A task's weights, arrays in flight, and sums, by stage."""

    def __init__(self, task: StageTask, pipeline: Pipeline):
        stages, head = task.stages, "value_head" not in task.params
        numbers, dtype = range(len(stages.meshes)), None
        if not pipeline.trains and stages.options.lora is None and stages.options.dtype != jnp.float32:
            dtype = stages.options.dtype
        self.task, self.pipeline = task, pipeline
        self.weights = [stages.cut(task.params, stage, head=head, dtype=dtype) for stage in numbers]
        *frozen, last = [tuple(stages.cut(base, stage, head=head) for base in task.frozen) for stage in numbers]
        self.others = [*frozen, (*task.others, *last)]
        rows = {mesh: transfer(task.rows, mesh) for mesh in stages.meshes}
        self.rows = [rows[mesh] for mesh in stages.meshes]
        self.functions = [*(_stage(stages, stage) for stage in numbers[:-1]), _last(task.loss, pipeline.trains)]
        own = zip(stages.meshes, self.weights, strict=True)
        self.sums = [_on(mesh, _zeros, weights) for mesh, weights in own] if pipeline.trains else []
        self.shares: list[tuple[Array, dict[str, Array]]] = []  # (loss, metrics) of each micro-batch
        # In flight, by stage and micro-batch: the stage's input, and the gradient of its output.
        self.inputs: dict[tuple[int, int], Params] = {(0, number): {} for number in range(task.micro_batches)}
        self.gradients: dict[tuple[int, int], Any] = {}
        self.outputs: dict[PipelineStep, Any] = {}  # arrays for other stages, and scores of the last one

    def compute(self, step: PipelineStep) -> None:
        """Dispatches one operation."""
        stage, place = step.stage, (step.stage, step.micro_batch)
        last = stage == self.task.stages.last
        arguments = self.weights[stage], self.inputs[place], self.rows[stage], step.micro_batch, self.others[stage]
        with jax.set_mesh(self.task.stages.meshes[stage]):
            if step.kind == "forward":
                if not (last and self.pipeline.trains):
                    self.outputs[step] = _forward(self.functions[stage], *arguments)
                if not self.pipeline.trains:
                    del self.inputs[place]
                return
            arguments = *arguments, self.gradients.setdefault(place, jnp.ones(()))
            if step.kind == "backward" and self.pipeline.split:
                of_input = _gradient_of_input(self.functions[stage], *arguments)
            else:
                of_input, self.sums[stage], shares = _gradients(self.functions[stage], self.sums[stage], *arguments)
                self.shares += [shares] if last else []
                del self.inputs[place], self.gradients[place]
            if step.kind == "backward" and stage:
                self.outputs[step] = of_input["hidden"]

    def send(self, step: PipelineStep) -> None:
        """Sends the operation's result, if it has one, to the stage that needs it."""
        forward = step.kind == "forward"
        stage = step.stage + (1 if forward else -1)
        if stage > self.task.stages.last or (x := self.outputs.pop(step, None)) is None:
            return
        # Both meshes divide the array in the same way, so each device copies its shard to one other device.
        (placed,) = copied([x], [NamedSharding(self.task.stages.meshes[stage], x.sharding.spec)])
        if forward:
            self.inputs[stage, step.micro_batch] = {"hidden": placed}
        else:
            self.gradients[stage, step.micro_batch] = placed

    def result(self) -> Any:
        if not self.pipeline.trains:
            return _on(self.task.stages.meshes[-1], _rejoined, list(self.outputs.values()))
        home = _mesh(self.task.params)
        sums, shares = transfer((self.sums, self.shares), home)
        loss, metrics = _on(home, _total, shares)
        return Gradients(loss, metrics, _on(home, _joined, self.task.params, sums))


Function = Callable[..., tuple[Any, Any]]
"""(weights and input, micro-batch, *others) -> (output, loss and metrics of the last stage)"""


@lru_cache(maxsize=1024)
def _stage(stages: Stages, stage: int) -> Function:
    """The function of any stage but the last. It returns the hidden states [B, T, D] in the compute dtype."""
    forward = ShardedForward(stages.part(stage), stages.meshes[stage], stages.layout, "lm", stages.options)
    hidden = forward.shard(forward.hidden)
    return lambda params, rows, *frozen: (hidden(params, rows.tokens, *frozen), ())


@lru_cache(maxsize=1024)
def _last(loss: Loss, trains: bool) -> Function:
    """The function of the last stage. It returns the loss, or scores."""
    if not trains:
        return lambda params, rows, *frozen: (loss(params, rows.tokens, *rows.others, *frozen), ())

    def function(*arguments: Any) -> tuple[Array, Any]:
        output, metrics = loss(*arguments)
        return output, (output, metrics)

    return function


def _apply(function: Function, weights: Params, given: Params, rows: Any, number: Array, others: Any) -> Any:
    micro_batch = jax.tree.map(lambda x: x[number], rows)
    return function({**weights, **given}, micro_batch, *others)


@partial(jax.jit, static_argnums=0)
def _forward(*arguments: Any) -> Any:
    return _apply(*arguments)[0]


def _pull(function: Function, weights: Params, given: Params, rows: Any, number: Array, others: Any, gradient: Array):
    """Returns the gradients of weights and input, given the gradient of the output; and the loss and metrics."""
    _, pull, shares = jax.vjp(
        lambda weights, given: _apply(function, weights, given, rows, number, others), weights, given, has_aux=True
    )
    return *pull(gradient), shares


@partial(jax.jit, static_argnums=0)
def _gradient_of_input(*arguments: Any) -> Params:
    return _pull(*arguments)[1]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _gradients(function: Function, sums: Params, *arguments: Any) -> tuple[Params, Params, Any]:
    of_weights, of_input, shares = _pull(function, *arguments)
    return of_input, jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, of_weights), shares


@jax.jit
def _zeros(weights: Params) -> Params:
    return jax.tree.map(lambda w: jnp.zeros_like(w, jnp.promote_types(w.dtype, jnp.float32)), weights)


@jax.jit
def _total(shares: list[tuple[Array, dict[str, Array]]]) -> tuple[Array, dict[str, Array]]:
    return jax.tree.map(lambda *x: sum(x), *shares)


@jax.jit
def _joined(params: Params, parts: list[Params]) -> Params:
    """Joins the stages' gradients to one tree, in the dtypes of `params`. A tied embedding is in two stages."""

    def join(name: str) -> Any:
        trees = [part[name] for part in parts if name in part]
        if name == "layers":
            return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
        return jax.tree.map(lambda *x: sum(x[1:], start=x[0]), *trees)

    return jax.tree.map(lambda p, g: g.astype(p.dtype), params, {name: join(name) for name in params})


@jax.jit
def _rejoined(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *x: join_rows(jnp.stack(x)), *parts)


@partial(jax.jit, static_argnums=(1, 2))
def _sliced(layers: Params, start: int, stop: int) -> Params:
    return jax.tree.map(lambda x: x[start:stop], layers)


_cast = jax.jit(cast_matrices, static_argnums=1)
_split = jax.jit(split_rows, static_argnums=1)


def _mesh(tree: Any) -> Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh


def _on(mesh: Mesh, function: Callable[..., Any], *arguments: Any) -> Any:
    with jax.set_mesh(mesh):
        return function(*arguments)
