"""The optimizer: AdamW with warm-up, a fall and clipped gradients."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrlhf.config.stages import OptimizerConfig
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.lora import adapter_weights
from jrlhf.models.params import leaf_at, nested
from jrlhf.models.weights import weights
from jrlhf.roles.optimizers import adamw, learning_rates


def rates(config: OptimizerConfig, updates: int) -> list[float]:
    """The learning rates that a run uses: with one weight and a constant gradient, AdamW moves by just the rate."""
    optimizer = adamw(config, updates=updates)
    weight, step = jnp.zeros(()), jax.jit(optimizer.update)
    state, moved = jax.jit(optimizer.init)(weight), []
    for _ in range(updates):
        update, state = step(jnp.ones(()), state, weight)
        moved.append(-np.asarray(update).item())
    return moved


def test_the_rate_rises_to_its_peak_and_falls_to_its_final_share():
    config = OptimizerConfig(learning_rate=0.1, warmup=4, final=0.2, weight_decay=0.0, max_grad_norm=None)
    schedule = rates(config, 12)
    np.testing.assert_allclose(schedule[:4], [0.025, 0.05, 0.075, 0.1], rtol=1e-4)
    cosine = 0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * np.arange(8) / 8)) / 2)
    np.testing.assert_allclose(schedule[4:], cosine, rtol=1e-4)
    np.testing.assert_allclose(learning_rates(config, updates=12), schedule, rtol=1e-4)


def test_the_rate_falls_as_the_schedule_says():
    config = OptimizerConfig(learning_rate=0.1, warmup=4, final=0.0, weight_decay=0.0, max_grad_norm=None)
    rise, falls = (
        [0.025, 0.05, 0.075, 0.1],
        {
            "linear": (0.0, 1 - np.arange(8) / 8),  # transformers' linear schedule, from the maximum at update 4
            "constant": (0.0, np.ones(8)),
            "wsd": (0.2, [1, 1, 1, 1, 1, 1, 1 - 0.8 / 3, 1 - 1.6 / 3]),  # 3 of 12 updates
        },
    )
    for schedule, (final, fall) in falls.items():
        own = replace(config, schedule=schedule, final=final, decay=0.25)
        np.testing.assert_allclose(rates(own, 12), [*rise, *(0.1 * np.array(fall))], rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(learning_rates(own, updates=12), rates(own, 12), rtol=1e-4, atol=1e-9)


def test_a_warmup_as_long_as_the_run_takes_a_tenth_of_it():
    config = OptimizerConfig(learning_rate=0.1, warmup=20, final=1.0, weight_decay=0.0, max_grad_norm=None)
    np.testing.assert_allclose(rates(config, 20), [0.05] + [0.1] * 19, rtol=1e-4)
    np.testing.assert_allclose(rates(config, 3), 0.1, rtol=1e-4)


def test_gradients_are_clipped_by_their_global_norm():
    config = OptimizerConfig(learning_rate=1.0, warmup=0, final=1.0, weight_decay=0.0, max_grad_norm=0.5)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    large = {"a": np.full(3, 10.0, np.float32), "b": np.full(4, 10.0, np.float32)}
    optimizer = adamw(config, updates=2)
    _, state = jax.jit(lambda params: optimizer.update(large, optimizer.init(params), params))(params)
    first_moment = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(first_moment), 0.1 * 0.5, rtol=1e-5)


def test_moments_and_epsilon_are_adams():
    """Against Adam's own equations (Kingma & Ba 2015, algorithm 1), in NumPy."""
    config = OptimizerConfig(learning_rate=0.1, warmup=0, final=1.0, weight_decay=0.0, max_grad_norm=None)
    config = replace(config, b1=0.7, b2=0.8, eps=0.5)
    optimizer, weight = adamw(config, updates=4), jnp.zeros(())
    state, mean, square, step = jax.jit(optimizer.init)(weight), 0.0, 0.0, jax.jit(optimizer.update)
    for number, gradient in enumerate([1.0, -3.0, 0.5, 2.0], start=1):
        update, state = step(gradient, state, weight)
        mean, square = 0.7 * mean + 0.3 * gradient, 0.8 * square + 0.2 * gradient**2
        expected = mean / (1 - 0.7**number) / (np.sqrt(square / (1 - 0.8**number)) + 0.5)
        np.testing.assert_allclose(-np.asarray(update).item(), 0.1 * expected, rtol=1e-5)


def test_matrices_decay_and_norms_and_biases_do_not():
    """One step of AdamW by hand (Loshchilov & Hutter 2019, algorithm 2), of every weight that a model or adapter may
    have. Names in files tell which are norms and biases, as in transformers' Trainer; layers are stacked.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 8,
        "embed": 4,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 2,
        "mlp": 4,
    }
    every = ModelConfig(
        **sizes, max_positions=8, tie_embeddings=False, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True
    )
    gpt2 = replace(every, norm="layer", positions="learned", gated_mlp=False, kv_heads=2, qk_norm=False)
    gemma = replace(every, post_norms=True, norm_offset=True)
    config = OptimizerConfig(learning_rate=0.1, warmup=0, final=1.0, weight_decay=0.5, max_grad_norm=None)
    optimizer, draw, decayed = adamw(config, updates=9), np.random.default_rng(0), set()
    tables = (
        weights(gemma),
        weights(gpt2, "scalar"),
        adapter_weights(every, LoRAConfig(2, 4.0), "scalar"),
    )
    for table in tables:
        params, grads = (nested((w.path, draw.normal(size=w.shape).astype(np.float32)) for w in table) for _ in "wg")
        update = jax.jit(lambda p, g: optimizer.update(g, optimizer.init(p), p)[0])(params, grads)
        for weight in table:
            names = " ".join(weight.names.values())
            spared = any(part in names for part in ("norm", "ln_", "bias"))
            w, g, moved = (leaf_at(tree, weight.path) for tree in (params, grads, update))
            expected = -0.1 * (g / (np.abs(g) + 1e-8) + (0 if spared else 0.5) * w)
            np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6, err_msg=".".join(weight.path))
            decayed |= set() if spared else {weight.path[-1]}
    assert decayed == {*"wq wk wv wo gate up down a b".split(), "embedding", "unembedding", "positions", "kernel"}
