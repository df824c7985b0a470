"""Responses, as they are read from a rollout that is on the host."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jrlhf.data.batches import read_responses
from jrlhf.data.types import Response
from jrlhf.meshes import make_mesh
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.roles.model import Compute
from jrlhf.roles.sampling import Sampler


def test_no_more_responses_are_decoded_than_are_asked_for():
    decoded = []

    def continuation(before: np.ndarray, ids: tuple[int, ...]) -> str:
        decoded.append((*before, *ids))
        return str(sum(ids))

    tokenizer: Any = SimpleNamespace(continuation=continuation, marks=frozenset(), stop=None)
    rollout = SimpleNamespace(
        tokens=np.arange(12).reshape(3, 4),
        prompt_lengths=np.array([1, 2, 1]),
        response_lengths=np.array([2, 2, 3]),
        finished=np.array([True, False, True]),
    )
    expected = [Response((1, 2), "3", True), Response((6, 7), "13", False), Response((9, 10, 11), "30", True)]
    assert read_responses(tokenizer, rollout, slice(2)) == expected[:2]
    assert decoded == [(0, 1, 2), (4, 5, 6, 7)]
    assert read_responses(tokenizer, rollout) == expected


ONE = Schedule(chunk=256, buckets=1, lengths=1, prefill=4)
SCHEDULES = [  # of rollouts, samples, greedy, what is used
    (Schedule(), 1, False, Schedule()),  # the rollouts' programs serve
    (Schedule(), 8, False, ONE),
    (Schedule(), 1, True, ONE),
    (Schedule(prefill=2), 8, False, Schedule(chunk=256, buckets=1, lengths=1, prefill=2)),
    (Schedule(prefill=99), 8, False, Schedule(chunk=256, buckets=1, lengths=1, prefill=32)),  # all of a group
    (Schedule(chunk=256), 8, False, Schedule(chunk=256)),  # one program already
    (Schedule(slots=64), 8, False, Schedule(slots=64)),  # others have no room
]


def test_few_programs_are_compiled_for_responses_outside_of_rollouts():
    rollouts, tokenizer, mesh = SamplingConfig(256), cast(Any, None), make_mesh(2, 2, 2)
    for planned, samples, greedy, expected in SCHEDULES:
        settings = {"batch": 128, "samples": samples, "max_prompt": 512, "deadline": 60.0}
        sampler = Sampler(mesh, Compute(), tokenizer, rollouts, planned, **settings)
        assert sampler.schedule_for(SamplingConfig(256, temperature=0.0) if greedy else rollouts) == expected
