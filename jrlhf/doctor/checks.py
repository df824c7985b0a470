"""Checks packages and JAX; each finding has a remedy.

JAX starts in a separate process, so that a hanging driver or incompatible packages are findings, too.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from jrlhf.doctor.access import Finding, check_hub, check_places, check_run_dir
from jrlhf.errors import one_line
from jrlhf.run.files import in_units

START_SECONDS = 180  # deadline for the start of JAX
TOLERANCE = 0.05  # tolerance of log-probs in nats: accelerators multiply float32 with fewer bits
_FOR_WORK_ON_JRLHF = ("dev", "docs", "test")
_ACCELERATORS = {"gpu": ("an NVIDIA GPU", ("cuda12", "cuda13")), "tpu": ("a TPU", ("tpu",))}


def diagnose(run_dir: str) -> list[Finding]:
    """Returns the findings of all checks. It waits for the hub up to 4 seconds, and for JAX up to three minutes."""
    installed, backend = installed_here(), backend_here()
    findings = [*check_packages(installed), *check_extras(installed), *check_backend(installed, backend)]
    return [*findings, *check_hub(), *check_places(), *check_run_dir(run_dir)]


class Installed(NamedTuple):
    """Versions of Python and of distributions, and what jrlhf and jax require, as in their metadata."""

    python: str
    requires_python: str
    versions: Mapping[str, str]
    requirements: Mapping[str, Sequence[str]]


def installed_here() -> Installed:
    """Returns what this process would import."""
    distributions = importlib.metadata.distributions()
    versions: dict[str, str] = {canonicalize_name(one.name): one.version for one in distributions if one.name}
    names = [name for name in ("jrlhf", "jax") if name in versions]
    requirements = {name: tuple(importlib.metadata.requires(name) or ()) for name in names}
    requires_python = importlib.metadata.metadata("jrlhf")["Requires-Python"] if "jrlhf" in names else ""
    return Installed(platform.python_version(), requires_python, versions, requirements)


def check_packages(installed: Installed) -> Iterator[Finding]:
    """Checks that Python and the requirements of jrlhf and jax are installed and compatible."""
    if "jrlhf" not in installed.requirements:
        remedy = "pip install -e . in the checkout"
        yield Finding("packages", "note", "jrlhf is not installed, so that its requirements are not known", remedy)
        return
    missing, unfit = _compare(installed, "")
    if not SpecifierSet(installed.requires_python).contains(installed.python, prereleases=True):
        unfit.append(f"Python {installed.python} does not fit jrlhf, which needs {installed.requires_python}")
    for text in (*(f"{name} is missing" for name in missing), *unfit):
        yield Finding("packages", "problem", text, "pip install --upgrade jrlhf")
    if not missing and not unfit:
        jax = ", ".join(f"{name} {installed.versions.get(name, '?')}" for name in ("jax", "jaxlib", "flax"))
        yield Finding("packages", "ok", f"Python {installed.python}, {jax}, and all that jrlhf requires")


def check_extras(installed: Installed) -> Iterator[Finding]:
    """Yields the installed extras, and those whose packages are incompatible, such as a plugin for JAX."""
    for extra in sorted(_extras_of_jrlhf(installed) - {*_FOR_WORK_ON_JRLHF}):
        missing, unfit = _compare(installed, extra)
        for text in unfit:
            yield Finding(f"extra {extra}", "problem", text, f"pip install --upgrade 'jrlhf[{extra}]'")
        accelerates = any(extra in extras for _, extras in _ACCELERATORS.values())
        if missing and not accelerates:  # without an accelerator these are not missed
            text = f"not installed: {', '.join(missing)}"
            yield Finding(f"extra {extra}", "note", text, f"if you need it, pip install 'jrlhf[{extra}]'")
        if not missing and not unfit:
            yield Finding(f"extra {extra}", "ok", "installed")


def _extras(requirement: Requirement) -> set[str]:
    """Returns the extra of a requirement, as a set; empty for a requirement without an extra."""
    return set(re.findall(r'extra == "([^"]+)"', str(requirement.marker or "")))


def _extras_of_jrlhf(installed: Installed) -> set[str]:
    return {extra for line in installed.requirements.get("jrlhf", ()) for extra in _extras(Requirement(line))}


def _compare(installed: Installed, extra: str, package: str = "jrlhf") -> tuple[list[str], list[str]]:
    """Returns the missing requirements of a package, and sentences about requirements with another version.

    extra: its additional requirements only; "": those of no extra. Extras that are not installed give no sentences.
    """
    missing, unfit = [], []
    for requirement in map(Requirement, installed.requirements.get(package, ())):
        marker, version = requirement.marker, installed.versions.get(canonicalize_name(requirement.name))
        if bool(extra) != bool(_extras(requirement)) or (marker and not marker.evaluate({"extra": extra})):
            continue
        if version is None:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            owner = f"{package} {installed.versions[package]}"
            unfit.append(f"{requirement.name} {version} does not fit {owner}, which needs {requirement.specifier}")
        for inner in requirement.extras or ([""] if requirement.name == "jax" else []):
            more = _compare(installed, inner, requirement.name)
            missing, unfit = missing + more[0], unfit + more[1]
    return missing, ([] if extra and missing else unfit)


def backend_here() -> dict[str, Any]:
    """Runs `probe` in another process and returns what it printed."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from jrlhf.doctor.checks import probe; probe()"]
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
    facts: dict[str, Any] = {}
    try:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jrlhf.kernels.logprob.api import token_logprobs
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
        hidden, head = random.normal(size=(8, 16)), random.normal(size=(50, 16)) / 4
        targets = random.integers(50, size=8)
        logits = hidden @ head.T
        right = logits[np.arange(8), targets] - np.log(np.exp(logits).sum(-1))
        arrays = jnp.float32(hidden), jnp.float32(head), jnp.int32(targets)
        logprobs, _ = jax.jit(token_logprobs)(*arrays)
        facts["seconds"] = time.perf_counter() - start
        facts["logprob_error"] = float(np.abs(np.asarray(logprobs) - right).max())
    except Exception as error:  # a driver or a package may raise anything
        facts["error"] = one_line(error, kind=True)
    print(json.dumps(facts))


