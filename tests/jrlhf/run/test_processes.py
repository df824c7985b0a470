"""Several processes on one machine: they agree, run what one process runs, and end together."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jrlhf.algorithms.registry import graph_of
from jrlhf.config import Config, load_config
from jrlhf.config.schema import DistributedConfig
from jrlhf.errors import UserError
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.plans import refuse_cross_process, transfer_line
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import read_metrics
from jrlhf.run.processes import start
from tests.support.processes import free_port

ROOT = Path(__file__).parents[3]
TINY = str(Path(__file__).parents[1] / "tiny.yaml")
SMALL = (
    "sft.steps=3 sft.batch=8 sft.eval_every=2 reward_model.steps=2 reward_model.prompts=8 "
    "reward_model.heldout_prompts=8 ppo.iterations=3 ppo.rollout_batch=16 ppo.save_every=1 ppo.algorithm.epochs=1 "
    "evaluation.prompts=8 rollout.chunk=12 rollout.slots=8 rollout.buckets=1 rollout.lengths=1"
).split()
_LAYOUT = {"generate": "generate", "infer": "score", "train": "train"}  # by a call's kind
LAYOUTS = {call.name: _LAYOUT[call.kind] for call in graph_of(Config()) if call.kind in _LAYOUT}

AGREE = """
import json, sys, threading
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jrlhf.config import load_config
from jrlhf.config.schema import DeviceConfig, DistributedConfig
from jrlhf.run.devices import select
from jrlhf.errors import UserError
from jrlhf.stages.setup import architectures, select_plan
from jrlhf.meshes import gathered, make_mesh, reshard, to_devices, to_host
from jrlhf.meshes.spread import spread
from jrlhf.run.processes import any_process, from_main, is_main, to_all_hosts

devices = select(DeviceConfig(platform="cpu", simulated=2), DistributedConfig(timeout=60))
number, results = jax.process_index(), {}
called = []
results["value"] = from_main(lambda: called.append(number) or {"process": number, "size": len(b"x" * 9_000_000)})
results["called"] = called

def fail():
    raise UserError("rewards[0] is not there")

try:
    from_main(fail)
except UserError as error:
    results["error"] = str(error)
results["any"] = [any_process(False), any_process(number == 1), any_process(True)]

mesh = make_mesh(1, 2, 2, devices=devices)
rows = NamedSharding(mesh, P("fsdp", "tensor"))
host = {"x": np.arange(24.0, dtype=np.float32).reshape(4, 6).T[:, ::-1], "n": np.int32(7)}
placed = to_devices(host, {"x": rows, "n": NamedSharding(mesh, P())})
results["shards"] = {str(s.index): s.data.tolist() for s in placed["x"].addressable_shards}
doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(placed)
whole = gathered(doubled)
fetched = []
thread = threading.Thread(target=lambda: fetched.append(jax.device_get(whole)))
thread.start(); thread.join()
results["doubled"] = [fetched[0]["x"].tolist(), to_host(doubled)["x"].tolist(), int(fetched[0]["n"])]
keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(np.arange(4))
divided = to_devices(keys, NamedSharding(mesh, P(("fsdp", "tensor"))))
own = P(("fsdp", "tensor"))
draw = jax.jit(jax.shard_map(jax.vmap(jax.random.bits), mesh=mesh, in_specs=own, out_specs=own))
results["drawn"] = to_host(draw(divided)).tolist()
moved = to_devices(divided, NamedSharding(mesh, P("fsdp")))  # from devices to devices
results["moved"] = to_host(draw(jax.jit(lambda k: k, out_shardings=divided.sharding)(moved))).tolist()
results["expected"] = np.asarray(jax.vmap(jax.random.bits)(keys)).tolist()
parts = {name: make_mesh(1, -1, 1, devices=own) for name, own in {
    "first": devices[:2], "second": devices[2:], "middle": devices[1:3], "last": devices[3:]}.items()} | {"all": mesh}
