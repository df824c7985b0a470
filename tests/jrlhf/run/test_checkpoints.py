"""Checkpoints: what comes back is what was saved, to the bit; or it is refused, and the one before it comes back."""

import contextlib
import errno
import gc
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.ppo import TrainState
from jrlhf.run.checkpoints import Checkpoints, fingerprint, is_obstacle, like


def put(mesh: Mesh, value, *spec) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def params_on(mesh: Mesh, seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    return {
        "embedding": put(mesh, numbers.standard_normal((64, 32)).astype(np.float32), "tensor", "fsdp"),
        "noise": put(mesh, numbers.integers(0, 256, (64, 512), dtype=np.uint8), None, "fsdp"),  # nothing to compress
        "layers": {
            "norm": put(mesh, numbers.standard_normal((3, 32)).astype(np.float32)),
            "kernel": put(
                mesh, jnp.asarray(numbers.standard_normal((3, 32, 16)), jnp.bfloat16), None, "fsdp", "tensor"
            ),
        },
    }


def same_bits(a, b) -> bool:
    def equal(x, y):
        x, y = np.asarray(x), np.asarray(y)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()

    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(jax.tree.map(equal, a, b)))


def restored(directory: Path, target, **kwargs):
    with Checkpoints(directory, **kwargs) as checkpoints:
        result = checkpoints.restore_latest(target)
    assert result is not None
    return result


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh(fsdp=4, tensor=2)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> tuple[Path, dict[int, Any], Mesh]:
    """A directory with the checkpoints of steps 1 and 2, and what was saved."""
    mesh = make_mesh(fsdp=4, tensor=2)
    directory = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    trees = {step: params_on(mesh, step) for step in (1, 2)}
    with Checkpoints(directory) as checkpoints:
        for step, tree in trees.items():
            checkpoints.save(step, tree, {"stage": "ppo", "step": step})
    return directory, trees, mesh


def test_a_training_state_comes_back_with_its_structure_its_places_and_its_description(mesh, tmp_path):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    with jax.set_mesh(mesh):
        state = TrainState.create(params_on(mesh), optimizer)
        meta = {"stage": "ppo", "step": 7, "kl": {"coef": 0.1}, "hash": "ab", "none": None}
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(7, state, meta)
        seen = []
        step, again, described = restored(tmp_path, lambda result: seen.append(result) or like(state, mesh))
    assert (step, described, seen) == (7, meta, [meta])
    assert type(again) is TrainState and same_bits(again, state)
    for leaf, target in zip(jax.tree.leaves(again), jax.tree.leaves(like(state, mesh)), strict=True):
        assert isinstance(leaf.sharding, NamedSharding) and leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))(again)  # all on the same devices


def test_leaves_that_lie_beside_the_mesh_come_back_on_it(mesh, tmp_path):
    tree = {"w": put(mesh, np.arange(8.0, dtype=np.float32), "fsdp"), "count": jnp.int32(3)}
    assert not isinstance(tree["count"].sharding, NamedSharding)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {})
    for target in (tree, like(tree, mesh)):
        _, again, _ = restored(tmp_path, target)
        assert again["count"].sharding == NamedSharding(mesh, P()) and int(again["count"]) == 3


def test_another_mesh_gets_the_same_bits(two_steps, tmp_path):
    directory, trees, _ = two_steps
    shutil.copytree(directory, tmp_path / "copy")
    for *sizes, axis_type in (
        (1, 2, 4, AxisType.Explicit),
        (2, 2, 2, AxisType.Auto),
        (1, 8, 1, AxisType.Explicit),
        (1, 1, 1, AxisType.Auto),
    ):
        other = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))], axis_type=axis_type)
        target = like(params_on(other), other)
        step, again, _ = restored(tmp_path / "copy", target)
        assert step == 2 and same_bits(again, trees[2])
        assert jax.tree.map(lambda leaf: leaf.sharding, again) == jax.tree.map(lambda leaf: leaf.sharding, target)


