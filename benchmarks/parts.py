"""What `benchmarks.accelerator` measures: ceilings, then the functions that a run uses, each with the work it needs.

Every function here makes random weights of a model's shapes, compiles, runs, and returns one row: seconds and shares of
the device's ceilings. Needed operations and bytes are those of `models/flops.py`: nothing recomputed counts.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jrlhf.algorithms.ppo import ppo as run_ppo
from jrlhf.data.batches import Batch, key_for, put_rows, row_keys
from jrlhf.kernels.logprob import token_logprobs, token_sums
from jrlhf.kernels.logprob.implementations import Implementation
from jrlhf.meshes import GENERATE, SCORE, TRAIN, reshard
from jrlhf.meshes.hardware import Peak
from jrlhf.models import (
    Generation,
    ModelConfig,
    SamplingConfig,
    init_lm,
    init_sharded,
    make_generate,
    make_logprobs,
    make_token_sums,
    param_shardings,
    scalar_from,
)
from jrlhf.models.flops import (
    attention_operations,
    cache_bytes,
    forward_operations,
    generation_seconds,
    layer_weights,
    training_operations,
    weight_bytes,
)
from jrlhf.models.options import ForwardOptions
from jrlhf.models.remat import Remat
from jrlhf.ppo import PPOConfig, TrainState
from jrlhf.roles.actor import Actor
from jrlhf.roles.critic import Critic, Reward
from jrlhf.roles.experience import ExperienceMaker
from jrlhf.roles.frozen import Reference
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock

GB, TERA = 1e9, 1e12
Row = dict[str, Any]


@dataclass(frozen=True)
class Ceilings:
    """Bytes of a copy and operations of a bfloat16 matrix product a second, measured; and nominal ones, if known."""

    copy: float
    matmul: float
    peak: Peak | None

    def moving(self, bytes_: float, seconds: float) -> Row:
        """A rate of bytes, and its shares."""
        rate = bytes_ / seconds
        nominal = {} if self.peak is None else {"of_nominal": rate / self.peak.bandwidth}
        return {"tb_s": rate / TERA, **nominal, "of_measured": rate / self.copy}

    def computing(self, operations: float, seconds: float) -> Row:
        """A rate of operations, and its shares; `of_nominal` is the MFU."""
        rate = operations / seconds
        nominal = {} if self.peak is None else {"of_nominal": rate / self.peak.bfloat16}
        return {"tflops": rate / TERA, **nominal, "of_measured": rate / self.matmul}


def seconds_of(run: Callable[[], Any], times: int) -> float:
    """Mean of so many calls, one queued behind the other."""
    start = time.perf_counter()
    for _ in range(times - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) / times


def warm_seconds_of(run: Callable[[], Any], times: int) -> float:
    """`seconds_of`, after a call that warms up."""
    jax.block_until_ready(run())
    return seconds_of(run, times)


def compiled(function: Callable, *arguments: Any, **options: Any) -> tuple[Any, Row]:
    """The program, with its seconds of compilation and the compiler's temporary memory in GB."""
    start = time.perf_counter()
    program = jax.jit(function, **options).lower(*arguments).compile()
    spent = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    return program, {"temp": memory.temp_size_in_bytes / GB, "compile": spent}


def ceilings(peak: Peak | None, *, numbers: int, side: int) -> Ceilings:
    """numbers: float32 ones that are copied. side: of the square matrices."""
    line = jnp.ones((numbers,), jnp.float32)
    double = jax.jit(lambda x: x * 2)  # a copy proper may be elided
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return Ceilings(
        copy=2 * line.nbytes / warm_seconds_of(lambda: double(line), 10),
        matmul=2 * side**3 / warm_seconds_of(lambda: multiply(square, square), 20),
        peak=peak,
    )


