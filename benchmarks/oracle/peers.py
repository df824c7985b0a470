"""What verl and TRL compute from the same arrays, in float64: their own functions, in an environment of their own.

Every function takes NumPy arrays and the names of `jrlhf.ppo`'s options, which it translates, and returns NumPy arrays
under the names that `benchmarks.oracle.ours` uses: `{"loss": ..., "d_logprobs": ...}`, where d_x is the gradient of the
loss by x. Peers are imported by name, because the project's own environments do not have them.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Bounds = tuple[float, float]
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0"}  # that these calls fit
VERL_AGGREGATION = {"constant": "seq-mean-token-sum-norm"}
VERL_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k1+": "k1+", "k3+": "k3+"}
NEVER = 1e30  # for a bound that cannot be switched off

for _package, _version in VERSIONS.items():
    if version(_package) != _version:
        raise ImportError(f"{_package}={version(_package)}: these comparisons are written for {_version}")

torch: Any = import_module("torch")
torch.set_num_threads(1)  # tensors are tiny
core: Any = import_module("verl.trainer.ppo.core_algos")
functional: Any = import_module("verl.utils.torch_functional")
correction: Any = import_module("verl.trainer.ppo.rollout_corr_helper")
actor_config: Any = import_module("verl.workers.config").FSDPActorConfig
trl: Any = import_module("trl")


def tensor(x: Any, *, grad: bool = False) -> Any:
    x = np.asarray(x)
    return torch.tensor(x, dtype=torch.int64 if x.dtype.kind in "iu" else torch.float64, requires_grad=grad)


def numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach() if hasattr(x, "detach") else x, np.float64)


def tensors(arrays: Arrays, *learned: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: tensor(x, grad=name in learned) for name, x in arrays.items()})


def gradients(loss: Any, **inputs: Any) -> Arrays:
    """The loss, and its gradient by each input; zeros where it does not depend on one."""
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs.values(), strict=True)]
    return {"loss": numpy(loss), **{f"d_{name}": numpy(g) for name, g in zip(inputs, zeros, strict=True)}}


# verl: advantages


def verl_gae(arrays: Arrays, *, discount: float, gae_lambda: float) -> Arrays:
    x = tensors(arrays)
    advantages, returns = core.get_adv_estimator_fn("gae")(x.rewards, x.values, x.mask, discount, gae_lambda)
    return {"advantages": numpy(advantages * x.mask), "returns": numpy(returns * x.mask)}


def verl_whiten(arrays: Arrays, *, shift_mean: bool) -> Arrays:
    x = tensors(arrays)
    return {"whitened": numpy(functional.masked_whiten(x.values, x.mask, shift_mean) * x.mask)}


def verl_rewards(arrays: Arrays, *, kl_estimator: str, kl_coef: float) -> Any:
    """Token rewards as verl's `apply_kl_penalty` makes them: the score at the last token, minus the KL at each."""
    x = tensors(arrays)
    placed = torch.zeros_like(x.old_logprobs)
    for row, mask in enumerate(arrays["mask"]):
        if mask.any():
            placed[row, int(np.flatnonzero(mask)[-1])] = x.scores[row]
    return placed - kl_coef * core.kl_penalty(x.old_logprobs, x.ref_logprobs, VERL_KL[kl_estimator]) * x.mask


def verl_group(
    arrays: Arrays, estimator: str, *, samples: int, kl_coef: float = 0.0, kl_estimator: str = "k1", **options: Any
) -> Arrays:
    """Advantages of tokens by `estimator`: grpo, rloo, rloo_vectorized, reinforce_plus_plus_baseline."""
    rewards = verl_rewards(arrays, kl_estimator=kl_estimator, kl_coef=kl_coef)
    index = np.arange(len(rewards)) // samples
    function = core.get_adv_estimator_fn(estimator)
    advantages, _ = function(rewards, tensor(arrays["mask"]), index=index, **options)
    return {"advantages": numpy(advantages)}


def verl_reinforce_pp(arrays: Arrays, *, discount: float, kl_coef: float) -> Arrays:
    rewards = verl_rewards(arrays, kl_estimator="k1", kl_coef=kl_coef)
    function = core.get_adv_estimator_fn("reinforce_plus_plus")
    advantages, _ = function(rewards, tensor(arrays["mask"]), config=SimpleNamespace(gamma=discount))
    return {"advantages": numpy(advantages)}


def verl_remax(arrays: Arrays, *, kl_coef: float) -> Arrays:
    rewards = verl_rewards(arrays, kl_estimator="k1", kl_coef=kl_coef)
    function = core.get_adv_estimator_fn("remax")
    advantages, _ = function(rewards, tensor(arrays["baselines"]), tensor(arrays["mask"]))
    return {"advantages": numpy(advantages) * arrays["mask"]}  # returns run on before the response


