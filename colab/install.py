"""Installs jrlhf from this checkout into the Python of a running notebook, as the notebooks' first cell does.

JAX and its accelerator plugin stay as they are where jrlhf runs with them. Else both are replaced by the versions of
constraints.txt, and where the notebook has already loaded what was replaced, a restart is asked for.
"""

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLUGINS = {  # extra -> the packages that it brings
    "cuda12": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "cuda13": ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "tpu": ("libtpu",),
}
RESTART = "Installed. Restart the session now, once (Runtime > Restart session), then run all cells again."


class RestartNeeded(RuntimeError):
    """Ends `Run all`: the notebook runs code of versions that are no longer installed."""


def versions() -> dict[str, str]:
    """Returns the version of each installed package; names are `plain`."""
    return {plain(dist.name): dist.version for dist in distributions()}


def plain(name: str) -> str:
    """Returns a package's name in lower case, with hyphens."""
    return name.lower().replace("_", "-")


def extra_for(present: Mapping[str, str], gpu: bool, tpu: bool) -> str:
    """Returns the extra of jrlhf with JAX's plugin for the accelerator, of the CUDA that is there; without one, ""."""
    if gpu:
        return "cuda13" if "jax-cuda13-plugin" in present else "cuda12"
    return "tpu" if tpu else ""


def kept_versions(present: Mapping[str, str]) -> str:
    """Returns constraints with which pip leaves JAX and its plugins as they are."""
    names = ("jax", "jaxlib", *(name for plugin in PLUGINS.values() for name in plugin))
    return "".join(f"{name}=={present[name]}\n" for name in names if name in present)


def pip(*arguments: str) -> str:
    """Runs pip; returns the end of what it complains of, and "" where all went well."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr[-2000:] or f"pip ended with {done.returncode}"


def install() -> None:
    """Installs jrlhf.

    Raises:
        RestartNeeded: a package that this Python has loaded was replaced.
        RuntimeError: pip could not install it.
    """
    print("Installing jrlhf: a minute or two ...", flush=True)
    before = versions()
    owners = packages_distributions()
    loaded = {plain(name) for module in list(sys.modules) for name in owners.get(module.partition(".")[0], ())}
    gpu = shutil.which("nvidia-smi") is not None
    tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    extra = extra_for(before, gpu, tpu)
    source = f"{HERE.parent}[{extra}]" if extra else str(HERE.parent)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(kept_versions(before))
        constraints.flush()
        refused = "jax" not in before or pip("install", "-q", "-c", constraints.name, source)
    if refused:
        if error := pip("install", "-q", "-c", str(HERE / "constraints.txt"), source):
            raise RuntimeError(f"jrlhf could not be installed:\n{error}")
        if stale := [name for plugin, names in PLUGINS.items() if plugin != extra for name in names if name in before]:
            pip("uninstall", "-q", "-y", *stale)  # they do not fit the new JAX
    importlib.invalidate_caches()
    after = versions()
    origin = "there" if not refused else "replaced" if "jax" in before else "installed"
    print(f"jrlhf {after['jrlhf']} with jax {after['jax']}, which was {origin}")
    if replaced := sorted(name for name in loaded if before.get(name) != after.get(name)):
        raise RestartNeeded(f"{RESTART} Replaced while in use: {', '.join(replaced)}.")


if __name__ == "__main__":
    install()
