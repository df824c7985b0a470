"""Measures a profile of the present hardware, and computes the costs of calls from it.

It measures a layer, a head, a generation, an update, and collectives, at sizes that are powers of two; groups of
devices also have the sizes that divide all devices. The results replace the arithmetic of `time.Roofline`; how often
each part is computed, and between which devices bytes move, stays the same. A profile takes minutes. It is stored in a
file per device kind, number of devices and JAX version.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, product
from math import inf, log
from pathlib import Path
from typing import Any

import jax

from jrlhf.errors import UserError
from jrlhf.meshes.hardware import Cluster, Hardware
from jrlhf.meshes.mesh import Device
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.config.divisors import divisors, indivisible
from jrlhf.models.remat import Remat
from jrlhf.models.weights import HeadKind
from jrlhf.planning import microbenchmarks
from jrlhf.planning.candidates import powers_of_two
from jrlhf.planning.moves import DeviceGroup
from jrlhf.planning.time import Parts
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.run.files import cache_directory, write_atomic

DEPTHS = 1, 4  # numbers of layers of two generations; the difference of their times is the cost of layers
_ACCUMULATE = 1 / 3  # bytes that a further micro-batch reads and writes, over those of an update (`time._ACCUMULATE`)
_MIB = 2**20
_BYTES = tuple(4.0**power for power in range(3, 12))  # sizes of collectives: 64 B to 4 MiB

Curve = tuple[tuple[float, float], ...]  # (size, seconds), sizes rising


@dataclass(frozen=True)
class Profile:
    """Times measured on `count` devices at once. curves: by name. busy: number of devices -> seconds for equal work."""

    device: str
    count: int
    version: str
    busy: Mapping[int, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)


def default_path(devices: Sequence[Device]) -> Path:
    """Returns the path of the profile of these devices."""
    kind = re.sub(r"[^a-z0-9]+", "-", devices[0].device_kind.lower()).strip("-")
    return cache_directory() / f"profile-{kind}-{len(devices)}-{jax.__version__}.json"


def load(path: Path) -> Profile | None:
    """Reads a profile; None where there is no file."""
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        curves = {name: tuple((float(x), float(y)) for x, y in curve) for name, curve in data["curves"].items()}
        busy = {int(count): float(seconds) for count, seconds in data["busy"].items()}
        if not all(0 < number < inf for pair in chain(busy.items(), *curves.values()) for number in pair):
            raise ValueError("sizes and seconds are positive")
        return Profile(str(data["device"]), int(data["count"]), str(data["version"]), busy, curves)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a profile of devices: remove it, and it is measured anew") from error


def save(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(profile), indent=1) + "\n")


def interpolate(curve: Curve, size: float) -> float:
    """Interpolates a curve by power laws. Above its sizes seconds are proportional, below them constant."""
    if size <= curve[0][0]:
        return curve[0][1]
    if size >= curve[-1][0]:
        return curve[-1][1] * size / curve[-1][0]
    index = bisect_left(curve, (size, 0.0))
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 * (size / x0) ** (log(y1 / y0) / log(x1 / x0))


class ProfiledCosts:
    """Costs of parts from a profile (a `time.PartCosts`). devices: number that work; None: all of the profile."""

    def __init__(self, profile: Profile, workload: Workload, *, devices: int | None = None):
        self._profile, self._workload = profile, workload
        count = devices or profile.count
        # Simulated devices share cores, so they are faster when fewer of them work.
        busy = profile.busy
        self._share = busy[min(busy, key=lambda size: abs(size - count))] / busy[profile.count]

    def on(self, devices: int) -> "ProfiledCosts":
        return ProfiledCosts(self._profile, self._workload, devices=devices)

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts:
        remat = self._workload.remat if train else "full"
        name = layer_curve(model.config, slices, train, remat, length)
        return {"layers": self._at(name, tokens) / microbenchmarks.LAYERS}

    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts:
        name = ends_curve(model.config, model.head, train, self._workload.fused_loss)
        return {"ends": self._at(name, tokens)}  # includes the embeddings of these tokens only

    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts:
        _, layer = self._generation(model, rows, slices)
        prefill = self.layer(model, rows * self._workload.prompt, self._workload.prompt, slices, False)["layers"]
        return {"steps": max(0.0, layer - prefill) / self._workload.response}

    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts:
        rest, _ = self._generation(model, rows / slices, 1)
        return {"draws": max(0.0, rest) / self._workload.response}

    def _generation(self, model: RoleModel, rows: float, slices: int) -> tuple[float, float]:
        """Returns the seconds of a whole generation outside of its layers, and those of each layer."""
        shallow, deep = (self._at(generation_curve(model.config, slices, depth), rows) for depth in DEPTHS)
        layer = (deep - shallow) / (DEPTHS[1] - DEPTHS[0])
        return shallow - DEPTHS[0] * layer, layer

    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts:
        added = _ACCUMULATE * micro_batches if micro_batches > 1 else 0
        share *= model.numbers.trained / model.numbers.total  # adapters are small
        return {"optimizer": self._at(f"update {shape_key(model.config)}", share) * (1 + added)}

    def gather(self, group: DeviceGroup, size: float, pieces: int = 1) -> float:
        return self._collective("gather", group, size, pieces)

    def reduce(self, group: DeviceGroup, size: float, pieces: int = 1) -> float:
        return self._collective("reduce", group, size, pieces)

    def _collective(self, kind: str, group: DeviceGroup, size: float, pieces: int) -> float:
        if group.size == 1:
            return 0.0
        return pieces * self._at(f"{kind} {group.size}", size / pieces) / microbenchmarks.CHAINED

    def call(self) -> Parts:
        return {"launches": self._at("call", 1.0)}

    def _at(self, name: str, size: float) -> float:
        curve = self._profile.curves.get(name)
        if curve is None:
            raise UserError(
                f"the profile has no {name}: measure this workload with python -m jrlhf.plan --config FILE --profile"
            )
        return self._share * interpolate(curve, size)


def cluster_of(profile: Profile, memory: float) -> Cluster:
    """Returns the profiled devices as a `Cluster`, for moves between calls. Rates are measured, so fractions are 1.

    memory: bytes of a device.
    """
    curves, count = profile.curves, profile.count
    ((sent, offloaded),), ((copied, copying),) = curves["host"], curves["copy"]
    bandwidth, link, latency = copied / copying, copied / copying, 0.0
    if count > 1:  # from a small gather and a large one
        (_, least), (size, seconds) = curves["gather 2"][0], curves["gather 2"][-1]
        latency = least / microbenchmarks.CHAINED
        link = size / 2 / max(seconds / microbenchmarks.CHAINED - latency, 1e-9)
    operations = microbenchmarks.BUSY_OPERATIONS / profile.busy[count]
    rates: dict[str, Any] = dict.fromkeys(("infer", "train", "decode", "collective", "stream"), 1.0)
    rates |= {"bfloat16": operations, "float32": operations, "link": link, "network": link, "host": sent / offloaded}
    hardware = Hardware(profile.device, memory, bandwidth, node=count, launch=0.0, latency=latency, **rates)
    return Cluster(hardware, count)


# ---- measuring

_Programs = Mapping[float, Callable[[], microbenchmarks.Program]]  # size -> makes the program to time


def measure(
    workload: Workload,
    devices: Sequence[Device],
    *,
    profile: Profile | None = None,
    repeats: int = 9,
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Measures the parts of the workload's calls that `profile` lacks. say: called with each curve (1 of 9: name)."""
    setup = devices[0].device_kind, len(devices), jax.__version__
    if profile is not None and (profile.device, profile.count, profile.version) == setup:
        curves, busy = dict(profile.curves), dict(profile.busy)
    else:
        sizes = powers_of_two(len(devices))
        programs = [microbenchmarks.busy(devices[:size]) for size in sizes]
        curves, busy = {}, dict(zip(sizes, microbenchmarks.seconds(programs, repeats), strict=True))
    nothing = microbenchmarks.copy(devices, 1)
    wanted = list(wanted_curves(workload, devices))
    for number, (name, programs) in enumerate(wanted, start=1):
        curve = dict(curves.get(name, ()))
        missing = {size: make for size, make in programs.items() if size not in curve}
        if missing:
            say(f"{number} of {len(wanted)}: {name}")
            idle, *taken = microbenchmarks.seconds([nothing, *(make() for make in missing.values())], repeats)
            launch = 0.0 if name == "call" else idle
            curve |= {size: max(total - launch, 1e-9) for size, total in zip(missing, taken, strict=True)}
            curves[name] = tuple(sorted(curve.items()))
    return Profile(*setup, busy, curves)


