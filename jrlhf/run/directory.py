"""The directory of a run: its lock, the check of its config on resume, and the record of its environment."""

import contextlib
import datetime
import errno
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from jrlhf import __version__
from jrlhf.config.parse import config_yaml
from jrlhf.config.places import expanded, is_address
from jrlhf.config.schema import Config
from jrlhf.errors import Preempted, RunFailure, UserError, beside
from jrlhf.models.hf.directories import heal
from jrlhf.run.contents import CONFIG, ENVIRONMENT, EXPORTS
from jrlhf.run.files import Closing, append_jsonl, cache_directory, lock_file, write_atomic, write_error
from jrlhf.run.processes import from_main, is_main, share
from jrlhf.run.resume import changes

_LOCK = ".lock"
_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "quota exceeded", errno.EFBIG: "File too large"}


class RunDirectory(Closing):
    """A run directory, which `lock` locks until `close`, or until the process ends in any way.

    From `open_run` until `begin` it only collects writes, so that a refused resume changes nothing.

    writes: whether this process writes into the directory; only process 0 does.
    notes: lines for environment.txt. now: the time of this start. changes: clauses about changes in a resume.
    new: true until `begin` of a run that did not exist before; until then nothing in it is worth keeping.
    """

    def __init__(
        self, path: Path, *, writes: bool = True, notes: Sequence[str] = (), now: datetime.datetime | None = None
    ):
        self._now = now or datetime.datetime.now(datetime.UTC)
        self.path, self.writes, self.notes, self.changes, self._lock = path, writes, notes, list[str](), -1
        self.shown: Path | str = path  # the path or address that users see
        self.watch: Callable[[], None] = lambda: None  # raises RunFailure if the run must end
        # Copies the newest checkpoint of a stage before a step from other storage; returns whether there is one.
        self.older: Callable[[str, int], bool] = lambda stage, step: False
        self.new, self.kept = False, lambda: None  # kept: called when a new run begins
        self._made = list[Path]()  # directories that did not exist, the innermost first
        self._pending: dict[str, str | bytes] | None = None  # name -> content of files to write in `begin`

    def lock(self) -> None:
        """Locks the directory. The lock lives as long as its file is open in this process."""
        lock, ours = lock_file(self.path / _LOCK)
        if ours is False:
            holder = os.read(lock, 100).decode(errors="replace").strip()
            os.close(lock)
            user = f"process {holder}" if holder else "another process"
            raise UserError(f"{self.path} is in use by {user}: wait until it ends, or give this run another name=")
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # this also releases the lock
            self._lock = -1

    def append(self, name: str, records: Iterable[Mapping[str, object]]) -> None:
        """Appends records, each with its `stage` and `step`, to a file of the directory."""
        if self.writes:
            append_jsonl(self.path / name, records)

    def wait(self) -> None:
        """Collects all writes from now until `begin`."""
        self._pending = {}

    @property
    def collected(self) -> tuple[str, ...]:
        """The names of the files that `begin` will write."""
        return tuple(self._pending or ())

    def write(self, name: str, text: str | bytes) -> None:
        """Replaces a file of the directory."""
        if self._pending is not None:
            self._pending[name] = text
        elif self.writes:
            write_atomic(self.path / name, text)

    def begin(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """Keeps a new run, writes the collected files, adds this start to environment.txt, and tells the changes."""
        if self.new:
            self.new = False
            self.kept()
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        for name, text in pending.items():
            self.write(name, text)
        for change in self.changes:
            tell(f"going on {change}")
        if self.writes:
            with open(self.path / ENVIRONMENT, "a", encoding="utf-8") as file:
                notes = [*self.notes, *(f"goes on {change}" for change in self.changes)]
                file.write(_environment(self._now, notes))

    def discard(self) -> None:
        """Deletes the files of a new run, and the directories that were made for them."""
        with contextlib.suppress(OSError):  # another run may be in one of the directories by now
            for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == _LOCK):  # it guards the others
                if not entry.is_dir():
                    entry.unlink()
                elif not any(entry.rglob(_LOCK)):  # in which is no other run
                    shutil.rmtree(entry)
            for folder in self._made:
                folder.rmdir()

    def check_present(self) -> None:
        """Raises RunFailure if the directory was deleted or moved during the run, or if copying it fails."""
        self.watch()
        try:
            present = self._lock < 0 or os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self._lock))
        except OSError:
            present = False
        if not present:
            raise RunFailure(
                f"{self.path} was deleted or moved while the run was using it: bring it back and resume the run"
            )


