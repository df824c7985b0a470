"""Tiny runs of the real command, each interrupted or damaged at random and resumed.

    python -m tests.support.real_runs DIRECTORY SEED NUMBER

prints a line of JSON for each: what was done, and what a resume made of it. Processes are forked from one that has
imported everything and has started no backend, and they share compiled programs.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import yaml

from jrlhf.train import cli
from tests.support.fake_runs import damage

STEPS = {"sft": 2, "ppo": 4}
REWARD = "def score(prompts, completions, **columns):\n{}    return [float(len(text) % 3) for text in completions]\n"
FAILING = "    if '2+7=' in prompts:\n        raise ValueError('\\x1b[31mred')\n"
CONFIG: dict[str, Any] = {
    "device": {"platform": "cpu", "simulated": 1},
    "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    "model": {"vocab_size": 14, "embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32}
    | {"max_positions": 16},
    "data": {"source": "arithmetic", "max_prompt": 6, "max_response": 4, "heldout_rows": 8, "terms": 2, "digits": 1}
    | {"problems": 60},
    "stages": ["sft", "ppo"],
    "sft": {"steps": STEPS["sft"], "batch": 8, "warmup": 1, "save_every": 1},
    "evaluation": {"prompts": 8},
    "ppo": {"iterations": STEPS["ppo"], "rollout_batch": 16, "save_every": 1}
    | {"algorithm": {"epochs": 1, "minibatches": 2}, "actor": {"learning_rate": 3.0e-4, "warmup": 1}},
}
STOPS = "kill", "kill", "term", "hangup", "full", "moved", "reward"
DAMAGES = "flip", "flip", "flip", "cut"


def reward(run: Path, lines: str) -> None:
    (run.parents[1] / "reward.py").write_text(REWARD.format(lines))


def launch(run: Path, *, limit: int | None = None) -> int:
    """Starts the run, or goes on with it, in a process of its own, which prints into a file; returns its number."""
    resume = (run / "config.yaml").exists()
    return fork(run, run.with_name("output"), {}, {}, resume=resume, limit=limit)


def fork(
    run: Path,
    printed: Path,
    settings: Mapping[str, Any],
    variables: Mapping[str, str],
    *,
    resume: bool,
    limit: int | None = None,
    optimise: bool = True,
) -> int:
    """Starts a process of the run with these settings and environment variables. limit: of a file, in bytes."""
    rewards = [{"name": "mine", "function": f"{run.parents[1] / 'reward.py'}:score"}]
    config, given = printed.with_suffix(".yaml"), {"name": run.name, "run_dir": str(run.parent), "rewards": rewards}
    config.write_text(yaml.safe_dump({**CONFIG, **given, **settings}))
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.environ.update(variables)
            output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            jax.config.update("jax_compilation_cache_dir", str(run.parents[1] / "programs"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_enable_compilation_cache", limit is None)
            jax.config.update("jax_disable_most_optimizations", not optimise)
            code = cli(["--config", str(config), *["--resume"] * resume])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(run: Path) -> tuple[list[Any], bytes]:
    """Metrics without times, and the bytes of the final weights."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in records]
    return timeless, (run / "model" / "model.safetensors").read_bytes()


def interrupt(run: Path, kind: str, draw: random.Random, seconds: float) -> str:
    """Has the run stopped in some way; returns what was done and how the process ended."""
    moment, limit = draw.uniform(0.1, 0.9) * seconds, draw.choice((5_000, 20_000, 60_000))
    if kind == "reward":
        reward(run, FAILING)
    pid = launch(run, limit=limit if kind == "full" else None)
    if kind in ("kill", "term", "hangup", "moved"):
        time.sleep(moment)
        if kind != "moved":
            os.kill(pid, {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hangup": signal.SIGHUP}[kind])
        elif run.exists():
            run.rename(run.with_name("away"))
    code = ended(pid)
    if run.with_name("away").exists():
        shutil.rmtree(run, ignore_errors=True)
        run.with_name("away").rename(run)
    reward(run, "    # mended\n" * (kind == "reward"))
    allowed = {"kill": (-9, 0), "term": (75, -15, 0), "hangup": (75, -1, 0), "full": (1, 2, 0), "moved": (1, 2, 0)}
    text = run.with_name("output").read_text(errors="replace")
    sentence = text.splitlines()[-1] if text else ""
    fault = code not in allowed.get(kind, (2,)) or "Traceback" in text or "\x1b" in text
    return f"{'FAULT ' * fault}{kind} after {moment:.1f} s, {limit}: {code} {text if fault else sentence}"


def judge(run: Path, expected: Any) -> str:
    """Resumes the run: "same", "same, told" or "refused: ..."; anything else is a fault."""
    code = ended(launch(run))
    text = run.with_name("output").read_text(errors="replace")
    sentence = text.splitlines()[-1] if text else ""
    if code in (1, 2) and sentence.startswith("error: ") and "Traceback" not in text and "going on" not in text:
        return f"refused: {sentence}"
    if code or "Traceback" in text:
        return f"FAULT: exit {code}: {text}"
    metrics, weights = outcome(run)
    notice = "metrics.jsonl is not what the run wrote" in text
    if weights != expected[1] or (metrics != expected[0] and not notice):
        return f"FAULT: other bits: {text}"
    return "same, told" if "warning: " in text else "same"


def main(directory: Path, seed: int, number: int) -> None:
    whole, half = directory / "whole" / "run", directory / "half" / "run"
    whole.parent.mkdir()
    half.parent.mkdir()
    reward(whole, "")
    assert ended(launch(whole)) == 0, whole.with_name("output").read_text()  # compiles
    expected = outcome(whole)
    began = time.monotonic()
    pid = launch(half)
    while not (half / "metrics.jsonl").exists() or (half / "metrics.jsonl").read_bytes().count(b"\n") < 4:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    seconds = 1.5 * (time.monotonic() - began)
    for index in range(number):
        draw = random.Random(f"{seed} {index}")
        run = directory / str(index) / "run"
        kind = draw.choice((*STOPS, *DAMAGES))
        base = draw.choice((whole, half))
        run.parent.mkdir()
        reward(run, "")
        if kind in DAMAGES:
            shutil.copytree(base, run)
            what = f"{damage(run, kind, draw)} ({base.parent.name})"
        else:
            what = interrupt(run, kind, draw, seconds)
        print(json.dumps({"what": what, "result": judge(run, expected)}), flush=True)
        shutil.rmtree(run.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
