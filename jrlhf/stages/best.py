"""The best weights of a stage by the metric of `checkpoints.best`, with which the stage ends."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrlhf.config.stages import is_algorithm
from jrlhf.errors import UserError, alike
from jrlhf.run.checkpoints import Checkpoints, like, restore_part
from jrlhf.run.fingerprints import named_leaves
from jrlhf.stages.context import Context
from jrlhf.stages.watching import Iteration, Watch


def weights_of(stage: str) -> str:
    """The beginning of the names of a checkpoint's leaves that are the weights which the stage trains."""
    return "trained.actor.params." if is_algorithm(stage) else "params."


class BestWeights:
    """Sees to it that checkpoints hold the best weights of a stage. Without `watch.best` it does nothing.

    measure: validates the weights after a step, which no iteration has validated. finish: changes the last state before
    it is saved; None: the last state is saved as it is, and a longer run continues from it.
    """

    def __init__(
        self,
        context: Context,
        stage: str,
        checkpoints: Checkpoints,
        watch: Watch,
        measure: Callable[[Any, int], Mapping[str, float]],
        finish: Callable[[Any], Any] | None,
    ):
        self._context, self._stage, self._checkpoints, self._watch = context, stage, checkpoints, watch
        self._measure, self._finish, self._told = measure, finish, False
        if (step := watch.best_step) is not None and not checkpoints.has(step):
            context.console.warn(
                f"the best checkpoint of {stage}, that of step {step}, is gone, and is compared no more"
            )
            watch.forget_best()
        checkpoints.kept = watch.best_step

    def saves_before(self, step: int) -> bool:
        """True if the weights after `step` steps are validated next and no checkpoint holds them."""
        validation = self._context.config.validation if self._watch.validated else None
        return validation is not None and validation.due(step) and step not in self._checkpoints.steps

    def saves_after(self, iteration: Iteration) -> bool:
        """True if the weights after a step, whose metrics `watch` has seen, are the best."""
        watch, checkpoints = self._watch, self._checkpoints
        checkpoints.kept = watch.best_step
        if watch.best is not None and watch.best.best is None and not self._told:
            name, kind = watch.best.name.removeprefix("-"), "val-" if watch.validated else f"{self._stage}/eval_"
            names = [other for other in iteration.metrics if other.startswith(kind)]
            if names and name not in names:
                remedy = alike(name, names, "metrics.jsonl has the names")
                self._context.console.warn(f"checkpoints.best={watch.best.name} is no metric here: {remedy}")
                self._told = True
        return watch.best_step == iteration.step

    def ended(self, state: Any, step: int) -> Any:
        """Returns the state that is saved at the end of the stage, after `step` steps."""
        if self._watch.validated:
            seconds = self._context.config.deadline
            self._watch.measured(self._measure(state, step), step, seconds=seconds)
        return state if self._finish is None else self._finish(self._chosen(state, step))

    def result(self, state: Any, step: int) -> Any:
        """Returns the state with which the stage ends. state: that which was saved at its end."""
        return self._chosen(state, step) if self._finish is None else state

    def _chosen(self, state: Any, step: int) -> Any:
        """Returns the state after `step` steps with the best weights."""
        watch, console, best = self._watch, self._context.console, self._watch.best_step
        if watch.best is None:
            return state
        if best is None:
            reason = f"it was no finite number in any step of {self._stage}, which ends with its last weights"
            console.warn(f"checkpoints.best={watch.best.name} had no effect: {reason}")
            return state
        value = f"{watch.best.name.removeprefix('-')}={watch.best.best:.4g}"
        console.line(f"{self._stage} ends with the weights of step {best}, the best by {value}")
        if best == step:
            return state
        self._checkpoints.wait()
        leaves, prefix = named_leaves(state), weights_of(self._stage)
        own = {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}
        directory = self._context.run.path / "checkpoints" / self._stage
        try:
            restored = restore_part(directory, best, prefix, like(own, self._context.mesh))
        except UserError as error:
            raise UserError(f"{error}, or resume the run with checkpoints.best=null: its last weights") from error
        leaves |= {prefix + name: leaf for name, leaf in restored.items()}
        return jax.tree.unflatten(jax.tree.structure(state), leaves.values())
