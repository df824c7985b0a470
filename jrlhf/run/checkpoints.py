"""`Checkpoints`: saves and restores the state of a run. A checkpoint that is not exactly what was saved is refused.

Orbax writes asynchronously and atomically, each process its own shards; any mesh can restore. It does not detect a
flipped bit in an array file, so every leaf has a fingerprint, computed on the devices and checked after a restore.
"""

import contextlib
import errno
import gc
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jrlhf.errors import UserError, one_line
from jrlhf.meshes.offload import DEVICE, groups, offload
from jrlhf.meshes.spread import move, spread, spread_sharding
from jrlhf.meshes.transfers import HOST
from jrlhf.run.files import Closing, sha256
from jrlhf.run.fingerprints import fingerprints, mesh_of, named_leaves
from jrlhf.run.processes import any_process, from_main, is_main

T = TypeVar("T")
Tree = TypeVar("Tree")
_STATE, _META = "state", "meta"
_LATE_REPORTS = "Event loop is closed", "Encountered error while reading array index"


class Checkpoints(Closing):
    """The checkpoints of a run: the newest `keep` and that of step `kept`, each a tree of arrays and a JSON-like dict.

    tell: called with a sentence for each damaged checkpoint that is skipped. older: copies the newest checkpoint before
    a step from other storage into the directory; returns whether there is one.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int = 2,
        *,
        tell: Callable[[str], None] = print,
        older: Callable[[int], bool] = lambda step: False,
    ):
        self._directory, self._tell, self._older = Path(directory).absolute(), tell, older
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(_unraisable(_LATE_REPORTS))
        self._hooks.enter_context(_filtered(("absl",), lambda record: "orbax" not in record.pathname))  # raised, too
        if is_main():
            # A killed process left it half written. Orbax would remove it in the background, perhaps too late.
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover)
        self.kept: int | None = None  # None: only the newest are kept
        self._keep = keep
        options = ocp.CheckpointManagerOptions(preservation_policy=self, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Answers Orbax when a save begins; it deletes the others once that is complete."""
        newest = [one.step for one in checkpoints][-self._keep :]
        return [one.step in (*newest, self.kept) for one in checkpoints]

    def has(self, step: int) -> bool:
        """True if there is a checkpoint of a step, which `older` may bring."""
        if step not in self.steps and self._older(step + 1):
            self._manager.reload()
        return step in self.steps

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> None:
        """Starts to save; the arrays may be donated or deleted as soon as this returns.

        Steps must ascend; a step that is saved already is not saved again. Raises RuntimeError if the previous save
        failed, as `wait` and `close` do.
        """
        steps = self.steps
        if step in steps:
            return
        if steps and step < steps[-1]:
            raise ValueError(f"step {step} comes before the newest checkpoint, that of step {steps[-1]}")
        leaves = named_leaves(tree)
        description = {"meta": meta, "leaves": _kinds(leaves), "fingerprints": fingerprints(leaves)}
        content = json.dumps(description, allow_nan=False)
        sealed = {"content": content, "sha256": sha256(content)}
        items = {_STATE: ocp.args.StandardSave(spread(leaves)), _META: ocp.args.JsonSave(sealed)}
        self._saving(lambda: self._manager.save(step, args=ocp.args.Composite(**items)))

    def restore_latest(self, target: Tree) -> tuple[int, Tree, dict[str, Any]] | None:
        """Returns (step, tree, meta) of the newest good checkpoint; None if there is no checkpoint.

        Damaged checkpoints are reported, moved to `damaged-STEP`, and skipped. Raises UserError if none is good; then
        all stay in their place.

        target: the tree to fill, of arrays or of `jax.ShapeDtypeStruct`s with the leaves' shardings (see `like`).
        """
        self.wait()
        damaged: dict[int, str] = {}
        while (step := self._newest(damaged)) is not None:
            try:
                meta, tree = _restore(self._directory / str(step), target)
            except _Damaged as error:
                damaged[step] = str(error)
                continue
            for bad, reason in damaged.items():
                aside = from_main(partial(_set_aside, self._directory / str(bad)))
                self._manager.reload()
                self._tell(
                    f"The checkpoint of step {bad} is damaged ({reason}): going on from that of step {step}; "
                    f"the damaged one is kept in {aside}."
                )
            return step, tree, meta
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise UserError(
                f"no checkpoint in {self._directory} is good ({reasons}): bring one back from a backup, "
                "or delete the run to start over"
            )
        return None

    def _newest(self, damaged: Container[int]) -> int | None:
        """Returns the newest step that is not damaged, from the directory or else from `older`."""
        steps = [step for step in self.steps if step not in damaged]
        if not steps and self.steps and self._older(self.steps[0]):
            self._manager.reload()
            steps = [step for step in self.steps if step not in damaged]
        return steps[-1] if steps else None

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._saving(self._manager.wait_until_finished)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()
            gc.collect()  # operations next to a failed read or write report their errors now
            self._hooks.close()

    def _saving(self, save: Callable[[], object]) -> None:
        try:
            save()
        except Exception as error:
            reason = one_line(error)
            raise RuntimeError(f"a checkpoint could not be saved into {self._directory}: {reason}") from error


