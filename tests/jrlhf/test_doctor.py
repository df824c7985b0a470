"""`jrlhf doctor`: facts of machines -> findings. The facts of this machine are gathered once, without a network."""

import json
import os
from dataclasses import replace

import pytest

import jrlhf.__main__
from jrlhf.config.places import StorageConfig
from jrlhf.doctor import facts as doctor_facts
from jrlhf.doctor.checks import GIB, Finding, diagnose
from jrlhf.doctor.facts import Facts
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
CPU = {"accelerator": None, "platform": "cpu", "devices": [["cpu", None]] * 4, "seconds": 1.0, "logprob_error": 1e-7}
CPU["host_memory"] = 16.0 * GIB
GPU = CPU | {"accelerator": "gpu", "platform": "gpu", "devices": [["NVIDIA H100", 80 * GIB]] * 2}
GOOD = Facts("3.11.7", ">=3.11", VERSIONS, {"jrlhf": OURS, "jax": JAX}, backend=CPU, hub_token=True, free=500 * GIB)


def others(facts: Facts) -> list[Finding]:
    """Returns what is not ok."""
    return [finding for finding in diagnose(facts) if finding.state != "ok"]


def the_only(facts: Facts, state: str) -> Finding:
    (finding,) = others(facts)
    assert finding.state == state and finding.remedy
    return finding


def test_a_good_machine_has_no_other_finding():
    for facts in (GOOD, replace(GOOD, versions=CUDA, backend=GPU)):
        assert others(facts) == []
    assert "4 x cpu, 16.0 GiB in all" in [finding.text for finding in diagnose(GOOD)]
    texts = {finding.part: finding.text for finding in diagnose(replace(GOOD, versions=CUDA, backend=GPU))}
    assert texts["devices"] == "2 x NVIDIA H100, 80.0 GiB each" and texts["accelerator"] == "JAX runs on the gpu"
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
        finding = next(one for one in others(replace(GOOD, versions=versions)) if one.state == "problem")
        assert finding.text.startswith(text) and finding.remedy.startswith("pip install") and remedy in finding.remedy
    missing = {name: version for name, version in VERSIONS.items() if name != "numpy"}
    assert "numpy is missing" in [finding.text for finding in others(replace(GOOD, versions=missing))]
    assert "3.10.1" in the_only(replace(GOOD, python="3.10.1"), "problem").text


def test_an_extra_that_is_not_installed_is_a_note_with_its_command():
    missing = {name: version for name, version in VERSIONS.items() if name != "datasets"}
    finding = the_only(replace(GOOD, versions=missing), "note")
    assert finding.text == "not installed: datasets" and "pip install 'jrlhf[hf]'" in finding.remedy
    assert the_only(replace(GOOD, requirements={}), "note").part == "packages"  # a checkout that is not installed


def test_an_idle_accelerator_is_a_problem():
    idle = replace(GOOD, backend=CPU | {"accelerator": "gpu"})
    finding = the_only(idle, "problem")
    assert "IDLE" in finding.text and finding.remedy == "pip install 'jrlhf[cuda12]' or pip install 'jrlhf[cuda13]'"
    assert the_only(replace(idle, jax_platforms="cpu"), "problem").remedy == "unset JAX_PLATFORMS"
    assert "nvidia-smi" in the_only(replace(idle, versions=CUDA), "problem").remedy
    tpu = the_only(replace(GOOD, backend=CPU | {"accelerator": "tpu"}), "problem")
    assert "a TPU" in tpu.text and tpu.remedy == "pip install 'jrlhf[tpu]'"


