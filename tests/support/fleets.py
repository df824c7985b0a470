"""Fleets whose workers only stand for some that draw."""

from types import SimpleNamespace
from typing import Any

# Stands for a `Recompute` of a run that compares nothing: their tokens have no log-probabilities.
NO_RECOMPUTE: Any = SimpleNamespace(compares=False, fresh=lambda: None)
