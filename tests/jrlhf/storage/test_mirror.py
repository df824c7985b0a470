"""Runs at an address, in fsspec's store in memory: its state after every write, and what a resume makes of it."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jrlhf.config import Config, config_yaml, load_config
from jrlhf.config.places import StorageConfig
from jrlhf.errors import RunFailure, UserError
from jrlhf.planning.dryrun import describe
from jrlhf.run.directory import open_run, run_path
from jrlhf.storage import mirror as module
from jrlhf.storage import store as store_module
from jrlhf.storage.claim import Claim
from jrlhf.storage.mirror import Mirror, mirrored
from jrlhf.storage.store import Store, StoreError
from jrlhf.train import main
from tests.support.runs import digest, timeless

CONFIG = {
    "device": "{platform: cpu, simulated: 8}",
    "mesh": "{data: 1, fsdp: 8, tensor: 1}",
    "model": "{vocab_size: 14, embed: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, mlp: 32, max_positions: 16}",
    "data": "{source: arithmetic, max_prompt: 6, max_response: 4, heldout_rows: 8, terms: 2, digits: 1, problems: 60}",
    "stages": "[sft]",
    "sft": "{steps: 4, batch: 8, warmup: 1, save_every: 1}",
    "evaluation": "{prompts: 8}",
}


@pytest.fixture
def config(tmp_path, memory) -> Config:
    path = tmp_path / "given.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in CONFIG.items()))
    overrides = [f"storage.scratch={tmp_path / 'scratch'}", "storage.lease=0.2", "storage.patience=0.01"]
    return load_config(str(path), [*overrides, "run_dir=memory://bucket/runs", "name=run"])


@contextmanager
def copied(config: Config, *, resume: bool, tell: Callable[[str], None]) -> Iterator[Mirror]:
    with mirrored(config, resume=resume, tell=tell) as mirror:
        assert mirror is not None
        yield mirror


def objects(memory: Any) -> dict[str, bytes]:
    return {name.removeprefix("/bucket/runs/run/"): memory.cat_file(name) for name in memory.find("/bucket")}


def put(memory: Any, contents: dict[str, bytes]) -> None:
    memory.store.clear()
    for name, data in contents.items():
        memory.pipe_file(f"/bucket/runs/run/{name}", data)


def step(path: Path, number: int, *, keep: int = 2) -> None:
    """What a run leaves after an iteration with a checkpoint: two stages, records, files that Orbax would write."""
    for stage in ("one", "two"):
        folder = path / "checkpoints" / stage
        (folder / str(number) / "d").mkdir(parents=True)
        for name in ("meta", "d/array"):
            (folder / str(number) / name).write_text(f"{stage} {number} {name}")
        shutil.rmtree(folder / str(number - keep), ignore_errors=True)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(f"{number}\n")


@pytest.fixture
def states(memory, monkeypatch) -> list[dict[str, bytes]]:
    """What the store holds after each write; copies are made only where a test asks for them."""
    states = list[dict[str, bytes]]()
    for name in ("write", "upload", "delete"):
        method = getattr(Store, name)

        def recorded(self: Store, *arguments: Any, method: Any = method, **options: Any) -> Any:
            result = method(self, *arguments, **options)
            states.append(objects(memory))
            return result

        monkeypatch.setattr(Store, name, recorded)
    monkeypatch.setattr(module, "_LOOK", 1e6)
    return states


def test_a_store_that_lost_its_run_after_any_write_holds_one_that_can_be_resumed(memory, config, monkeypatch, states):
    """Every state of the store during four checkpoints, one of them resumed, is opened as a resume would."""
    for first in (1, 3):
        mirror = Mirror(config, print)
        mirror.open(first > 1)
        mirror.begin()
        with open_run(config, resume=first > 1) as run:
            mirror.start(run)
            for number in (first, first + 1):
                step(run.path, number)
                mirror._checkpoints()
            (run.path / "model").mkdir(exist_ok=True)
            (run.path / "model" / "config.json").write_text("{}")
        mirror.close()
    monkeypatch.undo()
    assert len(states) > 40 and "model/config.json" in states[-1]
    monkeypatch.setattr(module, "refuse_other", lambda *_: None)  # most of a resume's time is YAML
    newest = 0
    for state in states:
        put(memory, {name: data for name, data in state.items() if name != ".mirror/claim.json"})
        if "config.yaml" not in state:
            continue
        shutil.rmtree(run_path(config), ignore_errors=True)
        mirror = Mirror(config, pytest.fail)
        mirror.open(True)
        path, steps = run_path(config), dict[str, int]()
        for stage in (path / "checkpoints").glob("*"):
            (only,) = stage.iterdir()
            steps[stage.name] = int(only.name)
            names = {file.relative_to(only).as_posix(): file.read_text() for file in only.rglob("*") if file.is_file()}
            assert names == {name: f"{stage.name} {only.name} {name}" for name in ("meta", "d/array")}
        if steps:
            lines = (path / "metrics.jsonl").read_text().splitlines()
            assert lines[: max(steps.values())] == [str(number + 1) for number in range(max(steps.values()))]
        assert sum(steps.values()) >= newest  # what was whole in the store stays so
        newest = sum(steps.values())
        mirror.close()
    assert newest == 8
    left = {name.split("/")[2] for name in states[-1] if name.startswith("checkpoints/")}
    assert left == {"3", "4"} and ".mirror/claim.json" not in states[-1]


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_run_at_an_address_and_its_resume_elsewhere_are_those_of_a_directory(memory, config, tmp_path, capsys):
    main(load_config(str(tmp_path / "given.yaml"), [f"run_dir={tmp_path}", "name=local"]))
    assert f"model: {tmp_path}/local/model, in" in capsys.readouterr().out
    main(config, resume="auto")  # there is none, so it begins one
    assert capsys.readouterr().out.count("model: memory://bucket/runs/run/model, in") == 1
    stored, local = objects(memory), tmp_path / "local"
    assert ".mirror/claim.json" not in stored and ".lock" not in stored
    assert timeless(run_path(config)) == timeless(local) and digest(run_path(config) / "model") == digest(
        local / "model"
    )
    for name in ("model/model.safetensors", "summary.json", "report.html", "metrics.jsonl", "config.yaml"):
        assert stored[name] == (run_path(config) / name).read_bytes()
    # Killed after its third checkpoint; a resume on another machine.
    late = "checkpoints/sft/4/", ".mirror/checkpoints/sft/4.json", "model/", "summary.json", "tensorboard/"
    put(memory, {name: data for name, data in stored.items() if not name.startswith(late)})
    elsewhere = [f"storage.scratch={tmp_path / 'elsewhere'}", "run_dir=memory://bucket/runs", "name=run"]
    moved = load_config(str(tmp_path / "given.yaml"), elsewhere)
    main(moved, resume="auto")
    assert timeless(run_path(moved)) == timeless(local)
    assert objects(memory)["model/model.safetensors"] == stored["model/model.safetensors"]
    markers = {name for name in objects(memory) if name.startswith(".mirror/checkpoints")}
    assert markers == {f".mirror/checkpoints/sft/{step}.json" for step in (3, 4)}


@pytest.mark.proof("kills")
def test_a_checkpoint_whose_arrays_are_damaged_is_passed_over_and_written_again(memory, config, tmp_path, capsys):
    """Its files are as the store was given them, but they are not what the run had."""
    main(config)
    expected, marker = timeless(run_path(config)), "/bucket/runs/run/.mirror/checkpoints/sft/4.json"
    files = json.loads(memory.cat_file(marker))["files"]
    # Arrays as small as these lie in the merged index; what each process wrote before is not read.
    (name,) = (name for name in files if name.startswith("state/d/"))
    place = f"/bucket/runs/run/checkpoints/sft/4/{name}"
    data = bytearray(memory.cat_file(place))
    data[len(data) // 2] ^= 1
    memory.pipe_file(place, bytes(data))
    memory.pipe_file(marker, json.dumps({"files": files | {name: [len(data), sha256(data).hexdigest()]}}).encode())
    for sentences, scratch in ((1, "second"), (0, "third")):
        capsys.readouterr()
        moved = replace(config, storage=replace(config.storage, scratch=str(tmp_path / scratch)))
        main(moved, resume=True)
        assert timeless(run_path(moved)) == expected
        assert capsys.readouterr().out.count("The checkpoint of step 4 is damaged (") == sentences


@pytest.mark.parametrize(
    "change, resume, sentence",
    [
        ([], False, "memory://bucket/runs/run already holds this run: resume it (--resume"),
        (["seed=7"], True, "memory://bucket/runs/run holds a run with another config (seed: 0 there, 7 here)"),
        (["seed=7"], "auto", "memory://bucket/runs/run holds a run with another config (seed: 0 there, 7 here)"),
        (["name=other"], True, "there is no run in memory://bucket/runs/other to resume"),
        (["name=foreign"], False, "memory://bucket/runs/foreign exists and is not a run"),
        (["name=foreign"], "auto", "memory://bucket/runs/foreign exists and is not a run"),
    ],
)
def test_a_run_that_is_refused_leaves_the_store_as_it_is(memory, config, tmp_path, change, resume, sentence):
    memory.pipe_file("/bucket/runs/foreign/notes.txt", b"mine")
    memory.pipe_file("/bucket/runs/run/config.yaml", config_yaml(config).encode())
    before = objects(memory)
    given = [f"storage.scratch={tmp_path}", "run_dir=memory://bucket/runs", "name=run", *change]
    with pytest.raises(UserError) as refusal:
        main(load_config(str(tmp_path / "given.yaml"), given), resume=resume)
    assert str(refusal.value).startswith(sentence)
    assert objects(memory) == before


def test_a_new_run_that_its_config_refuses_claims_nothing(memory, config, tmp_path):
    bad = ["run_dir=memory://bucket/runs", "name=run", "mesh.fsdp=3"]
    with pytest.raises(UserError, match="mesh data=1, fsdp=3"):
        main(load_config(str(tmp_path / "given.yaml"), bad))
    assert objects(memory) == {}


def test_a_dry_run_tries_out_the_place_and_leaves_nothing_there(memory, config, tmp_path, monkeypatch):
    describe(config)
    assert objects(memory) == {} and not (tmp_path / "scratch").exists()
    monkeypatch.setattr(Store, "delete", lambda *arguments: (_ for _ in ()).throw(StoreError("read only")))
    with pytest.raises(UserError, match=r"run_dir=memory://bucket/runs cannot be used \(read only\)"):
        describe(config)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    before = sorted(tmp_path.rglob("*"))
    for place in (tmp_path / "file" / "x", tmp_path / "loop", tmp_path / "dangling", Path("/proc/x")):
        for run in (describe, main):
            usual = place.name != "loop"
            reason = "cannot be written .*another storage.scratch=" if usual else "cannot be looked up .*correct the"
            with pytest.raises(UserError, match=f"^(run directory |storage.scratch=){place}.* {reason}"):
                run(replace(config, storage=replace(config.storage, scratch=str(place))))
            reason = "/run cannot be written .*choose another run_dir=" if usual else " cannot be looked up .*correct"
            with pytest.raises(UserError, match=f"^(run directory |run_dir=){place}{reason}"):
                run(replace(config, run_dir=str(place), storage=StorageConfig()))
    assert sorted(tmp_path.rglob("*")) == before


def copied_run(memory: Any, config: Config) -> dict[str, bytes]:
    with copied(config, resume=False, tell=print) as mirror:
        mirror.begin()
        with open_run(config) as run:
            mirror.start(run)
            step(run.path, 1)
            step(run.path, 2)
    return objects(memory)


def test_a_damaged_checkpoint_is_passed_over_and_none_that_is_good_is_an_error(memory, config):
    stored, sentences = copied_run(memory, config), list[str]()
    assert stored["checkpoints/one/2/d/array"] == b"one 2 d/array"
    put(memory, stored | {"checkpoints/one/2/d/array": b"one 3 d/array"})
    shutil.rmtree(run_path(config))
    with mirrored(config, resume=True, tell=sentences.append):
        folders = (run_path(config) / "checkpoints").iterdir()
        steps = {folder.name: [step.name for step in folder.iterdir()] for folder in folders}
        assert steps == {"one": ["1"], "two": ["2"]}
    assert "step 2 in memory://bucket/runs/run is damaged (d/array is not what was written): going on" in sentences[0]
    without = {name: data for name, data in stored.items() if not name.endswith("one/2/meta")}
    put(memory, without | {".mirror/checkpoints/one/1.json": b"{"})
    with pytest.raises(UserError, match=r"no checkpoint of one .* is good .*meta is missing.*marker is not"):
        with mirrored(config, resume=True, tell=sentences.append):
            pass
    assert ".mirror/claim.json" not in objects(memory)


def test_a_run_that_was_cut_off_deletes_nothing_of_the_one_that_took_over(memory, config, tmp_path, monkeypatch):
    """The first one stalls once its marker of step 3 is written, and wakes when the second one has saved 4, 5 and 6."""
    monkeypatch.setattr(module, "_LOOK", 1e6)
    moved = replace(config, storage=replace(config.storage, scratch=str(tmp_path / "elsewhere")))
    first, second, states = Mirror(config, print), Mirror(moved, print), list[dict[str, bytes]]()

    def take_over(stage: str, wanted: set[int], clean: Any) -> None:
        if 3 in wanted and stage == "two" and not states:
            first._claim._end.set()
            memory.pipe_file("/bucket/runs/run/.mirror/checkpoints/one/mine.json", b"not of a run")
            second.open(True)
            with open_run(moved, resume=True) as run:
                second.start(run)
                for number in (4, 5, 6):
                    step(run.path, number)
                    second._checkpoints()
            states.append(objects(memory))
        clean(stage, wanted)

    first.open(False)
    first.begin()
    with open_run(config) as run:
        first.start(run)
        monkeypatch.setattr(first, "_clean", partial(take_over, clean=first._clean))
        with pytest.raises(StoreError, match="this run's claim was taken over"):
            for number in (1, 2, 3):
                step(run.path, number)
                first._checkpoints()
        files = {name: data for name, data in states[0].items() if "/claim" not in name}
        assert files.items() <= objects(memory).items() and "checkpoints/two/6/meta" in files
        monkeypatch.setattr(first._claim, "check", lambda: None)  # it is lost only after the look
        first._clean("two", {2, 3})
        assert files.items() <= objects(memory).items()
    second.close()


def test_a_checkpoint_that_was_just_brought_here_is_not_copied_again(memory, config, monkeypatch):
    """The thread that copies may look as soon as the folder is there."""
    copied_run(memory, config)
    shutil.rmtree(run_path(config))
    missing, rename, mirror = [], Path.rename, Mirror(config, print)

    def look(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if target.name == "2":
            missing.append(mirror._missing(target.parent))
        return moved

    monkeypatch.setattr(Path, "rename", look)
    mirror.open(True)
    mirror.close()
    assert missing == [[], []]


def test_what_did_not_change_is_not_copied_again(memory, config, monkeypatch):
    copied_run(memory, config)
    written = list[str]()
    monkeypatch.setattr(Claim, "check", lambda self: None)
    monkeypatch.setattr(Store, "write", lambda self, name, data, **_: written.append(name) is None)
    (run_path(config) / "fleet.yaml").write_text("workers: 2")  # an operator's, which no store replaces
    with copied(config, resume=True, tell=print) as mirror:
        with open_run(config, resume=True) as run:
            mirror.start(run)
            (run.path / "metrics.jsonl").write_text("1\n2\n")  # as it was
            (run.path / "plan.yaml").write_text("new")
            assert (run.path / "fleet.yaml").read_text() == "workers: 2"
    assert [name for name in written if not name.startswith(".mirror")] == ["plan.yaml"]


def test_folders_that_go_while_files_are_listed_end_nothing(memory, config, monkeypatch):
    """Orbax renames the folders that it is writing, and an export is replaced, whenever they like."""
    monkeypatch.setattr(module, "_LOOK", 1e6)
    with copied(config, resume=False, tell=pytest.fail) as mirror:
        mirror.begin()
        with open_run(config, resume=False) as run:
            mirror.start(run)
            for name in ("checkpoints/one/1.orbax-checkpoint-tmp", "model"):
                (run.path / name).mkdir(parents=True)
            (run.path / "note").write_text("x")
            scandir = os.scandir

            def going(path: Any) -> Any:
                if Path(path).name in ("1.orbax-checkpoint-tmp", "model"):
                    Path(path).rmdir()
                return scandir(path)

            monkeypatch.setattr(os, "scandir", going)
            mirror._copy()
            monkeypatch.undo()
            assert "note" in objects(memory) and not (run.path / "model").exists()


def test_a_run_whose_files_cannot_be_copied_ends_in_a_sentence(memory, config, monkeypatch):
    def broken(self: Any, path: str, data: bytes, **_: Any) -> None:
        raise OSError("503 SlowDown")

    with pytest.raises(RunFailure, match=r"memory://bucket/runs/run cannot be written \(for .*503 SlowDown\): resume"):
        with copied(config, resume=False, tell=pytest.fail) as mirror:
            mirror.begin()
            with open_run(config) as run:
                mirror.start(run)
                run.check_present()
                step(run.path, 1)
                monkeypatch.setattr(type(memory), "pipe_file", broken)
                mirror._thread.join(20)
                run.check_present()


def test_places_are_told_when_their_files_are_there_and_not_after_an_outage(memory, config, monkeypatch):
    sentences = list[str]()

    def tell(sentence: str) -> None:
        assert objects(memory)["report.html"] == b"page"
        sentences.append(sentence)

    def run(resume: bool) -> None:
        with copied(config, resume=resume, tell=tell) as mirror:
            mirror.begin()
            with open_run(config, resume=resume) as run:
                mirror.start(run)
                (run.path / "report.html").write_text("page" if not resume else "later")
                if resume:
                    monkeypatch.setattr(type(memory), "pipe_file", broken)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("503 SlowDown")

    run(resume=False)
    place = "memory://bucket/runs/run"
    assert sentences == [f"report: {place}/report.html", f"model: {place}/model, in Hugging Face form"]
    with pytest.raises(RunFailure, match="cannot be written"):
        run(resume=True)
    assert len(sentences) == 2


def test_failed_requests_are_repeated_and_a_hang_has_a_deadline(memory, config, monkeypatch):
    monkeypatch.setattr(store_module, "PAUSES", (0.2, 0.4))
    monkeypatch.setattr(store_module, "_SILENT", 0.15)
    answers = [OSError("503 SlowDown"), TimeoutError("late"), TimeoutError("still"), b"data"]

    def answer(path: str) -> bytes:
        result = answers.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    sentences = list[str]()
    store = Store("memory://bucket/x", config.storage, sentences.append)
    store._files = SimpleNamespace(cat_file=answer)
    store._section = type(config.storage)(timeout=0.1, patience=20.0)
    assert store.read("name") == b"data"
    assert sentences == [
        "memory://bucket/x has not answered as it should for 0 seconds (TimeoutError: late): trying for "
        "storage.patience=20 seconds"
    ]  # not again within a minute
    answers[:] = [PermissionError("Forbidden")]
    with pytest.raises(StoreError, match="PermissionError: Forbidden"):
        store.read("name")
    store._section = type(config.storage)(timeout=0.05, patience=0.01)
    store._files = SimpleNamespace(cat_file=lambda path: time.sleep(30))
    with pytest.raises(StoreError, match="for storage.patience=0.01 seconds, TimeoutError: no answer within 0.05 s"):
        store.read("name")


def test_a_model_that_is_exported_again_is_never_in_the_store_in_part(memory, config, states):
    names = ["config.json", "model-1.safetensors", "model-2.safetensors"]
    with copied(config, resume=False, tell=print) as mirror:
        mirror.begin()
        with open_run(config) as run:
            mirror.start(run)
            (run.path / "model").mkdir()
            for content in ("old", "new"):
                for name in names[1:]:
                    (run.path / "model" / name).write_text(content)
                (run.path / "model" / "config.json").write_text("{}")
                mirror._copy()
    whole = [state for state in states if "model/config.json" in state]
    assert all(len({state[f"model/{name}"] for name in names[1:]}) == 1 for state in whole)
    model = {name: data for name, data in states[-1].items() if name.startswith("model/")}
    assert model == {"model/config.json": b"{}"} | {f"model/{name}": b"new" for name in names[1:]}


def test_an_address_needs_its_package(config, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(store_module.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"s3://bucket/runs needs s3fs: install it with pip install 'jrlhf\[storage\]'"):
        Store("s3://bucket/runs", config.storage)
