"""The random numbers with which preference pairs are sampled."""

import zlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jrlhf.stages.preferences import _PolicySampler


def test_random_numbers_depend_on_the_seed_and_the_purpose_alone():
    context, draws = cast(Any, SimpleNamespace(config=SimpleNamespace(seed=7))), []
    for purpose in ("preferences", "heldout preferences"):
        expected = np.random.default_rng((7, zlib.crc32(purpose.encode()))).random(4).tolist()
        draws.append(_PolicySampler(context, cast(Any, None)).rng(purpose).random(4).tolist())
        assert draws[-1] == expected
    assert draws[0] != draws[1]
