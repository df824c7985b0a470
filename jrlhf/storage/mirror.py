"""`Mirror`: copies the finished files of a run, which works in a local directory, to the store of its run_dir.

The store has the files of a run under the same names, and a marker `.mirror/checkpoints/STAGE/STEP.json` for each
complete checkpoint, with the sizes and checksums of its files. A checkpoint's files are copied first, then the records
that belong to it (metrics.jsonl and all other files), then the marker. Objects are written whole or not at all, so a
resume works after a kill at any moment. It starts only from what the store has.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.errors import Preempted, RunFailure, UserError
from jrlhf.run.console import written
from jrlhf.run.contents import CONFIG, FLEET
from jrlhf.run.directory import RunDirectory, check_directory, refuse_other, refuse_unshared, run_path, writable
from jrlhf.run.files import Closing, saved_steps, sha256, write_atomic
from jrlhf.run.processes import from_main, is_main
from jrlhf.run.tracking import PROMETHEUS
from jrlhf.storage.claim import Claim
from jrlhf.storage.store import Store, StoreError, refused

OWN = ".mirror"  # the folder of this module's own files, here and in the store
MARKERS = f"{OWN}/checkpoints"
CHECKPOINTS = "checkpoints"
_MARKER = re.compile(rf"{re.escape(MARKERS)}/([^/]+)/(\d+)\.json")  # other names are not ours
_LOOK, _COPY = 1.0, 30.0  # seconds between checks for a new checkpoint, and between copies of the records
_WHOLE = 2**28  # files up to this size in bytes are read at once, so that they cannot change while they are copied


class Mirror(Closing):
    """Copies a run to its address. Every process of the run has one; that of process 0 copies, in a thread."""

    def __init__(self, config: Config, tell: Callable[[str], None]):
        self.address = _address(config)
        self._config, self._path, self._tell = config, run_path(config), tell
        self._store = Store(self.address, config.storage, tell)
        lock = self._path.with_name(f".{self._path.name}.claim")
        self._claim = Claim(self._store, lock, config.storage.lease)
        # stage -> step of a checkpoint that is complete in the store -> inode of its local folder, or 0
        self._stored = dict[str, dict[int, int]]()
        self._copied = dict[str, tuple[Any, str]]()  # name -> (signature of the unchanged file, its checksum)
        self._changing = set[str]()  # names of config.json of models whose files are being copied
        self._end, self._failure, self._started = threading.Event(), "", False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    # --- The start ---

    def open(self, resume: bool) -> None:
        """Refuses a run that cannot start. For a resume, claims the address and downloads the run."""
        from_main(partial(self._open, resume))
        refuse_unshared(self._config, "storage.scratch")

    def _open(self, resume: bool) -> None:
        with _refused(self._config):
            self._store.contact()
            saved = self._store.read(CONFIG)
            if saved is None and resume:
                raise UserError(
                    f"there is no run in {self.address} to resume: start a new one, or check name= and run_dir="
                )
            if saved is not None:
                refuse_other(self.address, saved.decode(errors="replace"), self._config, resume)
                self._claim.take(self._tell)
                self._bring([*self._store.versions()])

    def begin(self) -> None:
        """Claims the address of a new run. Call it after all other checks but that of the run's directory."""
        from_main(self._begin)

    def _begin(self) -> None:
        if self._claim.held:  # a resume has claimed it already
            return
        with _refused(self._config):
            self._claim.take(self._tell)
            if any(not name.startswith(f"{OWN}/") for name in self._store.versions()):  # written since the first check
                raise UserError(f"{self.address} exists and is not a run, or was begun meanwhile: choose another name=")
            shutil.rmtree(self._path, ignore_errors=True)  # left by a run that was deleted from the store

    def _bring(self, names: Sequence[str]) -> None:
        """Replaces the local files by those of the store: at the top level, and each stage's newest good checkpoint."""
        self._path.mkdir(parents=True, exist_ok=True)
        for entry in self._path.iterdir():
            if entry.is_dir() and entry.name != CHECKPOINTS:
                shutil.rmtree(entry)
            elif not entry.is_dir() and entry.name != FLEET:
                entry.unlink()
        for name in (name for name in names if "/" not in name):
            if (data := self._store.read(name)) is not None:
                write_atomic(self._path / name, data)
                self._copied[name] = _signature(self._path / name), sha256(data)
        for marker in filter(None, (_MARKER.fullmatch(name) for name in names)):
            self._stored.setdefault(marker[1], {})[int(marker[2])] = 0
        local = self._path / CHECKPOINTS
        chosen = {stage: self._bring_newest(stage) for stage in self._stored}
        for stage in local.glob("*"):
            for other in stage.iterdir():
                if other.name != str(chosen.get(stage.name)):
                    shutil.rmtree(other)

    def _bring_older(self, stage: str, step: int) -> bool:
        """Downloads the newest complete checkpoint of a stage before `step`; returns whether there is one."""
        if not any(other < step for other in self._stored.get(stage, ())):
            return False
        with _refused(self._config):
            self._bring_newest(stage, before=step)
        return True

    def _bring_newest(self, stage: str, before: float = math.inf) -> int:
        """Downloads the newest complete checkpoint of a stage before a step, and returns its step."""
        damage = list[str]()
        for step in sorted((step for step in self._stored[stage] if step < before), reverse=True):
            reason = self._bring_checkpoint(stage, step)
            if reason is None:
                for sentence in damage:
                    self._tell(f"{sentence}: going on from that of step {step}")
                return step
            damage.append(f"The checkpoint of step {step} in {self.address} is damaged ({reason})")
            del self._stored[stage][step]
        raise UserError(
            f"no checkpoint of {stage} in {self.address} is good ({'; '.join(damage)}): bring one back from a backup, "
            "or delete the run to start over"
        )

    def _bring_checkpoint(self, stage: str, step: int) -> str | None:
        """Downloads the differing files of a checkpoint; returns why it is damaged, or None."""
        try:
            files = json.loads(self._store.read(_marker(stage, step)) or b"")["files"]
        except (ValueError, KeyError, TypeError):
            return "its marker is not what was written"
        final = self._path / CHECKPOINTS / stage / str(step)
        place = final if final.exists() else self._path / OWN / stage / str(step)
        for name, (size, checksum) in files.items():
            file, attempts = place / name, 3  # a transmission error may not occur again
            while not (file.is_file() and file.stat().st_size == size and _checksum_of(file) == checksum):
                if not attempts:
                    return f"{name} is not what was written"
                if not self._store.download(f"{CHECKPOINTS}/{stage}/{step}/{name}", file, size):
                    return f"{name} is missing"
                attempts -= 1
        for file in [file for file in place.rglob("*") if file.is_file()]:
            if file.relative_to(place).as_posix() not in files:
                file.unlink()
        self._stored[stage][step] = place.stat().st_ino  # before the copying thread sees the folder
        if place != final:
            final.parent.mkdir(parents=True, exist_ok=True)
            place.rename(final)
        return None

    # --- The run ---

    def start(self, run: RunDirectory) -> None:
        """Copies the run's files so far. From now on the run fails if its files cannot be copied."""
        run.older = lambda stage, step: from_main(partial(self._bring_older, stage, step))
        if is_main():
            run.shown, run.watch = self.address, self._check
            with _refused(self._config):
                self._copy()
            self._started = True
            self._thread.start()

    def _check(self) -> None:
        """Raises RunFailure if files can no longer be copied."""
        if reason := self._failure or self._claim.failure:
            raise RunFailure(self._sentence(reason))

    def close(self) -> None:
        """Copies the remaining files and releases the address. Raises RunFailure if some could not be copied."""
        self._end.set()
        try:
            if self._started:
                self._thread.join()
                self._check()
                self._checkpoints()
                for folder in (self._path / CHECKPOINTS).glob("*"):
                    if left := self._missing(folder):
                        raise StoreError(f"the checkpoints of steps {left} could not be read here")
                self._claim.check()
                self._copy()
        except StoreError as error:
            raise RunFailure(self._sentence(str(error))) from error
        finally:
            self._claim.close()

    def _work(self) -> None:
        copied = time.monotonic()
        try:
            while not self._end.wait(_LOOK):
                if self._checkpoints():
                    copied = time.monotonic()
                if time.monotonic() - copied > _COPY:
                    self._claim.check()
                    self._copy(folders=False)
                    copied = time.monotonic()
        except Exception as error:
            self._failure = str(error) or type(error).__name__

    def _checkpoints(self) -> bool:
        """Copies the finished checkpoints that the store lacks, the newest first; returns whether there were any."""
        count = 0
        for folder in sorted((self._path / CHECKPOINTS).glob("*")):
            count += sum(self._checkpoint(folder.name, step) for step in reversed(self._missing(folder)))
        return count > 0

    def _missing(self, folder: Path) -> list[int]:
        """Returns the steps of a stage whose checkpoints the store lacks, or has from a folder that was set aside."""
        stored, missing = self._stored.setdefault(folder.name, {}), list[int]()
        for step in saved_steps(folder):
            with suppress(FileNotFoundError):  # the run may delete its old checkpoints at any time
                if stored.get(step) != (folder / str(step)).stat().st_ino:
                    missing.append(step)
        return missing

    def _checkpoint(self, stage: str, step: int) -> bool:
        """Copies a checkpoint, then the records, then its marker, and deletes older ones that the run has deleted."""
        snapshot, files = self._path / OWN / stage / str(step), dict[str, tuple[int, str]]()
        shutil.rmtree(snapshot, ignore_errors=True)
        folder = self._path / CHECKPOINTS / stage / str(step)
        try:
            inode = folder.stat().st_ino
            shutil.copytree(folder, snapshot, copy_function=_link)
        except (OSError, shutil.Error):
            return False
        self._claim.check()
        for file in sorted(file for file in snapshot.rglob("*") if file.is_file()):
            name = file.relative_to(snapshot).as_posix()
            checksum = _checksum_of(file)
            self._store.upload(file, f"{CHECKPOINTS}/{stage}/{step}/{name}")
            files[name] = file.stat().st_size, checksum
        shutil.rmtree(snapshot)
        self._copy()
        self._claim.check()
        self._store.write(_marker(stage, step), json.dumps({"files": files}).encode())
        self._stored[stage][step] = inode
        self._clean(stage, {*saved_steps(self._path / CHECKPOINTS / stage), step})
        return True

    def _clean(self, stage: str, wanted: set[int]) -> None:
        """Deletes the checkpoints of a stage that the run has deleted, and parts of incomplete ones."""
        self._claim.check()
        files = dict[int, list[str]]()  # by step; only older steps, as newer ones would be of another run
        for name in self._store.versions(f"{CHECKPOINTS}/{stage}"):
            if (step := name.split("/")[2]).isdecimal() and int(step) < max(wanted):
                files.setdefault(int(step), []).append(name)
        for step in sorted({*files, *self._stored[stage]} - wanted):
            for name in (_marker(stage, step), *files.get(step, ())):  # the marker first: it vouches for the files
                self._store.delete(name)
        self._stored[stage] = {step: inode for step, inode in self._stored[stage].items() if step in wanted}

    def _copy(self, *, folders: bool = True) -> None:
        """Copies all changed files but checkpoints, hidden files, `FLEET`, and the file for Prometheus.

        A model's config.json is deleted before the first of its other files changes and copied last, so that a model
        with a config.json is complete.
        """
        names = list[Path]()
        for place, below, files in os.walk(self._path):  # skips a folder that is deleted meanwhile
            below[:] = [name for name in below if folders and name != CHECKPOINTS and not name.startswith(".")]
            own = (name for name in files if name not in (PROMETHEUS, FLEET) and not name.startswith("."))
            names += (Path(place, name).relative_to(self._path) for name in own)
        for name in sorted(names, key=lambda name: (name.name == "config.json", name)):
            with suppress(FileNotFoundError):  # replaced or deleted meanwhile
                self._copy_file(name.as_posix())

    def _copy_file(self, name: str) -> None:
        file = self._path / name
        signature, checksum = _signature(file), ""
        before, last = self._copied.get(name, (None, ""))
        if signature == before:
            return
        data = file.read_bytes() if file.stat().st_size < _WHOLE else None
        if (checksum := _checksum_of(file) if data is None else sha256(data)) != last:
            config = file.with_name("config.json").relative_to(self._path).as_posix()
            if "/" in name and name != config and config not in self._changing and (self._path / config).exists():
                self._store.delete(config)
                self._copied.pop(config, None)
                self._changing.add(config)
            if data is None:
                self._store.upload(file, name)
            else:
                self._store.write(name, data)
            self._changing.discard(name)
        self._copied[name] = signature, checksum

    def _sentence(self, reason: str) -> str:
        return (
            f"{self.address} cannot be written ({reason}): resume the run once that is mended, from the newest "
            f"checkpoint there; what was not copied is in {self._path} until then"
        )


