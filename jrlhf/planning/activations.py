"""Predicted temporary memory of compiled calls, in closed form.

A call is a sequence of phases (a layer's attention, its mlp, the head, the optimizer). Only the largest phase counts,
on top of what lives through all of them. How many arrays of a kind exist at once was read from XLA's own account of its
peaks, for each backend: these numbers (`Counts`) are all that is not derived from shapes.

B rows of a device, T tokens each; D, N, K, H, F, V as in `models.config`.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import jax.numpy as jnp

from jrlhf.meshes.plan import LayoutName
from jrlhf.models import ModelConfig
from jrlhf.models.attention import AttentionImplementation, default_attention
from jrlhf.models.params import HeadKind
from jrlhf.models.remat import Remat

WIDE = 4  # bytes of a float32
Platform = Literal["cpu", "gpu", "tpu"]
Phase = dict[str, float]  # bytes that a device holds at one time, by name


@dataclass(frozen=True)
class Counts:
    """The largest number of arrays of each kind that XLA holds at once."""

    scores: tuple[float, float, float]  # [B, N, T, T] float32 of a layer: forward, forward of training, backward
    weights: tuple[float, float]  # the same after the softmax, in the compute dtype: forward, backward
    mlp: tuple[float, float, float]  # [B, T, F]: forward, backward, while prompts are read
    residual: float  # [B, T, D] next to the mlp's forward pass
    backward: float  # [B, T, D] of a layer's backward pass
    norms: tuple[float, float]  # further norms, backward: of queries and keys; [B, T, D] of those after a sublayer
    # [V, D] float32, gathered tables and their gradients on the device's slice of the vocabulary: in the forward pass
    # of training, in the backward pass of a language model and of a scalar one, and in the head's own phase.
    forward_tables: float
    backward_tables: tuple[float, float]
    head_tables: float
    logits: float  # [tile, V] float32
    gathered: tuple[float, float]  # a layer's weights: with its mlp forward; in training, where two layers meet
    copied: float  # all layers' weights, in the layout that a training step's loop over layers reads
    cast: float  # all layers' weights in the compute dtype, ahead of the loop that scores
    optimizer: float  # copies of all trained numbers while the optimizer steps
    activations: tuple[float, float, float]  # what remat="gather" keeps of a layer: scores, [B, T, F], [B, T, D]
    offloads: bool  # host memory is another memory
    early: bool  # the head is gathered before the layers, even where no embedding shares its table
    transposed: bool  # weights gathered along their last dimension are transposed ahead of the loop over layers


_COUNTS: dict[str, tuple[Any, Any, Any]] = {  # cpu, gpu, tpu
    # On CPU products, softmax and transposes are separate steps, none of which writes in place.
    "scores": ((3, 4.25, 2), (1, 2.25, 2), (1, 2, 2)),
    "weights": ((0, 0), (1, 2), (1, 2)),
    "mlp": ((3, 6, 3), (2, 3, 2), (2, 3, 1)),
    "residual": (1, 1, 1),
    "backward": (8, 10, 10),
    "norms": ((3, 4), (0, 0), (0, 0)),
    "forward_tables": (3, 1, 1),
    "backward_tables": ((1, 1), (1, 0), (4.2, 2.56)),
    "head_tables": (3, 2, 4.2),
    "logits": (3, 1, 3),
    "gathered": ((1 / 3, 1.6), (1, 1), (1, 1)),
    "copied": (0, 0, 1.15),
    "cast": (0, 0, 1),
    # On accelerators the update's results are copies next to the gradients: a conditional does not write in place.
    "optimizer": (0, 4, 4),
    "activations": ((2, 6.8, 7.6), (2.25, 7, 25), (2.25, 7, 21)),
    "offloads": (False, True, True),
    "early": (True, False, False),
    "transposed": (False, True, False),
}
COUNTS: dict[str, Counts] = {
    platform: Counts(**{name: row[column] for name, row in _COUNTS.items()})
    for column, platform in enumerate(("cpu", "gpu", "tpu"))
}


@dataclass(frozen=True)
class Backend:
    """What compiles the calls. attention: the implementation for whole sequences; None: the platform's default."""

    platform: Platform = "gpu"
    attention: AttentionImplementation | None = None

    @property
    def counts(self) -> Counts:
        return COUNTS[self.platform]


DEFAULT = Backend()


@dataclass(frozen=True)
class Arrays:
    """Bytes of one device's arrays of each kind, while some rows are computed.

    hidden [B, T, D]. query [B, T, N H], key [B, T, K H], mlp [B, T, F]: of a layer, sliced where it is tensor-parallel.
    scores [B, N, T, T] float32. statistics [B, N, T] float32 of an attention that stores no scores. gathered: a layer's
    matrices. table [V, D] float32: the device's slice of the vocabulary. head: the hidden states of all devices that
    share a table. logits: of one tile.
    """

    hidden: float
    query: float
    key: float
    mlp: float
    scores: float
    statistics: float
    gathered: float
    table: float
    head: float
    logits: float
    itemsize: int