rows = {name: to_devices(host, {"x": NamedSharding(part, P("fsdp")), "n": NamedSharding(part, P())}) for name, part in
    parts.items() if name in ("first", "second", "all")}
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200_000_000, lambda _, x: x * 0.999 + 1, x))(rows["second"]["x"])
results["read"] = [to_all_hosts(rows["first"])]
results["busy"] = number == 1 and not slow.is_ready()
results["read"] += [to_all_hosts(rows["second"]), to_all_hosts(rows["all"])]
results["read"] = [[tree["x"].tolist(), int(tree["n"])] for tree in results["read"]]
flags = to_devices(np.arange(6) % 3 == 0, NamedSharding(parts["first"], P("fsdp")))
some = to_all_hosts({"x": rows["first"]["x"], "done": flags}, np.array([1, 3]))
results["some"] = [some["x"][[1, 3]].tolist(), some["done"][[1, 3]].tolist()]
results["slices"] = {}
for pair in ("first second", "all second", "second all", "middle second", "last first", "first last", "all last"):
    source, target = (parts[name] for name in pair.split())
    given = to_devices(host, {"x": NamedSharding(source, P(None, "fsdp")), "n": NamedSharding(source, P())})
    moved = reshard(given, {"x": NamedSharding(target, P("fsdp", "tensor")), "n": NamedSharding(target, P())})
    saved = spread(moved)
    own = [shard.data.shape for shard in saved["x"].addressable_shards]
    arrived = to_host([moved["x"], moved["n"], saved["x"]])
    results["slices"][pair] = [*(array.tolist() for array in arrived), own]
tiny, directory = sys.argv[1:]
config = load_config(tiny, [f"plan={directory}/{number}.yaml", "mesh.fsdp=2"])
results["plan"] = select_plan(config, architectures(config), devices).as_dict()
print(json.dumps(results))
"""

EARLY = """
import json, sys
from dataclasses import replace
from jrlhf.roles.early import OpenRollout
from jrlhf.stages.context import Context
from jrlhf.train import cli

hand_out, early = OpenRollout._hand_out, []
sampling = Context.sampling.fget
Context.sampling = property(lambda self: replace(sampling(self), stop_ids=tuple(range(0, 300, 4))))  # unlike lengths

def counted(self, done, read, mesh):
    hand_out(self, done, read, mesh)
    early.append([mesh.size, sum(len(reader.results) for reader in self._readers if reader.devices)])

OpenRollout._hand_out = counted
code = cli(sys.argv[1:])
print(json.dumps({"early": early}))
sys.exit(code)
"""


@dataclass
class Launched:
    """Processes of one run, and the files with their output."""

    processes: list[subprocess.Popen]
    logs: list[Path]

    def assert_codes(self, seconds: float, *expected: int) -> None:
        """Waits for the exit codes; processes that do not end in time are killed."""
        until = time.monotonic() + seconds
        try:
            codes = tuple(process.wait(max(0.1, until - time.monotonic())) for process in self.processes)
        except subprocess.TimeoutExpired:
            pytest.fail(f"a process hangs: {[log.read_text()[-2000:] for log in self.logs]}")
        finally:
            for process in self.processes:
                process.kill()
        assert codes == expected, self.text(0)[-3000:]

    def answers(self, seconds: float) -> list[Any]:
        """Waits for exit codes of 0; returns the last JSON object that each process printed into its pipe. Processes
        that do not end in time are killed."""
        until, outputs = time.monotonic() + seconds, list[str]()
        try:
            for process in self.processes:
                outputs.append(process.communicate(timeout=max(0.1, until - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            pass
        self.assert_codes(0.1, *[0] * len(self.processes))
        return [json.loads(re.findall(r"^\{.*", output, re.M)[-1]) for output in outputs]  # Gloo prints into them, too

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until and all(process.poll() is None for process in self.processes)
            time.sleep(0.05)

    def text(self, number: int) -> str:
        return self.logs[number].read_text(errors="replace")


def launch(count: int, directory: Path, *arguments: str, **more: str) -> Launched:
    """Starts the same command in `count` processes that find each other by the environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | more
    if count > 1:
        environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    launched = Launched([], [])
    for number in range(count):
        variables = environment | ({"JAX_PROCESS_ID": str(number)} if count > 1 else {})
        launched.logs.append(directory / f"{arguments[-1].replace('/', '-')[-40:]}.{number}.log")
        with open(launched.logs[-1], "w") as log:
            output = log if arguments[0] == "-m" else subprocess.PIPE
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, stdout=output, stderr=log, text=True, env=variables, cwd=ROOT)
            launched.processes.append(process)
    return launched


