"""What may end a stage early: hooks of the user, and a metric that gets no better.

Both are asked in process 0, after the metrics of a step are logged. A checkpoint holds what was decided so far.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.run.processes import from_main

STOP = "stop"  # what a hook returns to end the stage, and the section that ends it
WATCH = "watch"  # key in a checkpoint's `meta`: `Watch.state`


@dataclass(frozen=True)
class Iteration:
    """An iteration of a stage, or a step of it, that has ended.

    stage, step, steps: the stage's name, this step, from 1, and the last one. metrics: as metrics.jsonl has them.
    samples: texts with their scores, as samples.jsonl has them. path: the run's directory.
    """

    stage: str
    step: int
    steps: int
    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]
    path: Path


Hook = Callable[[Iteration], str | None]  # returns STOP to end the stage; raises UserError if the user's function fails


def hook_names(config: Config) -> list[str]:
    """The settings that name the hooks of a config."""
    return [f"hooks[{number}]={spec}" for number, spec in enumerate(config.hooks)]


@dataclass
class Patience:
    """Follows a metric until it gets no better.

    name: of the metric; with a minus before it small values are good. values: number of values in a row without a
    better one that are too many. threshold: by how much a value must be better. best, missed: the best value so far,
    and the number of values since then.
    """

    name: str
    values: int
    threshold: float = 0.0
    best: float | None = None
    missed: int = 0

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step. A value that is not finite is never better."""
        if (name := self.name.removeprefix("-")) not in metrics:
            return
        value, sign = metrics[name], -1 if self.name.startswith("-") else 1
        better = self.best is None or sign * value > sign * self.best + self.threshold
        if math.isfinite(value) and better:
            self.best, self.missed = value, 0
        else:
            self.missed += 1

    @property
    def ended(self) -> bool:
        return self.missed >= self.values


@dataclass
class Watch:
    """Watches one stage. Mutable; `state` is what a checkpoint holds of it.

    active: False if there is nothing to ask. patience: None without `stop`. ended: the setting that has ended the
    stage, "stop" or a hook's; empty: none has.
    """

    hooks: Sequence[tuple[str, Hook]] = ()
    active: bool = True
    patience: Patience | None = None
    ended: str = ""

    @classmethod
    def of(
        cls, config: Config, hooks: Sequence[tuple[str, Hook]], state: Mapping[str, Any], *, left: bool = False
    ) -> "Watch":
        """The watch that goes on from a checkpoint's `state`; an empty one begins. hooks: empty in other processes.

        A stage that has ended early goes on if the setting that ended it would do so no more, unless it is `left`: a
        later stage has begun with its weights.
        """
        stop, watch = config.stop, cls(hooks, active=bool(config.hooks or config.stop))
        if stop is not None and stop.metric is not None:
            watch.patience = Patience(stop.metric, stop.patience, stop.threshold)
        watch._take(state)
        spec = watch.ended.partition("=")[2]  # of a hook, whose number may be another one now
        if not (left or (watch.impatient if watch.ended == STOP else spec in config.hooks)):
            watch.ended = ""
        return watch

    @property
    def state(self) -> dict[str, Any]:
        own = self.patience
        seen = {} if own is None else {"patience": [own.name, own.best, own.missed]}
        return seen | ({"ended": self.ended} if self.ended else {})

    def _take(self, state: Mapping[str, Any]) -> None:
        """Takes over a state. What it says of another metric than the config's is left out."""
        name, *seen = state.get("patience", [None])
        if self.patience is not None and name == self.patience.name:
            self.patience.best, self.patience.missed = seen
        self.ended = state.get("ended", "")

    @property
    def impatient(self) -> bool:
        """True if `stop` ends the stage."""
        return self.patience is not None and self.patience.ended

    @property
    def reason(self) -> str:
        """Why the stage has ended early, as a clause."""
        if self.ended != STOP or (own := self.patience) is None:
            return f"{self.ended} returned {STOP!r}"
        better = "finite" if own.best is None else f"better than {own.best:.4g}"
        return f"{own.name} was not {better} in {own.missed} values (stop.patience={own.values})"

    def after(self, iteration: Iteration, *, seconds: float) -> str:
        """Asks in process 0 whether the stage ends after an iteration; returns the error of a hook, or "".

        All processes call this, and wait at most so many seconds for process 0.
        """
        if not self.active:
            return ""
        failed, state = from_main(lambda: (self._ask(iteration), self.state), seconds=seconds)
        self._take(state)
        return failed

    def _ask(self, iteration: Iteration) -> str:
        if self.patience is not None:
            self.patience.observe(iteration.metrics)
        self.ended, errors = STOP if self.impatient else "", list[str]()
        for called, hook in self.hooks:  # also after one that fails: a resume does not call them for this step
            try:
                if hook(iteration) == STOP:
                    self.ended = self.ended or called
            except UserError as error:
                errors.append(str(error))
        if iteration.step == iteration.steps:  # nothing is ended early; a run that is made longer goes on
            self.ended = ""
        return "; ".join(errors)
