"""The time of a batch of responses that a language model judges, and how much of it decoding hides.

    python -m benchmarks.judge

writes `results/judge.json`; five minutes. The endpoint is a server on this machine that sleeps for two seconds before
each answer, so the figures say what the client adds: `ideal` is the number of requests divided by those in flight,
times the two seconds. `stored` is the same batch again, from the file of answers.

`iterations` are those of runs whose decode steps and updates take the time of sleeps, as in `benchmarks.overlap`:
`seconds` of an iteration with the judge, and `without`, where it answers at once. `hidden` is the share of its two
seconds by which the iteration is not longer.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.overlap import STEP, seconds_of_a_step
from benchmarks.records import hardware, output_path, provenance, write
from jrlhf.config.schema import ClientConfig, RewardConfig
from jrlhf.data.types import Example, Response
from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.judge import parse_score, rubric
from jrlhf.rewards.types import Sample
from tests.support.judges import serving

ANSWER = 2.0  # seconds of an answer
REQUESTS, CONCURRENT = 256, 64  # of a batch; in flight


async def judge(solution_str, client):
    """The reward function."""
    return parse_score(await client.chat(rubric("What is 2 + 2?", solution_str, "It is right.")))


def seconds(workers: int, url: str, directory: str) -> tuple[float, float]:
    """Returns the seconds of a batch, and those of the same batch from the file of answers."""
    client = ClientConfig(url=url, concurrent=CONCURRENT)
    config = RewardConfig(function="benchmarks.judge:judge", workers=workers, client=client)
    samples = [Sample(Example(f"{row}"), f"{row}", Response((row,), f"{row}", True)) for row in range(REQUESTS)]
    times = []
    for _ in range(2):
        with FunctionReward(config, log=Path(directory) / f"reward-{workers}.log") as reward:
            begin = time.monotonic()
            scored = reward.score(samples)
            times.append(time.monotonic() - begin)
            assert not scored.failures and set(scored.scores) == {7.0}
    return times[0], times[1]


def of_an_iteration(staleness: int, answer: float, directory: str) -> float:
    """Returns the seconds of an iteration with a judge that takes `answer` seconds."""
    with serving(seconds=answer) as endpoint:
        client = {"url": endpoint.url, "concurrent": CONCURRENT}
        reward = {"name": f"judge-{answer:g}", "function": "benchmarks.judge:judge", "workers": 4, "client": client}
        steps = f"grpo.asynchronous.reward_steps={round(ANSWER / STEP)}"
        return statistics.fmean(seconds_of_a_step(staleness, directory, reward, steps))


def main() -> None:
    output, rows, ideal = output_path(__doc__, "judge"), [], REQUESTS / CONCURRENT * ANSWER
    with tempfile.TemporaryDirectory() as directory, serving(seconds=ANSWER) as endpoint:
        for workers in (1, 4):
            endpoint.most = 0
            taken, stored = seconds(workers, endpoint.url, directory)
            row = {"workers": workers, "seconds": taken, "ideal": ideal, "share": ideal / taken, "stored": stored}
            rows.append({**row, "most_in_flight": endpoint.most})
            print(rows[-1], flush=True)
        iterations = []
        for staleness in (0, 1):
            taken, without = (of_an_iteration(staleness, answer, directory) for answer in (ANSWER, 0.0))
            row = {"staleness": staleness, "seconds": taken, "without": without}
            iterations.append({**row, "hidden": 1 - (taken - without) / ANSWER})
            print(iterations[-1], flush=True)
    sizes = {"answer": ANSWER, "requests": REQUESTS, "concurrent": CONCURRENT}
    record = {**provenance("httpx2"), "hardware": hardware(jax.devices()[0]), "sizes": sizes}
    write(output, {**record, "runs": rows, "iterations": iterations})


if __name__ == "__main__":
    main()
