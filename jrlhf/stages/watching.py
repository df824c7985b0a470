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
BEST = "best"  # key in that state: the metric of `checkpoints.best`, its best value, and the step of the weights


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
    better one that are too many; 0: none is. threshold: by how much a value must be better. best, missed: the best
    value so far, and the number of values since then.
    """

    name: str
    values: int = 0
    threshold: float = 0.0
    best: float | None = None
    missed: int = 0

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Takes the metrics of a step; returns whether they have a better value. One that is not finite never is."""
        if (name := self.name.removeprefix("-")) not in metrics:
            return False
        value, sign = metrics[name], -1 if self.name.startswith("-") else 1
        better = self.best is None or sign * value > sign * self.best + self.threshold
        if better := math.isfinite(value) and better:
            self.best, self.missed = value, 0
        else:
            self.missed += 1
        return better

    @property
    def ended(self) -> bool:
        return 0 < self.values <= self.missed


@dataclass
class Watch:
    """Watches one stage. Mutable; `state` is what a checkpoint holds of it.

    active: False if there is nothing to ask. patience: None without `stop`. ended: the setting that has ended the
    stage, "stop" or a hook's; empty: none has. best: follows the metric of `checkpoints.best`; None: there is none in
    this stage. best_step: the number of steps after which the weights had its best value.
    """

    hooks: Sequence[tuple[str, Hook]] = ()
    active: bool = True
    patience: Patience | None = None
    ended: str = ""
    best: Patience | None = None
    best_step: int | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        hooks: Sequence[tuple[str, Hook]],
        state: Mapping[str, Any],
        *,
        left: bool = False,
        best: str | None = None,
    ) -> "Watch":
        """The watch that goes on from a checkpoint's `state`; an empty one begins. hooks: empty in other processes.

        A stage that has ended early goes on if the setting that ended it would do so no more, unless it is `left`: a
        later stage has begun with its weights. best: see `CheckpointConfig.best_in`.
        """
        stop, watch = config.stop, cls(hooks, active=bool(config.hooks or config.stop or best))
        watch.best = None if best is None else Patience(best)
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
        seen: dict[str, Any] = {} if own is None else {"patience": [own.name, own.best, own.missed]}
        seen |= {} if self.best is None else {BEST: [self.best.name, self.best.best, self.best_step]}
        return seen | ({"ended": self.ended} if self.ended else {})

    def _take(self, state: Mapping[str, Any]) -> None:
        """Takes over a state. What it says of another metric than the config's is left out."""
        name, *seen = state.get("patience", [None])
        if self.patience is not None and name == self.patience.name:
            self.patience.best, self.patience.missed = seen
        name, *seen = state.get(BEST, [None])
        if self.best is not None and name == self.best.name:
            self.best.best, self.best_step = seen
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

    def measured(self, metrics: Mapping[str, float], step: int, *, seconds: float) -> None:
        """Takes the metrics of the weights after a step into `best`. All processes call this, as `after`."""
        self._take(from_main(lambda: (self._compare(metrics, step), self.state)[1], seconds=seconds))

    def forget_best(self) -> None:
        """Begins anew to look for the best value."""
        if self.best is not None:
            self.best, self.best_step = Patience(self.best.name), None

    @property
    def validated(self) -> bool:
        """True if `best` is measured by validations: those of a step measure the weights before it."""
        return self.best is not None and self.best.name.removeprefix("-").startswith("val-")

    def _compare(self, metrics: Mapping[str, float], step: int) -> None:
        if self.best is not None and self.best.observe(metrics):
            self.best_step = step

    def _ask(self, iteration: Iteration) -> str:
        self._compare(iteration.metrics, iteration.step - self.validated)
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
