"""What was measured of the hardware at hand, and calls' costs from that instead of from arithmetic."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log

from jrlhf.errors import UserError
from jrlhf.models import ModelConfig
from jrlhf.planning import measure
from jrlhf.planning.collectives import Group
from jrlhf.planning.units import Parts, numbers
from jrlhf.planning.workload import RoleModel, Workload

Curve = tuple[tuple[float, float], ...]  # (size, seconds), sizes rising

DEPTHS = 1, 4  # layers of generations whose difference is what layers add
_ACCUMULATE = 1 / 3  # of an update's bytes, those of adding a micro-batch's gradient (`units`)


@dataclass(frozen=True)
class Profile:
    """Measured on `count` devices at once. curves: by what they are of. busy: devices -> seconds of equal work."""

    device: str
    count: int
    version: str
    busy: Mapping[int, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)


class Measured:
    """Costs from a profile, for placements on all of its devices or on some: `times.Units`.

    A curve between two of its sizes is a power law; beyond its ends, in proportion.

    Raises:
        UserError: when asked for what was not measured.
    """

    def __init__(self, profile: Profile, workload: Workload, *, devices: int | None = None):
        self._profile, self._workload = profile, workload
        count = devices or profile.count
        # Devices that share cores are the faster, the fewer of them are at work.
        busy = profile.busy
        self._share = busy[min(busy, key=lambda size: abs(size - count))] / busy[profile.count]

    def on(self, devices: int) -> "Measured":
        """The same where so many devices are at work."""
        return Measured(self._profile, self._workload, devices=devices)

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts:
        """One pass of one layer; in training forward, again and backward."""
        remat = self._workload.remat if train else "full"
        name = layer_curve(model.config, slices, train, remat, length)
        return {"layers": self._at(name, tokens) / measure.LAYERS}

    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts:
        """Embeddings and head, of the tokens that have a head: the others' embeddings are left out."""
        name = ends_curve(model.config, model.head, train, self._workload.fused_loss)
        return {"ends": self._at(name, tokens)}

    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts:
        """One layer of a decode step, at the workload's lengths: what layers more add to a generation."""
        _, layer = self._generation(model, rows, slices)
        prefill = self.layer(model, rows * self._workload.prompt, self._workload.prompt, slices, False)["layers"]
        return {"steps": max(0.0, layer - prefill) / self._workload.response}

    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts:
        """What a decode step has beside its layers."""
        beside, _ = self._generation(model, rows / slices, 1)
        return {"draws": max(0.0, beside) / self._workload.response}

    def _generation(self, model: RoleModel, rows: float, slices: int) -> tuple[float, float]:
        """Seconds of a whole generation: what it has beside its layers, and each layer."""
        shallow, deep = (self._at(generation_curve(model.config, slices, depth), rows) for depth in DEPTHS)
        layer = (deep - shallow) / (DEPTHS[1] - DEPTHS[0])
        return shallow - DEPTHS[0] * layer, layer

    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts:
        """One optimizer update, and the sums of micro-batches' gradients."""
        added = _ACCUMULATE * micro_batches if micro_batches > 1 else 0
        share *= numbers(model).trained / numbers(model).total  # an adapter's are few
        return {"optimizer": self._at(f"update {shape_key(model.config)}", share) * (1 + added)}

    def gather(self, group: Group, size: float, pieces: int = 1) -> float:
        """An all-gather, array by array."""
        return self._moved("gather", group, size, pieces)

    def reduce(self, group: Group, size: float, pieces: int = 1) -> float:
        """An all-reduce, array by array."""
        return self._moved("reduce", group, size, pieces)

    def call(self) -> Parts:
        """What an empty program costs."""
        return {"launches": self._at("call", 1.0)}

    def _moved(self, kind: str, group: Group, size: float, pieces: int) -> float:
        if group.size == 1:
            return 0.0
        return pieces * self._at(f"{kind} {group.size}", size / pieces) / measure.CHAINED

    def _at(self, name: str, size: float) -> float:
        curve = self._profile.curves.get(name)
        if curve is None:
            raise UserError(f"the profile has no {name}: measure this workload with python -m jrlhf.plan --profile")
        return self._share * interpolate(curve, size)


def interpolate(curve: Curve, size: float) -> float:
    """The seconds at a size: a power law between neighbours; in proportion to the size above, the least below."""
    if size <= curve[0][0]:
        return curve[0][1]
    if size >= curve[-1][0]:
        return curve[-1][1] * size / curve[-1][0]
    index = bisect_left(curve, (size, 0.0))
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    if y0 <= 0 or y1 <= 0:
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return y0 * (size / x0) ** (log(y1 / y0) / log(x1 / x0))


# ---- the names of curves


def shape_key(config: ModelConfig) -> str:
    """What of an architecture its costs depend on."""
    sizes = (config.embed, config.layers, config.heads, config.kv_heads, config.head_dim, config.mlp)
    kinds = (config.activation, config.norm, config.positions, config.window, config.tie_embeddings)
    return "-".join(map(str, (*sizes, config.vocab_size, *kinds, config.gated_mlp, config.post_norms)))


def layer_curve(config: ModelConfig, slices: int, train: bool, remat: str, length: int) -> str:
    return f"layer {shape_key(config)} /{slices} {'train ' + remat if train else 'forward'} of {length}"


def ends_curve(config: ModelConfig, head: str, train: bool, fused: bool) -> str:
    return f"ends {shape_key(config)} {head} {('fused' if fused else 'train') if train else 'forward'}"


def generation_curve(config: ModelConfig, slices: int, depth: int) -> str:
    return f"generation {shape_key(config)} /{slices} of {depth} layers"
