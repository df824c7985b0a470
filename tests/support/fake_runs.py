"""Runs of a small stage through the real directory, loop and checkpoints, which are damaged at random and resumed.

    python -m tests.support.fake_runs DIRECTORY SEED DAMAGES KILLS

prints a line of JSON for each: what was done, and what a resume made of it.
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
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.config import load_config
from jrlhf.data.types import Response
from jrlhf.errors import Preempted, RunFailure, UserError
from jrlhf.meshes import make_mesh
from jrlhf.run.clock import Stopwatch
from jrlhf.run.directory import explained, open_run
from jrlhf.run.files import read_jsonl
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.run.tracking import run_id
from jrlhf.stages import evaluate
from jrlhf.stages.evaluate import Graded
from jrlhf.stages.identity import Identity
from jrlhf.stages.loop import SAMPLES, run_stage
from tests.support.runs import digest

STEPS = 6
STOPS = "full", "signal", "moved"
SCORES = np.random.default_rng(0).standard_normal(5)
Before = Callable[[int], None]  # is called before a step


def play(directory: Path, *, resume: bool = False, before: Before = lambda step: None, deadline: float = 60) -> Any:
    """Runs the stage; returns what must be the same after any resume, and the warnings."""
    source = directory.parent / "given.yaml"
    source.write_text("stages: [sft]\nsft: {steps: 6, save_every: 2, warmup: 0, final: 1.0}\n")
    settings = [f"name={directory.name}", f"run_dir={directory.parent}", f"deadline={deadline}"]
    warnings: list[str] = []
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    console = SimpleNamespace(
        warn=warnings.append,
        line=lambda text, style="": None,
        samples=lambda rows: None,
        status=lambda text: nullcontext(),
        progress=lambda *_, **__: nullcontext(SimpleNamespace(advance=lambda *_: None, compiling=lambda call: None)),
    )
    config = load_config(str(source), settings)
    with open_run(config, resume=resume) as run, explained(run), PreemptionGuard() as guard, jax.set_mesh(mesh):
        identity = Identity({"corpus": "c"})
        services = {"run": run, "console": console, "preemption": guard, "identity": identity, "trackers": ()}
        services |= {"phases": Stopwatch(), "hooks": ()}
        context: Any = SimpleNamespace(config=config, mesh=mesh, task=SimpleNamespace(fingerprint="task"), **services)
        wandb = run_id(run, warnings.append)
        policy: Any = SimpleNamespace(fingerprint=lambda: "policy")
        graded = evaluate.grade_before(context, policy)
        assert graded is not None

        def init():
            return {"x": jax.device_put(jnp.zeros(1000), NamedSharding(mesh, P()))}

        def advance(state, step: int):
            before(step)
            texts = [{"prompt": "1+1=", "response": f"{step} \u2028 ü"}]
            return {"x": state["x"] * 1.5 + step + 1}, {"loss": 1 / (step + 3), SAMPLES: texts}

        state = run_stage(context, "sft", init, advance, meta={"corpus": "task"}, announced=())
        run.begin()
        records = [[row for row in read_jsonl(run.path / name)] for name in ("metrics.jsonl", "samples.jsonl")]
        timed = "perf/", "timing_"
        metrics = [{key: value for key, value in row.items() if not key.startswith(timed)} for row in records[0]]
        bits = np.asarray(state["x"]).tobytes().hex(), graded.scores.tobytes().hex()
        return {"bits": bits, "metrics": metrics, "samples": records[1], "wandb": wandb}, warnings


def judge(directory: Path, expected: dict[str, Any]) -> str:
    """Resumes a run: "same", "same, told", or "refused: ..."; anything else is a fault."""
    contents = unlocked(directory)
    try:
        result, warnings = play(directory, resume=(directory / "config.yaml").exists())
    except (UserError, RunFailure) as error:
        sentence = str(error)
        fault = "\n" in sentence or len(sentence) > 700 or unlocked(directory) != contents
        return f"FAULT: {sentence} ({unlocked(directory) != contents})" if fault else f"refused: {sentence}"
    except Exception:
        return f"FAULT: {traceback.format_exc()}"
    names = {"metrics": "metrics.jsonl", "samples": "samples.jsonl", "wandb": "wandb.id", "bits": "nothing"}
    for key, name in names.items():
        if expected[key] not in (None, result[key]) and not any(name in warning for warning in warnings):
            return f"FAULT: other {key}, and nothing says so: {warnings}"
    return "same, told" if warnings else "same"


def unlocked(directory: Path) -> dict[str, str]:
    """The contents of a run, without what a resume may write although it is refused."""
    return {name: word for name, word in digest(directory).items() if name != ".lock"}


def damage(directory: Path, kind: str, draw: random.Random) -> str:
    """Damages a file of the run."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    folders = {path.relative_to(directory).parts[0] for path in files}
    top = draw.choice(sorted(folders))  # else nearly all would be files of checkpoints
    path = draw.choice([path for path in files if path.relative_to(directory).parts[0] == top])
    name, content = path.relative_to(directory), bytearray(path.read_bytes())
    if kind == "remove" and len(name.parts) > 1:
        path.unlink()
        return f"removed {name}"
    if kind == "cut":
        size = draw.randrange(len(content))
        path.write_bytes(content[:size])
        return f"cut {name} to {size} of {len(content)} bytes"
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"flipped bit {bit} of {name}"


