"""Rows that `truncation: mask` leaves out: their tokens, numbers and scores change nothing else, in any algorithm.

From the raw scores of two rewards to updated weights and the next state of every statistic. The rows' scores and
lengths are still reported.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.algorithms.dynamic_sampling import DynamicSampler
from jrlhf.data.batches import Batch
from jrlhf.meshes import make_mesh
from jrlhf.ppo import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KLState,
    MultiplierState,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
    Rollout,
    RunningMoments,
    SafeRLHFConfig,
    ScoreConfig,
    TrainState,
    experience_metrics,
    make_experience,
    make_group_experience,
    make_return_experience,
    make_safe_experience,
    shape_scores,
    update_kl,
    update_multiplier,
)
from jrlhf.ppo.critic import critic_updates
from jrlhf.ppo.steps import actor_updates
from jrlhf.ppo.updates import run
from jrlhf.rewards.combine import combine
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock

ROWS, TIME, SAMPLES, VOCAB = 16, 8, 4, 5
OPTIMIZER = optax.sgd(0.1)
NORMALISED = ScoreConfig(normalise=True, clip=3.0, length_penalty=0.1)
SUMMED = replace(NORMALISED, combine="normalise_then_sum")
MASK: dict[str, Any] = {"truncation": "mask", "kl_coef": 0.1, "kl_target": 1.0}
GROUP: dict[str, Any] = MASK | {"samples": SAMPLES}
ALGORITHMS = {
    "ppo": (PPOConfig(**MASK, whiten_rewards=True, aggregation="seq-mean-token-mean"), NORMALISED),
    "grpo": (GRPOConfig(**GROUP, equal_groups="drop"), SUMMED),
    "dr_grpo": (DrGRPOConfig(**GROUP, aggregation_divisor=4), NORMALISED),
    "dapo": (DAPOConfig(**GROUP, aggregation="prompt-mean"), NORMALISED),
    "gspo": (GSPOConfig(**GROUP, importance="sequence"), SUMMED),
    "rloo": (RLOOConfig(**GROUP), NORMALISED),
    "reinforce_pp": (ReinforcePPConfig(**MASK, importance="token"), NORMALISED),
    "reinforce_pp_baseline": (ReinforcePPBaselineConfig(**GROUP), SUMMED),
    "remax": (ReMaxConfig(**MASK, whiten_advantages=True), NORMALISED),
    "safe_rlhf": (SafeRLHFConfig(**MASK), NORMALISED),
}
# What is reported of all rows: their scores as given, and what was done to them.
REPORTED = "critic/score/", "rewards/", "score/raw/", "score/clip_fraction", "score/beyond_moments", "cost"
QUICK = "ppo", "grpo"
OF_ROWS = "tokens", "logprobs", "scores"  # fields of an experience that are the rollout's or the reward's


def logprob_fn(params, tokens) -> Any:
    logp = jax.nn.log_softmax(params)[tokens]  # of the next token
    chosen = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)[:, :-1]
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


def learn(config: Any, shaping, rollout, given, moments):
    """(numbers of each row, numbers of all rows) of an iteration."""
    shape = partial(shape_scores, config=shaping, max_response=TIME)
    samples = SAMPLES if shaping.combine == "normalise_then_sum" else None
    of_rows = rollout.response_lengths, rollout.finished, moments
    weights, failures = {"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.0}
    parts = {name: given[name] for name in weights}
    options: Any = {"samples": samples, "counts": config.counts}
    combined = combine(shape, "reward", weights, failures, parts, None, *of_rows, **options)
    logprobs = given["old"], given["ref"]
    make: Any = {"config": config, "kl_coef": jnp.float32(0.1)}
    critic, multiplier = (), MultiplierState.create(SafeRLHFConfig())
    if isinstance(config, SafeRLHFConfig):
        multiplier = update_multiplier(multiplier, given["costs"], rollout.finished, config=config)
        streams = combined.shaped, given["costs"], *logprobs, given["values"], given["cost_values"]
        experience, cost = make_safe_experience(rollout, *streams, multiplier=multiplier.value, **make)
        critic = experience, cost
    elif isinstance(config, PPOConfig):
        experience = make_experience(rollout, combined.shaped, *logprobs, given["values"], **make)
        critic = (experience,)
    elif isinstance(config, GRPOConfig):
        experience = make_group_experience(rollout, combined.shaped, *logprobs, **make)
    else:
        baselines = given["costs"] if isinstance(config, ReMaxConfig) else None
        experience = make_return_experience(rollout, combined.shaped, *logprobs, baselines, **make)
    metrics = experience_metrics(experience, samples=SAMPLES)
    kl = update_kl(KLState(jnp.float32(0.1)), metrics["objective/kl"], ROWS, config=config)
    state = TrainState.create(given["logits"], OPTIMIZER)
    results = [run(actor_updates(logprob_fn, OPTIMIZER, config, None)(state, experience))]
    for own in critic:
        table = TrainState.create(given["table"], OPTIMIZER)
        begin = critic_updates(lambda params, tokens: params[jnp.roll(tokens, 1, axis=1)], OPTIMIZER, cast(Any, config))
        results.append(run(begin(table, own)))
    rows = {name: x for name, x in vars(experience).items() if name not in OF_ROWS and x is not None}
    whole = metrics | combined.learned | combined.shaping, combined.moments, multiplier, kl, results
    return rows | {"shaped": jnp.where(config.counts(rollout.finished), combined.shaped, 0)}, whole


def inputs(seed):
    draw = np.random.default_rng(seed)
    starts, counts = draw.integers(1, 3, ROWS), draw.integers(1, TIME - 2, ROWS)
    finished = draw.random(ROWS) < 0.6
    finished[:SAMPLES] = [True, True, False, False]  # a group of which a part counts
    numbers = draw.normal(size=(6, ROWS, TIME)).astype(np.float32)
    scores = draw.normal(size=(3, ROWS)).astype(np.float32)
    scores[:2, [0, 1]] = 0.5  # its scores that count are equal
    given = dict(zip(("old", "ref", "values", "cost_values"), numbers, strict=False))
    given |= dict(zip(("a", "b", "costs"), scores, strict=True))
    fixed = {"logits": numbers[4, :VOCAB, :VOCAB], "table": numbers[4, 0, :VOCAB]}
    tokens = draw.integers(0, VOCAB, (ROWS, TIME))
    own: tuple[Any, ...] = (*(x.astype(np.int32) for x in (tokens, starts, counts)), numbers[5], finished, np.int32(0))
    return Rollout(*own), given, fixed


def changed(rollout, given, seed):
    """The same with other content of the rows that are cut off; some of it extreme."""
    draw, cut = np.random.default_rng(seed), ~np.asarray(rollout.finished)

    def other(x):
        drawn = draw.integers(0, VOCAB, x.shape) if x.dtype == np.int32 else draw.normal(100, 50, x.shape)
        return np.where(cut.reshape(-1, *[1] * (x.ndim - 1)), drawn, x).astype(x.dtype)

    return replace(rollout, tokens=other(rollout.tokens), logprobs=other(rollout.logprobs)), {
        name: other(x) for name, x in given.items()
    }


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in ALGORITHMS]
)
def test_nothing_else_depends_on_rows_that_are_left_out(name):
    config, shaping = ALGORITHMS[name]
    run = jax.jit(partial(learn, config, shaping))
    for seed in range(3):
        rollout, given, fixed = inputs(seed)
        moments = RunningMoments.create().add(jnp.array([0.0, 1.0, 3.0]))
        (rows, whole), (other_rows, other_whole) = (
            jax.device_get(run(own, data | fixed, moments))
            for own, data in ((rollout, given), changed(rollout, given, seed + 10))
        )
        metrics, other_metrics = (
            {key: x for key, x in every[0].items() if not key.startswith(REPORTED)} for every in (whole, other_whole)
        )
        assert len(metrics) < len(whole[0]) and np.any(rows["advantages"])
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, (rows, metrics, *whole[1:]), (other_rows, other_metrics, *other_whole[1:]))


def test_scores_are_normalised_by_the_rows_that_count():
    """20 of 32 rows are cut off, with the score 100. The others' mean is 0, and their variance 12/11."""
    finished = np.arange(32) < 12
    scores = jnp.asarray(np.where(finished, np.where(np.arange(32) % 2 == 0, 1.0, -1.0), 100.0), jnp.float32)
    shape = partial(shape_scores, config=ScoreConfig(normalise=True), max_response=4)
    given = jnp.full(32, 2), jnp.asarray(finished), RunningMoments.create()
    shaped, moments, _ = shape(scores, *given, counted=PPOConfig(truncation="mask").counts(jnp.asarray(finished)))
    np.testing.assert_allclose(shaped[:12], np.tile([1, -1], 6) / np.sqrt(12 / 11), rtol=1e-5)
    assert moments.count == 12
    assert shape(scores, *given, counted=PPOConfig().counts(jnp.asarray(finished)))[1].count == 32


def test_a_group_that_differs_only_in_rows_that_are_left_out_is_dull():
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    finished = jnp.array([True, True, False, False, True, True, True, False])
    tokens = jnp.zeros((8, 2), jnp.int32)
    rollout = Rollout(tokens, tokens[:, 0], tokens[:, 0], tokens.astype(jnp.float32), finished, jnp.int32(0))
    scores = jnp.array([1.0, 1, 5, 0, 1, 0, 1, 7])
    prompts = Batch(cast(Any, ()), cast(Any, [""] * 8), [""] * 8, 0)
    for algorithm, expected in ((DAPOConfig(samples=4, truncation="mask"), 0.5), (DAPOConfig(samples=4), 1.0)):
        reward = SimpleNamespace(raw={0: scores}, parts={0: {}})
        with jax.set_mesh(mesh):
            sampler = DynamicSampler(RolePlacement.of(mesh), algorithm, Clock(), cast(Any, reward))
            sampler.start(0, lambda number: prompts)
            sampler.draw()
            sampler.keep(rollout, scores, prompts)
        assert sampler.metrics()["dapo/informative"] == expected
