"""Every test runs on 8 simulated devices: sharding is tested on any machine, never skipped."""

import atexit
import collections
import gc
import importlib.metadata
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jrlhf.meshes import simulate_devices
from jrlhf.run import directory

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Each test process compiles a program once. JAX does not lock such a directory, so processes do not share one.
PROGRAMS = tempfile.mkdtemp()
atexit.register(shutil.rmtree, PROGRAMS, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", PROGRAMS)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Outside of the next line's directory: matplotlib takes seconds to build its font cache, and logs a warning after five.
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script started pytest with `&`; tests send this signal
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def packages() -> list[Any]:
    """Returns the installed packages. Every run lists them, and reading their files takes 0.3 seconds."""
    return [SimpleNamespace(name=one.name, version=one.version) for one in importlib.metadata.distributions()]


directory.importlib = SimpleNamespace(metadata=SimpleNamespace(distributions=packages))  # type: ignore[assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", metavar="NAME", help="run only the tests of this part of .ci/full")


def pytest_configure(config: pytest.Config) -> None:
    """The default suite compiles without LLVM's optimiser, which costs more time than it saves in tiny programs.

    Tests marked `full` and the parts of .ci/full are compiled as users' programs are.
    """
    if config.option.markexpr == "not full" and config.option.proof is None:
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ['XLA_FLAGS']}"


def pytest_collection_finish() -> None:
    """Leaves what the imports have made out of all later collections of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `proof(name)` run with `--proof name` only, and then alone."""
    selected, deselected = [], []
    for item in items:
        mark = item.get_closest_marker("proof")
        part = None if mark is None else mark.args[0]
        (selected if part == config.option.proof else deselected).append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=deselected)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the ten slowest files where a whole suite runs unattended."""
    if not os.environ.get("CI"):
        return
    seconds = collections.defaultdict[str, float](float)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("slowest files")
    for file, spent in sorted(seconds.items(), key=lambda item: -item[1])[:10]:
        terminalreporter.write_line(f"{spent:6.1f} s  {file}")


@pytest.fixture(scope="session")
def scopes() -> Callable[..., set[str]]:
    """A function: jitted function, its arguments -> all names on the paths of its operations, as a trace shows them."""

    def find(function, *arguments) -> set[str]:
        text = function.lower(*arguments).as_text(debug_info=True)
        return {name for path in re.findall(r'loc\("([^".]+/[^".]+)"', text) for name in re.findall(r"\w+", path)}

    return find


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Programs are optimised little: most run shorter than they compile."""
    usual = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", usual)
