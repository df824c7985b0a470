"""Losses of tokens that replace the policy's: gradients against NumPy in float64, whatever the division of the rows."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import Experience, GRPOConfig, Rollout, SFTBatch, TrainState, make_actor_step, make_sft_step
from jrlhf.ppo.advantages import best_of_group
from jrlhf.ppo.experience import bare_experience, make_best_experience
from jrlhf.ppo.token_losses import LossRows, LossTokens, forward_kl, imitation, of_rows, reverse_kl
from jrlhf.ppo.types import Targets

ROWS, TIME, VOCAB, K = 8, 7, 11, 3
CONFIG = GRPOConfig(samples=4, kl_coef=0.0, epochs=1, aggregation="token-mean")
RECORDER = optax.GradientTransformation(  # its state: the gradients
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)
rng = np.random.default_rng(0)


def rollout() -> Rollout:
    prompts = np.array([1, 2, 3, 1, 2, 2, 1, 4], np.int32)
    responses = np.array([6, 3, 4, 0, 1, 5, 2, 3], np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, TIME)).astype(np.int32)
    return Rollout(tokens, prompts, responses, np.full((ROWS, TIME), -2.0, np.float32), responses > 0, np.int32(0))  # type: ignore


def targets(*, outside: int = 0) -> Targets:
    """K different ids for each place, with log-probabilities of less than all mass; `outside` ids are no tokens."""
    ids = np.argsort(rng.random((ROWS, TIME, VOCAB)), axis=-1)[..., :K].astype(np.int32)
    ids[..., K - outside :] += VOCAB
    logits = rng.normal(size=(ROWS, TIME, VOCAB))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return Targets(ids, logprobs[..., :K].astype(np.float32))  # type: ignore[arg-type]


def table() -> dict[str, np.ndarray]:
    """A model with logits of its own for each place; the first token tells the row."""
    return {"logits": rng.normal(size=(ROWS, TIME, VOCAB)).astype(np.float32)}


def sums(params: Any, tokens: Any, data: Any, terms: Any, *, ids: Any = None) -> Any:
    logits = params["logits"][tokens[:, 0]]
    scores = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(scores, tokens[..., None], axis=-1)
    if ids is not None:
        given = jnp.take_along_axis(scores, jnp.minimum(ids, VOCAB - 1), axis=-1)
        own = jnp.concatenate([own, jnp.where(ids < VOCAB, given, -jnp.inf)], axis=-1)
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    return jax.tree.map(jnp.sum, terms(own if ids is not None else own[..., 0], entropy, data))


def numbered(rollout: Rollout) -> Rollout:
    tokens = np.array(rollout.tokens)
    tokens[:, 0] = np.arange(ROWS)
    return replace(rollout, tokens=tokens)  # type: ignore[arg-type]


def gradient_of(loss: Any, experience: Experience, params: Any, **parts: int) -> tuple[np.ndarray, dict[str, Any]]:
    step = make_actor_step(None, RECORDER, replace(CONFIG, **parts), sums_fn=sums, loss=loss)  # type: ignore[arg-type]
    state, metrics = step(TrainState.create(jax.tree.map(jnp.array, params), RECORDER), experience)
    return np.asarray(state.opt_state["logits"]), jax.device_get(metrics)


def mask_of(rollout: Rollout) -> np.ndarray:
    place = np.arange(TIME)[None, :] - np.asarray(rollout.prompt_lengths)[:, None]
    return (place >= 0) & (place < np.asarray(rollout.response_lengths)[:, None])


def expected(name: str, params: Any, given: Targets, mask: np.ndarray, count: int = K) -> tuple[np.ndarray, float]:
    """The gradient by the logits and the loss: means over tokens, by hand in float64."""
    logits = params["logits"].astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    gradient, total = np.zeros_like(logits), 0.0
    for row, t in zip(*np.nonzero(mask), strict=True):
        ids, teacher = (
            np.asarray(given.ids)[row, t, :count],
            np.asarray(given.logprobs)[row, t, :count].astype(np.float64),
        )
        student = np.log(p[row, t, ids])
        if name == "forward":
            total += np.sum(np.exp(teacher) * (teacher - student) - np.exp(teacher) + np.exp(student))
            by_logprob = np.exp(student) - np.exp(teacher)
        else:
            total += np.sum(np.exp(student) * (student - teacher) - np.exp(student) + np.exp(teacher))
            by_logprob = np.exp(student) * (student - teacher)
        for token, slope in zip(ids, by_logprob, strict=True):
            gradient[row, t] -= slope * p[row, t]
            gradient[row, t, token] += slope
    return gradient / mask.sum(), total / mask.sum()


@pytest.mark.parametrize("parts", [{}, {"micro_batches": 4}, {"micro_batch_tokens": 14}], ids=str)
@pytest.mark.parametrize(("name", "loss"), [("forward", forward_kl), ("reverse", reverse_kl)])
def test_divergences_from_a_teacher_have_the_gradient_by_hand(name: str, loss: Any, parts: dict[str, int]):
    params, data, given = table(), numbered(rollout()), targets(outside=1)
    experience = replace(bare_experience(data, config=CONFIG), targets=given)
    gradient, metrics = gradient_of(loss, experience, params, **parts)
    wanted, total = expected(name, params, given, mask_of(data), count=K - 1)  # the last ids are no tokens
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)
    assert metrics["actor/loss"] == pytest.approx(total, rel=1e-5)
    assert not {"actor/pg_loss", "actor/pg_clipfrac"} & metrics.keys() and metrics["actor/ratio"] > 0


@of_rows
def odds(rows: LossRows) -> Any:
    """-A log sigma(log pi - log pi_old), which is not a sum over tokens."""
    assert rows.advantages is not None
    return -rows.advantages * jax.nn.log_sigmoid((rows.logprobs - rows.old_logprobs) / jnp.maximum(rows.lengths, 1))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("parts", [{}, {"micro_batches": 4}, {"micro_batch_tokens": 14}], ids=str)
def test_a_loss_of_responses_has_the_gradient_by_hand(parts: dict[str, int], aggregation: Any):
    params, data = table(), numbered(rollout())
    mask, advantages = mask_of(data), rng.normal(size=ROWS)
    experience = bare_experience(data, config=CONFIG)
    experience = replace(experience, advantages=jnp.asarray(np.where(mask, advantages[:, None], 0), jnp.float32))

    def logprobs(params: Any, tokens: Any) -> Any:
        scores = jax.nn.log_softmax(params["logits"][tokens[:, 0]])
        return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0], jnp.zeros(tokens.shape)

    config = replace(CONFIG, aggregation=aggregation, **parts)
    step = make_actor_step(logprobs, RECORDER, config, sums_fn=sums, loss=odds)
    state, metrics = step(TrainState.create(jax.tree.map(jnp.array, params), RECORDER), experience)

    logits, tokens = params["logits"].astype(np.float64), np.asarray(data.tokens)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    gradient, total, lengths = np.zeros_like(logits), 0.0, mask.sum(1)
    for row in np.flatnonzero(lengths):
        places = np.flatnonzero(mask[row])
        gap = np.mean([np.log(p[row, t, tokens[row, t]]) + 2.0 for t in places])
        share = lengths[row] / lengths.sum() if aggregation == "token-mean" else 1 / np.count_nonzero(lengths)
        total -= share * advantages[row] * -np.log1p(np.exp(-gap))
        slope = -share * advantages[row] / (1 + np.exp(gap)) / lengths[row]
        for t in places:
            gradient[row, t] -= slope * p[row, t]
            gradient[row, t, tokens[row, t]] += slope
    np.testing.assert_allclose(state.opt_state["logits"], gradient, rtol=1e-5, atol=1e-7)
    assert float(metrics["actor/loss"]) == pytest.approx(total, rel=1e-5)


def test_over_the_whole_vocabulary_the_divergences_are_those_of_kullback_and_leibler():
    logits = rng.normal(size=(2, 50, VOCAB))
    student, teacher = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    none = jnp.zeros(50)
    tokens = LossTokens(none, none, none, None, none, *(jnp.asarray(x, jnp.float32) for x in (student, teacher)))
    forward, reverse = (np.exp(p) * (p - q) for p, q in ((teacher, student), (student, teacher)))
    np.testing.assert_allclose(forward_kl(tokens), forward.sum(-1), atol=1e-6)
    np.testing.assert_allclose(reverse_kl(tokens), reverse.sum(-1), atol=1e-6)
    top = tokens._replace(**{name: getattr(tokens, name)[:, :2] for name in ("student_logprobs", "target_logprobs")})
    assert (forward_kl(top) >= -1e-7).all() and (reverse_kl(top) >= -1e-7).all()


def test_imitation_is_supervised_learning_on_what_was_drawn():
    params, data = table(), numbered(rollout())

    def logprobs(params: Any, tokens: Any) -> Any:
        scores = jax.nn.log_softmax(params["logits"][tokens[:, 0]])
        return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0], -jnp.sum(jnp.exp(scores) * scores, -1)

    gradient, metrics = gradient_of(imitation, bare_experience(data, config=CONFIG), params)
    step = make_sft_step(logprobs, RECORDER)
    text = SFTBatch(data.tokens, jnp.asarray(mask_of(data)))
    state, supervised = step(TrainState.create(jax.tree.map(jnp.array, params), RECORDER), text)
    np.testing.assert_allclose(gradient, state.opt_state["logits"], atol=1e-7)
    assert np.abs(gradient).max() > 0.01
    assert float(metrics["actor/loss"]) == pytest.approx(
        float(next(x for name, x in supervised.items() if name.endswith("/loss"))), rel=1e-5
    )


def test_of_each_group_the_first_best_response_is_learned_from():
    scores = np.array([1, 3, 3, 2, np.nan, -1, -np.inf, -1, np.nan, np.nan, np.inf, np.nan], np.float32)
    chosen = best_of_group(jnp.asarray(scores), 4)
    np.testing.assert_array_equal(np.flatnonzero(chosen), [1, 5])
    masked = best_of_group(jnp.asarray(scores[:4]), 4, jnp.array([True, False, False, True]))
    np.testing.assert_array_equal(np.flatnonzero(masked), [3])
    data = rollout()
    best = make_best_experience(data, jnp.array([0.0, 1, 2, 3, 1, 0, 0, 0]), config=CONFIG)
    np.testing.assert_array_equal(best.response_mask.any(axis=1), [0, 0, 1, 0, 1, 0, 0, 0])  # row 3 has no response
    np.testing.assert_array_equal(best.response_mask, mask_of(data) & best.response_mask.any(axis=1)[:, None])
    assert best.advantages is None


def test_what_cannot_be_a_loss_is_refused():
    params, data = table(), numbered(rollout())
    bare = bare_experience(data, config=CONFIG)
    with pytest.raises(ValueError, match="forward_kl compares with targets, and there are none"):
        gradient_of(forward_kl, bare, params)

    def summed(tokens: LossTokens) -> Any:
        return jnp.sum(tokens.logprobs)

    with pytest.raises(ValueError, match=r"summed returned shape \(\), but must return one number for each token"):
        gradient_of(summed, bare, params)
    with pytest.raises(TypeError, match="<lambda> returned a float"):
        gradient_of(lambda tokens: 0.0, bare, params)
    with pytest.raises(ValueError, match="kl_coef=0.1 needs log-probs of a reference"):
        bare_experience(data, config=replace(CONFIG, kl_coef=0.1))
    without = make_actor_step(None, RECORDER, CONFIG, loss=forward_kl)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="targets need a sums_fn"):
        without(TrainState.create(params, RECORDER), replace(bare, targets=targets()))
