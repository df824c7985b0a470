import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import PreferenceBatch, SFTBatch, TrainState, make_preference_step, make_sft_step

ROWS, TIME, RATE = 8, 7, 0.5
OPTIMIZER = optax.sgd(RATE)


def sft_batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 5, (ROWS, TIME)).astype(np.int32)
    mask = rng.random((ROWS, TIME)) < 0.5
    mask[:, 0] = True  # has no log-probability: must not count
    return SFTBatch(jnp.asarray(tokens), jnp.asarray(mask))


def preference_batch(seed=0):
    rng = np.random.default_rng(seed)
    chosen, rejected = rng.integers(0, 5, (2, ROWS, TIME)).astype(np.int32)
    lengths = rng.integers(1, TIME + 1, (2, ROWS)).astype(np.int32)
    return PreferenceBatch(*(jnp.asarray(x) for x in (chosen, lengths[0], rejected, lengths[1])))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_sft_is_gradient_descent_on_the_mean_negative_log_likelihood(toy, micro_batches):
    batch, (params, _) = sft_batch(), toy.params()
    logits = np.asarray(params["logits"], np.float64)
    step = make_sft_step(toy.logprobs, OPTIMIZER, micro_batches=micro_batches)
    state, metrics = step(TrainState.create(params, OPTIMIZER), batch)

    positions = [(row, t) for row in range(ROWS) for t in range(1, TIME) if batch.loss_mask[row, t]]
    gradient, loss, entropy = np.zeros_like(logits), 0.0, 0.0
    for row, t in positions:
        previous, token = int(batch.tokens[row, t - 1]), int(batch.tokens[row, t])
        p = np.exp(logits[previous]) / np.exp(logits[previous]).sum()
        loss -= np.log(p[token]) / len(positions)
        entropy -= (p * np.log(p)).sum() / len(positions)
        gradient[previous] -= (np.eye(5)[token] - p) / len(positions)
    np.testing.assert_allclose(state.params["logits"], logits - RATE * gradient, rtol=1e-5, atol=1e-6)
    expected = {"loss": loss, "entropy": entropy, "grad_norm": np.sqrt((gradient**2).sum()), "skipped_updates": 0}
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
    }
    assert metrics.keys() == {f"reward_model/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"reward_model/{name}"], value, rtol=1e-5, atol=1e-6, err_msg=name)


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
    only_first = SFTBatch(batch.tokens, jnp.zeros((ROWS, TIME), bool).at[:, 0].set(True))
    state, metrics = make_sft_step(toy.logprobs, optimizer)(TrainState.create(toy.params()[0], optimizer), only_first)
    np.testing.assert_array_equal(state.params["logits"], toy.params()[0]["logits"])
    assert metrics["sft/skipped_updates"] == 1

    def short(params, tokens):
        return tuple(x[:, 1:] for x in toy.logprobs(params, tokens))

    with pytest.raises(ValueError, match=r"logprob_fn returned an array of shape \(8, 6\)"):
        make_sft_step(short, OPTIMIZER)(TrainState.create(toy.params()[0], OPTIMIZER), batch)
