"""`python -m jrlhf.doctor [--json]`: whether this machine is set up for runs; each finding with its remedy.

`gather` collects facts, each check turns facts into findings. JAX starts in a process of its own: a driver that hangs,
or packages that do not fit each other, are findings as well.
"""

import argparse
import http.client
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from jrlhf.errors import DONE, FAILED, UserError, exit_code_of_printing, printable

GIB = 2**30
LEAST_FREE, FEW_FREE = 1 * GIB, 20 * GIB  # bytes for runs: below the first a problem, below the second a note
START_SECONDS, HUB_SECONDS, STORE_SECONDS = 180, 4, 10  # deadlines
TOLERANCE = 0.05  # of log-probs in nats: accelerators multiply float32 in fewer bits
_FOR_WORK_ON_JRLHF = ("dev", "docs", "test")
_ACCELERATORS = {"gpu": ("an NVIDIA GPU", ("cuda12", "cuda13")), "tpu": ("a TPU", ("tpu",))}


@dataclass(frozen=True)
class Finding:
    """One line: whether a part of the machine is as runs need it, and otherwise what to do."""

    part: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What was seen of this machine."""

    python: str = ""  # version
    requires_python: str = ""  # versions
    versions: Mapping[str, str] = field(default_factory=dict)  # of installed distributions
    requirements: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of jrlhf and jax, as in their metadata
    jax_platforms: str = ""  # the environment variable JAX_PLATFORMS
    xla_flags: str = ""  # and XLA_FLAGS
    backend: Mapping[str, Any] = field(default_factory=dict)  # what `probe` printed
    hub_offline: bool = False
    hub_error: str | None = None  # why the hub was not reached
    hub_token: bool = False
    hub_token_wrong: bool = False  # it holds what no token does
    unwritable: Mapping[str, str] = field(default_factory=dict)  # variable -> its place, and why no file can be there
    run_dir: str = "runs"
    run_dir_error: str | None = None  # why no file can be written there
    free: int | None = None  # bytes; None: no bound is known, as of an object store


def diagnose(facts: Facts) -> list[Finding]:
    """Returns the findings of all checks."""
    checks = (check_packages, check_extras, check_accelerator, check_devices, check_programs)
    checks += (check_hub, check_places, check_run_dir)
    return [finding for check in checks for finding in check(facts)]


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Yields whether Python and what jrlhf and jax require are installed and fit each other."""
    if "jrlhf" not in facts.requirements:
        remedy = "pip install -e . in the checkout"
        yield Finding("packages", "note", "jrlhf is not installed, so that its requirements are not known", remedy)
        return
    missing, unfit = _compare(facts, "")
    if not SpecifierSet(facts.requires_python).contains(facts.python, prereleases=True):
        unfit.append(f"Python {facts.python} does not fit jrlhf, which needs {facts.requires_python}")
    for text in (*(f"{name} is missing" for name in missing), *unfit):
        yield Finding("packages", "problem", text, "pip install --upgrade jrlhf")
    if not missing and not unfit:
        jax = ", ".join(f"{name} {facts.versions.get(name, '?')}" for name in ("jax", "jaxlib", "flax"))
        yield Finding("packages", "ok", f"Python {facts.python}, {jax}, and all that jrlhf requires")


def check_extras(facts: Facts) -> Iterator[Finding]:
    """Yields which extras are installed, and those whose packages do not fit the others, such as a plugin for JAX."""
    for extra in sorted(_extras_of_jrlhf(facts) - {*_FOR_WORK_ON_JRLHF}):
        missing, unfit = _compare(facts, extra)
        for text in unfit:
            yield Finding(f"extra {extra}", "problem", text, f"pip install --upgrade 'jrlhf[{extra}]'")
        accelerates = any(extra in extras for _, extras in _ACCELERATORS.values())
        if missing and not accelerates:  # without an accelerator these are not missed
            text = f"not installed: {', '.join(missing)}"
            yield Finding(f"extra {extra}", "note", text, f"if you need it, pip install 'jrlhf[{extra}]'")
        if not missing and not unfit:
            yield Finding(f"extra {extra}", "ok", "installed")


