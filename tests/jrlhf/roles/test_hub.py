"""Models and datasets by their hub names, from a stand-in of the hub and from its cache."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hub import SILENT, TOKEN, Repository, serving
from tests.support.runs import ROOT

PROGRAM = """
import json, os, sys
from jrlhf.data.read import read_dataset
from jrlhf.errors import UserError
from jrlhf.roles.pretrained import check_weights, hub_model, locate
from jrlhf.storage import outward

outward.SILENCE = dict.fromkeys(outward.SILENCE, 0.5)
def answer(name):
    try:
        if name.startswith("rows:"):
            return [example.prompt for example in read_dataset(name.removeprefix("rows:")).examples]
        check_weights(name, "model.path")
        directory = locate(name, "model.path")
        files = [path for path in directory.rglob("*") if path.is_file()]
        return [{path.name: path.stat().st_size for path in files}, hub_model(str(directory), [])]
    except UserError as error:
        return f"error: {error}"

assert "huggingface_hub" not in sys.modules  # which reads the environment when it is imported
for line in sys.stdin:
    environment, names = json.loads(line)
    if os.fork() == 0:
        os.environ |= environment
        print(json.dumps([answer(name) for name in names]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def ask() -> Iterator[Callable[..., list]]:
    """(environment, names) -> the answers in a process of its own: files and hub name, a dataset's rows, a sentence."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    pipe, command = subprocess.PIPE, [sys.executable, "-W", "ignore", "-c", PROGRAM]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=plain, cwd=ROOT, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        source, target = process.stdout, process.stdin

        def ask(environment: dict[str, str], *names: str) -> list:
            print(json.dumps([environment, names]), file=target, flush=True)
            return json.loads(source.readline())

        yield ask


def test_models_come_by_their_hub_name_or_with_a_sentence(ask, make_model, tmp_path: Path):
    model, home = make_model(tmp_path / "model"), tmp_path / "home"
    expected = {path.name: path.stat().st_size for path in model.iterdir()} | {"tool_use.jinja": 5}
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    with serving() as hub:
        hub.add("models/lab/tiny", model)
        hub.add("models/lab/gated", model, gated=True)
        hub.add("models/lab/private", model, private=True)
        hub.repositories["models/lab/tiny"].branches["main"] |= {
            "model.bin": b"a pickle",
            "code.py": b"raise",
            "onnx/config.json": b"",
            "onnx/model.safetensors": b"",
        }
        names = ("lab/tiny", "lab/gated", "lab/private", "lab/none")
        tiny, gated, private, none = ask(hub.environment(home, token=None), *names)
        assert tiny == [expected, "lab/tiny"]
        assert gated == (
            f"error: model.path=lab/gated is no directory in {Path.cwd()}, and lab/gated is gated: accept its licence "
            "on its page, then `hf auth login`, or set HF_TOKEN"
        )
        for name, sentence in {"private": private, "none": none}.items():
            assert f"the hub has no lab/{name} for you: check the name; if it is private, `hf auth login`" in sentence
        with_token = hub.environment(home)
        assert with_token["HF_TOKEN"] == TOKEN and ask(with_token, "lab/private") == [[expected, "lab/private"]]
        hub.repositories["models/lab/tiny"] = Repository()
        hub.failures = {("GET", "/api/models/lab"): [SILENT] * 9}
        start = time.monotonic()
        cached, other = ask(with_token, "lab/private", "lab/other")
        assert cached == [expected, "lab/private"] and "and the hub cannot be reached (ReadTimeout" in other
        assert time.monotonic() - start < 10
    # Now the hub is gone.
    cached, gated = ask(with_token | {"HF_HUB_OFFLINE": "1"}, "lab/private", "lab/gated")
    assert cached == [expected, "lab/private"] and "HF_HUB_OFFLINE is set and lab/gated is not whole" in gated
    cached, other = ask(with_token, "lab/private", "lab/other")
    assert cached == [expected, "lab/private"] and "and the hub cannot be reached (" in other


@pytest.mark.full
def test_datasets_come_by_their_hub_name_or_with_a_sentence(ask, tmp_path: Path):
    pytest.importorskip("datasets", reason="hub datasets are read by the hf extra")
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    with serving() as hub:
        hub.add("datasets/lab/rows", rows)
        hub.add("datasets/lab/gated", rows, gated=True)
        read, gated, none = ask(hub.environment(tmp_path / "home"), "rows:lab/rows", "rows:lab/gated", "rows:lab/none")
        hub.failures = {(verb, "/"): [SILENT] * 20 for verb in ("GET", "HEAD")}
        start = time.monotonic()
        (silent,) = ask(hub.environment(tmp_path / "empty"), "rows:lab/rows")
        assert time.monotonic() - start < 20
    assert silent.startswith(
        "error: the dataset lab/rows (split 'train') cannot be loaded: the hub cannot be reached ("
    )
    assert read == ["one", "two"]
    start = "error: the dataset lab/{} (split 'train') cannot be loaded: "
    assert gated.startswith(start.format("gated") + "lab/gated is gated: accept its licence on its page")
    assert none.startswith(start.format("none") + "the hub has no lab/none for you: check the name")
