"""`jrlhf doctor`: what it finds on machines. This one is examined once, without a network."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest

import jrlhf.__main__
from jrlhf.config.places import StorageConfig
from jrlhf.doctor import access, checks
from jrlhf.doctor.access import GIB, Finding, check_hub, check_places, check_run_dir
from jrlhf.doctor.checks import Installed, check_backend, check_extras, check_packages
from jrlhf.run import files
from jrlhf.storage.store import Store

JAX = ("jaxlib<=0.10.2,>=0.10.1", "ml-dtypes>=0.5") + tuple(
    f'{line}; extra == "{extra}"'
    for extra, lines in {
        "cuda12": ("jaxlib<=0.10.2,>=0.10.2", "jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2"),
        "tpu": ("jaxlib<=0.10.2,>=0.10.2", "libtpu==0.0.42.*"),
    }.items()
    for line in lines
)
OURS = ("jax<0.13,>=0.10.2", "numpy>=2.0", 'flax>=99; python_version < "3"') + tuple(
    f'{line}; extra == "{extra}"'
    for extra, line in {
        "hf": "datasets>=4",
        "cuda12": "jax[cuda12]",
        "tpu": "jax[tpu]",
        "dev": "no-such-package",
    }.items()
)
VERSIONS = {
    "jrlhf": "0.1.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "flax": "0.12.8",
    "numpy": "2.1",
    "ml-dtypes": "0.5",
    "datasets": "4.1",
}
CUDA = VERSIONS | {"jax-cuda12-plugin": "0.10.2"}
CPU: dict[str, Any] = {
    "accelerator": None,
    "platform": "cpu",
    "devices": [["cpu", None]] * 4,
    "seconds": 1.0,
    "logprob_error": 1e-7,
}
CPU["host_memory"] = 16.0 * GIB
GPU = CPU | {"accelerator": "gpu", "platform": "gpu", "devices": [["NVIDIA H100", 80 * GIB]] * 2}
GOOD = Installed("3.11.7", ">=3.11", VERSIONS, {"jrlhf": OURS, "jax": JAX})


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)


def found(installed: Installed = GOOD, backend: Mapping[str, Any] = CPU) -> list[Finding]:
    checks = check_packages(installed), check_extras(installed), check_backend(installed, backend)
    return [finding for check in checks for finding in check]


def others(findings: Iterable[Finding]) -> list[Finding]:
    """Returns what is not ok."""
    return [finding for finding in findings if finding.state != "ok"]


def the_only(findings: Iterable[Finding], state: str) -> Finding:
    (finding,) = others(findings)
    assert finding.state == state and finding.remedy
    return finding


def test_a_good_machine_has_no_other_finding():
    with_gpu = found(GOOD._replace(versions=CUDA), GPU)
    assert others(found()) == others(with_gpu) == []
    assert "4 x cpu, 16 GiB in all" in [finding.text for finding in found()]
    texts = {finding.part: finding.text for finding in with_gpu}
    assert texts["devices"] == "2 x NVIDIA H100, 80 GiB each" and texts["accelerator"] == "JAX runs on the gpu"
    assert texts["extra hf"] == texts["extra cuda12"] == "installed" and not {"extra dev", "extra tpu"} & texts.keys()


def test_versions_are_compared_with_what_the_packages_require():
    for versions, text, remedy in (
        (
            VERSIONS | {"jaxlib": "0.10.0"},
            "jaxlib 0.10.0 does not fit jax 0.10.2, which needs <=0.10.2,>=0.10.1",
            "jrlhf",
        ),
        (VERSIONS | {"numpy": "1.26"}, "numpy 1.26 does not fit jrlhf 0.1.0, which needs >=2.0", "jrlhf"),
        (VERSIONS | {"jax": "0.13.1"}, "jax 0.13.1 does not fit jrlhf 0.1.0, which needs <0.13,>=0.10.2", "jrlhf"),
        (CUDA | {"jax-cuda12-plugin": "0.9.1"}, "jax-cuda12-plugin 0.9.1 does not fit jax 0.10.2", "jrlhf[cuda12]"),
        (
            VERSIONS | {"libtpu": "0.0.41"},
            "libtpu 0.0.41 does not fit jax 0.10.2, which needs ==0.0.42.*",
            "jrlhf[tpu]",
        ),
    ):
        finding = next(one for one in others(found(GOOD._replace(versions=versions))) if one.state == "problem")
        assert finding.text.startswith(text) and finding.remedy.startswith("pip install") and remedy in finding.remedy
    missing = {name: version for name, version in VERSIONS.items() if name != "numpy"}
    assert "numpy is missing" in [finding.text for finding in others(found(GOOD._replace(versions=missing)))]
    assert "3.10.1" in the_only(found(GOOD._replace(python="3.10.1")), "problem").text


def test_an_extra_that_is_not_installed_is_a_note_with_its_command():
    missing = {name: version for name, version in VERSIONS.items() if name != "datasets"}
    finding = the_only(found(GOOD._replace(versions=missing)), "note")
    assert finding.text == "not installed: datasets" and "pip install 'jrlhf[hf]'" in finding.remedy
    assert (
        the_only(found(GOOD._replace(requirements={})), "note").part == "packages"
    )  # a checkout that is not installed


def test_an_idle_accelerator_is_a_problem(monkeypatch):
    idle = CPU | {"accelerator": "gpu"}
    finding = the_only(found(backend=idle), "problem")
    assert "IDLE" in finding.text and finding.remedy == "pip install 'jrlhf[cuda12]' or pip install 'jrlhf[cuda13]'"
    assert "nvidia-smi" in the_only(found(GOOD._replace(versions=CUDA), idle), "problem").remedy
    tpu = the_only(found(backend=CPU | {"accelerator": "tpu"}), "problem")
    assert "a TPU" in tpu.text and tpu.remedy == "pip install 'jrlhf[tpu]'"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert the_only(found(backend=idle), "problem").remedy == "unset JAX_PLATFORMS"


def test_programs_that_do_not_run_or_are_wrong_are_problems(monkeypatch):
    started = {key: GPU[key] for key in ("accelerator", "platform", "devices")} | {"error": "XlaRuntimeError: no ptxas"}
    assert "no ptxas" in the_only(found(GOOD._replace(versions=CUDA), started), "problem").text
    assert "no answer" in the_only(found(backend={"error": "no answer within 180 s"}), "problem").text
    for error in (0.3, float("nan")):
        assert "off by" in the_only(found(backend=CPU | {"logprob_error": error}), "problem").text
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--bogus")
    finding = the_only(found(backend={"error": "AssertionError"}), "problem")
    assert finding.remedy.startswith("mend or unset JAX_PLATFORMS=cuda and XLA_FLAGS=--bogus; ")


def test_hub(monkeypatch):
    for name, value in {"ENDPOINT": "nonsense", "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "bad token")
    unreached, wrong = check_hub()
    assert unreached.state == "note" and unreached.text == "not reached (nonsense: unknown url type: 'nonsense')"
    assert wrong.state == "problem" and "the token alone" in wrong.remedy
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    offline, none = check_hub()
    assert offline.state == none.state == "note" and "offline" in offline.text and "HF_TOKEN" in none.remedy
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_abc")
    assert [finding.state for finding in check_hub()] == ["note", "ok"]


def test_places_in_which_nothing_can_be_written_are_problems(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/dev/null/hub")
    monkeypatch.setenv("TMPDIR", "/no/such/place")
    temporary, hub = check_places()
    assert temporary.text == "the temporary directory /no/such/place cannot be written (No such file or directory)"
    assert hub.text.startswith("the cache of the hub /dev/null/hub cannot be written (")
    assert temporary.remedy.startswith("set TMPDIR to") and hub.remedy.startswith("set HF_HOME to")
    assert jrlhf.__main__.cli(["doctor", "--run-dir", ""]) == 2 and "--run-dir is empty" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert the_only(check_run_dir(str(tmp_path / "file")), "problem").part == "run_dir"
    for free, state in ((500, "ok"), (5, "note"), (0.5, "problem")):
        monkeypatch.setattr(access.shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free * GIB))
        (finding,) = check_run_dir(str(tmp_path))
        assert finding.state == state and f"{free} GiB free".replace("0.5 G", "512 M") in finding.text
    with monkeypatch.context() as patch:  # a full disk still takes an empty file
        patch.setattr(files.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb", buffering=0))
        assert "(No space left on device)" in the_only(check_run_dir(str(tmp_path)), "problem").text
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/runs" in next(check_run_dir("~/runs")).text


def test_the_doctor_starts_without_numpy():
    program = "import sys; sys.modules['numpy'] = None; import jrlhf.doctor.__main__"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_an_object_store_is_written_to(memory):
    (finding,) = check_run_dir("memory://bucket/runs")
    assert finding.state == "ok" and finding.text == "memory://bucket/runs: can be written, no bound is known"
    assert Store("memory://bucket/runs", StorageConfig()).versions() == {}
    for address in ("ftp://bucket/runs", "s3:/bucket/runs"):
        assert "it is not s3://" in the_only(check_run_dir(address), "problem").text


def test_this_machine_is_examined_in_its_own_process(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    arguments = ["doctor", "--json", "--run-dir", str(tmp_path / "runs")]
    code = jrlhf.__main__.cli(arguments)
    findings = {one["part"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert code == any(one["state"] == "problem" for one in findings.values())
    assert findings["devices"]["text"].endswith(" GiB in all") and findings["programs"]["state"] == "ok"
    assert findings["hub"]["text"].startswith("offline") and not (tmp_path / "runs").exists()
    (tmp_path / "runs").touch()
    monkeypatch.setattr(checks, "backend_here", lambda: CPU)
    assert jrlhf.__main__.cli(arguments[:1] + arguments[2:]) == 1
    assert "problem  run_dir" in capsys.readouterr().out
