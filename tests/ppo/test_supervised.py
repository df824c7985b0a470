"""SFT, preference learning and DPO against independent NumPy computations, and their invariants."""

from dataclasses import replace

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
terms_of, losses = (jax.jit(function, static_argnames="config") for function in (pair_terms, dpo_loss))


def pair_batch():
    """Ragged pairs; a prompt of no token, an empty response and one of a single token are among them."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 4, PAIRS)
    lengths = np.minimum(prompts + rng.integers(1, TIME - 2, (2, PAIRS)), TIME)
    prompts[0] = 0
    lengths[:, 1] = prompts[1], prompts[1] + 1
    chosen, rejected = rng.integers(0, 5, (2, PAIRS, TIME))
    ref = rng.normal(-8, 2, (2, PAIRS))
    return PairBatch(
        *(jnp.asarray(x, jnp.int32) for x in (chosen, lengths[0], rejected, lengths[1], prompts)),
        *(jnp.asarray(x, jnp.float32) for x in ref),
    )


@pytest.mark.usefixtures("strict_dtypes")
def test_nothing_counts_but_responses(toy):
    """Wider paddings, and log-probs that are not numbers outside of responses. A golden has the gradient."""
    config, batch, params = DPOConfig(loss="ipo", beta=0.2), pair_batch(), toy.params()[0]

    def refilled(tokens, lengths):
        wide = np.pad(tokens, ((0, 0), (0, 4)))
        return jnp.asarray(np.where(np.arange(wide.shape[1])[None, :] < lengths[:, None], wide, 3))

    chosen, rejected = refilled(batch.chosen, batch.chosen_lengths), refilled(batch.rejected, batch.rejected_lengths)
    wide = replace(batch, chosen=chosen, rejected=rejected)
    logprobs = toy.logprobs(params, wide.tokens)[0]
    terms = terms_of(jnp.where(wide.response_mask, logprobs, jnp.nan), wide, config=config)

    ends = np.stack([batch.chosen_lengths, batch.rejected_lengths], 1)
    starts = np.maximum(np.asarray(batch.prompt_lengths), 1)
    rows = np.asarray(logprobs, np.float64).reshape(PAIRS, 2, -1)
    sums = np.array(
        [
            [row[start:end].sum() for row, end in zip(*pair, strict=True)]
            for *pair, start in zip(rows, ends, starts, strict=True)
        ]
    )
    ratios = sums - np.stack([np.asarray(batch.ref_chosen), np.asarray(batch.ref_rejected)], 1)
    margin = np.subtract(*(ratios / np.maximum(ends - starts[:, None], 1)).T)
    rewards = config.beta * ratios
    expected = {
        "dpo/loss": (margin - 1 / (2 * config.beta)) ** 2,
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/accuracies": rewards[:, 0] > rewards[:, 1],
        "rewards/margins": rewards[:, 0] - rewards[:, 1],
        "logps/chosen": sums[:, 0],
        "logps/rejected": sums[:, 1],
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(terms[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_policy_that_is_the_reference_knows_nothing_yet(toy):
    """Every reward is exactly 0, the loss log 2, and each pair pushes its answers apart with half of beta."""
    batch, params = replace(pair_batch(), ref_chosen=None, ref_rejected=None), toy.params()[0]
    logprobs = toy.logprobs(params, batch.tokens)[0]
    terms = terms_of(logprobs, jax.jit(with_reference)(batch, logprobs), config=DPOConfig())
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


def sft_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, (ROWS, WIDTH)).astype(np.int32)
    mask = rng.random((ROWS, WIDTH)) < 0.5
    mask[:, 0] = True  # has no log-probability: must not count
    return SFTBatch(jnp.asarray(tokens), jnp.asarray(mask))


def preference_batch():
    rng = np.random.default_rng(0)
    chosen, rejected = rng.integers(0, 5, (2, ROWS, WIDTH)).astype(np.int32)
    lengths = rng.integers(1, WIDTH + 1, (2, ROWS)).astype(np.int32)
    return PreferenceBatch(*(jnp.asarray(x) for x in (chosen, lengths[0], rejected, lengths[1])))


def test_sft_is_gradient_descent_on_the_mean_negative_log_likelihood(toy):
    batch, (params, _) = sft_batch(), toy.params()
    logits = np.asarray(params["logits"], np.float64)
    step = make_sft_step(toy.logprobs, OPTIMIZER, micro_batches=4)
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


def test_preference_learning_is_gradient_descent_on_bradley_terry(toy):
    """Equal answers have equal scores, which count as wrong."""
    centre, batch, (_, params) = 0.1, preference_batch(), toy.params()
    batch = replace(
        batch,
        rejected=batch.rejected.at[0].set(batch.chosen[0]),
        rejected_lengths=batch.rejected_lengths.at[0].set(batch.chosen_lengths[0]),
    )
    table = np.asarray(params["values"], np.float64)
    step = make_preference_step(toy.scores, OPTIMIZER, micro_batches=4, centre=centre)
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


def test_the_mesh_does_not_matter(toy):
    """Parts of equal numbers of rows, and parts by length."""
    actor, mesh = toy.params()[0], make_mesh(2, 2, 2)
    ipo = DPOConfig(loss="ipo", beta=0.2, micro_batches=2)
    for step, batch in (
        (make_sft_step(toy.logprobs, OPTIMIZER, micro_batch_tokens=2 * WIDTH), sft_batch()),
        (make_dpo_step(toy.logprobs, OPTIMIZER, ipo), pair_batch()),
    ):
        params, batch = jax.device_get((actor, jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), batch)))
        expected = jax.device_get(step(TrainState.create(params, OPTIMIZER), batch))
        with jax.set_mesh(mesh):
            placed = jax.device_put(batch, NamedSharding(mesh, P(mesh.axis_names)))
            weights = jax.device_put(params, NamedSharding(mesh, P()))
            state, metrics = step(TrainState.create(weights, OPTIMIZER), placed)
        for leaf, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)


def test_a_text_without_a_token_to_learn_is_no_update_and_another_shape_is_named(toy):
    batch, optimizer = sft_batch(), optax.adamw(1e-2, weight_decay=0.1)
    only_first = SFTBatch(batch.tokens, jnp.zeros((ROWS, WIDTH), bool).at[:, 0].set(True))
    state, metrics = make_sft_step(toy.logprobs, optimizer)(TrainState.create(toy.params()[0], optimizer), only_first)
    np.testing.assert_array_equal(state.params["logits"], toy.params()[0]["logits"])
    assert metrics["sft/skipped_updates"] == 1

    def short(params, tokens):
        return tuple(x[:, 1:] for x in toy.logprobs(params, tokens))

    with pytest.raises(ValueError, match=r"logprob_fn returned shapes \(8, 6\), \(8, 6\) for"):
        make_sft_step(short, OPTIMIZER)(TrainState.create(toy.params()[0], OPTIMIZER), batch)
    with pytest.raises(ValueError, match=r"logprob_fn returned shapes \(16, 8\) for"):
        make_dpo_step(short, OPTIMIZER, DPOConfig())(TrainState.create(toy.params()[0], OPTIMIZER), pair_batch())
    pairs = pair_batch()
    for change, message in (
        ({"rejected": pairs.rejected[:, 1:]}, r"rejected has shape \(\d, 8\), but the rows ask for \(\d, 9\)"),
        ({"prompt_lengths": 2}, r"prompt_lengths has shape \(\), but the rows ask for \(8,\)"),
        ({"ref_chosen": jnp.zeros((8, 8))}, r"ref_chosen has shape \(8, 8\), but the rows ask for \(8,\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            state = TrainState.create(toy.params()[0], OPTIMIZER)
            make_dpo_step(toy.logprobs, OPTIMIZER, DPOConfig())(state, replace(pairs, **change))


def test_only_floats_are_trained(toy):
    weights = toy.params()[0]
    for leaf in (jnp.zeros(3, jnp.int32), jax.nn.relu, jax.random.key(0)):
        with pytest.raises(TypeError, match=r"params\['more'\] is no array of floats: .*nnx.Param.*eqx.partition"):
            TrainState.create({**weights, "more": leaf}, OPTIMIZER)
    TrainState.create(weights, optax.MultiSteps(optax.adam(1e-3), 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="optimizer is of class function, but must be a GradientTransformation"):
        TrainState.create(weights, optax.adam)  # pyright: ignore[reportArgumentType]