def interrupted(directory: Path, kind: str, draw: random.Random) -> str:
    """Goes on with the run until something stops it."""
    at, limit = draw.randrange(2, STEPS), resource.getrlimit(resource.RLIMIT_FSIZE)
    size = draw.choice((100, 1000, 3000, 6000))
    away = directory.with_name("away")

    def stop(step: int) -> None:
        if step == at and kind == "signal":
            os.kill(os.getpid(), draw.choice((signal.SIGTERM, signal.SIGHUP)))
        if step == at and kind == "moved":
            directory.rename(away)

    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        play(directory, resume=True, before=stop)
        end = "done"
    except (Preempted, RunFailure, UserError) as error:
        assert "\n" not in str(error), error
        end = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if away.exists():
        assert kind == "moved" and "deleted or moved" in end, end
        bring_back(away, directory)
    return f"{kind} at step {at}, {size}: {end}"


def bring_back(away: Path, directory: Path) -> None:
    """Renames `away` to `directory`, which a save under way makes again until Orbax's threads have ended."""
    for attempt in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        try:
            away.rename(directory)
            return
        except OSError:
            if attempt == 99:
                raise
            time.sleep(0.1)


def child(run: Callable[[], object]) -> int:
    """Runs a function in a copy of this process, which must not have started a backend; returns its exit code."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(directory: Path, seconds: float, hang: bool) -> None:
    """Runs until the kernel ends the process after `seconds`, or a hang until the deadline does."""
    make_mesh(1, 1, 1, devices=jax.devices()[:1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if not hang:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    play(directory, before=lambda step: time.sleep(60 * (hang and step == 3)), deadline=0.3 if hang else 60)


def main(directory: Path, seed: int, damages: int, kills: int) -> None:
    evaluate.evaluate = lambda *_: Graded("gold", (Response((1, 2), "a", True),), ("",), SCORES, {}, None)
    moments, whole, half = random.Random(f"{seed} kills"), directory / "whole", directory / "half"
    began = time.monotonic()
    assert child(lambda: play(whole)) == 0
    seconds = time.monotonic() - began
    codes = {}
    for number in range(kills):  # first: no process may be forked once a backend runs
        moment, hang = moments.uniform(0, seconds), number % 8 == 7
        path = directory / f"killed{number}" / "run"
        path.parent.mkdir()
        codes[path] = moment, child(partial(killed, path, moment, hang))
    expected, _ = play(whole, resume=True)
    for path, (moment, code) in codes.items():
        what = f"ended with {code} after {moment:.2f} s"
        print(json.dumps({"what": what, "result": judge(path, {**expected, "wandb": None})}), flush=True)
    with suppress(RuntimeError):
        play(half, before=lost)
    wandb = {whole: expected["wandb"], half: (half / "wandb.id").read_text().strip()}
    for number in range(damages):
        draw = random.Random(f"{seed} {number}")
        kind = draw.choice(("flip", "flip", "flip", "flip", "cut", "remove", "full", "signal", "moved"))
        base = half if kind in STOPS else draw.choice((whole, half))
        path = directory / f"damaged{number}" / "run"
        shutil.copytree(base, path)
        what = interrupted(path, kind, draw) if kind in STOPS else damage(path, kind, draw)
        result = judge(path, {**expected, "wandb": wandb[base]})
        print(json.dumps({"what": f"{what} ({base.name})", "result": result}), flush=True)


def lost(step: int) -> None:
    if step == 3:
        raise RuntimeError("lost")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
