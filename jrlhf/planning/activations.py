"""Predicted temporary memory of compiled calls, in closed form.

A call is a sequence of phases (a layer's attention, its mlp, the head, the optimizer). Its memory is that of the
largest phase, plus the arrays that live through all phases. Sizes follow from shapes; only the numbers of arrays of a
kind that exist at once (`_COUNTS`) were read from XLA's reports of its peaks, for each backend.

A device has B rows of T tokens each; D, N, K, H, F, V are as in `models.config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from types import SimpleNamespace
from typing import Literal

import jax.numpy as jnp

from jrlhf.meshes.plan import Placement
from jrlhf.models.attention import default_attention
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.flash import AttentionImplementation
from jrlhf.models.remat import Remat
from jrlhf.models.weights import PROJECTIONS
from jrlhf.planning.workload import RoleModel, Workload

WIDE = 4  # bytes of a float32
Platform = Literal["cpu", "gpu", "tpu"]
Phase = dict[str, float]  # bytes that a device holds at one time, by name

# The largest number of arrays of each kind that XLA holds at once, on a CPU, a GPU and a TPU. Where XLA for CPUs has
# another order of steps, rather than other numbers, the code below tests `sizes.cpu`.
_COUNTS = {
    # [B, N, T, T] float32 of a layer; `attention` is that operation's own backward pass. On CPU products, softmax and
    # transposes are separate steps, none of which writes in place.
    "scores_forward": (3, 1, 1),
    "scores_trained": (3, 2.25, 2),
    "scores_backward": (2, 2, 2),
    "scores_attention": (4, 0, 0),
    # The same after the softmax, in the compute dtype.
    "weights_forward": (0, 1, 1),
    "weights_backward": (0, 2, 2),
    # [B, T, F]; additional ones of adapters; how many fewer without a gate (backward the same that kept products save).
    "mlp_forward": (3, 2, 2),
    "mlp_backward": (6, 3, 3),
    "mlp_prefill": (3, 2, 1),
    "adapters": (2, 0, 0),
    "ungated_forward": (1, 0, 0),
    "ungated_backward": (2, 0, 0),
    # [B, T, D] of a layer's backward pass; fewer if products are kept; more if a CPU's library computes norms, with
    # norms after sublayers, with a sliced gate.
    "hidden": (7, 10, 10),
    "hidden_saved": (4, 0, 0),
    "hidden_library": (4, 0, 0),
    "hidden_post_norms": (4, 0, 0),
    "hidden_sliced_gate": (2, 0, 0),
    # Queries [B, T, N H] there; how many more queries and keys with norms.
    "queries": (2, 1, 1),
    "queries_normed": (3, 0, 0),
    # [V, D] float32, gathered tables and their gradients on the device's slice of the vocabulary, in training.
    "tables_forward": (3, 1, 1),
    "tables_backward": (1, 1, 4.2),
    "tables_backward_scalar": (1, 0, 2.56),
    "tables_head": (3, 2, 4.2),
    # [tile, V] float32: of a loop over tiles, and of a single tile without a softcap.
    "logits": (3, 1, 3),
    "logits_single": (2, 1, 3),
    # A layer's weights: with its mlp forward; in training, where two layers meet.
    "gathered_forward": (1 / 3, 1, 1),
    "gathered_trained": (1.6, 1, 1),
    # All layers' weights: in the layout that the loop of a training step reads; cast before the loop that scores.
    "copied": (0, 0, 1.15),
    "cast": (0, 0, 1),
    # All layers' matrices of an int8 base as floats, during the first layer's attention and mlp; 0: one layer's only.
    "dequantised_attention": (1, 0, 0),
    "dequantised_mlp": (0.6, 0, 0),
    # Copies of all trained numbers while the optimizer steps. On accelerators the update's results are copies next to
    # the gradients: a conditional does not write in place.
    "optimizer": (2, 4, 4),
    # Arrays of a layer that remat="gather" keeps: scores, [B, T, F], [B, T, D], queries and keys; and the additional
    # ones with a softcap (and a mask), with a gated GELU, with norms after sublayers, with normed queries and keys.
    "kept": ((2, 6, 7, 2), (2.25, 7, 25, 0), (2.25, 7, 21, 0)),
    "kept_more": ((2.25, 2, 6, 3), (0, 0, 0, 0), (0, 0, 0, 0)),
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
        self, workload: Workload, role: RoleModel, rows: float, length: int, placement: Placement, backend: Backend
    ):
        """rows: of a device, or of its tensor group where a layer is sliced. length: of a row."""
        self.model, self.counts, self.lm = role.config, COUNTS[backend.platform], role.head == "lm"
        self.cpu, self.tpu = backend.platform == "cpu", backend.platform == "tpu"
        model, size, dtype = role.config, workload.itemsize, jnp.dtype(workload.dtype)
        width, fsdp, tensor = placement.slices, placement.fsdp, placement.tensor
        tokens, sharing = rows * length, rows * length * (tensor // width)
        attention = backend.attention or default_attention(
            backend.platform, dtype, model.head_dim, model.attention_softcap, length
        )
        heads, kv_heads = model.heads / width, max(model.kv_heads / width, 1)
        self.sliced, self.fsdp, self.tensor = width > 1, fsdp, tensor
        self.library = self.cpu and tokens >= 4096  # from there on the CPU's kernel library computes the sums of norms
        matrices = model.embed * model.head_dim * (2 * heads + 2 * kv_heads)
        matrix = model.embed * model.mlp / width
        matrices += (3 if model.gated_mlp else 2) * matrix
        vocab = model.padded_vocab / tensor
        # The tile of the log-prob kernel (`kernels.logprob.api`): even parts of the tokens, in multiples of 16.
        tile = max(256, 2**21 // int(vocab)) if self.cpu else 1024
        self.tiled = sharing > tile or not self.cpu  # untested: single tiles on accelerators
        tile = sharing if sharing <= tile else 16 * ceil(ceil(sharing / ceil(sharing / tile)) / 16)
        self.hidden = tokens * model.embed * size
        self.query = tokens * heads * model.head_dim * size
        self.key = tokens * kv_heads * model.head_dim * size
        self.mlp = tokens * model.mlp / width * size
        self.scores = WIDE * rows * heads * length**2 if attention == "xla" else 0.0
        self.statistics = 0.0 if attention == "xla" else WIDE * tokens * heads
        gathered = 0 if placement.layout == "generate" else size  # bytes of a number in a gathered layer
        self.gathered, self.matrix = matrices * gathered, matrix * gathered
        self.projections = model.embed * model.head_dim * (heads + 2 * kv_heads) * gathered
        # Tables of a shared base are stored in the form in which they are used, and have no gradients.
        self.table = 0.0 if role.shared else WIDE * vocab * model.embed
        self.lookup = 0.0 if fsdp == 1 and size == WIDE else self.table * size / WIDE
        self.rank = 0 if role.lora is None else role.lora.rank
        self.adapted, self.dequantised = role.lora is not None, model.layers * matrices * size * role.int8
        self.sharing = sharing * model.embed * size
        self.logits = WIDE * tile * vocab if self.lm else 0.0
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
        case "offload" if not sizes.cpu:  # those of all other layers are in the host's separate memory
            return layer
        case "attention":
            layer += sizes.query
        case "products":
            layer += sizes.hidden + 2 * sizes.query + 2 * sizes.key + (2 if model.gated_mlp else 1) * sizes.mlp
            layer += sizes.hidden if model.post_norms else 0
        case "gather":
            layer += layer_arrays(sizes, counts.kept, counts.kept_more)
            layer += sizes.scores * sizes.low * counts.weights_forward
    return model.layers * (layer + (0 if remat in ("full", "offload") else sizes.statistics))


def infer_phase(sizes: Arrays, transposed: float, cast: float) -> Phase:
    """Returns the largest phase of a forward pass.

    transposed: stored bytes of the layers' matrices whose last dimension is gathered, `down` and `wo`. cast: bytes of
    the layers' weights in the compute dtype, where they are stored in another one.
    """
    counts, lm, cpu = sizes.counts, sizes.lm, sizes.cpu
    table = sizes.lookup if lm else 0.0
    through = {
        "activations": sizes.hidden,
        # XLA for CPUs gathers a head before the layers, even where no embedding shares its table.
        "gathered head": table if sizes.model.tie_embeddings or cpu else 0.0,
        "transposed weights": transposed if counts.transposed else 0.0,
    }
    value = sizes.key if cpu else 0.0  # transposed ahead of the scores
    attention = {
        "dequantised layers": counts.dequantised_attention * sizes.dequantised,
        "attention scores": (counts.scores_forward + counts.weights_forward * sizes.low) * sizes.scores,
        "attention": value if sizes.scores else sizes.query + 2 * sizes.key,
        "gathered layers": sizes.gathered - (sizes.projections if cpu else 0.0),
        "cast layers": counts.cast * cast,
    }
    if copies := copies_ahead(sizes):
        attention = min(attention, attention | {"attention scores": sizes.scores + copies}, key=_total)
    # A CPU's library fuses an mlp that is between two norms.
    fused = sizes.library and sizes.model.post_norms and not sizes.sliced and not sizes.adapted
    products = 0.0 if fused else forward_products(sizes, counts.mlp_forward)
    # Inputs are dead once attention's output is added to them, but their memory counts while there are scores, and
    # while all rows that share a table are embedded. On CPU the mlp's arrays can reuse it.
    before = max(attention["attention scores"], sizes.sharing + sizes.hidden if sizes.sharing > sizes.hidden else 0.0)
    covered = cpu and before + sizes.hidden <= products
    mlp = {
        "dequantised layers": counts.dequantised_mlp * sizes.dequantised,
        "mlp": products,
        "activations": (1 if covered else 2) * sizes.hidden,
        "gathered layers": counts.gathered_forward * sizes.gathered,
        "cast layers": counts.cast * cast,
    }
    # A tied head uses the embedding's table, which is in the right order.
    shard = 0.0 if lm and sizes.model.tie_embeddings else counts.reordered * sizes.lookup / sizes.fsdp
    embedding = {"gathered embedding": sizes.lookup + shard, "embeddings": sizes.sharing}
    relaid: Phase = {}
    if cpu:
        # The shard is dead when rows are embedded, and the residual stream is made after that.
        embedding = {"gathered embedding": sizes.lookup + max(shard, sizes.sharing), "activations": 0.0}
        # A layer's matrices are gathered first, those of the mlp in another order, next to normed inputs.
        relaid = {"gathered layers": sizes.gathered + sizes.matrix, "activations": 2 * sizes.hidden}
    logits = {
        "log-prob tiles": (counts.logits if sizes.tiled else 1) * sizes.logits,
        "gathered head": table,
        "gathered hidden states": max(sizes.sharing - sizes.hidden, 0.0),
    }
    # With a single tile the table is dead once the logits are computed.
    whole = (counts.logits_single + (sizes.model.softcap is not None)) * sizes.logits
    single = {} if sizes.tiled else {"log-prob tiles": whole, "gathered head": 0.0}
    # The residual stream, the base's product, the adapter's product, and their sum.
    output = {"activations": 4 * sizes.hidden} if sizes.adapted and cpu else {}
    return _largest(through, embedding, relaid, attention, mlp, output, *((logits, single) if lm else ()))


def forward_products(sizes: Arrays, count: float) -> float:
    """Returns the bytes of an mlp's arrays in the forward pass. count: their number with a gate."""
    counts = sizes.counts
    return (count + counts.adapters * sizes.adapted - counts.ungated_forward * (not sizes.model.gated_mlp)) * sizes.mlp


