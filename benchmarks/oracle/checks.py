"""What is compared with whom: pairs of a function of `ours` and one of `peers`, with options and inputs for both.

The table serves both uses: the differential tests beside it, which draw many inputs where the peers are installed, and
the goldens (`goldens.py`), which hold the peers' results for one input of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.oracle import cases, ours
from benchmarks.oracle.cases import Arrays, Shape
from jrlhf.ppo import (
    GRPOConfig,
    PolicyConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
)

Draw = Callable[[int, Shape], Arrays]

RAGGED = Shape()
SINGLE_TOKENS = Shape(kind="single")
GAPS = Shape(kind="gaps")
EMPTY_ROWS = Shape(empty=True)
EXTREME = Shape(spread=15.0)
SMALL = Shape(rows=2, time=4)
SHAPES = (RAGGED, SINGLE_TOKENS, GAPS, EMPTY_ROWS, EXTREME, SMALL)


@dataclass(frozen=True)
class Check:
    """One comparison. `name` starts with the package: "verl/..." or "trl/..."."""

    name: str
    ours: Callable[[Arrays], Arrays]
    peer: str  # a function of benchmarks.oracle.peers
    options: dict[str, Any] = field(default_factory=dict)  # of that function
    draw: Draw = cases.batch
    shapes: tuple[Shape, ...] = SHAPES
    rtol: float = 1e-5
    atol: float = 1e-6

    def theirs(self, peers: Any, arrays: Arrays) -> Arrays:
        return getattr(peers, self.peer)(arrays, **self.options)

    def compare(self, got: Arrays, expected: Arrays) -> None:
        """Everything that the peer says, we say as well."""
        for name, value in expected.items():
            if name == "total":  # the policy's loss and gradients say it all
                continue
            assert np.shape(got[name]) == np.shape(value), f"{self.name}: {name}"
            np.testing.assert_allclose(got[name], value, self.rtol, self.atol, err_msg=f"{self.name}: {name}")


by_row = partial(cases.batch, by_row=True)


def _controller(seed: int, shape: Shape) -> Arrays:
    return {"kl": np.random.default_rng(seed).exponential(6, size=shape.rows).astype(np.float32)}


def _weighted(seed: int, shape: Shape) -> Arrays:
    arrays = cases.batch(seed, shape)
    weights = np.random.default_rng(seed + 1).uniform(0, 2, arrays["mask"].shape)
    return {**arrays, "importance": np.where(arrays["mask"], weights, 0).astype(np.float32)}


def _by_row_weighted(seed: int, shape: Shape) -> Arrays:
    arrays, weights = by_row(seed, shape), np.random.default_rng(seed + 1).uniform(0, 2, (shape.rows, 1))
    return {**arrays, "importance": np.where(arrays["mask"], weights, 0).astype(np.float32)}


def _dpo(seed: int, shape: Shape) -> Arrays:
    """Both answers of a pair have the prompt's length; chosen rows first."""
    arrays = cases.batch(seed, shape)
    pairs, time = shape.rows // 2, shape.time
    prompt = np.tile(arrays["prompt_lengths"][:pairs], 2)
    length = np.minimum(arrays["response_lengths"], time - prompt)
    clock = np.arange(time)[None]
    mask = (prompt[:, None] <= clock) & (clock < (prompt + length)[:, None])
    return {**arrays, "mask": mask, "prompt_lengths": prompt, "response_lengths": length.astype(np.int32)}


def _tokens(seed: int, shape: Shape) -> Arrays:
    return cases.tokens(seed, shape.rows, 6, 11, scale=max(1.0, shape.spread))


def _weighing(**options: Any) -> GRPOConfig:
    return GRPOConfig(samples=2, kl_coef=0.0, **options)


def _verl_policy(name: str, draw: Draw = cases.batch, shapes: tuple[Shape, ...] = SHAPES, **options: Any) -> Check:
    config = PolicyConfig(**{"kl_coef": 0.0, "kl_in": "loss", "kl_estimator": "k3", **options})
    return Check(
        f"verl/policy/{name}", partial(ours.policy, config=config), "verl_policy", options, draw, shapes, rtol=2e-5
    )


def _trl_policy(name: str, loss_type: str, shapes: tuple[Shape, ...], aggregation: str, **options: Any) -> Check:
    theirs = {"loss_type": loss_type, **options}
    width = options.pop("width", None)
    if loss_type == "cispo":
        options |= {"surrogate": "cispo", "clip_low": 1.0}  # TRL has no lower bound
    config = PolicyConfig(
        aggregation=aggregation,  # type: ignore[arg-type]
        aggregation_divisor=width,
        **{"kl_coef": 0.0, "kl_in": "loss", "kl_estimator": "k3", **options},
    )
    return Check(f"trl/policy/{name}", partial(ours.policy, config=config), "trl_grpo", theirs, by_row, shapes, 2e-5)


PREFIX = (RAGGED, SINGLE_TOKENS, SMALL)
PAIRS = (RAGGED, SINGLE_TOKENS, EXTREME)
WITHOUT_EMPTY = (RAGGED, SINGLE_TOKENS, GAPS, SMALL)

