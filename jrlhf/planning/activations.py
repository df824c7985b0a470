"""Predicted temporary memory of compiled calls, in closed form.

A call is a sequence of phases (a layer's attention, its mlp, the head, the optimizer). Its memory is that of the
largest phase, plus the arrays that live through all phases. Sizes follow from shapes; only the numbers of arrays of a
kind that exist at once (`_COUNTS`) were read from XLA's reports of its peaks, for each backend.

A device has B rows of T tokens each; D, N, K, H, F, V are as in `models.config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from types import SimpleNamespace
from typing import Literal

import jax.numpy as jnp

from jrlhf.meshes.plan import LayoutName
from jrlhf.models import ModelConfig
from jrlhf.models.attention import default_attention
from jrlhf.models.flash import AttentionImplementation
from jrlhf.models.remat import Remat
from jrlhf.models.weights import PROJECTIONS
from jrlhf.planning.workload import RoleModel, Workload

WIDE = 4  # bytes of a float32
Platform = Literal["cpu", "gpu", "tpu"]
Phase = dict[str, float]  # bytes that a device holds at one time, by name

# The largest number of arrays of each kind that XLA holds at once, on a CPU, a GPU and a TPU.
_COUNTS = {
    # [B, N, T, T] float32 of a layer: forward, forward of training, backward, and in attention's own backward pass. On
    # CPU products, softmax and transposes are separate steps, none of which writes in place.
    "scores": ((3, 3, 2, 4), (1, 2.25, 2, 0), (1, 2, 2, 0)),
    # The same after the softmax, in the compute dtype: forward, backward.
    "weights": ((0, 0), (1, 2), (1, 2)),
    # [B, T, F]: forward, backward, in a prefill; and additional ones of adapters, forward.
    "mlp": ((3, 6, 3), (2, 3, 2), (2, 3, 1)),
    "adapters": (2, 0, 0),
    # How many fewer there are without a gate: forward, backward (the same that kept products save).
    "ungated": ((1, 2), (0, 0), (0, 0)),
    # Whether the mlp's arrays can reuse the memory of a layer's inputs.
    "packed": (True, False, False),
    # Number of tokens from which on the CPU's kernel library computes the sums of norms.
    "library": (4096, inf, inf),
    # [B, T, D] of a layer's backward pass: all; how many fewer if products are kept; how many more if the library
    # computes norms, with norms after sublayers, and with a sliced gate. Queries [B, T, N H]: how many more with norms.
    "backward": ((7, 4, 4, 4, 2), (10, 0, 0, 0, 0), (10, 0, 0, 0, 0)),
    "queries": ((2, 3), (1, 0), (1, 0)),
    # [V, D] float32, gathered tables and their gradients on the device's slice of the vocabulary: in the forward pass
    # of training, in the backward pass of a language model and of a scalar one, and in the head's own phase.
    "forward_tables": (3, 1, 1),
    "backward_tables": ((1, 1), (1, 0), (4.2, 2.56)),
    "head_tables": (3, 2, 4.2),
    # [tile, V] float32: of a loop over tiles, and of a single tile without a softcap.
    "logits": ((3, 2), (1, 1), (3, 3)),
    # A layer's weights: with its mlp forward; in training, where two layers meet.
    "gathered": ((1 / 3, 1.6), (1, 1), (1, 1)),
    # All layers' weights, in the layout that a training step's loop over layers reads.
    "copied": (0, 0, 1.15),
    # All layers' weights in the compute dtype, cast before the loop that scores.
    "cast": (0, 0, 1),
    # All layers' matrices of an int8 base as floats, during the first layer's attention and mlp; 0: one layer's only.
    "dequantised": ((1, 0.6), (0, 0), (0, 0)),
    # Whether layers that are not in a loop are merged with their recomputation, so that no remat policy saves anything.
    "merged": (True, False, False),
    # Copies of all trained numbers while the optimizer steps. On accelerators the update's results are copies next to
    # the gradients: a conditional does not write in place.
    "optimizer": (2, 4, 4),
    # Arrays of a layer that remat="gather" keeps: scores, [B, T, F], [B, T, D], queries and keys; and the additional
    # ones with a softcap (and a mask), with a gated GELU, with norms after sublayers, with normed queries and keys.
    "activations": ((2, 6, 7, 2), (2.25, 7, 25, 0), (2.25, 7, 21, 0)),
    "kept": ((2.25, 2, 6, 3), (0, 0, 0, 0), (0, 0, 0, 0)),
    # Whether host memory is separate from device memory.
    "offloads": (False, True, True),
    # Whether the head is gathered before the layers, even where no embedding shares its table.
    "early": (True, False, False),
    # Copies of a table's shard, with its elements in the order of the gather.
    "reordered": (1, 0, 0),
    # Whether weights that are gathered along their last dimension are transposed before the loop over layers.
    "transposed": (False, True, False),
}
COUNTS = {
    platform: SimpleNamespace(**{name: row[column] for name, row in _COUNTS.items()})
    for column, platform in enumerate(("cpu", "gpu", "tpu"))
}


@dataclass(frozen=True)
class Backend:
    """The compiler of the calls. attention: implementation for whole sequences; None: the platform's default."""

    platform: Platform = "gpu"
    attention: AttentionImplementation | None = None


