"""Our functions against verl and TRL on random inputs, values and gradients; and where they differ by design, how.

pytest benchmarks/oracle          where both are installed (.ci/run makes such an environment)
"""

import zlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.oracle import cases, ours, peers
from benchmarks.oracle.cases import Shape
from benchmarks.oracle.checks import CHECKS, GAPS, RAGGED, Check, by_row
from benchmarks.oracle.goldens import read
from jrlhf.ppo import (
    DPOConfig,
    GRPOConfig,
    PolicyConfig,
    PPOConfig,
    RLOOConfig,
    Rollout,
    experience_metrics,
    group_advantages,
    kl_estimate,
    make_experience,
    masked_whiten,
    sequence_kl,
)

SEEDS = 12


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_we_agree(check: Check):
    random = np.random.default_rng(zlib.crc32(check.name.encode()))
    for shape in check.shapes:
        if shape.rows > 2:
            shape = replace(shape, rows=4 * int(random.integers(1, 5)), time=int(random.integers(4, 14)))
        for seed in random.integers(0, 2**31, SEEDS):
            arrays = check.draw(int(seed), shape)
            check.compare(check.ours(arrays), check.theirs(peers, arrays))


def test_the_goldens_are_what_the_peers_say():
    checks = {check.name: check for check in CHECKS}
    goldens = list(read())
    assert {name for name, _, _ in goldens} == checks.keys()
    for name, arrays, result in goldens:
        theirs = checks[name].theirs(peers, arrays)
        assert theirs.keys() == result.keys()
        for key, value in result.items():
            np.testing.assert_allclose(value, theirs[key], rtol=1e-6, atol=1e-12, err_msg=f"{name}: {key}")


def scored(scores: list[float], time: int = 4) -> cases.Arrays:
    return {**cases.batch(0, Shape(rows=len(scores), time=time, kind="single")), "scores": np.array(scores, np.float32)}


