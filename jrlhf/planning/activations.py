"""What a compiled call needs of each device beside what is kept there: temporary memory, in closed form.

A call is a sequence of phases (a layer's attention, its mlp, the head, the optimizer), of which only the largest
counts, on top of what lives through all of them. What a phase holds was read from XLA's own account of its peaks, for
each backend: how many arrays of a kind exist at once. These counts are all that is not derived from shapes; they are in
`Counts`, one table a backend. B rows of a device, T tokens each; D, N, K, H, F, V as in `models.config`.
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


@dataclass(frozen=True)
class Counts:
    """How many arrays of a kind XLA holds at once, at the most.

    scores: [B, N, T, T] in float32, of one layer's attention: forward alone, forward under differentiation, backward.
    weights: the same scores as the softmax leaves them, in the compute dtype: forward, backward.
    mlp: [B, T, F]: forward alone, backward, while prompts are read. beside: [B, T, D] with the first.
    backward: [B, T, D] of a layer's backward pass.
    norms: what a layer's further norms add to its backward pass: of queries and keys, in these; after its
        contributions, in [B, T, D].
    forward_tables, backward_tables, head_tables: [V, D] in float32, gathered weights and gradients of embedding and
        head on the device's slice of the vocabulary: in the layers' forward pass under differentiation, in the backward
        pass (of a language model, of a scalar one), and in the head's own phase.
    logits: [tile, V] in float32.
    gathered: one layer's weights: beside its mlp forward alone, forward under differentiation, where one layer's meet
        the next one's.
    copied: all layers' stored weights, again, in the layout that the loop over layers of a training step reads.
    cast: all layers' stored weights in the compute dtype, ahead of the loop over them that scores.
    optimizer: copies of all trained numbers (weights, two moments, gradients) while the optimizer steps.
    kept: what remat="gather" keeps of a layer, in scores, [B, T, F] and [B, T, D].
    offloads: whether host memory is another one.
    early: whether the head is gathered before the layers are computed, even where no embedding shares its table.
    transposed: whether weights whose last dimension is gathered are transposed ahead of the loop over layers.
    """

    scores: tuple[float, float, float]
    weights: tuple[float, float]
    mlp: tuple[float, float, float]
    beside: float
    backward: float
    norms: tuple[float, float]
    forward_tables: float
    backward_tables: tuple[float, float]
    head_tables: float
    logits: float
    gathered: tuple[float, float]
    copied: float
    cast: float
    optimizer: float
    kept: tuple[float, float, float]
    offloads: bool
    early: bool
    transposed: bool


COUNTS: dict[Platform, Counts] = {
    # Products, softmax and transposes are steps of their own, none of which writes where it reads.
    "cpu": Counts(
        scores=(3, 4.25, 2),
        weights=(0, 0),
        mlp=(3, 6, 3),
        beside=1,
        backward=8,
        norms=(3, 4),
        forward_tables=3,
        backward_tables=(1, 1),
        head_tables=3,
        logits=3,
        gathered=(1 / 3, 1.6),
        copied=0,
        cast=0,
        optimizer=0,
        kept=(2, 6.8, 7.6),
        offloads=False,
        early=True,
        transposed=False,
    ),
    # The update's results are copies, beside the gradients: a conditional does not write where it reads.
    "gpu": Counts(
        scores=(1, 2.25, 2),
        weights=(1, 2),
        mlp=(2, 3, 2),
        beside=1,
        backward=10,
        norms=(0, 0),
        forward_tables=1,
        backward_tables=(1, 0),
        head_tables=2,
        logits=1,
        gathered=(1, 1),
        copied=0,
        cast=0,
        optimizer=4,
        kept=(2.25, 7, 25),
        offloads=True,
        early=False,
        transposed=True,
    ),
    "tpu": Counts(
        scores=(1, 2, 2),
        weights=(1, 2),
        mlp=(2, 3, 1),
        beside=1,
        backward=10,
        norms=(0, 0),
        forward_tables=1,
        backward_tables=(4.2, 2.56),
        head_tables=4.2,
        logits=3,
        gathered=(1, 1),
        copied=1.15,
        cast=1,
        optimizer=4,
        kept=(2.25, 7, 21),
        offloads=True,
        early=False,
        transposed=False,
    ),
}


@dataclass(frozen=True)
class Backend:
    """What compiles the calls. attention: of whole sequences; None: the platform's default."""

    platform: Platform = "gpu"
    attention: AttentionImplementation | None = None

    @property
    def counts(self) -> Counts:
        """What this compiler holds at once."""
        return COUNTS[self.platform]


