"""Programs of the benchmarks' tests run shorter than they compile: they are optimised little."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_programs() -> Iterator[None]:
    usual = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", usual)
