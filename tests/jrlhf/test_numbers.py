"""Real runs into which one number is put that float32 cannot bear: counted, named, never in weights, never silent."""

import json
import os
import random
import re
import shutil
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from jrlhf.run.metrics import read_metrics
from jrlhf.train import cli

pytestmark = pytest.mark.usefixtures("quick_compilation")
SEED = int(os.environ.get("PROOF_SEED", "0"))
FUNCTION = '''
def score(completions):
    """The first of a call has the number, or each one."""
    return [NUMBER if EACH or row == 0 else 0.1 * len(text[0]["content"]) for row, text in enumerate(completions)]
'''
UNFIT = "nan", "inf", "-inf", "1e308"  # float32 has no such finite number
HUGE = "3e38", "-3e38"  # it has, but not their squares


def spoil(directory, draw):
    """Puts a number that is not finite somewhere into the weights; returns the words that a refusal must have."""
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    name = draw.choice(sorted(weights))
    weights[name].reshape(-1)[draw.randrange(weights[name].size)] = float(draw.choice(["nan", "inf", "-inf"]))
    save_file(weights, file, metadata={"format": "pt"})
    return [file.name, repr(name)]


def injection(draw, kind, root, user):
    """(sections of the config, the exit codes that may follow, words of the refusal)."""
    function = root / "unfit.py"
    reward = {"name": "unfit", "function": f"{function}:score"}
    rate = {"learning_rate": float(draw.choice(["1e38", "3e38"])), "warmup": 0}
    if kind in ("actor", "critic", "reward"):
        shutil.copytree(user / kind, root / kind)
        path = str(root / kind)
        there: dict[str, Any] = {"actor": {"model": {"path": path}}, "critic": {"roles": {"critic": path}}}
        there["reward"] = {"rewards": [{"name": "learned", "model": path}]}
        return there[kind], {2}, spoil(root / kind, draw)
    if kind in ("unfit", "huge"):
        number, all_rows = draw.choice(UNFIT if kind == "unfit" else HUGE), kind == "huge" or draw.random() < 0.5
        function.write_text(FUNCTION.replace("NUMBER", f"float('{number}')").replace("EACH", str(all_rows)))
        on_failure = draw.choice([None, -1.0])
        code = 1 if kind == "huge" else 2 if on_failure is None else 0
        return {"rewards": [reward | {"on_failure": on_failure}]}, {code}, ["unfit"] if code == 2 else []
    return {
        "temperature": ({"sampling": {"temperature": 1e-30}}, {1}, ["actor"]),
        "actor rate": ({"ppo": {"actor": rate}}, {1}, ["actor"]),
        "critic rate": ({"ppo": {"critic": rate}}, {1}, ["critic"]),
        "decay": ({"ppo": {"actor": {"learning_rate": 1.0, "warmup": 0, "weight_decay": 3e38}}}, {1}, ["actor"]),
        "kl": ({"ppo": {"algorithm": {"epochs": 1, "minibatches": 1, "kl_coef": 3e38}}}, {0, 1}, []),
    }[kind]


KINDS = ("actor", "critic", "reward", "unfit", "huge", "temperature", "actor rate", "critic rate", "decay", "kl")


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.proof("kills")
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_float32_cannot_bear(kind, tmp_path, settings, user, capsys):
    draw = random.Random(f"{SEED} {kind}")
    sections, codes, words = injection(draw, kind, tmp_path, user)
    loop = {"iterations": 6, "save_every": 2, "rollout_batch": 8}
    config = settings(name="run", run_dir=str(tmp_path), **{"ppo": loop} | sections)
    config["ppo"] |= loop
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    code, run = cli(["--config", str(tmp_path / "config.yaml")]), tmp_path / "run"
    output = capsys.readouterr()
    assert code in codes, (code, output)
    assert (run / "model").exists() == (code == 0)
    if code:
        (sentence,) = output.err.splitlines()
        assert all(word in sentence for word in words) and (code == 2 or "not finite" in sentence), sentence
    for file in [*run.glob("*.jsonl"), *run.glob("*.json")]:
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(line, parse_constant=refuse)
    for file in run.glob("*model/*.safetensors"):
        assert all(np.isfinite(tensor).all() for tensor in load_file(file).values())
    for record in read_metrics(run):
        counts = [record[name] for name in record if re.search(r"(/nonfinite|/skipped_updates|/failures)$", name)]
        assert None not in counts
        if kind == "unfit":
            assert record["rewards/unfit/failures"] > 0
    if any(record.get(f"{role}/skipped_updates") for record in read_metrics(run) for role in ("actor", "critic")):
        assert "skipped, because" in output.out
