"""What a run shows while it goes on: progress with rate and time left, a line an iteration, samples.

On a terminal with `rich`; elsewhere (a pipe, a log file, a notebook's `!command`) as plain lines, few of them.
"""

import math
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import rich.box
import rich.console
import rich.progress
from rich.table import Table
from rich.text import Text

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\x1b[\]PX^_].*?(?:\x1b\\|\x07|$)"  # OSC and other strings: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]",  # the other, short ones
    re.DOTALL,
)

# What a line of an iteration shows, in this order, where it is present: metric, name, format.
_SHOWN = (
    ("sft/loss", "loss", ".3f"),
    ("sft/eval_loss", "held-out loss", ".3f"),
    ("reward_model/loss", "loss", ".3f"),
    ("reward_model/accuracy", "accuracy", ".2f"),
    ("reward_model/eval_accuracy", "held-out accuracy", ".3f"),
    ("dpo/loss", "loss", ".3f"),
    ("rewards/accuracies", "accuracy", ".2f"),
    ("rewards/margins", "margin", "+.3f"),
    ("dpo/eval_accuracy", "held-out accuracy", ".3f"),
    ("critic/score/mean", "reward", "+.3f"),
    ("gold/score", "gold", ".3f"),
    ("objective/kl", "kl", ".2f"),
    ("objective/kl_coef", "kl coef", ".3f"),
    ("cost/mean", "cost", ".2f"),
    ("safe/multiplier", "lambda", ".3f"),
    ("actor/entropy", "entropy", ".2f"),
    ("response_length/mean", "length", ".1f"),
    ("critic/vf_explained_var", "explained", ".2f"),
    ("timing_s/step", "seconds", ".1f"),
)


_SHOWN_REWARDS = 3  # rewards of a run up to which an iteration's line shows each
_VALIDATION = re.compile(r"val-(?:core|aux)/(?P<named>.+)/(?P<statistic>[a-z]+@\d+)(?:/mean)?", re.DOTALL)