def test_programs_that_do_not_run_or_are_wrong_are_problems():
    started = {key: GPU[key] for key in ("accelerator", "platform", "devices")} | {"error": "XlaRuntimeError: no ptxas"}
    assert "no ptxas" in the_only(replace(GOOD, versions=CUDA, backend=started), "problem").text
    assert "no answer" in the_only(replace(GOOD, backend={"error": "no answer within 180 s"}), "problem").text
    unset = replace(GOOD, backend={"error": "AssertionError"}, jax_platforms="cuda", xla_flags="--bogus")
    assert the_only(unset, "problem").remedy.startswith("mend or unset JAX_PLATFORMS=cuda and XLA_FLAGS=--bogus; ")
    for error in (0.3, float("nan")):
        assert "off by" in the_only(replace(GOOD, backend=CPU | {"logprob_error": error}), "problem").text


def test_hub_and_disk():
    assert "offline" in others(replace(GOOD, hub_offline=True))[0].text
    assert others(replace(GOOD, hub_offline=True))[0].state == "note"
    assert "no route" in the_only(replace(GOOD, hub_error="no route"), "note").text
    assert "HF_TOKEN" in the_only(replace(GOOD, hub_token=False), "note").remedy
    assert "the token alone" in the_only(replace(GOOD, hub_token_wrong=True), "problem").remedy
    assert the_only(replace(GOOD, unwritable={"TMPDIR": "no"}), "problem").remedy.startswith("set TMPDIR to")
    assert the_only(replace(GOOD, free=GIB // 2), "problem").part == "run_dir"
    assert the_only(replace(GOOD, free=5 * GIB), "note").part == "run_dir"
    assert "Permission" in the_only(replace(GOOD, run_dir_error="Permission denied"), "problem").text


def test_variables_that_name_nothing_are_findings(monkeypatch, capsys):
    constants = pytest.importorskip("huggingface_hub.constants")
    for name, value in {"ENDPOINT": "nonsense", "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": "/dev/null/hub"}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "bad token")
    facts = doctor_facts._hub()
    assert facts["hub_error"] == "nonsense: unknown url type: 'nonsense'" and facts["hub_token_wrong"]
    monkeypatch.setenv("TMPDIR", "/no/such/place")
    places = doctor_facts._unwritable_places()
    assert places["TMPDIR"] == "the temporary directory /no/such/place cannot be written (No such file or directory)"
    assert places["HF_HOME"].startswith("the cache of the hub /dev/null/hub cannot be written (")
    assert jrlhf.__main__.cli(["doctor", "--run-dir", ""]) == 2 and "--run-dir is empty" in capsys.readouterr().err


def test_an_object_store_is_written_to(memory):
    facts = doctor_facts._storage("memory://bucket/runs")
    assert facts == {"run_dir": "memory://bucket/runs", "run_dir_error": None}
    finding = next(one for one in diagnose(replace(GOOD, **facts, free=None)) if one.part == "run_dir")
    assert finding.state == "ok" and "can be written" in finding.text
    assert Store("memory://bucket/runs", StorageConfig()).sizes() == {}
    for address in ("ftp://bucket/runs", "s3:/bucket/runs"):
        assert "it is not s3://" in str(doctor_facts._storage(address)["run_dir_error"])
    assert doctor_facts._storage("~/runs")["run_dir"] == os.path.expanduser("~/runs")


def test_this_machine_is_examined_in_its_own_process(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor_facts, "_hub", lambda: {"hub_offline": True})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    arguments = ["doctor", "--json", "--run-dir", str(tmp_path / "runs")]
    code = jrlhf.__main__.cli(arguments)
    findings = {one["part"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert code == any(one["state"] == "problem" for one in findings.values())
    assert findings["devices"]["text"].endswith(" GiB in all") and findings["programs"]["state"] == "ok"
    assert findings["hub"]["text"].startswith("offline") and not (tmp_path / "runs").exists()
    (tmp_path / "runs").touch()
    monkeypatch.setattr(doctor_facts, "_backend", lambda: CPU)
    assert jrlhf.__main__.cli(arguments[:1] + arguments[2:]) == 1
    assert "problem  run_dir" in capsys.readouterr().out
