"""The notebooks run from top to bottom, on tiny settings; their first cell installs jrlhf beside JAX as on Colab."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jrlhf.api import plan
from jrlhf.config import make_config
from jrlhf.run import devices
from jrlhf.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
COLAB = ROOT / "colab"
PAGE = (ROOT / "docs/notebooks.md").read_text(encoding="utf-8")
INSTALL = runpy.run_path(str(COLAB / "install.py"), run_name="install")
TINY = (
    "model.embed=32 model.layers=2 model.heads=2 model.kv_heads=2 model.head_dim=16 model.mlp=64 sft.steps=4 "
    "sft.batch=16 data.annotator.prompts=24 data.annotator.heldout_prompts=16 data.annotator.samples_per_prompt=2 "
    "reward_model.steps=4 reward_model.batch=8 ppo.iterations=3 ppo.rollout_batch=16 evaluation.prompts=16"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Jupyter's own libraries


class Notebook:
    """A notebook and the kernel that executes it."""

    def __init__(self, name: str, folder: Path, kernel: str = "python3"):
        import nbformat
        from nbclient import NotebookClient

        self.cells = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
        self._settings = {"timeout": 600, "kernel_name": kernel, "resources": {"metadata": {"path": str(folder)}}}
        self._client = NotebookClient(self.cells, **self._settings)
        self._stored = [kinds_of(cell) for cell in self.cells.cells]

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """A new kernel, killed at the end. Programs are optimised little: most run shorter than they compile."""
        flags = f"--xla_backend_optimization_level=0 {os.environ['XLA_FLAGS']}"
        with self._client.setup_kernel(env={**os.environ, "XLA_FLAGS": flags}):
            yield

    def run(self, first: int = 0, last: int | None = None) -> str:
        """Executes code cells first..last-1 in the running kernel; returns what they print. Raises their errors."""
        code = [(index, cell) for index, cell in enumerate(self.cells.cells) if cell.cell_type == "code"]
        chosen = code[first:last]
        for index, cell in chosen:
            self._client.execute_cell(cell, index)
        if any(self._stored) and (first, last) == (0, None):  # what readers see is what the notebook shows
            assert [kinds_of(cell) for cell in self.cells.cells] == self._stored
        return "".join(output.get("text", "") for _, cell in chosen for output in cell.outputs)


def kinds_of(cell: Mapping[str, Any]) -> set[str]:
    """What a cell shows that notebooks are stored with: a printed text, a picture."""
    kinds = set[str]()
    for output in cell.get("outputs", ()):
        kinds |= {output.get("name", "")} | set(output.get("data", ()))
    return kinds & {"stdout", "image/png"}


def code_of(name: str) -> list[str]:
    """The code cells of a notebook."""
    cells = json.loads((COLAB / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebooks_begin_with_the_same_installation():
    assert len({code_of(path.stem)[0] for path in COLAB.glob("*.ipynb")}) == 1


def test_the_page_has_the_variables_the_versions_and_the_rule_for_the_restart():
    notebooks = {path.stem: path.read_text(encoding="utf-8") for path in COLAB.glob("*.ipynb")}
    read = {name for text in notebooks.values() for name in re.findall(r'environ\.get\(\\"(\w+)', text)}
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \|", PAGE, re.MULTILINE)
    assert read == {name for row in rows for name in re.findall(r"\w+", row)}
    pins = re.findall(r"^(\w+)==([\d.]+)", (COLAB / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pins) == 4 and all(f"{name} {version}" in PAGE for name, version in pins)
    for text in (PAGE, INSTALL["RESTART"], *notebooks.values()):
        assert "once" in text and "then run all cells again" in " ".join(text.split())
    assert [name for name, text in notebooks.items() if "docs/notebooks.md#words" not in text] == []
    results = [name for name in notebooks for code in code_of(name) if "run.summary[" in code or "report.html" in code]
    assert len(results) == 4
    assert [name for name in results if "the run was interrupted: run its cell again" not in notebooks[name]] == []


def test_the_reward_of_a_notebook_scores_answers_of_chat_models_too():
    (cell,) = (cell for cell in code_of("grpo_your_reward") if "def vowels" in cell)
    scope: dict = {}
    exec(cell, scope)
    assert (
        scope["vowels"](["", "a cat"]) == [0, 0.4] == scope["vowels"]([[{"content": text}] for text in ("", "a cat")])
    )


def test_the_memory_on_the_page_is_that_of_the_notebook(tmp_path):
    (cell,) = (cell for cell in code_of("grpo_your_reward") if '"stages": ["grpo"]' in cell)
    scope = {"work": tmp_path, "accelerator": lambda: "gpu", "MODEL": "Qwen/Qwen2.5-0.5B-Instruct", "tiny": False}
    exec(cell[cell.index("settings =") : cell.index("overrides =")], scope | {"vowels": len}, scope)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Praise tea."}\n' * 64)
    rows = re.findall(r"^\| `lora.rank=(\d+)`.* \| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for rank, dtype, *written in rows:
        more = {"compute.dtype": dtype} | ({"lora.rank": int(rank)} if int(rank) else {})
        plans = (plan(scope["settings"], cluster, plan="colocate", **more) for cluster in ("v5e-1", "1xh100"))
        assert [f"{one.peak / 2**30:.1f}" for one in plans] == written


def test_notebooks_are_stored_with_the_outputs_of_one_execution_from_top_to_bottom():
    """`python -m tools.notebooks NAME` stores them."""
    for path in COLAB.glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", path
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], path
        outputs = [output for cell in code for output in cell["outputs"]]
        assert not [output for output in outputs if output["output_type"] == "error"], path
        assert {"stdout", "image/png"} <= set().union(*map(kinds_of, code)), path
        assert len(text) < 500_000 and not re.search(r"/(tmp|root|home|work|Users)/|site-packages", text), path


def test_a_machine_with_an_accelerator_is_never_given_simulated_devices(monkeypatch):
    assert devices.machine_settings() == {}
    for kind, sentence in (("tpu", "a TPU seems"), ("gpu", "an NVIDIA GPU is")):
        monkeypatch.setattr(devices, "accelerator", lambda kind=kind: kind)
        config = make_config("quickstart", devices.machine_settings())
        assert (config.device.platform, config.device.simulated) == ("auto", None)
        assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (1, -1, 1)
        warning = devices.idle_accelerator()  # this process runs on CPUs
        assert warning is not None and "JAX runs on the CPU" in warning and warning.startswith(sentence)


def test_jax_and_its_plugin_are_kept_as_they_are():
    present = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.41", "numpy": "2.0.2"}
    assert INSTALL["kept_versions"](present) == "jax==0.10.2\njaxlib==0.10.2\nlibtpu==0.0.41\n"
    assert INSTALL["kept_versions"]({"numpy": "2.0.2"}) == ""
    extra = INSTALL["extra_for"]
    assert extra(present, False, True) == "tpu" and extra(present, False, False) == ""
    assert extra({"jax-cuda13-plugin": "0.12.0"}, True, False) == "cuda13" and extra({}, True, False) == "cuda12"


def test_the_versions_to_install_are_in_the_bounds_of_the_project():
    from packaging.requirements import Requirement
    from packaging.version import Version

    project = [
        Requirement(line)
        for line in re.findall(r'^  "(.*)",$', (ROOT / "pyproject.toml").read_text(), re.M)
        if re.match(r"(jax|flax)\b", line)
    ]
    pins = [Requirement(line) for line in (COLAB / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    for python in ("3.11", "3.12", "3.13"):
        here = {"python_version": python}
        apply = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
        assert sorted(pin.name for pin in apply) == ["flax", "jax"]
        for pin in apply:
            (version,) = (Version(part.version) for part in pin.specifier)
            bounds = [r for r in project if r.name == pin.name and (r.marker is None or r.marker.evaluate(here))]
            assert bounds and all(version in bound.specifier for bound in bounds)


@pytest.mark.full
def test_the_quickstart_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JRLHF_NOTEBOOK_OVERRIDES", TINY)
    notebook = Notebook("quickstart", tmp_path)
    with notebook.kernel():
        printed = notebook.run()
    assert "gold on 16 held-out signatures" in printed and "display.IFrame" not in printed
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()


def scores(printed: str) -> list[list[float]]:
    """The pairs `score ... 0.1 -> 0.9` of a text."""
    return [[float(first), float(last)] for first, last in re.findall(r"score.* ([\d.]+) -> ([\d.]+)", printed)]


@pytest.mark.proof("notebooks")
def test_the_reward_of_the_walkthrough_rises(tmp_path, monkeypatch):
    monkeypatch.setenv("WALKTHROUGH_SFT", "200")
    monkeypatch.setenv("WALKTHROUGH_PPO", "12")
    notebook = Notebook("walkthrough", tmp_path)
    with notebook.kernel():
        printed = notebook.run()
    ((before, after),) = scores(printed)
    assert before < 0.6 and after > before + 0.25
    assert "redundant 0" in printed
    divergences = [float(value) for value in re.findall(r"KL ([\d.]+) nats", printed)]
    assert divergences[0] == 0.0 < divergences[-1] < 3


@pytest.mark.proof("notebooks")
def test_the_steps_train_foreign_models_alike_on_every_mesh(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS_ITERATIONS", "12")
    notebook = Notebook("steps_in_your_own_jax", tmp_path)
    with notebook.kernel():
        printed = notebook.run()
    assert len(scores(printed)) == 2 and all(after > before + 0.05 for before, after in scores(printed))
    pairs = re.findall(r": (-?[\d.]+) on 4 devices, (-?[\d.]+) on one", printed)
    assert len(pairs) == 3
    for many, one in pairs:
        assert float(many) == pytest.approx(float(one), rel=1e-4, abs=1e-6)


@pytest.mark.proof("notebooks")
def test_a_reward_of_ones_own_rises_on_held_out_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("JRLHF_NOTEBOOK_OVERRIDES", "grpo.iterations=10")
    notebook = Notebook("grpo_your_reward", tmp_path)
    with notebook.kernel():
        printed = notebook.run()
    ((before, after),) = scores(printed)
    assert after > before + 0.05 and printed.count("  before: ") == 4
    model = tmp_path / "grpo_your_reward/vowels/model"
    assert json.loads((model / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.proof("notebooks")
def test_an_algorithm_of_ones_own_is_trained_beside_grpo(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "JRLHF_NOTEBOOK_OVERRIDES",
        "sft.steps=200 sft.eval_every=200 sft.save_every=200 grpo.iterations=3 grpo.rollout_batch=256 "
        "grpo.save_every=3 evaluation.prompts=32",
    )
    notebook = Notebook("algorithm_of_your_own", tmp_path)
    other = (
        "import jax\njax.config.update('jax_num_cpu_devices', 4)\njax.devices()\n"  # of another notebook in this kernel
    )
    notebook.cells.cells[1].source = other + notebook.cells.cells[1].source
    with notebook.kernel():
        printed = notebook.run()
    assert re.findall(r"(\w+): right on held-out sums", printed) == ["grpo", "median"]
    grpo, median = (
        [record for record in read_metrics(tmp_path / "algorithm_of_your_own" / name) if record["stage"] == "grpo"]
        for name in ("grpo", "median")
    )
    assert len(grpo) == len(median) == 3
    # The same weights draw the same answers first; then the updates differ.
    assert grpo[0]["critic/score/mean"] == median[0]["critic/score/mean"]
    assert grpo[0]["critic/advantages/mean"] != median[0]["critic/advantages/mean"]


def test_the_algorithm_of_the_notebook_is_the_documented_one():
    documented, *_ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/tutorials/own-algorithm.md").read_text(), re.DOTALL
    )
    (written,) = (cell for cell in code_of("algorithm_of_your_own") if "def median(" in cell)
    assert written.split() == documented.split()


@pytest.mark.proof("notebooks")
def test_plans_are_searched_without_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANS_PROPOSALS", "60")
    notebook = Notebook("plans", tmp_path)
    with notebook.kernel():
        printed = notebook.run()
    table = re.findall(r"^(\S+) +(\S+) +(?:[\d.]+ s an iteration|(does not fit: .*choose .+))", printed, re.MULTILINE)
    assert len(table) == 16
    fits = {(name, place) for name, place, problem in table if not problem}
    assert {("gsm8k-ppo", "1xh100"), ("llama3-8b-ppo", "8xh100")} <= fits
    assert not {("llama3-8b-ppo", "1xh100"), ("llama3-70b-ppo", "16xh200")} & fits
    assert {path.name for path in tmp_path.glob("*.png")} == {"plan.png", "colocate.png", "split.png"}


INTERRUPTED = """
import os
from jrlhf.api import train