DEFAULT = Backend()


@dataclass(frozen=True)
class Arrays:
    """Bytes of one device's arrays of each kind, while some rows are computed.

    hidden [B, T, D]. query [B, T, N H], key [B, T, K H], mlp [B, T, F]: of a layer, in slices where it is
    tensor-parallel. scores [B, N, T, T] float32; statistics [B, N, T] float32 of an attention that stores no scores.
    gathered: a layer's matrices. table: [V, D] float32, the device's slice of the vocabulary, all of the embedding's.
    head: the hidden states that share it. logits: one tile's.
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
    """Of so many rows a device; in tensor-parallel layouts a device has those of its whole group."""
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


def kept_bytes(model: ModelConfig, each: Arrays, remat: Remat, counts: Counts) -> float:
    """What a device keeps of all layers for the backward pass: the table in `models.remat`."""
    layer = each.hidden
    match remat:
        case "offload" if counts.offloads:  # all but the layer at hand
            return layer
        case "attention":
            layer += each.query
        case "products":
            layer += each.hidden + 2 * each.query + 2 * each.key + (2 if model.gated_mlp else 1) * each.mlp
            layer += each.hidden if model.post_norms else 0
        case "gather":
            scores, mlp, hidden = counts.kept
            layer += scores * each.scores + mlp * each.mlp + hidden * each.hidden
            layer += each.scores * each.itemsize / WIDE * counts.weights[0]
    return model.layers * (layer + (0 if remat in ("full", "offload") else each.statistics))


Phase = dict[str, float]  # what a device holds at one time, by name


def infer_phase(
    model: ModelConfig, head: HeadKind, each: Arrays, backend: Backend, transposed: float, cast: float
) -> Phase:
    """The largest phase of a forward pass.

    transposed: stored bytes of the matrices whose last dimension is gathered, the layers' `down` and `wo`.
    cast: of the layers' stored weights in the compute dtype, where that is another one.
    """
    counts, low = backend.counts, each.itemsize / WIDE
    table = each.table * low if head == "lm" else 0.0
    through = {
        "activations": each.hidden,
        "gathered head": table if model.tie_embeddings or counts.early else 0.0,
        "transposed weights": transposed if counts.transposed else 0.0,
    }
    scores = (counts.scores[0] + counts.weights[0] * low) * each.scores
    products = 0.0 if each.scores else each.query + 2 * each.key
    attention = {"attention scores": scores, "attention": products, "gathered layers": each.gathered}
    mlp = {
        "mlp": counts.mlp[0] * each.mlp + counts.beside * each.hidden,
        "gathered layers": counts.gathered[0] * each.gathered,
    }
    looped = {"cast layers": counts.cast * cast}
    logits = {"log-prob tiles": counts.logits * each.logits, "gathered head": table} if head == "lm" else {}
    logits |= {"gathered hidden states": max(each.head - each.hidden, 0.0)} if head == "lm" else {}
    return _largest(through, attention | looped, mlp | looped, logits)


def _matrices(model: ModelConfig) -> int:
    """Matrices of the mlp, which are most of a layer's numbers."""
    return 3 if model.gated_mlp else 2


def _largest(through: Phase, *phases: Phase) -> Phase:
    """The largest of the phases with what lives through all of them."""
    return max(({**through, **phase} for phase in phases), key=lambda phase: sum(phase.values()))


@dataclass(frozen=True)
class Gradients:
    """Float32 bytes of a device's gradients.

    layers: of the stack of layers. whole: of all that is trained. tiled: the same as the compiler lays them out.
    relaid: the weights and both moments that a loop over minibatches copies first, into a layout of its own.
    """

    layers: float
    whole: float
    tiled: float
    relaid: float = 0.0


