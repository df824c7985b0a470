"""SFT, preference learning and DPO against independent NumPy computations, and their invariants."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import (
    DPOConfig,
    PairBatch,
    PreferenceBatch,
    SFTBatch,
    TrainState,
    dpo_loss,
    make_dpo_step,
    make_preference_step,
    make_sft_step,
    pair_terms,
    with_reference,
)

PAIRS, TIME, RATE = 8, 9, 0.5
OPTIMIZER = optax.sgd(RATE)
CONFIGS = [DPOConfig(beta=0.3), DPOConfig(beta=0.7, label_smoothing=0.1), DPOConfig(loss="ipo", beta=0.2)]
terms_of, losses = (jax.jit(function, static_argnames="config") for function in (pair_terms, dpo_loss))


def pair_batch(seed=0, pairs=PAIRS, time=TIME):
    """Ragged pairs; a prompt of no token, an empty response and one of a single token are among them."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 4, pairs)
    lengths = np.minimum(prompts + rng.integers(1, time - 2, (2, pairs)), time)
    prompts[0] = 0
    lengths[:, 1] = prompts[1], prompts[1] + 1
    chosen, rejected = rng.integers(0, 5, (2, pairs, time))
    ref = rng.normal(-8, 2, (2, pairs))
    return PairBatch(
        *(jnp.asarray(x, jnp.int32) for x in (chosen, lengths[0], rejected, lengths[1], prompts)),
        *(jnp.asarray(x, jnp.float32) for x in ref),
    )


def by_hand(logits, batch, config):
    """Loss, gradient and metrics, position by position in float64."""
    gradient, terms = np.zeros_like(logits), []
    for pair in range(len(batch.chosen)):
        sums, grads, counts = [], [], []
        for tokens, length in ((batch.chosen, batch.chosen_lengths), (batch.rejected, batch.rejected_lengths)):
            total, grad = 0.0, np.zeros_like(logits)
            start = max(int(batch.prompt_lengths[pair]), 1)
            for t in range(start, int(length[pair])):
                previous, token = int(tokens[pair, t - 1]), int(tokens[pair, t])
                p = np.exp(logits[previous]) / np.exp(logits[previous]).sum()
                total += np.log(p[token])
                grad[previous] += np.eye(5)[token] - p
            sums.append(total)
            grads.append(grad)
            counts.append(max(int(length[pair]) - start, 1) if config.loss == "ipo" else 1)
        ref = float(batch.ref_chosen[pair]), float(batch.ref_rejected[pair])
        ratios = [(value - r) / n for value, r, n in zip(sums, ref, counts, strict=True)]
        h, beta, eps = ratios[0] - ratios[1], config.beta, config.label_smoothing
        if config.loss == "ipo":
            loss, slope = (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        else:
            good = 1 / (1 + np.exp(-beta * h))
            loss = -(1 - eps) * np.log(good) - eps * np.log(1 - good)
            slope = beta * (-(1 - eps) * (1 - good) + eps * good)
        gradient += slope * (grads[0] / counts[0] - grads[1] / counts[1]) / len(batch.chosen)
        rewards = beta * (sums[0] - ref[0]), beta * (sums[1] - ref[1])
        terms.append((loss, *rewards, rewards[0] > rewards[1], rewards[0] - rewards[1], *sums))
    names = ("dpo/loss", *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")))
    return gradient, dict(zip((*names, "logps/chosen", "logps/rejected"), np.mean(terms, 0), strict=True))


@pytest.mark.parametrize(("config", "micro_batches"), [*zip(CONFIGS, (1, 4, 4), strict=True)])
def test_a_step_is_gradient_descent_on_the_mean_loss_of_the_pairs(toy, config, micro_batches):
    batch, params = pair_batch(), toy.params()[0]
    logits = np.asarray(params["logits"], np.float64)
    gradient, expected = by_hand(logits, batch, config)
    step = make_dpo_step(toy.logprobs, OPTIMIZER, replace(config, micro_batches=micro_batches))
    state, metrics = step(TrainState.create(params, OPTIMIZER), batch)
    np.testing.assert_allclose(state.params["logits"], logits - RATE * gradient, rtol=1e-5, atol=1e-5)
    expected |= {"dpo/grad_norm": np.sqrt((gradient**2).sum()), "dpo/skipped_updates": 0, "dpo/nonfinite_updates": 0}
    assert metrics.keys() == expected.keys() and params["logits"].is_deleted() and state.step == 1
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("strict_dtypes")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.label_smoothing:g}")
def test_nothing_counts_but_responses(toy, config):
    """Other paddings, wider ones, and log-probs that are not numbers outside of responses."""
    batch, params = pair_batch(), toy.params()[0]
    plain = terms_of(toy.logprobs(params, batch.tokens)[0], batch, config=config)

    def refilled(tokens, lengths):
        wide = np.pad(tokens, ((0, 0), (0, 4)))
        return jnp.asarray(np.where(np.arange(wide.shape[1])[None, :] < lengths[:, None], wide, 3))

    chosen, rejected = refilled(batch.chosen, batch.chosen_lengths), refilled(batch.rejected, batch.rejected_lengths)
    wide = replace(batch, chosen=chosen, rejected=rejected)
    logprobs = jnp.where(wide.response_mask, toy.logprobs(params, wide.tokens)[0], jnp.nan)
    other = terms_of(logprobs, wide, config=config)
    for name, value in plain.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_policy_that_is_the_reference_knows_nothing_yet(toy):
    """Every reward is exactly 0, the loss log 2, and each pair pushes its answers apart with half of beta."""
    batch, params = replace(pair_batch(), ref_chosen=None, ref_rejected=None), toy.params()[0]
    logprobs = toy.logprobs(params, batch.tokens)[0]
    terms = terms_of(logprobs, with_reference(batch, logprobs), config=DPOConfig())
    np.testing.assert_allclose(terms["dpo/loss"], np.log(2), rtol=1e-6)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        np.testing.assert_array_equal(terms[f"rewards/{name}"], 0)
    with pytest.raises(ValueError, match="with_reference"):
        terms_of(logprobs, batch, config=DPOConfig())


def test_the_loss_stays_finite_and_its_gradient_bounded_however_far_apart_the_answers_are():
    far = jnp.array([-1e4, 1e4, 0.0])
    zero = jnp.zeros(3)
    for smoothing, expected, slopes in ((0.0, [1e3, 0.0, np.log(2)], [-0.1, 0.0, -0.05]), (0.2, None, None)):
        config = DPOConfig(label_smoothing=smoothing)
        loss = losses(far, zero, zero, zero, config=config)
        slope = jax.jit(jax.grad(lambda x, config=config: losses(x, zero, zero, zero, config=config).sum()))(far)
        expected = [800.0, 200.0, np.log(2)] if expected is None else expected
        slopes = [-0.08, 0.02, -0.03] if slopes is None else slopes
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(slope, slopes, rtol=1e-6, atol=1e-9)


ROWS, WIDTH = 8, 7


def sft_batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 5, (ROWS, WIDTH)).astype(np.int32)
    mask = rng.random((ROWS, WIDTH)) < 0.5
    mask[:, 0] = True  # has no log-probability: must not count
    return SFTBatch(jnp.asarray(tokens), jnp.asarray(mask))