class Console:
    """Prints for people. `enabled=False` (every process but the first) prints nothing.

    `quiet`: seconds that pass at least between two lines of a fast phase, and between two tables of samples.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        file: TextIO | None = None,
        quiet: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self._enabled = enabled
        self._quiet = quiet
        self._now = now
        self._file = sys.stdout if file is None else file
        self._encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._rich = rich.console.Console(file=self._file, highlight=False, markup=False, emoji=False)
        self._sampled: float | None = None
        self.interactive = self._rich.is_interactive and self._encoding.lower().replace("-", "") == "utf8"

    def line(self, text: str, style: str = "") -> None:
        """One line of text; escapes in it are removed."""
        if not self._enabled:
            return
        if self.interactive:
            self._rich.print(Text(clean(text), style=style), soft_wrap=True)
        else:
            print(clean(text).encode(self._encoding, "replace").decode(self._encoding), file=self._file, flush=True)

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}", style="yellow")

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Something that takes a while and cannot tell how long. Yields a function that says more of how it goes."""
        began = self._now()
        if self._enabled and self.interactive:
            with self._rich.status(Text(f"{clean(text)} ...")) as status:
                yield lambda more: status.update(Text(f"{clean(text)} ... {clean(more)}"))
            self.line(f"{text}: {duration(self._now() - began)}", style="dim")
        else:
            self.line(f"{text} ...")
            yield lambda more: None

    @contextmanager
    def loading(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Something large that is read. Yields a function to be told (bytes done, bytes in all)."""
        with self.status(f"reading {what}") as say:
            said = self._now()

            def report(done: int, total: int) -> None:
                nonlocal said
                progress = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
                say(progress)
                if not self.interactive and self._now() - said >= self._quiet:
                    said = self._now()
                    self.line(f"reading {what}: {progress}")

            yield report

    @contextmanager
    def progress(self, name: str, *, total: int, start: int = 0) -> Iterator["Progress"]:
        """Progress of a phase of `total` units, of which `start` are done already."""
        pace = Pace(total, start, self._now)
        if not (self._enabled and self.interactive):
            yield Progress(name, pace, self, self._quiet, None)
            return
        with rich.progress.Progress(
            rich.progress.TextColumn("[bold]{task.description}"),
            rich.progress.BarColumn(bar_width=30),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[pace]}", style="dim"),
            console=self._rich,
            transient=True,
        ) as bar:
            task = bar.add_task(clean(name), total=total, completed=start, pace="")
            update = partial(bar.update, task)
            yield Progress(name, pace, self, self._quiet, update)

    def samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """A small table of samples, unless the last one was shown just now. `stage` and `step` make its title."""
        if samples and (self._sampled is None or self._now() - self._sampled >= self._quiet):
            title = f"samples of {samples[0].get('stage', 'the policy')}"
            self._samples(f"{title} at {samples[0]['step']}" if "step" in samples[0] else title, samples)

    def validation(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, object]] = ()) -> None:
        """The `val-core/` figures of a validation before iteration `step` in one line, and the samples given."""
        figures: dict[str, list[str]] = {}
        for key, value in metrics.items():
            found = validation_key(key)
            if found and key.startswith("val-core/"):
                source, measure, statistic = found
                figures.setdefault(source, []).append(f"{measure} {statistic} {value:.3f}")
        parts = [f"validation before iteration {step}", *figures.pop("all", [])]
        parts += [f"{source}: {', '.join(found)}" for source, found in figures.items()]
        self.line("  ".join(parts), style="bold")
        if samples:
            self._samples(f"validation samples before iteration {step}", samples)

    def _samples(self, title: str, samples: Sequence[Mapping[str, object]]) -> None:
        self._sampled = self._now()
        columns = [name for name in samples[0] if name not in ("stage", "step", "kind")]
        self.table(title, columns, [[sample.get(name, "") for name in columns] for sample in samples])

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Numbers are rounded; texts are cleaned and shortened."""
        if not self._enabled:
            return
        cells = [[_cell(value) for value in row] for row in rows]
        if not self.interactive:
            lines = [list(columns), *cells]
            widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
            self.line(title)
            for line in lines:
                padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
                self.line(("  " + "  ".join(padded)).rstrip())
            return
        table = Table(title=Text(clean(title)), title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
        for index, name in enumerate(columns):
            numbers = all(isinstance(row[index], int | float) for row in rows)
            table.add_column(Text(clean(name)), justify="right" if numbers else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        self._rich.print(table)

    def summary(self, summary: Mapping[str, Any], run_dir: Path) -> None:
        """The figures of summary.json, as far as they are there, and where everything is."""
        self.line("")
        self._held_out(summary.get("held_out") or {})
        if summary.get("reward_model_accuracy") is not None:
            self.line(f"reward model: right about {summary['reward_model_accuracy']:.1%} of the held-out pairs")
        if summary.get("dpo_accuracy") is not None:
            self.line(f"DPO: the policy prefers the better of {summary['dpo_accuracy']:.1%} of the held-out pairs")
        if "kl_last_quarter" in summary:
            target = summary.get("kl_target")
            aim = "" if target is None else f" (target {target:g})"
            self.line(f"KL to the reference in the last quarter: {summary['kl_last_quarter']:.2f} nats{aim}")
        if "cost" in summary:
            cost = summary["cost"]
            self.line(f"cost in the last quarter: {cost['last_quarter']:.3f} (limit {cost['limit']:g})")
        for name, seconds in summary.get("phases", {}).items():
            self.line(f"{name}: {duration(seconds)}", style="dim")
        self.line(f"report: {run_dir / 'report.html'}")

    def _held_out(self, heldout: Mapping[str, Any]) -> None:
        """The measure, its items and its sources on held-out prompts, and their change if there is an `after`."""
        measure = str(heldout.get("measure", "score"))
        found = {name: heldout[name] for name in ("before", "after") if heldout.get(name)}
        if not found:
            return
        measures = [measure, *(["cost"] if any(each.get("cost") is not None for each in found.values()) else [])]
        rows = [[name, *(_measured(each, name) for each in found.values())] for name in measures]
        columns = [_parts(each) for each in found.values()]
        rows += [
            [name, *(each.get(name, "") for each in columns)]
            for name in dict.fromkeys(name for each in columns for name in each)
        ]
        self.table(f"held-out prompts ({heldout.get('n', '?')})", ["", *found], rows)
        if "difference" in heldout:
            difference, error = heldout["difference"], heldout.get("standard_error") or 0.0
            times = f", {difference / error:.1f} standard errors" if error else ""
            name = "gold score" if measure == "gold" else measure
            self.line(f"{name}, after minus before: {difference:+.3f} ± {error:.3f}{times}", style="bold")


class Progress:
    """Where a phase stands. A slow phase gets a line a unit; a fast one a line now and then, and one at its end."""

    def __init__(
        self, name: str, pace: "Pace", console: Console, quiet: float, update: Callable[..., object] | None
    ) -> None:
        self._name, self._pace, self._console, self._quiet = name, pace, console, quiet
        self._update = update  # of the bar, if there is one
        self._shown: float | None = None

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """`done` units are done, the last of them with these metrics."""
        metrics = {} if metrics is None else metrics
        pace = self._pace
        pace.advance(done)
        now = pace.now()
        slow = pace.rate is not None and pace.rate <= 1.0
        evaluated = any("/eval_" in metric for metric in metrics)
        if self._shown is None or slow or evaluated or done >= pace.total or now - self._shown >= self._quiet:
            self._shown = now
            shown = [(name, metrics[metric], form) for metric, name, form in _SHOWN if metric in metrics]
            shown += _rewards(metrics)
            parts = [f"{self._name} {done:>{len(str(pace.total))}}/{pace.total}"]
            parts += [f"{name} {value:{form}}" for name, value, form in shown]
            if pace.described() and (self._update is None or done >= pace.total):
                parts.append(f"({pace.described()})")
            broken = not all(math.isfinite(value) for _, value, _ in shown)
            self._console.line("  ".join(parts), style="bold red" if broken else "")
        if self._update is not None:
            self._update(completed=done, pace=pace.described())


class Pace:
    """How fast a phase goes and how long it still takes. The first unit is left out: it contains the compilation."""

    def __init__(self, total: int, start: int = 0, now: Callable[[], float] = time.monotonic):
        self.total, self.done, self.now = total, start, now
        self._began = now()
        self._mark: tuple[float, int] | None = None  # (time, done) after the first unit

    def advance(self, done: int) -> None:
        self.done = done
        if self._mark is None:
            self._mark = (self.now(), done)

    @property
    def rate(self) -> float | None:
        """Units a second, None as long as it cannot be known."""
        if self._mark is None or self.done <= self._mark[1] or self.now() <= self._mark[0]:
            return None
        return (self.done - self._mark[1]) / (self.now() - self._mark[0])

    def described(self) -> str:
        """`12/s, 31 s left`; at the end the time that it took; nothing as long as nothing is known."""
        rate = self.rate
        speed = "" if rate is None else f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
        if self.done >= self.total:
            return ", ".join(part for part in (speed, f"took {duration(self.now() - self._began)}") if part)
        return "" if rate is None else f"{speed}, {duration((self.total - self.done) / rate)} left"


def validation_key(key: str, sources: Sequence[str] = ()) -> tuple[str, str, str] | None:
    """(source, what is measured, statistic) of a validation's metric; None for any other metric.

    `val-core/SOURCE/MEASURE/mean@K`, `val-core/SOURCE/MEASURE/best@K/mean`, `val-aux/SOURCE/NAME/mean@K`. A source may
    have slashes; so may a name whose source is among `sources`.
    """
    found = _VALIDATION.fullmatch(key)
    if found is None or "/" not in found["named"]:
        return None
    named = found["named"]
    known = max((source for source in sources if named.startswith(f"{source}/")), key=len, default=None)
    source, name = named.rsplit("/", 1) if known is None else (known, named[len(known) + 1 :])
    return source, name, found["statistic"]


def duration(seconds: float) -> str:
    """`4.2 s`, `31 s`, `3 min 12 s`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def clean(text: str, limit: int | None = None) -> str:
    """Text that cannot command a terminal: one line, without escapes, control and direction characters.

    Models write such things, and a terminal would obey them. `limit`: the most characters to keep.
    """
    text = _ESCAPES.sub("", text)
    kept = (" " if c in "\n\r\t\v\f\x85\u2028\u2029" else c for c in text)
    text = "".join(c for c in kept if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn"))
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def _rewards(metrics: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """What a line shows of rewards and of costs by their names: their means where they are a few, and how often they
    failed."""
    shown, failed = [], 0.0
    for kind in ("rewards", "costs"):
        keys = [key.split("/") for key in metrics if key.startswith(f"{kind}/")]
        names = [key[1] for key in keys if len(key) == 3 and key[2] == "mean"]
        if 1 < len(names) <= _SHOWN_REWARDS:
            shown += [(name, metrics[f"{kind}/{name}/mean"], ".3f") for name in names]
        failed += sum(metrics["/".join(key)] for key in keys if len(key) == 3 and key[2] == "failures")
    return [*shown, ("failures", failed, ".0f")] if failed else shown


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) >= 100 else f"{value:.2f}"
    return clean(str(value), 160)


def _measured(found: Mapping[str, Any], measure: str) -> str:
    value, error = found.get(measure), found.get(f"{measure}_standard_error")
    return "" if value is None else f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _parts(found: Mapping[str, Any]) -> dict[str, float]:
    """What a measure is made of: its items by name, then its sources."""
    sources = {f"of {name}": each["mean"] for name, each in (found.get("sources") or {}).items()}
    return dict(sorted((found.get("items") or {}).items())) | sources