# verl: losses


def verl_policy(
    arrays: Arrays,
    *,
    ratio: str = "token",
    surrogate: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token-mean",
    aggregation_divisor: int | None = None,
    entropy_coef: float = 0.0,
    kl_estimator: str = "k1",
    kl_coef: float = 0.0,
) -> Arrays:
    """The actor's loss as verl's `ppo_loss` adds it up: policy, entropy and KL under one aggregation."""
    x = tensors(arrays, "logprobs", "entropy")
    mode = VERL_AGGREGATION.get(aggregation, aggregation)
    config = actor_config(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=clip_low,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        clip_ratio_c=NEVER if dual_clip is None else dual_clip,
        global_batch_info={"loss_scale_factor": aggregation_divisor},
    )
    name = "cispo" if surrogate == "cispo" else "vanilla" if ratio == "token" else "gspo"
    function = core.get_policy_loss_fn(name)
    weights = x.importance if "importance" in arrays else None
    policy, metrics = function(x.old_logprobs, x.logprobs, x.advantages, x.mask, mode, config, weights)
    total = policy
    if entropy_coef:
        total = total - entropy_coef * core.agg_loss(x.entropy, x.mask, mode, **config.global_batch_info)
    if kl_coef:
        kl = core.kl_penalty(x.logprobs, x.ref_logprobs, VERL_KL[kl_estimator])
        total = total + kl_coef * core.agg_loss(kl, x.mask, mode, **config.global_batch_info)
    results = gradients(total, logprobs=x.logprobs, entropy=x.entropy)
    results["loss"] = numpy(policy)
    return {**results, **{name.removeprefix("actor/"): numpy(value) for name, value in metrics.items()}}


def verl_value(arrays: Arrays, *, value_clip: float | None) -> Arrays:
    x = tensors(arrays, "values")
    bound = NEVER if value_clip is None else value_clip
    loss, clipped = core.compute_value_loss(x.values, x.returns, x.old_values, x.mask, bound)
    return {**gradients(loss, values=x.values), "vf_clipfrac": numpy(clipped)}


def verl_kl(arrays: Arrays, *, kl_estimator: str) -> Arrays:
    x = tensors(arrays, "logprobs")
    kl = core.kl_penalty(x.logprobs, x.ref_logprobs, VERL_KL[kl_estimator])
    return {"kl": numpy(kl), "d_logprobs": gradients(kl.sum(), logprobs=x.logprobs)["d_logprobs"]}


def verl_controller(arrays: Arrays, *, kl_coef: float, kl_target: float, kl_horizon: float, episodes: int) -> Arrays:
    controller, coefs = core.AdaptiveKLController(kl_coef, kl_target, kl_horizon), []
    for kl in arrays["kl"].astype(np.float64):
        controller.update(kl, episodes)
        coefs.append(controller.value)
    return {"coefs": np.array(coefs)}


def verl_importance(arrays: Arrays, *, importance: str, importance_cap: float) -> Arrays:
    """Weights, and those of their metrics in which we follow verl (`test_differential.py` has the others)."""
    x = tensors(arrays)
    weights, of_weights = correction.compute_rollout_correction_weights(
        x.old_logprobs - x.rollout_logprobs, x.mask, importance, importance_cap
    )
    metrics = {**of_weights, **correction.compute_offpolicy_metrics(x.old_logprobs, x.rollout_logprobs, x.mask)}
    names = ("rollout_is_mean", "rollout_is_eff_sample_size", "kl")
    if (x.old_logprobs - x.rollout_logprobs).max() < 20:  # where verl does not clamp this one, and we do
        names += ("k3_kl",)
    if importance == "token":
        names += ("rollout_is_max", "rollout_is_min")
    return {"importance": numpy(weights), **{name: np.asarray(metrics[name]) for name in names}}