def read_meta(directory: Path, step: int) -> dict[str, Any]:
    """Returns the `meta` of a checkpoint; empty if it is damaged, which a restore tells."""
    try:
        return _description(directory.absolute() / str(step))["meta"]
    except _Damaged:
        return {}


def restore_part(directory: Path, step: int, prefix: str, target: Tree) -> Tree:
    """Restores the leaves of a checkpoint whose names begin with `prefix`; reads no others and writes nothing.

    target: `jax.ShapeDtypeStruct`s with the shardings of the leaves, in a tree that names them without `prefix`.
    """
    with _unraisable(_LATE_REPORTS):
        try:
            return _restore(directory.absolute() / str(step), target, prefix)[1]
        except _Damaged as error:
            raise UserError(
                f"the checkpoint of step {step} in {directory} is damaged ({error}): choose another"
            ) from error


def like(tree: Tree, mesh: Mesh | None) -> Tree:
    """Returns the `ShapeDtypeStruct`s of a tree. A leaf on no mesh, such as a new counter, is replicated on `mesh`."""

    def abstract(leaf):
        sharding = getattr(leaf, "sharding", None)
        if mesh is not None and not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, tree)


def _restore(path: Path, target: Any, prefix: str = "") -> tuple[dict[str, Any], Any]:
    """Returns (meta, tree) of the checkpoint in `path`; raises _Damaged. target, prefix: see the callers."""
    description = _description(path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as states:
        leaves = {prefix + name: leaf for name, leaf in named_leaves(target).items()}
        saved, wanted = {k: v for k, v in description["leaves"].items() if k.startswith(prefix)}, _kinds(leaves)
        for name in {**wanted, **saved}:
            if saved.get(name) != wanted.get(name):
                raise UserError(
                    f"the checkpoint of step {path.name} does not fit this run: {name} is {saved.get(name, 'absent')} "
                    f"there and {wanted.get(name, 'absent')} here; resume with the version of the program that wrote it"
                )
        abstract = like(leaves, next(filter(None, map(mesh_of, leaves.values())), None))
        # Orbax needs arrays of which each process has a part.
        saved_as = {name: leaf.update(sharding=spread_sharding(leaf)) for name, leaf in abstract.items()}
        placed = ocp.checkpoint_utils.construct_restore_args(saved_as)
        args = ocp.args.PyTreeRestore(saved_as, restore_args=placed, partial_restore=True)
        arrays = _read(lambda: states.restore(path / _STATE, args=args))
    restored = _brought({name: arrays[name] for name in leaves}, abstract)
    wrong = [name for name, value in fingerprints(restored).items() if description["fingerprints"][name] != value]
    if wrong:
        others = f" and {len(wrong) - 1} other arrays are" if len(wrong) > 1 else " is"
        raise _Damaged(f"{wrong[0]}{others} not what was saved")
    return description["meta"], jax.tree.unflatten(jax.tree.structure(target), restored.values())


def _brought(arrays: dict[str, Array], target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """Moves the arrays to the shardings of `target`. Deletes those that it moves, and returns the others unchanged."""
    names = [name for name, array in arrays.items() if array.sharding != target[name].sharding]
    for group in groups([arrays[name] for name in names]):
        wanted = {names[i]: target[names[i]].sharding for i in group}
        on_devices = [sharding.with_memory_kind(DEVICE) for sharding in wanted.values()]
        moved = dict(zip(wanted, move([arrays[name] for name in wanted], on_devices, donate=True), strict=True))
        asleep = offload({name: array for name, array in moved.items() if wanted[name].memory_kind == HOST})
        arrays |= moved | asleep
    return arrays


def _set_aside(path: Path) -> str:
    """Renames a damaged checkpoint and returns its new path."""
    aside, number = path.with_name(f"damaged-{path.name}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    return str(path.rename(aside))


def _kinds(leaves: dict[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for name, leaf in leaves.items()}


def _description(path: Path) -> dict[str, Any]:
    """Reads what the checkpoint in `path` says of itself: `meta`, and kinds and fingerprints of its leaves."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as descriptions:
        return _read(lambda: _opened(descriptions.restore(path / _META)))


def _opened(sealed: dict[str, Any]) -> dict[str, Any]:
    """Checks and parses the description of a checkpoint."""
    if sha256(sealed["content"]) != sealed["sha256"]:
        raise _Damaged("its description is not what was saved")
    return json.loads(sealed["content"])


class _Damaged(Exception):
    """A checkpoint is not what was saved; the message is a clause with the reason."""


def _read(read: Callable[[], T]) -> T:
    """Calls `read`; turns all errors and output of Orbax and TensorStore about a broken file into one clause.

    Raises _Damaged if, in any process, the files are not what was saved, and UserError if they may be intact but this
    machine cannot read them now.
    """
    result: T | None = None
    damage = obstacle = None
    # The loggers and hooks through which Orbax, TensorStore and asyncio report.
    with _filtered(("absl", "asyncio"), lambda record: False), _unraisable(("",)):
        try:
            result = read()
        except _Damaged as error:
            damage = str(error)
        except Exception as error:
            text = " ".join(str(error).split()).partition(". See full")[0] or type(error).__name__
            text = text if len(text) <= 100 else f"{text[:97]}..."
            obstacle, damage = (text, None) if is_obstacle(error) else (None, f"its files cannot be read: {text}")
        if result is None:
            # Reads that failed at the same time report when they are collected; those that never began, later.
            warnings.filterwarnings("ignore", "coroutine '.*_read_array_index_and_device_put' was never awaited")
            gc.collect()
    if any_process(obstacle is not None):
        raise UserError(
            f"a checkpoint cannot be read now ({obstacle or 'in another process'}), but may be good: "
            "it stays where it is, to be resumed from once that is mended"
        )
    if any_process(damage is not None):
        raise _Damaged(damage or "another process cannot read its part")
    return cast(T, result)


_ERRNOS = {errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}
_STATUS_WORDS = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED")
_STATUS_WORDS += tuple(f"[os_error_code='{number}']" for number in _ERRNOS)


def is_obstacle(error: Exception) -> bool:
    """True if an error is about this machine (memory, rights, limits, network) and not about a file's content.

    JAX and TensorStore raise plain errors whose cause is only in the text; a test checks the installed versions.
    """
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in _ERRNOS)
        or any(word in str(error) for word in _STATUS_WORDS)
    )


@contextlib.contextmanager
def _filtered(names: Sequence[str], keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Lets the loggers with these names log only the records that `keep` accepts."""
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


@contextlib.contextmanager
def _unraisable(beginnings: tuple[str, ...]) -> Iterator[None]:
    """Drops reports of uncaught errors with these beginnings: reads next to a failed one fail later, unobserved."""
    report = sys.unraisablehook
    sys.unraisablehook = lambda error: None if str(error.exc_value).startswith(beginnings) else report(error)
    try:
        yield
    finally:
        sys.unraisablehook = report
