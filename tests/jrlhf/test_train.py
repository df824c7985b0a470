"""Whole runs at a tiny size, and the command line's answers to good and bad input."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml

import jrlhf.__main__
from jrlhf.algorithms.registry import stage_graph
from jrlhf.config import config_yaml, load_config
from jrlhf.export import cli as export
from jrlhf.generate import load
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import read_metrics
from jrlhf.stages import setup
from jrlhf.train import cli
from tests.support.runs import Training, digest, stage_of

TINY = str(Path(__file__).with_name("tiny.yaml"))
SUMS = {  # PPO on the sums of two digits, on one device
    "name": "sums",
    "device": {"platform": "cpu", "simulated": 1},
    "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    "model": {"vocab_size": 14, "embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32}
    | {"max_positions": 16},
    "data": {"source": "arithmetic", "max_prompt": 6, "max_response": 4, "heldout_rows": 8}
    | {"terms": 2, "digits": 1, "problems": 60},
    # So few steps teach no sums: rewards that differ need another rule.
    "rewards": [{"name": "low", "function": "format_regex", "options": {"pattern": "[0-4].*"}}],
    "stages": ["sft", "ppo"],
    "sampling": {"temperature": 0.9, "top_k": 8, "min_new_tokens": 1},
    "sft": {"steps": 3, "batch": 8, "warmup": 1, "eval_every": 2, "save_every": 3},
    "ppo": {"iterations": 3, "rollout_batch": 16, "save_every": 3, "algorithm": {"epochs": 2, "minibatches": 2}},
    "evaluation": {"prompts": 8},
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    """The directory of a run that the command finished on one device, in a process of its own."""
    directory = tmp_path_factory.mktemp("sums")
    (directory / "sums.yaml").write_text(yaml.safe_dump(SUMS | {"run_dir": str(directory)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # its programs run shorter than they compile
        Training("--config", directory / "sums.yaml", log=directory / "log.txt").wait()
    return directory / "sums"


def test_a_run_leaves_what_is_promised(sums):
    files = ["config.yaml", "before.json", "metrics.jsonl", "samples.jsonl", "report.html", "tokenizer.json"]
    for name in [*files, "model/README.md", "model/progress.png"]:
        assert (sums / name).stat().st_size > 0, name
    assert list(sums.glob("tensorboard/*/events.*"))
    assert json.loads((sums / "model" / "prompting.json").read_text())["chat"] is False
    assert {record["stage"] for record in read_metrics(sums)} == {"sft", "ppo"}
    assert len([record for record in read_jsonl(sums / "samples.jsonl") if record["stage"] == "evaluation"]) == 8


def test_the_console_names_the_calls_whose_programs_compile(sums):
    """From the first program on, each once, with its place among the calls of a step."""
    log = (sums.parent / "log.txt").read_text()
    announcements = re.findall(r"^(\w+): compiling (\S+) \((\d+) of (\d+)\)$", log, re.MULTILINE)
    config = load_config(str(sums / "config.yaml"))
    for stage, calls in {
        "sft": ["sft.update", "sft.evaluate"],
        "ppo": [call.name for call in stage_graph(config, "ppo")],
    }.items():
        own = [(call, int(number), int(count)) for name, call, number, count in announcements if name == stage]
        assert len(own) == len(set(own)) and {count for *_, count in own} == {len(calls)}
        assert all(calls[number - 1] == call for call, number, _ in own)
        assert {call for call in calls if "update" in call or call == "sft.evaluate"} <= {call for call, *_ in own}
        assert log.index(f"{stage}: compiling") < log.index(f"\n{stage} 1/3")


def test_the_invariants_of_training_hold(sums):
    """Step 0 has no KL, and all ratios are 1; a score is conserved on its way into rewards; the loop settles."""
    first, *_ = records = stage_of(sums, "ppo")
    assert first["objective/kl"] == 0.0 and first["actor/initial_ratio_gap"] < 1e-5
    assert first["rollout/logprob_gap_max"] < 1e-4 and first["critic/score/mean"] > 0
    for record in records:
        expected = record["critic/score/mean"] - record["objective/kl_coef"] * record["objective/kl"]
        assert math.isclose(record["critic/rewards/mean"], expected, rel_tol=1e-4, abs_tol=1e-5)
    for stage in ("sft", "ppo"):
        compiled = [record["perf/compilations"] for record in stage_of(sums, stage)]
        assert compiled[0] > 0 and set(compiled[2:]) == {0}, (stage, compiled)


def test_the_export_of_the_last_checkpoint_is_the_model_that_the_run_left(sums, tmp_path, capsys):
    assert export([str(sums), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/model is the policy of ppo after step 3 of 3\n"
    assert digest(tmp_path / "model") == digest(sums / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_the_model_is_sampled_as_in_its_run_wherever_it_is(sums, tmp_path):
    alone = shutil.copytree(sums / "model", tmp_path / "alone")
    there, *others = (load(str(place), {}, platform="cpu").sampling for place in (sums, sums / "model", alone))
    names = "temperature", "top_k", "top_p", "min_new_tokens", "max_new_tokens"
    assert tuple(getattr(there, name) for name in names) == (0.9, 8, None, 1, 4)
    assert others == [there, there]


def test_every_key_of_the_summary_has_a_meaning(sums):
    """In docs/metrics.md. Keys below these are names of the user."""

    def keys(section: dict) -> set[str]:
        inner = [x for key, x in section.items() if isinstance(x, dict) and key not in NAMED]
        return set(section).union(*map(keys, inner))

    documented = (Path(__file__).parents[2] / "docs/metrics.md").read_text().split("## The summary")[1]
    present = keys(json.loads((sums / "summary.json").read_text()))
    assert {"held_out", "phases", "score_standard_error", "finished"} <= present
    assert [key for key in present if f"`{key}`" not in documented] == []


NAMED = ("items", "sources", "failures", "steps", "phases")


def test_a_run_that_has_finished_says_so_and_stays_as_it_is(sums, tmp_path):
    """With the times of its stages, which a process that only restores them does not know."""
    before, phases = digest(sums), json.loads((sums / "summary.json").read_text())["phases"]
    output = Training("--config", sums / "config.yaml", "--resume", log=tmp_path / "log").wait()
    assert f"{sums} has finished: nothing is left to do" in output and "to talk to it" in output
    assert "held-out prompts" not in output and digest(sums) | {".lock": ""} == before | {".lock": ""}
    assert phases["sft"] > 0 and phases["ppo"] > 0


def test_an_interrupt_before_the_run_begins_is_one_sentence(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "load_task", interrupted)
    for more in ([], ["--resume=auto"]):  # there is no run, so it begins one
        assert cli(["--config", TINY, f"run_dir={tmp_path}", *more]) == 130
        assert capsys.readouterr().err == "interrupted\n" and not list(tmp_path.iterdir())


@pytest.fixture
def eight(tmp_path) -> list[str]:
    """Arguments of the sums on the eight devices of this process, in `tmp_path/runs`."""
    sums = SUMS | {"device": {"platform": "cpu", "simulated": 8}, "mesh": {"data": 1, "fsdp": 4, "tensor": 2}}
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(sums | {"run_dir": str(tmp_path / "runs")}))
    return ["--config", str(tmp_path / "sums.yaml")]


def test_a_dry_run_prints_config_memory_and_plan_and_writes_nothing(eight, tmp_path, capsys):
    assert cli([*eight, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "embed: 16" in out and "actor.generate" in out and "layout generate" in out and "critic" in out
    assert out.index("actor.generate") < out.index("embed: 16") and "rope_theta" not in out
    assert cli([*eight, "--dry-run", "--all", "--seed=5"]) == 0
    out = capsys.readouterr().out
    assert "rope_theta" in out and "seed: 5" in out
    assert not (tmp_path / "runs").exists()


BAD = [
    ("sft.lerning_rate=1", "did you mean sft.learning_rate"),
    ("device.simulated=5 mesh.fsdp=5 mesh.tensor=1", "restart the process"),
    ("--resume", "to resume: start a new one"),
    ("run_dir=/proc/none", "cannot be written"),
    ("--config quikstart", "did you mean quickstart"),
    ("--all", "--all has no effect without --dry-run: leave it out"),
    ("--resume --accept-rewards --dry-run", "--resume has no effect with --dry-run: leave it out"),
    ("--accept-rewards --dry-run", "--accept-rewards has no effect without --resume: leave it out"),
]


def test_bad_input_is_one_sentence_and_exit_code_2(eight, tmp_path, capsys):
    for arguments, message in BAD:
        assert cli([*eight, *arguments.split()]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1, (arguments, error)
        assert not (tmp_path / "runs").exists()


def test_a_resume_of_a_run_with_another_config_is_refused_before_data_is_read(eight, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(setup, "load_task", None)
    (tmp_path / "runs" / "sums").mkdir(parents=True)
    (tmp_path / "runs" / "sums" / "config.yaml").write_text(config_yaml(load_config(eight[1])))
    for resume in ("--resume", "--resume=auto"):
        for change in ("compute.score_rows=4 rollout.chunk=2", "seed=9"):
            assert cli([*eight, resume, *change.split()]) == 2
            output = capsys.readouterr()
            assert f"{change.split('=')[0]}: " in output.err and "holds a run with another config" in output.err
            assert "resume it with its own config" in output.err and "reading the data" not in output.out


def test_a_dry_run_is_done_if_its_reader_leaves(eight, monkeypatch):
    def stopped(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr("jrlhf.planning.dryrun.describe", stopped)
    monkeypatch.setattr("jrlhf.train.main", stopped)
    assert cli([*eight, "--dry-run"]) == 0
    with pytest.raises(BrokenPipeError):
        cli(eight)


MISTYPED = {
    "train": "--confg quickstart",
    "plan": "--clustr 8xh100",
    "generate": "--modl=runs/mine",
    "export": "--psh me/mine",
    "report": "--hlp",
    "doctor": "--jsn",
    "init": "--rewrd mine.py:f",
}


def test_one_command_leads_to_all(eight, capsys):
    with pytest.raises(SystemExit, match="2"):
        jrlhf.__main__.cli(["train", *eight, "--seed", "1"])
    assert "--seed is no option; a setting is written seed=VALUE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli(["--config", "quickstart", "--dryrun"])
    assert "--dryrun is no option, did you mean --dry-run?" in capsys.readouterr().err
    for command, words in MISTYPED.items():  # before what is missing
        with pytest.raises(SystemExit, match="2"):
            jrlhf.__main__.cli([command, *words.split()])
        error = capsys.readouterr().err
        assert f"{words.split()[0]} is no option, did you mean --" in error and "required" not in error, error
    with pytest.raises(SystemExit, match="2"):
        cli(["quickstart", "seed=1"])
    assert "quickstart is no setting: did you mean --config quickstart?" in capsys.readouterr().err
    for word, choices in (("--resume=maybe", "--resume or --resume=auto"), ("--dry-run=yes", "--dry-run")):
        with pytest.raises(SystemExit, match="2"):
            cli(["--config", "quickstart", word])
        assert f"{word} is no option: write {choices}\n" in capsys.readouterr().err
    for name in jrlhf.__main__.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            jrlhf.__main__.cli([name, "--help"])
        assert "usage: " in capsys.readouterr().out
    assert jrlhf.__main__.cli(["--version"]) == 0
    assert capsys.readouterr().out == f"jrlhf {jrlhf.__version__}\n"
    assert jrlhf.__main__.cli(["--help"]) == 0 and "jrlhf train" in capsys.readouterr().out
    assert jrlhf.__main__.cli(["trian"]) == 2 and "error: trian is no command" in capsys.readouterr().err
