"""Responses, as they are read from a rollout that is on the host."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from jrlhf.sampling import Response, read_responses


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
