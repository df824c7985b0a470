"""The tutorials: each row of a comparison is what both sides set, and what a page shows runs."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jrlhf import generate, train
from jrlhf.config import Config, load_config
from jrlhf.config.keys import paths_of
from jrlhf.config.load import make_config
from jrlhf.config.peers import PEERS as NAMES
from jrlhf.errors import UserError
from tests.jrlhf.conftest import questions, write_jsonl, write_model
from tests.support.tutorials import FOLDER, PEERS, commands, files, page, rows, settings

NOT_COMPARED = {  # what follows from other settings, or is a choice that there is not
    "trl": set(),
    "verl": {"actor_rollout_ref.rollout.name", "trainer.n_gpus_per_node"},
    "tunix": {"kv_cache_size", "training_config", "rollout_config"},
}
HERE = ["device={platform: cpu, simulated: 8}", "mesh={fsdp: 8}", "compute.dtype=float32"]


def setting(config: Config, key: str) -> Any:
    """A setting of a config by its dotted key, `name[0]` for an entry of a list."""
    value: Any = config
    for name, index in re.findall(r"(\w+)(?:\[(\d)\])?", key):
        value = config.sections[name] if value is config and name in config.sections else getattr(value, name)
        value = value[int(index)] if index else value
    return value


def written(value: str) -> str:
    """A value as Python writes it, where it is Python."""
    try:
        return ast.unparse(ast.parse(value, mode="eval"))
    except SyntaxError:
        return value


@pytest.mark.parametrize("peer", PEERS)
def test_each_row_of_a_comparison_is_what_both_sides_set(peer: str, tmp_path: Path):
    text = page(f"from-{peer}")
    (tmp_path / "gsm8k.yaml").write_text(files(text)["gsm8k.yaml"])
    config = load_config(str(tmp_path / "gsm8k.yaml"))
    theirs = {key: value for part in settings(text).values() for key, value in part.items()}
    compared = set()
    for left, right in rows(text):
        assert left and right
        for key, value in (entry.split("=", 1) for entry in left):
            assert value == "..." or written(theirs[key]) == written(value), key
            compared.add(key)
        for key, value in (entry.split(": ", 1) for entry in right):
            assert setting(config, key) == yaml.safe_load(value), key
    assert theirs.keys() - compared == NOT_COMPARED[peer]
    assert len(compared) >= 18


def test_names_of_the_tables_that_the_reader_of_configs_suggests_are_the_same():
    """A peer's key stands in the table with the key that "did you mean" suggests; all of TRL's have a suggestion."""
    checked = 0
    for peer in ("trl", "verl"):
        for left, right in rows(page(f"from-{peer}")):
            ours = [re.sub(r"\[\d\]", "", entry.split(":")[0]) for entry in right]
            for path in (entry.split("=")[0] for entry in left):
                key = path.rsplit(".", 1)[-1]
                assert peer != "trl" or key in NAMES or key in {name.rsplit(".", 1)[-1] for name in ours}, key
                if key in NAMES and "val_kwargs" not in path:
                    given = NAMES[key]
                    options = [option.split(", ")[0] for option in ([given] if isinstance(given, str) else given)]
                    same = any(name == option or name.endswith(f".{option}") for name in ours for option in options)
                    assert same or " " in options[0], (key, ours)
                    checked += 1
    assert checked >= 30


def test_fields_of_trls_other_configs_lead_to_the_settings_in_the_table():
    table = re.findall(r"^\| `(\w+)Config\.(\w+)` \| ([^|]+) \|", page("from-trl"), re.MULTILINE)
    assert len(table) >= 20
    for theirs, field, here in table:
        ours = re.findall("`([^`]+)`", here)
        assert ours and set(ours) <= set(paths_of(Config)), (theirs, field)
        section = {"SFT": "sft", "DPO": "dpo", "Reward": "reward_model", "PPO": "ppo", "Lora": "lora"}[theirs]
        if field != ours[0].rsplit(".", 1)[-1]:
            with pytest.raises(UserError, match=re.escape(ours[0])):
                make_config({"stages": [section] if section != "lora" else ["ppo"]}, {f"{section}.{field}": 1})


def test_every_tutorial_is_run():
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == sorted(
        [f"from-{peer}" for peer in PEERS] + ["chat-model", "own-algorithm", "reward-function"]
    )


def write(text: str, folder: Path) -> None:
    for name, content in files(text).items():
        (folder / name).write_text(content)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "peer, trained",
    [
        *(pytest.param(peer, False, marks=pytest.mark.full) for peer in PEERS),
        pytest.param("trl", True, marks=pytest.mark.proof("notebooks")),  # one is enough: they are the same program
    ],
)
def test_the_run_beside_a_peers_is_checked_by_its_dry_run(peer, trained, tmp_path: Path, monkeypatch, user, capsys):
    monkeypatch.chdir(tmp_path)
    text = page(f"from-{peer}")
    write(text, tmp_path)
    tiny = [f"model.path={user / 'actor'}", "grpo.iterations=1", "data.max_prompt=64", "data.max_response=8"]
    tiny += ["evaluation={prompts: 4, samples: 1}"]
    data = questions(48)
    if peer == "verl":
        data = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": row["question"]}],
                "reward_model": {"style": "rule", "ground_truth": row["answer"].split()[0]},
            }
            for row in data
        ]
        write_jsonl(tmp_path / "train.jsonl", data[:40])
        write_jsonl(tmp_path / "test.jsonl", data[40:])
        tiny += ["data.prompts.path=train.jsonl", "data.heldout.path=test.jsonl", "wandb=null"]
    else:
        write_jsonl(tmp_path / "gsm8k.jsonl", data)
        tiny += ["data.heldout_rows=4"]
    dry, trains = commands(text)
    assert train.cli([*dry[3:], *HERE, *tiny]) == 0, capsys.readouterr().err
    if trained:
        assert train.cli([*trains[3:], *HERE, *tiny]) == 0, capsys.readouterr().err
        record = json.loads((tmp_path / "runs/gsm8k/metrics.jsonl").read_text().splitlines()[0])
        assert record["rewards/correct/failures"] == record["rewards/brief/failures"] == 0


@pytest.mark.proof("notebooks")
@pytest.mark.usefixtures("quick_compilation")
def test_the_tutorial_on_algorithms_runs(tmp_path: Path, monkeypatch, capsys):
    """Every command, at a tiny size; the teacher is what an earlier command has trained."""
    monkeypatch.chdir(tmp_path)
    text = page("own-algorithm")
    write(text, tmp_path)
    tiny = ["sft.steps=2", "sft.batch=16", "evaluation={prompts: 8, samples: 1}", "grpo.iterations=1"]
    tiny += ["grpo.rollout_batch=64"]
    write_model(tmp_path / "chat", max_positions=512)
    chat = ["model.path=chat", "roles.judge.path=chat", "data.max_prompt=80"]
    for _, _, module, *words in commands(text):
        if module == "jrlhf.configs.questions":
            runpy.run_module(module, run_name="__main__")
            continue
        more = chat if "smollm2-grpo" in words else tiny[:2]
        assert train.cli([*words, *HERE, *tiny[2:], *more]) == 0, capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith("."))
    assert names == ["gkd", "median", "online", "raft", "revised", "steps", "student"]


@pytest.mark.proof("notebooks")
@pytest.mark.usefixtures("quick_compilation")
def test_the_tutorial_on_rewards_runs(tmp_path: Path, monkeypatch, capsys):
    """Every block and every command, at a tiny size."""
    monkeypatch.chdir(tmp_path)
    text = page("reward-function")
    write(text, tmp_path)
    tiny = {
        "base": ["sft.steps=2", "evaluation={prompts: 4, samples: 1}", "model.layers=1", "model.embed=32"],
        "speaks": [
            "grpo.iterations=1",
            "validation.every=null",
            "validation.k=1",
            "grpo.rollout_batch=64",
            "evaluation={prompts: 8, samples: 1}",
        ],
    }
    ran = 0
    for _, *words in commands(text):
        if words == ["signatures.py"]:
            subprocess.run([sys.executable, *words], check=True, timeout=60)
        elif words[1] == "jrlhf.train":
            name = "base" if "quickstart" in words else "speaks"
            assert train.cli([*words[2:], *HERE, *tiny[name]]) == 0, capsys.readouterr().err
        else:
            assert words[1] == "jrlhf.generate" and generate.cli(words[2:]) == 0
        ran += 1
    assert ran == 5
    assert len((tmp_path / "signatures.jsonl").read_text().splitlines()) > 1000
    tried = re.search(r"```python\n(from rewards import .*?)```", text, re.DOTALL)
    assert tried is not None
    shown = subprocess.run([sys.executable, "-c", tried[1]], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == tried[1].rsplit("# ", 1)[1].strip()


@pytest.mark.proof("notebooks")
@pytest.mark.usefixtures("quick_compilation")
def test_the_tutorial_on_a_chat_model_runs(tmp_path: Path, monkeypatch, user, capsys):
    """Every block and every command, with a tiny model in place of the one that the first command makes."""
    monkeypatch.chdir(tmp_path)
    text = page("chat-model")
    write(text, tmp_path)
    shutil.copytree(user / "actor", tmp_path / "smollm2")
    sizes = tmp_path / "smollm2/config.json"  # the tiny tokenizer writes more tokens
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"max_position_embeddings": 512}))
    tiny = ["grpo.iterations=1", "grpo.rollout_batch=64", "data.heldout_rows=8", "data.max_prompt=256"]
    tiny += ["evaluation={prompts: 8, samples: 1}"]
    download, *others = commands(text)
    assert download == ["python", "-m", "benchmarks.real_model", "smollm2"]
    ran = []
    for _, *words in others:
        if words[0].endswith(".py"):
            subprocess.run([sys.executable, *words], check=True, timeout=60)
        elif words[1] == "jrlhf.train":
            assert train.cli([*words[2:], *HERE, *tiny]) == 0, capsys.readouterr().err
        else:
            assert generate.cli([*words[2:], "--platform", "cpu"]) == 0, capsys.readouterr().err
        if words == ["messages.py"]:
            rows = (tmp_path / "messages.jsonl").read_text().splitlines(keepends=True)
            (tmp_path / "some.jsonl").write_text("".join(rows[:16]))  # `head`
        ran.append(words[0] if words[0] != "-m" else words[1])
    assert ran == ["messages.py", "jrlhf.generate", "score.py", "jrlhf.train", "jrlhf.train", "jrlhf.generate"]
    assert len(rows) == 1500