def train(count: int, runs: Path, name: str, *overrides: str, config: str = TINY) -> Launched:
    settings = (f"run_dir={runs}", f"device.simulated={8 // count}", *overrides, f"name={name}")
    command = ("-m", "jrlhf.train", "--config", config, *settings)
    return launch(count, runs, *command, JAX_COMPILATION_CACHE_DIR=str(runs / "programs"))


def train_one_and_two(runs: Path, *overrides: str, config: str = TINY) -> tuple[Path, Path]:
    """Trains the same run in one process with 8 devices, and in two processes with 4 each."""
    for count, name in ((1, "one"), (2, "two")):
        train(count, runs, name, *overrides, config=config).assert_codes(900, *[0] * count)
    return runs / "one", runs / "two"


def records(run: Path) -> list[dict]:
    """The metrics that do not depend on time or machine."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("timing_", "perf/"))}
        for record in read_metrics(run)
    ]


def texts(run: Path) -> list[dict]:
    samples = read_jsonl(run / "samples.jsonl")
    return [{name: value for name, value in sample.items() if isinstance(value, str)} for sample in samples]


def assert_same_run(one: Path, two: Path, *models: str) -> None:
    """Numbers but for rounding, texts to the letter."""
    for alone, together in zip(records(one), records(two), strict=True):
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            # Differences of nearly equal numbers (a KL, an advantage's mean) are as exact as these are.
            close = pytest.approx(value, rel=1e-5, abs=2e-6) if isinstance(value, float) else value
            assert together[name] == close, (alone["stage"], alone["step"], name)
    assert texts(one) == texts(two)
    for model in models:
        weights, same = (load_file(run / model / "model.safetensors") for run in (one, two))
        assert weights.keys() == same.keys()
        for name in weights:
            np.testing.assert_allclose(same[name], weights[name], atol=1e-5, rtol=1e-4, err_msg=name)


def test_processes_agree_and_share_arrays(tmp_path: Path):
    placed = {name: {"layout": layout, "devices": "0-3", "fsdp": 4} for name, layout in LAYOUTS.items()}
    (tmp_path / "0.yaml").write_text(yaml.safe_dump({"calls": placed}))  # process 1 has none
    launched = launch(2, tmp_path, "-c", AGREE, TINY, str(tmp_path))
    first, second = launched.answers(120)
    assert first.pop("called") == [0] and second.pop("called") == []
    assert (first.pop("busy"), second.pop("busy")) == (False, True)  # its devices compute while it gets others' arrays
    expected = np.arange(24.0, dtype=np.float32).reshape(4, 6).T[:, ::-1]
    shards = first.pop("shards") | second.pop("shards")
    assert len(shards) == 4  # each process has only its own
    for index, values in shards.items():
        rows, columns = (slice(*map(int, part)) for part in re.findall(r"slice\((\d+), (\d+), None\)", index))
        np.testing.assert_array_equal(values, expected[rows, columns])
    assert first == second
    assert first["value"] == {"process": 0, "size": 9_000_000}
    assert first["error"] == "rewards[0] is not there"
    assert first["any"] == [False, True, True]
    assert first["doubled"] == [(2 * expected).tolist()] * 2 + [14]
    assert first["drawn"] == first["moved"] == first["expected"]
    assert first["read"] == [[expected.tolist(), 7]] * 3
    assert first["some"] == [expected[[1, 3]].tolist(), [False, True]]
    for moved, number, saved, shards in first["slices"].values():
        assert moved == saved == expected.tolist() and number == 7
        assert len(shards) == 2 and np.prod(shards[0]) < 24  # each process has a part of what is saved
    assert first["plan"]["calls"] == placed


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """SFT, a reward model and PPO, in one process and in two."""
    runs = tmp_path_factory.mktemp("runs")
    train_one_and_two(runs, *SMALL)
    return runs


@pytest.mark.proof("processes")
def test_two_processes_do_what_one_does_and_write_files_once(runs: Path):
    assert_same_run(runs / "one", runs / "two", "model", "reward_model")
    for name in ("preferences.jsonl", "tokenizer.json"):
        assert (runs / "one" / name).read_bytes() == (runs / "two" / name).read_bytes()

    def files(run: Path) -> set[str]:
        paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file() and "checkpoints" not in str(path))
        return {re.sub(r"events\..*", "events", str(path)) for path in paths}

    assert files(runs / "one") == files(runs / "two")
    assert (runs / "two" / "environment.txt").read_text().count("# command:") == 1
    assert len(list((runs / "two" / "tensorboard" / "ppo").iterdir())) == 1
    output = (runs / "name=two.1.log").read_text()
    assert "ppo" not in output and "ppo 3/3" in (runs / "name=two.0.log").read_text()


@pytest.mark.proof("processes")
def test_a_run_that_one_process_is_asked_to_stop_goes_on_to_the_same_bits(runs: Path):
    launched = train(2, runs, "stopped", *SMALL)
    metrics = runs / "stopped" / "metrics.jsonl"
    launched.wait_until(lambda: metrics.exists() and '"stage": "ppo"' in metrics.read_text(), 400)
    launched.processes[1].send_signal(signal.SIGTERM)
    launched.assert_codes(100, 75, 75)
    assert "its state is saved; go on with --resume" in launched.text(0)
    assert records(runs / "stopped")[-1]["step"] < 3
    train(2, runs, "stopped", *SMALL, "--resume").assert_codes(400, 0, 0)
    assert records(runs / "stopped") == records(runs / "two")
    weights, expected = (load_file(runs / name / "model" / "model.safetensors") for name in ("stopped", "two"))
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


def kill_second(launched: Launched, run: Path, iterations: int) -> None:
    """Kills the second of two processes as soon as so many iterations are recorded; the first one ends by itself."""
    metrics = run / "metrics.jsonl"
    launched.wait_until(lambda: metrics.exists() and metrics.read_text().count('"stage": "ppo"') == iterations, 400)
    launched.processes[1].kill()
    launched.processes[1].wait()
    assert launched.processes[0].wait(60) == 1 and "process 1 of 2" in launched.text(0)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """Actor and reference on one half of the devices, critic and reward model on the other: in one process and two."""
    runs = tmp_path_factory.mktemp("split")
    train_one_and_two(runs, *SMALL, "plan=split")
    return runs


@pytest.mark.proof("processes")
def test_calls_on_slices_of_two_processes_do_what_they_do_in_one(split: Path):
    assert_same_run(split / "one", split / "two", "model", "reward_model")
    lines = [line for line in read_jsonl(split / "two" / "timeline.jsonl") if line["stage"] == "ppo"]
    busy = {call["devices"]: call["end"] - call["start"] for line in lines for call in line["calls"]}
    assert busy.keys() == {"0-3", "4-7"} and min(busy.values()) > 0.001  # process 0 writes the times of both


@pytest.mark.proof("processes")
def test_a_killed_run_on_slices_goes_on_to_the_same_bits_and_under_another_plan(split: Path):
    asleep = "plan=split", "sleep.optimizer=host", "distributed.heartbeat=10"
    kill_second(train(2, split, "killed", *SMALL, *asleep), split / "killed", 2)
    train(2, split, "killed", *SMALL, *asleep, "--resume").assert_codes(400, 0, 0)
    assert records(split / "killed") == records(split / "two")
    train(4, split, "killed", *SMALL, "plan=standalone", "--resume", "ppo.iterations=4").assert_codes(400, *[0] * 4)
    assert records(split / "killed")[-1]["step"] == 4


@pytest.mark.proof("processes")
def test_devices_of_another_process_score_while_the_last_rows_decode(tmp_path: Path):
    """Generation on all four groups of devices; the last rows move to one of process 0, and process 1 scores."""
    calls = {call: {"layout": layout, "devices": "0-3", "fsdp": 2, "tensor": 2} for call, layout in LAYOUTS.items()}
    calls["actor.generate"] |= {"devices": "0-7", "fsdp": 4}
    for call in ("reference.logprobs", "critic.values", "reward.score"):
        calls[call] |= {"devices": "4-7"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"name": "by hand", "calls": calls}))
    settings = f"run_dir={tmp_path}", f"plan={tmp_path / 'plan.yaml'}", "compute.score_rows=4", "rollout.chunk=1"
    counts = []
    for count, name in ((1, "one"), (2, "two")):
        own = *settings, "rollout.last_groups=1", f"device.simulated={8 // count}", f"name={name}"
        launched = launch(count, tmp_path, "-c", EARLY, "--config", TINY, *SMALL, *own)
        counts += [answer["early"] for answer in launched.answers(600)]
    assert counts[0] == counts[1] == counts[2]
    assert {size for size, scored in counts[0]} == {2, 8}
    assert all(scored == 0 for size, scored in counts[0] if size == 8) and max(scored for _, scored in counts[0]) > 0
    assert_same_run(tmp_path / "one", tmp_path / "two", "model", "reward_model")


@pytest.mark.proof("processes")
def test_pipelines_of_two_processes_do_what_they_do_in_one(tmp_path: Path):
    """The actor has a stage in each process, the critic both in the second; then both share one table. Models score in
    stages, too.

    There a run that is killed goes on to the same bits.
    """
    staged: dict[str, Any] = {"layout": "train", "fsdp": 2, "pipeline": 2, "micro_batches": 2}
    actor, critic = staged | {"devices": "0-7", "tensor": 2}, staged | {"devices": "4-7", "schedule": "zb-h1"}
    calls = {call: {"layout": layout, "devices": "0-7", "fsdp": 4, "tensor": 2} for call, layout in LAYOUTS.items()}
    calls |= {"reference.logprobs": actor | {"layout": "score"}, "critic.values": staged | {"devices": "4-7"}}
    calls["critic.values"] |= {"layout": "train_tp"}
    fused = {call: actor | {"schedule": "fused"} for call in ("actor.update", "critic.update")}
    for name, updates in (("apart", {"actor.update": actor, "critic.update": critic}), ("fused", fused)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "calls": calls | updates}))
    train_one_and_two(tmp_path, *SMALL, f"plan={tmp_path / 'apart.yaml'}")
    assert_same_run(tmp_path / "one", tmp_path / "two", "model", "reward_model")
    resumed = f"plan={tmp_path / 'fused.yaml'}", "ppo.iterations=5", "distributed.heartbeat=10", "--resume"
    shutil.copytree(tmp_path / "two", tmp_path / "killed")
    for count, name in ((1, "one"), (2, "two")):
        train(count, tmp_path, name, *SMALL, *resumed).assert_codes(900, *[0] * count)
    assert_same_run(tmp_path / "one", tmp_path / "two", "model")
    assert records(tmp_path / "two")[-1]["step"] == 5
    kill_second(train(2, tmp_path, "killed", *SMALL, *resumed), tmp_path / "killed", 4)
    train(2, tmp_path, "killed", *SMALL, *resumed).assert_codes(400, 0, 0)
    assert records(tmp_path / "killed") == records(tmp_path / "two")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "two")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "loss, lost",
    [
        pytest.param("SIGSTOP", 0, marks=pytest.mark.full),
        *(
            pytest.param(*case, marks=pytest.mark.proof("processes"))
            for case in (("SIGSTOP", 1), ("SIGKILL", 0), ("SIGKILL", 1))
        ),
    ],
)
def test_a_process_that_is_lost_ends_the_others(tmp_path: Path, loss: str, lost: int):
    endless = ("stages=[sft]", "sft.steps=1000000", "sft.save_every=1000000", "distributed.heartbeat=10")
    launched = train(2, tmp_path, f"lost{lost}", *SMALL, *endless)
    metrics = tmp_path / f"lost{lost}" / "metrics.jsonl"
    launched.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, 200)
    launched.processes[lost].send_signal(signal.Signals[loss])
    code = launched.processes[1 - lost].wait(60)
    launched.processes[lost].kill()
    launched.processes[lost].wait()
    output = launched.text(1 - lost)
    sentences = re.findall(r"^error: .*", output, re.M)
    assert code == 1 and "Traceback" not in output, output
    assert len(sentences) == 1 and f"process {lost} of 2" in sentences[0], output


FUNCTION = """
import os
from pathlib import Path

