"""The jitted PPO steps: (state, experience) -> (state, metrics). They see functions and arrays, never a model.

Everything that a step divides by is a count over the whole minibatch, so losses, gradients and metrics do not depend on
micro-batches, padding, mesh or layout. The arrays may be unsharded, or have their rows sharded on a mesh with Auto or
Explicit axes (run inside `with jax.set_mesh(mesh)`); parameters may be sharded as the given function likes.

A step donates its state: its arrays are freed, so a role that starts from the same weights needs a copy of them. It is
called as (state, experience) or as (state, experience, frozen). `frozen` is passed to the given functions as their last
argument: weights that are not trained, such as the base under an adapter. It is never donated.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jrlhf.meshes.rows import interleave
from jrlhf.ppo.advantages import group_sums
from jrlhf.ppo.config.algorithms import GRPOConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.losses import LOG_RATIO_LIMIT, PolicyLoss, cispo_loss, kl_estimate, loss_weights, policy_loss
from jrlhf.ppo.masked import token_count
from jrlhf.ppo.off_policy import (
    WEIGHT_MEANS,
    age_metrics,
    importance_weights,
    proximal_logprobs,
    weight_shares,
    weight_terms,
    without_older,
)
from jrlhf.ppo.token_losses import NO_LOGPROB, LossTokens, OfRows, TokenLoss, checked_loss, loss_of_rows
from jrlhf.ppo.types import Experience, SFTBatch, Targets, TrainState, check_class
from jrlhf.ppo.updates import (
    LossFn,
    Metrics,
    Objective,
    Pipeline,
    Step,
    UpdateResults,
    Updates,
    check_output,
    make_step,
    repeated,
)

PyTree = Any
Terms = Callable[[Array, Array, Any], tuple[Array, dict[str, Array]]]
LogprobFn = Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"]]]
"""(params, tokens [B, T], *frozen) -> log-probabilities and entropies, `[:, t]` of token t given those before it."""
SumsFn = Callable[..., tuple[Float[Array, ""], Metrics]]
"""(params, tokens [B, T], data, terms[, frozen]) -> sums of `terms` over the tokens. With `ids=` [B, T, K] `terms` gets
log-probabilities [..., 1 + K]: the token's own first, then those of the ids in its place.

`data` has [B, T] arrays: a `TokenRows`, or the mask of tokens to imitate. terms(logprobs, entropy, data) -> (loss,
{name: metric}) is elementwise in log-probabilities, entropies and data of any tokens, in any shape. The sums are over
all tokens; those where `data.computed` is False add nothing and may be left out. Only the loss is differentiated."""


class TokenRows(NamedTuple):
    """The inputs of each token's loss. The weights contain all denominators, so losses add up."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    advantages: Float[Array, "B T"] | None  # None: a loss reads none
    ref_logprobs: Float[Array, "B T"] | None  # None: no KL in the loss
    ages: Int[Array, "B T"] | None  # tokens' ages in versions, if old log-probs are interpolated
    targets: Targets | None = None
    # `_with_weights` adds the following ones, which depend on the whole minibatch.
    weights: Float[Array, "B T"] | None = None  # weight of a token's loss in the minibatch's loss
    pg_weights: Float[Array, "B T"] | None = None  # weights times importance
    kl_weights: Float[Array, "B T"] | None = None  # kl_coef * weights
    text_weights: Float[Array, "B T"] | None = None  # weights of tokens to imitate; the mask of their rows is empty

    @property
    def computed(self) -> Bool[Array, "B T"]:
        """The tokens that the loss reads."""
        return self.mask if self.text_weights is None else self.mask | (self.text_weights > 0)


