"""Questions whose answer is one number, for the configs smollm2-grpo and smollm2-ppo.

    python -m jrlhf.configs.questions [DIRECTORY]

writes two tasks, each as rows to learn from and held-out rows: `smallest-train.jsonl` and `smallest-heldout.jsonl`
("Which is the smallest: 34, 71 or 52?"), `largest-train.jsonl` and `largest-heldout.jsonl`. No training row has the
three numbers of a held-out row, in any order. The files are the same on every machine.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

TRAIN, HELDOUT = 1000, 1024  # rows
TASKS: dict[str, Callable[[Sequence[str]], str]] = {"smallest": min, "largest": max}
Row = dict[str, str]
Numbers = tuple[str, ...]  # three different ones of two digits, sorted


def rows(task: str) -> tuple[list[Row], list[Row]]:
    """Returns the rows to learn from and the held-out rows, of different prompts."""
    draw = random.Random(task)

    def three() -> Numbers:
        return tuple(sorted(map(str, draw.sample(range(10, 100), 3))))

    heldout = {three() for _ in range(HELDOUT)}
    in_order = sorted(heldout)

    def other() -> Numbers:
        while (numbers := three()) in heldout:
            pass
        return numbers

    def different(count: int, numbers_of: Callable[[], Numbers]) -> list[Row]:
        drawn: dict[str, Row] = {}
        while len(drawn) < count:
            numbers = numbers_of()
            first, second, third = draw.sample(numbers, 3)
            prompt = f"Which is the {task}: {first}, {second} or {third}?"
            drawn.setdefault(prompt, {"prompt": prompt, "answer": TASKS[task](numbers)})
        return list(drawn.values())

    return different(TRAIN, other), different(HELDOUT, lambda: draw.choice(in_order))


def write(directory: Path) -> None:
    """Writes the files of both tasks."""
    directory.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for part, content in zip(("train", "heldout"), rows(task), strict=True):
            path = directory / f"{task}-{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
            print(f"wrote {path}: {len(content)} rows")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("."))
    directory = parser.parse_args(arguments).directory
    try:
        write(directory)
    except OSError as error:
        parser.error(f"{directory}: {error}: choose a directory that can be written to")


if __name__ == "__main__":
    main()
