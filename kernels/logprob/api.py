"""Log-probabilities of given tokens, and sums of losses. They check the arguments and choose an implementation."""

from typing import Any, get_args

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import target_platform
from jrlhf.kernels.logprob import reference, xla
from jrlhf.kernels.logprob.common import Head, Terms, evaluate, once
from jrlhf.kernels.logprob.implementations import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

# On CPUs and GPUs it was measured to be fastest, forward and backward together; on TPUs nothing has been measured.
DEFAULT: Implementation = "xla"


def token_logprobs(
    hidden: Float[Array, "*N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "*N"] | Int[Array, "*N K"],
    *,
    temperature: float | Float[Array | np.ndarray, "..."] = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    axis_name: str | None = None,
    tile: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*N"] | Float[Array, "*N K"], Float[Array, "*N"]]:
    """Log-probabilities of `targets`, in their shape, and the entropy of the whole distribution [*N], in nats.

        z = softcap·tanh(hidden·unembeddingᵀ / softcap) / temperature   (no softcap: hidden·unembeddingᵀ / temperature)
        logprob = z_target − log Σ_v e^{z_v}        entropy = −Σ_v p_v log p_v,  p = softmax(z)

    Differentiable (reverse mode, once) in `hidden` and `unembedding`, through both results. Temporary memory is a few
    `[tile, V]` blocks and, in the backward pass, dW in float32; it does not grow with `N·V`, except for `reference`.
    Matmuls take the inputs' dtype and accumulate in float32; everything else is float32.

    Vocabulary-parallel: inside `jax.shard_map` (with its default `check_vma=True`) pass `axis_name`. Then `unembedding`
    is this device's contiguous slice of the vocabulary, the slices being in the order of the axis, while `hidden` and
    `targets` are the same rows on every device of the axis. The results are the same on all devices of the axis. The
    gradient of `unembedding` is this slice's; that of `hidden` is summed over the axis by the transpose of the
    operation that made it vary: the caller's `all_gather` (a reduce-scatter), or this function's own cast (a psum).
    Several devices without `axis_name` need `shard_map`, too: each then loops over its own tokens.

    Args:
        hidden: final hidden states, floating, such as [N, D] or [B, T, D].
        unembedding: one row per token, in the dtype of `hidden`.
        targets: token ids; K of each token for `xla` and `reference` only. One outside [0, vocab_size) has
            log-probability −inf and no gradient.
        temperature: divides the logits after the softcap; an array, even if traced, divides `hidden`, without softcap:
            one number, or one for each token [*N, 1]. The quotient is rounded to the dtype of `hidden`.
        softcap: bound of the logits before temperature; None for none.
        vocab_size: rows with this global index and above are padding and have probability 0; None: all rows count.
        axis_name: the mesh axis over which the vocabulary is divided.
        tile: maximum number of tokens whose logits exist at one time; if all `N` fit, there is no loop. None: 1024 on
            accelerators; on CPU as many as make 8 MiB of float32 logits, but at least 256.
        implementation: None for the platform's default. A named one that cannot run raises, it never falls back.
    """
    check_arrays(hidden, unembedding, targets)
    tokens, of_token = hidden.shape[:-1], targets.shape[hidden.ndim - 1 :]
    if isinstance(temperature, Array | np.ndarray):
        sizes = zip(reversed(temperature.shape), (1, *reversed(tokens)), strict=False)
        if temperature.ndim > hidden.ndim or any(size not in (1, whole) for size, whole in sizes):
            raise ValueError(f"temperature must be one number, or one for each token, got shape {temperature.shape}")
        if softcap is not None:
            raise ValueError(f"softcap={softcap} needs a temperature that is a Python number, got an array")
        hidden, temperature = (hidden.astype(jax.numpy.float32) / temperature).astype(hidden.dtype), 1.0
    if len(tokens) != 1:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        targets = targets.reshape(len(hidden), *of_token)
    head = head_of(unembedding, temperature, softcap, vocab_size, axis_name)
    logprobs, entropy = _logprobs(hidden, unembedding, targets, head, tile, implementation)
    return logprobs.reshape(*tokens, *of_token), entropy.reshape(tokens)


def token_sums(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "N"] | Int[Array, "N K"],
    data: Any,
    terms: Terms,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    axis_name: str | None = None,
    tile: int | None = None,
    implementation: Implementation | None = None,
    entropy_gradient: bool = True,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Sums over tokens of a loss and of metrics that are functions of each token's results, float32.

        loss = Σ_n terms(logprobs, entropy, data)[0]_n        metrics[name] = Σ_n terms(…)[1][name]_n

    of `token_logprobs`'s results. Where the loss is known while a tile's logits exist, so is its gradient: with the
    implementation `xla`, differentiation takes 6·N·D·V operations, where `token_logprobs` takes 8 because it computes
    the logits once more. The other implementations compose `token_logprobs` with the sums.

    Differentiable (reverse mode, once) in `hidden` and `unembedding`, through the loss only: metrics and `data` have no
    gradient. Under differentiation the forward pass holds dW in float32 and dX in addition to a few `[tile, V]` blocks.

    Vocabulary-parallel as `token_logprobs`: `terms` sees whole log-probabilities on every device of `axis_name`, each
    device must bring the same `data`, and the sums are the same on all of them. Other arguments: see there.

    Args:
        data: a pytree of arrays [N, ...], one entry a token.
        terms: (logprobs [n] or [n, K], entropy [n], data of these tokens) -> (loss [n], {name: metric [n]}). Called on
            one tile at a time, it must treat each token by itself and may close over no traced array: these are `data`.
        entropy_gradient: False where the loss does not depend on the entropy, which it then sees as a constant.

    Raises ValueError for tokens in more than one dimension, and for data of another length.
    """
    check_arrays(hidden, unembedding, targets)
    head = head_of(unembedding, temperature, softcap, vocab_size, axis_name)
    if hidden.ndim != 2:
        raise ValueError(f"token_sums takes tokens in one dimension, got hidden {hidden.shape}")
    for x in jax.tree.leaves(data):
        if x.shape[:1] != targets.shape[:1]:
            raise ValueError(f"data must have one entry for each of {targets.shape[0]} tokens, got shape {x.shape}")
    if _implementation(implementation) == "xla":
        tile = tile_of(unembedding, tile)
        return xla.token_sums(
            hidden, unembedding, targets, data, terms, head, tile=tile, entropy_gradient=entropy_gradient
        )
    logprobs, entropy = _logprobs(hidden, unembedding, targets, head, tile, implementation)
    entropy = entropy if entropy_gradient else lax.stop_gradient(entropy)
    terms_of_tokens = evaluate(terms, logprobs, entropy, jax.tree.map(lax.stop_gradient, data))
    return jax.tree.map(lambda x: once(jax.numpy.sum(x), axis_name), terms_of_tokens)


def _logprobs(
    hidden: Array,
    unembedding: Array,
    targets: Array,
    head: Head,
    tile: int | None,
    implementation: Implementation | None,
) -> tuple[Array, Array]:
    tile, implementation = tile_of(unembedding, tile), _implementation(implementation)
    if targets.ndim > 1 and implementation not in ("reference", "xla"):
        raise ValueError(f"implementation={implementation!r} takes one target a token, got targets {targets.shape}")
    match implementation:
        case "reference":
            return reference.token_logprobs(hidden, unembedding, targets, head)
        case "xla":
            return xla.token_logprobs(hidden, unembedding, targets, head, tile=tile)
        case "pallas_tpu":
            from jrlhf.kernels.logprob import pallas_tpu  # Pallas takes long to import: only where it is used

            return pallas_tpu.token_logprobs(hidden, unembedding, targets, head)
        case "pallas_gpu":
            from jrlhf.kernels.logprob import pallas_gpu

            return pallas_gpu.token_logprobs(hidden, unembedding, targets, head, tile=tile)


def head_of(
    unembedding: Array, temperature: float, softcap: float | None, vocab_size: int | None, axis_name: str | None
) -> Head:
    """Returns the numbers that implementations take. Raises ValueError for arguments that are out of range."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    if axis_name is not None and axis_name not in jax.typeof(unembedding).manual_axis_type.varying:
        raise ValueError(
            f"unembedding does not vary over axis_name={axis_name!r}: "
            f"inside jax.shard_map with check_vma=True, pass each device its slice of the vocabulary"
        )
    rows = unembedding.shape[0] * (1 if axis_name is None else lax.axis_size(axis_name))
    vocab_size = rows if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= rows:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and the unembedding's {rows} rows")
    return Head(float(temperature), None if softcap is None else float(softcap), vocab_size, axis_name)


def tile_of(unembedding: Array, tile: int | None) -> int:
    """The maximum number of tokens of a tile. Raises ValueError unless it is positive."""
    if tile is None:
        return max(256, 2**21 // unembedding.shape[0]) if target_platform() == "cpu" else 1024
    if tile < 1:
        raise ValueError(f"tile must be a positive number of tokens, got {tile}")
    return tile


def _implementation(implementation: Implementation | None) -> Implementation:
    if implementation is None:
        return DEFAULT
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}: known are {', '.join(IMPLEMENTATIONS)}")
    return implementation


def check_arrays(hidden: Array, unembedding: Array, targets: Array) -> None:
    """Raises ValueError for arrays whose shapes, dtypes or shardings do not fit."""
    shapes = f"hidden {hidden.shape}, unembedding {unembedding.shape}, targets {targets.shape}"
    if hidden.shape[-1:] != unembedding.shape[1:] or hidden.shape[:-1] not in (targets.shape, targets.shape[:-1]):
        raise ValueError(f"expected hidden [*N, D], unembedding [V, D], targets [*N, K?] of one *N and D, got {shapes}")
    if hidden.dtype != unembedding.dtype or not jax.numpy.issubdtype(hidden.dtype, jax.numpy.floating):
        raise ValueError(
            f"hidden and unembedding must have one floating dtype, got {hidden.dtype} and {unembedding.dtype}"
        )
    if not jax.numpy.issubdtype(targets.dtype, jax.numpy.integer):
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    for name, x in (("hidden", hidden), ("unembedding", unembedding), ("targets", targets)):
        spec = jax.typeof(x).sharding.spec
        if any(entry is not None for entry in spec):
            raise ValueError(f"{name} is divided over mesh axes as {spec}: call this inside jax.shard_map")