MASKS: dict[str, dict[str, Any]] = {
    "token": dict(mask_token=(0.8, 1.1)),
    "sequence": dict(mask_sequence=(0.6, 1.5), importance="sequence", importance_cap=1.2),
    "sequence-mean": dict(mask_sequence_mean=(0.9, 1.2)),
    "k3": dict(mask_k3=0.04, importance="token", importance_cap=1.3),
    "all": dict(mask_token=(0.5, 1.6), mask_sequence=(0.3, 3.0), mask_sequence_mean=(0.7, 1.3), mask_k3=0.1),
}

GROUPS = tuple(
    Check(
        f"verl/{estimator}/{name}",
        partial(ours.group, config=config),
        "verl_group",
        {"estimator": estimator, "samples": config.samples, **options},
        shapes=PREFIX if config.samples == 2 else PREFIX[:2],
    )
    for estimator, name, config, options in (
        ("grpo", "std", GRPOConfig(samples=4, kl_coef=0.0), {}),
        ("grpo", "pairs", GRPOConfig(samples=2, kl_coef=0.0), {}),
        ("grpo", "no-std", GRPOConfig(samples=2, divide_by_std=False, kl_coef=0.0), {"norm_adv_by_std_in_grpo": False}),
        (
            "grpo",
            "kl-in-reward",
            GRPOConfig(samples=2, kl_in="reward", kl_coef=0.1),
            {"kl_coef": 0.1, "kl_estimator": "k3"},
        ),
        ("rloo", "kl-in-reward", RLOOConfig(samples=2, kl_coef=0.1), {"kl_coef": 0.1}),
        ("rloo_vectorized", "plain", RLOOConfig(samples=2, kl_coef=0.0), {}),
        ("reinforce_plus_plus_baseline", "plain", ReinforcePPBaselineConfig(samples=2, kl_coef=0.0), {}),
    )
)

VERL = (
    *(
        Check(
            f"verl/gae/{discount}-{lam}",
            partial(ours.table_gae, discount=discount, gae_lambda=lam),
            "verl_gae",
            {"discount": discount, "gae_lambda": lam},
        )
        for discount, lam in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0))
    ),
    *(
        Check(f"verl/whiten/{shift}", partial(ours.whiten, shift_mean=shift), "verl_whiten", {"shift_mean": shift})
        for shift in (True, False)
    ),
    *GROUPS,
    *(
        Check(
            f"verl/reinforce_plus_plus/{discount}",
            partial(ours.returns, config=ReinforcePPConfig(discount=discount, kl_coef=0.1)),
            "verl_reinforce_pp",
            {"discount": discount, "kl_coef": 0.1},
            shapes=(RAGGED, SINGLE_TOKENS, EMPTY_ROWS, SMALL),
        )
        for discount in (1.0, 0.9)
    ),
    Check(
        "verl/remax",
        partial(ours.returns, config=ReMaxConfig(kl_coef=0.1)),
        "verl_remax",
        {"kl_coef": 0.1},
        shapes=(RAGGED, SINGLE_TOKENS, EMPTY_ROWS, SMALL),
    ),
    *(
        Check(
            f"verl/importance/{level}",
            partial(ours.group, config=_weighing(importance=level, importance_cap=cap)),
            "verl_importance",
            {"importance": level, "importance_cap": cap},
            shapes=(RAGGED, SINGLE_TOKENS, EXTREME, SMALL),
            rtol=2e-5,
        )
        for level, cap in (("token", 2.0), ("sequence", 1.5))
    ),
    *(
        Check(
            f"verl/masks/{name}",
            partial(ours.group, config=_weighing(**options)),
            "verl_masked_importance",
            options,
            shapes=(RAGGED, SINGLE_TOKENS, EXTREME, SMALL),
            rtol=2e-5,
        )
        for name, options in MASKS.items()
    ),
    Check(
        "verl/masks/icepop",
        partial(ours.group, config=_weighing(importance="token", importance_cap=3.0, mask_token=(0.8, 3.0))),
        "verl_icepop",
        {"bounds": (0.8, 3.0)},
        shapes=(RAGGED,),  # verl divides by 0 where no weight is left
        rtol=2e-5,
    ),
    _verl_policy("cispo", surrogate="cispo", clip_high=0.28),
    _verl_policy(
        "cispo-importance",
        _weighted,
        surrogate="cispo",
        clip_low=1.0,
        clip_high=0.5,
        aggregation="seq-mean-token-mean",
        entropy_coef=0.02,
    ),
    _verl_policy("token-mean", clip_high=0.28),
    _verl_policy("dual-clip", dual_clip=3.0),
    _verl_policy("seq-mean-token-sum", aggregation="seq-mean-token-sum", clip_low=0.1, clip_high=0.4),
    _verl_policy("seq-mean-token-mean", aggregation="seq-mean-token-mean"),
    _verl_policy("constant", aggregation="constant", aggregation_divisor=5),
    _verl_policy("entropy", aggregation="seq-mean-token-mean", entropy_coef=0.02),
    _verl_policy("k2", aggregation="token-mean", kl_estimator="k2", kl_coef=0.1),
    _verl_policy("k3", aggregation="seq-mean-token-mean", kl_estimator="k3", kl_coef=0.04),
    _verl_policy("k1+", aggregation="constant", aggregation_divisor=7, kl_estimator="k1+", kl_coef=0.1),
    _verl_policy("k3+", aggregation="seq-mean-token-sum", kl_estimator="k3+", kl_coef=0.1, entropy_coef=-0.01),
    _verl_policy("importance", _weighted, aggregation="token-mean", kl_estimator="k3", kl_coef=0.04),
    _verl_policy(
        "gspo",
        by_row,
        (RAGGED, SINGLE_TOKENS, GAPS, EMPTY_ROWS, SMALL),
        ratio="sequence-mean",
        aggregation="seq-mean-token-mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    _verl_policy(
        "gspo-importance",
        _by_row_weighted,
        (RAGGED, SINGLE_TOKENS, GAPS, EMPTY_ROWS, SMALL),
        ratio="sequence-mean",
        aggregation="seq-mean-token-mean",
        clip_low=0.1,
        clip_high=0.2,
    ),
    *(
        Check(f"verl/value/{clip}", partial(ours.value, value_clip=clip), "verl_value", {"value_clip": clip})
        for clip in (0.2, None)
    ),
    *(
        Check(f"verl/kl/{kind}", partial(ours.kl, kl_estimator=kind), "verl_kl", {"kl_estimator": kind})
        for kind in ("k1", "k2", "k3", "k1+", "k3+")
    ),
    *(
        Check(f"verl/controller/{name}", partial(ours.controller, **options), "verl_controller", options, _controller)
        for name, options in (
            ("slow", dict(kl_coef=0.05, kl_target=6.0, kl_horizon=10_000.0, episodes=64)),
            ("fast", dict(kl_coef=0.2, kl_target=3.0, kl_horizon=500.0, episodes=512)),
        )
    ),
    *(
        Check(
            f"verl/tokens/{t}",
            partial(ours.tokens, temperature=t),
            "verl_tokens",
            {"temperature": t},
            _tokens,
            atol=3e-5,
        )
        for t in (1.0, 0.7)
    ),
)