def make_actor_step(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    config: PolicyConfig,
    *,
    sums_fn: SumsFn | None = None,
    pipeline: Pipeline | None = None,
    loss: TokenLoss | None = None,
) -> Step[TrainState, Experience]:
    """A jitted step that trains the actor on one batch of experience: epochs x minibatches updates. Donates the state.

    An update's loss aggregates over the minibatch's response tokens, by `config.aggregation`,

        importance * losses.policy_loss - entropy_coef * entropy + kl_coef * losses.kl_estimate

    with `losses.cispo_loss`, the importance and the KL where the config has them. (With recomputed log-probs and
    importance "token" this is AReaL's decoupled PPO, arXiv:2505.24298, eq. 4, except that it truncates no weight; its
    code masks those above a bound, as `mask_token` does.) The ratio rho of a whole response is differentiated directly.
    (verl's GSPO writes sg[s] pi / sg[pi]: the same wherever the tokens of a response share one advantage.) With
    `old_logprobs="rollout"` rho is min(rho, importance_cap), without a gradient beyond the cap. With "interpolate" rho
    is pi / pi_prox of `off_policy.proximal_logprobs` and the importance comes from pi_prox / pi_rollout, both in its
    own forward pass. Tokens of weight 0, or older than `config.staleness`, count in every denominator, in entropy and
    KL, but not in the ratio of a whole response, so that no gradient of the policy loss reaches them.

    `sums_fn` is for models that sum a loss faster than they return log-probabilities. If given, it computes the same
    loss without `logprob_fn`, except for ratios of responses, which are not elementwise. With a `pipeline` both are
    functions of its last stage, and the step is not jitted as a whole: it returns what the pipeline does.

    `loss` replaces importance * policy_loss by importance * loss(tokens), such as one of `token_losses`, or by that of
    whole responses (`of_rows`), which like ratios of responses needs `logprob_fn`. It has no
    ratio, so clips and `config.ratio` have no effect. The metric actor/loss is then in the place of actor/pg_loss and
    the shares of clipped ratios. An experience with `targets` needs a `sums_fn` that takes `ids`.

    With `config.ptx_coef` a step is called as (state, experience, texts) or (state, experience, texts, frozen).
    `texts` is an `SFTBatch` with the experience's shape; a minibatch has the same rows of both.

    `config.target_kl` bounds the k3 estimate of a minibatch's KL(old, new), mean(rho - 1 - log rho) over tokens in the
    update's own forward pass. The first update that exceeds it is not applied and ends the call.

    docs/metrics.md explains the metrics. Losses and ratios are means over the updates that were not skipped (NaN if
    there was none); all but actor/pg_loss are means over tokens, independent of the aggregation. actor/..._updates
    count updates; one that is skipped does not reach `target_kl`. With `config.corrections` or `config.staleness` there
    are the `off_policy.weight_shares` of the batch; where the weights are interpolated, the WEIGHT_MEANS instead, as
    means over the updates. Where the experience has versions, there are the metrics of `age_metrics`.

    Raises ValueError when first called with rows that do not divide into minibatches x micro_batches, with texts of
    another shape, or with an experience that was made with another config.
    """
    return make_step(actor_updates(logprob_fn, optimizer, config, sums_fn, loss), pipeline)


def actor_updates(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    config: PolicyConfig,
    sums_fn: SumsFn | None,
    loss: TokenLoss | None = None,
) -> Callable[..., Updates]:
    """(state, experience, *frozen) -> the actor's updates; with `ptx_coef`, texts come third."""
    if config.aggregation == "constant" and config.aggregation_divisor is None:
        raise ValueError("aggregation_divisor=None: aggregation='constant' needs it, usually the response limit")
    # A loss of tokens has no ratio, but weights that the update computes may be those of responses.
    if config.weighs_rows_in_loss or isinstance(loss, OfRows) or (loss is None and config.ratio != "token"):
        sums_fn = None
    loss_fn, with_weights = _loss_fn(logprob_fn, sums_fn, config, loss), partial(_with_weights, config)
    target_kl = config.target_kl
    veto = None if target_kl is None else lambda metrics: metrics["approx_kl"] > target_kl
    objective = Objective(loss_fn, optimizer, _metric_names(config, loss), veto)

    def update(state: TrainState, experience: Experience, *others: PyTree) -> Updates:
        check_class("state", state, TrainState)
        check_class("experience", experience, Experience)
        texts, *frozen = others if config.ptx_coef else (None, *others)
        _check_match(config, experience, texts)
        if loss is None and (experience.advantages is None or experience.targets is not None):
            raise ValueError("the policy loss needs advantages, and reads no targets: give a loss that fits")
        if experience.targets is not None and sums_fn is None:
            raise ValueError(
                "targets need a sums_fn, and a loss of a token that depends on no other: see compute.fused_loss, "
                "old_logprobs"
            )
        ages = experience.ages(state.step)
        if config.staleness is not None:
            experience = without_older(experience, ages, config)
        rows = TokenRows(
            tokens=experience.tokens,
            mask=experience.response_mask,
            old_logprobs=experience.old_logprobs,
            advantages=experience.advantages,
            ref_logprobs=experience.ref_logprobs if config.kl_in_loss else None,
            ages=ages if config.old_logprobs == "interpolate" else None,
            targets=experience.targets,
        )
        batch = rows, experience.importance, _group_tokens(config, experience), texts
        prepare, end = Partial(with_weights, experience.kl_coef), partial(_actor_metrics, config, experience, ages)
        return repeated(objective, config, state, batch, prepare, tuple(frozen), end, of_first=("ratio_gap",))

    return update


