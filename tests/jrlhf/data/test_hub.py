"""Uploads to a stand-in of the hub: the bytes of the export in one commit, retries, and a sentence for each refusal."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hub import SILENT, TOKEN, Hub, Repository, serving

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, sys
from pathlib import Path
import huggingface_hub
from jrlhf.data import push
from jrlhf.errors import UserError
from jrlhf.storage import outward
push._WAITS, push._PATIENCE = (0.0, 0.0), 5.0
outward.SILENCE = dict.fromkeys(outward.SILENCE, 0.3)
outward._SILENCE_OF_CHANGES, outward.NOTICE, outward._AGAIN = 0.3, 0.1, 0.0
for line in sys.stdin:
    token, function, arguments, options = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": token} if token else {}
    if function == "push":
        arguments[0] = Path(arguments[0])
    try:
        print(json.dumps(getattr(push, function)(*arguments, **options)), flush=True)
    except UserError as error:
        print(json.dumps(f"error: {error}"), flush=True)
"""
CONSOLE = "console.txt"  # what the process prints beside its answers
Call = tuple[str | None, str, list[Any], dict[str, Any]]  # token, function of jrlhf.data.push, arguments, options


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[tuple[Hub, subprocess.Popen[str]]]:
    """One hub and one process for all tests; the fixture `hub` empties the hub before each."""
    with serving() as hub, program(hub, home) as process:
        yield hub, process


def program(hub: Hub, home: Path) -> subprocess.Popen[str]:
    environment = hub.environment(home) | {"PYTHONPATH": str(ROOT)}
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with open(home / CONSOLE, "w") as console:
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=console, **streams)


@pytest.fixture
def hub(served: tuple[Hub, subprocess.Popen[str]]) -> Hub:
    hub, _ = served
    for state in (hub.repositories, hub.objects, hub.requests, hub.failures, hub.between):
        state.clear()
    return hub


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    draw = np.random.default_rng(0)
    for name, size in {"model.safetensors": 300_000, "progress.png": 5000}.items():
        (directory / name).write_bytes(draw.bytes(size))
    (directory / "README.md").write_text("---\nlibrary_name: transformers\n---\n\nTrained by jrlhf, which\n")
    (directory / "config.json").write_text('{"vocab_size": 8}\n')
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def call(served: tuple[Hub, subprocess.Popen[str]]) -> Callable[[list[Call]], list[str]]:
    """Makes the calls in the process; returns the result of each, or its sentence."""
    _, process = served
    assert process.stdin is not None and process.stdout is not None
    given, answers = process.stdin, process.stdout

    def make(one: Call) -> str:
        print(json.dumps(one), file=given, flush=True)
        return json.loads(answers.readline())

    return lambda calls: [make(one) for one in calls]


def push(directory: Path, name: str, **options: Any) -> Call:
    return TOKEN, "push", [str(directory), name], options


def test_an_export_is_uploaded_bit_for_bit_in_one_commit(hub: Hub, call, exported: Path, tmp_path: Path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "README.md"):
        (shards / name).write_bytes(f"Trained by jrlhf {name}".encode())
    calls = [push(exported, "someone/new"), push(exported, "lab/new", private=True, revision="trial")]
    assert call(calls) == [f"{hub.address}/someone/new", f"{hub.address}/lab/new/tree/trial"]
    first, second = hub.repositories["models/someone/new"], hub.repositories["models/lab/new"]
    assert first.branches == {"main": contents(exported)} and first.commits == 1 and not first.private
    assert second.branches == {"main": {}, "trial": contents(exported)} and second.commits == 1 and second.private
    uploads = sum(count for request, count in hub.requests.items() if request.startswith("PUT"))
    assert uploads == 2  # the second time they were there

    first.branches["main"]["notes.txt"] = b"mine"
    call([push(shards, "someone/new")])
    assert first.branches == {"main": contents(shards) | {"notes.txt": b"mine"}} and first.commits == 2


