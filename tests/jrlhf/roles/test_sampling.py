"""Responses, as they are read from a rollout that is on the host."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jrlhf.data.batches import read_responses
from jrlhf.data.types import Response
from jrlhf.meshes import make_mesh
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.roles.model import Compute
from jrlhf.roles.sampling import Sampler


def test_no_more_responses_are_decoded_than_are_asked_for():
    decoded = []

    def decode(ids: tuple[int, ...]) -> str:
        decoded.append(ids)
        return str(sum(ids))

    tokenizer: Any = SimpleNamespace(decode=decode)
    rollout = SimpleNamespace(
        tokens=np.arange(12).reshape(3, 4),
        prompt_lengths=np.array([1, 2, 1]),
        response_lengths=np.array([2, 2, 3]),
        finished=np.array([True, False, True]),
    )
    expected = [Response((1, 2), "3", True), Response((6, 7), "13", False), Response((9, 10, 11), "30", True)]
    assert read_responses(tokenizer, rollout, 2) == expected[:2]
    assert decoded == [(1, 2), (6, 7)]
    assert read_responses(tokenizer, rollout) == expected


@pytest.mark.parametrize(
    ("planned", "samples", "greedy", "expected"),
    [
        (Schedule(), 1, False, Schedule()),  # the rollouts' programs serve
        (Schedule(), 8, False, Schedule(chunk=256, buckets=1, lengths=1, prefill=4)),
        (Schedule(), 1, True, Schedule(chunk=256, buckets=1, lengths=1, prefill=4)),
        (Schedule(prefill=2), 8, False, Schedule(chunk=256, buckets=1, lengths=1, prefill=2)),
        (Schedule(prefill=99), 8, False, Schedule(chunk=256, buckets=1, lengths=1, prefill=32)),  # all of a group
        (Schedule(chunk=256), 8, False, Schedule(chunk=256)),  # one program already
        (Schedule(slots=64), 8, False, Schedule(slots=64)),  # others have no room
    ],
)
def test_few_programs_are_compiled_for_what_is_sampled_beside_rollouts(planned, samples, greedy, expected):
    rollouts = SamplingConfig(256)
    tokenizer: Any = None
    sampler = Sampler(
        make_mesh(2, 2, 2), Compute(), tokenizer, rollouts, planned, batch=128, samples=samples, max_prompt=512
    )
    assert sampler.schedule_for(SamplingConfig(256, temperature=0.0) if greedy else rollouts) == expected
