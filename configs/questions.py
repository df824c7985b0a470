"""Questions with one right answer, for the configs smollm2-grpo and smollm2-ppo, and the reward of the first.

    python -m jrlhf.configs.questions [DIRECTORY]

writes two tasks, each as rows to learn from and held-out rows: `kinds-train.jsonl` and `kinds-heldout.jsonl` ("Which of
these is a fruit: hammer, cherry or wolf?"), `largest-train.jsonl` and `largest-heldout.jsonl` ("Which is the largest:
34, 71 or 52?"). No training row offers what a held-out row offers, in any order. The files are the same everywhere.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

TRAIN, HELDOUT = 1000, 1024  # rows
Row = dict[str, Any]
Offer = tuple[str, str, str]  # sorted

KINDS = {
    "an animal": ("cow", "duck", "eagle", "goat", "horse", "lion", "monkey", "rabbit", "shark", "tiger", "wolf"),
    "a color": ("black", "blue", "gray", "green", "pink", "purple", "red", "white", "yellow"),
    "a country": ("Brazil", "Canada", "China", "Egypt", "France", "India", "Italy", "Japan", "Mexico", "Spain"),
    "a drink": ("beer", "coffee", "juice", "lemonade", "milk", "tea", "water", "wine"),
    "a fruit": ("apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "pear", "plum"),
    "a metal": ("aluminum", "brass", "iron", "lead", "nickel", "steel", "tin", "zinc"),
    "a piece of clothing": ("coat", "dress", "glove", "hat", "jacket", "scarf", "shirt", "sock"),
    "a piece of furniture": ("bed", "bench", "chair", "desk", "shelf", "sofa", "stool", "table"),
    "a tool": ("axe", "chisel", "drill", "hammer", "pliers", "rake", "saw", "shovel", "wrench"),
    "a vehicle": ("bicycle", "boat", "bus", "car", "ship", "taxi", "train", "tram", "truck"),
}
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}


def of_three_kinds(draw: random.Random) -> Offer:
    return _sorted(draw.choice(KINDS[kind]) for kind in draw.sample(sorted(KINDS), 3))


def kind(draw: random.Random, offer: Offer) -> Row:
    first, second, third = offered = draw.sample(offer, 3)
    answer = draw.choice(offer)
    return {
        "prompt": f"Which of these is {KIND_OF[answer]}: {first}, {second} or {third}?",
        "answer": answer,
        "offered": offered,
    }


def three_numbers(draw: random.Random) -> Offer:
    return _sorted(map(str, draw.sample(range(10, 100), 3)))


def largest(draw: random.Random, offer: Offer) -> Row:
    first, second, third = draw.sample(offer, 3)
    return {"prompt": f"Which is the largest: {first}, {second} or {third}?", "answer": max(offer)}


def _sorted(words: Iterable[str]) -> Offer:
    first, second, third = sorted(words)
    return first, second, third


TASKS: dict[str, tuple[Callable[[random.Random], Offer], Callable[[random.Random, Offer], Row]]] = {
    "kinds": (of_three_kinds, kind),
    "largest": (three_numbers, largest),
}


def rows(task: str) -> tuple[list[Row], list[Row]]:
    """Returns the rows to learn from and the held-out rows, of different prompts."""
    draw, (offer_of, row_of) = random.Random(task), TASKS[task]
    kept = sorted({offer_of(draw) for _ in range(HELDOUT)})

    def different(count: int, offers: Callable[[], Offer]) -> list[Row]:
        drawn: dict[str, Row] = {}
        while len(drawn) < count:
            row = row_of(draw, offers())
            drawn.setdefault(row["prompt"], row)
        return list(drawn.values())

    def other() -> Offer:
        while (offer := offer_of(draw)) in kept:
            pass
        return offer

    return different(TRAIN, other), different(HELDOUT, lambda: draw.choice(kept))


def named(completions: Sequence[Any], answer: Sequence[str], offered: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """Scores each completion: 1 if it names the answer and none of the other words that were offered, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    words = [set(re.findall("[a-z]+", text.lower())) for text in texts]
    offers = [{word.lower() for word in three} for three in offered]
    return [float(own & offer == {right.lower()}) for own, offer, right in zip(words, offers, answer, strict=True)]


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
    write(parser.parse_args(arguments).directory)


if __name__ == "__main__":
    main()
