"""The actor's loss under every option, against loops in NumPy differentiated by finite differences."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import (
    GRPOConfig,
    GSPOConfig,
    PolicyConfig,
    PPOConfig,
    PPOState,
    RLOOConfig,
    SFTBatch,
    TrainState,
    kl_estimate,
    loss_weights,
    make_actor_step,
    make_ppo_step,
    make_sft_step,
)

ROWS, TIME, KL_COEF, STEP = 16, 9, 0.3, 5  # STEP: the version of the weights that learn
OPTIMIZER = optax.sgd(1.0)  # the gradient is the difference of the weights


def loss_kl(aggregation, estimator, **options):
    return PolicyConfig(aggregation=aggregation, kl_in="loss", kl_estimator=estimator, **options)


CONFIGS = {
    "token-mean": loss_kl("token-mean", "k3", entropy_coef=0.1),
    "seq-mean-token-sum": loss_kl("seq-mean-token-sum", "k2", importance="token"),
    "seq-mean-token-mean": loss_kl("seq-mean-token-mean", "k3+", dual_clip=1.5),
    "constant": loss_kl("constant", "k1+", aggregation_divisor=7, importance="sequence", entropy_coef=0.1),
    "sequence": RLOOConfig(kl_coef=0.0, aggregation="seq-mean-token-mean", entropy_coef=0.1),
    "sequence-mean": GSPOConfig(kl_coef=0.05, clip_low=0.1, clip_high=0.1, importance="sequence"),
    "rollout": GRPOConfig(old_logprobs="rollout", importance_cap=1.1, clip_high=0.3),
    "rollout, sequence": GSPOConfig(old_logprobs="rollout", importance_cap=1.05, clip_low=0.3, clip_high=0.3),
    "ptx": PolicyConfig(ptx_coef=0.7, kl_coef=0.0),
    "cispo": loss_kl("token-mean", "k3", surrogate="cispo", importance="token", clip_high=0.3, staleness=3),
    "stale, sequence": RLOOConfig(kl_coef=0.0, aggregation="seq-mean-token-mean", staleness=2),
    "interpolate": PolicyConfig(
        kl_coef=0.0,
        old_logprobs="interpolate",
        importance="token",
        importance_cap=1.2,
        mask_token=(0.7, 2),
        staleness=4,
    ),
    "interpolate, rows": GSPOConfig(
        kl_coef=0.0,
        clip_low=0.1,
        clip_high=0.1,
        old_logprobs="interpolate",
        importance="sequence",
        mask_token=(0, 1.5),
        mask_sequence=(0.4, 2),
        mask_sequence_mean=(0.8, 1.3),
        mask_k3=0.08,
        staleness=4,
    ),
}

WHOLE = ("token-mean", "seq-mean-token-sum", "sequence", "cispo")
FAST = ("rollout", "ptx", "interpolate")  # the others' losses have goldens


def experience_of(toy, config):
    """Row 3 has no token that counts, row 4 has one."""
    e = toy.experience(ROWS, TIME)
    rng = np.random.default_rng(7)
    first = jnp.argmax(e.response_mask[4])
    keep = e.response_mask.at[3].set(False).at[4].set(jnp.arange(TIME) == first)
    weighed = config.importance is not None and config.old_logprobs == "recompute"
    importance = np.where(keep, rng.uniform(0.3, 2, keep.shape), 0) if weighed else None
    if weighed and config.importance == "sequence":
        importance = np.where(keep, rng.uniform(0.3, 2, (ROWS, 1)), 0)
    versions = None if config.staleness is None else jnp.asarray(rng.integers(0, STEP + 1, keep.shape), jnp.int32)
    in_loss = config.kl_in == "loss" and config.needs_reference
    return replace(
        e,
        response_mask=keep,
        importance=None if importance is None else jnp.asarray(importance, jnp.float32),
        versions=versions,
        kl_coef=jnp.float32(KL_COEF) if in_loss else None,
        ref_logprobs=e.ref_logprobs if in_loss else None,
    )


def texts_of(toy):
    rng = np.random.default_rng(8)
    mask = rng.random((ROWS, TIME)) < 0.4  # index 0 too, which must not count
    return SFTBatch(jnp.asarray(rng.integers(0, toy.vocab, (ROWS, TIME)), jnp.int32), jnp.asarray(mask))


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def proximal(e, r, t, logp):
    """AReaL's formula for the weights one update before the present ones."""
    drawn = e.versions[r, t]
    alpha = np.clip((STEP - 1 - drawn) / (STEP - drawn), 0, 1) if STEP > drawn else 0
    return e.old_logprobs[r, t] + alpha * (logp - e.old_logprobs[r, t])


