"""Compares the programs that two checkouts compile: `python -m benchmarks.programs OLD NEW`.

Runs the same small trainings in both checkouts, while JAX writes the lowered text of every program that it compiles.
Locations, module names, function names and names of results are removed. What is left must be equal. Exit code 1 and a
list of the differing programs where it is not. A reorganisation of the code must leave all of them as they are.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SMALL = 40  # lines: shorter programs move or convert arrays, outside of any role's function

TINY = "tests/jrlhf/tiny.yaml"
RL = ["rollout_batch=16", "iterations=3", "save_every=3"]
RUNS = {  # name -> overrides of the tiny training
    "ppo": [f"ppo.{setting}" for setting in RL],
    "grpo": ["stages=[sft,grpo]", "rewards=[{name: short, function: word_count}]", "grpo.algorithm.samples=4"]
    + [f"grpo.{setting}" for setting in RL],
    "one-device": ["device.simulated=1", "mesh.fsdp=1", "mesh.tensor=1"] + [f"ppo.{setting}" for setting in RL],
    "lora": ["lora.rank=4", "stages=[sft,reward_model,grpo]", "grpo.algorithm.samples=4"]
    + [f"grpo.{setting}" for setting in RL],
    "chunks": ["stages=[sft,grpo]", "rewards=[{name: short, function: word_count}]", "rollout.chunk=4"]
    + ["grpo.algorithm.samples=4", "rollout.slots=8"]
    + [f"grpo.{setting}" for setting in RL],
    "dpo": ["stages=[sft,dpo]", "dpo.steps=3", "dpo.batch=8", "dpo.save_every=3"],
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


def programs(checkout: Path, overrides: list[str], directory: Path) -> dict[str, list[str]]:
    """Stripped text -> names of the programs with that text, of one training in `checkout`."""
    dumps = directory / "dumps"
    environment = {**os.environ, "JAX_DUMP_IR_TO": str(dumps), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "jrlhf.train", "--config", TINY, f"run_dir={directory}", *overrides]
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} in {checkout} ended with {run.returncode}:\n{run.stderr[-2000:]}")
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
