"""Our side of the parity ledger: runs of `jrlhf.api.train`, as a user starts them."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity import common
from benchmarks.parity.common import Job, Trained, main
from jrlhf.api import train as run

OPTIMIZER = {
    "learning_rate": common.LEARNING_RATE,
    "warmup": 0,
    "final": 1.0,
    "b1": common.B1,
    "b2": common.B2,
    "eps": common.ADAM_EPS,
    "weight_decay": 0.0,
}
ALGORITHM = {
    "grpo": {
        "samples": common.SAMPLES,
        "kl_coef": common.KL_COEF,
        "kl_in": "loss",
        "kl_estimator": "k3",
        "divide_by_std": True,
        "aggregation": "seq-mean-token-mean",
    },
    "ppo": {
        "kl_coef": common.PPO_KL_COEF,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "gae_lambda": common.GAE_LAMBDA,
        "value_clip": common.VALUE_CLIP,
        "whiten_advantages": True,
        "aggregation": "token-mean",
    },
}
BOTH = {"clip_low": common.CLIP, "clip_high": common.CLIP, "truncation": "zero", "epochs": 1, "minibatches": 1}


def stage(algorithm: str) -> dict:
    """The section of the algorithm in a config."""
    norm = common.GRPO_GRAD_NORM if algorithm == "grpo" else None
    roles = ("actor", "critic") if algorithm == "ppo" else ("actor",)
    return {
        "iterations": common.STEPS,
        "rollout_batch": common.ROWS,
        "save_every": common.STEPS,
        "algorithm": ALGORITHM[algorithm] | BOTH,
        **{role: OPTIMIZER | {"max_grad_norm": norm} for role in roles},
    }


def recorded(path: str) -> Callable[..., list[float]]:
    """The reward as a function that appends the responses of each step to a file."""

    def correct(
        prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        with open(path, "a") as file:
            file.write(json.dumps(completion_ids) + "\n")
        return [common.reward(*row) for row in zip(prompts, completion_ids, strict=True)]

    return correct


def train(job: Job, seed: int) -> Trained:
    runs = job.model(seed).parent / "runs"
    shutil.rmtree(runs / f"{seed}", ignore_errors=True)  # of an interrupted call
    done = run(
        {
            "name": f"{seed}",
            "run_dir": str(runs),
            "seed": seed,
            "stages": [job.algorithm],
            "device": {"platform": "cpu", "simulated": 1},
            "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
            "model": {"path": str(job.base)},
            "data": {
                "source": "datasets",
                "prompts": {"path": str(Path(job.directory) / "questions.jsonl")},
                "heldout_rows": 0,
                "max_prompt": common.PROMPT,
                "max_response": common.RESPONSE,
            },
            "rewards": [{"name": "correct", "function": recorded(job.replay) if job.replay else "exact_match"}],
            job.algorithm: stage(job.algorithm),
        }
    )
    rows = [row for row in done.metrics if row["stage"] == job.algorithm]
    tokens = common.ROWS * sum(common.PROMPT + row["response_length/mean"] for row in rows)
    shutil.copytree(done.path / "model", job.model(seed), dirs_exist_ok=True)
    curve = [row["critic/score/mean"] for row in rows]
    return Trained(seed, curve, round(tokens))


if __name__ == "__main__":
    main(train, ("jax", "flax", "optax"))