def test_weights_that_are_not_of_an_export_stay(hub: Hub, call, exported: Path):
    files = {name: b"theirs" for name in ("config.json", "merges.txt", "model-00001-of-00002.safetensors")}
    trials = {"bare": files, "card": files | {"README.md": b"# Theirs"}, "weights": {"pytorch_model.bin": b"theirs"}}
    for name, content in trials.items():
        hub.repositories[f"models/someone/{name}"] = Repository(branches={"main": dict(content)})
    ours = hub.repositories["models/someone/card"].branches["ours"] = {"README.md": b"Trained by jrlhf"}
    hub.repositories["models/someone/new"] = Repository(branches={"main": {".gitattributes": b"*.bin"}})
    revisions = [push(exported, "someone/card", revision=name) for name in ("fresh", "ours")]
    calls = [*(push(exported, f"someone/{name}") for name in trials), *revisions, push(exported, "someone/new")]
    *refused, branch, new = call(calls)
    for sentence in refused:
        assert "and no README.md of jrlhf" in sentence and "choose another name, or delete them there" in sentence
    for name, content in trials.items():
        assert hub.repositories[f"models/someone/{name}"].branches["main"] == content
    assert set(hub.repositories["models/someone/card"].branches) == {"main", "ours"} and ours == contents(exported)
    assert not branch.startswith("error") and new == f"{hub.address}/someone/new"


def test_a_commit_of_someone_else_in_between_stays(hub: Hub, call, exported: Path):
    repository = hub.repositories["models/someone/mine"] = Repository()
    hub.between = {"config.json": b"theirs"}
    (sentence,) = call([push(exported, "someone/mine")])
    assert sentence.endswith("because someone/mine was changed meanwhile: look at it and push again")
    assert repository.branches == {"main": {"config.json": b"theirs"}} and repository.commits == 0


def test_what_fails_in_passing_is_tried_again_and_nothing_is_half_committed(
    hub: Hub, call, exported: Path, tmp_path: Path
):
    repository = hub.repositories["models/someone/mine"] = Repository()
    later = tmp_path / "later"
    shutil.copytree(exported, later)
    (later / "config.json").write_text("{}")
    commit = ("POST", "/api/models/someone/mine/commit")
    hub.failures = {("PUT", "/objects"): [500], commit: [503, 0, 200, 0, 0, 0, 500, 500, 500]}
    address, lost, broken = call([push(folder, "someone/mine") for folder in (exported, later, later)])
    assert address == f"{hub.address}/someone/mine"
    start = "error: --push someone/mine: nothing was committed, because the hub"
    assert lost.startswith(f"{start} cannot be reached (") and broken.startswith(f"{start} answers with 500")
    assert repository.branches == {"main": contents(exported)} and repository.commits == 1
    assert hub.failures == {("PUT", "/objects"): [], commit: []}


COMMIT, INFO = ("POST", "/api/models/someone/mine/commit"), ("GET", "/api/models/someone/mine")
PAGE = "<html><body>Please log in to the network</body></html>"
REASON = "the card's metadata is wrong\n- license: must be one of the list\n- tags: must be texts"
WHOLE = "the card's metadata is wrong - license: must be one of the list - tags: must be texts"
NOTHING = "error: --push someone/mine: nothing was committed, because "


