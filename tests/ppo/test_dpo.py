"""DPO against an independent NumPy computation, and against what must hold of it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import DPOConfig, PairBatch, TrainState, dpo_loss, make_dpo_step, pair_terms, with_reference

PAIRS, TIME, RATE = 8, 9, 0.5
OPTIMIZER = optax.sgd(RATE)
CONFIGS = [
    DPOConfig(beta=0.3),
    DPOConfig(beta=0.7, label_smoothing=0.1),
    DPOConfig(loss="ipo", beta=0.2),
]


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


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.label_smoothing:g}")
def test_a_step_is_gradient_descent_on_the_mean_loss_of_the_pairs(toy, config, micro_batches):
    batch, params = pair_batch(), toy.params()[0]
    logits = np.asarray(params["logits"], np.float64)
    gradient, expected = by_hand(logits, batch, config)
    step = make_dpo_step(toy.logprobs, OPTIMIZER, replace(config, micro_batches=micro_batches))
    state, metrics = step(TrainState.create(params, OPTIMIZER), batch)
    np.testing.assert_allclose(state.params["logits"], logits - RATE * gradient, rtol=1e-5, atol=1e-5)
    expected |= {"dpo/grad_norm": np.sqrt((gradient**2).sum()), "dpo/skipped_updates": 0}
    assert metrics.keys() == expected.keys() and params["logits"].is_deleted() and state.step == 1
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("strict_dtypes")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.label_smoothing:g}")
def test_nothing_counts_but_responses(toy, config):
    """Other paddings, wider ones, and log-probs that are not numbers outside of responses."""
    batch, params = pair_batch(), toy.params()[0]
    plain = pair_terms(toy.logprobs(params, batch.tokens)[0], batch, config=config)

    def refilled(tokens, lengths):
        wide = jnp.pad(tokens, ((0, 0), (0, 4)))
        return jnp.where(jnp.arange(wide.shape[1])[None, :] < lengths[:, None], wide, 3)

    chosen, rejected = refilled(batch.chosen, batch.chosen_lengths), refilled(batch.rejected, batch.rejected_lengths)
    wide = replace(batch, chosen=chosen, rejected=rejected)
    logprobs = jnp.where(wide.response_mask, toy.logprobs(params, wide.tokens)[0], jnp.nan)
    other = pair_terms(logprobs, wide, config=config)
    for name, value in plain.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_policy_that_is_the_reference_knows_nothing_yet(toy):
    """Every reward is exactly 0, the loss log 2, and each pair pushes its answers apart with half of beta."""
    batch, params = replace(pair_batch(), ref_chosen=None, ref_rejected=None), toy.params()[0]
    logprobs = toy.logprobs(params, batch.tokens)[0]
    terms = pair_terms(logprobs, with_reference(batch, logprobs), config=DPOConfig())
    np.testing.assert_allclose(terms["dpo/loss"], np.log(2), rtol=1e-6)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        np.testing.assert_array_equal(terms[f"rewards/{name}"], 0)
    with pytest.raises(ValueError, match="with_reference"):
        pair_terms(logprobs, batch, config=DPOConfig())


def test_the_loss_stays_finite_and_its_gradient_bounded_however_far_apart_the_answers_are():
    far = jnp.array([-1e4, 1e4, 0.0])
    zero = jnp.zeros(3)
    for smoothing, expected, slopes in ((0.0, [1e3, 0.0, np.log(2)], [-0.1, 0.0, -0.05]), (0.2, None, None)):
        config = DPOConfig(label_smoothing=smoothing)
        loss = dpo_loss(far, zero, zero, zero, config=config)
        slope = jax.grad(lambda x, config=config: dpo_loss(x, zero, zero, zero, config=config).sum())(far)
        expected = [800.0, 200.0, np.log(2)] if expected is None else expected
        slopes = [-0.08, 0.02, -0.03] if slopes is None else slopes
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(slope, slopes, rtol=1e-6, atol=1e-9)


def test_a_model_that_returns_another_shape_is_named(toy):
    def short(params, tokens):
        return tuple(x[:, 1:] for x in toy.logprobs(params, tokens))

    batch, step = pair_batch(), make_dpo_step(short, OPTIMIZER, DPOConfig())
    with pytest.raises(ValueError, match="logprob_fn returned an array of shape"):
        step(
            TrainState.create(toy.params()[0], OPTIMIZER),
            replace(batch, ref_chosen=jnp.zeros(PAIRS), ref_rejected=jnp.zeros(PAIRS)),
        )