def generation_weights(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Random bfloat16 weights as GENERATE stores them, made leaf by leaf: float32 ones would not fit everywhere."""
    stacked = jax.eval_shape(partial(init_lm, config), jax.random.key(0))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked["layers"])
    shapes = stacked | {"layers": [layer] * config.layers}
    normal = jax.jit(lambda shape: 0.02 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), static_argnums=0)

    def leaf(of: jax.ShapeDtypeStruct) -> jax.Array:
        return normal(of.shape) if len(of.shape) > 1 else jnp.ones(of.shape, of.dtype)

    return jax.device_put(jax.tree.map(leaf, shapes), param_shardings(config, mesh, GENERATE))


def decode(config: ModelConfig, mesh: Mesh, top: Ceilings, batch: int, prompt: int, response: int) -> Row:
    """A decode step: the time of a whole generation, less that of a prefill with one step, over the steps between.

    needed: GB that a step has to read, the weights and on average prompt + response / 2 positions of the cache. The
    program itself may read more of its buffer.
    """
    params = generation_weights(config, mesh)
    # Two programs, for one response token and for many, would differ in their buffers and in what the compiler makes of
    # the prefill, and the difference of their times in more than steps. So one program measures both: with a final norm
    # of NaN every row draws token 0, which stops it, and the loop ends after one step.
    stopping = params | {"final_norm": jax.tree.map(lambda scale: jnp.full_like(scale, jnp.nan), params["final_norm"])}
    rows = (
        jnp.ones((batch, prompt), jnp.int32),
        jnp.full((batch,), prompt, jnp.int32),
        jax.random.split(jax.random.key(0), batch),
    )
    sampling = SamplingConfig(max_new_tokens=response, stop_ids=(0,))
    program, costs = compiled(make_generate(config, mesh, sampling, dtype=jnp.bfloat16), params, *rows)

    def best(weights: dict[str, Any], steps: int) -> float:
        drawn: Generation = program(weights, *rows)
        if int(drawn.response_lengths.max()) != steps:
            raise RuntimeError(f"{int(drawn.response_lengths.max())} steps were drawn instead of {steps}")
        return min(seconds_of(lambda: program(weights, *rows), 1) for _ in range(2))

    one, whole = best(stopping, 1), best(params, response)
    step = (whole - one) / (response - 1)
    needed = weight_bytes(config, 2) + batch * (prompt + response / 2) * cache_bytes(config, 2)
    prefill = 2 * layer_weights(config) * batch * prompt + attention_operations(config, np.full(batch, prompt))
    return {
        "seconds": step,
        "tokens_a_second": batch / step,
        **top.moving(needed, step),
        "needed": needed / GB,
        "prefill": one - step,
        "prefill_of_measured": prefill / (one - step) / top.matmul,
        **costs,
    }


def train(config: ModelConfig, mesh: Mesh, top: Ceilings, batch: int, length: int, remat: Remat) -> Row:
    """Forward, backward and AdamW on float32 weights, computed in bfloat16: the loss beside the logits, as in a run."""
    optimizer, params = optax.adamw(1e-6), init_sharded(config, jax.random.key(0), mesh)
    tokens = jax.random.randint(jax.random.key(2), (batch, length), 0, config.vocab_size)
    sums = make_token_sums(config, mesh, TRAIN, dtype=jnp.bfloat16, remat=remat, entropy_gradient=False)

    def loss(params, tokens):
        return sums(params, tokens, {}, lambda logprobs, entropy, data: (-logprobs, {}))[0] / tokens.size

    def update(params, state, tokens):
        gradients = jax.grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    carried = params, jax.jit(optimizer.init)(params)
    del params
    program, costs = compiled(update, *carried, tokens, donate_argnums=(0, 1))

    def step():
        nonlocal carried
        carried = program(*carried, tokens)
        return carried

    return _pass(top, batch * length, training_operations(config, np.full(batch, length)), step) | costs


def score(config: ModelConfig, mesh: Mesh, top: Ceilings, batch: int, length: int) -> Row:
    """Log-probabilities of given tokens under float32 weights, computed in bfloat16."""
    params = init_sharded(config, jax.random.key(0), mesh)
    tokens = jax.random.randint(jax.random.key(2), (batch, length), 0, config.vocab_size)
    program, costs = compiled(make_logprobs(config, mesh, SCORE, dtype=jnp.bfloat16), params, tokens)
    operations = forward_operations(config, np.full(batch, length))
    return _pass(top, batch * length, operations, lambda: program(params, tokens)) | costs


def switch(config: ModelConfig, mesh: Mesh, top: Ceilings) -> Row:
    """From training's float32 weights to generation's bfloat16 ones, layers apart: each is read and written once."""
    params = init_sharded(config, jax.random.key(0), mesh)
    to = param_shardings(config, mesh, GENERATE)
    seconds = warm_seconds_of(lambda: reshard(params, to, dtype=jnp.bfloat16), 3)
    moved = sum(leaf.nbytes + leaf.size * 2 for leaf in jax.tree.leaves(params))
    return {"seconds": seconds, **top.moving(moved, seconds)}


def logprob(top: Ceilings, implementation: Implementation, tokens: int, embed: int, vocab: int) -> Row:
    """The log-probability op, forward and with its backward pass. It needs 2 N D V operations forward and 4 backward.

    backward_of_measured counts 6 N D V over the time that backward adds, as others publish it: with the logits, which
    every implementation that does not keep them computes again. sums: seconds of `token_sums` with its backward pass,
    which a policy's update takes where it can.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, embed), jnp.bfloat16)
    table = (jax.random.normal(keys[1], (vocab, embed), jnp.bfloat16) / embed**0.5).astype(jnp.bfloat16)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab)
    op = partial(token_logprobs, implementation=implementation)

    def terms(logprobs, entropy, data):
        return logprobs + 0.01 * entropy, {}

    def loss(hidden, table, targets):
        return jnp.sum(terms(*op(hidden, table, targets), {})[0])

    def fused(hidden, table, targets):
        return token_sums(hidden, table, targets, {}, terms, implementation=implementation)[0]

    forward, first = compiled(op, hidden, table, targets)
    both, costs = compiled(jax.grad(loss, argnums=(0, 1)), hidden, table, targets)
    sums, last = compiled(jax.grad(fused, argnums=(0, 1)), hidden, table, targets)
    fast, whole, together = (
        warm_seconds_of(lambda program=program: program(hidden, table, targets), 5) for program in (forward, both, sums)
    )
    work = 2.0 * tokens * embed * vocab
    return {
        "seconds": whole,
        **top.computing(3 * work, whole),
        "forward": fast,
        "forward_of_measured": work / fast / top.matmul,
        "backward_of_measured": 3 * work / max(whole - fast, 1e-9) / top.matmul,
        "forward_temp": first["temp"],
        "sums": together,
        "sums_of_measured": 3 * work / together / top.matmul,
        "sums_temp": last["temp"],
        **costs,
    }


