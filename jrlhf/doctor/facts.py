"""Facts of this machine, such as versions, devices and free space.

JAX starts in a process of its own: a driver that hangs, or packages that do not fit each other, are findings as well.
"""

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
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from jrlhf.errors import UserError

START_SECONDS, HUB_SECONDS, STORE_SECONDS = 180, 4, 10  # deadlines


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
    command = [sys.executable, "-c", "from jrlhf.doctor.facts import probe; probe()"]
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
    if re.match(r"\w+:/", run_dir):  # also an address that lost a slash
        return {"run_dir": run_dir, "run_dir_error": _store_error(run_dir)}
    path = Path(os.path.expanduser(run_dir)).absolute()
    place = _existing(path)
    return {"run_dir": str(path), "run_dir_error": _write_error(place), "free": shutil.disk_usage(place).free}


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _write_error(place: Path) -> str | None:
    """Returns why no file can be written in a directory, which must be there.

    It is not `run.files.write_error`, as that needs NumPy, which may be what is broken.
    """
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
        store.contact()
        store.try_out()
    except StoreError as error:
        return f"{error}: {error.remedy}" if error.remedy else str(error)
    except UserError as error:
        return str(error)
    return None
