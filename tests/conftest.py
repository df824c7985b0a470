"""Every test runs on 8 simulated devices: sharding is tested on any machine, never skipped."""

import os
import re
from collections.abc import Callable

import jax
import pytest

from jrlhf.run.devices import spare_threads

os.environ.setdefault("NPROC", "32")
spare_threads(8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Without the slow proofs the suite compiles without LLVM's optimiser, in which tiny programs spend more time than
    they gain. The slow proofs are compiled as users' programs are."""
    if config.option.markexpr == "not slow":
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


@pytest.fixture(scope="session")
def scopes() -> Callable[..., set[str]]:
    """Of a jitted function and its arguments: all names on the paths of its operations, as a trace shows them."""

    def find(function, *arguments) -> set[str]:
        text = function.lower(*arguments).as_text(debug_info=True)
        return {name for path in re.findall(r'loc\("([^".]+/[^".]+)"', text) for name in re.findall(r"\w+", path)}

    return find
