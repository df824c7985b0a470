"""The actor's loss under options, against loops in NumPy differentiated by finite differences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import (
    GRPOConfig,
    GSPOConfig,
    PolicyConfig,
    PPOConfig,
    PPOState,
    RLOOConfig,
    SFTBatch,
    TrainState,
    loss_weights,
    make_actor_step,
    make_ppo_step,
    make_sft_step,
)

ROWS, TIME, KL_COEF, STEP = 16, 9, 0.3, 5  # STEP: the version of the weights that learn
OPTIMIZER = optax.sgd(1.0)  # the gradient is the difference of the weights


# What no golden has.
CONFIGS = {
    "rollout": GRPOConfig(old_logprobs="rollout", importance_cap=1.1, clip_high=0.3),
    "stale, sequence": RLOOConfig(kl_coef=0.0, aggregation="seq-mean-token-mean", staleness=2),
    "prompt-mean": GRPOConfig(samples=4, aggregation="prompt-mean", entropy_coef=0.1),
    "interpolate": PolicyConfig(
        kl_coef=0.0,
        old_logprobs="interpolate",
        importance="token",
        importance_cap=1.2,
        mask_token=(0.7, 2),
        staleness=4,
        ptx_coef=0.7,
        entropy_coef=0.1,
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
FAST = ("rollout", "stale, sequence", "prompt-mean", "interpolate")


def experience_of(toy, config):
    """Row 3 has no token that counts, row 4 has one."""
    e = toy.experience(ROWS, TIME)
    rng = np.random.default_rng(7)
    first = jnp.argmax(e.response_mask[4])
    keep = e.response_mask.at[3].set(False).at[4].set(jnp.arange(TIME) == first)
    versions = None if config.staleness is None else jnp.asarray(rng.integers(0, STEP + 1, keep.shape), jnp.int32)
    in_loss = config.kl_in == "loss" and config.needs_reference
    return replace(
        e,
        response_mask=keep,
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
    """The weights of a response's tokens, from log pi_old / pi_rollout, and whether each is truncated."""
    rho, product, n = np.exp(log_rho), np.exp(log_rho.sum()), len(log_rho)
    weights, truncated = np.ones(n), np.zeros(n, bool)
    if config.importance is not None:
        whole = rho if config.importance == "token" else np.full(n, product)
        weights, truncated = np.minimum(whole, config.importance_cap), whole > config.importance_cap
    for bounds, x in (
        (config.mask_token, rho),
        (config.mask_sequence, product),
        (config.mask_sequence_mean, product ** (1 / max(n, 1))),
    ):
        weights = weights if bounds is None else weights * ((bounds[0] <= x) & (x <= bounds[1]))
    weights = weights * (config.mask_k3 is None or np.sum(rho - 1 - log_rho) <= n * config.mask_k3)
    return weights, truncated & (weights > 0)


def numpy_loss(logits, e, texts, config, fixed=None):
    """The minibatch's loss and its parts, in float64, a response at a time.

    fixed: the logits of what has no gradient.
    """
    logp, constant = log_softmax(logits), log_softmax(logits if fixed is None else fixed)
    responses = [[(row, t) for t in range(TIME) if e.response_mask[row, t]] for row in range(ROWS)]
    responses = [response for response in responses if response]
    total, sequences = sum(map(len, responses)), len(responses)
    loss = dict.fromkeys(("pg_loss", "entropy", "kl_loss", "ptx_loss"), 0.0)
    sum_of_all, ratios, kl_mean, weights, shares = 0.0, [], [], [], []
    for response in responses:
        of_tokens = [logp[e.tokens[r, t - 1], e.tokens[r, t]] for r, t in response]
        constants = [constant[e.tokens[r, t - 1], e.tokens[r, t]] for r, t in response]
        old = rolled = [e.old_logprobs[r, t] for r, t in response]
        fresh = np.array([config.staleness is None or STEP - e.versions[rt] <= config.staleness for rt in response])
        factors, truncated = fresh.astype(float), np.zeros(len(response), bool)
        if config.old_logprobs == "interpolate":
            old = [proximal(e, r, t, x) for (r, t), x in zip(response, constants, strict=True)]
            factors[fresh], truncated[fresh] = correction(np.subtract(old, rolled)[fresh], config)
        weights += list(factors)
        shares += list(truncated)
        log_ratios = np.subtract(of_tokens, old)
        if config.ratio != "token":
            counted = log_ratios[factors > 0]
            one = np.sum(counted) if config.ratio == "sequence" else np.mean(counted) if len(counted) else 0.0
            log_ratios = [one] * len(response)
        weight = 1 / total if config.aggregation == "token-mean" else 1 / sequences / len(response)
        if config.aggregation == "prompt-mean":
            prompts = [other[0][0] // config.samples for other in responses for _ in other]  # of each token
            weight = 1 / len(set(prompts)) / prompts.count(response[0][0] // config.samples)
        for (r, t), log_ratio, factor in zip(response, log_ratios, factors, strict=True):
            if config.old_logprobs == "rollout":
                log_ratio = min(log_ratio, np.log(config.importance_cap))
            a, ratio, p = e.advantages[r, t], np.exp(log_ratio), logp[e.tokens[r, t - 1]]
            ratios.append(ratio)
            pg = max(-a * ratio, -a * min(max(ratio, 1 - config.clip_low), 1 + config.clip_high))
            pg *= factor
            entropy = -(np.exp(p) * p).sum()
            kl = 0.0
            if e.kl_coef is not None:
                d = p[e.tokens[r, t]] - e.ref_logprobs[r, t]
                kl = np.exp(-d) + d - 1
                kl_mean.append(kl)
            loss["pg_loss"] += weight * pg
            sum_of_all += weight * (pg - config.entropy_coef * entropy + KL_COEF * kl)
    if config.ptx_coef:
        positions = [(r, t) for r in range(ROWS) for t in range(1, TIME) if texts.loss_mask[r, t]]
        nll = [-logp[texts.tokens[r, t - 1], texts.tokens[r, t]] for r, t in positions]
        loss["ptx_loss"] = float(np.mean(nll))
        sum_of_all += config.ptx_coef * np.mean(nll)
    loss["kl_loss"] = float(np.mean(kl_mean)) if kl_mean else 0.0
    corrected = {"is_mean": np.mean(weights), "is_ratio_fraction_high": np.mean(shares)}
    corrected["rs_masked_fraction"] = np.mean(np.equal(weights, 0))
    return sum_of_all, {**loss, "ratio": np.mean(ratios), **corrected}


def numpy_gradient(logits, *case):
    gradient = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[index] = 1e-6
        up, down = (numpy_loss(logits + s, *case, fixed=logits)[0] for s in (step, -step))
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.full) for n in CONFIGS])
def test_gradients_and_metrics_match_loops(toy, name):
    """In micro-batches, with padding full of garbage, and where the ratio is a token's by sums of the loss."""
    config = CONFIGS[name]
    experience, texts = padded(spoiled(experience_of(toy, config)), 3), padded(texts_of(toy), 3)
    before = toy.params()[0]
    step = make_actor_step(toy.logprobs, OPTIMIZER, replace(config, micro_batches=4), sums_fn=token_sums(toy))
    state = replace(TrainState.create(before, OPTIMIZER), step=jnp.int32(STEP))
    state, metrics = step(state, experience, *([texts] if config.ptx_coef else []))

    logits, e, texts = host(toy.params()[0])["logits"], host(experience_of(toy, config)), host(texts_of(toy))
    expected = logits - numpy_gradient(logits, e, texts, config)
    np.testing.assert_allclose(state.params["logits"], expected, rtol=1e-4, atol=2e-6)
    _, parts = numpy_loss(logits, e, texts, config)
    names = {"pg_loss", "ratio"} | ({"kl_loss"} if e.kl_coef is not None else set())
    names |= {"ptx_loss"} if config.ptx_coef else set()
    for part in names:
        np.testing.assert_allclose(metrics[f"actor/{part}"], parts[part], rtol=1e-4, atol=1e-6, err_msg=part)
    if config.old_logprobs == "interpolate":
        for part in ("is_mean", "is_ratio_fraction_high", "rs_masked_fraction"):
            np.testing.assert_allclose(metrics[f"rollout_corr/rollout_{part}"], parts[part], rtol=1e-4, err_msg=part)
    assert metrics["actor/skipped_updates"] == 0
    assert ("actor/kl_loss" in metrics, "actor/ptx_loss" in metrics) == ("kl_loss" in names, "ptx_loss" in names)


