"""A plan's timeline as a picture."""

from pathlib import Path

from jrlhf.errors import UserError
from jrlhf.planning.describe import STEADY
from jrlhf.planning.simulator import Simulation

FORMATS = (".svg", ".png", ".pdf")


def check_ending(path: Path) -> None:
    """Refuses a file whose ending names no picture, with a UserError."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--plot {path} must end in {', '.join(FORMATS)}")


def plot(simulation: Simulation, title: str, path: Path) -> None:
    """Writes the iterations around a steady one: rows are groups of devices, columns time; others' work is pale."""
    check_ending(path)
    # Imported here: it takes long, and only pictures need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    groups = simulation.memory
    names = list(dict.fromkeys(span.call for span in simulation.spans if span.kind == "call"))
    colours = {name: f"C{index % 10}" for index, name in enumerate(names)}
    figure = Figure(figsize=(11, 1.8 + 0.6 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [span for span in simulation.spans if abs(span.iteration - STEADY) <= 1]
    origin = min(span.start for span in shown)
    for span in shown:
        for row, group in enumerate(groups):
            if any(each.overlaps(group.devices) for each in span.devices):
                own = span.kind == "call"
                axes.add_patch(
                    Rectangle(
                        (span.start - origin, row - 0.45),
                        span.seconds,
                        0.9,
                        facecolor=colours[span.call] if own else "0.4",
                        alpha=1.0 if span.iteration == STEADY else 0.45,
                        edgecolor="white" if own else "none",
                        linewidth=0.5,
                    )
                )
    axes.set_xlim(0, max(span.end for span in shown) - origin)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_yticks(range(len(groups)), [f"devices {group.devices}\n{group.peak / 2**30:.1f} GiB" for group in groups])
    axes.set_xlabel("seconds")
    axes.set_title(f"{title}: {simulation.seconds:.3g} s an iteration")
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    handles += [Patch(facecolor="0.4", label="moves")] if any(span.kind != "call" for span in shown) else []
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