def iteration(
    config: ModelConfig,
    mesh: Mesh,
    top: Ceilings,
    batch: int,
    prompt: int,
    response: int,
    micro_batches: int,
    remat: Remat,
) -> Row:
    """One PPO iteration of four models of one shape, through the roles of a run: the mean of two after one that warms.

    Actor and critic are trained in float32 (with AdamW's moments), one epoch of one minibatch; reference and reward
    model are frozen in bfloat16; no row stops before its limit. `roofline`: the least seconds of all calls together,
    by the nominal ceilings, or the measured ones where those are not known; `over_roofline`: how often that was taken.
    """
    compute = Compute(ForwardOptions(dtype=jnp.dtype(jnp.bfloat16), remat=remat))
    clock, optimizer = Clock(), optax.adamw(1e-6)
    placement, ppo = RolePlacement.of(mesh), PPOConfig(micro_batches=micro_batches)
    sampling = SamplingConfig(max_new_tokens=response)
    architecture, site = Architecture(config), Site(placement, compute, clock)
    params = init_sharded(config, jax.random.key(0), mesh)
    frozen = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else jnp.copy(leaf), params)
    scalar = scalar_from(params)
    frozen_scalar = scalar_from(frozen)
    model = partial(Model, architecture)
    trained: Any = {"optimizer": optimizer, "algorithm": ppo}
    actor = Actor(model(params), site, sampling=sampling, **trained)
    critic = Critic(model(scalar), site, **trained)
    reference = Reference(model(frozen), site, sampling=sampling)
    reward = Reward(model(frozen_scalar), site)
    states = {"actor": TrainState.create(params, optimizer), "critic": TrainState.create(scalar, optimizer)}
    del params, scalar, frozen, frozen_scalar
    estimator = ExperienceMaker(ppo, clock, placement)
    prompts = put_rows((np.ones((batch, prompt), np.int32), np.full(batch, prompt, np.int32)), mesh)

    def once(step: int) -> Mapping[str, float]:
        clock.start()
        rows: Any = Batch((*prompts, row_keys(key_for(0, "rollout", step), batch, mesh)), (), (), step)
        rewards: Any = _Learned(reward)
        trained = actor.bind(states["actor"]), critic.bind(states["critic"])
        _, metrics = run_ppo(*trained, reference, rewards, estimator, rows, 0.05)
        states["actor"], states["critic"] = (role.state for role in trained)
        jax.device_get(metrics)
        return clock.take()

    first = once(0)
    taken = [once(step) for step in (1, 2)]
    seconds = {name: float(np.mean([times[name] for times in taken])) for name in taken[0]}
    least = least_seconds(config, top, np.full(batch, prompt), np.full(batch, response))
    whole, roofline = seconds["timing_s/step"], sum(least.values())
    return {
        "seconds": whole,
        "tokens_a_second": batch * (prompt + response) / whole,
        "roofline": roofline,
        "over_roofline": whole / roofline,
        "calls": {name.removeprefix("timing_s/"): value for name, value in seconds.items()},
        "least": least,
        "first": first["timing_s/step"],
    }