def _actor_metrics(
    config: PolicyConfig,
    experience: Experience,
    ages: Int[Array, "B T"],
    state: TrainState,
    results: UpdateResults,
) -> tuple[TrainState, Metrics]:
    """Returns the state after all updates on an experience, and their metrics."""
    metrics = {name if "/" in name else f"actor/{name}": mean for name, mean in results.means.items()}
    # Their sums over devices wait for those of the loop: XLA for CPUs does not order independent ones in a program that
    # it reads from disk, so two devices could wait for each other for ever. (It removes optimization_barrier.)
    mask = experience.response_mask & (results.counts["skipped_updates"] >= 0)
    experience = replace(experience, response_mask=mask)
    if experience.importance is not None and not config.weighs_in_loss:
        metrics |= weight_shares(experience, ages, config)
    if experience.versions is not None:
        metrics |= age_metrics(experience, ages)
    metrics["actor/initial_ratio_gap"] = results.first["ratio_gap"]
    return state, metrics | {f"actor/{name}": count for name, count in results.counts.items()}


def sums_of(logprob_fn: LogprobFn) -> SumsFn:
    """The sums over a model's log-probabilities and entropies of all tokens."""

    def sums(params: PyTree, tokens: Array, data: Any, terms: Terms, *frozen: PyTree) -> tuple[Array, Metrics]:
        output = logprob_fn(params, tokens, *frozen)
        logprobs, entropy = check_output("logprob_fn", tokens, output, "log-probabilities", "entropies")
        return jax.tree.map(jnp.sum, terms(logprobs, entropy, data))

    return sums


def _loss_fn(logprob_fn: LogprobFn, sums_fn: SumsFn | None, config: PolicyConfig, loss: TokenLoss | None) -> LossFn:
    """(params, rows, count, *frozen) -> (loss, metrics), for `TokenRows` of a minibatch that has `count` tokens."""
    sums = sums_of(logprob_fn) if sums_fn is None else sums_fn
    terms = partial(_policy_terms, config, loss)

    def loss_fn(params: PyTree, rows: TokenRows, count: Array, *frozen: PyTree) -> tuple[Array, Metrics]:
        ids = {} if rows.targets is None else {"ids": rows.targets.ids}
        total, metrics = sums(params, rows.tokens, rows, terms, *frozen, **ids)
        return total, {name: x if name in _WEIGHTED else x / count for name, x in metrics.items()}

    return loss_fn


# Their weights contain their denominators; the other metrics are means over tokens.
_WEIGHTED = "pg_loss", "loss", "ptx_loss"


def _metric_names(config: PolicyConfig, loss: TokenLoss | None) -> tuple[str, ...]:
    """The names of the metrics that `_policy_terms` returns."""
    names = ["entropy", "ppo_kl", "approx_kl", "ratio", "ratio_gap"]
    names += ["loss"] if loss is not None else ["pg_loss", "pg_clipfrac", "pg_clipfrac_lower"]
    names += ["kl_loss"] if config.kl_in_loss else []
    names += ["ptx_loss"] if config.ptx_coef else []
    names += WEIGHT_MEANS if config.weighs_in_loss else ()
    return tuple(names)