def numpy_fingerprint(x) -> int:
    """The same sum in NumPy, over the array's bytes."""

    def mix(h):
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    x = np.ascontiguousarray(x)
    words = np.frombuffer(x.tobytes(), {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).astype(np.uint32)
    return int(mix(words ^ mix(np.arange(words.size, dtype=np.uint32))).sum(dtype=np.uint32))


def test_fingerprints_are_those_of_an_independent_implementation():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_, jnp.float8_e4m3fn):
        x = (np.random.default_rng(0).standard_normal((3, 5, 7)) * 10).clip(0, 100).astype(dtype)
        for shape in ((3, 5, 7), (105,), (1, 105)):
            assert int(fingerprint(jnp.asarray(x.reshape(shape)))) == numpy_fingerprint(x)
        assert int(fingerprint(jnp.asarray(x[0, 0, 0]))) == numpy_fingerprint(x[0, 0, :1])


def test_fingerprints_do_not_depend_on_the_mesh():
    x = np.random.default_rng(0).standard_normal((16, 8, 24)).astype(np.float32)
    expected = numpy_fingerprint(x)
    for sizes in ((1, 8, 1), (2, 2, 2)):
        for axis_type in (AxisType.Explicit, AxisType.Auto):
            mesh = make_mesh(*sizes, axis_type=axis_type)
            for spec in (P(), P("fsdp", None, "tensor"), P(("data", "tensor"), "fsdp")):
                sharded = jax.device_put(x, NamedSharding(mesh, spec))
                assert int(fingerprint(sharded)) == expected
                with jax.set_mesh(mesh):
                    assert int(fingerprint(sharded)) == expected


