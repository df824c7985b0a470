"""Checkpoints: what comes back is what was saved, to the bit; or it is refused, and the one before it comes back."""

import contextlib
import errno
import gc
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.meshes.offload import groups
from jrlhf.ppo import TrainState
from jrlhf.run import fingerprints
from jrlhf.run.checkpoints import Checkpoints, is_obstacle, like
from jrlhf.run.fingerprints import fingerprint

MESH = make_mesh(fsdp=4, tensor=2)


def put(value, *spec, mesh: Mesh = MESH) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def params(seed: int = 0, mesh: Mesh = MESH) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    kernel = jnp.asarray(numbers.standard_normal((3, 32, 16)), jnp.bfloat16)
    return {
        "embedding": put(numbers.standard_normal((64, 32)).astype(np.float32), "tensor", "fsdp", mesh=mesh),
        "noise": put(numbers.integers(0, 256, (64, 512), dtype=np.uint8), None, "fsdp", mesh=mesh),  # incompressible
        "layers": {
            "norm": put(numbers.standard_normal((3, 32)).astype(np.float32), mesh=mesh),
            "kernel": put(kernel, None, "fsdp", "tensor", mesh=mesh),
        },
    }


def same_bits(a, b) -> bool:
    def bits(tree):
        return [(np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]

    return jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def restored(directory: Path, target, **kwargs):
    with Checkpoints(directory, **kwargs) as checkpoints:
        result = checkpoints.restore_latest(target)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def trees() -> dict[int, Any]:
    return {step: params(step) for step in (1, 2)}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, trees) -> Path:
    """A directory with the checkpoints of the trees, as steps 1 and 2."""
    directory = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    with Checkpoints(directory) as checkpoints:
        for step, tree in trees.items():
            checkpoints.save(step, tree, {"stage": "ppo", "step": step})
    return directory


