"""Every command x every kind of bad path: one sentence that quotes the path's argument, exit code 2, no traceback."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from jrlhf import export, generate, new_config, plan, train
from jrlhf.doctor.access import check_run_dir
from jrlhf.report.__main__ import cli as report

NOBODY = 65534


def _file(path: Path, content: bytes = b"\xff\xfe name: \x00") -> str:
    path.write_bytes(content)
    return str(path)


def _folder(path: Path) -> str:
    path.mkdir()
    return str(path)


def _link(path: Path, target: str) -> str:
    path.symlink_to(target)
    return str(path)


def _closed(path: Path) -> str:
    path.mkdir(mode=0o000)
    return str(path / "inside")


KINDS: dict[str, Callable[[Path], str]] = {
    "a name of 300 bytes": lambda place: str(place / ("x" * 300)),
    "a path of 5000 bytes": lambda place: str(place.joinpath(*["x" * 200] * 25)),
    "NUL": lambda place: f"{place}/a\0b",
    "not UTF-8": lambda place: _file(place / "file"),
    "a folder": lambda place: _folder(place / "folder"),
    "a link to nothing": lambda place: _link(place / "link", "nothing"),
    "a loop": lambda place: _link(place / "loop", "loop"),
    "no permission": lambda place: _closed(place / "closed"),
}
COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "generate --model": (generate.cli, ["--model", "BAD", "--prompt", "a"]),
    "generate --adapter": (generate.cli, ["--model", "ACTOR", "--adapter", "BAD", "--prompt", "a"]),
    "generate --file": (generate.cli, ["--model", "ACTOR", "--file", "BAD"]),
    "generate --out": (generate.cli, ["--model", "ACTOR", "--file", "ROWS", "--out", "BAD"]),
    "init --model": (new_config.cli, ["--model", "BAD", "--data", "ROWS", "-o", "NEW"]),
    "init --data": (new_config.cli, ["--model", "ACTOR", "--data", "BAD", "-o", "NEW"]),
    "init --reward": (new_config.cli, ["--model", "ACTOR", "--data", "ROWS", "--reward", "BAD.py:f", "-o", "NEW"]),
    "init -o": (new_config.cli, ["--model", "ACTOR", "--data", "ROWS", "-o", "BAD"]),
    "plan --config": (plan.cli, ["--config", "BAD", "--cluster", "1xh100"]),
    "plan --plan": (plan.cli, ["--config", "quickstart", "--cluster", "1xh100", "--plan", "BAD"]),
    "plan --plot": (plan.cli, ["--config", "quickstart", "--cluster", "1xh100", "--plot", "BAD"]),
    "plan --save": (plan.cli, ["--config", "quickstart", "--cluster", "1xh100", "--save", "BAD"]),
    "export": (export.cli, ["BAD"]),
    "report": (report, ["BAD"]),
    "train --config": (train.cli, ["--config", "BAD", "--dry-run"]),
    "train model.path": (train.cli, ["--config", "CONFIG", "--dry-run", "model.path=BAD"]),
    "train roles.reference": (train.cli, ["--config", "CONFIG", "--dry-run", "roles.reference=BAD"]),
    "train lora.path": (train.cli, ["--config", "CONFIG", "--dry-run", "lora.path=BAD"]),
    "train data": (train.cli, ["--config", "CONFIG", "--dry-run", "data.prompts.path=BAD"]),
    "train plan": (train.cli, ["--config", "CONFIG", "--dry-run", "plan=BAD"]),
    "train run_dir": (train.cli, ["--config", "CONFIG", "--dry-run", "run_dir=BAD"]),
}


# A file is written in place of such a path, or a run into it.
GOOD = {
    "generate --out": ("not UTF-8", "a link to nothing"),
    "plan --save": ("not UTF-8", "a link to nothing"),
    "train run_dir": ("a folder",),
}


@pytest.fixture
def nobody(monkeypatch) -> Callable[[], AbstractContextManager]:
    """Makes this process one that may not read everything, as root may."""

    @contextmanager
    def nobody() -> Iterator[None]:
        rights = os.geteuid()
        if rights == 0:
            os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(rights)

    return nobody


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_path_is_one_sentence(command: str, tmp_path: Path, user, settings, capsys, nobody, monkeypatch):
    run, words = COMMANDS[command]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(run_dir=str(tmp_path / "runs"))))
    paths = {"ACTOR": user / "actor", "ROWS": user / "qa.jsonl", "NEW": tmp_path / "new.yaml", "CONFIG": config}
    for folder in (tmp_path, *tmp_path.parents[:2], user):
        folder.chmod(0o755)
    for kind, make in KINDS.items():
        if kind in GOOD.get(command, ()):
            continue
        bad = make(tmp_path)
        capsys.readouterr()
        with nobody() if kind == "no permission" else nullcontext():
            code = run([str(paths.get(word, word)).replace("BAD", bad) for word in words])
        error = capsys.readouterr().err
        assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, (kind, code, error)


def test_the_doctor_names_a_place_that_cannot_be(tmp_path: Path, nobody, monkeypatch):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    for kind, make in KINDS.items():
        if kind == "a folder":
            continue
        bad = make(tmp_path)
        with nobody() if kind == "no permission" else nullcontext():
            (finding,) = check_run_dir(bad)
            assert finding.state == "problem" and finding.text.startswith(bad), (kind, finding)


@pytest.mark.parametrize("name", ["config.yaml", "plan.yaml", "environment.txt", "hub.txt", "summary.json"])
def test_a_run_with_a_file_that_is_no_text_is_one_sentence(name: str, tmp_path: Path, capsys):
    (tmp_path / "config.yaml").write_text("name: run\n")
    (tmp_path / name).write_bytes(b"\xff\xfe")
    assert report([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name} ") and error.count("\n") == 1