def train_phase(
    model: ModelConfig,
    head: HeadKind,
    each: Arrays,
    remat: Remat,
    gradients: Gradients,
    micro_batches: int,
    running: int,
    backend: Backend,
    transposed: float,
) -> Phase:
    """The largest phase of a step: forward and backward of a micro-batch, or the optimizer after the last.

    running: micro-batches that are on their way through a pipeline. transposed: as in `infer_phase`.
    """
    counts, low = backend.counts, each.itemsize / WIDE
    sums = gradients.whole if micro_batches > 1 else 0.0
    through = {
        "kept activations": running * kept_bytes(model, each, remat, counts),
        "gradients": gradients.layers + sums,
        "transposed weights": transposed if counts.transposed else counts.copied * gradients.layers,
    }
    matrix = each.gathered / _matrices(model)
    lm, tied = head == "lm", model.tie_embeddings
    # A tied table is gathered once for both of its uses.
    tables = counts.forward_tables if lm and (tied or micro_batches > 1) else 1
    forward = {
        "attention scores": (counts.scores[1] + counts.weights[0] * low) * each.scores,
        "activations": 2 * each.head + each.hidden,
        "gathered layers": counts.gathered[1] * each.gathered,
        "gradients of tables": tables * each.table,
    }
    made_again = counts.mlp[1] - (0 if remat not in ("products", "gather") else 2)
    shard = gradients.whole - gradients.layers
    norms = counts.norms[0] * (each.query + each.key) if model.qk_norm else 0.0
    norms += counts.norms[1] * each.hidden if model.post_norms else 0.0
    backward = {
        "attention scores": (counts.scores[2] + counts.weights[1] * low) * each.scores,
        "mlp": made_again * each.mlp,
        "activations": counts.backward * each.hidden + each.query + 2 * each.key + norms,
        "gathered layers": each.gathered - matrix,
        "gradients of tables": counts.backward_tables[0 if lm else 1] * each.table + shard,
    }
    logits = {
        "log-prob tiles": counts.logits * each.logits,
        "gradients of tables": counts.head_tables * each.table,
        "activations": 2 * each.head + each.hidden,
    }
    step = {"optimizer step": counts.optimizer * gradients.tiled, "relaid states": gradients.relaid}
    return max(_largest(through, forward, backward, logits if lm else {}), step, key=lambda phase: sum(phase.values()))


def cache_bytes(model: ModelConfig, rows: float, positions: int, tensor: int, itemsize: int) -> float:
    """Keys and values of so many rows of a tensor group."""
    return 2.0 * model.layers * rows * max(model.kv_heads / tensor, 1) * positions * model.head_dim * itemsize


def generate_phase(
    model: ModelConfig, prompts: Arrays, cache: float, wave: float, logits: float, tensor: int, backend: Backend
) -> Phase:
    """The largest phase of prefill and decoding.

    prompts: of the rows that are prefilled together. wave: their cache, where that of all slots is there already; 0
        where theirs is all there is. logits: of a step's own rows, over the whole vocabulary.
    """
    counts, layers = backend.counts, model.layers
    scores = (counts.scores[0] + counts.weights[0] * prompts.itemsize / WIDE) * prompts.scores
    # A product and its sum over devices; a TPU has every device's part at once.
    hidden = prompts.hidden * (tensor if backend.platform == "tpu" else min(tensor, 2))
    # The last layer's output is not asked for while prompts are read, nor is its cache there before, but on a TPU.
    made, missing = wave or cache, (0, 0) if backend.platform == "tpu" else (2, 1)
    first, second = (cache * bool(wave) + made * max(layers - back, 0) / layers for back in missing)
    attention = {"attention scores": scores, "activations": hidden, "KV cache": first}
    mlp = {
        "mlp": counts.mlp[2] * prompts.mlp,
        "activations": hidden if backend.platform == "tpu" else prompts.hidden,
        "KV cache": second,
    }
    decode = {"KV cache": cache, "logits": counts.logits * logits}
    return _largest({}, attention, mlp, decode)