def check_accelerator(facts: Facts) -> Iterator[Finding]:
    """Yields whether an accelerator that the machine has is the one that JAX runs on."""
    present, running = facts.backend.get("accelerator"), facts.backend.get("platform")
    if present is None or running is None:
        return
    name, extras = _ACCELERATORS[present]
    if running != "cpu":
        yield Finding("accelerator", "ok", f"JAX runs on the {running}")
        return
    installed = [extra for extra in extras if extra in _extras_of_jrlhf(facts) and not _compare(facts, extra)[0]]
    if facts.jax_platforms:
        remedy = "unset JAX_PLATFORMS"
    elif installed:
        remedy = "see the findings on packages, and whether the driver works (nvidia-smi) and is new enough"
    else:
        remedy = " or ".join(f"pip install 'jrlhf[{extra}]'" for extra in extras)
    because = f" because JAX_PLATFORMS={facts.jax_platforms}" if facts.jax_platforms else ""
    yield Finding("accelerator", "problem", f"{name} is present but IDLE: JAX runs on the CPU{because}", remedy)


def check_devices(facts: Facts) -> Iterator[Finding]:
    """Yields the devices that JAX has, with their memory."""
    devices = facts.backend.get("devices")
    if not devices:
        reason = facts.backend.get("error", "no devices")
        variables = {"JAX_PLATFORMS": facts.jax_platforms, "XLA_FLAGS": facts.xla_flags}
        named = " and ".join(f"{name}={value}" for name, value in variables.items() if value)
        remedy = "mend the packages named above, free devices that another process holds, or start all hosts of a pod"
        remedy = f"mend or unset {named}; else {remedy}" if named else remedy
        yield Finding("devices", "problem", f"JAX does not start: {reason}", remedy)
        return
    for kind, memory in dict.fromkeys(map(tuple, devices)):
        count = sum(tuple(device) == (kind, memory) for device in devices)
        shared = facts.backend.get("host_memory") if kind == "cpu" else None
        size = f", {memory / GIB:.1f} GiB each" if memory else f", {shared / GIB:.1f} GiB in all" if shared else ""
        yield Finding("devices", "ok", f"{count} x {kind}{size}")


def check_programs(facts: Facts) -> Iterator[Finding]:
    """Yields whether a small program, and then the log-prob op, compile, run and are right."""
    if not facts.backend.get("devices"):
        return
    seconds, error = facts.backend.get("seconds"), facts.backend.get("logprob_error")
    if seconds is None or error is None:
        reason = facts.backend.get("error", "it ended")
        yield Finding("programs", "problem", f"a program does not run: {reason}", "update the driver and the packages")
    elif not error <= TOLERANCE:
        remedy = "set compute.logprob=reference and report it"
        yield Finding("programs", "problem", f"the log-probs are off by {error:.2g} nats", remedy)
    else:
        yield Finding("programs", "ok", f"compiled and run in {seconds:.1f} s; the log-probs are right to {error:.0e}")


def check_hub(facts: Facts) -> Iterator[Finding]:
    """Yields whether models and datasets can be downloaded by name, also gated ones."""
    if facts.hub_offline:
        yield Finding("hub", "note", "offline, as HF_HUB_OFFLINE says: only what was downloaded before has a name")
    elif facts.hub_error is not None:
        remedy = "if you need it, see network, proxy and HF_ENDPOINT; directories and files need no hub"
        yield Finding("hub", "note", f"not reached ({facts.hub_error})", remedy)
    else:
        yield Finding("hub", "ok", "reached")
    if facts.hub_token_wrong:
        remedy = "hf auth login, or set HF_TOKEN to the token alone"
        yield Finding("hub token", "problem", "it holds a space or another character that no token has", remedy)
    elif facts.hub_token:
        yield Finding("hub token", "ok", "present")
    else:
        yield Finding("hub token", "note", "none, which gated models need", "hf auth login, or set HF_TOKEN")


def check_places(facts: Facts) -> Iterator[Finding]:
    """Yields the places beside `run_dir` in which files cannot be written: the hub's cache, the temporary directory."""
    for variable, text in facts.unwritable.items():
        yield Finding(variable, "problem", text, f"set {variable} to a directory that can be written")


