"""What the parts of a call cost on one device, from its hardware's figures: one layer, the head, a step, an update.

All is the roofline of each part: its operations over what products reach, its bytes over what memory reaches, and a
fixed time for what is launched. Every constant counts something; none was fitted to a call.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jrlhf.meshes.hardware import Cluster
from jrlhf.models.flops import head_weights, layer_weights, lora_weights
from jrlhf.models.remat import Remat
from jrlhf.planning import collectives
from jrlhf.planning.collectives import Group
from jrlhf.planning.workload import RoleModel

Parts = dict[str, float]  # seconds by what they go to

# Attention's two products run at this share of what plain products reach: 310 of 771 TFLOP/s in a trace of training on
# an H200. Its backward pass has five products where the forward one has two.
_ATTENTION, _ATTENTION_BACKWARD = 0.4, 2.5
# Elementwise work reads and writes more than a perfect fusion would, in part in float32: 309 GB in that trace, where
# the count below is 188.
_UNFUSED = 1.6
# Passes over a tile of float32 logits: forward it is written and read, for the gradient rewritten and read too.
_LOGITS = {False: 2, True: 4}
# Bytes of an update for each number of a float32 model: AdamW reads weight, gradient and two moments and writes three
# of them; the gradient is read once more for its norm and once for the bound. A further micro-batch adds its own.
_UPDATE, _ACCUMULATE = 36, 12
_DRAW = 8  # passes over a row's float32 logits to scale, bound, draw and score a token


@dataclass(frozen=True)
class Physical:
    """Costs by arithmetic, for any model on any cluster.

    slices: devices over which a layer's heads and mlp are divided. tokens, rows: of one device, or of the devices that
    share them as slices.
    """

    cluster: Cluster
    dtype: Any
    remat: Remat = "full"
    fused_loss: bool = True

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts:
        """One pass of one layer over tokens in rows of `length`; in training forward, again where remat says, backward.

        Raises:
            KeyError: an unknown remat policy.
        """
        counted = numbers(model)
        dense, attention = 2.0 * counted.layer * tokens, counted.attention(length) * tokens
        traffic, passes, moved = counted.traffic(slices) * tokens, 1.0, 0.0
        adapters = 2.0 * counted.adapters * tokens
        if train:
            again, attends = _recomputed(model, self.remat)
            backward = 1.0 if model.lora is not None else 2.0  # the base under an adapter has no gradient of its own
            dense = dense * (1 + backward) + 2.0 * again * tokens + 3 * adapters
            attention *= 1 + _ATTENTION_BACKWARD + attends
            passes = 3.0 if self.remat == "gather" else 4.0
            traffic = traffic * passes + 2 * _kept(model, self.remat) * tokens / slices
            moved = 2 * model.config.embed * tokens * self._size if self.remat == "offload" else 0.0
        else:
            dense += adapters
        rate = self._rate(train)
        operations = (dense + attention / _ATTENTION) / slices / rate
        read = passes * counted.layer * self._size / slices / self._stream
        parts = {
            "operations": operations,
            "weights": max(0.0, read - operations),
            "activations": traffic * self._size / self._stream,
            "launches": passes * self.cluster.hardware.launch,
        }
        if moved:
            parts["host"] = collectives.offload_seconds(moved, self.cluster)
        return parts

    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts:
        """Log-probs of tokens over a whole vocabulary, however it is divided; a scalar head costs nothing."""
        if model.head != "lm":
            return {}
        products = (3 if self.fused_loss else 4) if train else 1
        if train and model.lora is not None:
            products -= 1
        operations = 2.0 * products * numbers(model).head * tokens / self._rate(train)
        logits = _LOGITS[train] * 4.0 * model.config.padded_vocab * tokens / self._stream
        return {"operations": operations, "activations": logits}

    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts:
        """One layer of a decode step over rows that each see so many positions."""
        counted, hardware = numbers(model), self.cluster.hardware
        weights = (counted.layer + counted.adapters) * self._size / slices / self._decode
        cache = rows * counted.seen(positions) * counted.cache * self._size / self._decode
        cache /= min(slices, model.config.kv_heads)
        work = 2.0 * (counted.layer + counted.adapters) * rows + counted.per_pair * rows * counted.seen(positions)
        operations = work / slices / self._rate(False)
        parts = {"weights": weights, "cache": cache, "launches": hardware.launch}
        return parts | {"operations": max(0.0, operations - weights - cache)}

    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts:
        """The head of a decode step, and a token of each row, which the sharing devices draw for their own rows."""
        counted = numbers(model)
        weights = counted.head * self._size / slices / self._decode
        operations = 2.0 * counted.head * rows / slices / self._rate(False)
        drawn = _DRAW * 4.0 * model.config.padded_vocab * rows / slices / self._stream
        parts = {"weights": weights, "sampling": drawn, "launches": self.cluster.hardware.launch}
        return parts | {"operations": max(0.0, operations - weights)}

    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts:
        """One optimizer update of this share of a model's numbers, whose gradient was summed over micro-batches."""
        size = _UPDATE + (_ACCUMULATE * micro_batches if micro_batches > 1 else 0)
        return {"optimizer": numbers(model).trained * share * size / self._stream}

    def gather(self, group: Group, size: float, pieces: int = 1) -> float:
        """An all-gather to `size` bytes, or a reduce-scatter of them. Compilers join the pieces of a layer."""
        return collectives.gather_seconds(self.cluster, group, size)

    def reduce(self, group: Group, size: float, pieces: int = 1) -> float:
        """An all-reduce of `size` bytes."""
        return collectives.reduce_seconds(self.cluster, group, size)

    def on(self, devices: int) -> "Physical":
        """The same where so many devices are at work: each has its own memory and cores."""
        return self

    def call(self) -> Parts:
        """What a call costs beyond its parts: nothing that physics knows of."""
        return {}

    def _rate(self, train: bool) -> float:
        hardware = self.cluster.hardware
        peak = hardware.bfloat16 if self._size == 2 else hardware.float32
        return peak * (hardware.train if train else hardware.infer)

    @cached_property
    def _size(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @cached_property
    def _stream(self) -> float:
        return self.cluster.hardware.bandwidth * self.cluster.hardware.stream

    @cached_property
    def _decode(self) -> float:
        return self.cluster.hardware.bandwidth * self.cluster.hardware.decode


class Numbers:
    """What is counted of a model, once.

    layer, head, adapters: numbers in matrices; per layer, whole, per layer. total: of all matrices; trained: of those
        that an update changes.
    """

    def __init__(self, model: RoleModel):
        config = model.config
        self.layer = layer_weights(config) / config.layers
        self.head = head_weights(config, model.head)
        self.adapters = 0.0 if model.lora is None else lora_weights(config, model.lora) / config.layers
        embeddings = config.embed * config.padded_vocab
        self.total = layer_weights(config) + embeddings
        if model.head == "lm" and not config.tie_embeddings:
            self.total += embeddings
        self.trained = self.total if model.lora is None else self.adapters * config.layers
        self.cache = 2.0 * config.kv_heads * config.head_dim
        self.per_pair = 4.0 * config.heads * config.head_dim
        self._local, self._window = sum(config.locality) / config.layers, config.window
        self._wide = 10.0 * config.embed  # two norms, two additions to the residual stream
        heads = 4.0 * (config.heads + config.kv_heads) * config.head_dim  # rotation; what attention reads and writes
        self._sliced = heads + (3.0 if config.gated_mlp else 2.0) * config.mlp

    def attention(self, length: int) -> float:
        """Operations a token, forward, in the mean of rows of `length` and of the layers."""
        whole = (length + 1) / 2
        window = length if self._window is None else min(length, self._window)
        near = window * (length - (window - 1) / 2) / length
        return self.per_pair * (whole + self._local * (near - whole))

    def seen(self, positions: float) -> float:
        """Of so many positions before it, those that a token sees in the mean of the layers."""
        return (
            positions
            if self._window is None
            else (positions + self._local * (min(positions, self._window) - positions))
        )

    def traffic(self, slices: int) -> float:
        """Numbers a token that elementwise work reads and writes: slices share those of heads and mlp only."""
        return _UNFUSED * (self._wide + self._sliced / slices)


_counted: dict[int, tuple[RoleModel, Numbers]] = {}


def numbers(model: RoleModel) -> Numbers:
    """The numbers of a model, counted once."""
    # By identity: hashing a config takes longer than all the arithmetic of a call.
    found = _counted.get(id(model))
    if found is None or found[0] is not model:
        found = _counted[id(model)] = (model, Numbers(model))
    return found[1]


def _recomputed(model: RoleModel, remat: Remat) -> tuple[float, float]:
    """Multiply-adds a token and layer with weights that a backward pass does again, and attentions (`models.remat`)."""
    config = model.config
    if remat in ("products", "gather"):
        return 0.0, 0.0
    down = config.mlp * config.embed
    return numbers(model).layer - down, 0.0 if remat == "attention" else 1.0


def _kept(model: RoleModel, remat: Remat) -> float:
    """Numbers a token and layer that are written and read again (`models.remat`)."""
    c = model.config
    heads = c.heads * c.head_dim
    products = 2.0 * c.embed + 2.0 * (c.heads + c.kv_heads) * c.head_dim + 2.0 * c.mlp
    kept = {"offload": c.embed, "full": c.embed, "attention": c.embed + heads, "products": products}
    return 2 * products if remat == "gather" else kept[remat]