def correction(log_rho, config):
    """The weights of a response's tokens, from log pi_old / pi_rollout."""
    log_rho = np.array(log_rho)
    rho, product, n = np.exp(log_rho), np.exp(log_rho.sum()), len(log_rho)
    weights = np.ones(n)
    if config.importance is not None:
        weights = np.minimum(rho if config.importance == "token" else np.full(n, product), config.importance_cap)
    for bounds, x in (
        (config.mask_token, rho),
        (config.mask_sequence, product),
        (config.mask_sequence_mean, product ** (1 / n)),
    ):
        weights = weights if bounds is None else weights * ((bounds[0] <= x) & (x <= bounds[1]))
    return weights * (config.mask_k3 is None or np.mean(rho - 1 - log_rho) <= config.mask_k3)


def numpy_loss(logits, e, texts, config, *, straight_through, fixed=None):
    """The minibatch's loss and its parts, in float64, a response at a time.

    fixed: the logits of what has no gradient.
    """
    logp, constant = log_softmax(logits), log_softmax(logits if fixed is None else fixed)
    responses = [[(row, t) for t in range(TIME) if e.response_mask[row, t]] for row in range(ROWS)]
    responses = [response for response in responses if response]
    total, sequences = sum(map(len, responses)), len(responses)
    loss = dict.fromkeys(("pg_loss", "entropy", "kl_loss", "ptx_loss"), 0.0)
    sum_of_all, ratios, kl_mean = 0.0, [], []
    for response in responses:
        of_tokens = [logp[e.tokens[r, t - 1], e.tokens[r, t]] for r, t in response]
        constants = [constant[e.tokens[r, t - 1], e.tokens[r, t]] for r, t in response]
        old = rolled = [e.old_logprobs[r, t] for r, t in response]
        factors = [1 if e.importance is None else e.importance[r, t] for r, t in response]
        if config.old_logprobs == "interpolate":
            old = [proximal(e, r, t, x) for (r, t), x in zip(response, constants, strict=True)]
            factors = correction(np.subtract(old, rolled), config)
        if config.staleness is not None:
            factors = [
                w if STEP - e.versions[rt] <= config.staleness else 0 for w, rt in zip(factors, response, strict=True)
            ]
        log_ratios = np.subtract(of_tokens, old)
        frozen = np.subtract(constants, old)
        if config.ratio != "token":
            counted = log_ratios[np.array(factors) > 0]
            one = np.sum(counted) if config.ratio == "sequence" else np.mean(counted) if len(counted) else 0.0
            log_ratios = [one] * len(response)
        weight = {
            "token-mean": 1 / total,
            "seq-mean-token-sum": 1 / sequences,
            "seq-mean-token-mean": 1 / sequences / len(response),
            "constant": 1 / sequences / (config.aggregation_divisor or 1),
        }[config.aggregation]
        for i, ((r, t), log_ratio) in enumerate(zip(response, log_ratios, strict=True)):
            if config.old_logprobs == "rollout":
                log_ratio = min(log_ratio, np.log(config.importance_cap))
            a, ratio, p = e.advantages[r, t], np.exp(log_ratio), logp[e.tokens[r, t - 1]]
            ratios.append(ratio)
            pg = max(-a * ratio, -a * min(max(ratio, 1 - config.clip_low), 1 + config.clip_high))
            if config.dual_clip is not None and a < 0:
                pg = min(pg, -a * config.dual_clip)
            if config.surrogate == "cispo":
                pg = -min(max(np.exp(frozen[i]), 1 - config.clip_low), 1 + config.clip_high) * a * of_tokens[i]
            pg *= factors[i]
            entropy = -(np.exp(p) * p).sum()
            kl = 0.0
            if e.kl_coef is not None:
                d = p[e.tokens[r, t]] - e.ref_logprobs[r, t]
                values = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) + d - 1}
                plus = config.kl_estimator.endswith("+")
                kl = values["k2" if plus and straight_through else config.kl_estimator.rstrip("+")]
                kl_mean.append(kl)
            loss["pg_loss"] += weight * pg
            sum_of_all += weight * (pg - config.entropy_coef * entropy + KL_COEF * kl)
    if config.ptx_coef:
        positions = [(r, t) for r in range(ROWS) for t in range(1, TIME) if texts.loss_mask[r, t]]
        nll = [-logp[texts.tokens[r, t - 1], texts.tokens[r, t]] for r, t in positions]
        loss["ptx_loss"] = float(np.mean(nll))
        sum_of_all += config.ptx_coef * np.mean(nll)
    loss["kl_loss"] = float(np.mean(kl_mean)) if kl_mean else 0.0
    return sum_of_all, {**loss, "ratio": np.mean(ratios)}


