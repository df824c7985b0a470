"""Whether two systems end alike: two one-sided t tests of the paired differences over seeds (Schuirmann 1987)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import t

MARGIN = 0.02  # of accuracy
CONFIDENCE = 0.9  # of the interval: each one-sided test has level 0.05

Verdict = Literal["equivalent", "different", "undecided"]


@dataclass(frozen=True)
class Paired:
    """The mean of paired differences, its standard error, and the bounds of its interval."""

    mean: float
    standard_error: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Says "equivalent": the interval is inside the margin. "different": it is not, and has no 0 in it."""
        if -MARGIN < self.low and self.high < MARGIN:
            return "equivalent"
        return "different" if self.low > 0 or self.high < 0 else "undecided"


def paired(theirs: Sequence[float], ours: Sequence[float]) -> Paired:
    """Compares theirs less ours, seed by seed, with 0; needs two seeds."""
    differences = np.subtract(theirs, ours)
    mean, error = float(differences.mean()), standard_error(differences)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * error
    return Paired(mean, error, mean - reach, mean + reach)


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
