"""Draws the figures of docs/layouts.md and docs/plans.md into docs/figures/.

    python -m benchmarks.figures

Which device holds what is read from the layouts themselves, and the timeline is drawn by `jrlhf.plan`.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf import plan
from jrlhf.meshes import GENERATE, TRAIN, make_mesh, reshard_cost

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
AXES, SHAPE = ("embed", "mlp"), (8, 8)  # of the weight in the figures
WIDTH, CELL, GAP, LEFT = 760, 110, 34, 170  # of a figure, of a weight, between weights, of the first weight
HELD, RECEIVED, UNUSED = "#1f6fb2", "#e9a23b", "#c8543a"
Box = tuple[tuple[int, int], tuple[int, int]]  # [start, stop) of rows and of columns
PLAN = ("--config", "llama3-8b-ppo", "--cluster", "16xh100", "--plan", "split", "mesh.fsdp=-1")


def mesh() -> Mesh:
    """Returns the mesh fsdp=2 x tensor=2 of the first four devices."""
    return make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])


def boxes(sharding: Sharding) -> list[Box]:
    """The part of the weight that each device holds, in the order of the mesh."""
    parts = sharding.devices_indices_map(SHAPE)
    ranges = [[part.indices(size)[:2] for part, size in zip(parts[d], SHAPE, strict=True)] for d in jax.devices()[:4]]
    return [(rows, columns) for rows, columns in ranges]


def overlap(one: Box, other: Box) -> Box:
    (a, b), (c, d) = ((max(x[0], y[0]), max(max(x[0], y[0]), min(x[1], y[1]))) for x, y in zip(one, other, strict=True))
    return (a, b), (c, d)


def weight(x: float, y: float, parts: Iterable[tuple[Box, str]]) -> list[str]:
    """A weight as a square, embed downwards and mlp to the right, with coloured parts."""
    unit = CELL / SHAPE[0]
    lines = [f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" fill="#f1f1f1" stroke="#888"/>']
    for ((top, bottom), (left, right)), colour in parts:
        size = f'width="{(right - left) * unit:g}" height="{(bottom - top) * unit:g}"'
        lines.append(f'<rect x="{x + left * unit:g}" y="{y + top * unit:g}" {size} fill="{colour}" stroke="white"/>')
    return lines


def text(x: float, y: float, words: str, *, middle: bool = False, weight: str = "normal") -> str:
    anchor = "middle" if middle else "start"
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def drawing(height: float, lines: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif"'
    white = f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
    return "\n".join([f'{head} font-size="13" fill="#222">', white, *lines, "</svg>\n"])


def columns() -> list[str]:
    """The devices' names above the weights, with their place in the mesh."""
    lines = []
    for device in range(4):
        x = LEFT + device * (CELL + GAP) + CELL / 2
        lines.append(text(x, 22, f"device {device}", middle=True, weight="bold"))
        lines.append(text(x, 38, f"fsdp {device // 2}, tensor {device % 2}", middle=True))
    return lines


def layouts() -> str:
    """Draws what each device holds of one weight, between calls and while it computes."""
    on = mesh()
    rows = (
        ("TRAIN, stored", TRAIN.sharding(on, AXES)),
        ("TRAIN, in its layer", NamedSharding(on, TRAIN.compute.spec(AXES))),
        ("GENERATE", GENERATE.sharding(on, AXES)),
    )
    lines = columns()
    for row, (name, sharding) in enumerate(rows):
        y = 54 + row * (CELL + GAP)
        spec = ", ".join("-" if axis is None else str(axis) for axis in (*sharding.spec, None, None)[:2])
        lines += [text(12, y + CELL / 2 - 4, name, weight="bold"), text(12, y + CELL / 2 + 14, f"P({spec})")]
        for device, box in enumerate(boxes(sharding)):
            lines += weight(LEFT + device * (CELL + GAP), y, [(box, HELD)])
    y = 54 + len(rows) * (CELL + GAP)
    return drawing(y + 8, [*lines, text(LEFT, y - 10, "a weight [embed, mlp]: embed downwards, mlp to the right")])


def switch() -> str:
    """Draws what each device receives at the switch, and what it would receive if the axes were moved."""
    on = mesh()
    stored = TRAIN.sharding(on, AXES)
    rows = (
        ("axis dropped", GENERATE.sharding(on, AXES)),
        ("axis moved", NamedSharding(on, P("tensor", None))),
    )
    lines = columns()
    for row, (name, target) in enumerate(rows):
        y = 54 + row * (CELL + GAP)
        cost = reshard_cost(SHAPE, 1, stored, target)
        words = [f"P({', '.join('-' if axis is None else axis for axis in target.spec)})"]
        whole = SHAPE[0] * SHAPE[1]
        words += [f"received: {sum(cost.received.values()) / whole:g} weights"]
        words += [f"held in vain: {sum(cost.redundant.values()) / whole:g}"]
        lines += [text(12, y + 26, name, weight="bold")]
        lines += [text(12, y + 46 + 18 * index, line) for index, line in enumerate(words)]
        for device, (old, new) in enumerate(zip(boxes(stored), boxes(target), strict=True)):
            parts = [(new, RECEIVED), (old, UNUSED), (overlap(old, new), HELD)]
            lines += weight(LEFT + device * (CELL + GAP), y, parts)
    y = 54 + len(rows) * (CELL + GAP)
    for x, colour, words in (
        (0, HELD, "held before, used"),
        (170, RECEIVED, "received"),
        (290, UNUSED, "held, not used"),
    ):
        lines += [f'<rect x="{LEFT + x}" y="{y - 22}" width="13" height="13" fill="{colour}"/>']
        lines += [text(LEFT + x + 20, y - 11, words)]
    return drawing(y + 4, lines)


def timeline(path: Path) -> None:
    """Draws a plan with two slices, as `jrlhf.plan --plot` does."""
    import matplotlib

    os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in the file
    with matplotlib.rc_context({"svg.hashsalt": "figures", "svg.fonttype": "none"}):
        assert plan.cli([*PLAN, "--plot", str(path)]) == 0


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "layouts.svg").write_text(layouts())
    (FOLDER / "switch.svg").write_text(switch())
    timeline(FOLDER / "plan.svg")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    main()
