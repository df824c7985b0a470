"""A rollout process: executes the commands of `ProcessWorkers` with logical workers on its own devices.

The channel is a socket whose other end only the parent has. Messages are JSON; large arrays are in `SharedArrays`.

    parent: the description of `describe`          process: {program}
    parent: {start: path of workers' states}       process: as to `decode`, without progress; `take` must follow
    parent: {base: path of weights}                process: []; with an adapter, which then are the weights of `take`
    parent: {take: path, number, base, again}      process: for each worker [identities before, identities after]
    parent: {identities: null}                     process: [identities of the weights that draw]
    parent: {decode: prompts of each worker}       process: for each worker {progress, room, running}
    parent: {states: null}                         process: path of states

The file of `take` has the weights of the update with that number, or their changes since the update `base`.
"""

import faulthandler
import os
import signal
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, astuple
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jrlhf
from jrlhf.config.parse import build
from jrlhf.config.schema import DeviceConfig
from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.mesh import make_mesh
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.generation.continuous import ContinuousBatch, Prompt, RowProgress
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.lora import LoRAConfig, lora_shardings
from jrlhf.models.options import ForwardOptions
from jrlhf.models.params import Params, param_shardings
from jrlhf.models.quantize import int8_shardings
from jrlhf.roles.generating import decoder_of
from jrlhf.roles.model import Architecture, Compute
from jrlhf.rollouts.processes.shared import SharedArrays, patched, read
from jrlhf.rollouts.slices import SliceWorkers
from jrlhf.rollouts.state import saved
from jrlhf.run.child import channel_to_parent, receive, send
from jrlhf.run.devices import select
from jrlhf.run.files import decode, encode

# Settings of JAX that belong to a process and not to its programs.
_OWN = ("jax_platforms", "jax_num_cpu_devices", "jax_cpu_collectives_implementation", "jax_cuda_visible_devices")