TRL = (
    *(
        Check(
            f"trl/rloo-advantages/{samples}",
            partial(ours.group, config=RLOOConfig(samples=samples, kl_coef=0.05), tokens=False),
            "trl_rloo_advantages",
            {"samples": samples, "kl_coef": 0.05},
            shapes=PREFIX if samples == 2 else PREFIX[:2],
        )
        for samples in (2, 4)
    ),
    Check(
        "trl/grpo-advantages/no-std",
        partial(ours.group, config=GRPOConfig(samples=2, divide_by_std=False, kl_coef=0.0), tokens=False),
        "trl_group_advantages",
        {"samples": 2, "scale": "none"},
        shapes=PREFIX,
    ),
    _trl_policy("grpo", "grpo", WITHOUT_EMPTY, "seq-mean-token-mean"),
    _trl_policy("grpo-kl", "grpo", WITHOUT_EMPTY, "seq-mean-token-mean", kl_coef=0.04, clip_high=0.28),
    _trl_policy("gspo", "grpo", WITHOUT_EMPTY, "seq-mean-token-mean", ratio="sequence-mean", clip_low=0.1),
    _trl_policy("bnpo", "bnpo", (*WITHOUT_EMPTY, EMPTY_ROWS), "token-mean", entropy_coef=0.01),
    _trl_policy("dapo", "dapo", (*WITHOUT_EMPTY, EMPTY_ROWS), "token-mean", clip_high=0.28),
    _trl_policy("cispo", "cispo", (*WITHOUT_EMPTY, EMPTY_ROWS), "token-mean", clip_high=1.0),
    _trl_policy("dr_grpo", "dr_grpo", WITHOUT_EMPTY, "constant", width=7),
    Check(
        "trl/rloo-loss",
        partial(
            ours.policy,
            config=PolicyConfig(kl_coef=0.0, ratio="sequence", aggregation="seq-mean-token-mean"),
        ),
        "trl_rloo",
        draw=by_row,
        shapes=WITHOUT_EMPTY,
        rtol=2e-5,
    ),
    *(
        Check(f"trl/dpo/{name}", partial(ours.dpo, **options), "trl_dpo", options, _dpo, PAIRS)
        for name, options in (
            ("sigmoid", dict(loss="sigmoid", beta=0.1)),
            ("sharp", dict(loss="sigmoid", beta=2.0)),
            ("smoothed", dict(loss="sigmoid", beta=0.3, label_smoothing=0.1)),
            ("ipo", dict(loss="ipo", beta=0.1)),
        )
    ),
)

CHECKS: tuple[Check, ...] = (*VERL, *TRL)