def _check_match(config: PolicyConfig, experience: Experience, texts: SFTBatch | None) -> None:
    """Raises ValueError for an experience that was made with another config, and for texts of another shape."""
    if (experience.importance is not None) != config.weighs_in_experience:
        weights = "no weights" if experience.importance is None else "weights"
        name = (*config.corrections, "importance")[0]
        raise ValueError(
            f"{name}={getattr(config, name)!r}: the experience has {weights}, make it with the same config"
        )
    if config.kl_in_loss and (experience.ref_logprobs is None or experience.kl_coef is None):
        raise ValueError("kl_in='loss' needs ref_logprobs and kl_coef in the experience: make it with the same config")
    if experience.kl_coef is not None and not config.kl_in_loss:
        raise ValueError("the experience has a KL for the loss, which has none: make both with the same config")
    if texts is not None and texts.tokens.shape != experience.tokens.shape:
        raise ValueError(
            f"texts have shape {texts.tokens.shape}: with ptx_coef they must be as many and as wide as the "
            f"experience's rows, {experience.tokens.shape}"
        )


def _group_tokens(config: PolicyConfig, experience: Experience) -> Float[Array, "B"] | None:
    """The number of tokens of all responses to each row's prompt, if the loss is a mean over prompts."""
    if config.aggregation != "prompt-mean" or not isinstance(config, GRPOConfig):
        return None
    return group_sums(jnp.sum(experience.response_mask, axis=1, dtype=jnp.float32), config.samples)


def _with_weights(
    config: PolicyConfig,
    kl_coef: Array | None,
    rows: TokenRows,
    importance: Float[Array, "B T"] | None,
    group_tokens: Float[Array, "B"] | None,
    texts: SFTBatch | None,
) -> TokenRows:
    """Adds the weights of a whole minibatch's tokens, before it is divided. Texts to imitate become additional rows."""
    weights = loss_weights(rows.mask, config.aggregation, divisor=config.aggregation_divisor, group_tokens=group_tokens)
    rows = rows._replace(
        weights=weights,
        pg_weights=weights if importance is None else jnp.where(rows.mask, weights * importance, 0),
        kl_weights=None if kl_coef is None else kl_coef * weights,
    )
    if texts is None:
        return rows
    learned = texts.loss_mask & (jnp.arange(texts.tokens.shape[1]) > 0)[None, :]
    rows = rows._replace(text_weights=jnp.zeros_like(weights))
    text_weights = loss_weights(learned, "token-mean")
    text_rows = jax.tree.map(jnp.zeros_like, rows)._replace(tokens=texts.tokens, text_weights=text_weights)
    return jax.tree.map(interleave, rows, text_rows)


