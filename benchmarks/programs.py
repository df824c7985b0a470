"""Compares the programs that two checkouts compile: `python -m benchmarks.programs OLD NEW`.

Runs the same small trainings in both checkouts, while JAX writes the lowered text of every program that it compiles.
Locations, module names, function names and names of results are removed. What is left must be equal. Exit code 1 and a
list of the differing programs where it is not. A reorganisation of the code must leave all of them as they are.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from benchmarks.records import FIRST_RUN

SMALL = 40  # lines: shorter programs move or convert arrays, outside of any role's function

TINY: dict[str, Any] = {  # what both checkouts can read
    "name": "tiny",
    "device": {"platform": "cpu", "simulated": 8},
    "mesh": {"data": 1, "fsdp": 4, "tensor": 2},
    "model": {"embed": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp": 64},
    "sft": {"steps": 2, "batch": 16},
    "evaluation": {"prompts": 16, "samples": 2},
}
LOOP = {"rollout_batch": 16, "iterations": 3, "save_every": 3}
PAIRS = {"prompts": 24, "heldout_prompts": 16, "samples_per_prompt": 2, "steps": 2, "batch": 8}
PPO = {**LOOP, "algorithm": {"epochs": 2, "minibatches": 2, "kl_target": 4.0}}
GRPO = {**LOOP, "algorithm": {"samples": 4, "kl_coef": 0.02}}
SHORT = [{"name": "short", "function": "word_count"}]
ONE = {"device": {"platform": "cpu", "simulated": 1}, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"stages": ["sft", "reward_model", "ppo"], "reward_model": PAIRS, "ppo": PPO},
    "ppo-one-device": {"stages": ["sft", "reward_model", "ppo"], "reward_model": PAIRS, "ppo": PPO, **ONE},
    "grpo": {"stages": ["sft", "grpo"], "rewards": SHORT, "grpo": GRPO},
    "grpo-one-device": {"stages": ["sft", "grpo"], "rewards": SHORT, "grpo": GRPO, **ONE},
    "lora": {"stages": ["sft", "grpo"], "rewards": SHORT, "grpo": GRPO, "lora": {"rank": 4}},
    "chunks": {"stages": ["sft", "grpo"], "rewards": SHORT, "grpo": GRPO, "rollout": {"chunk": 4, "slots": 16}},
    "dpo": {"stages": ["sft", "dpo"], "dpo": {"steps": 3, "batch": 8, "save_every": 3}},
}


def stripped(text: str) -> str:
    """The lowered program without what depends on the names and places of source code."""
    text = re.sub(r"^#loc.*\n", "", text, flags=re.M)
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", text)
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r'jax\.result_info = "[^"]*"(, )?', "", text)
    names: dict[str, str] = {}
    mesh = set(re.findall(r"sdy\.mesh @(\w+)", text))

    def number(match: re.Match[str]) -> str:
        name = match.group(1)
        return match.group(0) if name in mesh else names.setdefault(name, f"@f{len(names)}")

    return re.sub(r"@(\w+)", number, text)


def programs(checkout: Path, settings: dict[str, Any], directory: Path) -> dict[str, list[str]]:
    """Stripped text -> names of the programs with that text, of one training in `checkout`."""
    dumps, config = directory / "dumps", directory / "config.yaml"
    config.write_text(yaml.safe_dump({**TINY, **settings, "run_dir": str(directory)}))
    environment = {**FIRST_RUN, "JAX_DUMP_IR_TO": str(dumps), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "jrlhf.train", "--config", str(config)]
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(
            f"{' '.join(command)} in {checkout} ended with {run.returncode}:\n{run.stdout[-500:]}{run.stderr[-1500:]}"
        )
    texts: dict[str, list[str]] = {}
    for path in sorted(dumps.glob("*compile.mlir")):
        text = stripped(path.read_text())
        if text.count("\n") > SMALL:
            texts.setdefault(text, []).append(re.sub(r"^jax_ir\d+_|_compile\.mlir$", "", path.name))
    return texts


def main(old: Path, new: Path, names: list[str]) -> int:
    differing = 0
    for name in names:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            before = programs(old, RUNS[name], Path(first))
            after = programs(new, RUNS[name], Path(second))
        gone = [label for text in before.keys() - after.keys() for label in before[text]]
        fresh = [label for text in after.keys() - before.keys() for label in after[text]]
        print(f"{name}: {len(before.keys() & after.keys())} equal programs of {len(before)}", flush=True)
        for title, labels in (("only before", gone), ("only after", fresh)):
            for label, count in sorted(Counter(labels).items()):
                print(f"    {title}: {label}" + (f" x {count}" if count > 1 else ""))
        differing += len(gone) + len(fresh)
    return int(differing > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lowered programs of two checkouts, compared.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--run", action="append", choices=RUNS, help="this training only; default: all")
    options = parser.parse_args()
    sys.exit(main(options.old.resolve(), options.new.resolve(), options.run or list(RUNS)))