def shorter(completions):
    with Path(os.environ["WHO"]).open("a") as file:
        file.write(f"{os.getppid()}\\n")
    if Path(os.environ["WHO"]).read_text().count("\\n") > int(os.environ["GOOD"]):
        raise ValueError("no more")
    return [-len(completion[0]["content"]) / 10 for completion in completions]
"""
RATES = {"learning_rate": 1e-3, "warmup": 0}


@pytest.mark.proof("processes")
def test_pairs_in_two_processes(settings, tmp_path: Path):
    path = tmp_path / "config.yaml"
    stage = {"steps": 3, "batch": 8, "eval_every": 2, **RATES}
    path.write_text(yaml.safe_dump(settings(stages=["dpo"], rewards=[], dpo=stage)))
    assert_same_run(*train_one_and_two(tmp_path, config=str(path)), "model")


@pytest.mark.proof("processes")
def test_all_processes_learn_from_a_model_of_text_and_from_a_function_in_the_first(
    user: Path, settings, tmp_path: Path, monkeypatch
):
    (tmp_path / "rewards.py").write_text(FUNCTION)
    rewards = [{"name": "judge", "model": str(user / "reward")}]
    rewards += [{"name": "short", "function": f"{tmp_path / 'rewards.py'}:shorter"}]
    grpo = {"iterations": 2, "rollout_batch": 16, "algorithm": {"samples": 4}, "actor": RATES}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(stages=["grpo"], rewards=rewards, grpo=grpo)))
    monkeypatch.setenv("GOOD", "1000")
    for count, name in ((1, "one"), (2, "two")):
        monkeypatch.setenv("WHO", str(tmp_path / f"{name}.txt"))
        launched = train(count, tmp_path, name, config=str(path))
        launched.assert_codes(300, *[0] * count)
        callers = {int(line) for line in (tmp_path / f"{name}.txt").read_text().split()}
        assert callers == {launched.processes[0].pid}
    assert_same_run(tmp_path / "one", tmp_path / "two", "model")
    assert all(record["rewards/short/mean"] < 0 for record in records(tmp_path / "two"))
    # One that fails ends both with its one sentence, and what was learnt is kept.
    monkeypatch.setenv("GOOD", "1")
    monkeypatch.setenv("WHO", str(tmp_path / "failing.txt"))
    launched = train(2, tmp_path, "failing", config=str(path))
    launched.assert_codes(300, 2, 2)
    for number in (0, 1):
        assert len(re.findall("error: .*no more", launched.text(number))) == 1, launched.text(number)[-2000:]


@pytest.fixture
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_", "KUBERNETES")):
            monkeypatch.delenv(name)


def test_an_address_is_complete_or_absent(no_cluster, monkeypatch):
    start(DistributedConfig())  # one process, as nothing says otherwise
    assert not jax.distributed.is_initialized() and jax.process_count() == 1
    complete = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"process": 1}, {}, "distributed.process=1 without distributed.coordinator"),
        ({"processes": 2}, {}, "distributed.processes=2 without distributed.coordinator"),
        ({}, {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID=one must be a whole number"),
        ({}, {"JAX_COORDINATOR_ADDRESS": "host"}, "distributed.coordinator='host': it must be HOST:PORT"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, {}, "numbered from 0, set it to 1 at most"),
        ({}, complete, "comes too late"),
    ]
    for config, environment, sentence in cases:
        with monkeypatch.context() as patched, pytest.raises(UserError, match=re.escape(sentence)):
            for name, value in environment.items():
                patched.setenv(name, value)
            start(DistributedConfig(**config))
    with pytest.raises(UserError, match="distributed.coordinator='host': it must be HOST:PORT"):
        load_config(TINY, ["distributed.coordinator=host"])


@pytest.mark.parametrize("source", ["config", pytest.param("slurm", marks=pytest.mark.full)])
def test_a_coordinator_that_does_not_answer_is_named(tmp_path: Path, source: str):
    address = f"127.0.0.1:{free_port()}"
    keys = [f"distributed.coordinator={address}", "distributed.processes=2", "distributed.process=1"]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    overrides, more = (keys, {}) if source == "config" else ([], slurm)
    arguments = ["--config", TINY, f"run_dir={tmp_path}", "distributed.timeout=1", *overrides]
    launched = launch(1, tmp_path, "-m", "jrlhf.train", *arguments, **more)
    launched.assert_codes(60, 2)
    sentence = launched.text(0).strip()
    place = address if source == "config" else "of the cluster that JAX found"
    assert sentence.count("\n") == 0 and sentence.startswith("error: ") and place in sentence
    assert "distributed.timeout=1 seconds" in sentence
    assert not (tmp_path / "tiny").exists()


def test_plans_that_processes_cannot_run_are_refused():
    def plan(**calls: tuple[int, int]) -> Plan:
        placed = {name: Placement(Slice(*place), "train", fsdp=place[1]) for name, place in calls.items()}
        return Plan("split", placed)

    one, two = [0] * 8, [number // 4 for number in range(8)]
    for apart in (plan(generate=(0, 4), update=(4, 4)), plan(generate=(0, 8), update=(2, 4))):
        refuse_cross_process(apart, one)
        refuse_cross_process(apart, two)
    refuse_cross_process(plan(generate=(0, 8), update=(0, 6)), one)
    with pytest.raises(UserError, match=r"runs update on devices 0-5, and .* must divide 8: choose 4 of them"):
        refuse_cross_process(plan(generate=(0, 8), update=(0, 6)), two)
    for first, tensor, processes in ((2, 4, two), (2, 4, one), (2, 4, range(8)), (4, 4, two), (2, 2, two)):
        cut = Plan("cut", {"score": Placement(Slice(first, 4), "score", fsdp=4 // tensor, tensor=tensor)})
        if (first, tensor) == (2, 4) and processes is two:
            with pytest.raises(UserError, match=r"devices 2-5 with tensor=4, .* 2-5 of a tensor group belong to two"):
                refuse_cross_process(cut, processes)
        else:  # the groups are of one process each, or every process has a single device
            refuse_cross_process(cut, processes)


def test_a_run_says_how_arrays_move_between_slices():
    def line(*processes: int, **calls: Placement) -> str | None:
        return transfer_line(Plan("mine", calls), processes)

    whole, staged = (Placement(Slice(0, 4), "train", fsdp=4 // stages, pipeline=stages) for stages in (1, 2))
    first, second = (Placement(Slice(start, 2), "train", fsdp=2) for start in (0, 2))
    device, collective = "copies from device to device within a process", "collective copies between processes"
    assert line(0, 0, 1, 1, generate=whole, update=whole) is None
    start = "plan mine: arrays move between slices by "
    assert line(0, 0, 0, 0, generate=first, update=second) == start + device
    assert line(0, 0, 1, 1, generate=first, update=second) == start + collective
    assert line(0, 0, 1, 1, update=staged) == start + collective
    three = {"generate": Placement(Slice(0, 1), "train"), "score": Placement(Slice(1, 1), "train"), "update": second}
    assert line(0, 0, 1, 1, **three) == f"{start}{device} and {collective}"