@cache
def program() -> str:
    """Returns a digest of the program's files and JAX's version, as they were at the first call."""
    digest = sha256(jax.__version__.encode())
    root = Path(str(jrlhf.__file__)).parent
    for folder in (root, *(root / name for name in ("kernels", "meshes", "models", "ppo"))):
        for path in sorted(folder.resolve().rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def describe(
    mesh: Mesh, model: Architecture, compute: Compute, sampling: SamplingConfig, schedule: Schedule, **numbers: int
) -> dict[str, Any]:
    """Returns the settings that a process needs.

    numbers: responses to a prompt, `samples`; decode slots of a logical worker, `slots`; width of the prompts' array.
    """
    settings = {name: x for name, x in jax.config.values.items() if isinstance(x, bool | int | float | str | None)}
    return {
        "platform": mesh.devices.flat[0].platform,
        "mesh": mesh.devices.shape,
        "model": asdict(model.config),
        "lora": model.lora and asdict(model.lora),
        "dtype": compute.dtype.name,
        "attention": compute.options.attention,
        "sampling": asdict(sampling),
        "schedule": asdict(schedule),
        "settings": {name: value for name, value in settings.items() if name not in _OWN},
        **numbers,
    }


def main(descriptor: int) -> None:
    """Serves the parent at the other end of the socket `descriptor` until it is gone."""
    channel = channel_to_parent(descriptor)
    faulthandler.enable()
    try:
        setup = decode(receive(channel))
        faulthandler.dump_traceback_later(setup["deadline"], exit=True)
        process = _Process(setup)
        answer: Any = {"program": program()}
        while True:
            faulthandler.cancel_dump_traceback_later()
            send(channel, encode({"answer": encode(answer)}).encode())
            ((command, argument),) = decode(receive(channel)).items()
            faulthandler.dump_traceback_later(setup["deadline"], exit=True)
            process.file = None  # the parent opened it before it asked again
            with jax.set_mesh(process.mesh):
                answer = getattr(process, command)(argument)
    except ConnectionError:  # the parent is gone
        os.killpg(0, signal.SIGKILL)


class _Process:
    """The logical workers of a process. Each public method is a command."""

    def __init__(self, setup: Mapping[str, Any]):
        for name, value in setup["settings"].items():
            if jax.config.values.get(name) != value:
                jax.config.update(name, value)
        sizes, platform = setup["mesh"], setup["platform"]
        select(DeviceConfig(platform=platform, simulated=int(np.prod(sizes)) if platform == "cpu" else None))
        self.mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
        model, lora = build(ModelConfig, setup["model"]), setup["lora"] and build(LoRAConfig, setup["lora"])
        sampling, schedule = build(SamplingConfig, setup["sampling"]), build(Schedule, setup["schedule"])
        self._shardings = param_shardings(model, self.mesh, GENERATE)
        self._adapter_shardings = lora and lora_shardings(model, self.mesh, lora)
        self._base: Params = {}  # the frozen weights under an adapter
        self._present: tuple[int | None, Params] = None, {}  # number of the last update, and its weights
        compute = Compute(ForwardOptions(dtype=jnp.dtype(setup["dtype"]), attention=setup["attention"]))
        with jax.set_mesh(self.mesh):
            decoder = decoder_of(Architecture(model, lora), self.mesh, compute, sampling, setup["samples"])
            sizes = setup["slots"], setup["width"]
            self._batch = ContinuousBatch.of_size(decoder, self.mesh, schedule, *sizes)  # with all workers' programs
            self._state_shardings = jax.tree.map(lambda leaf: leaf.sharding, saved(self._batch.fresh(), self.mesh))
        self._workers, self.file = SliceWorkers([]), None  # file: the states that the last answer names

    def start(self, path: str) -> Any:
        arrays, (shardings, treedef) = read(path), jax.tree.flatten(self._state_shardings)
        shares = [arrays[first : first + len(shardings)] for first in range(0, len(arrays), len(shardings))]
        self._workers = SliceWorkers([copy(self._batch) for _ in shares])  # frees the states of former workers
        self._workers.start([treedef.unflatten(to_devices(own, shardings)) for own in shares])
        return self._answers([[] for _ in shares])

    def base(self, path: str) -> list:
        self._base = {}  # frees the memory of weights that a former command brought
        self._base = _placed(path, self._shardings)
        return []

    def take(self, argument: Mapping[str, Any]) -> Any:
        number, present = self._present
        if argument["base"] is None:
            own = _placed(argument["path"], self._adapter_shardings or self._shardings)
        elif argument["base"] == number:
            own = _changed(argument["path"], present)
        else:
            raise ValueError(f"these are changes of update {argument['base']}, and update {number} is here")
        self._present = argument["number"], own
        weights = (own, {}) if self._adapter_shardings is None else (self._base, own)
        again = None if argument["again"] is None else {row[0]: Prompt(*row) for row in argument["again"]}
        return to_host(self._workers.take(weights, again)) * len(self._workers.batches)

    def identities(self, argument: None) -> Any:
        return to_host(self._workers.identities())

    def decode(self, prompts: Any) -> Any:
        return self._answers(self._workers.decode_each([[Prompt(*row) for row in own] for own in prompts]))

    def states(self, argument: None) -> str:
        self.file = SharedArrays.of(to_host(jax.tree.leaves(self._workers.states())))
        return self.file.path

    def _answers(self, progress: Sequence[Sequence[RowProgress]]) -> list[dict[str, Any]]:
        return [
            {"progress": [astuple(row) for row in rows], "room": batch.room, "running": len(batch.rows)}
            for batch, rows in zip(self._workers.batches, progress, strict=True)
        ]


def _placed(path: str, shardings: Any) -> Any:
    """Places the arrays of a file as the tree `shardings` says. Matrices may be int8."""
    arrays = read(path)
    quantised = any(array.dtype == np.int8 for array in arrays)
    leaves, treedef = jax.tree.flatten(int8_shardings(shardings) if quantised else shardings)
    return treedef.unflatten([to_devices(array, leaf) for array, leaf in zip(arrays, leaves, strict=True)])


def _changed(path: str, present: Params) -> Params:
    """Returns the weights after applying the changes in a file."""
    leaves, treedef = jax.tree.flatten(present)
    arrays = patched(to_host(leaves), read(path))
    return treedef.unflatten(to_devices(arrays, [leaf.sharding for leaf in leaves]))
