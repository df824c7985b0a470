"""What the models' tests share: random weights, and a decoder written again without sharding, modules or scans."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models import ModelConfig, init_lm, init_scalar


def random_params(config: ModelConfig, head: str = "lm", seed: int = 0) -> Any:
    """Host weights in the model's tree; norm scales, biases and heads are far from their initial ones and zeros."""
    init = init_lm if head == "lm" else init_scalar
    shapes = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    generator = np.random.default_rng(seed)

    def weight(path, leaf):
        name = path[-1].key
        values = generator.normal(size=leaf.shape).astype(np.float32)
        if name == "scale":
            return 1 + 0.3 * values
        if name in ("embedding", "unembedding"):
            values[config.vocab_size :] = 1e3  # padding rows: whatever uses them stands out
            return values
        return values * {"bias": 1.0}.get(name, 0.3)

    return jax.tree_util.tree_map_with_path(weight, shapes)


def hidden(params, config: ModelConfig, tokens):
    """Final hidden states [B, T, D]."""
    params = jax.tree.map(jnp.asarray, params)
    N, K, H = config.heads, config.kv_heads, config.head_dim
    B, T = tokens.shape
    place = np.arange(T)

    def norm(x, weights):
        scale = weights["scale"].reshape((1,) * (x.ndim - 1) + (-1,)) + config.norm_offset
        if config.norm == "layer" and "bias" in weights:
            mean = x.mean(-1, keepdims=True)
            bias = weights["bias"].reshape((1,) * (x.ndim - 1) + (-1,))
            return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + config.norm_eps) * scale + bias
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def frequencies(local):
        if local and config.local_rope_theta is not None:
            return config.local_rope_theta ** (-2 * np.arange(H // 2) / H)
        turns, scaling = config.rope_theta ** (-2 * np.arange(H // 2) / H), config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            return turns / scaling.factor
        if scaling is None:
            return turns
        low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
        assert low is not None and high is not None and original is not None
        lowered = []
        for turn in turns:
            ratio = original / (2 * np.pi / turn)
            if ratio < low:
                turn = turn / scaling.factor
            elif ratio <= high:
                share = (ratio - low) / (high - low)
                turn = (1 - share) * turn / scaling.factor + share * turn
            lowered.append(turn)
        return np.array(lowered)

    def rope(x, local):  # the pair (x_i, x_{i+H/2}) as one complex number, turned by its position
        if config.positions == "learned":
            return x
        turn = jnp.exp(1j * place[:, None] * frequencies(local)[None, :])
        turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn[None, :, None, :]
        return jnp.concatenate([turned.real, turned.imag], -1)

    def bias(weights, name):
        return weights[name][None, None] if name in weights else 0

    def activation(x):
        if config.activation == "silu":
            return x / (1 + jnp.exp(-x))
        return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = params["embedding"][tokens]
    if config.embed_scale is not None:
        x = x * config.embed_scale
    if config.positions == "learned":
        x = x + params["positions"][:T][None]
    for index in range(config.layers):
        local = config.window is not None and (config.local_layers[index] if config.local_layers else True)
        layer = jax.tree.map(lambda weight, index=index: weight[index], params["layers"])
        weights = layer["attention"]
        h = norm(x, layer["attention_norm"])
        q, k, v = (
            (h.reshape(B * T, -1) @ weights[name].reshape(config.embed, -1)).reshape(B, T, -1, H)
            for name in ("wq", "wk", "wv")
        )
        if config.qkv_bias:
            q, k, v = (y + weights[name][None, None] for y, name in zip((q, k, v), ("bq", "bk", "bv"), strict=True))
        if config.qk_norm:
            q, k = norm(q, weights["query_norm"]), norm(k, weights["key_norm"])
        q, k = rope(q, local), jnp.repeat(rope(k, local), N // K, axis=2)
        v = jnp.repeat(v, N // K, axis=2)
        scores = jnp.einsum("bqnh,bsnh->bnqs", q, k)
        scores = scores / np.sqrt(H) if config.query_scale is None else scores * config.query_scale
        if config.attention_softcap is not None:
            scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) & (distance < (config.window if local else T))
        probabilities = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bnqs,bsnh->bqnh", probabilities, v).reshape(B, T, N * H)
        out = out @ weights["wo"].reshape(N * H, config.embed) + bias(weights, "bo")
        x = x + (norm(out, layer["post_attention_norm"]) if config.post_norms else out)
        h, weights = norm(x, layer["mlp_norm"]), layer["mlp"]
        inner = h @ weights["up"] + bias(weights, "up_bias")
        if config.gated_mlp:
            inner = activation(h @ weights["gate"] + bias(weights, "gate_bias")) * inner
        else:
            inner = activation(inner)
        out = inner @ weights["down"] + bias(weights, "down_bias")
        x = x + (norm(out, layer["post_mlp_norm"]) if config.post_norms else out)
    return norm(x, params["final_norm"])


def logits(params, config: ModelConfig, tokens):
    """Logits of the real vocabulary [B, T, V]: [:, t] predicts token t + 1."""
    table = params["embedding" if config.tie_embeddings else "unembedding"][: config.vocab_size]
    z = hidden(params, config, tokens) @ table.T
    return z if config.softcap is None else config.softcap * jnp.tanh(z / config.softcap)


def logprobs(params, config: ModelConfig, tokens, temperature=1.0):
    """(log-probabilities, entropies), [B, T] each, 0 at t = 0."""
    log_p = jax.nn.log_softmax(logits(params, config, tokens)[:, :-1] / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


def values(params, config: ModelConfig, tokens):
    """[B, T + 1], 0 at t = 0."""
    head = params["value_head"]
    return jnp.pad(hidden(params, config, tokens) @ head["kernel"] + head["bias"], ((0, 0), (1, 0)))


@pytest.fixture(scope="session")
def reference():
    return SimpleNamespace(random_params=random_params, hidden=hidden, logits=logits, logprobs=logprobs, values=values)