def numpy_gradient(logits, *case):
    gradient = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[index] = 1e-6
        up, down = (numpy_loss(logits + s, *case, straight_through=True, fixed=logits)[0] for s in (step, -step))
        gradient[index] = (up - down) / 2e-6
    return gradient


def host(tree):
    return jax.tree.map(lambda x: np.array(x, np.float64) if x.dtype == jnp.float32 else np.array(x), tree)


def padded(tree, by):
    def pad(x):
        fill = jnp.nan if x.dtype == jnp.float32 else 0
        return jnp.pad(x, ((0, 0), (0, by)), constant_values=fill) if x.ndim == 2 else x

    return jax.tree.map(pad, tree)


def spoiled(experience):
    """Garbage outside the responses, which must not be read."""
    names = ("old_logprobs", "ref_logprobs", "advantages", "importance")
    arrays = {name: getattr(experience, name) for name in names}
    return replace(
        experience,
        **{n: jnp.where(experience.response_mask, x, jnp.nan) for n, x in arrays.items() if x is not None},
    )


def token_sums(toy):
    def sums(params, tokens, data, terms, *frozen):
        flat = jax.tree.map(lambda x: x[:, 1:].reshape(-1), (*toy.logprobs(params, tokens), data))
        return jax.tree.map(jnp.sum, terms(*flat))

    return sums


def check(toy, config, state, metrics, before, *, rtol=1e-4):
    e, texts = host(experience_of(toy, config)), host(texts_of(toy))
    expected = before - numpy_gradient(before, e, texts, config)
    np.testing.assert_allclose(state.params["logits"], expected, rtol=rtol, atol=2e-6)
    _, parts = numpy_loss(before, e, texts, config, straight_through=False)
    names = {"pg_loss", "ratio"} | ({"kl_loss"} if e.kl_coef is not None else set())
    names |= {"ptx_loss"} if config.ptx_coef else set()
    for name in names:
        np.testing.assert_allclose(metrics[f"actor/{name}"], parts[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert metrics["actor/skipped_updates"] == 0
    assert ("actor/kl_loss" in metrics, "actor/ptx_loss" in metrics) == ("kl_loss" in names, "ptx_loss" in names)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.full) for n in CONFIGS])
def test_gradients_and_metrics_match_loops(toy, name):
    """Unless whole: micro-batches, padding full of garbage, and where the ratio is a token's by sums of the loss."""
    config, sums_fn = CONFIGS[name], None
    experience, texts = experience_of(toy, config), texts_of(toy)
    if name not in WHOLE:
        experience, texts = padded(spoiled(experience), 3), padded(texts, 3)
        sums_fn = token_sums(toy)
    changed = replace(config, micro_batches=1 if name in WHOLE else 4)
    before = toy.params()[0]
    step = make_actor_step(toy.logprobs, OPTIMIZER, changed, sums_fn=sums_fn)
    state = replace(TrainState.create(before, OPTIMIZER), step=jnp.int32(STEP))
    state, metrics = step(state, experience, *([texts] if config.ptx_coef else []))
    check(toy, config, state, metrics, host(toy.params()[0])["logits"])


