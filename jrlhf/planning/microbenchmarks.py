"""Small programs, one for each part of a call, that `profile` times on the present devices.

Every program runs on all devices at once, each with its own rows and its own copy of the weights. So only the programs
of collectives contain collectives, and simulated devices share their cores as they do in a run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.kernels.logprob.api import token_logprobs, token_sums
from jrlhf.meshes.layout import GENERATE, TRAIN
from jrlhf.meshes.mesh import Device, make_mesh
from jrlhf.models.attention import attention, layer_rotations, of_layer
from jrlhf.models.collectives import TENSOR, lookup, total, vary
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.generation.engine import make_generate
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.init import init_lm
from jrlhf.models.modules import NO_ADAPTERS, Block
from jrlhf.models.params import param_shardings
from jrlhf.models.remat import Remat, policy
from jrlhf.models.weights import HeadKind
from jrlhf.ppo.updates import Minibatch, Objective, apply_update

LAYERS = 4  # number of layers of a program, over which the cost of its call is divided
CHAINED = 16  # number of collectives in a program
BUSY_OPERATIONS = 16 * 2 * 256**3
_TURN = 0.02  # seconds for which a short program is repeated

Program = Callable[[], Any]


def seconds(programs: Sequence[Program], repeats: int) -> list[float]:
    """Returns the shortest time of each program, because other work of the machine only adds time.

    Programs take turns; a short one runs several times in each turn.
    """
    least, turns = [], []
    for program in programs:
        jax.block_until_ready(program())  # compiles
        least.append(_once(program))
        turns.append(max(1, min(10, int(_TURN / least[-1]))))
    for _ in range(repeats):
        for index, program in enumerate(programs):
            least[index] = min(least[index], *(_once(program) for _ in range(turns[index])))
    return least


def _once(program: Program) -> float:
    started = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - started


def sliced(config: ModelConfig, slices: int) -> ModelConfig:
    """Returns the model whose layers are one device's slices in a tensor group."""
    kv_heads = max(1, config.kv_heads // slices)
    return replace(config, heads=config.heads // slices, kv_heads=kv_heads, mlp=config.mlp // slices)


def layers(
    config: ModelConfig, devices: Sequence[Device], rows: int, length: int, *, train: bool, dtype: Any, remat: Remat
) -> Program:
    """Builds `LAYERS` layers over `rows` rows on each device; training includes the backward pass."""
    shallow = replace(config, layers=LAYERS, local_layers=config.local_layers[:LAYERS])
    weights = init_lm(shallow, jax.random.key(0))["layers"]
    rotations = layer_rotations(jnp.arange(length)[None, :], shallow)
    local = shallow.locality[0]

    def layer(x, weights):
        def attend(*heads):
            return attention(*heads, **shallow.scores, local=local), None

        loaded = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, weights)
        return Block(shallow, loaded)(x, of_layer(rotations, local), attend, None, NO_ADAPTERS)

    scanned = jax.checkpoint(layer, policy=policy(remat), prevent_cse=False)

    def forward(x, weights):
        return lax.scan(scanned, x, weights)[0]

    def both(x, weights):
        y, backward = jax.vjp(forward, x, weights)
        return backward(y)

    x = np.random.default_rng(0).standard_normal((rows, length, config.embed))
    return _on_each(devices, both if train else forward, x.astype(dtype), weights)


def ends(
    config: ModelConfig, devices: Sequence[Device], rows: int, length: int, head: HeadKind, *, train: bool, fused: bool
) -> Program:
    """Builds a model's embeddings and head, over `rows` rows on each device."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((config.padded_vocab, config.embed)).astype(np.float32)
    scalar, untied = {"kernel": table[0]}, {} if config.tie_embeddings else {"unembedding": table}
    tables = {"embedding": table} | (scalar if head == "scalar" else untied)
    tokens = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)

    def loss(weights, tokens):
        # In a run the table and its gradient differ between the devices of `tensor`.
        x = total(lookup(vary(weights["embedding"], TENSOR), tokens), TENSOR)
        if head == "scalar":
            return jnp.sum(jnp.einsum("btd,d->bt", x, weights["kernel"]))
        unembedding = weights.get("unembedding", weights["embedding"])
        hidden, targets = x[:, :-1].reshape(-1, config.embed), tokens[:, 1:].reshape(-1)
        options = {"softcap": config.softcap, "vocab_size": config.vocab_size}
        if train and fused:
            terms = lambda logprobs, entropy, weight: (-logprobs * weight, {"entropy": entropy})  # noqa: E731
            data = jnp.ones_like(targets, jnp.float32)
            return token_sums(hidden, unembedding, targets, data, terms, entropy_gradient=False, **options)[0]
        logprobs, entropy = token_logprobs(hidden, unembedding, targets, **options)
        return jnp.sum(logprobs) + lax.stop_gradient(jnp.sum(entropy))

    return _on_each(devices, jax.grad(loss) if train else loss, tables, tokens)


def generation(
    config: ModelConfig, devices: Sequence[Device], rows: int, prompt: int, response: int, dtype: Any
) -> Program:
    """Builds a whole generation of `rows` rows on each device; no row ends before the limit."""
    mesh = make_mesh(len(devices), 1, 1, devices=devices)
    params = init_lm(config, jax.random.key(0))  # GENERATE keeps layers as a list
    params["layers"] = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(config.layers)]
    weights = jax.device_put(params, param_shardings(config, mesh, GENERATE))
    count = rows * len(devices)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (count, prompt)).astype(np.int32)
    by_row = NamedSharding(mesh, P(("data", "fsdp", "tensor")))
    keys = jax.device_put(jax.random.split(jax.random.key(0), count), by_row)
    arguments = jax.device_put((prompts, np.full(count, prompt, np.int32)), NamedSharding(mesh, P(("data", "fsdp"))))
    generate = jax.jit(make_generate(config, mesh, SamplingConfig(response), dtype=dtype))
    return partial(generate, weights, *arguments, keys)


def update(config: ModelConfig, devices: Sequence[Device], fsdp: int) -> Program:
    """Builds an optimizer update of a model stored over `fsdp` devices, with given gradients."""
    mesh = _in_groups(devices, fsdp)
    params = jax.device_put(init_lm(config, jax.random.key(0)), param_shardings(config, mesh, TRAIN))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b1=0.9, b2=0.95))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, scale):
        def loss(params, scale):  # its gradient is proportional to the weights, and is read as any gradient
            return scale * sum(jnp.sum(w * lax.stop_gradient(w)) for w in jax.tree.leaves(params)), {}

        done = apply_update(Objective(loss, optimizer, ()), params, state, Minibatch(scale, 1))
        return done.params, done.opt_state

    with jax.set_mesh(mesh):
        buffers = [params, jax.jit(optimizer.init)(params)]
    scale = jax.device_put(np.float32(1), NamedSharding(mesh, P()))

    def run():
        buffers[:] = step(*buffers, scale)
        return buffers

    return run


def collective(kind: str, devices: Sequence[Device], size: int, numbers: int) -> Program:
    """Builds `CHAINED` equal collectives, one after the other, in all groups of `size` neighbours at once.

    numbers: float32 that each device holds after an all-gather ("gather"), or puts into an all-reduce ("reduce").
    """
    mesh = _in_groups(devices, size)

    def once(x):
        if kind == "gather":
            return lax.dynamic_slice_in_dim(lax.all_gather(x, "fsdp", tiled=True), 0, x.shape[0]) + 1
        return lax.pcast(lax.psum(x, "fsdp"), "fsdp", to="varying") * 0.5

    local = max(1, numbers // size if kind == "gather" else numbers)
    rows = P(("data", "fsdp"))

    def chained(x):
        return lax.scan(lambda x, _: (once(x), None), x, length=CHAINED)[0]

    mapped = jax.jit(jax.shard_map(chained, mesh=mesh, in_specs=rows, out_specs=rows))
    return partial(mapped, jax.device_put(np.zeros(local * mesh.size, np.float32), NamedSharding(mesh, rows)))


def _in_groups(devices: Sequence[Device], size: int) -> Mesh:
    """Divides devices into groups of `size` neighbours along `fsdp`; devices that are left over stay idle."""
    groups = len(devices) // size
    return make_mesh(groups, size, 1, devices=devices[: groups * size])


def offload(device: Device, numbers: int) -> Program:
    """Copies float32 numbers to the host's memory."""
    here = jax.device_put(np.zeros(numbers, np.float32), device)
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return lambda: jax.device_put(here, there)


def copy(devices: Sequence[Device], numbers: int) -> Program:
    """Reads and writes float32 numbers on each device: 8 bytes a number. With one number it is an empty program."""
    return _on_each(devices, lambda x: x + 1, np.zeros(numbers, np.float32))


def busy(devices: Sequence[Device]) -> Program:
    """Computes the same products on each of these devices, `BUSY_OPERATIONS` operations in all."""
    x = np.ones((256, 256), np.float32) / 256
    return _on_each(devices, lambda x: lax.scan(lambda y, _: (y @ x, None), x, length=16)[0], x)


def _on_each(devices: Sequence[Device], function: Callable[..., Any], *arguments: Any) -> Program:
    """Builds a jitted program that calls `function` on all devices at once, each with its own copy of the arguments."""
    mesh = make_mesh(len(devices), 1, 1, devices=devices)
    rows = P("data")

    def unvaried(x):
        # Results may have types that vary over axes of size 1.
        varies = {"fsdp", "tensor"} & set(jax.typeof(x).manual_axis_type.varying)
        return lax.psum(x, ("fsdp", "tensor"))[None] if varies else x[None]

    def local(*copies):
        return jax.tree.map(unvaried, function(*jax.tree.map(lambda x: x[0], copies)))

    def copied(x):
        return jax.device_put(np.broadcast_to(np.asarray(x)[None], (mesh.size, *x.shape)), NamedSharding(mesh, rows))

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows))
    return partial(mapped, *jax.tree.map(copied, arguments))