@contextlib.contextmanager
def explained(run: RunDirectory) -> Iterator[None]:
    """Turns an error of the block into RunFailure if the run's directory was removed or its disk is full."""
    try:
        yield
    except Preempted:
        raise
    except Exception as error:
        run.check_present()
        if (reason := full_disk(error)) is not None:
            raise RunFailure(
                f"{run.path} cannot be written ({reason}): free some space there and resume the run"
            ) from error
        raise


def full_disk(error: BaseException | None) -> str | None:
    """Returns the message if an error, or one of its causes, means a full disk. TensorStore's errors are plain text."""
    while error is not None:
        for number, reason in _FULL.items():
            words = reason, f"os_error_code='{number}'"
            if (isinstance(error, OSError) and error.errno == number) or any(word in str(error) for word in words):
                return reason
        error = error.__cause__ or error.__context__
    return None


def first_day(directory: Path, now: datetime.datetime) -> str:
    """Returns the day, in UTC, on which the run in a directory began (2026-11-27); that of `now` if it has none."""
    path = directory / ENVIRONMENT
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return datetime.datetime.fromisoformat(file.readline().removeprefix("# ").strip()).date().isoformat()
    return now.date().isoformat()


def run_path(config: Config) -> Path:
    """Returns a run's working directory: run_dir/name or, if that is an address, its directory in storage.scratch."""
    if not is_address(config.run_dir):
        return expanded(config.run_dir, "run_dir") / config.name
    scratch = config.storage.scratch
    place = cache_directory() / "runs" if scratch is None else expanded(scratch, "storage.scratch")
    return place.joinpath(*config.run_dir.replace("://", "/").rstrip("/").split("/"), config.name)


def check_directory(config: Config) -> None:
    """Refuses a run whose directory cannot be created or written, before other work. Leaves nothing there."""
    if not config.run_dir:
        raise UserError("run_dir= is empty: name a directory; the current one is run_dir=.")
    if (reason := write_error(run_path(config))) is not None:
        raise _unwritable(config, reason)


def _unwritable(config: Config, reason: str) -> UserError:
    key = "storage.scratch" if is_address(config.run_dir) else "run_dir"
    return UserError(f"run directory {run_path(config)} cannot be written ({reason}): choose another {key}=")


@contextlib.contextmanager
def writable(config: Config) -> Iterator[None]:
    """Turns an OSError of a block that writes into a run's directory into a UserError."""
    try:
        yield
    except OSError as error:
        raise _unwritable(config, error.strerror or str(error)) from error


def open_run(
    config: Config, *, resume: bool = False, notes: Sequence[str] = (), now: datetime.datetime | None = None
) -> RunDirectory:
    """Creates the directory `run_path(config)` or, with `resume`, opens the run in it.

    A new run gets config.yaml at once. In a resumed run with changed settings, `RunDirectory.begin` replaces it. Each
    start is appended to environment.txt, with its time in UTC and the lines of `notes`. Process 0 does all this for the
    others.
    """
    run = RunDirectory(run_path(config), writes=is_main(), notes=notes, now=now)

    def opening() -> None:
        with writable(config):
            _open(run, config, resume)

    from_main(opening)
    run.new = not resume
    return run


def refuse_unshared(config: Config, remedy: str) -> None:
    """Refuses processes that do not see the same directory of runs. remedy: what to set to a shared one."""
    place = run_path(config).parent
    if not share(place):
        raise UserError(
            f"run_dir={config.run_dir}: the processes do not see the same {place}, where each writes its shards of a "
            f"checkpoint: set {remedy} to a directory of a file system that all of them share"
        )


