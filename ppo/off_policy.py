"""Off-policy tokens, which older weights drew: their weights in the policy loss, their ages, and metrics."""

import math
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.losses import LOG_RATIO_LIMIT
from jrlhf.ppo.masked import masked_extremes, masked_mean, masked_variance, spread, token_count
from jrlhf.ppo.types import Experience

Metrics = dict[str, Float[Array, ""]]


def proximal_logprobs(
    logprobs: Float[Array, "*S"], rollout_logprobs: Float[Array, "*S"], ages: Int[Array, "*S"]
) -> Float[Array, "*S"]:
    """Interpolates the log-probs of the weights one update ago, without a gradient or a forward pass.

        log pi_prox = log pi_rollout + alpha (log pi - log pi_rollout)        alpha = 1 - 1 / max(age, 1)

    AReaL's "loglinear" (A-3PO, arXiv:2512.06547): alpha = (v_prox - v_rollout) / (v - v_rollout) with v_prox = v - 1,
    where a token's age is v - v_rollout. A token of age 0 or 1 keeps the rollout's number.
    """
    alpha = 1 - 1 / jnp.maximum(ages, 1).astype(jnp.float32)
    return lax.stop_gradient(rollout_logprobs + alpha * (logprobs - rollout_logprobs))


def importance_weights(
    log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], config: PolicyConfig
) -> Float[Array, "B T"]:
    """Returns tokens' weights in the policy loss, if another policy drew them; 0 outside `mask`, without a gradient.

    With rho = exp(log_ratio) = pi_old / pi_rollout of a token, products and means over a response's n tokens:

        w = min(rho, importance_cap)              importance "token": truncated importance sampling (verl's Token-TIS)
        w = min(prod rho, importance_cap)         importance "sequence" (Seq-TIS)
        w = 1                                     importance None

    and w = 0 unless each of these that is set holds, bounds included:

        low <= rho <= high                        mask_token (verl's token_k1; with importance "token" its IcePop)
        low <= prod rho <= high                   mask_sequence (seq_sum_k1: Seq-MIS)
        low <= (prod rho)^(1/n) <= high           mask_sequence_mean (seq_mean_k1: Geo-RS)
        mean(rho - 1 - log rho) <= mask_k3        mask_k3 (seq_mean_k3: K3-RS)

    (Names: verl 0.9, docs/algo/rollout_corr.md.) verl's k1 bounds are of 1 / rho: its "low_high" is [1/high, 1/low]
    here. Log-ratios are clamped to +-20, as in verl. A token of weight 0 counts in all denominators, as in AReaL, so
    that the others keep their share of the loss; verl removes it from the response mask, which raises their share.

    Elementwise, in any shape, unless a setting concerns whole responses.
    """
    log_ratio = jnp.where(mask, log_ratio, 0)
    clamped = partial(jnp.clip, min=-LOG_RATIO_LIMIT, max=LOG_RATIO_LIMIT)
    total = partial(jnp.sum, axis=1, keepdims=True)

    def mean(x: Array) -> Array:
        return total(x) / token_count(mask, axis=1)[:, None]

    weights = jnp.ones_like(log_ratio)
    if config.importance is not None:
        weights = jnp.minimum(_whole_weights(log_ratio, config), config.importance_cap)
    for bounds, reduce in (
        (config.mask_token, lambda x: x),
        (config.mask_sequence, total),
        (config.mask_sequence_mean, mean),
    ):
        if bounds is not None:
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
            statistic = reduce(clamped(log_ratio))
            weights = jnp.where((low <= statistic) & (statistic <= high), weights, 0)
    if config.mask_k3 is not None:
        k3 = jnp.expm1(clamped(log_ratio)) - clamped(log_ratio)
        weights = jnp.where(mean(k3) <= config.mask_k3, weights, 0)
    return lax.stop_gradient(jnp.where(mask, weights, 0))


