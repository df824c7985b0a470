"""How many weights an update changes in the dtype that rollouts compute with, and what it takes to send the changes.

    python -m benchmarks.deltas

writes `results/deltas.json`. The largest matrix of a layer of Qwen3-1.7B, 2048 x 6144, normally distributed, stands for
all matrices of the model, and the norm of a layer for all norms. AdamW moves both in float32, with gradients of noise.
For some updates: the share of the weights that changed in bfloat16, the same by the formula, the bytes of what
`jrlhf.rollouts.processes.shared.delta` returns over those of all weights of the model, and its seconds for the matrix.

formula: a weight w of bfloat16 changes with the probability min(1, |dw| / ulp(w)), where ulp(w) = 2**(floor(log2 |w|)
- 7), since its float32 original may be anywhere between two numbers of bfloat16.
"""

import time
from math import prod

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from benchmarks.records import RESULTS, hardware, provenance, write
from jrlhf.models.hf.presets import PRESETS
from jrlhf.models.weights import weights
from jrlhf.rollouts.processes.shared import delta, patched

MODEL, RATE, BETAS, SIGMAS = "Qwen/Qwen3-1.7B", 1e-6, (0.9, 0.95), (0.02, 0.05)
UPDATES = 1, 2, 3, 6, 12, 20


class Weights:
    """Weights in float32 and their moments. `update` is one of Adam, with a gradient of noise."""

    def __init__(self, start: Float32[np.ndarray, "..."], rng: np.random.Generator):
        self.values, self._rng, self._count = start, rng, 0
        self._mean, self._square = np.zeros_like(start), np.zeros_like(start)

    def update(self) -> None:
        self._count += 1
        gradient = self._rng.standard_normal(self.values.shape, np.float32)
        for moment, power, beta in ((self._mean, gradient, BETAS[0]), (self._square, gradient**2, BETAS[1])):
            moment *= beta
            moment += (1 - beta) * power
        mean, square = (
            moment / np.float32(1 - beta**self._count)
            for moment, beta in zip((self._mean, self._square), BETAS, strict=True)
        )
        self.values = self.values - RATE * mean / (np.sqrt(square) + 1e-8)


def by_formula(old: Float32[np.ndarray, "..."], new: Float32[np.ndarray, "..."]) -> float:
    """The share of weights that change in bfloat16."""
    ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(old), np.finfo(np.float32).tiny))) - 7)
    return float(np.minimum(1, np.abs(new - old) / ulp).mean())


def measured(sigma: float, matrices: int, norms: int) -> list[dict[str, float]]:
    """A row for each of UPDATES. matrices, norms: numbers of the model's weights in either."""
    rng, rows = np.random.default_rng(0), []
    config = PRESETS[MODEL]
    matrix = Weights(sigma * rng.standard_normal((config.embed, config.mlp), np.float32), rng)
    norm = Weights(np.ones(config.embed, np.float32), rng)
    for number in range(1, UPDATES[-1] + 1):
        before = matrix.values, norm.values
        matrix.update()
        norm.update()
        if number not in UPDATES:
            continue
        old, new = before[0].astype(jnp.bfloat16), matrix.values.astype(jnp.bfloat16)
        begin = time.monotonic()
        parts = delta([old], [new])
        between = time.monotonic()
        again = patched([old], parts)[0]
        end = time.monotonic()
        assert np.array_equal(again.view(np.uint16), new.view(np.uint16))
        changes = sum(part.nbytes for part in parts) / new.size * matrices
        changes += sum(part.nbytes for part in delta([before[1]], [norm.values])) / norm.values.size * norms
        row = {
            "update": number,
            "changed": float((old.view(np.uint16) != new.view(np.uint16)).mean()),
            "formula": by_formula(before[0], matrix.values),
            "bytes": changes / (2 * matrices + 4 * norms),
            "seconds": {"delta": between - begin, "patched": end - between},
        }
        print(f"sigma {sigma}: {row}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    sizes = {
        vector: sum(prod(row.shape) for row in weights(PRESETS[MODEL]) if row.vector == vector) for vector in (0, 1)
    }
    results = {str(sigma): measured(sigma, sizes[0], sizes[1]) for sigma in SIGMAS}
    facts = {"hardware": hardware(), "model": MODEL, "learning_rate": RATE}
    record = {**provenance("numpy"), **facts, "betas": BETAS, "matrices": sizes[0], "norms": sizes[1]}
    write(RESULTS / "deltas.json", {**record, "sigmas": results})


if __name__ == "__main__":
    main()
