"""The hardware at hand, measured: one layer, head, step, update, collectives at sizes that are powers of two.

What the parts of a call cost then replaces arithmetic (`units.Physical`) in
`times.call_seconds`; how often each is computed, and between which devices bytes move, stays the same. It takes a few
minutes and is kept in a file, for the device, its number and JAX's version, and for the model shapes that it has seen.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax

from jrlhf.errors import UserError
from jrlhf.meshes.hardware import Cluster, Hardware
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import LayoutName
from jrlhf.models import ModelConfig
from jrlhf.models.params import HeadKind
from jrlhf.models.remat import Remat
from jrlhf.planning import measure
from jrlhf.planning.measured import DEPTHS, Profile, ends_curve, generation_curve, layer_curve, shape_key
from jrlhf.planning.workload import Workload
from jrlhf.run.files import write_atomic

_MIB = 2**20
_BYTES = tuple(4.0**power for power in range(3, 12))  # of collectives: 64 B to 4 MiB


def default_path(devices: Sequence[Device]) -> Path:
    """Where the profile of these devices is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jrlhf"
    kind = re.sub(r"[^a-z0-9]+", "-", devices[0].device_kind.lower()).strip("-")
    return cache / f"profile-{kind}-{len(devices)}-{jax.__version__}.json"


def load(path: Path) -> Profile | None:
    """The profile in a file; None where there is none.

    Raises:
        UserError: the file is not a profile.
    """
    if not path.exists():
        return None
    try:
        told = json.loads(path.read_text())
        curves = {name: tuple((float(x), float(y)) for x, y in curve) for name, curve in told["curves"].items()}
        busy = {int(count): float(seconds) for count, seconds in told["busy"].items()}
        return Profile(str(told["device"]), int(told["count"]), str(told["version"]), busy, curves)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a profile of devices: remove it, and it is measured anew") from error


def save(profile: Profile, path: Path) -> None:
    """Writes a profile, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(profile), indent=1) + "\n")


def profile(
    workload: Workload,
    devices: Sequence[Device],
    *,
    remats: Sequence[Remat] = (),
    layouts: Collection[LayoutName] = ("train", "score", "generate"),
    known: Profile | None = None,
    repeats: int = 9,
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Measures what the workload's calls consist of, but for what is `known`.

    remats: remat policies to measure training under, beside the workload's.
    layouts: those that calls may have; others have layers of their own to measure. say: is told what is measured.
    """
    count, version = len(devices), jax.__version__
    if known is not None and (known.device, known.count, known.version) == (devices[0].device_kind, count, version):
        curves, busy = dict(known.curves), dict(known.busy)
    else:
        curves, busy = {}, _busy(devices, repeats)
    for name, points in _questions(workload, devices, tuple({workload.remat, *remats}), layouts):
        missing = [(size, make) for size, make in points if size not in dict(curves.get(name, ()))]
        if missing:
            say(name)
            programs = [measure.nothing(devices), *(make() for _, make in missing)]
            idle, *taken = measure.seconds(programs, repeats)
            found = dict(curves.get(name, ()))
            if name == "call":
                found = {1.0: idle}
            else:
                found |= {size: max(all_ - idle, 1e-9) for (size, _), all_ in zip(missing, taken, strict=True)}
            curves[name] = tuple(sorted(found.items()))
    return Profile(devices[0].device_kind, count, version, busy, curves)


def cluster_of(profile: Profile, memory: float) -> Cluster:
    """The devices as hardware: what was reached, so that every fraction is 1. memory: bytes of a device.

    For what arithmetic prices (reallocation, transfers, what-if questions); calls are priced by `Measured`.
    """
    curves, count = profile.curves, profile.count
    ((sent, offloaded),), ((copied, copying),) = curves["host"], curves["copy"]
    bandwidth, link, latency = copied / copying, copied / copying, 0.0
    if count > 1:  # from a gather of little and one of much
        (_, least), (size, seconds) = curves["gather 2"][0], curves["gather 2"][-1]
        latency = least / measure.CHAINED
        link = size / 2 / max(seconds / measure.CHAINED - latency, 1e-9)
    operations = measure.BUSY_OPERATIONS / profile.busy[count]
    local = Hardware(
        profile.device,
        memory,
        bandwidth,
        bfloat16=operations,
        float32=operations,
        node=count,
        link=link,
        network=link,
        host=sent / offloaded,
        infer=1.0,
        train=1.0,
        decode=1.0,
        launch=0.0,
        latency=latency,
        collective=1.0,
        stream=1.0,
    )
    return Cluster(local, count)