def check_run_dir(facts: Facts) -> Iterator[Finding]:
    """Yields whether runs can be written, and the space for them."""
    free = "no bound is known" if facts.free is None else f"{facts.free / GIB:,.1f} GiB free"
    if facts.run_dir_error is not None:
        text = f"{facts.run_dir} cannot be written ({facts.run_dir_error})"
        yield Finding("run_dir", "problem", text, "mend that, or choose another place: run_dir=PLACE")
    elif facts.free is None or facts.free >= FEW_FREE:
        yield Finding("run_dir", "ok", f"{facts.run_dir}: can be written, {free}")
    elif facts.free < LEAST_FREE:
        yield Finding("run_dir", "problem", f"{facts.run_dir}: {free}", "make room, or choose another place")
    else:
        remedy = "a checkpoint takes 12 bytes per trained weight: see that they fit"
        yield Finding("run_dir", "note", f"{facts.run_dir}: {free}", remedy)


def _extras(requirement: Requirement) -> set[str]:
    """Returns the extra that a line of metadata belongs to, as a set; empty for one that always holds."""
    return set(re.findall(r'extra == "([^"]+)"', str(requirement.marker or "")))


def _extras_of_jrlhf(facts: Facts) -> set[str]:
    return {extra for line in facts.requirements.get("jrlhf", ()) for extra in _extras(Requirement(line))}


def _compare(facts: Facts, extra: str, package: str = "jrlhf") -> tuple[list[str], list[str]]:
    """Returns what a package requires and is missing, and sentences on what has another version.

    extra: only what this extra adds; "": what is always required. An extra that is not installed has no such sentences.
    """
    missing, unfit = [], []
    for requirement in map(Requirement, facts.requirements.get(package, ())):
        marker, version = requirement.marker, facts.versions.get(canonicalize_name(requirement.name))
        if bool(extra) != bool(_extras(requirement)) or (marker and not marker.evaluate({"extra": extra})):
            continue
        if version is None:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            owner = f"{package} {facts.versions[package]}"
            unfit.append(f"{requirement.name} {version} does not fit {owner}, which needs {requirement.specifier}")
        for inner in requirement.extras or ([""] if requirement.name == "jax" else []):
            more = _compare(facts, inner, requirement.name)
            missing, unfit = missing + more[0], unfit + more[1]
    return missing, ([] if extra and missing else unfit)


def gather(run_dir: str) -> Facts:
    """Returns the facts of this machine. The hub is waited for 4 seconds, and JAX for three minutes."""
    distributions = importlib.metadata.distributions()
    versions: dict[str, str] = {canonicalize_name(one.name): one.version for one in distributions if one.name}
    requirements = {
        name: tuple(importlib.metadata.requires(name) or ()) for name in ("jrlhf", "jax") if name in versions
    }
    return Facts(
        python=platform.python_version(),
        requires_python=importlib.metadata.metadata("jrlhf")["Requires-Python"] if requirements.get("jrlhf") else "",
        versions=versions,
        requirements=requirements,
        jax_platforms=os.environ.get("JAX_PLATFORMS", ""),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        unwritable=_unwritable_places(),
        backend=_backend(),
        **_hub(),
        **_storage(run_dir),
    )