@jax.named_scope("policy_loss")
def _policy_terms(
    config: PolicyConfig, loss: TokenLoss | None, logprobs: Array, entropy: Array, rows: TokenRows
) -> tuple[Array, dict[str, Array]]:
    """Every token's loss and metrics; 0 outside the masks. Elementwise if ratios are of tokens."""
    assert rows.weights is not None and rows.pg_weights is not None
    of_targets, logprobs = (None, logprobs) if rows.targets is None else (logprobs[..., 1:], logprobs[..., 0])
    # Selected before the mathematics, not after: a NaN in the padding would return through the gradient.
    text_logprobs, logprobs = logprobs, jnp.where(rows.mask, logprobs, 0)
    old_logprobs, pg_weights, corrected = jnp.where(rows.mask, rows.old_logprobs, 0), rows.pg_weights, {}
    if rows.ages is not None:
        rollout_logprobs, old_logprobs = old_logprobs, proximal_logprobs(logprobs, old_logprobs, rows.ages)
        if config.corrections:
            fresh = pg_weights > 0  # a response's weight is that of these tokens
            gap = jnp.where(fresh, old_logprobs - rollout_logprobs, 0)
            weights = importance_weights(gap, fresh, config)
            pg_weights, corrected = pg_weights * weights, weight_terms(weights, gap, config)
    log_ratio = jnp.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {"entropy": entropy, "ppo_kl": -log_ratio, "approx_kl": jnp.expm1(log_ratio) - log_ratio}
    if loss is None:
        parts, main = _surrogate(config, logprobs, old_logprobs, pg_weights, rows), "pg_loss"
        metrics |= {
            "pg_loss": pg_weights * parts.loss,
            "ratio": parts.ratio,
            "pg_clipfrac": parts.clipped.astype(jnp.float32),
            "pg_clipfrac_lower": parts.clipped_lower.astype(jnp.float32),
        }
    else:
        tokens, main = _loss_tokens(logprobs, entropy, old_logprobs, of_targets, rows), "loss"
        of_rows = isinstance(loss, OfRows)
        losses = loss_of_rows(loss, tokens, rows.mask) if of_rows else checked_loss(loss, tokens)
        metrics |= {"loss": pg_weights * losses, "ratio": jnp.exp(log_ratio)}
    metrics["ratio_gap"] = jnp.abs(metrics["ratio"] - 1)
    if rows.ref_logprobs is not None:
        ref_logprobs = jnp.where(rows.mask, rows.ref_logprobs, 0)
        metrics["kl_loss"] = kl_estimate(logprobs, ref_logprobs, config.kl_estimator)
    metrics = {name: jnp.where(rows.mask, x, 0) for name, x in (metrics | corrected).items()}
    total = metrics[main]
    if config.entropy_coef:  # otherwise the entropy's gradient is not computed
        total -= config.entropy_coef * (rows.weights * metrics["entropy"])
    if rows.kl_weights is not None:
        total += rows.kl_weights * metrics["kl_loss"]
    if rows.text_weights is not None:
        metrics["ptx_loss"] = rows.text_weights * -jnp.where(rows.text_weights > 0, text_logprobs, 0)
        total += config.ptx_coef * metrics["ptx_loss"]
    return total, metrics


def _surrogate(
    config: PolicyConfig, logprobs: Array, old_logprobs: Array, pg_weights: Array, rows: TokenRows
) -> PolicyLoss:
    """The config's policy loss of each token, with the ratio of the token or of its response."""
    action = log_ratio = logprobs - old_logprobs
    if config.ratio != "token":
        counted = pg_weights > 0
        total = jnp.sum(jnp.where(counted, log_ratio, 0), axis=1, keepdims=True)
        whole = total if config.ratio == "sequence" else total / token_count(counted, axis=1)[:, None]
        action = jnp.where(rows.mask, whole, 0)
    if config.old_logprobs == "rollout":
        action = jnp.where(action > math.log(config.importance_cap), math.log(config.importance_cap), action)
    assert rows.advantages is not None
    advantages = jnp.where(rows.mask, rows.advantages, 0)
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.surrogate == "cispo":
        return cispo_loss(logprobs, action, advantages, **clips)
    return policy_loss(action, jnp.zeros_like(action), advantages, **clips, dual_clip=config.dual_clip)


def _loss_tokens(
    logprobs: Array, entropy: Array, old_logprobs: Array, of_targets: Array | None, rows: TokenRows
) -> LossTokens:
    """Returns what a loss of tokens reads, with harmless numbers outside the mask.

    An id that the student's or the teacher's vocabulary lacks has probability 0 for both.
    """
    optional, targets = (rows.ref_logprobs, rows.advantages), rows.targets
    ref_logprobs, advantages = (None if x is None else jnp.where(rows.mask, x, 0) for x in optional)
    student = given = None
    if of_targets is not None and targets is not None:
        is_token = jnp.isfinite(of_targets) & jnp.isfinite(targets.logprobs)
        student, given = (jnp.where(is_token, x, NO_LOGPROB) for x in (of_targets, targets.logprobs))
        student, given = (jnp.where(rows.mask[..., None], x, 0) for x in (student, given))
    entropy = jnp.where(rows.mask, entropy, 0)
    return LossTokens(logprobs, entropy, old_logprobs, ref_logprobs, advantages, student, given)
