"""Programs of the benchmarks' tests run shorter than they compile: they are optimised little."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(quick_compilation) -> None:
    pass