def close(got: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(got, expected, rtol, atol)


# Where we differ from a peer, or the peers from one another. The docstrings of jrlhf.ppo say the same.


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_is_its_own_score_in_verl_and_nothing_here(estimator: str):
    arrays = scored([0.3, -1.0, 2.0, 0.5])
    mask, options = arrays["mask"], dict[str, Any](samples=1)
    theirs = peers.verl_group(arrays, estimator, **options)["advantages"][mask]
    raw = arrays["scores"].astype(np.float64)
    close(theirs, (raw - raw.mean()) / raw.std(ddof=1) if "baseline" in estimator else raw)
    for config in (GRPOConfig(), RLOOConfig()):
        with pytest.raises(ValueError, match="samples=1"):
            replace(config, samples=1)
    for baseline in ("mean", "leave-one-out"):
        assert not np.any(group_advantages(jnp.asarray(arrays["scores"]), 1, baseline=baseline, divide_by_std=True))
    assert np.all(peers.verl_group(arrays, "rloo_vectorized", **options)["advantages"] == 0)
    assert np.all(peers.trl_group_advantages(arrays, **options)["advantages"] == 0)


def test_epsilon_of_the_groups_deviation_is_verls_and_not_trls():
    arrays = scored([0.001, 0.0012, 0.5, -0.7])
    got = ours.group(arrays, GRPOConfig(samples=2, kl_coef=0.0), tokens=False)["advantages"]
    std = arrays["scores"].astype(np.float64).reshape(2, 2).std(1, ddof=1).repeat(2)
    theirs = peers.trl_group_advantages(arrays, samples=2)["advantages"]
    close(got * (std + 1e-6) / (std + 1e-4), theirs, rtol=1e-4)
    assert np.abs(got[:2] / theirs[:2] - 1).min() > 0.3  # groups that differ by little weigh more in verl and here


def test_equal_scores_are_exactly_nothing_here():
    """Their mean is off by a rounding in a peer's float32, which the small deviation then blows up."""
    scores = np.full((8, 1), 0.7)
    advantages = core_in_float32(scores, np.zeros(8, np.int64))
    assert np.abs(advantages).min() > 0.01
    arrays = scored([0.7] * 8)
    assert np.all(ours.group(arrays, GRPOConfig(samples=8, kl_coef=0.0))["advantages"] == 0)


def core_in_float32(scores: np.ndarray, index: np.ndarray) -> np.ndarray:
    rewards = peers.torch.tensor(scores, dtype=peers.torch.float32)
    return peers.numpy(peers.core.compute_grpo_outcome_advantage(rewards, peers.torch.ones_like(rewards), index)[0])


def test_scores_that_differ_by_rounding_count_as_equal_here():
    scores = np.array([0.7, np.nextafter(np.float32(0.7), np.float32(1)), 0.7, 0.7], np.float32)
    assert np.abs(core_in_float32(scores[:, None], np.zeros(4, np.int64))).max() > 0.01
    assert np.all(ours.group(scored(list(scores)), GRPOConfig(samples=4, kl_coef=0.0))["advantages"] == 0)


def test_rows_cut_off_are_in_the_groups_statistics_in_trl_and_not_here():
    """truncation="mask": TRL's mask_truncated_completions empties their masks, after the advantages are made."""
    arrays = scored([0.3, -1.0, 2.0, 0.5, 0.1, 0.9])
    arrays["finished"] = np.array([True, False, True, True, True, False])
    config = GRPOConfig(samples=3, kl_coef=0.0, divide_by_std=False, truncation="mask")
    got = ours.group(arrays, config, tokens=False)["advantages"]
    close(got, np.array([-0.85, 0, 0.85, 0.2, -0.2, 0]))
    theirs = peers.trl_group_advantages(arrays, samples=3, scale="none")["advantages"]
    close(theirs[[0, 3]], np.array([0.3 - 1.3 / 3, 0.0]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_weights_differ_from_verls_in_the_deviation_and_a_sequences_extremes(level):
    """verl's deviation is the biased one, and its extremes of a sequence's weights are those before truncation."""
    arrays = cases.batch(3, replace(RAGGED, spread=1.0))
    config = GRPOConfig(samples=2, kl_coef=0.0, importance=level, importance_cap=1.5)
    got = ours.group(arrays, config)
    x, count = peers.tensors(arrays), arrays["mask"].sum()
    gap = x.old_logprobs - x.rollout_logprobs
    _, theirs = peers.correction.compute_rollout_correction_weights(gap, x.mask, level, 1.5)
    close(got["rollout_is_std"] * np.sqrt((count - 1) / count), theirs["rollout_is_std"])
    raw = np.exp(np.where(arrays["mask"], arrays["old_logprobs"] - arrays["rollout_logprobs"], 0).sum(1))
    close(theirs["rollout_is_max"], raw.max() if level == "sequence" else 1.5, rtol=1e-4)
    assert got["rollout_is_max"] == 1.5 and raw.max() > 1.5


def test_weights_of_tokens_meet_a_sequence_ratio_differently_in_verl():
    """verl's token form scales each token's gradient by its own weight; here the one ratio has the mean's, at all."""
    arrays = cases.batch(3, Shape(rows=4, spread=0.01), by_row=True)
    arrays["importance"] = np.where(arrays["mask"], np.abs(arrays["values"]), 0)
    options: dict[str, Any] = dict(ratio="sequence-mean", aggregation="seq-mean-token-mean")
    got = ours.policy(arrays, PolicyConfig(kl_coef=0.0, **options))
    theirs = peers.verl_policy(arrays, **options)
    close(got["loss"], theirs["loss"], rtol=2e-5)
    close(got["d_logprobs"].sum(1), theirs["d_logprobs"].sum(1), rtol=2e-5)
    assert np.abs(got["d_logprobs"] - theirs["d_logprobs"]).max() > 1e-3


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_a_masked_token_counts_in_the_denominators_here_and_not_in_verl(aggregation):
    arrays = cases.batch(3, Shape(rows=6, time=8))
    mask = arrays["mask"]
    keep = mask & (np.abs(arrays["values"]) < 1)
    got = ours.policy(
        {**arrays, "importance": keep.astype(np.float32)}, PolicyConfig(kl_coef=0.0, aggregation=aggregation)
    )
    theirs = peers.verl_policy({**arrays, "mask": keep}, aggregation=aggregation)["d_logprobs"]
    assert keep.any(1).all() and keep.sum() < mask.sum()
    if aggregation == "token-mean":
        close(got["d_logprobs"] * mask.sum() / keep.sum(), theirs, rtol=2e-5)
    else:
        close(got["d_logprobs"] * mask.sum(1, keepdims=True) / keep.sum(1, keepdims=True), theirs, rtol=2e-5)


def test_a_score_at_a_masked_token_reaches_the_returns_here_and_not_in_verl():
    arrays = cases.batch(3, replace(RAGGED, rows=2))
    arrays["rewards"] = np.zeros_like(arrays["rewards"])
    for row, mask in enumerate(arrays["mask"]):
        arrays["rewards"][row, np.flatnonzero(mask)[-1]] = 10
    options = {"discount": 1.0, "gae_lambda": 1.0}
    masked = arrays["mask"] & (arrays["rewards"] == 0)
    assert masked.any(1).all()
    close(ours.table_gae(arrays, **options)["returns"][masked], 10)
    assert np.abs(peers.verl_gae({**arrays, "mask": masked}, **options)["returns"]).max() < 10 - 1


def test_verls_bounds_of_a_ratio_are_of_its_reciprocal():
    arrays = cases.batch(3, RAGGED)
    arrays["old_logprobs"] = arrays["rollout_logprobs"] + np.float32(np.log(1.5))  # more likely to the trainer
    x = peers.tensors(arrays)
    gap = x.old_logprobs - x.rollout_logprobs
    for bounds, weight in (("0.9_2.0", 0), ("0.5_1.1", 1)):
        mask, _ = peers.correction.compute_rollout_rejection_mask(gap, x.mask, "token_k1", bounds)
        close(peers.numpy(mask), weight * arrays["mask"])


def test_whitening_one_number_raises_in_verl_and_is_nothing_here():
    mask, values = np.array([[True, False]]), np.array([[3.0, 1.0]], np.float32)
    with pytest.raises(ValueError, match="mask is one"):
        peers.verl_whiten({"mask": mask, "values": values}, shift_mean=True)
    assert np.all(np.asarray(masked_whiten(jnp.asarray(values), jnp.asarray(mask))) == 0)


def test_verl_clips_negative_advantages_twice_unless_told_otherwise():
    arrays = cases.batch(3, replace(RAGGED, spread=2.0))
    defaults = peers.actor_config(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    assert defaults.clip_ratio_c == 3.0 and PolicyConfig().dual_clip is None
    theirs = peers.verl_policy(arrays, dual_clip=3.0)
    plain = ours.policy(arrays, PolicyConfig(kl_coef=0.0))
    assert plain["loss"] > theirs["loss"] + 0.1
    close(plain["loss"], peers.verl_policy(arrays)["loss"], rtol=2e-5)


def test_the_sequence_ratio_is_clamped_at_exp_20_here_and_at_exp_10_in_verl():
    arrays = by_row(5, replace(RAGGED, rows=2, kind="single"))
    arrays["logprobs"] = arrays["old_logprobs"] + np.float32(12)
    arrays["advantages"] = np.full_like(arrays["advantages"], -1)
    options: dict[str, Any] = dict(ratio="sequence-mean", aggregation="seq-mean-token-mean")
    got = ours.policy(arrays, PolicyConfig(kl_coef=0.0, **options))["loss"]
    close(got, np.exp(12), rtol=1e-5)
    close(peers.verl_policy(arrays, **options)["loss"], np.exp(10))
    close(peers.trl_grpo(arrays, "grpo", ratio="sequence-mean")["loss"], np.exp(12), rtol=1e-5)


def test_trl_counts_empty_rows_and_verl_and_we_do_not():
    arrays = by_row(7, Shape(empty=True))
    rows, counted = len(arrays["mask"]), int(arrays["mask"].any(1).sum())
    assert counted < rows
    got = ours.policy(arrays, PolicyConfig(kl_coef=0.0, aggregation="seq-mean-token-mean"))
    theirs = peers.trl_grpo(arrays, "grpo")
    close(got["loss"] * counted / rows, theirs["loss"], rtol=2e-5)
    close(got["d_logprobs"] * counted / rows, theirs["d_logprobs"], rtol=2e-5)
    constant = PolicyConfig(kl_coef=0.0, aggregation="constant", aggregation_divisor=7)
    close(ours.policy(arrays, constant)["loss"] * counted / rows, peers.trl_grpo(arrays, "dr_grpo", width=7)["loss"])


def test_verl_divides_dr_grpo_by_the_padded_width_unless_given_a_number():
    arrays = cases.batch(2, RAGGED)
    width = arrays["mask"].shape[1]
    losses = [
        ours.policy(arrays, PolicyConfig(kl_coef=0.0, aggregation="constant", aggregation_divisor=n))["loss"]
        for n in (width, 64)
    ]
    close(losses[0], peers.verl_policy(arrays, aggregation="constant")["loss"], rtol=2e-5)
    close(losses[1], peers.verl_policy(arrays, aggregation="constant", aggregation_divisor=64)["loss"], rtol=2e-5)


def test_k3_is_bounded_here_and_in_verl_and_not_in_trl():
    arrays = by_row(1, replace(RAGGED, rows=2, kind="single"))
    arrays["logprobs"], arrays["ref_logprobs"] = arrays["old_logprobs"], arrays["old_logprobs"] + np.float32(4)
    k3 = np.exp(4) - 4 - 1
    options: dict[str, Any] = dict(kl_coef=1.0, aggregation="seq-mean-token-mean", kl_estimator="k3")
    got = ours.policy(arrays, PolicyConfig(kl_in="loss", **options))["d_logprobs"]
    without = ours.policy(arrays, PolicyConfig(kl_coef=0.0, aggregation="seq-mean-token-mean"))["d_logprobs"]
    assert np.array_equal(got, without)  # k3 would be 49.6: at its bound of 10 it has no gradient
    close(peers.verl_policy(arrays, **options)["d_logprobs"], without)
    plain = peers.trl_grpo(arrays, "grpo", kl_coef=1.0)
    close(plain["total"] - plain["loss"], k3)


def test_trl_weighs_k3_by_the_ratio_unless_told_otherwise():
    """With it k3's gradient is that of the KL off policy too; the paper, verl and we have the plain k3."""
    arrays = by_row(1, replace(RAGGED, spread=0.2))
    assert peers.trl.GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True
    config = PolicyConfig(kl_in="loss", kl_coef=0.1, kl_estimator="k3", aggregation="seq-mean-token-mean")
    got = ours.policy(arrays, config)["d_logprobs"]
    close(got, peers.trl_grpo(arrays, "grpo", kl_coef=0.1)["d_logprobs"], rtol=2e-5)
    weighed = peers.trl_grpo(arrays, "grpo", kl_coef=0.1, bias_correction=True)["d_logprobs"]
    assert np.abs(got - weighed).max() > 1e-4


def test_trls_delta_is_no_dual_clip():
    """It bounds the ratio before it meets the advantage: the same where A < 0, and where A > 0 the clip is first."""
    arrays = by_row(4, replace(RAGGED, spread=2.0))
    config = PolicyConfig(kl_coef=0.0, dual_clip=3.0)
    got = ours.policy(arrays, config)
    theirs = peers.trl_grpo(arrays, "bnpo", dual_clip=3.0)
    close(got["loss"], theirs["loss"], rtol=2e-5)
    close(got["d_logprobs"], theirs["d_logprobs"], rtol=2e-5)


def test_the_entropy_is_aggregated_as_the_loss_here_and_in_verl_and_by_tokens_in_trl():
    arrays = by_row(6, RAGGED)
    config = PolicyConfig(kl_coef=0.0, aggregation="seq-mean-token-mean", entropy_coef=0.1)
    got = ours.policy(arrays, config)["d_entropy"]
    mask = arrays["mask"]
    close(got, -0.1 * mask / mask.sum(1, keepdims=True) / len(mask))
    close(peers.trl_grpo(arrays, "grpo", entropy_coef=0.1)["d_entropy"], -0.1 * mask / mask.sum())


def test_the_log_ratio_is_clamped_here_and_in_verl_and_not_in_trl():
    arrays = by_row(8, replace(RAGGED, rows=2, kind="single"))
    arrays["logprobs"] = arrays["old_logprobs"] + np.float32(23)
    arrays["advantages"] = np.full_like(arrays["advantages"], -1)
    got = ours.policy(arrays, PolicyConfig(kl_coef=0.0))
    close(got["loss"], np.exp(20), rtol=1e-5)
    assert np.all(got["d_logprobs"] == 0)
    close(peers.verl_policy(arrays)["loss"], np.exp(20), rtol=1e-5)
    close(peers.trl_grpo(arrays, "bnpo")["loss"], np.exp(23), rtol=1e-5)


def test_a_truncated_ratio_of_the_rollout_is_verls_bypass_mode_with_a_dual_clip():
    """Where A > 0 the clip is below the cap, so that the cap acts where A < 0 only, as a dual clip does."""
    arrays = cases.batch(9, replace(RAGGED, spread=1.5))
    config = PolicyConfig(kl_coef=0.0, old_logprobs="rollout", importance_cap=2.0)
    theirs = peers.verl_policy({**arrays, "old_logprobs": arrays["rollout_logprobs"]}, dual_clip=2.0)
    got = ours.policy({**arrays, "old_logprobs": arrays["rollout_logprobs"]}, config)
    close(got["loss"], theirs["loss"], rtol=2e-5)
    close(got["d_logprobs"], theirs["d_logprobs"], rtol=2e-5)


def test_the_controller_reads_nats_a_sequence_here_and_nats_a_token_in_verl():
    arrays = cases.batch(2, RAGGED)
    experience = make_experience(
        Rollout(**ours.rollout(arrays)),
        jnp.asarray(arrays["scores"]),
        jnp.asarray(arrays["old_logprobs"]),
        jnp.asarray(arrays["ref_logprobs"]),
        jnp.asarray(arrays["values"]),
        config=PPOConfig(truncation="zero"),
        kl_coef=0.05,
    )
    x = peers.tensors(arrays)
    kl = peers.core.kl_penalty(x.old_logprobs, x.ref_logprobs, "kl") * x.mask
    close(np.asarray(sequence_kl(experience)), peers.numpy(kl.sum(1).mean()), rtol=2e-5)
    theirs = peers.functional.masked_mean(kl, x.mask, axis=-1).mean()  # as in verl's apply_kl_penalty
    close(np.asarray(experience_metrics(experience)["actor/reward_kl_penalty"]), peers.numpy(theirs), rtol=2e-5)


def test_rewards_are_verls():
    """Score on the last token, the KL on each; TRL's PPO (to 1.12) put the score one past the last token."""
    arrays = cases.batch(11, RAGGED)
    for estimator in ("k1", "k2", "k3"):
        experience = make_experience(
            Rollout(**ours.rollout(arrays)),
            jnp.asarray(arrays["scores"]),
            jnp.asarray(arrays["old_logprobs"]),
            jnp.asarray(arrays["ref_logprobs"]),
            jnp.asarray(arrays["values"]),
            config=PPOConfig(truncation="zero", kl_estimator=estimator),
            kl_coef=0.05,
        )
        rewards = peers.verl_rewards(arrays, kl_estimator=estimator, kl_coef=0.05)
        close(np.asarray(experience.rewards), peers.numpy(rewards))
        theirs = peers.verl_gae({**arrays, "rewards": peers.numpy(rewards)}, discount=1.0, gae_lambda=0.95)
        close(np.asarray(experience.advantages), theirs["advantages"], rtol=2e-5)
        close(np.asarray(experience.returns), theirs["returns"], rtol=2e-5)


def test_trls_sigmoid_does_not_read_label_smoothing():
    arrays = cases.batch(3, Shape(rows=4))
    arrays["mask"][2:] = arrays["mask"][:2]
    x = peers.tensors(arrays)
    assert DPOConfig(label_smoothing=0.1).loss == "sigmoid"
    plain = [peers._trl_dpo_part(x, slice(0, 2), 2, "sigmoid", 0.1, smoothing) for smoothing in (0.0, 0.3)]
    assert plain[0] == plain[1]
    robust = peers._trl_dpo_part(x, slice(0, 2), 2, "robust", 0.1, 0.3)
    smoothed = peers.trl_dpo(arrays, loss="sigmoid", beta=0.1, label_smoothing=0.3)["loss"]
    assert abs(peers.numpy(robust) - smoothed) > 1e-2  # another loss under the same option


def test_gradients_on_the_very_boundary_are_the_unclipped_terms():
    """Ratio exactly 1 + clip_high, and value exactly at its clip: here both gradients are those of the unclipped term.

    So is the first in verl. It clips values by a minimum and a maximum, of which torch halves the gradient at a tie:
    half of the unclipped term's and half of half of it.
    """
    arrays = cases.batch(0, replace(GAPS, rows=2))
    arrays["old_logprobs"] = np.zeros_like(arrays["old_logprobs"])
    arrays["logprobs"] = np.full(arrays["mask"].shape, np.log(2.0))  # exp of it is 2 in float64, and rounded in float32
    assert jnp.exp(jnp.asarray(arrays["logprobs"], jnp.float32)).tolist() == np.exp(arrays["logprobs"]).tolist()
    got = ours.policy(arrays, PolicyConfig(kl_coef=0.0, clip_high=1.0))
    theirs = peers.verl_policy(arrays, clip_high=1.0)
    close(got["d_logprobs"], theirs["d_logprobs"])
    count = arrays["mask"].sum()
    close(got["d_logprobs"], np.where(arrays["mask"], -2 * arrays["advantages"] / count, 0))
    arrays["old_values"] = np.round(4 * arrays["old_values"]) / 4
    arrays["values"] = arrays["old_values"] + np.float32(0.5)
    got, theirs = ours.value(arrays, value_clip=0.5), peers.verl_value(arrays, value_clip=0.5)
    close(got["d_values"] * 3 / 4, theirs["d_values"])
    close(got["d_values"], np.where(arrays["mask"], (arrays["values"] - arrays["returns"]) / count, 0))


def test_estimates_in_float32_keep_their_digits():
    """k3 of policies that hardly differ: exp(-d) + d - 1 would cancel in float32."""
    d = np.array([1e-3, -2e-3, 5e-4], np.float32)
    got = np.asarray(jax.jit(kl_estimate, static_argnums=2)(jnp.asarray(d), jnp.zeros(3), "k3"))
    exact = d.astype(np.float64)
    np.testing.assert_allclose(got, np.expm1(-exact) + exact, rtol=1e-3, atol=0)
