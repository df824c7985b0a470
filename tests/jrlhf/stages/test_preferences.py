"""The random numbers with which preference pairs are sampled, in new runs and in those of older versions."""

import zlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jrlhf.run.directory import SEEDS, RunDirectory
from jrlhf.stages.preferences import _PolicySampler


def test_a_run_without_a_version_of_its_seeds_keeps_the_old_ones(tmp_path):
    (tmp_path / "checkpoints" / "sft" / "20").mkdir(parents=True)
    context, purpose = cast(Any, SimpleNamespace(config=SimpleNamespace(seed=7))), "heldout preferences"
    for version, number in ((1, len(purpose)), (2, zlib.crc32(purpose.encode()))):
        if version == 2:
            (tmp_path / SEEDS).write_text("2\n")
        sampler = _PolicySampler(context, cast(Any, None), RunDirectory(tmp_path).seeds())
        expected = np.random.default_rng((7, number)).random(4)
        assert sampler.seeds == version and sampler.rng(purpose).random(4).tolist() == expected.tolist()