def test_a_prompt_counts_in_a_minibatch_by_its_share_of_tokens():
    """Prompt 0 has tokens of 2 + 1 + 3 responses, prompt 1 of 4 + 0 + 2; the minibatch has rows 0, 3 and 5."""
    lengths = np.array([2, 4, 2])
    mask = jnp.asarray(np.arange(6)[None] < lengths[:, None])
    weights = loss_weights(mask, "prompt-mean", group_tokens=jnp.array([6.0, 6, 6]))
    share = 2 / 6 + 4 / 6 + 2 / 6
    np.testing.assert_allclose(weights.sum(axis=1), lengths / 6 / share, rtol=1e-6)
    assert not np.any(loss_weights(jnp.zeros((3, 6), bool), "prompt-mean", group_tokens=jnp.zeros(3)))
    with pytest.raises(ValueError, match="group_tokens=None: aggregation='prompt-mean' needs them"):
        loss_weights(mask, "prompt-mean")
    with pytest.raises(ValueError, match="aggregation='prompt-mean': it must be another where a prompt has one"):
        PPOConfig(aggregation="prompt-mean")


@pytest.mark.full
def test_parts_by_length_with_texts_longer_than_the_responses(toy):
    config = PolicyConfig(ptx_coef=0.7, kl_coef=0.0)
    experience, texts = padded((experience_of(toy, config), texts_of(toy)), 40)
    texts = SFTBatch(jnp.roll(texts.tokens, 30, 1), jnp.roll(texts.loss_mask.at[:, 0].set(False), 30, 1))
    results = []
    for tokens in (None, 96):
        step = make_actor_step(toy.logprobs, OPTIMIZER, replace(config, micro_batch_tokens=tokens))
        results.append(step(TrainState.create(toy.params()[0], OPTIMIZER), experience, texts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    assert results[1][1]["actor/ptx_loss"] > 0


def test_texts_are_imitated_where_no_response_counts(toy):
    """In a step of PPO, without a reference."""
    config, experience, texts = PPOConfig(kl_coef=0.0, ptx_coef=1.0), toy.experience(ROWS, TIME), texts_of(toy)
    none = replace(experience, response_mask=jnp.zeros((ROWS, TIME), bool), ref_logprobs=None)
    actor, critic = (TrainState.create(params, OPTIMIZER) for params in toy.params())
    step = make_ppo_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, config)
    state, metrics = step(PPOState.create(actor, critic, kl_coef=0.0), none, texts)
    assert "objective/kl" not in metrics and state.actor.step == state.critic.step == 1
    start = TrainState.create(toy.params()[0], OPTIMIZER)
    expected, supervised = make_sft_step(toy.logprobs, OPTIMIZER)(start, texts)
    np.testing.assert_allclose(state.actor.params["logits"], expected.params["logits"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["actor/ptx_loss"], supervised["sft/loss"], rtol=1e-6)


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