def train_on(**more):
    wanted = {"digits": 1}
    def single(completions):  # captures a value of the notebook
        return [float(len(text.strip()) == wanted["digits"]) for text in completions]
    return train("arithmetic-grpo", run_dir="runs", rewards=[{"name": "single", "function": single, "workers": 2}],
        sft={"steps": 2}, grpo={"iterations": 40, "rollout_batch": 64}, evaluation={"prompts": 8}, **more)

print("kernel", os.getpid())
"""


@pytest.mark.proof("notebooks")
def test_an_interrupted_cell_leaves_a_run_that_the_next_cells_use_and_resume(tmp_path):
    """Jupyter interrupts all processes of a kernel, those of reward functions too."""
    from nbclient.exceptions import CellExecutionError
    from nbformat.v4 import new_code_cell

    notebook = Notebook("quickstart", tmp_path)
    cells = INTERRUPTED, "run = train_on()", "print(run.actor.generate('1+2='), len(run.metrics))"
    cells += "print(len(train_on(resume=True).metrics))", "train('quickstrt')"
    notebook.cells.cells = [new_code_cell(code) for code in cells]
    metrics = tmp_path / "runs/arithmetic-grpo/metrics.jsonl"

    def interrupt(kernel: int) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and not (metrics.exists() and '"grpo"' in metrics.read_text()):
            time.sleep(0.01)
        os.killpg(kernel, signal.SIGINT)

    with notebook.kernel(), ThreadPoolExecutor(1) as threads:
        pending = threads.submit(interrupt, int(notebook.run(0, 1).split()[-1]))
        stopped = notebook.run(1, 2)
        pending.result()
        assert "its state is saved; go on with resume=True" in stopped
        assert 3 <= int(notebook.run(2, 3).split()[-1]) < 42
        assert notebook.run(3, 4).split()[-1] == "42"
        with pytest.raises(CellExecutionError):
            notebook.run(4, 5)
    (mistake,) = notebook.cells.cells[4].outputs
    assert mistake["traceback"] == ["UserError: config quickstrt does not exist: did you mean quickstart?"]


@pytest.fixture
def fresh_kernel(tmp_path, monkeypatch):
    """A function: pip's arguments -> the Python of a kernel `fresh`, which has them and Jupyter, but no jrlhf."""

    def create(*packages: str) -> Path:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "venv/share/jupyter"))
        monkeypatch.setenv("JRLHF_SOURCE", str(ROOT))
        python = tmp_path / "venv/bin/python"
        for command in (
            [sys.executable, "-m", "venv", str(tmp_path / "venv")],
            [str(python), "-m", "pip", "install", "-q", "ipykernel", *packages],
            [str(python), "-m", "ipykernel", "install", "--prefix", str(tmp_path / "venv"), "--name", "fresh"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        return python

    return create


def version_of(python: Path, package: str) -> str:
    program = f"from importlib.metadata import version; print(version('{package}'))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.proof("notebooks")
def test_an_old_jax_is_replaced_and_the_next_cell_survives_the_restart(tmp_path, monkeypatch, fresh_kernel):
    from nbclient.exceptions import CellExecutionError

    monkeypatch.setenv("JRLHF_NOTEBOOK_OVERRIDES", TINY)
    python = fresh_kernel("jax==0.7.2", "flax==0.11.2")
    notebook = Notebook("quickstart", tmp_path, "fresh")
    notebook.cells.cells[2].source = f"import jax\n{notebook.cells.cells[2].source}"  # something has loaded JAX
    with notebook.kernel(), pytest.raises(CellExecutionError, match="Restart the session now.*in use: .*jax"):
        notebook.run(0, 1)
    pins = (COLAB / "constraints.txt").read_text()
    assert f"jax=={version_of(python, 'jax')};" in pins and f"flax=={version_of(python, 'flax')};" in pins
    with notebook.kernel():
        assert "gold on 16 held-out signatures" in notebook.run(1)
    with notebook.kernel():  # and from the top: nothing is left to install
        assert "CpuDevice" in notebook.run(0, 2)


@pytest.mark.proof("notebooks")
def test_a_jax_that_fits_stays_and_needs_no_restart(tmp_path, fresh_kernel):
    older = "0.11.1" if sys.version_info >= (3, 12) else "0.10.2"
    python = fresh_kernel(f"jax=={older}")
    notebook = Notebook("quickstart", tmp_path, "fresh")
    with notebook.kernel():
        printed = notebook.run(0, 2)
    assert f"with jax {older}, which was there" in printed and "CpuDevice(id=3)" in printed
    assert version_of(python, "jax") == older
