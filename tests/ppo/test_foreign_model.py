"""The PPO step drives a model that has nothing to do with ours, on no mesh, on Auto axes and on Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import PPOConfig, PPOState, Rollout, TrainState, experience_metrics, make_experience, make_ppo_step

VOCAB, EMBED, ROWS, PROMPT, TIME = 12, 6, 32, 4, 12


# The README's example: any causal model, in plain JAX.
def hidden(params, tokens):  # [B, T] -> [B, T, D]: the mean of the tokens before t
    x = jnp.cumsum(jax.nn.one_hot(tokens, VOCAB) @ params["embed"], axis=1)
    return jnp.roll(x, 1, axis=1) / jnp.arange(1, tokens.shape[1] + 1)[None, :, None]


def logprob_fn(params, tokens):
    logp = jax.nn.log_softmax(hidden(params, tokens) @ params["head"])
    return jnp.sum(logp * jax.nn.one_hot(tokens, VOCAB), -1), -jnp.sum(jnp.exp(logp) * logp, -1)


def value_fn(params, tokens):
    return (hidden(params, tokens) @ params["head"])[..., 0]


CONFIG = PPOConfig(epochs=2, minibatches=2, micro_batches=2, entropy_coef=0.01, kl_target=1.0, dual_clip=3.0, seed=7)
OPTIMIZER = optax.adamw(3e-2)


def weights(seed, width):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (VOCAB, EMBED), "head": (EMBED, width)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def host_rollout():
    rng = np.random.default_rng(0)
    rollout = Rollout(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (ROWS, TIME)), jnp.int32),
        prompt_lengths=jnp.asarray(rng.integers(1, PROMPT + 1, ROWS), jnp.int32),
        response_lengths=jnp.asarray(rng.integers(1, TIME - PROMPT + 1, ROWS), jnp.int32),
        logprobs=jnp.zeros((ROWS, TIME)),
        finished=jnp.asarray(rng.random(ROWS) < 0.7),
        version=jnp.int32(0),
    )
    return jax.device_get((rollout, rng.normal(size=ROWS).astype(np.float32)))


def train(rows, whole, head):
    """Three iterations; `rows`, `whole` and `head` place rows, other arrays and the actor's head."""
    rollout, scores = jax.tree.map(lambda x: (rows if np.ndim(x) else whole)(x), host_rollout())
    actor, reference, critic = (
        {"embed": whole(w["embed"]), "head": head(w["head"]) if w["head"].shape[1] == VOCAB else whole(w["head"])}
        for w in (weights(1, VOCAB), weights(2, VOCAB), weights(3, 1))
    )
    state = PPOState.create(
        TrainState.create(actor, OPTIMIZER), TrainState.create(critic, OPTIMIZER), kl_coef=CONFIG.kl_coef
    )

    @jax.jit
    def evaluate(state, rollout, scores):
        old, _ = logprob_fn(state.actor.params, rollout.tokens)
        ref, _ = logprob_fn(reference, rollout.tokens)
        values = value_fn(state.critic.params, rollout.tokens)
        experience = make_experience(
            rollout, scores, old, ref, values, config=CONFIG, kl_coef=state.kl.coef, bootstrap_values=values[:, -1]
        )
        return experience, experience_metrics(experience)

    step = make_ppo_step(logprob_fn, value_fn, OPTIMIZER, OPTIMIZER, CONFIG)
    log = []
    for _ in range(3):
        experience, metrics = evaluate(state, rollout, scores)
        state, step_metrics = step(state, experience)
        log.append(jax.device_get({**metrics, **step_metrics}))
    assert step._cache_size() == 1
    return jax.device_get(state), log


@pytest.fixture(scope="module")
def alone():
    return train(jnp.asarray, jnp.asarray, jnp.asarray)


@pytest.mark.parametrize("axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.full), AxisType.Explicit])
def test_same_result_on_a_mesh(axis_type, alone):
    mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=axis_type)

    def place(*axes):
        # Explicit axes type every dimension, so the spec that a step returns names them all.
        def put(x):
            spec = axes + (None,) * (np.ndim(x) - len(axes)) if axis_type == AxisType.Explicit else axes
            return jax.device_put(x, NamedSharding(mesh, P(*spec)))

        return put

    with jax.set_mesh(mesh):
        state, log = train(rows=place(("data", "fsdp")), whole=place(), head=place(None, "tensor"))
    assert state.actor.params["head"].shape == (EMBED, VOCAB)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, alone[0])
    for got, expected in zip(log, alone[1], strict=True):
        assert got.keys() == expected.keys()
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


def test_it_trains(alone):
    state, log = alone
    assert state.actor.step == state.critic.step == 3
    assert not np.allclose(state.actor.params["head"], weights(1, VOCAB)["head"], atol=1e-2)
    assert log[2]["critic/vf_loss"] < log[0]["critic/vf_loss"]
    assert all(m["actor/skipped_updates"] == m["critic/skipped_updates"] == 0 for m in log)