@pytest.mark.parametrize(
    ("failures", "commits", "sentence"),
    [
        ({COMMIT: [-500]}, 1, None),
        ({COMMIT: [500, -503]}, 1, None),
        ({COMMIT: [-400]}, 1, None),
        ({COMMIT: [-500], INFO: [200, 200, 500]}, 1, None),  # found by the next attempt
        ({COMMIT: [500] * 3}, 0, f"{NOTHING}the hub answers with 500 (not now): try again later"),
        ({COMMIT: [(400, REASON)]}, 0, f"{NOTHING}the hub answers with 400 ({WHOLE}): mend what it names"),
        ({COMMIT: [(403, "storage limit:\nbuy more")]}, 0, "someone/mine (storage limit: buy more): check the name"),
        ({COMMIT: [PAGE]}, 0, f"{NOTHING}something else answers with a page in place of the hub: see HF_ENDPOINT, the"),
        ({INFO: [PAGE]}, 0, f"{NOTHING}something else answers with a page in place of the hub: see HF_ENDPOINT, the"),
        (
            {COMMIT: [SILENT] * 3},
            0,
            f"{NOTHING}the hub cannot be reached (ReadTimeout: timed out): try again when it can",
        ),
        ({COMMIT: [500], INFO: [200, 200, *[(400, "no")] * 9]}, 0, "hub does not say whether it was committed (see"),
    ],
)
def test_a_failed_commit_is_looked_at_again_and_the_reason_is_whole(
    hub: Hub, call, exported: Path, failures, commits: int, sentence: str | None
):
    repository = hub.repositories["models/someone/mine"] = Repository()
    hub.failures = failures
    (answer,) = call([push(exported, "someone/mine")])
    assert answer == f"{hub.address}/someone/mine" if sentence is None else sentence in answer
    assert repository.commits == commits and repository.branches == {"main": contents(exported) if commits else {}}


def test_what_is_there_already_is_not_committed_again(hub: Hub, call, exported: Path):
    """But a branch for it is made, and a commit that fails to delete an older file is no success."""
    first, second, branch = call([*[push(exported, "someone/mine")] * 2, push(exported, "someone/mine", revision="v1")])
    repository = hub.repositories["models/someone/mine"]
    assert first == second and branch == f"{first}/tree/v1" and repository.commits == 1
    assert repository.branches == {"main": contents(exported), "v1": contents(exported)}
    older = {"model-00001-of-00002.safetensors": b"older"}
    repository.branches["main"] |= older
    hub.failures = {COMMIT: [500] * 3}
    (sentence,) = call([push(exported, "someone/mine")])
    assert sentence.startswith(f"{NOTHING}the hub answers with 500")
    assert repository.branches["main"] == contents(exported) | older


def test_a_hub_that_never_answers_is_given_up_and_the_user_is_told_meanwhile(hub: Hub, call, home: Path):
    start, asked = time.monotonic(), (TOKEN, "account_name", ["mine"], {})
    hub.failures = {("GET", "/api/whoami-v2"): [SILENT] * 9}
    (answer,) = call([asked])
    assert time.monotonic() - start < 5
    assert answer.startswith("error: --push mine: nothing was exported, because the hub cannot be reached (http://")
    assert "gave no answer within 0.3 seconds): try again" in answer
    assert f"waiting for the hub at {hub.address} to answer" in (before := (home / CONSOLE).read_text())
    hub.failures = {}
    assert call([asked]) == ["someone/mine"] and (home / CONSOLE).read_text() == before


def test_what_cannot_be_uploaded_is_one_sentence(hub: Hub, call, exported: Path):
    hub.repositories["models/someone/public"] = Repository()
    cases: dict[str, Call] = {
        "there is no token for the hub: `hf auth login`, or set HF_TOKEN": (None, "account_name", ["mine"], {}),
        "the hub does not know the token": ("hf_old", "account_name", ["mine"], {}),
        "a//b is no name of the hub: write USER/NAME": (TOKEN, "account_name", ["a//b"], {}),
        "the token may not do this with other/mine": push(exported, "other/mine"),
        "make it private on its page": push(exported, "someone/public", private=True),
    }
    answers = call([*cases.values(), (TOKEN, "account_name", ["mine"], {})])
    assert answers[-1] == "someone/mine"
    for expected, sentence in zip(cases, answers, strict=False):
        assert sentence.startswith("error: --push ") and expected in sentence
    assert hub.repositories == {"models/someone/public": Repository()}
