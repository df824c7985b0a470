"""The object store that the tests of this folder share."""

from typing import Any

import fsspec
import pytest


@pytest.fixture
def memory() -> Any:
    """The store in memory, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
