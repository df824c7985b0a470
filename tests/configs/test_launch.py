"""The templates in configs/launch/: their shape, their commands, and what they do when a run leaves with 75."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jrlhf.config import load_config
from jrlhf.config.check import validate
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import cluster
from jrlhf.stages.setup import architectures

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "configs" / "launch"
END = "END-OF-CALL"  # of what a stand-in notes
JOBSETS = ("gke", "gke-gpu")


def closed(required: str, optional: str = "", **kinds: Any) -> dict[str, Any]:
    """A JSON Schema of an object with these keys and no others."""
    keys = [*required.split(), *optional.split()]
    properties = {key: kinds.get(key.replace("-", "_"), {}) for key in keys}
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": False}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
# The part of JobSet v1alpha2, and of the Job and Pod in it, that the templates use: Kubernetes may ignore other keys.
CONTAINER = closed(
    "name image ports env command args resources volumeMounts",
    ports=several(closed("containerPort", containerPort=COUNT)),
    env=several(
        closed("name", "value valueFrom", name=TEXT, value=TEXT, valueFrom=closed("", "fieldRef secretKeyRef"))
    ),
    command=several(TEXT),
    args=several(TEXT),
    resources=closed("limits", "requests"),
    volumeMounts=several(closed("name mountPath")),
)
CLAIM = closed("accessModes resources", resources=closed("requests", requests=closed("storage", storage=TEXT)))
VOLUME = closed(  # no hostPath: GKE Autopilot refuses it
    "name",
    "persistentVolumeClaim emptyDir ephemeral",
    ephemeral=closed("volumeClaimTemplate", volumeClaimTemplate=closed("spec", spec=CLAIM)),
)
POD = closed(
    "restartPolicy terminationGracePeriodSeconds nodeSelector containers volumes",
    "tolerations",
    restartPolicy={"const": "Never"},  # what a podFailurePolicy demands
    terminationGracePeriodSeconds=COUNT,
    containers=several(CONTAINER),
    volumes=several(VOLUME),
)
RULE = closed(
    "action",
    "onExitCodes onPodConditions",
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=closed("operator values", "containerName", operator={"enum": ["In", "NotIn"]}, values=several(COUNT)),
    onPodConditions=several(closed("type status")),
)
JOB = closed(
    "completionMode parallelism completions backoffLimit podFailurePolicy template",
    completionMode={"const": "Indexed"},
    parallelism=COUNT,
    completions=COUNT,
    backoffLimit=COUNT,
    podFailurePolicy=closed("rules", rules=several(RULE)),
    template=closed("spec", spec=POD),
)
RESTART = {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]}
POLICY = closed(
    "maxRestarts rules", maxRestarts=COUNT, rules=several(closed("name action onJobFailureReasons", action=RESTART))
)
JOBSET = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed("name", "annotations"),
    spec=closed(
        "network failurePolicy replicatedJobs",
        failurePolicy=POLICY,
        replicatedJobs=several(closed("name replicas template", template=closed("spec", spec=JOB))),
    ),
)


def jobset(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A manifest, its job and the job's container."""
    manifest = yaml.safe_load((LAUNCH / f"{name}.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return manifest, job, job["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("name", JOBSETS)
def test_the_processes_of_a_jobset_find_each_other(name):
    manifest, job, container = jobset(name)
    jsonschema.validate(manifest, JOBSET)
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["JAX_NUM_PROCESSES"] == str(job["parallelism"]) == str(job["completions"])
    title, port = manifest["metadata"]["name"], container["ports"][0]["containerPort"]
    first = f"{title}-{manifest['spec']['replicatedJobs'][0]['name']}-0-0"
    assert variables["JAX_COORDINATOR_ADDRESS"] == f"{first}.{title}:{port}"
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True} and "JAX_PROCESS_ID" in variables
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert {"/runs", "/cache"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    (token,) = (entry["valueFrom"] for entry in container["env"] if entry["name"] == "HF_TOKEN")
    assert token["secretKeyRef"] == {"name": "jrlhf-tokens", "key": "HF_TOKEN", "optional": True}
    subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True)


def restart(manifest: dict[str, Any], job: dict[str, Any], code: int, conditions: Mapping[str, str] = {}) -> str:
    """What a JobSet does after a pod ended with this code, by the rules of Kubernetes: the first that fits."""

    def fits(rule: dict[str, Any]) -> bool:
        if "onExitCodes" in rule:
            inside = code in rule["onExitCodes"]["values"]
            return code != 0 and inside == (rule["onExitCodes"]["operator"] == "In")
        return any(conditions.get(wanted["type"]) == wanted["status"] for wanted in rule["onPodConditions"])

    rule = next((rule for rule in job["podFailurePolicy"]["rules"] if fits(rule)), {"action": "Count"})
    assert rule["action"] in ("FailJob", "Count") and job["backoffLimit"] == 0
    reason = "PodFailurePolicy" if rule["action"] == "FailJob" else "BackoffLimitExceeded"
    rules = manifest["spec"]["failurePolicy"]["rules"]
    return next((rule["action"] for rule in rules if reason in rule["onJobFailureReasons"]), "RestartJobSet")


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_counts_crashes_and_no_requeues(name):
    manifest, job, container = jobset(name)
    assert restart(manifest, job, 75) == "RestartJobSetAndIgnoreMaxRestarts"
    assert restart(manifest, job, 137, {"DisruptionTarget": "True"}) == "RestartJobSetAndIgnoreMaxRestarts"
    assert {restart(manifest, job, code) for code in (1, 2, 137)} == {"RestartJobSet"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] < 10
    names = [
        rule["onExitCodes"].get("containerName") for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert names == [container["name"]]


def words(script: str) -> list[str]:
    """The config and the overrides of the command in a script."""
    parts = shlex.split(script.replace("\\\n", " "), comments=True)
    return parts[parts.index("--config") + 1 : parts.index("--resume=auto")]


def test_the_commands_of_launch_templates_suit_their_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    slurm, tpu_pod = ((LAUNCH / f"{name}.sh").read_text() for name in ("slurm", "tpu-pod"))
    nodes, gpus = (int(re.findall(rf"^#SBATCH --{key}=(\d+)$", slurm, re.M)[0]) for key in ("nodes", "gpus-per-node"))
    ((total, on_slurm),) = re.findall(r"^# On the (\d+) GPUs below, for instance: (.*)$", slurm, re.M)
    assert int(total) == nodes * gpus
    ((pod, on_pod),) = re.findall(r"^# On a (\S+), for instance: (.*)$", tpu_pod, re.M)
    _, job, container = jobset("gke")
    chips = job["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    topology = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert chips == math.prod(int(side) for side in topology.split("x"))
    _, gpu_job, gpu_container = jobset("gke-gpu")
    on_nodes = gpu_job["parallelism"] * gpu_container["resources"]["limits"]["nvidia.com/gpu"]
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    sky_gpus = sky["num_nodes"] * int(sky["resources"]["accelerators"].partition(":")[2])
    values = ("$RUN_DIR", "s3://bucket/runs"), ("$CONFIG", sky["envs"]["CONFIG"]), ("$name", "mine")
    on_sky = [reduce(lambda text, pair: text.replace(*pair), values, word) for word in words(sky["run"])]
    commands = [(int(total), on_slurm.split()), (cluster(pod).devices, on_pod.split())]
    commands += [(chips, words(container["args"][0])), (on_nodes, words(gpu_container["args"][0])), (sky_gpus, on_sky)]
    for devices, command in commands:
        config = load_config(command[0], command[1:])
        validate(config, devices, architectures(config))
        with pytest.raises(UserError, match=f"does not fit {2 * devices} device"):
            validate(config, 2 * devices, architectures(config))


# --- Scripts, with stand-ins for what they call ---


def stand_in(folder: Path, name: str, script: str) -> None:
    """A command that notes its arguments in `called`, NUL after each and END as the last, and runs `script`."""
    folder.mkdir(exist_ok=True)
    note = f"printf '%s\\0' {name} \"$@\" {END} >>{shlex.quote(str(folder / 'called'))}\n"  # one write: no line end
    (folder / name).write_text(f"#!/bin/bash\n{note}{script}\n")
    (folder / name).chmod(0o755)


def calls(folder: Path, name: str) -> list[list[str]]:
    lines = (folder / "called").read_text().split(f"\0{END}\0") if (folder / "called").exists() else []
    return [line.split("\0")[1:] for line in lines if line.split("\0")[0] == name]


def bash(folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    command = ["bash", *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | paths | variables, cwd=folder, timeout=60, capture_output=True, text=True
    )


def codes(folder: Path, *numbers: int) -> str:
    """A script that ends with the first code when it is called first, and so on."""
    (folder / "codes").write_text("\n".join(map(str, numbers)) + "\n")
    return f"code=$(head -n1 {folder}/codes); sed -i 1d {folder}/codes; exit $code"


@pytest.mark.parametrize("code", [2, 75])
def test_slurm_requeues_after_75_only(tmp_path, code):
    slurm = (LAUNCH / "slurm.sh").read_text()
    assert "#SBATCH --signal=TERM@" in slurm and "#SBATCH --requeue" in slurm
    stand_in(tmp_path, "srun", f"exit {code}")
    stand_in(tmp_path, "scontrol", "exit 0")
    variables = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    for place, more in ((f"{tmp_path}/runs", {}), ("s3://bucket/runs", {"RUN_DIR": "s3://bucket/runs"})):
        done = bash(tmp_path, LAUNCH / "slurm.sh", "quickstart", "seed=1", **variables, **more)
        assert done.returncode == code
        given = ["--config", "quickstart", f"run_dir={place}", "name=quickstart-7", "seed=1", "--resume=auto"]
        assert calls(tmp_path, "srun")[-1][-6:] == given
    assert calls(tmp_path, "scontrol") == [["requeue", "7"]] * (2 if code == 75 else 0)


@pytest.mark.parametrize("script", ["slurm.sh", "ray-slurm.sh"])
def test_a_job_of_slurm_takes_the_run_of_another_and_runs_nowhere_else(tmp_path, script):
    stand_in(tmp_path, "srun", "exit 0")
    stand_in(tmp_path, "scontrol", "echo one")
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "RUN_NAME": "quickstart-6"}
    job |= {"SLURM_JOB_NODELIST": "one", "SLURM_JOB_NUM_NODES": "1"}
    assert bash(tmp_path, LAUNCH / script, "quickstart", **job).returncode == 0
    (train,) = (call for call in calls(tmp_path, "srun") if "jrlhf.train" in call)
    assert {"name=quickstart-6", "--resume=auto"} <= {*train}
    assert "start this script by sbatch" in bash(tmp_path, LAUNCH / script, "quickstart", SLURM_JOB_ID="").stderr


@pytest.mark.parametrize("version, code", [("3.10.12", 1), ("3.11.0", 0)])
def test_an_older_python_is_refused_before_anything_is_installed(tmp_path, version, code):
    setup = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["setup"]
    numbers = tuple(map(int, version.split(".")))
    older = f"import sys; sys.version_info = {numbers}; sys.version = '{version} x'; exec(sys.argv[1])"
    for name, script in (("python", setup), ("python3", on_pod(tmp_path)[0])):
        folder = tmp_path / name
        stand_in(folder, "pip", "exit 0")
        stand_in(folder, name, f'[[ $1 = -m ]] || exec {sys.executable} -c {shlex.quote(older)} "$2"')
        done = bash(folder, "-c", script, SOURCE="x")
        installations = calls(folder, "pip") + [call for call in calls(folder, name) if call[0] == "-m"]
        assert (done.returncode, len(installations)) == (code, 1 - code)
        assert (f"needs Python 3.11 or newer, and {sys.executable} is {version}: " in done.stderr) == bool(code)


@pytest.mark.parametrize("code", [0, 75])
def test_ray_on_slurm_starts_the_cluster_before_the_trainer_and_requeues_after_75_only(tmp_path, code):
    both = "grep -qa -e --head $HOME/called && grep -qa -e --exclude $HOME/called"
    status = f'[[ "$*" == *"ray status"* ]] && {{ {both}; exit; }}'
    trainer = f'[[ "$*" == *jrlhf.train* ]] && {{ echo "$RAY_ADDRESS" >>$HOME/address; exit {code}; }}; exit 0'
    stand_in(tmp_path, "srun", f"{status}\n{trainer}")
    stand_in(tmp_path, "scontrol", '[[ "$1" = show ]] && printf "one\\ntwo\\nthree\\n"; exit 0')
    variables = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    variables |= {"SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_NUM_NODES": "3"}
    done = bash(tmp_path, LAUNCH / "ray-slurm.sh", "quickstart", "fleet.engine=ray", **variables)
    assert done.returncode == code, done.stderr
    starts = calls(tmp_path, "srun")
    (head,), (workers,) = ([call for call in starts if word in call] for word in ("--head", "--exclude=one"))
    assert "--nodelist=one" in head and "--num-gpus=0" in head and "--nodes=2" in workers
    (train,) = (call for call in starts if "jrlhf.train" in call)
    assert starts.index(head) < starts.index(train)
    assert {"--nodelist=one", "fleet.engine=ray", "--resume=auto"} <= {*train}
    requeues = [call for call in calls(tmp_path, "scontrol") if call[0] == "requeue"]
    assert requeues == ([["requeue", "7"]] if code == 75 else [])
    assert (tmp_path / "address").read_text() == "one:6379\n"


def test_a_rayjob_gives_the_trainer_the_gpus_of_the_head_and_resumes():
    manifest = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    containers, volumes = several(CONTAINER | {"required": ["name"]}), several(VOLUME)
    pods = closed("nodeSelector tolerations containers volumes", containers=containers, volumes=volumes)
    group = closed(
        "rayStartParams template", "groupName replicas minReplicas maxReplicas", template=closed("spec", spec=pods)
    )
    cluster_spec = closed(
        "rayVersion authOptions headGroupSpec workerGroupSpecs", headGroupSpec=group, workerGroupSpecs=several(group)
    )
    keys = "backoffLimit shutdownAfterJobFinishes ttlSecondsAfterFinished entrypoint rayClusterSpec"
    jsonschema.validate(
        manifest, closed("apiVersion kind metadata spec", spec=closed(keys, rayClusterSpec=cluster_spec))
    )
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    head, (workers,) = (manifest["spec"]["rayClusterSpec"][key] for key in ("headGroupSpec", "workerGroupSpecs"))
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert all(isinstance(value, str) for value in head["rayStartParams"].values())  # what KubeRay takes
    for part in (head, workers):
        pod = part["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]} and mounts["cache"] == "/cache"
    shell, option, script = shlex.split(manifest["spec"]["entrypoint"])
    assert (shell, option) == ("bash", "-c")
    subprocess.run(["bash", "-n", "-c", script], check=True)
    given = shlex.split(script)
    settings = dict(word.split("=") for word in given if re.fullmatch(r"[\w.]+=\S+", word))
    assert settings["fleet.workers"] == str(workers["replicas"]) and settings["fleet.engine"] == "ray"
    assert given[-1] == "--resume=auto"


def on_pod(tmp_path: Path, *overrides: str, **more: str) -> list[str]:
    """What tpu-pod.sh has every host run."""
    stand_in(tmp_path, "gcloud", "exit 0")
    variables = {"TPU": "pod", "ZONE": "here", "BUCKET": "gs://bucket", "SOURCE": "https://host/jrlhf.whl", **more}
    assert bash(tmp_path, LAUNCH / "tpu-pod.sh", "quickstart", *overrides, **variables).returncode == 0
    return [call[-1].removeprefix("--command=") for call in calls(tmp_path, "gcloud")]


@pytest.mark.parametrize("overrides", [[], ["seed=1", "ppo.algorithm={epochs: 2, minibatches: 4}"]])
def test_every_host_of_a_pod_gets_the_overrides_and_nothing_else(tmp_path, overrides):
    install, *_, last = on_pod(tmp_path, *overrides)
    assert "jrlhf[tpu,hf] @ https://host/jrlhf.whl" in install
    (train,) = (line for line in last.splitlines() if "jrlhf.train" in line)
    _, given = train.split("device.platform=tpu")
    assert shlex.split(given) == [*overrides, "--resume=auto"]


@pytest.mark.parametrize("ends, code", [((75, 75, 0), 0), ((75, 2), 2)])
def test_a_host_of_a_pod_starts_again_after_75_only(tmp_path, ends, code):
    (tmp_path / "data").mkdir()
    last = on_pod(tmp_path, SECRET="tokens", FILES="data/rows.jsonl my_rewards.py")[-1]
    copies = [call[3:6] for call in calls(tmp_path, "gcloud") if "scp" in call]
    assert copies == [["scp", "data/rows.jsonl", "pod:rows.jsonl"], ["scp", "my_rewards.py", "pod:my_rewards.py"]]
    stand_in(tmp_path, "python3", f'test "$HF_TOKEN" = secret || exit 9; {codes(tmp_path, *ends)}')
    stand_in(tmp_path, "sleep", "exit 0")
    stand_in(tmp_path, "gcloud", 'test "$*" = "secrets versions access latest --secret=tokens" && echo secret')
    assert bash(tmp_path, "-c", last).returncode == code
    starts = calls(tmp_path, "python3")
    assert [start[-1] for start in starts] == ["--resume=auto"] * len(ends)


def test_skypilot_recovers_after_75_without_counting_it_and_resumes(tmp_path):
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert sky.keys() == {"name", "num_nodes", "resources", "envs", "secrets", "setup", "run"}
    recovery = sky["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    given = {name: value for name, value in (sky["envs"] | sky["secrets"]).items() if value is not None}
    assert given == {"CONFIG": "llama3-8b-ppo"}  # SkyPilot refuses to start without the others
    stand_in(tmp_path, "python", "exit 75")
    assert bash(tmp_path, "-c", sky["run"], RUN_DIR="s3://bucket/runs", **given).returncode == 75
    settings = ["run_dir=s3://bucket/runs", "name=llama3-8b-ppo"]
    assert calls(tmp_path, "python")[0][3:] == ["--config", "llama3-8b-ppo", *settings, "--resume=auto"]


def test_scripts_can_be_run():
    assert all(os.access(LAUNCH / script, os.X_OK) for script in ("slurm.sh", "ray-slurm.sh", "tpu-pod.sh"))


def test_the_image_has_what_the_templates_run():
    """Read as hadolint would: versions are pinned, no cache of pip, the process gets the signals."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    assert {word for word, _ in instructions} <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    (base,) = (rest for word, rest in instructions if word == "FROM")
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)
    for word, rest in instructions:
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(yaml.safe_load(rest), list)  # a shell would keep SIGTERM from the process
        if word == "RUN":
            assert rest.count("pip install") == rest.count("--no-cache-dir")
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if word == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    program = re.search(r'python -c "(import tomllib.*?)"\s+>', text, re.S)
    assert program is not None
    for extra in ("tpu", "cuda12", "cuda13"):
        script = program[1].replace("${EXTRA}", extra).replace("${MORE}", "ray")
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        names = {re.split(r"[\[<>=;]", line)[0] for line in done.stdout.splitlines()}
        assert {"jax", "flax", "transformers", "fsspec", "ray"} <= names and f"jax[{extra}]" in done.stdout.splitlines()
    script = program[1].replace("${EXTRA}", "gpu").replace("${MORE}", "")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: there is no extra ['gpu']: EXTRA and MORE must be")
