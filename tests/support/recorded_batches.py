"""`jrlhf.train` that appends each batch of an asynchronous run to the file BATCHES, before anything learns from it."""

import os
import sys
from pathlib import Path

import numpy as np

from jrlhf.fleet.fleet import Fleet
from jrlhf.fleet.state import Collected, Drawn
from jrlhf.run.files import append_jsonl, read_jsonl
from jrlhf.train import cli

collect = Fleet.collect


def recorded(self: Fleet) -> Collected:
    batch = collect(self)
    rows = {name: array.tolist() for name, array in batch.rows._asdict().items()}
    append_jsonl(
        Path(os.environ["BATCHES"]), [{"numbers": batch.numbers.tolist(), "rows": rows, "version": batch.version}]
    )
    return batch


def read(path: Path) -> list[Collected]:
    """Returns the batches of a file."""
    return [
        Collected(np.array(line["numbers"]), Drawn(*map(np.array, line["rows"].values())), line["version"])
        for line in read_jsonl(path)
    ]


if __name__ == "__main__":
    Fleet.collect = recorded
    sys.exit(cli())