def _busy(devices: Sequence[Device], repeats: int) -> dict[int, float]:
    sizes = [size for size in _powers(len(devices))]
    taken = measure.seconds([measure.busy(devices[:size]) for size in sizes], repeats)
    return dict(zip(sizes, taken, strict=True))


# ---- what is measured: the name of each curve, its sizes, and what to run for each

_Pass = tuple[bool, Remat, int]  # whether it trains, what it keeps, tokens of a row
Curves = Iterator[tuple[str, Sequence[tuple[float, Callable[[], measure.Program]]]]]


def _questions(
    workload: Workload, devices: Sequence[Device], remats: Sequence[Remat], layouts: Collection[LayoutName]
) -> Curves:
    models = [model for models in workload.models.values() for model in models]
    generating = {call.role for call in workload.graph if call.kind == "generate"}
    generators = {model.config for role in generating for model in workload.models[role]}
    yield "call", [(1.0, partial(measure.nothing, devices))]
    yield from _links(devices)
    for config in dict.fromkeys(model.config for model in models):
        shares = [(1 / fsdp, partial(measure.update, config, devices, fsdp)) for fsdp in _powers(len(devices))]
        yield f"update {shape_key(config)}", shares
        trained = any(model.trained for model in models if model.config == config)
        for slices in _powers(len(devices)):
            # Whole layers, for layouts that gather them; slices for those that compute with slices.
            passes: list[_Pass] = []
            sliced = slices == 1 or "train_tp" in layouts
            if sliced or any(model.lora is not None for model in models):
                passes.append((False, "full", workload.length))
            if trained and sliced:
                passes.extend((True, remat, workload.length) for remat in remats)
            if config in generators:
                passes.append((False, "full", workload.prompt))
            part = _part(config, slices)
            if part is not None:
                yield from _layers(workload, config, part, slices, devices, passes)
                if config in generators:
                    yield from _generations(workload, config, part, slices, devices)
    heads: dict[tuple[ModelConfig, HeadKind], None] = dict.fromkeys((model.config, model.head) for model in models)
    for config, head in heads:
        for train in (False, True):
            make = partial(measure.ends, config, devices, head=head, train=train, fused=workload.fused_loss)
            rows = _sizes(_rows(workload, devices))
            points = [(count * workload.length, partial(make, count, workload.length)) for count in rows]
            yield ends_curve(config, head, train, workload.fused_loss), points


def _links(devices: Sequence[Device]) -> Curves:
    for size in _powers(len(devices))[1:]:
        for kind in ("gather", "reduce"):
            yield f"{kind} {size}", [(x, partial(measure.collective, kind, devices, size, int(x) // 4)) for x in _BYTES]
    yield "copy", [(8.0 * _MIB, partial(measure.copy, devices, _MIB))]
    yield "host", [(8.0 * _MIB, partial(measure.offload, devices[0], 2 * _MIB))]


def _layers(
    workload: Workload,
    config: ModelConfig,
    part: ModelConfig,
    slices: int,
    devices: Sequence[Device],
    passes: Sequence[_Pass],
) -> Curves:
    for train, remat, width in passes:
        make = partial(measure.layers, part, devices, train=train, dtype=workload.dtype, remat=remat)
        rows = _sizes(_rows(workload, devices) * slices)
        yield layer_curve(config, slices, train, remat, width), [(n * width, partial(make, n, width)) for n in rows]


def _generations(
    workload: Workload, config: ModelConfig, part: ModelConfig, slices: int, devices: Sequence[Device]
) -> Curves:
    most = _rows(workload, devices) * slices
    widths = {"prompt": workload.prompt, "response": workload.response}
    for depth in DEPTHS:
        shallow = replace(part, layers=depth, local_layers=part.local_layers[:depth])
        make = partial(measure.generation, shallow, devices, dtype=workload.dtype, **widths)
        yield generation_curve(config, slices, depth), [(n, partial(make, n)) for n in _sizes(most) if 64 * n > most]


def _rows(workload: Workload, devices: Sequence[Device]) -> int:
    """The most of a device."""
    return max(1, workload.rows // len(devices))


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _sizes(most: int) -> list[int]:
    """Every second power of two, and the largest one."""
    powers = _powers(most)
    return sorted({*powers[::-2]})


def _part(config: ModelConfig, slices: int) -> ModelConfig | None:
    divides = config.heads % slices == config.mlp % slices == 0
    shared = config.kv_heads % slices == 0 or slices % config.kv_heads == 0
    return measure.sliced(config, slices) if divides and shared else None