def verl_masked_importance(
    arrays: Arrays,
    *,
    importance: str | None = None,
    importance_cap: float = 2.0,
    mask_token: Bounds | None = None,
    mask_sequence: Bounds | None = None,
    mask_sequence_mean: Bounds | None = None,
    mask_k3: float | None = None,
) -> Arrays:
    """Weights times the response mask that verl's rejections leave; its k1 bounds are of the reciprocal ratio."""
    x = tensors(arrays)
    log_ratio = x.old_logprobs - x.rollout_logprobs
    weights, given = x.mask, {"token_k1": mask_token, "seq_sum_k1": mask_sequence, "seq_mean_k1": mask_sequence_mean}
    bounds = {name: f"{1 / high!r}_{1 / low!r}" for name, (low, high) in ((n, b) for n, b in given.items() if b)}
    if mask_k3 is not None:
        bounds["seq_mean_k3"] = repr(mask_k3)
    mask, _ = correction.compute_rollout_rejection_mask(log_ratio, x.mask, ",".join(bounds), ",".join(bounds.values()))
    if importance is not None:
        weights, _ = correction.compute_rollout_correction_weights(log_ratio, x.mask, importance, importance_cap)
    return {"importance": numpy(weights * mask)}


def verl_icepop(arrays: Arrays, *, bounds: Bounds) -> Arrays:
    """verl's weights with two bounds, outside which they are 0."""
    x = tensors(arrays)
    weights, _ = correction.compute_rollout_correction_weights(
        x.old_logprobs - x.rollout_logprobs, x.mask, "token", f"{bounds[0]}_{bounds[1]}"
    )
    return {"importance": numpy(weights)}


def verl_tokens(arrays: Arrays, *, temperature: float) -> Arrays:
    """Log-probabilities and entropies of tokens, and the gradients of a weighted sum of both."""
    x = tensors(arrays, "hidden", "unembedding")
    logits = x.hidden @ x.unembedding.T / temperature
    logprobs = functional.logprobs_from_logits_naive(logits, x.targets)
    entropy = functional.entropy_from_logits(logits)
    loss = (logprobs * x.weights).sum() + (entropy * x.entropy_weights).sum()
    results = gradients(loss, hidden=x.hidden, unembedding=x.unembedding)
    return {**results, "logprobs": numpy(logprobs), "entropy": numpy(entropy)}


# TRL


class Accelerator:
    """One process: what a trainer's loss asks of accelerate in order to log."""

    num_processes = 1
    sync_gradients = True
    device = "cpu"

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str) -> Any:
        return x


def trainer(**attributes: Any) -> SimpleNamespace:
    """A trainer's `self`, as far as its loss reads it."""
    common: dict[str, Any] = dict(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
    )
    return SimpleNamespace(**common, **attributes)


def completions(x: SimpleNamespace) -> dict[str, Any]:
    rows = len(x.mask)
    empty = torch.zeros(rows, 0, dtype=torch.int64)
    ids = torch.zeros(x.mask.shape, dtype=torch.int64)
    return {"prompt_ids": empty, "prompt_mask": empty, "completion_ids": ids, "completion_mask": x.mask}


def trl_grpo(
    arrays: Arrays,
    loss_type: str,
    *,
    ratio: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    bias_correction: bool = False,
    width: int | None = None,
    entropy_coef: float = 0.0,
) -> Arrays:
    """`GRPOTrainer._compute_loss`; advantages are the rows', each row's first counted one.

    "loss" is the policy's, "total" and the gradients are with KL and entropy.
    """
    x = tensors(arrays, "logprobs", "entropy")
    inputs = {
        **completions(x),
        "advantages": row_advantages(arrays),
        "old_per_token_logps": x.old_logprobs,
        "ref_per_token_logps": x.ref_logprobs,
        "num_items_in_batch": x.mask.sum(),
    }

    def loss(beta: float, coef: float) -> Any:
        self = trainer(
            _get_per_token_logps_and_entropies=lambda *_, **__: (x.logprobs, x.entropy, None),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token" if ratio == "token" else "sequence",
            beta=beta,
            args=SimpleNamespace(use_bias_correction_kl=bias_correction, delta=dual_clip, steps_per_generation=1),
            loss_type=loss_type,
            epsilon_low=clip_low,
            epsilon_high=clip_high + (loss_type == "cispo"),  # there a bound of the ratio itself
            use_vllm=False,
            max_completion_length=width,
            _entropy_bonus_enabled=coef != 0,
            use_adaptive_entropy=False,
            entropy_coef=coef,
        )
        return trl.GRPOTrainer._compute_loss(self, None, inputs)

    total = loss(kl_coef, entropy_coef)
    results = gradients(total, logprobs=x.logprobs, entropy=x.entropy)
    return {**results, "loss": numpy(loss(0.0, 0.0)), "total": numpy(total)}


def trl_rloo(arrays: Arrays, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Arrays:
    """`RLOOTrainer._compute_loss`: one ratio for a whole completion."""
    x = tensors(arrays, "logprobs")
    self = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x.logprobs, torch.zeros_like(x.logprobs), None),
        epsilon_low=clip_low,
        epsilon_high=clip_high,
    )
    inputs = {
        **completions(x),
        "advantages": row_advantages(arrays),
        "old_logps": (x.old_logprobs * x.mask).sum(1),
    }
    return gradients(trl.RLOOTrainer._compute_loss(self, None, inputs), logprobs=x.logprobs)