def arrays(
    model: ModelConfig,
    head: HeadKind,
    rows: float,
    length: int,
    layout: LayoutName,
    tensor: int,
    dtype: Any,
    backend: Backend,
) -> Arrays:
    """Returns the bytes of the arrays for `rows` rows of a device, or of its tensor group where a layer is sliced."""
    size = jnp.dtype(dtype).itemsize
    width = 1 if layout in ("train", "score") else tensor
    tokens, sharing = rows * length, rows * length * (tensor if width == 1 else 1)
    kind = backend.attention or default_attention(
        backend.platform, jnp.dtype(dtype), model.head_dim, model.attention_softcap, length
    )
    heads, kv_heads = model.heads / width, max(model.kv_heads / width, 1)
    square = WIDE * rows * heads * length**2
    matrices = model.embed * model.head_dim * (2 * heads + 2 * kv_heads)
    matrices += (3 if model.gated_mlp else 2) * model.embed * model.mlp / width
    vocab = model.padded_vocab / tensor
    # The tile of the log-prob kernel (`kernels.logprob.api`): even parts of the tokens, in multiples of 16.
    tile = max(256, 2**21 // int(vocab)) if backend.platform == "cpu" else 1024
    tile = sharing if sharing <= tile else 16 * ceil(ceil(sharing / ceil(sharing / tile)) / 16)
    return Arrays(
        hidden=tokens * model.embed * size,
        query=tokens * heads * model.head_dim * size,
        key=tokens * kv_heads * model.head_dim * size,
        mlp=tokens * model.mlp / width * size,
        scores=square if kind == "xla" else 0.0,
        statistics=0.0 if kind == "xla" else WIDE * tokens * heads,
        gathered=0.0 if layout == "generate" else matrices * size,
        table=WIDE * vocab * model.embed,
        head=sharing * model.embed * size,
        logits=WIDE * tile * vocab if head == "lm" else 0.0,
        itemsize=size,
    )


def kept_bytes(model: ModelConfig, sizes: Arrays, remat: Remat, counts: Counts) -> float:
    """Returns the bytes that a device keeps of all layers for the backward pass (`models.remat`)."""
    layer = sizes.hidden
    match remat:
        case "offload" if counts.offloads:  # all but the current layer's are on the host
            return layer
        case "attention":
            layer += sizes.query
        case "products":
            layer += sizes.hidden + 2 * sizes.query + 2 * sizes.key + (2 if model.gated_mlp else 1) * sizes.mlp
            layer += sizes.hidden if model.post_norms else 0
        case "gather":
            scores, mlp, hidden = counts.activations
            layer += scores * sizes.scores + mlp * sizes.mlp + hidden * sizes.hidden
            layer += sizes.scores * sizes.itemsize / WIDE * counts.weights[0]
    return model.layers * (layer + (0 if remat in ("full", "offload") else sizes.statistics))


def infer_phase(
    model: ModelConfig, head: HeadKind, sizes: Arrays, backend: Backend, transposed: float, cast: float
) -> Phase:
    """Returns the largest phase of a forward pass.

    transposed: stored bytes of the layers' matrices whose last dimension is gathered, `down` and `wo`. cast: bytes of
    the layers' weights in the compute dtype, where they are stored in another one.
    """
    counts, low = backend.counts, sizes.itemsize / WIDE
    table = sizes.table * low if head == "lm" else 0.0
    through = {
        "activations": sizes.hidden,
        "gathered head": table if model.tie_embeddings or counts.early else 0.0,
        "transposed weights": transposed if counts.transposed else 0.0,
    }
    scores = (counts.scores[0] + counts.weights[0] * low) * sizes.scores
    products = 0.0 if sizes.scores else sizes.query + 2 * sizes.key
    attention = {"attention scores": scores, "attention": products, "gathered layers": sizes.gathered}
    mlp = {
        "mlp": counts.mlp[0] * sizes.mlp + counts.residual * sizes.hidden,
        "gathered layers": counts.gathered[0] * sizes.gathered,
    }
    looped = {"cast layers": counts.cast * cast}
    logits = {"log-prob tiles": counts.logits * sizes.logits, "gathered head": table} if head == "lm" else {}
    logits |= {"gathered hidden states": max(sizes.head - sizes.hidden, 0.0)} if head == "lm" else {}
    return _largest(through, attention | looped, mlp | looped, logits)


def _largest(through: Phase, *phases: Phase) -> Phase:
    """Returns the largest of the phases, each with what lives through all of them."""
    return max(({**through, **phase} for phase in phases), key=lambda phase: sum(phase.values()))


@dataclass(frozen=True)
class Gradients:
    """Float32 bytes of a device's gradients: of the layers, and of all that is trained.

    tiled: all of them in the compiler's layout. relaid: the weights and both moments that a loop over minibatches first
    copies into another layout.
    """

    layers: float
    whole: float
    tiled: float
    relaid: float = 0.0


def train_phase(
    model: ModelConfig,
    head: HeadKind,
    sizes: Arrays,
    remat: Remat,
    gradients: Gradients,
    micro_batches: int,
    running: int,
    backend: Backend,
    transposed: float,
) -> Phase:
    """Returns the largest phase of a step: forward and backward of a micro-batch, or the optimizer after the last.

    running: micro-batches that are in the pipeline at a time. transposed: as in `infer_phase`.
    """
    counts, low = backend.counts, sizes.itemsize / WIDE
    sums = gradients.whole if micro_batches > 1 else 0.0
    through = {
        "kept activations": running * kept_bytes(model, sizes, remat, counts),
        "gradients": gradients.layers + sums,
        "transposed weights": transposed if counts.transposed else counts.copied * gradients.layers,
    }
    matrix = sizes.gathered / (3 if model.gated_mlp else 2)  # the mlp's matrices are most of a layer
    lm, tied = head == "lm", model.tie_embeddings
    # A tied table is gathered once for both of its uses.
    tables = counts.forward_tables if lm and (tied or micro_batches > 1) else 1
    forward = {
        "attention scores": (counts.scores[1] + counts.weights[0] * low) * sizes.scores,
        "activations": 2 * sizes.head + sizes.hidden,
        "gathered layers": counts.gathered[1] * sizes.gathered,
        "gradients of tables": tables * sizes.table,
    }
    made_again = counts.mlp[1] - (0 if remat not in ("products", "gather") else 2)
    shard = gradients.whole - gradients.layers
    norms = counts.norms[0] * (sizes.query + sizes.key) if model.qk_norm else 0.0
    norms += counts.norms[1] * sizes.hidden if model.post_norms else 0.0
    backward = {
        "attention scores": (counts.scores[2] + counts.weights[1] * low) * sizes.scores,
        "mlp": made_again * sizes.mlp,
        "activations": counts.backward * sizes.hidden + sizes.query + 2 * sizes.key + norms,
        "gathered layers": sizes.gathered - matrix,
        "gradients of tables": counts.backward_tables[0 if lm else 1] * sizes.table + shard,
    }
    logits = {
        "log-prob tiles": counts.logits * sizes.logits,
        "gradients of tables": counts.head_tables * sizes.table,
        "activations": 2 * sizes.head + sizes.hidden,
    }
    step = {"optimizer step": counts.optimizer * gradients.tiled, "relaid states": gradients.relaid}
    return max(_largest(through, forward, backward, logits if lm else {}), step, key=lambda phase: sum(phase.values()))


def cache_bytes(model: ModelConfig, rows: float, positions: int, tensor: int, itemsize: int) -> float:
    """Returns the bytes of keys and values of a tensor group's rows on each of its devices."""
    return 2.0 * model.layers * rows * max(model.kv_heads / tensor, 1) * positions * model.head_dim * itemsize


def generate_phase(
    model: ModelConfig, prompts: Arrays, cache: float, wave: float, logits: float, tensor: int, backend: Backend
) -> Phase:
    """Returns the largest phase of prefill and decoding.

    prompts: arrays of the rows that are prefilled together. cache: of all slots. wave: the prefilled rows' own cache,
        where that of all slots exists already; else 0. logits: of a step's rows, over the whole vocabulary.
    """
    counts, layers = backend.counts, model.layers
    scores = (counts.scores[0] + counts.weights[0] * prompts.itemsize / WIDE) * prompts.scores
    # A product and its sum over devices; a TPU receives every device's part at once.
    hidden = prompts.hidden * (tensor if backend.platform == "tpu" else min(tensor, 2))
    # Except on a TPU, the last layer's output is not computed while prompts are read, and its cache comes last.
    new_cache, missing = wave or cache, (0, 0) if backend.platform == "tpu" else (2, 1)
    first, second = (cache * bool(wave) + new_cache * max(layers - back, 0) / layers for back in missing)
    attention = {"attention scores": scores, "activations": hidden, "KV cache": first}
    mlp = {
        "mlp": counts.mlp[2] * prompts.mlp,
        "activations": hidden if backend.platform == "tpu" else prompts.hidden,
        "KV cache": second,
    }
    decode = {"KV cache": cache, "logits": counts.logits * logits}
    return _largest({}, attention, mlp, decode)