def copies_ahead(sizes: Arrays) -> float:
    """Returns the bytes placed before the first scores if XLA for CPUs orders arrays by lifetime; else 0.

    XLA allocates arrays by size and again by lifetime, and takes the smaller total. By size, the scores of a layer take
    three places at the start. By lifetime, queries, keys and their copies come before the first scores; if they are as
    large as these, later scores reuse the memory of the copies. Compiled programs do so with learned positions on
    tensor-parallel devices, and with four or more query heads per key head on one device.
    """
    model = sizes.model
    if not sizes.cpu or sizes.adapted or sizes.sliced:
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
class GradientBytes:
    """Float32 bytes of a device's gradients: of the layers, and of all trained weights (`whole`).

    tiled: all gradients in the compiler's layout. relaid: weights and both moments that a loop over minibatches first
    copies into another layout.
    """

    layers: float
    whole: float
    tiled: float
    relaid: float = 0.0


def train_phase(sizes: Arrays, remat: Remat, gradients: GradientBytes, micro_batches: int, transposed: float) -> Phase:
    """Returns the largest phase of a step: forward and backward of a micro-batch, or the optimizer after the last.

    transposed: as in `infer_phase`.
    """
    model, counts, lm, cpu = sizes.model, sizes.counts, sizes.lm, sizes.cpu
    if sizes.adapted and cpu:
        # Layers that are not in a loop are merged with their recomputation, so that no remat policy saves anything.
        return merged_phase(sizes, recomputed=micro_batches > 1 and remat != "products")
    sums = gradients.whole if micro_batches > 1 else 0.0
    through = {
        "kept activations": kept_bytes(sizes, remat),
        "gradients": gradients.layers + sums,
        "transposed weights": transposed if counts.transposed else counts.copied * gradients.layers,
    }
    matrix = sizes.gathered / (3 if model.gated_mlp else 2)  # the mlp's matrices are most of a layer
    tied = model.tie_embeddings
    # A tied table is gathered once for both of its uses.
    tables = counts.tables_forward if lm and (tied or micro_batches > 1) else 1
    in_head, behind = counts.tables_head, counts.tables_backward if lm else counts.tables_backward_scalar
    shard = gradients.whole - gradients.layers
    head_tiles = counts.logits * sizes.logits
    scatter: Phase = {}
    if cpu:
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
        "attention scores": (counts.scores_trained + counts.weights_forward * sizes.low) * sizes.scores,
        "activations": 2 * sizes.sharing + sizes.hidden,
        "gathered layers": counts.gathered_trained * sizes.gathered,
        "gradients of tables": tables * sizes.table,
    }
    tables_behind = {"gathered layers": sizes.gathered - matrix, "gradients of tables": behind * sizes.table + shard}
    backward, attention = (part | tables_behind for part in _backward(sizes, remat))
    logits = {
        "log-prob tiles": head_tiles,
        "gradients of tables": in_head * sizes.table,
        "activations": 2 * sizes.sharing + sizes.hidden,
    }
    step = {"optimizer step": counts.optimizer * gradients.tiled, "relaid states": gradients.relaid}
    model_phase = _largest(through, forward, backward, attention, logits if lm else {}, scatter)
    return max(model_phase, step, key=_total)


