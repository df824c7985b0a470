"""Reward functions written to files, samples, and a check of what is left when a test is over."""

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jrlhf.config.places import PREFIX
from jrlhf.config.schema import RewardConfig
from jrlhf.data.types import Example, Response
from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.types import Sample
from jrlhf.run.child import Worker
from tests.support.processes import alive, children


def make_reward(spec: str, name: str = "judge", seed: int = 0, log: Path | None = None, **settings) -> FunctionReward:
    own: dict[str, Any] = {key: settings.pop(key) for key in ("kind", "steps", "epochs") if key in settings}
    return FunctionReward(RewardConfig(name=name, function=spec, **settings), seed, log, **own)


def make_sample(row: int = 0, response: str | None = None, tokens: int = 3, **columns) -> Sample:
    text = f"response {row}" if response is None else response
    ids = tuple(range(10 * row, 10 * row + tokens))
    example = Example(prompt=f"prompt {row}", source="here", columns=columns)
    return Sample(example, f"<user>prompt {row}", Response(ids, text, True))


def pids(reward: FunctionReward) -> list[int]:
    """The process numbers of the workers, in their order."""
    return [worker.pid for _, worker in sorted(reward._pool.items()) if isinstance(worker, Worker)]


def open_files() -> set[str]:
    descriptors = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in descriptors}


@pytest.fixture
def start(tmp_path):
    """start(source, ...) -> a started FunctionReward of f in `source`, or of a spec. Nothing of it may be left after.

    Every process is gone, waited for, and every file descriptor closed, whatever the function did.
    """
    before, kin, started = open_files(), children(os.getpid()), []

    def begin(source: str, **arguments) -> FunctionReward:
        file = tmp_path / f"function{len(started)}.py"
        if not source.startswith(PREFIX):
            file.write_text(textwrap.dedent(source))
        arguments.setdefault("log", tmp_path / "log")
        arguments.setdefault("deadline", 20.0)
        reward = make_reward(source if source.startswith(PREFIX) else f"{file}:f", **arguments)
        started.append(reward)
        return reward.__enter__()

    yield begin
    running = [pid for reward in started for pid in pids(reward)]
    for reward in started:
        reward.close()
    assert not [pid for pid in running if alive(pid)]
    assert not set(children(os.getpid())) - set(kin)
    assert not {name for name in open_files() - before if "pipe" in name or "socket" in name or str(tmp_path) in name}