def check_place(config: Config, tell: Callable[[str], None]) -> None:
    """Refuses a run whose directory, here or in a store, cannot be written. Leaves nothing there."""
    check_directory(config)
    if is_address(config.run_dir):
        with _refused(config):
            store = Store(config.run_dir, config.storage, tell)  # above the run, where remains of a kill do no harm
            store.contact()
            store.try_out()


def holds_run(config: Config, tell: Callable[[str], None]) -> bool:
    """True if there is a run at a config's address."""
    with _refused(config):
        store = Store(_address(config), config.storage, tell)
        store.contact()
        return store.read(CONFIG) is not None


@contextmanager
def _refused(config: Config) -> Iterator[None]:
    """Turns errors of the store, and of the scratch directory, into UserErrors."""
    with refused(f"run_dir={config.run_dir} cannot be used", "list, read, write and delete"), writable(config):
        yield


@contextmanager
def mirrored(config: Config, *, resume: bool, tell: Callable[[str], None]) -> Iterator[Mirror]:
    """Yields the `Mirror` of a run at an address.

    At the end remaining files are copied, also if the run fails. tell: called with sentences about downloads.
    """
    mirror = Mirror(config, tell)
    try:
        mirror.open(resume)
        yield mirror
    except Exception as error:
        try:
            mirror.close()
        except RunFailure as failure:
            if isinstance(error, Preempted):
                raise failure from error
            if str(failure) != str(error):  # the run may have ended for this reason
                tell(f"warning: {failure}")
        raise
    except BaseException:
        mirror.close()
        raise
    mirror.close()
    if (run_path(config) / "report.html").exists():  # only now is it, and the model, where users will look for it
        for line in written(mirror.address):
            tell(line)


def _address(config: Config) -> str:
    return f"{config.run_dir.rstrip('/')}/{config.name}"


def _marker(stage: str, step: int) -> str:
    return f"{MARKERS}/{stage}/{step}.json"


def _link(source: str, target: str) -> None:
    """Makes a hard link to a file, so that it remains when the first name is deleted; copies it if that fails."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _signature(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checksum_of(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