def preference_batch(seed=0):
    rng = np.random.default_rng(seed)
    chosen, rejected = rng.integers(0, 5, (2, ROWS, WIDTH)).astype(np.int32)
    lengths = rng.integers(1, WIDTH + 1, (2, ROWS)).astype(np.int32)
    return PreferenceBatch(*(jnp.asarray(x) for x in (chosen, lengths[0], rejected, lengths[1])))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_sft_is_gradient_descent_on_the_mean_negative_log_likelihood(toy, micro_batches):
    batch, (params, _) = sft_batch(), toy.params()
    logits = np.asarray(params["logits"], np.float64)
    step = make_sft_step(toy.logprobs, OPTIMIZER, micro_batches=micro_batches)
    state, metrics = step(TrainState.create(params, OPTIMIZER), batch)

    positions = [(row, t) for row in range(ROWS) for t in range(1, WIDTH) if batch.loss_mask[row, t]]
    gradient, loss, entropy = np.zeros_like(logits), 0.0, 0.0
    for row, t in positions:
        previous, token = int(batch.tokens[row, t - 1]), int(batch.tokens[row, t])
        p = np.exp(logits[previous]) / np.exp(logits[previous]).sum()
        loss -= np.log(p[token]) / len(positions)
        entropy -= (p * np.log(p)).sum() / len(positions)
        gradient[previous] -= (np.eye(5)[token] - p) / len(positions)
    np.testing.assert_allclose(state.params["logits"], logits - RATE * gradient, rtol=1e-5, atol=1e-6)
    expected = {"loss": loss, "entropy": entropy, "grad_norm": np.sqrt((gradient**2).sum()), "skipped_updates": 0}
    expected["nonfinite_updates"] = 0
    assert metrics.keys() == {f"sft/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"sft/{name}"], value, rtol=1e-5, err_msg=name)
    assert state.step == 1


@pytest.mark.parametrize(("micro_batches", "centre"), [(1, 0.0), (4, 0.1)])
def test_preference_learning_is_gradient_descent_on_bradley_terry(toy, micro_batches, centre):
    batch, (_, params) = preference_batch(), toy.params()
    table = np.asarray(params["values"], np.float64)
    step = make_preference_step(toy.scores, OPTIMIZER, micro_batches=micro_batches, centre=centre)
    state, metrics = step(TrainState.create(params, OPTIMIZER), batch)

    def counts(tokens, lengths):
        rows = zip(np.asarray(tokens), np.asarray(lengths), strict=True)
        return np.stack([np.bincount(row[:length], minlength=5) for row, length in rows])

    chosen, rejected = counts(batch.chosen, batch.chosen_lengths), counts(batch.rejected, batch.rejected_lengths)
    c, r = chosen @ table, rejected @ table
    wrong = 1 / (1 + np.exp(c - r))
    slopes = -wrong[:, None] * (chosen - rejected) + centre * 2 * (c + r)[:, None] * (chosen + rejected)
    gradient = slopes.mean(0)
    np.testing.assert_allclose(state.params["values"], table - RATE * gradient, rtol=1e-5, atol=1e-6)
    expected = {
        "loss": np.mean(-np.log(1 - wrong) + centre * (c + r) ** 2),
        "accuracy": np.mean(c > r),
        "margin": np.mean(c - r),
        "grad_norm": np.sqrt((gradient**2).sum()),
        "skipped_updates": 0,
        "nonfinite_updates": 0,
    }
    assert metrics.keys() == {f"reward_model/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"reward_model/{name}"], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("sizes", [(2, 4, 1), (1, 2, 4)], ids=str)
def test_the_mesh_does_not_matter(toy, sizes):
    """Checks all steps, with parts of equal numbers of rows and with parts by length."""
    actor, critic = toy.params()
    division: dict[str, Any] = {"micro_batches": 2} if sizes[0] == 2 else {"micro_batch_tokens": 2 * WIDTH}
    ipo = DPOConfig(loss="ipo", beta=0.2, **division)
    cases = {
        "sft": (make_sft_step(toy.logprobs, OPTIMIZER, **division), actor, sft_batch()),
        "preferences": (make_preference_step(toy.scores, OPTIMIZER, **division), critic, preference_batch()),
        "dpo": (make_dpo_step(toy.logprobs, OPTIMIZER, ipo), actor, pair_batch()),
    }
    mesh = make_mesh(*sizes)
    for name, (step, params, batch) in cases.items():
        params, batch = jax.device_get((params, jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), batch)))
        expected = jax.device_get(step(TrainState.create(params, OPTIMIZER), batch))
        with jax.set_mesh(mesh):
            placed = jax.device_put(batch, NamedSharding(mesh, P(mesh.axis_names)))
            weights = jax.device_put(params, NamedSharding(mesh, P()))
            state, metrics = step(TrainState.create(weights, OPTIMIZER), placed)
        for leaf, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6, err_msg=name)