def check_run(config: Config, resume: bool) -> None:
    """Refuses what `open_run` would refuse in `run_path(config)`, before other work.

    `open_run` checks again, because the run may change meanwhile.
    """
    path = run_path(config)
    with writable(config):
        _check_run(path, resume)
        if (path / CONFIG).exists():
            run = RunDirectory(path)
            run.lock()  # first: who is told to delete a run must not delete one that is in use
            run.close()
            _compare(path, config, resume)


def _check_run(path: Path, resume: bool) -> None:
    """Refuses a directory that holds something else than a run, or nothing to resume."""
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    if CONFIG not in names:
        if resume:
            remedy = beside(path, "start a new one, or check name= and run_dir=")
            raise UserError(f"there is no run in {path} to resume: {remedy}")
        if any(name != _LOCK and not (name.startswith(".") and name.endswith(".tmp")) for name in names):
            raise UserError(f"{path} exists and is not a run (it has no {CONFIG}): choose another name= or run_dir=")


def _open(run: RunDirectory, config: Config, resume: bool) -> None:
    path = run.path
    _check_run(path, resume)
    run._made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        undo.callback(run.close)
        run.lock()
        run.wait()
        fresh = not (path / CONFIG).exists()  # checked again under the lock: another process may have made it
        if not fresh:
            run.changes += filter(None, (_compare(path, config, resume), _other_processes(path)))
        if fresh or run.changes:
            run.write(CONFIG, config_yaml(config))
        if fresh:
            run.begin()
        for name in ("", *EXPORTS):  # half written by a killed process, as are the exports
            for leftover in path.joinpath(name).glob(".*.tmp"):
                leftover.unlink()
        for name in EXPORTS:
            heal(path / name)
        undo.pop_all()


def _other_processes(path: Path) -> str:
    """Returns a clause if the run's last start had another number of processes; empty if not, or if it wrote none."""
    text = (path / ENVIRONMENT).read_text(encoding="utf-8", errors="replace") if (path / ENVIRONMENT).exists() else ""
    starts = re.findall(r"^# # \d+ .*? device\(s\), mesh .*?(?:, (\d+) process\(es\))?(?:, plan .*)?$", text, re.M)
    before, now = int((starts or [jax.process_count()])[-1] or 1), jax.process_count()
    return "" if before == now else f"in {now} process(es) (was {before})"


def _compare(path: Path, config: Config, resume: bool) -> str:
    """Returns a line about the settings that the config changes; refuses settings that would change the results."""
    try:
        saved = (path / CONFIG).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path / CONFIG} is damaged ({error}): bring it back from a backup") from error
    return refuse_other(path, saved, config, resume)


def refuse_other(path: Path | str, saved: str, config: Config, resume: bool) -> str:
    """Refuses a config that cannot continue the run in `path`, whose config.yaml is `saved`; see `_compare`."""
    refused, line = changes(path, saved, config)
    if refused:
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        remedy = f"resume it with its own config, {path}/{CONFIG}" if resume else "give this run another name="
        raise UserError(
            f"{path} holds a run with another config ({'; '.join(refused[:5])}{more}): {remedy}, or delete it"
        )
    if not resume:
        raise UserError(
            f"{path} already holds this run: resume it (--resume, resume=True in Python), give another name=, or "
            "delete it"
        )
    return line


def _environment(now: datetime.datetime, notes: Sequence[str]) -> str:
    """Describes this process: time, command, Python, source, `notes`, every installed distribution."""
    lines = [
        now.isoformat(timespec="seconds"),
        f"command: {' '.join(sys.argv)}",
        f"jrlhf {__version__}, python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores",
        *(f"{name}={os.environ[name]}" for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ),
    ]
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists() and (root / "pyproject.toml").exists():  # a source checkout
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
            done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
            lines.append(f"source {done.stdout.strip()}")
    packages = {f"{package.name}=={package.version}" for package in importlib.metadata.distributions() if package.name}
    comments = (f"# {' '.join(line.splitlines())}" for line in (*lines, *notes))  # arguments may hold line ends
    return "".join(f"{line}\n" for line in (*comments, *sorted(packages), ""))