def _whole_weights(log_ratio: Float[Array, "B T"], config: PolicyConfig) -> Float[Array, "B T"] | Float[Array, "B 1"]:
    """The weights before they are truncated. log_ratio: 0 outside the mask."""
    log_weight = log_ratio if config.importance == "token" else jnp.sum(log_ratio, axis=1, keepdims=True)
    return jnp.exp(jnp.clip(log_weight, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


# The metrics that `weight_terms` returns.
WEIGHT_MEANS = _MEAN, _TRUNCATED, _MASKED = (
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_ratio_fraction_high",
    "rollout_corr/rollout_rs_masked_fraction",
)


def without_older(experience: Experience, ages: Array, config: PolicyConfig) -> Experience:
    """Returns the experience with weight 0 for tokens whose age exceeds `config.staleness`.

    Weights and masks of whole responses are those of the other tokens, as the ratios of whole responses are.
    """
    assert config.staleness is not None
    fresh = experience.response_mask & (ages <= config.staleness)
    if experience.importance is None:
        return replace(experience, importance=fresh.astype(jnp.float32))
    return replace(experience, importance=importance_weights(_log_ratio(experience), fresh, config))


def _log_ratio(experience: Experience) -> Float[Array, "B T"]:
    return experience.old_logprobs - experience.logprobs.astype(jnp.float32)


def weight_shares(experience: Experience, ages: Array, config: PolicyConfig) -> Metrics:
    """The shares of tokens whose weight is truncated or 0, and of rows with a token of weight 0.

    And by quartile of the rows' lengths, the shortest rows first, the shares of tokens whose weight is neither:
    rollout_corr/full_weight/quartile_1 to 4. Rows of one length are divided among quartiles in proportion.
    """
    weights, mask = experience.importance, experience.response_mask
    assert weights is not None
    terms = _terms(experience, ages, config)
    rows = jnp.any(mask & (weights == 0), axis=1).astype(jnp.float32)
    full = mask & (terms[_TRUNCATED] == 0) & (terms[_MASKED] == 0)
    quartiles = enumerate(_shares_by_quartile(full, mask), 1)
    return {
        **{name: masked_mean(terms[name], mask) for name in (_TRUNCATED, _MASKED)},
        "rollout_corr/rollout_rs_seq_masked_fraction": masked_mean(rows, jnp.any(mask, axis=1)),
        **{f"rollout_corr/full_weight/quartile_{part}": x for part, x in quartiles},
    }


def row_weights(experience: Experience, ages: Array, config: PolicyConfig) -> dict[str, Int[Array, "B"]]:
    """The numbers of each row's tokens that the policy loss counts, and of those whose weight is 0, or truncated.

    ages: of the tokens, as `Rollout.ages`, when the update begins. Where the weights are interpolated, in the update's
    own forward pass, only the tokens that are older than `config.staleness` are known to have weight 0.
    """
    mask = experience.response_mask
    if config.staleness is not None:
        experience = without_older(experience, ages, config)
    masked = truncated = jnp.zeros_like(mask)
    if experience.importance is not None:
        terms = _terms(experience, ages, config)
        masked, truncated = terms[_MASKED] > 0, terms[_TRUNCATED] > 0
    named = {"counted": mask, "masked": mask & masked, "truncated": mask & truncated}
    return {name: jnp.sum(tokens, axis=1, dtype=jnp.int32) for name, tokens in named.items()}


def _terms(experience: Experience, ages: Array, config: PolicyConfig) -> dict[str, Array]:
    """The `weight_terms` of an experience whose weights are 0 for tokens that are older than `config.staleness`."""
    mask = experience.response_mask
    fresh = mask if config.staleness is None else mask & (ages <= config.staleness)
    assert experience.importance is not None
    return weight_terms(experience.importance, jnp.where(fresh, _log_ratio(experience), 0), config)


def _shares_by_quartile(chosen: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> list[Float[Array, ""]]:
    """The shares of chosen tokens in each quartile of the rows by length, the shortest rows first."""
    lengths, parts = jnp.sum(mask, axis=1), 4
    has_length = mask.any(axis=1, keepdims=True) & (lengths[:, None] == jnp.arange(mask.shape[1] + 1)[None, :])
    counts = jnp.sum(has_length, axis=0).astype(jnp.float32)
    last = jnp.cumsum(counts)  # ranks of the rows of a length are from last - counts to last
    shares = []
    for part in range(parts):
        low, high = (last[-1] * (part + n) / parts for n in (0, 1))
        within = jnp.maximum(jnp.minimum(last, high) - jnp.maximum(last - counts, low), 0) / jnp.maximum(counts, 1)
        rows = jnp.sum(jnp.where(has_length, within[None, :], 0), axis=1)
        tokens, all_tokens = (jnp.sum(rows * jnp.sum(x, axis=1).astype(jnp.float32)) for x in (chosen, mask))
        shares.append(tokens / jnp.maximum(all_tokens, 1e-20))
    return shares


def weight_terms(weights: Array, log_ratio: Array, config: PolicyConfig) -> dict[str, Array]:
    """The WEIGHT_MEANS of each token: its weight, whether it is truncated, whether it is 0.

    log_ratio: that of `importance_weights`, 0 outside the mask. A weight that just equals the cap is not truncated.
    """
    truncated = jnp.zeros_like(weights, jnp.bool_)
    if config.importance is not None:
        truncated = (weights > 0) & (_whole_weights(log_ratio, config) > config.importance_cap)
    return {_MEAN: weights, _TRUNCATED: truncated.astype(jnp.float32), _MASKED: (weights == 0).astype(jnp.float32)}


def importance_metrics(experience: Experience, weights: Array) -> Metrics:
    """Metrics of an experience's weights; see `experience_metrics`."""
    mask = experience.response_mask
    mean = masked_mean(weights, mask)
    d = jnp.where(mask, experience.old_logprobs - experience.logprobs, 0)
    return {
        **{f"rollout_corr/rollout_is_{what}": x for what, x in masked_extremes(weights, mask).items()},
        "rollout_corr/rollout_is_std": jnp.sqrt(masked_variance(weights, mask)),
        "rollout_corr/rollout_is_eff_sample_size": mean**2 / jnp.maximum(masked_mean(weights**2, mask), 1e-20),
        "rollout_corr/kl": masked_mean(-d, mask),
        "rollout_corr/k3_kl": masked_mean(jnp.expm1(jnp.minimum(d, LOG_RATIO_LIMIT)) - d, mask),
    }


def age_metrics(experience: Experience, ages: Int[Array, "B T"]) -> dict[str, Float[Array, ""]]:
    """Metrics of the tokens' ages, in versions of weights, under verl's names where it has one.

    For rows that count: training/off_policy/trajectory_spans, the number of versions from a row's oldest to its newest
    token, both included; trajectory_staleness and trajectory_staleness_worst, the ages of its newest and oldest token.
    For response tokens: training/off_policy/token_staleness. Each has mean, max and min.
    """
    mask = experience.response_mask
    ages = ages.astype(jnp.float32)
    newest = jnp.min(jnp.where(mask, ages, jnp.inf), axis=1)
    oldest = jnp.max(jnp.where(mask, ages, -jnp.inf), axis=1)
    rows = jnp.any(mask, axis=1)
    return {
        **spread("training/off_policy/trajectory_spans", oldest - newest + 1, rows),
        **spread("training/off_policy/trajectory_staleness", newest, rows),
        **spread("training/off_policy/trajectory_staleness_worst", oldest, rows),
        **spread("training/off_policy/token_staleness", ages, mask),
    }
