"""Optimizers of the user's own, and Muon: what is refused, what their states hold, and whole runs."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.algorithms import registry
from jrlhf.algorithms.optimizers import make_optimizer
from jrlhf.algorithms.registry import optimizer_identity, stage_graph
from jrlhf.config import build, load_config
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import init_lora, init_sharded, lora_shardings
from jrlhf.planning.dryrun import describe
from jrlhf.planning.memory import checkpoint_bytes, state_bytes
from jrlhf.planning.workload import workload_of
from jrlhf.ppo.updates import Minibatch, Objective, apply_update
from jrlhf.rewards.python_code import python_functions
from jrlhf.roles.optimizers import updates_of
from jrlhf.roles.role import fresh_state
from jrlhf.stages.setup import architectures
from jrlhf.train import main
from tests.support.runs import resumed, stage_of, timeless

TINY = str(Path(__file__).parents[1] / "tiny.yaml")
DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
(SIGNS,) = re.findall(r"```python\n(import optax\n.*?)```", DOCUMENT, re.DOTALL)
SIZES = ["sft.steps=2", "sft.batch=32", "sft.save_every=2", "sft.eval_every=2", "evaluation.prompts=16"]
SIZES += ["data.heldout_rows=16", "grpo.iterations=3", "grpo.rollout_batch=32", "grpo.save_every=1"]
SIZES += ["device.simulated=8", "mesh.fsdp=4", "mesh.tensor=2", "grpo.algorithm={samples: 4, kl_coef: 0}"]
SIZES += ["grpo.actor.learning_rate=1e-3", "grpo.actor.warmup=0", "checkpoints.keep=4"]


def config_of(folder: Path, source: str, *settings: str) -> Config:
    """A config whose stages are trained by `make` of a file with this source."""
    (folder / "my_optimizer.py").write_text(source)
    own = [f"{key}.optimizer={folder}/my_optimizer.py:make" for key in ("sft", "grpo.actor")]
    return load_config("arithmetic-grpo", [*SIZES, *own, f"run_dir={folder}", *settings])


def workload(config: Config, stage: str):
    return workload_of(config, stage_graph(config, stage), architectures(config))


STATELESS = "import jax, optax\ndef make(config):\n    return optax.stateless(lambda g, p: jax.tree.map({}, g))"
KEPT = "import jax, jax.numpy as jnp, optax\ndef make(config):\n    return optax.GradientTransformation({}, {})"
BAD = {
    "raises": ("def make(config):\n    raise ValueError('no')", "makes no optimizer: ValueError: no at .*my_optimizer"),
    "returns": ("def make(config):\n    return 3", "returned a int: return an optax.GradientTransformation"),
    "missing": ("def other(config): ...", "there is no 'make' in .*my_optimizer.py: it has other"),
    "shape": (
        STATELESS.format("lambda x: x[:1]"),
        r"turns gradients into another tree \(embed.* is float32\[1, 64\]",
    ),
    "dtype": (STATELESS.format("lambda x: x.astype('bfloat16')"), "turns gradients .*bfloat16.* and was float32"),
    "tree": (
        "import optax\ndef make(config):\n    return optax.stateless(lambda g, p: 0.0)",
        r"turns gradients into another tree \(of another structure\)",
    ),
    "state": (
        KEPT.format("lambda p: jnp.zeros(2)", "lambda g, s, p: (g, s.astype(jnp.int32))"),
        "turns its state .* is int32.* and was float32",
    ),
    "init": (
        KEPT.format("lambda p: p['none']", "lambda g, s, p: (g, s)"),
        "cannot be applied to the weights: Key",
    ),
    "whole": ("import optax\ndef make(config):\n    return optax.adamw(1e-3)", "returns steps down the gradient, as"),
    "empty": (
        KEPT.format("lambda p: jnp.zeros(0)", "lambda g, s, p: (g, s)"),
        r"keeps an array float32\[0\] in its state, which no checkpoint can hold",
    ),
    "complex": (KEPT.format("lambda p: jnp.zeros(2, jnp.complex64)", "lambda g, s, p: (g, s)"), r"complex64\[2\]"),
    "key": (KEPT.format("lambda p: jax.random.key(0)", "lambda g, s, p: (g, s)"), "keep jax.random.key_data of a key"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_optimizer_is_refused_before_a_run_trains(name: str, tmp_path: Path):
    source, message = BAD[name]
    with pytest.raises(UserError, match=f"^grpo.actor.optimizer=.*my_optimizer.py:make.* {message}"):
        workload(config_of(tmp_path, source), "grpo")
    with pytest.raises(UserError, match=f"optimizer=.* {message}"):
        main(config_of(tmp_path, source, "name=never"))
    assert not (tmp_path / "never").exists()


def test_a_file_that_is_missing_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="grpo.actor.optimizer=nowhere.py:make: there is no file"):
        workload(load_config("arithmetic-grpo", ["grpo.actor.optimizer=nowhere.py:make"]), "grpo")
    with pytest.raises(
        UserError, match="optimizer=lion: it must be adamw, muon, path/file.py:function or package.module:function"
    ):
        workload(load_config("arithmetic-grpo", ["grpo.actor.optimizer=lion"]), "grpo")


OTHERS = {
    "muon": None,
    "signs": SIGNS,
    "lookback": KEPT.format("lambda p: (p, jnp.zeros(7))", "lambda g, s, p: (g, s)"),  # begins as the weights
    "factored": "import optax\ndef make(config):\n    return optax.scale_by_factored_rms(min_dim_size_to_factor=8)",
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_predicted_state_is_that_of_the_arrays(name: str, tmp_path: Path):
    for settings in ([], ["lora.rank=2"]):
        config = config_of(tmp_path, OTHERS[name] or "", *settings, *["grpo.actor.optimizer=muon"] * (name == "muon"))
        work, mesh = workload(config, "grpo"), make_mesh(1, 2, 2, devices=jax.devices()[:4])
        (model,) = work.models["actor"]
        state = fresh_state(weights_on(mesh, model), make_optimizer(config.rl.actor, "grpo.actor", updates=3))
        place = Placement(Slice(0, 4), "train", fsdp=2, tensor=2)
        sizes = [array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(state.opt_state)]
        assert state_bytes((model,), 4, place)["optimizer"] == sum(sizes)
        assert all(array.sharding.mesh == mesh for array in jax.tree.leaves(state.opt_state))
        whole = sum(array.nbytes for array in jax.tree.leaves((state.params, state.opt_state)))
        assert checkpoint_bytes(work) == whole


def weights_on(mesh, model):
    """A model's own weights, or its adapter's, as a run stores them."""
    if model.lora is None:
        return init_sharded(model.config, jax.random.key(0), mesh, model.head)
    shardings = lora_shardings(model.config, mesh, model.lora)
    return jax.jit(lambda: init_lora(model.config, model.lora, jax.random.key(0)), out_shardings=shardings)()


def test_an_update_of_the_example_is_the_sign_of_its_momentum(tmp_path: Path):
    config = config_of(tmp_path, SIGNS, "grpo.actor.weight_decay=0.5", "grpo.actor.max_grad_norm=1.0").rl.actor
    optimizer = make_optimizer(config, "grpo.actor", updates=3)
    params: Any = {"scale": jnp.ones(3), "wq": jnp.ones((1, 3, 1, 1))}
    state: Any = optimizer.init(params)
    momentum = 0.0
    for gradient in (1.0, -0.8, 0.1):
        grads = jax.tree.map(lambda x, g=gradient: jnp.full_like(x, g), params)
        moved, state = optimizer.update(grads, state, params)
        updates: Any = moved
        momentum = 0.9 * momentum + gradient / max(1.0, abs(gradient) * 6**0.5)
        np.testing.assert_allclose(updates["scale"], -1e-3 * np.sign(momentum), rtol=1e-6)
        np.testing.assert_allclose(updates["wq"], -1e-3 * (np.sign(momentum) + 0.5), rtol=1e-6)
    final: Any = state
    assert int(updates_of(final)) == 3 and not optax.tree.get_all_with_path(final[1][0], "count")


def test_an_update_that_is_not_finite_changes_neither_weights_nor_state(tmp_path: Path):
    inverse = "import jax, optax\ndef make(config):\n    inverse = optax.stateless(lambda g, p: jax.tree.map("
    inverse += "lambda x: 1 / x, g))\n    return optax.chain(optax.trace(0.9), inverse)"
    config = config_of(tmp_path, inverse, "grpo.actor.max_grad_norm=null").rl.actor
    optimizer, params = make_optimizer(config, "grpo.actor", updates=3), {"wq": jnp.ones(4)}
    state = optimizer.init(params)
    objective = Objective(lambda params, x: (jnp.sum(params["wq"] * x), {}), optimizer, ())
    apply = jax.jit(lambda params, state, x: apply_update(objective, params, state, Minibatch(x, 1)))
    for gradient, applied in ((jnp.ones(4), 1), (-0.9 * jnp.ones(4), 1), (jnp.array([1, 0, 1, 1.0]), 2)):
        update = apply(params, state, gradient)
        assert update.finite == (applied > int(updates_of(state)))
        params, state = update.params, update.opt_state
        assert int(updates_of(state)) == applied and np.isfinite(params["wq"]).all()


def test_a_python_function_is_an_optimizer_whose_code_is_recorded(monkeypatch: pytest.MonkeyPatch):
    rate = 2.0
    own = {"stages": ["grpo"], "grpo": {"actor": {"optimizer": lambda config: optax.scale(rate)}}}
    with python_functions(own) as (named,):
        config = build(Config, {**named, "model": {}, "rewards": [{"name": "a", "function": "exact_match"}]})
        (model,) = workload(config, "grpo").models["actor"]
        assert model.state == ((), 4)  # no more than the schedule's count
        words = optimizer_identity(config, "grpo")
        assert len(words["grpo.actor.optimizer"]) == 16
        rate = 3.0
        assert optimizer_identity(config, "grpo").keys() == words.keys()
        monkeypatch.setattr(registry, "from_main", lambda words: {})
        with pytest.raises(UserError, match="grpo.actor.optimizer=<python>:lambda is not the same function in all"):
            optimizer_identity(config, "grpo")


def test_the_dry_run_names_optimizers_whose_temporary_arrays_it_does_not_count(tmp_path: Path):
    text = describe(config_of(tmp_path, SIGNS, "grpo.actor.optimizer=muon"))
    clause = f"without temporary arrays of sft.optimizer={tmp_path}/my_optimizer.py:make, grpo.actor.optimizer=muon:"
    assert clause in text
    assert "without temporary" not in describe(load_config("arithmetic-grpo", SIZES))


def left(path: Path) -> tuple[Any, bytes]:
    file = next(path.glob("*/adapter_model.safetensors"), path / "model" / "model.safetensors")
    return timeless(path), file.read_bytes()


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_trains_by_an_own_optimizer_offloads_it_and_is_resumed_to_the_same_bits(lora: bool, tmp_path: Path):
    settings = ["lora.rank=2", "sft.learning_rate=1e-3"] * lora
    awake = config_of(tmp_path, SIGNS, *settings, "name=awake")
    main(awake)
    expected = left(tmp_path / "awake")
    records = stage_of(tmp_path / "awake", "grpo")
    assert [record["actor/lr"] for record in records] == pytest.approx([1e-3] * 3)
    assert [record["perf/compilations"] for record in records][2:] == [0]
    main(config_of(tmp_path, SIGNS, *settings, "name=asleep", "sleep.optimizer=host"))
    assert left(tmp_path / "asleep") == expected
    resumed(awake, 2, 3)
    assert left(tmp_path / "awake") == expected

    for step in (2, 3):
        shutil.rmtree(tmp_path / "awake" / "checkpoints" / "grpo" / str(step))
    changed = config_of(tmp_path, SIGNS.replace("config.b1", "0.5"), *settings, "name=awake")
    with pytest.raises(UserError, match="the checkpoint of stage sft was made with another sft.optimizer"):
        main(changed, resume=True)


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("stages", ["sft reward_model ppo", "sft dpo"])
def test_muon_trains_every_stage_in_pipelines_too(stages: str, tmp_path: Path):
    """The states in the checkpoints of all stages and roles are Muon's."""
    losses, small = list[list[float]](), [f"stages=[{stages.replace(' ', ', ')}]", f"run_dir={tmp_path}"]
    if "ppo" in stages:
        small += ["ppo.iterations=2", "ppo.actor.optimizer=muon", "ppo.critic.optimizer=muon"]
        small += ["reward_model.steps=2", "reward_model.optimizer=muon"]
    else:
        small += ["ppo=null", "reward_model=null", "dpo.steps=2", "dpo.batch=8", "dpo.optimizer=muon"]
    for name, pipeline in (("whole", "null"), ("staged", "2")):
        sft = ["sft.steps=3", "sft.micro_batches=2", "sft.optimizer=muon", f"sft.pipeline.stages={pipeline}"]
        config = load_config(TINY, [*small, *sft, f"name={name}"])
        main(config)
        losses.append([record["sft/loss"] for record in stage_of(tmp_path / name, "sft")])
        for stage in config.stages:
            step = max((tmp_path / name / "checkpoints" / stage).iterdir(), key=lambda path: int(path.name))
            counted = re.findall(r"ns_coeffs", (step / "meta" / "metadata").read_text())
            assert len(counted) >= (2 if stage == "ppo" else 1), counted
    np.testing.assert_allclose(*losses, rtol=1e-5)
