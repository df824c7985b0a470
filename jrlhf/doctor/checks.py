"""Facts of a machine -> findings, each with its remedy."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from jrlhf.doctor.facts import Facts

GIB = 2**30
LEAST_FREE, FEW_FREE = 1 * GIB, 20 * GIB  # bytes for runs: below the first a problem, below the second a note
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
