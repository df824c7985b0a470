"""Uses of a run that has not finished, or goes on: an export of its model, more steps, another mesh."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf import export as command
from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.export import cli
from jrlhf.generate import cli as generate
from jrlhf.roles.pretrained import base_name
from jrlhf.run.directory import open_run
from jrlhf.stages import finalize
from jrlhf.train import main
from tests.support.runs import digest

SIZES = [
    "device.simulated=8",
    "mesh.fsdp=4",
    "mesh.tensor=2",
    "stages=[sft]",
    "sft={batch: 16, save_every: 2, warmup: 1, final: 1.0}",
    "data.problems=64",
    "model.embed=32",
    "model.layers=2",
    "data.heldout_rows=16",
]


def settings(path: Path, *own: str):
    return load_config("arithmetic-grpo", [*SIZES, f"run_dir={path.parent}", f"name={path.name}", *own])


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("own", [[], ["lora.rank=2", "model.layers=1"]], ids=["weights", "adapter"])
def test_a_run_without_its_end_gives_its_model_and_goes_on(own, tmp_path, monkeypatch, capsys):
    path, moved, whole = tmp_path / "run", tmp_path / "moved", tmp_path / "whole"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finalize, "export", interrupt)
        main(settings(path, *own, "sft.steps=2"))
    shutil.copytree(path, moved)
    assert generate(["--model", str(path), "--prompt", "1+1=", "--platform", "cpu"]) == 2
    assert f"python -m jrlhf.export {path} writes" in capsys.readouterr().err
    before = digest(path)
    out = tmp_path / "made" / "here"
    assert cli([str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/model is the policy of sft after step 2 of 2\n"
    assert digest(path) == before

    main(settings(path, *own, "sft.steps=2"), resume=True)
    written = {name: data for name, data in digest(path).items() if name.startswith(("model/", "adapter/"))}
    exported = digest(out)
    assert ("adapter/adapter_model.safetensors" in written) == bool(own)
    if own:  # sums of base and adapter, made on another mesh
        assert_close(out, path, atol=1e-7)
        del exported["model/model.safetensors"], written["model/model.safetensors"]
    assert exported == written

    main(settings(whole, *own, "sft.steps=4"))
    main(settings(path, *own, "sft.steps=4"), resume=True)
    longer, at_once, shorter = (digest(directory / "model") for directory in (path, whole, out))
    assert longer.pop("progress.png") != at_once.pop("progress.png")  # it was measured at its first end, too
    assert longer == at_once and longer["model.safetensors"] != shorter["model.safetensors"]
    main(settings(moved, *own, "sft.steps=4", "mesh.fsdp=8", "mesh.tensor=1", "sft.micro_batches=2"), resume=True)
    assert_close(moved, whole, atol=2e-4)
    assert "goes on with name=moved (was run), mesh.fsdp=8 (was 4)" in (moved / "environment.txt").read_text()


def assert_close(actual: Path, expected: Path, atol: float) -> None:
    """The models of two directories have the same weights, but for rounding."""
    weights, others = (load_file(directory / "model" / "model.safetensors") for directory in (expected, actual))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(others[name], weight, rtol=0, atol=atol, err_msg=name)


def test_an_adapter_whose_base_only_this_machine_has_is_not_pushed(tmp_path, monkeypatch, capsys):
    pushed = []
    monkeypatch.setattr(command, "account_name", str)
    monkeypatch.setattr(command, "export_checkpoint", lambda *_: "exported")
    monkeypatch.setattr(command, "push", lambda directory, *_, **__: pushed.append(directory.name))
    path = tmp_path / "run"
    open_run(settings(path, "model={path: team/base}", "lora.rank=2")).close()
    (path / "adapter").mkdir()
    arguments = [str(path), "--push", "someone/mine", "--adapter"]
    assert cli(arguments) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and f"--adapter: {path}/hub.txt does not list its base, model.path=team/base, so" in error
    )
    (path / "hub.txt").write_text("team/base\n")
    assert cli(arguments) == 0 and pushed == ["adapter"]


def test_a_directory_that_is_not_here_is_not_looked_for_on_the_hub(tmp_path, capsys, monkeypatch):
    """A run began with the folder team/base; it is exported, and resumed, where there is none."""
    path = tmp_path / "run"
    config = settings(path, "model={path: team/base}")
    open_run(config).close()
    (path / "hub.txt").write_text("")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import would fail
    assert cli([str(path)]) == 2
    sentence = f"team/base is no directory here, and the run in {path} did not take it from the hub: start this in the"
    assert sentence in capsys.readouterr().err
    with pytest.raises(UserError, match=sentence):
        main(config, resume=True)
    assert base_name("team/base", []) == str(Path("team/base").absolute())
    for path in ("team/base", "s3://a/b", None):
        assert base_name(path, ["team/base"]) == path


def test_what_cannot_be_exported_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "run"
    open_run(settings(path, "stages=[sft,grpo]")).close()

    def refused(*arguments: str) -> str:
        assert cli([str(path), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "has no checkpoint of sft or grpo yet: wait for the first, or lower sft.save_every" in refused()
    for step in (10, 20):
        (path / "checkpoints" / "grpo" / str(step)).mkdir(parents=True)
    assert "step=15: " in refused("--step", "15") and "of stage grpo, choose among 10, 20" in refused("--step", "15")
    assert "is the place of step 20, name another directory in out" in refused("--step", "10")
    (tmp_path / "file").touch()
    assert "cannot be written (Not a directory)" in refused("--out", str(tmp_path / "file"))
    assert "--out=s3://bucket/x is an address: give a path on this machine" in refused("--out", "s3://bucket/x")
    (path / "tokenizer.json").write_bytes(b"")
    assert "tokenizer.json" in refused()
    path = tmp_path / "gone"
    assert f"there is no run in {path} (it has no config.yaml)" in refused()