def least_seconds(config: ModelConfig, top: Ceilings, prompts: np.ndarray, responses: np.ndarray) -> dict[str, float]:
    """The roofline of each call of an iteration of four models of one shape on one device.

    An update also reads and writes weights and both moments and reads gradients, in float32: 7 x 4 bytes a weight.
    """
    bandwidth = top.copy if top.peak is None else top.peak.bandwidth
    operations = top.matmul if top.peak is None else top.peak.bfloat16
    lengths, weights = prompts + responses, weight_bytes(config, 1)
    optimizer = 28 * weights / bandwidth
    scalar = forward_operations(config, lengths, "scalar") / operations
    score = forward_operations(config, lengths, predicted=responses) / operations
    return {
        "reshard": weights * (4 + 2) / bandwidth,
        "gen": generation_seconds(config, prompts, responses, bandwidth=bandwidth, operations=operations, itemsize=2),
        "reward": scalar,
        "old_log_prob": score,
        "ref": score,
        "values": scalar,
        "update_critic": training_operations(config, lengths, "scalar") / operations + optimizer,
        "update_actor": training_operations(config, lengths, predicted=responses) / operations + optimizer,
    }


class _Learned:
    """Rewards that are one reward model of tokens."""

    def __init__(self, reward: Reward):
        self._reward = reward

    def score(self, rollout, prompts):
        return self._reward.score(rollout)


def _pass(top: Ceilings, tokens: int, operations: float, run: Callable[[], Any]) -> Row:
    seconds = warm_seconds_of(run, 3)
    return {"seconds": seconds, "tokens_a_second": tokens / seconds, **top.computing(operations, seconds)}