def check_backend(installed: Installed, backend: Mapping[str, Any]) -> Iterator[Finding]:
    """Checks that JAX has the devices of this machine, and that programs on them give right results.

    backend: the output of `probe`.
    """
    yield from _check_accelerator(installed, backend)
    devices, reason = backend.get("devices"), backend.get("error", "it ended")
    if not devices:
        named = " and ".join(
            f"{name}={os.environ[name]}" for name in ("JAX_PLATFORMS", "XLA_FLAGS") if os.environ.get(name)
        )
        remedy = "mend the packages named above, free devices that another process holds, or start all hosts of a pod"
        remedy = f"mend or unset {named}; else {remedy}" if named else remedy
        yield Finding("devices", "problem", f"JAX does not start: {reason}", remedy)
        return
    for (kind, memory), count in Counter(map(tuple, devices)).items():
        shared = backend.get("host_memory") if kind == "cpu" else None
        amount = f", {in_units(memory)} each" if memory else f", {in_units(shared)} in all" if shared else ""
        yield Finding("devices", "ok", f"{count} x {kind}{amount}")
    error = backend.get("logprob_error")
    if error is None:
        yield Finding("programs", "problem", f"a program does not run: {reason}", "update the driver and the packages")
    elif not error <= TOLERANCE:
        remedy = "set compute.logprob=reference and report it"
        yield Finding("programs", "problem", f"the log-probs are off by {error:.2g} nats", remedy)
    else:
        seconds = backend["seconds"]
        yield Finding("programs", "ok", f"compiled and run in {seconds:.1f} s; the log-probs are right to {error:.0e}")


def _check_accelerator(installed: Installed, backend: Mapping[str, Any]) -> Iterator[Finding]:
    """Checks that JAX runs on the machine's accelerator, if it has one."""
    present, running, asked = backend.get("accelerator"), backend.get("platform"), os.environ.get("JAX_PLATFORMS")
    if present is None or running is None:
        return
    name, extras = _ACCELERATORS[present]
    if running != "cpu":
        yield Finding("accelerator", "ok", f"JAX runs on the {running}")
        return
    if asked:
        remedy = "unset JAX_PLATFORMS"
    elif any(extra in _extras_of_jrlhf(installed) and not _compare(installed, extra)[0] for extra in extras):
        remedy = "see the findings on packages, and whether the driver works (nvidia-smi) and is new enough"
    else:
        remedy = " or ".join(f"pip install 'jrlhf[{extra}]'" for extra in extras)
    because = f" because JAX_PLATFORMS={asked}" if asked else ""
    yield Finding("accelerator", "problem", f"{name} is present but IDLE: JAX runs on the CPU{because}", remedy)