def _backend() -> dict[str, Any]:
    """Runs `probe` in another process and returns what it printed."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from jrlhf.doctor import probe; probe()"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {START_SECONDS} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def probe() -> None:
    """Prints, as JSON, the devices and whether a program and the log-prob op run on them; an error ends the list."""
    import time

    facts: dict[str, Any] = {}
    try:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jrlhf.kernels.logprob import token_logprobs
        from jrlhf.run.devices import accelerator, host_memory

        facts["accelerator"] = accelerator()
        devices = jax.local_devices()
        facts["platform"] = devices[0].platform
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
        facts["host_memory"] = host_memory()
        facts["devices"] = [(device.device_kind, limit) for device, limit in zip(devices, limits, strict=True)]
        start = time.perf_counter()
        assert float(jax.jit(lambda x: jnp.sum(x @ x))(jnp.ones((64, 64)))) == 64.0**3
        random = np.random.default_rng(0)
        hidden, head, targets = (
            random.normal(size=(8, 16)),
            random.normal(size=(50, 16)) / 4,
            random.integers(50, size=8),
        )
        logits = hidden @ head.T
        right = logits[np.arange(8), targets] - np.log(np.exp(logits).sum(-1))
        arrays = jnp.float32(hidden), jnp.float32(head), jnp.int32(targets)
        logprobs, _ = jax.jit(token_logprobs)(*arrays)
        facts["seconds"] = time.perf_counter() - start
        facts["logprob_error"] = float(np.abs(np.asarray(logprobs) - right).max())
    except Exception as error:  # whatever a driver or a package raises
        facts["error"] = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])  # an assertion has no text
    print(json.dumps(facts))


def _hub() -> dict[str, Any]:
    try:
        from huggingface_hub import constants, get_token
    except ImportError as error:
        return {"hub_error": str(error)}
    token = get_token()
    facts: dict[str, Any] = {"hub_offline": constants.HF_HUB_OFFLINE, "hub_token": token is not None}
    facts["hub_token_wrong"] = token is not None and not re.fullmatch(r"[!-~]+", token)
    if constants.HF_HUB_OFFLINE:
        return facts
    facts["hub_error"] = f"no answer within {HUB_SECONDS} s"

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
            facts["hub_error"] = None
        except urllib.error.HTTPError:
            facts["hub_error"] = None  # it answers
        except (OSError, ValueError, http.client.HTTPException) as error:  # also of an address that is none
            facts["hub_error"] = f"{constants.ENDPOINT}: {getattr(error, 'reason', error)}"

    asking = threading.Thread(target=ask, daemon=True)  # a name server that does not answer has no deadline
    asking.start()
    asking.join(HUB_SECONDS)
    return dict(facts)


def _storage(run_dir: str) -> dict[str, Any]:
    if "://" in run_dir:
        return {"run_dir": run_dir, "run_dir_error": _store_error(run_dir)}
    path = Path(run_dir).absolute()
    place = _existing(path)
    return {"run_dir": str(path), "run_dir_error": _write_error(place), "free": shutil.disk_usage(place).free}


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _write_error(place: Path) -> str | None:
    """Returns why no file can be written in a directory."""
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unwritable_places() -> dict[str, str]:
    """Returns the variables whose directory cannot be written, each with a text on it."""
    temporary = os.environ.get("TMPDIR", "/tmp")
    places = {"TMPDIR": ("the temporary directory", temporary, Path(temporary))}  # must be there
    with suppress(ImportError):
        from huggingface_hub.constants import HF_HUB_CACHE

        places["HF_HOME"] = ("the cache of the hub", HF_HUB_CACHE, _existing(Path(HF_HUB_CACHE).absolute()))
    errors = {variable: _write_error(place) for variable, (_, _, place) in places.items()}
    return {
        variable: f"{what} {name} cannot be written ({errors[variable]})"
        for variable, (what, name, _) in places.items()
        if errors[variable] is not None
    }


def _store_error(address: str) -> str | None:
    """Writes and deletes an object; returns why that fails."""
    try:
        from jrlhf.config.places import StorageConfig, is_address
        from jrlhf.storage.store import Store, StoreError
    except Exception as error:  # of packages that do not fit each other
        return f"{type(error).__name__}: {error}"
    if not is_address(address):
        return "it is not s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
    try:
        store = Store(address, StorageConfig(timeout=STORE_SECONDS, patience=STORE_SECONDS))
        name = f"jrlhf-doctor-{uuid.uuid4().hex}"  # no object of the user
        store.write(name, b"", new=True)
        store.delete(name)
    except (StoreError, UserError) as error:
        return str(error)
    return None


def cli(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 without a problem, else 1."""
    parser = argparse.ArgumentParser(prog="python -m jrlhf.doctor", description="Is this machine set up for runs?")
    parser.add_argument("--json", action="store_true", help="print a JSON object, for programs and for bug reports")
    parser.add_argument(
        "--run-dir", default="runs", help="where runs are to be written, a path, s3:// or gs://; default: runs"
    )
    options, findings = parser.parse_args(arguments), []

    def run() -> None:
        if not options.run_dir:
            raise UserError("--run-dir is empty: name a place, or leave it out")
        findings.extend(diagnose(gather(options.run_dir)))
        if options.json:
            print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
            return
        for one in findings:
            remedy = f"; {one.remedy}" if one.remedy else ""
            print(printable(f"{one.state:<8} {one.part:<13} {one.text}{remedy}"))

    return exit_code_of_printing(run) or (FAILED if any(one.state == "problem" for one in findings) else DONE)


if __name__ == "__main__":
    sys.exit(cli())
