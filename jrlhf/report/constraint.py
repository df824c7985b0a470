"""Whether the reward was raised within the limit on cost, and what a unit of cost came to be worth."""

from jrlhf.report.charts import Chart, Series
from jrlhf.report.parts import figure, grid, lead
from jrlhf.report.record import Record


def constraint(run: Record) -> str:
    """Reward, cost and multiplier over the iterations; nothing where the run has no costs."""
    costs = run.rl_curve("cost/mean")
    if not costs[1]:
        return ""
    limit = run.setting(f"{run.algorithm}.algorithm.cost_limit")
    figures = [
        figure(
            "Cost",
            "Mean of an iteration's responses; dashed, the limit.",
            Chart([Series("cost", *costs, 2, "trend")], xlabel="iteration", target=limit),
        ),
        figure(
            "Lagrange multiplier",
            "What a unit of cost is worth in units of reward. It rises while the cost is above its limit.",
            Chart(
                [Series("lambda", *run.rl_curve("safe/multiplier"), 4, "line")], xlabel="iteration", limits=(0, None)
            ),
        ),
        figure(
            "Reward",
            "The mean score.",
            Chart([Series("score", *run.rl_curve("critic/score/mean"), 1, "trend")], xlabel="iteration"),
        ),
    ]
    found = run.summary.get("cost")
    told = ""
    if found:
        told = (
            f"In the last quarter of the iterations a response cost {found['last_quarter']:.3g} in the mean; the limit "
            f"is {found['limit']:g}."
        )
    held_out = [run.graded(name).get("cost") for name in ("before", "after")]
    if held_out[0] is not None and held_out[1] is not None:
        told += f" On held-out prompts it went from {held_out[0]:.3g} to {held_out[1]:.3g}."
    return lead(told.strip()) + grid(figures)