def row_advantages(arrays: Arrays) -> Any:
    """One advantage a row, out of token advantages that are all the same in a row."""
    advantages, mask = arrays["advantages"], arrays["mask"]
    first = np.where(mask.any(1), mask.argmax(1), 0)
    return tensor(np.take_along_axis(advantages, first[:, None], 1)[:, 0])


def trl_group_advantages(arrays: Arrays, *, samples: int, scale: str = "group") -> Arrays:
    """Advantages of rows: the statements of `GRPOTrainer` between rewards and advantages, which are no function."""
    names = _run(
        _statements(trl.GRPOTrainer._generate_and_score_completions, "multi_objective_aggregation"),
        import_module("trl.trainer.grpo_trainer"),
        self=SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1, dtype=torch.float64),
            scale_rewards=scale,
        ),
        rewards_per_func=tensor(arrays["scores"])[:, None],
        unscorable_mask=torch.zeros(len(arrays["scores"]), dtype=torch.bool),
        device="cpu",
        num_generations=samples,
    )
    return {"advantages": numpy(names["advantages"])}


def trl_rloo_advantages(arrays: Arrays, *, samples: int, kl_coef: float) -> Arrays:
    """Advantages of rows: the statements of `RLOOTrainer` between rewards and advantages, which are no function."""
    x = tensors(arrays)
    names = _run(
        _statements(trl.RLOOTrainer._generate_and_score_completions, "self.beta * kl", "grouped_rewards", "baselines"),
        import_module("trl.trainer.rloo_trainer"),
        self=SimpleNamespace(beta=kl_coef),
        rewards=x.scores,
        old_per_token_logps=x.old_logprobs,
        ref_per_token_logps=x.ref_logprobs,
        completion_mask=x.mask,
        num_generations=samples,
        gather=lambda kl: kl,
    )
    return {"advantages": numpy(names["advantages"])}


def trl_dpo(arrays: Arrays, *, loss: str, beta: float, label_smoothing: float = 0.0) -> Arrays:
    """`DPOTrainer._compute_loss`, token log-probabilities given. Gradients are by those, [2S, T], chosen rows first.

    TRL 1.16's "sigmoid" does not read label_smoothing. Its "aot_unpaired" does, in the same formula, after sorting the
    batch: pair by pair there is nothing to sort.
    """
    x = tensors(arrays, "logprobs")
    pairs = len(x.mask) // 2
    kind = "aot_unpaired" if label_smoothing else loss
    parts = [slice(i, i + 1) for i in range(pairs)] if label_smoothing else [slice(0, pairs)]
    losses = [_trl_dpo_part(x, part, pairs, kind, beta, label_smoothing) for part in parts]
    return gradients(sum(losses) / len(losses), logprobs=x.logprobs)


def _trl_dpo_part(x: Any, part: slice, pairs: int, kind: str, beta: float, label_smoothing: float) -> Any:
    rows = [*range(pairs)[part], *(pairs + i for i in range(pairs)[part])]
    mask, logprobs = x.mask[rows], x.logprobs[rows]
    ref_chosen, ref_rejected = (x.ref_logprobs[rows] * mask).sum(1).chunk(2)
    tokens = logprobs.shape[1] - 1
    outputs = SimpleNamespace(
        log_probs=(logprobs * mask)[:, 1:],
        entropy=torch.zeros(len(rows), tokens),
        mean_logits=torch.zeros(len(rows), tokens),
        is_top1=torch.zeros(len(rows), tokens, dtype=torch.bool),
    )
    self = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    return trl.DPOTrainer._compute_loss(self, lambda **_: outputs, inputs, False)


@cache
def _statements(function: Callable[..., Any], *words: str) -> Any:
    """The top-level statements of `function` whose source has one of `words` and that lead to its advantages."""
    source = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.FunctionDef)
    texts = [ast.unparse(statement) for statement in body.body]
    last = max(i for i, text in enumerate(texts) if text.startswith("advantages = torch.nan_to_num"))
    chosen = [s for s, text in zip(body.body[:last], texts, strict=False) if any(word in text for word in words)]
    return compile(ast.Module(body=[*chosen, body.body[last]], type_ignores=[]), function.__qualname__, "exec")


def _run(code: Any, module: Any, **names: Any) -> dict[str, Any]:
    namespace = {**vars(module), **names}
    exec(code, namespace)
    return namespace
