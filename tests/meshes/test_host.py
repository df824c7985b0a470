"""Arrays on their way to the host."""

import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import gathered, make_mesh


@pytest.fixture
def impatient():
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_what_is_gathered_may_be_fetched_by_several_threads_at_once(impatient):
    mesh = make_mesh(8, 1, 1)
    given = jax.device_put(np.arange(64.0, dtype=np.float32), NamedSharding(mesh, P("data")))
    make = jax.jit(lambda x: [x + number for number in range(8)])
    with ThreadPoolExecutor(3) as threads:
        for _ in range(40):
            whole = gathered(make(given))
            for fetched in [threads.submit(jax.device_get, whole) for _ in range(3)]:
                for number, array in enumerate(fetched.result(10)):
                    np.testing.assert_array_equal(array, np.arange(64) + number)