def test_fingerprints_see_every_flipped_bit_and_every_exchange():
    x = np.random.default_rng(0).standard_normal(12).astype(np.float32)
    variants = [x, np.zeros(12, np.float32), -np.zeros(12, np.float32)]
    for bit in range(x.nbytes * 8):
        flipped = bytearray(x.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        variants.append(np.frombuffer(bytes(flipped), np.float32))
    for i in range(12):
        for j in range(i):
            exchanged = x.copy()
            exchanged[[i, j]] = exchanged[[j, i]]
            variants.append(exchanged)
    assert len({int(fingerprint(jnp.asarray(variant))) for variant in variants}) == len(variants)


def damage_and_restore(two_steps, tmp_path, damage) -> tuple[int, list[str]]:
    """Restores from a copy in which `damage(step directory)` was done to step 2: the step, and what was told."""
    directory, trees, mesh = two_steps
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    damage(copy / "2")
    warnings: list[str] = []
    step, again, meta = restored(copy, like(trees[1], mesh), tell=warnings.append)
    assert same_bits(again, trees[step]) and meta == {"stage": "ppo", "step": step}
    if step == 2:
        assert warnings == []
    else:
        (sentence,) = warnings
        assert re.fullmatch(
            r"The checkpoint of step 2 is damaged \(.+\): going on from that of step 1; "
            rf"the damaged one is kept in {copy}/damaged-2\.",
            sentence,
        )
        assert not (copy / "2").exists() and (copy / "damaged-2").is_dir()
    shutil.rmtree(copy)
    return step, warnings


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python would print of errors that nobody can catch."""
    result: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: result.append(str(unraisable.exc_value)))
    return result


def files_of(step_directory: Path) -> list[Path]:
    return sorted(path.relative_to(step_directory) for path in step_directory.rglob("*") if path.is_file())


def test_a_flipped_bit_anywhere_is_seen_or_has_no_effect(two_steps, tmp_path, capfd, reports):
    numbers = random.Random(0)
    files = files_of(two_steps[0] / "2")
    sizes = [(two_steps[0] / "2" / name).stat().st_size for name in files]
    steps, warnings = [], []
    for name in numbers.choices(files, weights=sizes, k=20) + files:

        def flip(step_directory, name=name):
            data = bytearray((step_directory / name).read_bytes())
            if data:
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
                (step_directory / name).write_bytes(data)

        step, sentences = damage_and_restore(two_steps, tmp_path, flip)
        steps.append(step)
        warnings += sentences
    assert steps.count(1) >= 5
    assert any("is not what was saved" in sentence for sentence in warnings)  # found by nothing but its fingerprint
    time.sleep(0.5)  # reads beside the failed ones end
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err and not reports


@pytest.mark.full
def test_a_file_that_is_cut_or_gone_is_seen_or_has_no_effect(two_steps, tmp_path, capfd, reports):
    for truncated in (False, True):
        steps = []
        for name in files_of(two_steps[0] / "2"):

            def damage(step_directory, name=name, truncated=truncated):
                data = (step_directory / name).read_bytes()
                (step_directory / name).unlink()
                if truncated:
                    (step_directory / name).write_bytes(data[: len(data) // 2])

            steps.append(damage_and_restore(two_steps, tmp_path, damage)[0])
        assert steps.count(1) >= 3
    time.sleep(0.5)  # reads next to the failed ones end
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err and not reports


def test_a_description_that_was_changed_is_seen(two_steps, tmp_path):
    def edit(step_directory):
        path = step_directory / "meta" / "metadata"
        text = path.read_text()
        assert text.count(r"\"step\": 2") == 1
        path.write_text(text.replace(r"\"step\": 2", r"\"step\": 3"))

    step, warnings = damage_and_restore(two_steps, tmp_path, edit)
    assert step == 1 and "(its description is not what was saved)" in warnings[0]


def test_a_run_goes_on_after_a_fallback(two_steps, tmp_path):
    directory, trees, mesh = two_steps
    shutil.copytree(directory, tmp_path / "copy")
    (tmp_path / "copy" / "2" / "meta" / "metadata").write_text("{")
    (tmp_path / "copy" / "damaged-2").mkdir()  # from an earlier time
    with Checkpoints(tmp_path / "copy", tell=lambda sentence: None) as checkpoints:
        result = checkpoints.restore_latest(like(trees[1], mesh))
        assert result is not None and result[0] == 1 and checkpoints.steps == [1]
        assert (tmp_path / "copy" / "damaged-2-2").is_dir()
        checkpoints.save(2, trees[2], {})
        checkpoints.wait()
        assert checkpoints.steps == [1, 2]
    assert same_bits(restored(tmp_path / "copy", like(trees[1], mesh))[1], trees[2])


def test_a_run_never_starts_over_silently(two_steps, tmp_path):
    directory, trees, mesh = two_steps
    shutil.copytree(directory, tmp_path / "copy")
    for step in ("1", "2"):
        (tmp_path / "copy" / step / "meta" / "metadata").write_text("{")
    with Checkpoints(tmp_path / "copy") as checkpoints:
        with pytest.raises(UserError, match=r"^no checkpoint in .* is good \(step 2: .*; step 1: .*\): bring one back"):
            checkpoints.restore_latest(like(trees[1], mesh))
        assert checkpoints.steps == [1, 2]


def test_a_machine_that_cannot_read_now_is_no_damage(two_steps, tmp_path, monkeypatch):
    directory, trees, mesh = two_steps
    shutil.copytree(directory, tmp_path / "copy")
    with Checkpoints(tmp_path / "copy") as checkpoints:
        for error in (
            MemoryError(),
            OSError(errno.ESTALE, "Stale file handle"),
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."),
            ValueError("FAILED_PRECONDITION: Error opening \"x\": Permission denied [os_error_code='13']"),
        ):

            def fail(*_, error=error, **__):
                raise error

            with (
                monkeypatch.context() as patched,
                pytest.raises(UserError, match="cannot be read now .* stays where it is"),
            ):
                patched.setattr(checkpoints._manager, "restore", fail)
                checkpoints.restore_latest(like(trees[1], mesh))
        result = checkpoints.restore_latest(like(trees[1], mesh))
    assert result is not None and result[0] == 2 and same_bits(result[1], trees[2])


def test_the_installed_versions_word_their_errors_as_expected(tmp_path):
    """`is_obstacle` reads the texts of errors: those that the installed JAX and TensorStore really raise."""
    with pytest.raises(jax.errors.JaxRuntimeError) as memory:
        jax.block_until_ready(jnp.zeros((1 << 50,), jnp.uint8))
    assert is_obstacle(memory.value)
    (tmp_path / ".zarray").symlink_to(".zarray")  # a file that cannot be opened, even by root
    with pytest.raises(Exception, match=rf"\[os_error_code='{errno.ELOOP}'\]") as system:
        tensorstore.open({"driver": "zarr", "kvstore": f"file://{tmp_path}/"}, open=True).result()
    assert not is_obstacle(system.value)


def test_reports_of_unobserved_reads_are_restored_at_the_end(tmp_path, reports):
    hook = sys.unraisablehook
    with Checkpoints(tmp_path):
        assert sys.unraisablehook is not hook
        for error in ("Event loop is closed", "something else"):
            sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(error)))  # pyright: ignore[reportArgumentType]
    assert sys.unraisablehook is hook and reports == ["something else"]


def test_too_many_open_files_are_no_damage(two_steps, tmp_path):
    directory, trees, mesh = two_steps
    shutil.copytree(directory, tmp_path / "copy")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Checkpoints(tmp_path / "copy") as checkpoints:
        target = like(trees[1], mesh)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, limits[1]))
        try:
            with pytest.raises(UserError, match="cannot be read now"):
                checkpoints.restore_latest(target)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert checkpoints.steps == [1, 2]


def test_no_checkpoint_is_none_and_half_written_ones_are_removed(mesh, tmp_path):
    leftover = tmp_path / "3.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(like(params_on(mesh), mesh)) is None
    assert not leftover.exists()


def test_the_newest_are_kept_and_steps_ascend(mesh, tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": put(mesh, np.full(8, step, np.float32), "fsdp")}, {})
        checkpoints.save(30, {"w": put(mesh, np.zeros(8, np.float32), "fsdp")}, {})  # saved already
        with pytest.raises(ValueError, match="step 25 comes before the newest checkpoint, that of step 30"):
            checkpoints.save(25, {"w": put(mesh, np.zeros(8, np.float32), "fsdp")}, {})
        checkpoints.wait()
        assert checkpoints.steps == [20, 30]
    step, tree, _ = restored(tmp_path, {"w": put(mesh, np.zeros(8, np.float32), "fsdp")})
    assert step == 30 and (np.asarray(tree["w"]) == 30).all()


def test_a_checkpoint_that_does_not_fit_is_refused_and_stays(mesh, tmp_path):
    w = put(mesh, np.zeros(8, np.float32))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": w}, {})
        for target, message in (
            ({"w": w, "bias": w}, "bias is absent there and float32[8] here"),
            ({"v": w}, "v is absent there and float32[8] here"),
            ({"w": w.astype(jnp.bfloat16)}, "w is float32[8] there and bfloat16[8] here"),
            ({"w": w.reshape(4, 2)}, "w is float32[8] there and float32[4,2] here"),
        ):
            with pytest.raises(UserError) as caught:
                checkpoints.restore_latest(target)
            assert str(caught.value) == (
                f"the checkpoint of step 1 does not fit this run: {message}; resume with the version of the program "
                "that wrote it"
            )
            assert checkpoints.steps == [1]


def test_arrays_may_be_donated_while_they_are_being_written(mesh, tmp_path):
    def create(seed):
        numbers = np.random.default_rng(seed)
        return {
            "sharded": put(mesh, numbers.standard_normal((2048, 1024)).astype(np.float32), "fsdp", "tensor"),
            "partly": put(mesh, numbers.standard_normal((512, 1024)).astype(np.float32), "fsdp"),
            "whole": put(mesh, numbers.standard_normal((256, 1024)).astype(np.float32)),
        }

    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.5 + 1.0, tree), donate_argnums=0)
    tree = step(create(0))
    expected = jax.tree.map(np.array, tree)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {})
        for _ in range(5):
            old, tree = tree, step(tree)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))  # memory is reused while the save goes on
        checkpoints.wait()
        result = checkpoints.restore_latest(like(tree, mesh))
    assert result is not None and same_bits(jax.tree.map(np.array, result[1]), expected)


def test_a_save_that_fails_says_so(mesh, tmp_path):
    noise = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # as good as a full disk
    try:
        with pytest.raises(RuntimeError, match=r"^a checkpoint could not be saved into .*File too large"):
            checkpoints.save(1, {"w": put(mesh, noise)}, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoints.steps == []
    with contextlib.suppress(RuntimeError):
        checkpoints.close()


_TREE = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from jrlhf.run.checkpoints import Checkpoints
jax.config.update("jax_platforms", "cpu")
def tree(step):
    return {f"w{i}": jnp.full((64, 1024), step * 100 + i, jnp.float32) for i in range(12)}
"""
_SWEEP = (
    _TREE
    + """
WRITES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
def save(directory, kill_at):
    count = 0
    def watch(event, args):
        nonlocal count
        writes = event in WRITES or event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if armed and writes and str(args[0]).startswith(directory):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    with Checkpoints(directory, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.wait()
            if step == 3:
                armed = True
                sys.addaudithook(watch)
            checkpoints.save(step, tree(step), {"step": step})
kill_at = 0
while True:  # one imported program, forked before JAX has started a backend
    kill_at += int(sys.argv[2])
    if (child := os.fork()) == 0:
        save(f"{sys.argv[1]}/{kill_at}", kill_at)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code != -signal.SIGKILL:
        break
"""
)
_FOREVER = (
    _TREE
    + """
with Checkpoints(sys.argv[1]) as checkpoints:
    for step in range(1, 10_000):
        checkpoints.save(step, tree(step), {"step": step})
        print(step, flush=True)  # the previous step is complete: a save waits for the one before
"""
)


def check_newest(directory: Path, first: int, last: int) -> int:
    """The newest checkpoint is one of the expected steps and is what was saved; nothing half written is left."""
    target = {f"w{index}": jnp.zeros((64, 1024), jnp.float32) for index in range(12)}
    warnings: list[str] = []
    step, tree, meta = restored(directory, target, tell=warnings.append)
    assert warnings == [] and meta == {"step": step} and first <= step <= last
    assert all((np.asarray(tree[f"w{index}"]) == step * 100 + index).all() for index in range(12))
    assert not list(directory.glob("*tmp*"))
    return step


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_at_any_write_of_a_save_leaves_a_good_checkpoint(tmp_path, stride):
    """SIGKILL before each write by Python: directories, metadata, the rename that commits, the removal of old steps."""
    command = [sys.executable, "-W", "ignore", "-c", _SWEEP, str(tmp_path), str(stride)]
    codes = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert codes[-1] == "0" and set(codes[:-1]) == {"-9"} and len(codes) > 15 / stride
    steps = [check_newest(tmp_path / str(number * stride), 2, 3) for number in range(1, len(codes) + 1)]
    assert set(steps) == {2, 3} and steps == sorted(steps)


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    for seed in range(5):
        directory = tmp_path / str(seed)
        command = [sys.executable, "-c", _FOREVER, str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n" and process.stdout.readline() == "2\n"
            time.sleep(random.Random(seed).uniform(0.0, 1.0))
            process.kill()
            begun = int(([2] + [int(line) for line in process.stdout if line.endswith("\n")])[-1])
        check_newest(directory, begun - 1, begun + 1)