def wanted_curves(workload: Workload, devices: Sequence[Device]) -> Iterator[tuple[str, _Programs]]:
    """Yields the name of each curve that the workload's calls need, with its programs."""
    models = [model for models in workload.models.values() for model in models]
    generating = {call.role for call in workload.graph if call.kind == "generate"}
    generators = {model.config for role in generating for model in workload.models[role]}
    most = max(1, workload.rows // len(devices))  # rows of a device
    powers, counts = powers_of_two(len(devices)), group_sizes(len(devices))
    yield "call", {1.0: partial(microbenchmarks.copy, devices, 1)}
    for size in counts[1:]:
        for kind in ("gather", "reduce"):
            make = partial(microbenchmarks.collective, kind, devices, size)
            yield f"{kind} {size}", {bytes_: partial(make, int(bytes_) // 4) for bytes_ in _BYTES}
    yield "copy", {8.0 * _MIB: partial(microbenchmarks.copy, devices, _MIB)}
    yield "host", {8.0 * _MIB: partial(microbenchmarks.offload, devices[0], 2 * _MIB)}
    for config in dict.fromkeys(model.config for model in models):
        shares = {1 / fsdp: partial(microbenchmarks.update, config, devices, fsdp) for fsdp in powers}
        yield f"update {shape_key(config)}", shares
        for slices in counts:
            keys = {key for key, *_ in indivisible(config, 1, slices)} - {"vocab_size"}  # a slice has no table
            if keys or (config.kv_heads % slices and slices % config.kv_heads):
                continue
            part, rows = microbenchmarks.sliced(config, slices), most * slices
            # (whether it trains, its remat policy, tokens of a row)
            passes: list[tuple[bool, Remat, int]] = [(False, "full", workload.length)]
            if any(model.trained for model in models if model.config == config):
                passes.append((True, workload.remat, workload.length))
            if config in generators:
                passes.append((False, "full", workload.prompt))
            for train, remat, width in passes:
                make = partial(microbenchmarks.layers, part, devices, train=train, dtype=workload.dtype, remat=remat)
                name = layer_curve(config, slices, train, remat, width)
                yield name, {n * width: partial(make, n, width) for n in _sizes(rows)}
            for depth in DEPTHS if config in generators else ():
                shallow = replace(part, layers=depth, local_layers=part.local_layers[:depth])
                widths = {"prompt": workload.prompt, "response": workload.response, "dtype": workload.dtype}
                make = partial(microbenchmarks.generation, shallow, devices, **widths)
                name = generation_curve(config, slices, depth)
                yield name, {n: partial(make, n) for n in _sizes(rows) if 64 * n > rows}
    heads: dict[tuple[ModelConfig, HeadKind], None] = {(model.config, model.head): None for model in models}
    for (config, head), train in product(heads, (False, True)):
        make = partial(microbenchmarks.ends, config, devices, head=head, train=train, fused=workload.fused_loss)
        name = ends_curve(config, head, train, workload.fused_loss)
        yield name, {n * workload.length: partial(make, n, workload.length) for n in _sizes(most)}


def group_sizes(count: int) -> list[int]:
    """Returns the sizes of groups that are measured on `count` devices: slices are powers of two, or all devices."""
    return sorted({*powers_of_two(count), *divisors(count)})


def _sizes(most: int) -> list[int]:
    """Returns every second power of two up to `most`, with the largest one."""
    return sorted(powers_of_two(most)[::-2])


# ---- the names of curves


def shape_key(config: ModelConfig) -> str:
    """Returns a text of all numbers of an architecture on which its costs depend."""
    sizes = (config.embed, config.layers, config.heads, config.kv_heads, config.head_dim, config.mlp)
    kinds = (config.activation, config.norm, config.positions, config.window, config.tie_embeddings)
    return "-".join(map(str, (*sizes, config.vocab_size, *kinds, config.gated_mlp, config.post_norms)))


def layer_curve(config: ModelConfig, slices: int, train: bool, remat: str, length: int) -> str:
    return f"layer {shape_key(config)} /{slices} {'train ' + remat if train else 'forward'} of {length}"


def ends_curve(config: ModelConfig, head: str, train: bool, fused: bool) -> str:
    return f"ends {shape_key(config)} {head} {('fused' if fused else 'train') if train else 'forward'}"


def generation_curve(config: ModelConfig, slices: int, depth: int) -> str:
    return f"generation {shape_key(config)} /{slices} of {depth} layers"
