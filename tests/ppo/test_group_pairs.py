"""Pairs of a rollout, and losses of pairs: against NumPy, with micro-batches, and on Explicit axes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.ppo import (
    DPOConfig,
    Experience,
    GRPOConfig,
    PairLogprobs,
    Rollout,
    TrainState,
    make_dpo_step,
    make_group_experience,
    make_pair_step,
    pairs_of_group,
)
from jrlhf.ppo.supervised import checked_pair_loss

GROUPS, SAMPLES, TIME, VOCAB = 8, 4, 7, 11
ROWS = GROUPS * SAMPLES
CONFIG = GRPOConfig(samples=SAMPLES, kl_coef=0.1, kl_in="loss")
RECORDER = optax.GradientTransformation(  # its state: the gradients
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)


def experience() -> Experience:
    """Groups with ties, one of equal scores, and one of which a single response has tokens and a finite score."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(1, 3, GROUPS), SAMPLES)
    responses = rng.integers(1, TIME - 2, ROWS)
    scores = rng.integers(0, 3, ROWS).astype(np.float32)
    scores[4:8] = 1.0
    scores[8:11] = 0, np.nan, np.inf
    responses[8] = 0
    arrays = rng.integers(0, VOCAB, (ROWS, TIME)), prompts, responses
    old, ref = rng.normal(-2, 0.5, (2, ROWS, TIME)).astype(np.float32)
    tokens, prompt_lengths, lengths = (jnp.asarray(x, jnp.int32) for x in arrays)
    finished, version = jnp.ones(ROWS, jnp.bool_), jnp.zeros((), jnp.int32)
    rollout = Rollout(tokens, prompt_lengths, lengths, jnp.asarray(old), finished, version)
    given = jnp.asarray(scores), jnp.asarray(old), jnp.asarray(ref)
    return make_group_experience(rollout, *given, config=CONFIG, kl_coef=0.1)


def by_hand(e: Experience) -> list[tuple[int, int] | None]:
    """The rows of the best and the worst response of each group that has a pair."""
    pairs, scores, counted = [], np.asarray(e.scores), np.any(np.asarray(e.response_mask), axis=1)
    for first in range(0, ROWS, SAMPLES):
        rows = [row for row in range(first, first + SAMPLES) if counted[row]]
        best, worst = (choose(rows, key=lambda row: scores[row]) for choose in (max, min))
        pairs.append((best, worst) if scores[best] > scores[worst] else None)
    return pairs


def logprobs(params: Any, tokens: Any) -> Any:
    scores = jax.nn.log_softmax(params[jnp.arange(TIME)[None, :], tokens[:, :1]])
    return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0], jnp.zeros(tokens.shape)