def _backward(sizes: Arrays, remat: Remat) -> tuple[Phase, Phase]:
    """Returns the arrays of a layer's backward pass where they are most: in its mlp, and in its attention."""
    model, counts, saved = sizes.model, sizes.counts, remat in ("products", "gather")
    queries = (counts.queries + counts.queries_normed * model.qk_norm) * sizes.query
    keys = (2 + counts.queries_normed * model.qk_norm) * sizes.key
    hidden = counts.hidden - counts.hidden_saved * saved + counts.hidden_library * sizes.library
    hidden += counts.hidden_post_norms * model.post_norms
    hidden += counts.hidden_sliced_gate * (sizes.sliced and model.gated_mlp)
    capped = sizes.cpu and model.attention_softcap is not None
    mlp = {
        "attention scores": (counts.scores_backward + capped + counts.weights_backward * sizes.low) * sizes.scores,
        "mlp": (counts.mlp_backward - max(2 * saved, counts.ungated_backward * (not model.gated_mlp))) * sizes.mlp,
        "activations": hidden * sizes.hidden + queries + keys,
    }
    attention = {
        "attention scores": counts.scores_attention * sizes.scores,
        "mlp": 0.0,
        "activations": 2 * sizes.hidden + queries + keys,
    }
    return mlp, attention


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
        "log-prob tiles": counts.logits * sizes.logits,
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
    counts, layers, cpu, tpu = prompts.counts, prompts.model.layers, prompts.cpu, prompts.tpu
    scores = (counts.scores_forward + counts.weights_forward * prompts.low) * prompts.scores
    # A product and its sum over devices; a TPU receives the parts of all devices at once.
    summed = prompts.hidden * (tensor if tpu else min(tensor, 2))
    # Except on a TPU, prefill does not compute the last layer's output, and its cache comes last.
    new_cache, missing = wave or cache, (0, 0) if tpu else (2, 1)
    first, second = (cache * bool(wave) + new_cache * max(layers - back, 1) / layers for back in missing)
    inputs = prompts.hidden + prompts.key if cpu else summed  # values are transposed before the scores
    attention = {
        "attention scores": scores,
        "activations": inputs,
        "KV cache": first,
        "dequantised layers": counts.dequantised_attention * prompts.dequantised,
    }
    products = forward_products(prompts, counts.mlp_prefill)
    # The mlp's last array reuses the memory of a layer's normed inputs.
    inputs = summed if tpu else prompts.hidden + cpu * max(prompts.hidden - prompts.mlp, 0.0)
    mlp = {
        "mlp": products,
        "activations": inputs,
        "KV cache": second,
        "dequantised layers": counts.dequantised_mlp * prompts.dequantised,
    }
    # The residual stream, a product, and its sum or norm; also the adapter's product.
    summing = cpu and (tensor > 1 or prompts.model.post_norms or prompts.adapted)
    output = {"activations": (3 + prompts.adapted) * prompts.hidden, "KV cache": second} if summing else {}
    decode = {"KV cache": cache, "logits": counts.logits * logits}
    return _largest({}, attention, mlp, output, decode)
