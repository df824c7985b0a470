"""The number of answers until a student is as good as wanted: distillation from a teacher's top tokens, beside GRPO.

    python -m benchmarks.distillation

trains a teacher (`arithmetic-grpo`, twice as long) and, for each seed, two students of 64 answers an iteration, after
the same supervised stage: by GRPO, 8 answers to each of 8 prompts; and by `forward_kl` over the teacher's 8 most likely
tokens, 1 answer to each of 64 prompts, with 16 updates on them. Writes `results/distillation.json`: the teacher's share
of right answers to 512 held-out sums, and for each student the number of answers after which a validation first finds
85 % right; null if none did.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import RESULTS, provenance, write
from jrlhf.config import load_config
from jrlhf.train import main

WANTED, ANSWERS, EVERY = 0.85, 64, 5
ITERATIONS = {"grpo": 160, "distillation": 80}
DATAFLOW = """
from jrlhf.ppo import forward_kl

def distill(actor, teacher, prompts):
    rollout = actor.generate(prompts)
    return rollout, actor.update(rollout, loss=forward_kl, targets=teacher.top_logprobs(rollout, k=8))
"""
MEASURED = "val-core/all/score/mean@1"


def run(folder: Path, name: str, *settings: str) -> list[dict[str, Any]]:
    """Runs `arithmetic-grpo` with settings; returns the records of its iterations."""
    main(load_config("arithmetic-grpo", [f"run_dir={folder}", f"name={name}", *settings]))
    records = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["stage"] not in ("sft", "evaluation")]


def answers_until(records: list[dict[str, Any]]) -> int | None:
    """A validation in the record of a step measures the weights before it."""
    reached = (record["step"] - 1 for record in records if record.get(MEASURED, 0.0) >= WANTED)
    return next((ANSWERS * step for step in reached), None)


def measured(seeds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"grpo": [], "distillation": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "distill.py").write_text(DATAFLOW)
        run(folder, "teacher", "grpo.iterations=160")
        summary = json.loads((folder / "teacher" / "summary.json").read_text())
        results["teacher"] = summary["held_out"]["after"]["score"]
        for seed in range(seeds):
            shared = [f"seed={seed}", f"validation.every={EVERY}", "validation.prompts=512"]
            grpo = [
                *shared,
                f"grpo.iterations={ITERATIONS['grpo']}",
                f"grpo.rollout_batch={ANSWERS}",
                "grpo.save_every=1000",
            ]
            results["grpo"].append(answers_until(run(folder, f"grpo-{seed}", *grpo)))
            own = ["stages=[sft, reinforce_pp]", "grpo=null"]
            own += [f"reinforce_pp.iterations={ITERATIONS['distillation']}"]
            own += [f"reinforce_pp.rollout_batch={ANSWERS}", "reinforce_pp.save_every=1000"]
            own += ["reinforce_pp.actor={learning_rate: 1.0e-3, warmup: 5}"]
            own += [
                f"reinforce_pp.dataflow={folder}/distill.py:distill",
                "reinforce_pp.algorithm={kl_coef: 0, epochs: 16}",
            ]
            own += [f"roles.teacher.path={folder}/teacher/model"]
            results["distillation"].append(answers_until(run(folder, f"student-{seed}", *shared, *own)))
    for name in ("grpo", "distillation"):
        counts = [float("inf") if count is None else count for count in results[name]]
        middle = median(counts)
        results[f"{name}_median"] = None if middle == float("inf") else middle
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    record = (
        {"wanted": WANTED, "answers": ANSWERS, "iterations": ITERATIONS}
        | measured(parser.parse_args().seeds)
        | provenance()
    )
    write(RESULTS / "distillation.json", record)
    print(json.dumps(record, indent=2))
