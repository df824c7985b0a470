"""Rematerialization policies: the values of a layer that the backward pass keeps, by name; it recomputes the others.

The table gives numbers kept and multiply-adds recomputed per token and layer, in rows of T tokens: D embed, N heads,
K kv-heads, H head_dim, F gated mlp. Causal attention does N H T forward; norms, rotations and activations are ignored.

| remat     | kept                            | on      | products computed again                                  |
|-----------|---------------------------------|---------|----------------------------------------------------------|
| offload   | D                               | host    | as full                                                  |
| full      | D                               | device  | D (N + 2K) H + N H T + N H D + 2 D F: all but down       |
| attention | D + N H                         | device  | D (N + 2K) H + N H D + 2 D F                             |
| products  | 2 D + 2 (N + K) H + 2 F         | device  | none                                                     |
| gather    | those, and every activation     | device  | none, nor anything else but gathered weights             |

A kept number has the compute dtype's size. With an attention output, cuDNN and splash keep N float32 (the logarithms
of the softmax's sums), from which their backward passes start; XLA keeps nothing and computes scores and softmax again.
Layers with a norm after their contributions keep D more under "products", the norm's input.
At D 2048, N 16, K 8, H 128, F 6144 in bfloat16: 4, 8 and 45 kB; 40, 38 and 0 million multiply-adds at T 1024.

None of them keeps gathered weights: they are gathered again. Names are given where the values are made, in `modules.py`
and `forward.py`, by `jax.ad_checkpoint.checkpoint_name`, which changes no program that has no policy.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Remat = Literal["offload", "full", "attention", "products", "gather"]
REMATS: tuple[Remat, ...] = ("offload", "full", "attention", "products", "gather")

Name = Literal["layer", "query", "key", "value", "attended", "projected", "gate", "up", "down"]
_PRODUCTS: frozenset[Name] = frozenset({"query", "key", "value", "attended", "projected", "gate", "up", "down"})

# With remat="gather" the backward pass repeats these operations: the gather of weights, the casts before it, and the
# reshape into the matrices that `modules.project` multiplies.
_REMADE = frozenset({"all_gather", "convert_element_type", "pvary", "reshape"})
# cuDNN's forward pass, which returns the output and the statistics that its backward pass needs. The output of other
# implementations of attention has the name "attended".
_CUDNN = "dot_product_attention_fwd"


def named(x: jax.Array, name: Name) -> jax.Array:
    """`x` with a name by which policies recognize it."""
    return checkpoint_name(x, name)


def policy(remat: Remat) -> Callable[..., Any] | None:
    """The policy for `jax.checkpoint` around a layer."""
    match remat:
        case "full":
            return None
        case "attention":
            return _keeping(frozenset({"attended"}))
        case "products":
            return _keeping(_PRODUCTS)
        case "gather":
            return lambda primitive, *_, **__: primitive.name not in _REMADE
        case "offload":
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["layer"],
                offload_src="device",
                offload_dst="pinned_host",
            )
    raise ValueError(f"unknown remat {remat!r}: known are {', '.join(REMATS)}")


def _keeping(names: frozenset[Name]) -> Callable[..., bool]:
    """A policy that keeps these named values, and the results of cuDNN's attention for its backward pass."""

    def keep(primitive: Any, *_: Any, **parameters: Any) -> bool:
        if primitive.name == "name":
            return parameters["name"] in names
        return primitive.name.startswith(_CUDNN)

    return keep