DEFAULT = Backend()


class Arrays:
    """Bytes of one device's arrays of each kind, while some rows are computed.

    hidden [B, T, D]. query [B, T, N H], key [B, T, K H], mlp [B, T, F]: of a layer, sliced where it is tensor-parallel.
    scores [B, N, T, T] float32. statistics [B, N, T] float32 of an attention that stores no scores. gathered: a layer's
    matrices; matrix: one matrix of its mlp. table [V, D] float32: the device's slice of the vocabulary; lookup: the
    part of it that must be gathered or cast. dequantised: all layers' matrices, of an int8 base. sharing: the hidden
    states of all devices that share a table. logits: of one tile. low: bytes of a number in the compute dtype over
    those of a float32. projections: the part of `gathered` for queries, keys and values. library: whether a CPU's
    library computes norms.
    """

    def __init__(
        self,
        workload: Workload,
        role: RoleModel,
        rows: float,
        length: int,
        layout: LayoutName,
        tensor: int,
        backend: Backend,
        fsdp: int = 1,
    ):
        """rows: of a device, or of its tensor group where a layer is sliced. length: of a row."""
        self.model, self.head, self.platform = role.config, role.head, backend.platform
        self.counts = COUNTS[backend.platform]
        model, size, dtype = role.config, workload.itemsize, jnp.dtype(workload.dtype)
        width = 1 if layout in ("train", "score") else tensor
        tokens, sharing = rows * length, rows * length * (tensor if width == 1 else 1)
        attention = backend.attention or default_attention(
            backend.platform, dtype, model.head_dim, model.attention_softcap, length
        )
        heads, kv_heads = model.heads / width, max(model.kv_heads / width, 1)
        self.sliced, self.fsdp, self.tensor, self.library = width > 1, fsdp, tensor, tokens >= self.counts.library
        matrices = model.embed * model.head_dim * (2 * heads + 2 * kv_heads)
        matrix = model.embed * model.mlp / width
        matrices += (3 if model.gated_mlp else 2) * matrix
        vocab = model.padded_vocab / tensor
        # The tile of the log-prob kernel (`kernels.logprob.api`): even parts of the tokens, in multiples of 16.
        tile = max(256, 2**21 // int(vocab)) if backend.platform == "cpu" else 1024
        self.tiled = sharing > tile or not self.counts.packed  # untested: single tiles on accelerators
        tile = sharing if sharing <= tile else 16 * ceil(ceil(sharing / ceil(sharing / tile)) / 16)
        self.hidden = tokens * model.embed * size
        self.query = tokens * heads * model.head_dim * size
        self.key = tokens * kv_heads * model.head_dim * size
        self.mlp = tokens * model.mlp / width * size
        self.scores = WIDE * rows * heads * length**2 if attention == "xla" else 0.0
        self.statistics = 0.0 if attention == "xla" else WIDE * tokens * heads
        self.gathered, self.matrix = (0.0, 0.0) if layout == "generate" else (matrices * size, matrix * size)
        self.projections = 0.0 if layout == "generate" else model.embed * model.head_dim * (heads + 2 * kv_heads) * size
        # Tables of a shared base are stored in the form in which they are used, and have no gradients.
        self.table = 0.0 if role.shared else WIDE * vocab * model.embed
        self.lookup = 0.0 if fsdp == 1 and size == WIDE else self.table * size / WIDE
        self.rank = 0 if role.lora is None else role.lora.rank
        self.adapted, self.dequantised = role.lora is not None, model.layers * matrices * size * role.int8
        self.sharing = sharing * model.embed * size
        self.logits = WIDE * tile * vocab if role.head == "lm" else 0.0
        self.low = size / WIDE


def layer_arrays(sizes: Arrays, counts: Sequence[float], more: Sequence[float]) -> float:
    """Returns the bytes of a layer's arrays. counts: numbers of scores, mlp arrays, hidden states, queries and keys;
    more: additional ones under a softcap, with a gated GELU, norms after sublayers, and normed queries and keys.
    """
    model = sizes.model
    gelu = model.gated_mlp and model.activation == "gelu_tanh"
    switches = model.attention_softcap is not None, gelu, model.post_norms, model.qk_norm
    arrays = sizes.scores, sizes.mlp, sizes.hidden, sizes.query + sizes.key
    rows = zip(counts, more, switches, arrays, strict=True)
    return sum((count + extra * switch) * size for count, extra, switch, size in rows)


def kept_bytes(sizes: Arrays, remat: Remat) -> float:
    """Returns the bytes that a device keeps of all layers for the backward pass (`models.remat`)."""
    model, counts, layer = sizes.model, sizes.counts, sizes.hidden
    match remat:
        case "offload" if counts.offloads:  # those of all other layers are on the host
            return layer
        case "attention":
            layer += sizes.query
        case "products":
            layer += sizes.hidden + 2 * sizes.query + 2 * sizes.key + (2 if model.gated_mlp else 1) * sizes.mlp
            layer += sizes.hidden if model.post_norms else 0
        case "gather":
            layer += layer_arrays(sizes, counts.activations, counts.kept)
            layer += sizes.scores * sizes.low * counts.weights[0]
    return model.layers * (layer + (0 if remat in ("full", "offload") else sizes.statistics))


def infer_phase(sizes: Arrays, transposed: float, cast: float) -> Phase:
    """Returns the largest phase of a forward pass.

    transposed: stored bytes of the layers' matrices whose last dimension is gathered, `down` and `wo`. cast: bytes of
    the layers' weights in the compute dtype, where they are stored in another one.
    """
    counts, lm = sizes.counts, sizes.head == "lm"
    table = sizes.lookup if lm else 0.0
    through = {
        "activations": sizes.hidden,
        "gathered head": table if sizes.model.tie_embeddings or counts.early else 0.0,
        "transposed weights": transposed if counts.transposed else 0.0,
    }
    value = sizes.key if counts.packed else 0.0  # transposed ahead of the scores
    attention = {
        "dequantised layers": counts.dequantised[0] * sizes.dequantised,
        "attention scores": (counts.scores[0] + counts.weights[0] * sizes.low) * sizes.scores,
        "attention": value if sizes.scores else sizes.query + 2 * sizes.key,
        "gathered layers": sizes.gathered - (sizes.projections if counts.packed else 0.0),
        "cast layers": counts.cast * cast,
    }
    if copies := copies_ahead(sizes):
        attention = min(attention, attention | {"attention scores": sizes.scores + copies}, key=_total)
    # A CPU's library fuses an mlp that is between two norms.
    fused = sizes.library and sizes.model.post_norms and not sizes.sliced and not sizes.adapted
    products = 0.0 if fused else forward_products(sizes, counts.mlp[0])
    # Inputs are dead once attention's output is added to them, but their memory counts while there are scores, and
    # while all rows that share a table are embedded.
    before = max(attention["attention scores"], sizes.sharing + sizes.hidden if sizes.sharing > sizes.hidden else 0.0)
    covered = counts.packed and before + sizes.hidden <= products
    mlp = {
        "dequantised layers": counts.dequantised[1] * sizes.dequantised,
        "mlp": products,
        "activations": (1 if covered else 2) * sizes.hidden,
        "gathered layers": counts.gathered[0] * sizes.gathered,
        "cast layers": counts.cast * cast,
    }
    # A tied head uses the embedding's table, which is in the right order.
    shard = 0.0 if lm and sizes.model.tie_embeddings else counts.reordered * sizes.lookup / sizes.fsdp
    embedding = {"gathered embedding": sizes.lookup + shard, "embeddings": sizes.sharing}
    relaid: Phase = {}
    if counts.packed:
        # The shard is dead when rows are embedded, and the residual stream is made after that.
        embedding = {"gathered embedding": sizes.lookup + max(shard, sizes.sharing), "activations": 0.0}
        # A layer's matrices are gathered first, those of the mlp in another order, next to normed inputs.
        relaid = {"gathered layers": sizes.gathered + sizes.matrix, "activations": 2 * sizes.hidden}
    logits = {
        "log-prob tiles": (counts.logits[0] if sizes.tiled else 1) * sizes.logits,
        "gathered head": table,
        "gathered hidden states": max(sizes.sharing - sizes.hidden, 0.0),
    }
    # With a single tile the table is dead once the logits are computed.
    capped = sizes.model.softcap is not None
    single = {} if sizes.tiled else {"log-prob tiles": (counts.logits[1] + capped) * sizes.logits, "gathered head": 0.0}
    # The residual stream, the base's product, the adapter's product, and their sum.
    output = {"activations": 4 * sizes.hidden} if sizes.adapted and counts.packed else {}
    return _largest(through, embedding, relaid, attention, mlp, output, *((logits, single) if lm else ()))


def forward_products(sizes: Arrays, count: float) -> float:
    """Returns the bytes of an mlp's arrays in the forward pass. count: their number with a gate."""
    counts = sizes.counts
    return (count + counts.adapters * sizes.adapted - counts.ungated[0] * (not sizes.model.gated_mlp)) * sizes.mlp


def copies_ahead(sizes: Arrays) -> float:
    """Returns the bytes placed before the first scores if XLA for CPUs orders arrays by lifetime; else 0.

    XLA allocates arrays by size and again by lifetime, and takes the smaller total. By size, the scores of a layer take
    three places at the start. By lifetime, queries, keys and their copies come before the first scores; if they are as
    large as these, later scores reuse the memory of the copies. Compiled programs do so with learned positions on
    tensor-parallel devices, and with four or more query heads per key head on one device.
    """
    model = sizes.model
    if not sizes.counts.packed or sizes.adapted or sizes.sliced:
        return 0.0
    if model.positions == "learned":
        return 3 * sizes.query + sizes.hidden if sizes.tensor > 1 and 3 * sizes.query >= sizes.scores else 0.0
    grouped = model.heads >= 4 * model.kv_heads and sizes.tensor == 1 and not model.post_norms
    return 2 * (sizes.query + sizes.key) if grouped and 2 * sizes.query >= sizes.scores else 0.0


def _total(phase: Phase) -> float:
    return sum(phase.values())


def _largest(through: Phase, *phases: Phase) -> Phase:
    """Returns the largest of the phases, each together with `through`, which lives through all of them."""
    return max(({**through, **phase} for phase in phases), key=_total)


@dataclass(frozen=True)
class Gradients:
    """Float32 bytes of a device's gradients: of the layers, and of all trained weights (`whole`).

    tiled: all gradients in the compiler's layout. relaid: weights and both moments that a loop over minibatches first
    copies into another layout.
    """

    layers: float
    whole: float
    tiled: float
    relaid: float = 0.0


def train_phase(sizes: Arrays, remat: Remat, gradients: Gradients, micro_batches: int, transposed: float) -> Phase:
    """Returns the largest phase of a step: forward and backward of a micro-batch, or the optimizer after the last.

    transposed: as in `infer_phase`.
    """
    model, counts = sizes.model, sizes.counts
    if sizes.adapted and counts.merged:
        return merged_phase(sizes, recomputed=micro_batches > 1 and remat != "products")
    sums = gradients.whole if micro_batches > 1 else 0.0
    through = {
        "kept activations": kept_bytes(sizes, remat),
        "gradients": gradients.layers + sums,
        "transposed weights": transposed if counts.transposed else counts.copied * gradients.layers,
    }
    matrix = sizes.gathered / (3 if model.gated_mlp else 2)  # the mlp's matrices are most of a layer
    lm, tied = sizes.head == "lm", model.tie_embeddings
    # A tied table is gathered once for both of its uses.
    tables = counts.forward_tables if lm and (tied or micro_batches > 1) else 1
    in_head, behind = counts.head_tables, counts.backward_tables[0 if lm else 1]
    shard = gradients.whole - gradients.layers
    head_tiles = counts.logits[0] * sizes.logits
    scatter: Phase = {}
    if counts.packed:
        # Gathered tables stay if a loop over micro-batches reads them again; the head's table stays until its gradient
        # is complete, which is last with a single tile. Gradients of tables are allocated as zeros before all else.
        gathered = sizes.fsdp > 1
        again = gathered * (micro_batches > 1) * (2 if lm and not tied else 1)
        tables = 1 + lm + max(again, gathered * lm)
        in_head, behind, shard = tables - (lm and not sizes.tiled), 1 + again, sizes.table / sizes.fsdp * lm
        # A tile's part of the table's gradient is computed from one array of the tile.
        head_tiles = max(head_tiles, sizes.table + sizes.logits)
        # The embedding's gradient once more, as it is scattered.
        scatter = {"gradients of tables": (1 + again + gathered) * sizes.table + shard, "activations": sizes.sharing}
    forward = {
        "attention scores": (counts.scores[1] + counts.weights[0] * sizes.low) * sizes.scores,
        "activations": 2 * sizes.sharing + sizes.hidden,
        "gathered layers": counts.gathered[1] * sizes.gathered,
        "gradients of tables": tables * sizes.table,
    }
    saved = remat in ("products", "gather")
    queries = (counts.queries[0] + counts.queries[1] * model.qk_norm) * sizes.query
    keys = (2 + counts.queries[1] * model.qk_norm) * sizes.key
    hidden, *more = counts.backward
    cases = -saved, sizes.library, model.post_norms, sizes.sliced and model.gated_mlp
    hidden += sum(count * case for count, case in zip(more, cases, strict=True))
    capped = counts.packed and model.attention_softcap is not None
    backward = {
        "attention scores": (counts.scores[2] + capped + counts.weights[1] * sizes.low) * sizes.scores,
        "mlp": (counts.mlp[1] - max(2 * saved, counts.ungated[1] * (not model.gated_mlp))) * sizes.mlp,
        "activations": hidden * sizes.hidden + queries + keys,
        "gathered layers": sizes.gathered - matrix,
        "gradients of tables": behind * sizes.table + shard,
    }
    attention = {
        **backward,
        "attention scores": counts.scores[3] * sizes.scores,
        "mlp": 0.0,
        "activations": 2 * sizes.hidden + queries + keys,
    }
    logits = {
        "log-prob tiles": head_tiles,
        "gradients of tables": in_head * sizes.table,
        "activations": 2 * sizes.sharing + sizes.hidden,
    }
    step = {"optimizer step": counts.optimizer * gradients.tiled, "relaid states": gradients.relaid}
    model_phase = _largest(through, forward, backward, attention, logits if lm else {}, scatter)
    return max(model_phase, step, key=_total)


def merged_phase(sizes: Arrays, *, recomputed: bool) -> Phase:
    """Returns the largest phase of an adapter's step where all layers' activations live at one time.

    They are the arrays of `layer_arrays`, and the output of each adapter's first matrix. In addition there is a tile of
    the head, or the gradients of the last layer's mlp or attention.

    recomputed: whether mlp arrays are made only after the head: in a loop over micro-batches that keeps no products.
    """
    model, counts = sizes.model, sizes.counts
    hidden = 4 + 4 * sizes.library
    layer = layer_arrays(sizes, (2, 6, hidden, 2), (1, 2, 3, 3))
    early = layer_arrays(sizes, (2, 0, hidden, 2), (1, 0, 3, 3)) if recomputed else layer
    through = {
        "kept activations": model.layers * layer,
        "adapters": model.layers * len(PROJECTIONS) * sizes.hidden * sizes.rank / model.embed,
        "dequantised layers": sizes.dequantised,
    }
    logits = {
        "kept activations": model.layers * early,
        "log-prob tiles": counts.logits[0] * sizes.logits,
        "activations": 2 * sizes.hidden,
    }
    mlp = {"mlp": (6 if model.activation == "silu" else 2) * sizes.mlp}
    return _largest(through, logits, mlp, {"attention scores": sizes.scores, "activations": sizes.query})


def cache_bytes(model: ModelConfig, rows: float, positions: int, tensor: int, itemsize: int) -> float:
    """Returns the bytes of keys and values of a tensor group's rows on each of its devices."""
    return 2.0 * model.layers * rows * max(model.kv_heads / tensor, 1) * positions * model.head_dim * itemsize


def generate_phase(prompts: Arrays, cache: float, wave: float, logits: float, tensor: int) -> Phase:
    """Returns the largest phase of prefill and decoding.

    prompts: arrays of the rows that are prefilled together. cache: bytes for all slots. wave: bytes of the prefilled
        rows' own cache if the cache of all slots exists already; else 0. logits: of a step's rows, whole vocabulary.
    """
    counts, layers, tpu = prompts.counts, prompts.model.layers, prompts.platform == "tpu"
    scores = (counts.scores[0] + counts.weights[0] * prompts.low) * prompts.scores
    # A product and its sum over devices; a TPU receives the parts of all devices at once.
    summed = prompts.hidden * (tensor if tpu else min(tensor, 2))
    # Except on a TPU, prefill does not compute the last layer's output, and its cache comes last.
    new_cache, missing = wave or cache, (0, 0) if tpu else (2, 1)
    first, second = (cache * bool(wave) + new_cache * max(layers - back, 1) / layers for back in missing)
    packed = counts.packed
    inputs = prompts.hidden + prompts.key if packed else summed  # values are transposed before the scores
    attention = {"attention scores": scores, "activations": inputs, "KV cache": first}
    products = forward_products(prompts, counts.mlp[2])
    # The mlp's last array reuses the memory of a layer's normed inputs.
    inputs = summed if tpu else prompts.hidden + packed * max(prompts.hidden - prompts.mlp, 0.0)
    mlp = {"mlp": products, "activations": inputs, "KV cache": second}
    # The residual stream, a product, and its sum or norm; also the adapter's product.
    summing = packed and (tensor > 1 or prompts.model.post_norms or prompts.adapted)
    output = {"activations": (3 + prompts.adapted) * prompts.hidden, "KV cache": second} if summing else {}
    decode = {"KV cache": cache, "logits": counts.logits[0] * logits}
    for phase, count in zip((attention, mlp), counts.dequantised, strict=True):
        phase["dequantised layers"] = count * prompts.dequantised
    return _largest({}, attention, mlp, output, decode)
