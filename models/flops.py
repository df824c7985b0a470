"""Counts the operations and bytes that a model's calls need, from its config alone, to compare with a device's peak.

An operation is one multiplication or addition of a matrix product: a weight costs 2 per token. Not counted are
elementwise work such as norms and softmaxes, recomputation in a backward pass, and padding.
"""

import math
from functools import partial

import numpy as np
from jaxtyping import Int

from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.lora import LoRAConfig, adapter_weights
from jrlhf.models.weights import HeadKind, weights

Lengths = Int[np.ndarray, "B"]  # tokens of each row


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers."""
    return sum(math.prod(weight.shape) for weight in weights(config) if weight.inputs)


def head_weights(config: ModelConfig, head: HeadKind = "lm") -> int:
    """Numbers in the head: the unembedding (of the table's padding too), or the scalar head."""
    return config.embed * (config.padded_vocab if head == "lm" else 1)


def lora_weights(config: ModelConfig, lora: LoRAConfig) -> int:
    """Numbers in an adapter's matrices."""
    return sum(math.prod(weight.shape) for weight in adapter_weights(config, lora))


def attention_operations(config: ModelConfig, lengths: Lengths) -> float:
    """Operations of causal attention's two products, forward: 4 for each head, its dimensions and pair of positions."""
    per_pair = 4.0 * config.heads * config.head_dim
    local = sum(config.locality)
    pairs = local * _pairs(lengths, config.window) if local else 0.0
    return per_pair * (pairs + (config.layers - local) * _pairs(lengths, None))


def forward_operations(
    config: ModelConfig,
    lengths: Lengths,
    head: HeadKind = "lm",
    lora: LoRAConfig | None = None,
    predicted: Lengths | None = None,
    *,
    passes: float = 1.0,
) -> float:
    """Operations of scoring these rows: `make_logprobs` (head "lm"), `make_values` ("scalar").

    2 (layers + adapters) a token, 2 head for each predicted token, and causal attention.

    predicted: number of predicted tokens of each row, with the head "lm"; None: all but the first.
    passes: number of forward passes with the same work: 3 with a backward pass. Then a base under an adapter counts 2,
        because it has no weight gradients.
    """
    trained = 2.0 * passes
    frozen = trained if lora is None else max(2.0, trained - 2.0)
    tokens = float(np.sum(lengths, dtype=np.float64))
    predicted = np.maximum(lengths - 1, 0) if predicted is None else predicted
    scored = float(np.sum(predicted, dtype=np.float64)) if head == "lm" else tokens
    of_head = trained if head == "scalar" else frozen  # a scalar head is the adapter's own
    adapter = 0.0 if lora is None else lora_weights(config, lora) * trained
    dense = (frozen * layer_weights(config) + adapter) * tokens + of_head * head_weights(config, head) * scored
    return dense + passes * attention_operations(config, lengths)


# Operations of one forward and one backward pass over these rows.
training_operations = partial(forward_operations, passes=3.0)


def weight_bytes(config: ModelConfig, itemsize: float, *, layer_itemsize: float | None = None) -> float:
    """Bytes of weights that a decode step reads: all matrices but an untied embedding, of which it reads single rows.

    itemsize: bytes per number; layer_itemsize: the same for the layers' matrices, if it differs (1 for int8).
    """
    layers = itemsize if layer_itemsize is None else layer_itemsize
    return layer_weights(config) * layers + head_weights(config) * itemsize


def cache_bytes(config: ModelConfig, itemsize: float) -> float:
    """Bytes of the keys and values of one position, in all layers."""
    return 2.0 * config.layers * config.kv_heads * config.head_dim * itemsize


def generation_seconds(
    config: ModelConfig,
    prompts: Lengths,
    responses: Lengths,
    *,
    bandwidth: float,
    operations: float,
    itemsize: float,
    layer_itemsize: float | None = None,
    copies: int = 1,
    samples: int = 1,
) -> float:
    """The minimum seconds of a generation: its prefill by operations, each decode step by bytes or operations.

    A local layer sees as many positions as its window has.

    All rows are decoded together; step t reads the weights once, and keys and values of the positions so far of rows
    whose response is longer than t. A step takes the longer of its bytes over `bandwidth` and its operations over
    `operations`.

    bandwidth, operations: bytes and operations a second of all devices together.
    itemsize, layer_itemsize: of weights as in `weight_bytes`; of the cache `itemsize`.
    copies: number of copies of the weights, each of which is read at every step: groups of devices with their own rows.
    samples: responses to each prompt, which are neighbouring rows and share its prefill.
    """
    steps = np.arange(int(responses.max(initial=0)))[:, None]
    running = responses[None, :] > steps  # [T, B]
    rows = running.sum(axis=1)
    positions = prompts[None, :] + steps
    near = positions if config.window is None else np.minimum(positions, config.window)
    nearby = sum(config.locality) / config.layers  # share of local layers
    whole, local = (running * positions).sum(axis=1), (running * near).sum(axis=1)
    seen = whole + nearby * (local - whole)  # in the mean of the layers
    read = copies * weight_bytes(config, itemsize, layer_itemsize=layer_itemsize) + seen * cache_bytes(config, itemsize)
    attention = 4.0 * config.layers * config.heads * config.head_dim * seen
    work = 2.0 * (layer_weights(config) + head_weights(config)) * rows + attention
    decode = np.maximum(read / bandwidth, work / operations).sum()
    read_once = prompts[::samples]
    prefill = 2.0 * layer_weights(config) * float(read_once.sum()) + attention_operations(config, read_once)
    return float(decode) + prefill / operations


def _pairs(lengths: Lengths, window: int | None) -> float:
    """Number of pairs of a position and one that it sees: itself and all before it, or those in the window."""
    whole = lengths.astype(np.float64)
    inside = whole if window is None else np.minimum(whole, window)
    return float(np.sum(inside * (inside + 1) / 2 + (whole - inside) * inside))
