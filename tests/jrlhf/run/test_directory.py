"""Run directories: nothing of a run is ever overwritten, and no file is ever half written."""

import datetime
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import jrlhf
from jrlhf.config import Config, build, config_yaml, load_config
from jrlhf.data.chat import render_chat
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.errors import UserError
from jrlhf.planning.resolve import resolve
from jrlhf.run import console, directory
from jrlhf.run.directory import check_directory, first_day, open_run
from jrlhf.run.files import append_jsonl, cache_directory, read_jsonl, seal, unsealed, write_atomic
from jrlhf.run.resume import changes, saved_tile
from jrlhf.stages import setup
from jrlhf.stages.setup import open_context

QWEN = load_tokenizer(Path(__file__).parents[1] / "tokenizers" / "qwen")


@pytest.fixture
def make(tmp_path):
    source = tmp_path / "given.yaml"
    source.write_text("name: first\n")
    return lambda *overrides: load_config(str(source), [f"run_dir={tmp_path / 'runs'}", *overrides])


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def refused(config, **options) -> str:
    with pytest.raises(UserError) as caught:
        open_run(config, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_fresh_run_holds_its_config_and_its_environment(make, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train", "a\n# # 8 cpu device(s), mesh {}, 2 process(es)\rb"])
    with open_run(make(), notes=["4 cpu devices"]) as run:
        assert run.path == tmp_path / "runs" / "first"
        assert load_config(str(run.path / "config.yaml")) == make()
        environment = (run.path / "environment.txt").read_text()
    assert (
        f"\n# jrlhf {jrlhf.__version__}, python {sys.version.split()[0]} on " in environment
        and "\njax==" in environment
    )
    assert "\n# 4 cpu devices\n" in environment
    assert "\n# command: train a # # 8 cpu device(s), mesh {}, 2 process(es) b\n" in environment
    if (Path(__file__).parents[3] / ".git").exists():
        assert re.search(r"\n# source [0-9a-f]{7}", environment)


def test_the_same_run_needs_resume_and_resume_needs_a_run(make, tmp_path):
    path = tmp_path / "runs" / "first"
    assert refused(make(), resume=True) == (
        f"there is no run in {path} to resume: start a new one, or check name= and run_dir="
    )
    assert not path.parent.exists()
    open_run(make()).close()
    assert refused(make()) == (
        f"{path} already holds this run: resume it (--resume, resume=True in Python), give another name=, or delete it"
    )
    open_run(make(), resume=True).close()
    (tmp_path / "elsewhere").mkdir()
    path.rename(tmp_path / "elsewhere" / "second")  # a moved run resumes
    open_run(make("name=second", f"run_dir={tmp_path / 'elsewhere'}", "plan=split"), resume=True).close()


def test_what_a_new_run_leaves_if_it_never_began_is_what_was_there(make, tmp_path):
    deep = f"run_dir={tmp_path / 'a' / 'b'}"
    other, own = tmp_path / "runs" / "other", tmp_path / "runs" / "first"
    with open_run(make(deep)) as run:
        (run.path / "tensorboard").mkdir()
        run.discard()
    assert not (tmp_path / "a").exists()
    other.mkdir(parents=True)
    own.mkdir()  # the user's, and empty
    with open_run(make()) as run:
        assert run.new
        inner = open_run(make(f"run_dir={own}"))  # in a folder of the first one
        run.discard()
        assert (inner.path / "config.yaml").exists() and not (own / "config.yaml").exists()
        inner.discard()
        inner.close()
    assert other.exists() and own.exists() and not list(own.iterdir())
    began = []
    with open_run(make()) as run:
        run.kept = lambda: began.append(run.path)
        run.begin()
        run.begin()
        assert not run.new and began == [own]
    with open_run(make(), resume=True) as run:
        assert not run.new


def test_another_config_is_refused_with_its_differences_and_nothing_changes(make, tmp_path):
    with open_run(make()) as run:
        run.append("samples.jsonl", [{"stage": "sft", "step": 1, "response": "x"}])
    before = contents(tmp_path / "runs")
    assert refused(make("seed=7", "sft.steps=9")) == (
        f"{run.path} holds a run with another config (seed: 0 there, 7 here; sft.steps: 500 there, 9 here): "
        "give this run another name=, or delete it"
    )
    assert refused(make("seed=7"), resume=True).endswith("/config.yaml, or delete it")
    keys = "seed sft.steps sft.batch model.layers sampling.top_k data.max_prompt".split()
    many = [f"{key}=3" for key in keys]
    assert "; " in refused(make(*many)) and "and 1 more" in refused(make(*many))
    assert contents(tmp_path / "runs") == before
    write_atomic(
        run.path / "config.yaml", config_yaml(make()).replace("\nseed: 0\n", "\nsede: 0\n")
    )  # of another version
    assert "(seed: absent there, 0 here; sede: 0 there, absent here)" in refused(make(), resume=True)


def test_a_resume_with_score_rows_auto_has_the_tiles_of_the_start(make, tmp_path):
    file = tmp_path / "config.yaml"
    assert saved_tile(file) is None
    for began, rows in (("16", 16), ("null", None), ("auto", None)):
        saved = config_yaml(make(f"compute.score_rows={began}"))
        file.write_text(saved)
        assert saved_tile(file) == rows
        assert changes("run", saved, make("compute.score_rows=auto")) == ([], "")
        refusals, _ = changes("run", saved, make("compute.score_rows=8"))
        assert refusals == [f"compute.score_rows: {began} there, 8 here"]


def test_a_run_goes_on_with_settings_that_do_not_define_its_results(make):
    open_run(make()).close()
    with open_run(make("sleep.actor=host", "ppo.save_every=3", "ppo.iterations=50"), resume=True) as run:
        line, lines = "with sleep.actor=host (was device), ppo.iterations=50 (was 40), ppo.save_every=3 (was 10)", []
        run.write("tokenizer.json", "{}")
        assert (
            load_config(str(run.path / "config.yaml")).rl.iterations == 40
            and not (run.path / "tokenizer.json").exists()
        )
        run.begin(lines.append)
        assert lines == [f"going on {line}"] and (run.path / "tokenizer.json").read_text() == "{}"
        assert f"\n# goes on {line}\n" in (run.path / "environment.txt").read_text()
        assert load_config(str(run.path / "config.yaml")).rl.iterations == 50
        run.begin(lines.append)
        assert len(lines) == 1
    devices = "# # 8 cpu device(s), mesh {'data': 1}, 2 process(es), plan split"
    (run.path / "environment.txt").write_text(f"# 2026-11-27T00:00:00+00:00\n{devices}\n")
    with open_run(make("ppo.iterations=50"), resume=True, notes=[devices[2:].replace(", 2 process(es)", "")]) as run:
        run.begin(lines.append)
        assert lines[1:].pop().endswith("in 1 process(es) (was 2)")
    with open_run(make("ppo.iterations=50"), resume=True) as run:
        assert not run.changes
    changed = ("ppo.iterations=50", "mesh.tensor=2", "ppo.algorithm.micro_batches=2", "validation.every=5")
    with open_run(make(*changed), resume=True) as run:
        (line,) = run.changes
        assert "mesh.tensor=2 (was 1)" in line and line.endswith("; results are the same up to rounding")
        run.begin()
    with open_run(make(*changed), resume=True) as run:
        assert run.changes == []
    assert "already holds this run" in refused(make(*changed, "deadline=5"))
    changed += ("deadline=5", "ppo.scores.clip=3")
    assert "(ppo.scores.clip: null there, 3.0 here)" in refused(make(*changed), resume=True)


def test_a_run_goes_on_in_other_pipeline_stages(make):
    staged, whole = (make("stages=[sft]", f"sft.pipeline.stages={stages}") for stages in (2, "null"))
    rounded = "; results are the same up to rounding"
    for before, now, was in ((whole, staged, "2 (was null)"), (staged, whole, "null (was 2)")):
        assert changes("run", config_yaml(before), now) == ([], f"with sft.pipeline.stages={was}{rounded}")


def test_a_run_goes_on_with_other_processes_only_if_its_logical_workers_are_the_same(make):
    """Their default is the number of processes, so without a number they would be others."""
    start = "ppo.asynchronous={staleness: 2, uncorrected: true}", "fleet.workers=2"
    saved = config_yaml(make(*start))
    key = "ppo.asynchronous.logical_workers"
    assert changes("run", saved, make(start[0], "fleet.workers=1")) == (
        [f"{key}: 2 there, 1 here"],
        "with fleet.workers=1 (was 2)",
    )
    assert changes("run", saved, make(start[0])) == ([f"{key}: 2 there, 1 here"], "with fleet.workers=null (was 2)")
    for workers in (1, "null"):
        more = f"fleet.workers={workers}", f"{key}=2"
        assert changes("run", saved, make(start[0], *more)) == ([], f"with fleet.workers={workers} (was 2)")
    assert changes("run", config_yaml(make(start[0])), make(start[0], "fleet.workers=1"))[0] == []


def test_an_asynchronous_run_goes_on_with_the_slots_and_chunks_that_its_schedule_follows_from(make):
    other = "rollout.slots=32", "rollout.chunk=8"
    refusals, line = changes("run", config_yaml(make()), make(*other))
    assert refusals == [] and line.endswith("results are the same up to rounding")
    start = "ppo.asynchronous={staleness: 2, uncorrected: true}"
    refusals, line = changes("run", config_yaml(make(start)), make(start, *other))
    assert {text.partition(":")[0] for text in refusals} == {"rollout.chunk", "rollout.slots"} and not line


def test_a_run_that_cannot_become_so_long_says_why(make):
    cases = (
        (
            "[sft,ppo]",
            "ppo.iterations",
            40,
            2,
            "a run of 40 (ppo.actor.schedule=cosine, ppo.actor.final=1, ppo.actor.warmup=10): resume it with",
        ),
        ("[sft,ppo]", "ppo.iterations", 40, 19, "{path} has done 20 already, set it to 20 or more"),
        (
            "[sft]",
            "sft.steps",
            500,
            600,
            "those of a run of 500 (sft.schedule=cosine, sft.final=0.1, sft.warmup=20): resume it",
        ),
        ("[sft,ppo]", "sft.steps", 500, 600, "(sft.steps: 500 there, 600 here)"),
    )
    for number, (stages, key, there, here, message) in enumerate(cases):
        overrides = [f"name=run{number}", f"stages={stages}"]
        with open_run(make(*overrides, f"{key}={there}")) as run:
            (run.path / "checkpoints" / "ppo" / ("20" if here > 2 else "1")).mkdir(parents=True)
        before = (run.path / "config.yaml").read_bytes()
        assert message.format(path=run.path) in refused(make(*overrides, f"{key}={here}"), resume=True)
        assert (run.path / "config.yaml").read_bytes() == before


def test_a_directory_that_is_no_run_is_left_alone_and_one_that_a_crash_left_is_used(make, tmp_path):
    path = tmp_path / "runs" / "first"
    path.mkdir(parents=True)
    for name in ("thesis.tex", "thesis.tmp"):
        (path / name).write_text("years of work")
        before = contents(path)
        assert refused(make()) == (
            f"{path} exists and is not a run (it has no config.yaml): choose another name= or run_dir="
        )
        assert contents(path) == before
        (path / name).unlink()
    (path / ".lock").touch()
    (path / ".config.yaml.123.tmp").write_text("name: fi")
    open_run(make()).close()
    assert load_config(str(path / "config.yaml")) == make()
    before = contents(path)
    (path / "reward_model").mkdir()
    (path / "reward_model" / ".config.json.123.tmp").touch()  # the next export would refuse to delete it
    moved = path / ".model-abcd1234.partial" / "previous"  # a kill between the two renames of an export
    moved.mkdir(parents=True)
    (moved / "config.json").write_text("{}")
    open_run(make(), resume=True).close()
    assert (path / "model" / "config.json").read_text() == "{}"
    shutil.rmtree(path / "model")
    assert contents(path) == before and not list(path.glob(".*-*"))


def test_a_directory_that_cannot_be_written_is_named(make, tmp_path):
    (tmp_path / "file").touch()
    message = refused(make(f"run_dir={tmp_path / 'file'}"))
    assert message == (
        f"run directory {tmp_path}/file/first cannot be written (Not a directory): choose another run_dir="
    )
    with pytest.raises(UserError, match="^run_dir= is empty: name a directory; the current one is run_dir=.$"):
        check_directory(make("run_dir="))
    assert refused(make("run_dir=/proc/nowhere")).startswith("run directory /proc/nowhere/first cannot be written (")


def test_two_openers_do_not_share_a_run_and_a_killed_one_frees_it(make, tmp_path):
    with open_run(make()):
        assert f"is in use by process {os.getpid()}: wait until it ends" in refused(make(), resume=True)
        assert "is in use by" in refused(make())
    config = tmp_path / "killed.yaml"
    config.write_text(config_yaml(make()))
    program = (
        "import sys, time; from jrlhf.config import load_config; from jrlhf.run.directory import open_run; "
        "run = open_run(load_config(sys.argv[1]), resume=True); print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(config)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        assert f"in use by process {process.pid}" in refused(make(), resume=True)
        process.kill()
    open_run(make(), resume=True).close()


def test_write_atomic_replaces_whole_files_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, "old")
    write_atomic(path, b"\x00new")
    assert path.read_bytes() == b"\x00new"

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "newer")
    assert path.read_bytes() == b"\x00new" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("text", ['{"a": "ü"}', "a: 1\n# b\n"])
def test_a_sealed_text_is_what_was_written_to_the_bit(text, tmp_path):
    path = tmp_path / "file"
    assert unsealed(path) is None
    path.write_text(text, encoding="utf-8")
    assert unsealed(path) is None
    path.write_text(seal(text), encoding="utf-8")
    assert unsealed(path) == text
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert unsealed(path) is None, bytes(damaged)


def test_json_lines_survive_a_torn_end_and_any_text(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert list(read_jsonl(path)) == []
    records = [{"a": 1.5, "text": "\x1b[31m\n\u2028ü\ud800"}, {"b": [None, True]}]
    append_jsonl(path, records[:1])
    append_jsonl(path, records[1:])
    assert list(read_jsonl(path)) == records and path.read_bytes().count(b"\n") == 2
    lines = read_jsonl(path)
    assert next(lines) == records[0]
    with open(path, "ab") as file:
        file.write(b'{"a": 1')
    assert list(lines) == records[1:]  # a run that is at work appends
    assert list(read_jsonl(path)) == records
    with open(path, "ab") as file:
        file.write(b"\n" + json.dumps({"c": 3}).encode() + b"\n")
    with pytest.raises(UserError, match=r"lines.jsonl line 3 is not a JSON object"):
        list(read_jsonl(path))
    inner = {"a": [1.0, {"b": float("-inf")}], "c": float("nan")}
    append_jsonl(tmp_path / "numbers.jsonl", [inner])
    named = {"a": [1.0, {"b": None}], "c": None, "nonfinite": {"a.1.b": "-inf", "c": "nan"}}
    assert list(read_jsonl(tmp_path / "numbers.jsonl")) == [named]


def test_a_full_disk_at_the_start_leaves_no_lock(make, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "pwrite", full)
        assert "cannot be written (No space left on device)" in refused(make())
    open_run(make()).close()


def test_a_resume_writes_the_day_of_the_start_into_prompts(settings, tmp_path, monkeypatch):
    config = build(Config, settings(run_dir=str(tmp_path)))
    start, later = (datetime.datetime(2024, 7, day, 23, 30, tzinfo=datetime.UTC) for day in (26, 28))
    with open_run(config, now=start) as run:
        run.begin()
    with open_run(config, resume=True, now=later) as run:
        run.begin()
    texts, dated = [], replace(QWEN, chat_template="{{ strftime_now('%d %b %Y') }}")

    def load(*_):
        texts.append(render_chat(dated, ({"role": "user", "content": "Which day is it?"},)))
        raise UserError("far enough")

    monkeypatch.setattr(setup, "load_task", load)
    with pytest.raises(UserError, match="far enough"), open_context(config, resolve, resume=True):
        pass
    assert texts == ["26 Jul 2024"] and render_chat(dated, ({"role": "user", "content": ""},)) != texts[0]
    assert first_day(run.path, later) == "2024-07-26"
    (run.path / "environment.txt").write_bytes(b"\xff")
    assert first_day(run.path, later) == "2024-07-28"


def test_a_second_start_is_refused_before_the_data_is_read(settings, tmp_path, monkeypatch):
    config = build(Config, settings(run_dir=str(tmp_path)))
    open_run(config).close()
    monkeypatch.setattr(setup, "load_task", None)
    with pytest.raises(UserError, match="already holds this run"), open_context(config, resolve, resume=False):
        pass


def test_a_run_goes_on_with_a_reward_function_whose_file_was_moved(make):
    saved = config_yaml(make("rewards=[{function: /old/rewards.py:score}]"))
    line = "with rewards[0].function=/new/rewards.py:score (was /old/rewards.py:score)"
    assert changes("run", saved, make("rewards=[{function: /new/rewards.py:score}]")) == ([], line)
    for other in ("/old/others.py:score", "/old/rewards.py:other", "rewards:score"):
        refusals, _ = changes("run", saved, make(f"rewards=[{{function: {other}}}]"))
        assert f"rewards[0].function: /old/rewards.py:score there, {other} here" in refusals


def test_a_closed_terminal_does_not_stop_what_the_mirror_tells(make, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    def mirrored(*_, tell, **__):
        tell("a sentence")
        raise UserError("far enough")

    dropped = []
    monkeypatch.setattr(console, "drop_closed_outputs", lambda: dropped.append(1) or True)
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(setup, "_mirrored", mirrored)
    with pytest.raises(UserError, match="far enough"), open_context(make(), resolve, resume=False):
        pass
    assert dropped


def test_an_empty_cache_variable_counts_as_none(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    for value in ("", "/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == Path(value or "/home/somebody/.cache") / "jrlhf"
