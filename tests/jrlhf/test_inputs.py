"""Malformed inputs of every kind: each is refused in one sentence that names a key or a file, or it is right."""

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.models import LoRAConfig, init_lora
from jrlhf.models.hf import export_adapter, read_config
from jrlhf.planning.dryrun import describe
from jrlhf.run import cluster
from tests.support.inputs import Case, case_of, leaves, listing
from tests.support.runs import ROOT

SEED = int(os.environ.get("PROOF_SEED", "0")) % 10**6 * 10**4
SECONDS, MEMORY = 40, 3 << 30  # the most that one input may take on a busy machine
BLOCK, BLOCKS = 200, 27
NAMED = leaves() | {"override", "stages", "mesh", "config.yaml", "chat template", "tokenizer", "adapter", "qa.jsonl"}


class Hang(BaseException):
    """The time of an input is over."""


@pytest.fixture(scope="module")
def bases(user, settings, tmp_path_factory) -> dict[str, Callable[[], dict]]:
    """Configs that run, by name; the directory of the user gets an adapter, too."""
    model = read_config(user / "actor").model
    lora = LoRAConfig(rank=2, alpha=4.0)
    shapes = jax.eval_shape(partial(init_lora, model, lora), jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    if not (user / "adapter").exists():
        export_adapter(zeros, model, lora, user / "adapter", base_name="actor")
    reward = str(user / "reward")

    def plain(**sections) -> dict:
        return json.loads(json.dumps(settings(name="x", **sections)))

    fresh = {"vocab_size": 14, "embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 16}
    arithmetic = {
        "stages": ["sft", "grpo"],
        "device": {"platform": "cpu", "simulated": 8},
        "mesh": {"fsdp": 8},
        "model": {**fresh, "max_positions": 16},
        "data": {"source": "arithmetic", "max_prompt": 6, "max_response": 4, "problems": 50, "heldout_rows": 8},
        "rewards": [{"name": "right", "function": "exact_match"}],
        "sft": {"steps": 3, "batch": 8},
        "grpo": {"rollout_batch": 64, "algorithm": {"samples": 8}},
    }
    return {
        "sft": lambda: plain(stages=["sft"], rewards=[]),
        "ppo": lambda: plain(rewards=[{"name": "liked", "model": reward}]),
        "arithmetic": lambda: json.loads(json.dumps(arithmetic)),
    }


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends the block with a `Hang` after some seconds, and the process with all stacks if that does not reach it."""

    def late(*_) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


def fault_of(case: Case, sentence: str) -> str | None:
    """Says what is wrong with an error's sentence."""
    if not sentence.strip() or "\n" in sentence or "Traceback" in sentence or len(sentence) > 1500:
        return f"no sentence: {sentence[:1500]!r}"
    files = {entry.name for entry in case.place.rglob("*")}
    return None if any(name in sentence for name in NAMED | files) else f"names no key and no file: {sentence}"


def attempt(case: Case, *, whole: bool = True) -> str | None:
    """Reads an input in this process. Returns what is wrong with the answer, None for a run or a good sentence.

    whole: describe the run, too, as `--dry-run` does.
    """
    before, memory = listing(case.place), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with limited(SECONDS):
            config = load_config("config.yaml", case.overrides)
            if whole:
                describe(config).encode()
        fault = None
    except UserError as error:
        fault = fault_of(case, str(error))
    except Hang as error:
        fault = f"a hang: {traceback_of(error)}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {str(error)[:300]} {traceback_of(error)}"
    if listing(case.place) != before:
        fault = f"something was written ({fault})"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
    return f"{grown / 2**30:.1f} GiB of memory ({fault})" if grown > MEMORY else fault


def traceback_of(error: BaseException) -> str:
    """Returns the last places of an error's traceback."""
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(places[:-6:-1])


@contextmanager
def drawn(seed: int, root: Path, user: Path, bases, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    place = root / str(seed)
    place.mkdir()
    monkeypatch.chdir(place)
    yield case_of(seed, place, user, bases)


@pytest.fixture
def faults(tmp_path, user, bases, monkeypatch) -> Callable[..., list[str]]:
    """A function: seeds -> the faults of their inputs."""
    monkeypatch.setattr(cluster, "start", lambda config: None)  # no other process is there to be met

    def run(seeds, *, whole: Callable[[int], bool]) -> list[str]:
        wrong = []
        for seed in seeds:
            with drawn(seed, tmp_path, user, bases, monkeypatch) as case:
                fault = attempt(case, whole=whole(seed))
            if fault is not None:
                wrong.append(f"seed {seed} ({case.kind}): {fault}")
                print(wrong[-1], flush=True)
        return wrong

    return run


def test_malformed_inputs(faults):
    assert faults(range(100), whole=lambda seed: seed % 5 == 0) == []


@pytest.mark.proof("inputs")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_malformed_inputs(faults, block):
    first = SEED + block * BLOCK
    assert faults(range(first, first + BLOCK), whole=lambda seed: True) == []


@pytest.mark.proof("inputs")
@pytest.mark.parametrize("block", range(8))
def test_commands_on_malformed_inputs(tmp_path, user, bases, monkeypatch, block):
    """Exit code 2, one sentence on stderr and nothing written; or a dry run."""
    wrong = []
    for seed in range(SEED + 10**7 + 15 * block, SEED + 10**7 + 15 * (block + 1)):
        with drawn(seed, tmp_path, user, bases, monkeypatch) as case:
            if "\0" in "".join(case.overrides) or any("\ud800" in text for text in case.overrides):
                case.overrides = []
            case.overrides = ["distributed.mode=off", *case.overrides]
            before = listing(case.place)
            command = [sys.executable, "-m", "jrlhf.train", *case.arguments, "--dry-run"]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            process = subprocess.run(command, env=environment, capture_output=True, timeout=300)
            error = process.stderr.decode()
            fault = None if listing(case.place) == before else "something was written"
            if process.returncode == 2:
                usage = error.startswith("usage: ")  # of argparse, before its sentence
                fault = fault or fault_of(case, error.splitlines()[-1] if usage else error.removesuffix("\n"))
            elif process.returncode != 0 or error:
                fault = f"exit code {process.returncode}: {error[-1500:]}"
            if fault is not None:
                wrong.append(f"seed {seed} ({case.kind}): {fault}")
    assert wrong == []