def gradient_of(step: Any, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
    params = jnp.asarray(np.random.default_rng(1).normal(size=(TIME, VOCAB, VOCAB)), jnp.float32)
    state, metrics = step(TrainState.create(params, RECORDER), batch)
    return np.asarray(state.opt_state), jax.device_get(metrics)


@pytest.mark.parametrize("axes", [None, AxisType.Explicit])
def test_a_pair_is_the_best_and_the_worst_response_to_a_prompt(axes: Any):
    e = experience()
    if axes is None:
        pairs = jax.jit(pairs_of_group, static_argnums=1)(e, SAMPLES)
    else:
        mesh = jax.make_mesh((8,), ("rows",), axis_types=(axes,))
        divided = NamedSharding(mesh, P("rows"))
        e = jax.tree.map(lambda x: jax.device_put(x, divided if x.ndim else NamedSharding(mesh, P())), e)
        with jax.set_mesh(mesh):
            pairs = jax.jit(pairs_of_group, static_argnums=1)(e, SAMPLES)
    e, pairs = jax.device_get((e, pairs))
    expected = by_hand(e)
    assert sum(pair is None for pair in expected) == 2
    sums = np.where(e.response_mask, e.ref_logprobs, 0).sum(axis=1)
    for group, pair in enumerate(expected):
        lengths = pairs.chosen_lengths[group], pairs.rejected_lengths[group]
        if pair is None:
            assert lengths == (0, 0)
            continue
        best, worst = pair
        assert lengths == (e.lengths[best], e.lengths[worst])
        assert pairs.prompt_lengths[group] == e.prompt_lengths[best]
        np.testing.assert_array_equal(pairs.chosen[group], e.tokens[best])
        np.testing.assert_array_equal(pairs.rejected[group], e.tokens[worst])
        np.testing.assert_allclose([pairs.ref_chosen[group], pairs.ref_rejected[group]], sums[[best, worst]], rtol=1e-6)


@pytest.mark.parametrize("parts", [{}, {"micro_batches": 4}, {"micro_batch_tokens": 24}])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_groups_without_a_pair_count_nowhere(loss: Any, parts: dict[str, Any]):
    pairs = pairs_of_group(experience(), SAMPLES)
    exist = np.flatnonzero(pairs.chosen_lengths)
    alone = jax.tree.map(lambda x: x[exist], pairs)
    config = DPOConfig(loss=loss, beta=0.3)
    gradient, metrics = gradient_of(make_pair_step(logprobs, RECORDER, config, **parts), pairs)
    expected, expected_metrics = gradient_of(make_dpo_step(logprobs, RECORDER, config), alone)
    assert len(exist) == 6 and np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)
    for name, value in expected_metrics.items():
        own = name.replace("dpo/skip", "actor/skip").replace("dpo/nonf", "actor/nonf").replace("dpo/grad", "actor/grad")
        np.testing.assert_allclose(metrics[own], value, rtol=1e-5, err_msg=name)


def test_a_loss_of_ones_own_has_the_gradient_by_hand():
    """SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6), which needs no reference."""

    def simpo(pairs: PairLogprobs) -> Any:
        margin = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
        return jax.nn.softplus(0.5 - 2.0 * margin)

    e = replace(experience(), ref_logprobs=None)
    gradient, metrics = gradient_of(
        make_pair_step(logprobs, RECORDER, simpo, micro_batches=2), pairs_of_group(e, SAMPLES)
    )
    params = np.random.default_rng(1).normal(size=(TIME, VOCAB, VOCAB)).astype(np.float32).astype(np.float64)
    table = params - np.log(np.exp(params).sum(-1, keepdims=True))
    expected, losses, pairs = np.zeros_like(params), [], [pair for pair in by_hand(e) if pair is not None]
    for pair in pairs:
        means, derivatives = [], []
        for row in pair:
            derivative, mean = np.zeros_like(params), 0.0
            places = np.flatnonzero(e.response_mask[row])
            for t in places:
                own = table[t, e.tokens[row, 0]]
                mean += own[e.tokens[row, t]] / len(places)
                derivative[t, e.tokens[row, 0]] -= np.exp(own) / len(places)
                derivative[t, e.tokens[row, 0], e.tokens[row, t]] += 1 / len(places)
            means.append(mean)
            derivatives.append(derivative)
        x = 0.5 - 2.0 * (means[0] - means[1])
        losses.append(np.log1p(np.exp(x)))
        expected += -2.0 / (1 + np.exp(-x)) * (derivatives[0] - derivatives[1]) / len(pairs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert metrics["actor/loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_what_is_no_loss_of_pairs_is_refused():
    pairs = pairs_of_group(replace(experience(), ref_logprobs=None), SAMPLES)
    with pytest.raises(ValueError, match="put them in by with_reference"):
        gradient_of(make_pair_step(logprobs, RECORDER, DPOConfig()), pairs)
    zeros = jnp.zeros(2)
    few = PairLogprobs(zeros, zeros, None, None, zeros, zeros)
    with pytest.raises(
        ValueError, match=r"the loss returned shape \(\), but must return one number for each pair, \(2,\)"
    ):
        checked_pair_loss(lambda pairs: pairs.chosen.sum(), few)
    with pytest.raises(TypeError, match="the loss returned a float"):
        checked_pair_loss(lambda pairs: 1.0, few)  # type: ignore[arg-type, return-value]
