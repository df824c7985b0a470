"""`Learning`: monitors whether a stage learns: its learning rates, and its skipped updates."""

from collections.abc import Callable, Mapping
from typing import Any

from jrlhf.config.schema import Config
from jrlhf.config.stages import OptimizerConfig
from jrlhf.meshes.transfers import to_host
from jrlhf.ppo.types import TrainState
from jrlhf.roles.optimizers import learning_rates, updates_of


class Learning:
    """Monitors the updates of a stage. Warns of a warm-up that is too long, and at a role's first skipped update."""

    def __init__(self, config: Config, stage: str, state: Any, warn: Callable[[str], None]):
        self._stage, self._warn, self._limit = stage, warn, config.stop_after_skipped
        self._applied = _applied(stage, state)
        self._skipped, self._warned = dict.fromkeys(self._applied, 0), set[str]()
        self._meant = list[str]()  # metrics that count rows which are to count nowhere
        for _, kind, part in config.rewards_and_costs:
            self._meant += [f"{kind}s/{part.name}/abstained"] if part.abstain and part.weight else []
            self._meant += [f"{kind}s/{part.name}/failures"] if part.on_failure == "exclude" and part.weight else []
        section, self._rates = config.sections[stage], {}
        for role in self._applied:
            own = isinstance(section, OptimizerConfig)
            optimizer, key = (section, stage) if own else (section.optimizer_of(role), f"{stage}.{role}")
            self._rates[role] = learning_rates(optimizer, updates=section.updates)
            if optimizer.warmup >= section.updates and role != "cost_critic":
                warmup, _ = optimizer.duration(section.updates)
                warn(f"{key}.warmup={optimizer.warmup} is not below the {section.updates} updates: it is {warmup} here")

    def measure(self, state: Any, metrics: Mapping[str, Any], step: int) -> dict[str, float]:
        """Returns the learning rates of the last updates, after iteration `step` with these metrics."""
        before, self._applied = self._applied, _applied(self._stage, state)
        # A row whose score is not finite does not count; an update in which no row counts is skipped.
        lost = int(sum(metrics.get(f"{score}/nonfinite", 0) for score in ("critic/score", "cost")))
        lost = max(lost - int(sum(metrics.get(name, 0) for name in self._meant)), 0)
        if lost:
            self._warn_once("scores", step, f"{lost} rows have no finite score, and nothing is learned from them")
        for role, applied in self._applied.items():
            skipped, nonfinite = (int(metrics.get(f"{role}/{kind}_updates", 0)) for kind in ("skipped", "nonfinite"))
            bad = skipped if lost else nonfinite
            self._skipped[role] = 0 if applied > before[role] else self._skipped[role] + bad
            if skipped:
                why = "a loss, a gradient, a weight or a score is not finite" if bad else "no token of it counts"
                self._warn_once(role, step, f"an update of {role} is skipped, because {why}")
        return {f"{role}/lr": float(self._rates[role][max(n - 1, 0)]) for role, n in self._applied.items()}

    def _warn_once(self, subject: str, step: int, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(f"{self._stage} step {step}: {text}")

    def in_vain(self, step: int, steps: int, *, last: bool) -> str:
        """Returns the reason why the run must end after this step; empty if it goes on. last: the stage ends here.

        It must end after too many skipped updates in a row, and at the end of a stage in which a role skipped all.
        """
        for role, skipped in self._skipped.items():
            none = last and skipped and self._applied[role] == 0  # counted from the start, also by a resume
            if self._limit and (skipped >= self._limit or none):
                return (
                    f"{self._stage} ends at step {step} of {steps}: {skipped} updates of {role} in a row were skipped, "
                    "because a loss, a gradient, a weight or a score is not finite; the last good weights are in "
                    "checkpoints/, and nothing is exported: look at learning rates, temperature and scores, or set "
                    "stop_after_skipped=0"
                )
        return ""


def _applied(stage: str, state: Any) -> dict[str, int]:
    """The number of updates that each role's optimizer has applied. A stage without roles counts as one role."""
    trained = {stage: state} if isinstance(state, TrainState) else getattr(state, "trained", {})
    counts = {role: updates_of(own.opt_state) for role, own in trained.items()}
    return {role: int(count) for role, count in to_host(counts).items()}