@pytest.mark.full
def test_parts_by_length_with_texts_longer_than_the_responses(toy):
    config = CONFIGS["ptx"]
    experience, texts = padded((experience_of(toy, config), texts_of(toy)), 40)
    texts = SFTBatch(jnp.roll(texts.tokens, 30, 1), jnp.roll(texts.loss_mask.at[:, 0].set(False), 30, 1))
    results = []
    for tokens in (None, 96):
        step = make_actor_step(toy.logprobs, OPTIMIZER, replace(config, micro_batch_tokens=tokens))
        results.append(step(TrainState.create(toy.params()[0], OPTIMIZER), experience, texts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    _, parts = numpy_loss(
        host(toy.params()[0])["logits"],
        host(experience_of(toy, config)),
        host(texts_of(toy)),
        config,
        straight_through=False,
    )
    np.testing.assert_allclose(results[1][1]["actor/ptx_loss"], parts["ptx_loss"], rtol=1e-4)


def test_the_mesh_does_not_matter(toy):
    config = GSPOConfig(kl_coef=0.05, clip_low=0.1, clip_high=0.1, importance="sequence", ptx_coef=0.5, staleness=3)
    mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=AxisType.Explicit)
    inputs = experience_of(toy, config), texts_of(toy)
    results = []
    for context, axes in ((nullcontext(), None), (jax.set_mesh(mesh), ("data", "fsdp", "tensor"))):
        with context:

            def put(x, axes=axes):
                spec = P(axes, *[None] * (x.ndim - 1)) if x.ndim else P()
                return x if axes is None else jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

            state = replace(TrainState.create(toy.params()[0], OPTIMIZER), step=jnp.int32(STEP))
            step = make_actor_step(toy.logprobs, OPTIMIZER, config)
            results.append(jax.tree.map(np.asarray, step(state, *jax.tree.map(put, inputs))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    assert results[0][1]["actor/ptx_loss"] > 0 and results[0][1]["rollout_corr/rollout_rs_masked_fraction"] > 0.1


def test_weights_of_a_minibatch_by_hand():
    mask = jnp.array([[True, True, False], [False, False, False], [True, False, False]])
    weights: dict[Any, Any] = {
        "token-mean": [[1 / 3, 1 / 3, 0], [0] * 3, [1 / 3, 0, 0]],
        "seq-mean-token-sum": [[1 / 2, 1 / 2, 0], [0] * 3, [1 / 2, 0, 0]],
        "seq-mean-token-mean": [[1 / 4, 1 / 4, 0], [0] * 3, [1 / 2, 0, 0]],
        "constant": [[1 / 20, 1 / 20, 0], [0] * 3, [1 / 20, 0, 0]],
    }
    for aggregation, expected in weights.items():
        np.testing.assert_allclose(loss_weights(mask, aggregation, divisor=10), expected, rtol=1e-6)
        assert not np.any(loss_weights(jnp.zeros_like(mask), aggregation, divisor=10))


def test_plus_has_one_estimators_value_and_anothers_gradient():
    d = jnp.array([0.0, 0.5, -0.5, 3.0, -3.0])
    pairs: Any = (("k1+", "k1"), ("k3+", "k3"))
    for estimator, plain in pairs:
        value, pull = jax.vjp(lambda d, e=estimator: kl_estimate(d, jnp.zeros(5), e), d)
        np.testing.assert_array_equal(value, kl_estimate(d, jnp.zeros(5), plain))
        np.testing.assert_array_equal(pull(jnp.ones(5))[0], d)  # of d^2 / 2


def test_texts_are_imitated_where_no_response_counts(toy):
    config, experience, texts = PolicyConfig(ptx_coef=1.0), toy.experience(ROWS, TIME), texts_of(toy)
    none = replace(experience, response_mask=jnp.zeros((ROWS, TIME), bool))
    states = [TrainState.create(toy.params()[0], OPTIMIZER) for _ in range(2)]
    state, metrics = make_actor_step(toy.logprobs, OPTIMIZER, config)(states[0], none, texts)
    expected, supervised = make_sft_step(toy.logprobs, OPTIMIZER)(states[1], texts)
    np.testing.assert_allclose(state.params["logits"], expected.params["logits"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["actor/ptx_loss"], supervised["sft/loss"], rtol=1e-6)


def test_a_ppo_step_takes_texts_and_does_without_a_reference(toy):
    config = PPOConfig(kl_coef=0.0, ptx_coef=0.5)
    actor, critic = (TrainState.create(params, OPTIMIZER) for params in toy.params())
    experience = replace(toy.experience(ROWS, TIME), ref_logprobs=None)
    step = make_ppo_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, config)
    state, metrics = step(PPOState.create(actor, critic, kl_coef=0.0), experience, texts_of(toy))
    assert "objective/kl" not in metrics and metrics["actor/ptx_loss"] > 0
    assert state.actor.step == state.critic.step == 1


def test_what_a_loss_needs_and_does_not_get_is_named(toy):
    with pytest.raises(ValueError, match="aggregation_divisor=None"):
        make_actor_step(toy.logprobs, OPTIMIZER, PolicyConfig(aggregation="constant"))
    experience, state = toy.experience(ROWS, TIME), TrainState.create(toy.params()[0], OPTIMIZER)
    with pytest.raises(ValueError, match="kl_in='loss' needs ref_logprobs and kl_coef in the experience"):
        make_actor_step(toy.logprobs, OPTIMIZER, GRPOConfig())(state, experience)
    weights = experience.response_mask.astype(jnp.float32)
    for config, given in ((PolicyConfig(importance="token"), None), (PolicyConfig(), weights)):
        with pytest.raises(ValueError, match=f"importance={config.importance!r}: the experience has"):
            make_actor_step(toy.logprobs, OPTIMIZER, config)(state, replace(experience, importance=given))
    short = SFTBatch(experience.tokens[:8], experience.response_mask[:8])
    with pytest.raises(ValueError, match=r"texts have shape \(8, 9\).* \(16, 9\)"):
        make_actor_step(toy.logprobs, OPTIMIZER, PolicyConfig(ptx_coef=1.0))(state, experience, short)
