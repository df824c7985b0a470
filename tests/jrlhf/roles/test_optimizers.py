"""The optimizers: AdamW with warm-up, a fall and clipped gradients; Muon."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrlhf.config.stages import OptimizerConfig
from jrlhf.meshes import make_mesh
from jrlhf.models import LoRAConfig, ModelConfig, init_sharded
from jrlhf.models.lora import adapter_weights
from jrlhf.models.params import leaf_at, matrices, nested
from jrlhf.models.weights import weights
from jrlhf.roles.directions import muon, placed
from jrlhf.roles.optimizers import adamw, chained, learning_rate, learning_rates, updates_of
from jrlhf.roles.role import fresh_state

SMALL = ModelConfig(
    16, 8, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=12, max_positions=8, tie_embeddings=False, qkv_bias=True
)
MATRICES = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "gate": 1, "up": 1, "down": 1}  # dimensions of inputs


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


def test_adamw_has_the_states_and_the_bits_of_optax():
    config = OptimizerConfig(learning_rate=0.1, warmup=1, weight_decay=0.3, b1=0.8, b2=0.9, eps=1e-6)
    decay = {"weight_decay": config.weight_decay, "mask": matrices}
    theirs = optax.adamw(learning_rate(config, updates=5), b1=config.b1, b2=config.b2, eps=config.eps, **decay)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), theirs)
    draw, ends = np.random.default_rng(0), []
    params = nested((w.path, draw.normal(size=w.shape).astype(np.float32)) for w in weights(SMALL))
    for optimizer in (theirs, adamw(config, updates=5)):
        step, state, moved = jax.jit(optimizer.update), optimizer.init(params), params
        for number in range(4):
            grads = jax.tree.map(lambda x, number=number: np.sin(100 * x + number), params)
            updates, state = step(grads, state, moved)
            moved = optax.apply_updates(moved, updates)
        ends.append((moved, state))
    assert int(updates_of(ends[1][1])) == 4
    jax.tree.map(np.testing.assert_array_equal, *ends)  # raises for trees of another structure, too


def orthogonal(x: np.ndarray) -> np.ndarray:
    """Five steps of Newton and Schulz, as Jordan et al. write them (zeropower_via_newtonschulz5), in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    turned = x.shape[0] > x.shape[1]
    x = (x.T if turned else x) / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


def test_muon_orthogonalises_the_matrix_of_each_layer():
    """Stacked and not, with heads, of models and adapters. All other weights have Adam's update."""
    gpt2 = replace(SMALL, norm="layer", positions="learned", gated_mlp=False, kv_heads=4, output_bias=True)
    config = OptimizerConfig(learning_rate=0.1, warmup=0, final=1.0, weight_decay=0.5, max_grad_norm=None)
    optimizer, draw, turned = chained(config, muon(config), updates=9), np.random.default_rng(0), set()
    tables = weights(SMALL), weights(gpt2, "scalar"), adapter_weights(SMALL, LoRAConfig(2, 4.0), "scalar")
    for table, stacked in [(table, True) for table in tables] + [(weights(SMALL), False)]:
        shapes = {w.path: w.shape if stacked else w.layer_shape for w in table}
        params, *grads = (
            nested((path, draw.normal(size=shape).astype(np.float32)) for path, shape in shapes.items()) for _ in "pgg"
        )
        reference, step = adamw(config, updates=9), jax.jit(optimizer.update)
        state, other = optimizer.init(params), reference.init(params)
        for given in grads:
            moved, state = step(given, state, params)
            like_adam, other = jax.jit(reference.update)(given, other, params)
        for weight in table:
            w, first, second, new, old = (leaf_at(tree, weight.path) for tree in (params, *grads, moved, like_adam))
            name = next((part for part in reversed(weight.path) if part in MATRICES), None)
            if name is None:
                np.testing.assert_array_equal(new, old, err_msg=".".join(weight.path))
                continue
            turned.add(weight.path[-1])
            # Nesterov's momentum without bias, of two gradients: the mean looks one update ahead.
            mean = 0.95 * 0.05 * first + 0.05 * second
            mean = 0.95 * mean / (1 - 0.95**3) + 0.05 * second / (1 - 0.95**2)
            ins = 1 if weight.path[-1] == "b" else MATRICES[name]
            for layer in range(SMALL.layers) if stacked else [...]:
                rows = np.prod(mean[layer].shape[:ins], dtype=int)
                matrix = orthogonal(mean[layer].reshape(rows, -1).astype(np.float64))
                direction = 0.2 * max(matrix.shape) ** 0.5 * matrix + 0.5 * w[layer].reshape(rows, -1)
                np.testing.assert_allclose(new[layer].reshape(rows, -1), -0.1 * direction, rtol=1e-3, atol=1e-5)
    assert turned == {*MATRICES, "a", "b"}


def test_muon_on_four_devices_is_muon_on_one():
    config, ends = OptimizerConfig(learning_rate=0.1, warmup=0, final=1.0), []
    for sizes in ((1, 1), (2, 2)):
        mesh = make_mesh(1, *sizes, devices=jax.devices()[: sizes[0] * sizes[1]])
        optimizer = chained(config, placed(muon(config)), updates=3)
        state = fresh_state(init_sharded(SMALL, jax.random.key(0), mesh), optimizer)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        with jax.set_mesh(mesh):
            grads = jax.tree.map(lambda x: jnp.sin(1000 * x), state.params)
            for _ in range(3):
                updates, opt_state = jax.jit(optimizer.update)(grads, state.opt_state, state.params)
                params = jax.jit(optax.apply_updates)(state.params, updates)
                state = replace(state, params=params, opt_state=opt_state)
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
        ends.append(jax.device_get((state.params, state.opt_state)))
    jax.tree.map(lambda one, four: np.testing.assert_allclose(four, one, atol=1e-5), *ends)