def test_equal_scores_count_as_wrong(toy):
    zeros = {"values": jnp.zeros(5)}
    _, metrics = make_preference_step(toy.scores, OPTIMIZER)(TrainState.create(zeros, OPTIMIZER), preference_batch())
    assert metrics["reward_model/accuracy"] == 0
    np.testing.assert_allclose(metrics["reward_model/loss"], np.log(2), rtol=1e-6)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights_or_the_optimizer(toy):
    def logprobs(params, tokens):
        logp, entropy = toy.logprobs(params, tokens)
        return logp + jnp.sqrt(0 * logp), entropy  # the square root's value is 0, its derivative is not a number

    # Its state has weakly typed leaves and a schedule: any optax transformation must pass through.
    adam = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1)
    state = TrainState.create(toy.params()[0], adam)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, metrics = make_sft_step(logprobs, adam)(state, sft_batch())
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert metrics["sft/skipped_updates"] == 1
    assert np.isfinite(metrics["sft/loss"])
    assert state.step == 1
    state, metrics = make_sft_step(toy.logprobs, adam)(state, sft_batch())
    assert metrics["sft/skipped_updates"] == 0
    assert np.any(state.params["logits"] != before[0]["logits"])


def test_a_text_without_a_token_to_learn_is_no_update_and_another_shape_is_named(toy):
    batch, optimizer = sft_batch(), optax.adamw(1e-2, weight_decay=0.1)
    only_first = SFTBatch(batch.tokens, jnp.zeros((ROWS, WIDTH), bool).at[:, 0].set(True))
    state, metrics = make_sft_step(toy.logprobs, optimizer)(TrainState.create(toy.params()[0], optimizer), only_first)
    np.testing.assert_array_equal(state.params["logits"], toy.params()[0]["logits"])
    assert metrics["sft/skipped_updates"] == 1

    def short(params, tokens):
        return tuple(x[:, 1:] for x in toy.logprobs(params, tokens))

    with pytest.raises(ValueError, match=r"logprob_fn returned an array of shape \(8, 6\)"):
        make_sft_step(short, OPTIMIZER)(TrainState.create(toy.params()[0], OPTIMIZER), batch)
    with pytest.raises(ValueError, match=r"logprob_fn returned an array of shape \(16, 8\)"):
        make_dpo_step(short, OPTIMIZER, DPOConfig())(TrainState.create(toy.params()[0], OPTIMIZER), pair_batch())