@pytest.fixture
def copy(two_steps, tmp_path) -> Path:
    return shutil.copytree(two_steps, tmp_path / "copy")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reports that Python would print of errors that nobody can catch."""
    result: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: result.append(str(unraisable.exc_value)))
    return result


# --- What comes back ---


def test_a_training_state_comes_back_with_its_structure_its_places_and_its_description(tmp_path):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    meta = {"stage": "ppo", "step": 7, "kl": {"coef": 0.1}, "hash": "ab", "none": None}
    with jax.set_mesh(MESH):
        weights = {name: tree for name, tree in params().items() if name != "noise"}
        state = jax.jit(lambda params: TrainState.create(params, optimizer))(weights)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(7, state, meta)
        step, again, described = restored(tmp_path, like(state, MESH))
    assert (step, described) == (7, meta)
    assert type(again) is TrainState and same_bits(again, state)
    for leaf, target in zip(jax.tree.leaves(again), jax.tree.leaves(like(state, MESH)), strict=True):
        assert isinstance(leaf.sharding, NamedSharding) and leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))(again)  # all on the same devices


def test_leaves_on_no_mesh_come_back_on_that_of_the_run(tmp_path):
    tree = {"w": put(np.arange(8.0, dtype=np.float32), "fsdp"), "count": jnp.int32(3)}
    assert not isinstance(tree["count"].sharding, NamedSharding)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {})
    for target in (tree, like(tree, MESH)):
        _, again, _ = restored(tmp_path, target)
        assert again["count"].sharding == NamedSharding(MESH, P()) and int(again["count"]) == 3


def test_another_mesh_gets_the_same_bits(copy, trees):
    for *sizes, axis_type in ((2, 2, 2, AxisType.Explicit), (1, 1, 1, AxisType.Auto)):
        other = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))], axis_type=axis_type)
        target = like(params(mesh=other), other)
        step, again, _ = restored(copy, target)
        assert step == 2 and same_bits(again, trees[2])
        assert jax.tree.map(lambda leaf: leaf.sharding, again) == jax.tree.map(lambda leaf: leaf.sharding, target)


def test_the_newest_are_kept_and_steps_ascend(tmp_path):
    def tree(value: float) -> dict[str, jax.Array]:
        return {"w": put(np.full(8, value, np.float32), "fsdp")}

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, tree(step), {})
        checkpoints.save(30, tree(0), {})  # saved already
        with pytest.raises(ValueError, match="step 25 comes before the newest checkpoint, that of step 30"):
            checkpoints.save(25, tree(0), {})
        checkpoints.wait()
        assert checkpoints.steps == [20, 30]
    step, again, _ = restored(tmp_path, tree(0))
    assert step == 30 and (np.asarray(again["w"]) == 30).all()


def test_no_checkpoint_is_none_and_half_written_ones_are_removed(tmp_path):
    leftover = tmp_path / "3.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(like(params(), MESH)) is None
    assert not leftover.exists()


def test_arrays_may_be_donated_while_they_are_being_written(tmp_path):
    numbers = np.random.default_rng(0)
    shapes = {"sharded": ((2048, 1024), ("fsdp", "tensor")), "partly": ((512, 1024), ("fsdp",)), "whole": ((256,), ())}
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.5 + 1.0, tree), donate_argnums=0)
    tree = step({k: put(numbers.standard_normal(s).astype(np.float32), *spec) for k, (s, spec) in shapes.items()})
    expected = jax.tree.map(np.array, tree)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {})
        for _ in range(5):
            old, tree = tree, step(tree)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))  # memory is reused while the save goes on
        checkpoints.wait()
        result = checkpoints.restore_latest(like(tree, MESH))
    assert result is not None and same_bits(jax.tree.map(np.array, result[1]), expected)


# --- Fingerprints ---


def numpy_fingerprint(x) -> int:
    """The same sum in NumPy, over the array's bytes."""

    def mix(h):
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    x = np.ascontiguousarray(x)
    words = np.frombuffer(x.tobytes(), {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).astype(np.uint32)
    return int(mix(words ^ mix(np.arange(words.size, dtype=np.uint32))).sum(dtype=np.uint32))


def test_fingerprints_are_those_of_an_independent_implementation_whole_and_in_slices():
    both = jax.jit(lambda x: (fingerprint(x), fingerprint(x[0, 0, 0])))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.bool_, jnp.float8_e4m3fn):
        x = (np.random.default_rng(0).standard_normal((3, 5, 7)) * 10).clip(0, 100).astype(dtype)
        assert jax.device_get(both(x)) == (numpy_fingerprint(x), numpy_fingerprint(x[0, 0, :1]))
    x = np.random.default_rng(0).standard_normal((16, 8, 24)).astype(np.float32)
    mesh = make_mesh(2, 2, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert int(jax.jit(fingerprint)(put(x, "fsdp", "data", "tensor", mesh=mesh))) == numpy_fingerprint(x)


def test_fingerprints_need_temporary_memory_for_one_group_only(monkeypatch: pytest.MonkeyPatch):
    """Compiled programs: the temporary bytes of each are at most those of its group, not of the whole state."""
    mesh = make_mesh(8, 1, 1)
    sizes = {"a": (64, 8), "b": (64, 8), "c": (256, 8), "d": (64, 8)}
    host = {name: np.random.default_rng(0).standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    leaves = {name: put(x, "data", mesh=mesh) for name, x in host.items()}
    compute, temporary = fingerprints._fingerprints, []

    def recorded(own: dict[str, jax.Array]) -> dict[str, jax.Array]:
        memory = compute.lower(own).compile().memory_analysis()
        assert memory is not None
        temporary.append((sorted(own), memory.temp_size_in_bytes))
        return compute(own)

    monkeypatch.setattr(fingerprints, "_fingerprints", recorded)
    monkeypatch.setattr(fingerprints, "groups", partial(groups, group_bytes=2 * 64 * 8 * 4 // 8))
    assert fingerprints.fingerprints(leaves) == {name: numpy_fingerprint(x) for name, x in host.items()}
    assert [names for names, _ in temporary] == [["a", "b"], ["c"], ["d"]]
    assert all(size <= 256 * 8 * 4 / 8 + 1024 for _, size in temporary)


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
    assert len(np.unique(jax.jit(jax.vmap(fingerprint))(np.stack(variants)))) == len(variants)


# --- Damage ---


@pytest.fixture
def damage_and_restore(two_steps, trees, tmp_path):
    """Restores from a copy in which a file of step 2 was changed; returns the step and the warnings."""

    def run(name: Path | str, change: Callable[[bytes], bytes | None]) -> tuple[int, list[str]]:
        copy = shutil.copytree(two_steps, tmp_path / "damaged")
        file = copy / "2" / name
        content = change(file.read_bytes())
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        warnings: list[str] = []
        step, again, meta = restored(copy, like(trees[1], MESH), tell=warnings.append)
        assert same_bits(again, trees[step]) and meta == {"stage": "ppo", "step": step}
        pattern = (
            r"The checkpoint of step 2 is damaged \(.+\): going on from that of step 1; "
            rf"the damaged one is kept in {copy}/damaged-2\."
        )
        assert [bool(re.fullmatch(pattern, sentence)) for sentence in warnings] == [True] * (2 - step)
        assert step == 2 or (not (copy / "2").exists() and (copy / "damaged-2").is_dir())
        shutil.rmtree(copy)
        return step, warnings

    return run


BITS = random.Random(0)


def flip(content: bytes, share: float = 1.0) -> bytes:
    """Flips a bit in the first `share` of the bytes."""
    data = bytearray(content)
    if data:
        data[BITS.randrange(math.ceil(share * len(data)))] ^= 1 << BITS.randrange(8)
    return bytes(data)


CHANGES = {"flipped": flip, "cut": lambda content: content[: len(content) // 2], "gone": lambda _: None}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.proof("kills"))], ids=["some", "all"])
def test_a_file_with_a_flipped_bit_cut_or_gone_is_seen_or_has_no_effect(
    two_steps, damage_and_restore, capfd, reports, whole
):
    files = sorted(path for path in (two_steps / "2").rglob("*") if path.is_file())
    cases = [(change, file) for change in CHANGES.values() for file in files[:: 1 if whole else 9]]
    sizes = [file.stat().st_size for file in files]
    cases += [(flip, file) for file in random.Random(0).choices(files, sizes, k=3)]
    cases += [(partial(flip, share=0.5), files[sizes.index(max(sizes))])]  # its first half has numbers of arrays
    results = [damage_and_restore(file.relative_to(two_steps / "2"), change) for change, file in cases]
    assert sum(step == 1 for step, _ in results) >= 3
    # found by nothing but its fingerprint
    assert any("is not what was saved" in sentence for _, sentences in results for sentence in sentences)
    time.sleep(0.5)  # reads next to the failed ones end

    async def _read_array_index_and_device_put():
        pass

    read = _read_array_index_and_device_put()  # the event loop of a failed restore ended before this read began
    del read
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err and not reports


def test_a_description_that_was_changed_is_seen(damage_and_restore):
    step, warnings = damage_and_restore("meta/metadata", lambda text: text.replace(rb"\"step\": 2", rb"\"step\": 3"))
    assert step == 1 and "(its description is not what was saved)" in warnings[0]


def test_a_run_goes_on_after_a_fallback_and_never_starts_over_silently(copy, trees):
    target = like(trees[1], MESH)
    (copy / "2" / "meta" / "metadata").write_text("{")
    (copy / "damaged-2").mkdir()  # from an earlier time
    with Checkpoints(copy, tell=lambda sentence: None) as checkpoints:
        result = checkpoints.restore_latest(target)
        assert result is not None and result[0] == 1 and checkpoints.steps == [1]
        assert (copy / "damaged-2-2").is_dir()
        checkpoints.save(2, trees[2], {})
        checkpoints.wait()
        assert checkpoints.steps == [1, 2]
    assert same_bits(restored(copy, target)[1], trees[2])
    for step in ("1", "2"):
        (copy / step / "meta" / "metadata").write_text("{")
    with Checkpoints(copy) as checkpoints:
        with pytest.raises(UserError, match=r"^no checkpoint in .* is good \(step 2: .*; step 1: .*\): bring one back"):
            checkpoints.restore_latest(target)
        assert checkpoints.steps == [1, 2]


def test_a_machine_that_cannot_read_now_is_no_damage(copy, trees, monkeypatch):
    target = like(trees[1], MESH)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Checkpoints(copy) as checkpoints:
        for error in (
            MemoryError(),
            OSError(errno.ESTALE, "Stale file handle"),
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."),
            ValueError("FAILED_PRECONDITION: Error opening \"x\": Permission denied [os_error_code='13']"),
        ):

            def fail(*_, error=error, **__):
                raise error

            with monkeypatch.context() as patched, pytest.raises(UserError, match="cannot be read now .* stays where"):
                patched.setattr(ocp.Checkpointer, "restore", fail)
                checkpoints.restore_latest(target)
        os.close(free := os.dup(0))  # the lowest number that a file may get
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            with pytest.raises(UserError, match="cannot be read now"):
                checkpoints.restore_latest(target)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        result = checkpoints.restore_latest(target)
        assert checkpoints.steps == [1, 2]
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


def test_a_checkpoint_that_does_not_fit_is_refused_and_stays(tmp_path):
    w = put(np.zeros(8, np.float32))
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


# --- Saves that do not end ---


def test_a_save_that_fails_says_so(tmp_path):
    noise = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # as good as a full disk
    try:
        with pytest.raises(RuntimeError, match=r"^a checkpoint could not be saved into .*File too large"):
            checkpoints.save(1, {"w": put(noise)}, {})
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
_SWEEP = f"""{_TREE}
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
            checkpoints.save(step, tree(step), {{"step": step}})
kill_at = 0
while True:  # one imported program, forked before JAX has started a backend
    kill_at += int(sys.argv[2])
    if (child := os.fork()) == 0:
        save(f"{{sys.argv[1]}}/{{kill_at}}", kill_at)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code != -signal.SIGKILL:
        break
"""


def check_newest(directory: Path, first: int, last: int) -> int:
    """The newest checkpoint is one of the expected steps and is what was saved; nothing half written remains."""
    target = {f"w{index}": jnp.zeros((64, 1024), jnp.float32) for index in range(12)}
    warnings: list[str] = []
    step, tree, meta = restored(directory, target, tell=warnings.append)
    assert warnings == [] and meta == {"step": step} and first <= step <= last
    assert all((np.asarray(tree[f"w{index}"]) == step * 100 + index).all() for index in range(12))
    assert not list(directory.glob("*tmp*"))
    return step


@pytest.mark.full
@pytest.mark.parametrize("stride", [15, pytest.param(1, marks=pytest.mark.proof("kills"))])
def test_a_kill_at_any_write_of_a_save_leaves_a_good_checkpoint(tmp_path, stride):
    """SIGKILL before each write by Python: directories, metadata, the rename that commits, the removal of old steps."""
    command = [sys.executable, "-W", "ignore", "-c", _SWEEP, str(tmp_path), str(stride)]
    codes = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert codes[-1] == "0" and set(codes[:-1]) == {"-9"} and len(codes) > 15 / stride
    steps = [check_newest(tmp_path / str(number * stride), 2, 3) for number in range(1, len(codes) + 1)]
    assert set(steps) == {2, 3} and steps == sorted(steps)
