"""The console of a run: progress with rate and time left, a line for each iteration, samples, the summary.

On a terminal it uses `rich`; elsewhere (a pipe, a log file, a notebook's `!command`) it prints few plain lines.
"""

import math
import os
import re
import select
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import rich.box
import rich.console
import rich.progress
from rich.table import Table
from rich.text import Text

from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.run.directory import run_path
from jrlhf.run.files import in_units, saved_steps
from jrlhf.run.resume import longer
from jrlhf.run.text import clean, decimals, duration

# Metrics that an iteration's line shows, in this order: metric, name, format.
SHOWN = (
    ("sft/loss", "loss", ".3f"),
    ("sft/eval_loss", "held-out loss", ".3f"),
    ("reward_model/loss", "loss", ".3f"),
    ("reward_model/accuracy", "accuracy", ".2f"),
    ("reward_model/eval_accuracy", "held-out accuracy", ".3f"),
    ("dpo/loss", "loss", ".3f"),
    ("rewards/accuracies", "accuracy", ".2f"),
    ("rewards/margins", "margin", "+.3f"),
    ("dpo/eval_accuracy", "held-out accuracy", ".3f"),
    ("actor/loss", "loss", ".3f"),  # of a loss of tokens; the policy loss says little
    ("critic/score/mean", "reward", "+.3f"),
    ("gold/score", "gold", ".3f"),
    ("objective/kl", "kl", ".2f"),
    ("objective/kl_coef", "kl coef", ".3f"),
    ("cost/mean", "cost", ".2f"),
    ("safe/multiplier", "lambda", ".3f"),
    ("actor/entropy", "entropy", ".2f"),
    ("response_length/mean", "length", ".1f"),
    ("critic/vf_explained_var", "explained", ".2f"),
    ("perf/trainer_wait_seconds", "trainer waits", ".1f"),
    ("perf/rollouts_wait_seconds", "rollouts wait", ".1f"),
    ("timing_s/step", "seconds", ".1f"),
)
_SHOWN_REWARDS = 3  # an iteration's line shows the rewards by name if there are at most this many
_VALIDATION = re.compile(r"val-(?:core|aux)/(?P<name>.+)/(?P<statistic>[a-z]+@\d+)(?:/mean)?", re.DOTALL)


class Console:
    """Prints messages for users; with `enabled=False` (in every process but the first) it prints nothing.

    quiet: minimum seconds between two lines of a fast phase, and between two tables of samples.
    """

    quiet = 10.0

    def __init__(self, *, enabled: bool = True, file: TextIO | None = None, now: Callable[[], float] = time.monotonic):
        self._enabled, self._file, self.now = enabled, sys.stdout if file is None else file, now
        self._encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._rich = rich.console.Console(file=self._file, highlight=False, markup=False, emoji=False)
        self._sampled = -math.inf  # time at which samples were last shown
        self.interactive = enabled and self._rich.is_interactive
        self.interactive &= self._encoding.lower().replace("-", "") == "utf8"

    def line(self, text: str, style: str = "") -> None:
        """Prints one line of text; escapes in it are removed."""
        if not self._enabled:
            return
        try:
            if self.interactive:
                self._rich.print(Text(clean(text), style=style), soft_wrap=True)
            else:
                print(clean(text).encode(self._encoding, "replace").decode(self._encoding), file=self._file, flush=True)
        except OSError:
            if not drop_closed_outputs():
                raise

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}", style="yellow")

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Announces work of unknown length. Yields a function that shows a word about its progress."""
        began = self.now()
        if not self.interactive:
            self.line(f"{text} ...")
            yield lambda more: None
            return
        with self._rich.status(Text(f"{clean(text)} ...")) as status:
            yield lambda more: status.update(Text(f"{clean(text)} ... {clean(more)}"))
        self.line(f"{text}: {duration(self.now() - began)}", style="dim")

    @contextmanager
    def loading(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Announces that a large file is read. Yields a function of (bytes done, total bytes)."""
        with self.status(f"reading {name}") as update:
            shown = self.now()

            def report(done: int, total: int) -> None:
                nonlocal shown
                progress = f"{in_units(done)} of {in_units(total)}"
                update(progress)
                if not self.interactive and self.now() - shown >= self.quiet:
                    shown = self.now()
                    self.line(f"reading {name}: {progress}")

            yield report

    @contextmanager
    def progress(self, name: str, *, total: int, start: int = 0, calls: Sequence[str] = ()) -> Iterator["Progress"]:
        """Shows the progress of a phase of `total` units, of which `start` are done already.

        calls: the names of a unit's calls in their order, whose compilation is announced.
        """
        if not self.interactive:
            yield Progress(name, total, start, self, calls)
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
            yield Progress(name, total, start, self, calls, partial(bar.update, task))

    def samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """Shows a small table of samples, unless one was shown just now. `stage` and `step` make its title."""
        if samples and self.now() - self._sampled >= self.quiet:
            title = f"samples of {samples[0].get('stage', 'the policy')}"
            self._samples(f"{title} at {samples[0]['step']}" if "step" in samples[0] else title, samples)

    def validation(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, object]] = ()) -> None:
        """Shows the `val-core/` metrics of a validation before iteration `step` in one line, and samples."""
        statistics: dict[str, list[str]] = {}
        for key, value in metrics.items():
            parsed = validation_key(key)
            if parsed and key.startswith("val-core/"):
                statistics.setdefault(parsed[0], []).append(f"{parsed[1]} {parsed[2]} {decimals(value)}")
        parts = [f"validation before iteration {step}", *statistics.pop("all", [])]
        parts += [f"{source}: {', '.join(of_source)}" for source, of_source in statistics.items()]
        self.line("  ".join(parts), style="bold")
        if samples:
            self._samples(f"validation samples before iteration {step}", samples)

    def _samples(self, title: str, samples: Sequence[Mapping[str, object]]) -> None:
        self._sampled = self.now()
        columns = shown_columns(samples[0])
        self._table(title, columns, [[sample.get(name, "") for name in columns] for sample in samples])

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Prints a table; numbers are rounded, texts are cleaned and shortened."""
        cells = [[_cell(value) for value in row] for row in rows]
        if self.interactive:
            table = Table(title=Text(clean(title)), title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
            for name, *values in zip(columns, *rows, strict=True):
                numbers = all(isinstance(value, int | float) for value in values)
                table.add_column(Text(clean(name)), justify="right" if numbers else "left", overflow="fold")
            for row in cells:
                table.add_row(*map(Text, row))
            self._rich.print(table)
            return
        self.line(title)
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for line in (columns, *cells):
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.line(("  " + "  ".join(padded)).rstrip())

    def summary(
        self, figures: Iterable[tuple[str, Sequence[str], str]], phases: Mapping[str, float], run_dir: Path | str | None
    ) -> None:
        """Shows the results of a run, each with a title, values and a note, and the paths of report and model.

        run_dir: None: its files are still to be copied to an address, and `written` is told when they are there.
        """
        self.line("")
        for title, values, note in figures:
            self.line(f"{title}: {' → '.join(values)}  ({note})", style="bold")
        for name, seconds in phases.items():
            self.line(f"{name}: {duration(seconds)}", style="dim")
        for line in () if run_dir is None else written(run_dir):
            self.line(line)

    def commands(self, config: Config) -> None:
        """Shows shell commands for what to do next with a run that has ended."""
        at_address = is_address(config.run_dir)
        place = f"{config.run_dir.rstrip('/')}/{config.name}" if at_address else run_path(config)
        if config.stages == ("reward_model",):
            self.line(f"to train a policy with it, in a config: rewards: [{{model: {place}/reward_model}}]")
            return
        run = shlex.quote(str(place))
        self.line(f"to talk to it: python -m jrlhf.generate --model {run}")
        if at_address:
            return  # the other commands take no address
        self.line(f"to upload it: python -m jrlhf.export {run} --push USER/NAME")
        stage = config.stages[-1]
        early = max(saved_steps(run_path(config) / "checkpoints" / stage), default=math.inf) < config.length(stage)
        if not early and (words := longer(config)):
            anew = "" if "--resume" in words else ", anew, because its learning rates depend on its length"
            self.line(f"to train it longer{anew}: python -m jrlhf.train --config {run}/config.yaml {words}")


def written(run_dir: Path | str) -> tuple[str, str]:
    """Returns the lines that tell where a run's report and model are."""
    return f"report: {run_dir}/report.html", f"model: {run_dir}/model, in Hugging Face form"


@dataclass
class Progress:
    """The progress of a phase. A slow phase gets a line for each unit; a fast one few lines, and one at its end."""

    name: str
    total: int
    done: int
    console: Console
    calls: Sequence[str] = ()
    bar: Callable[..., object] | None = None  # updates rich's progress bar, if there is one

    def __post_init__(self) -> None:
        self._began, self._shown = self.console.now(), -math.inf
        self._compiled = set[str]()  # calls whose compilation was announced
        self._mark: tuple[float, int] | None = None  # (time, done) after the first unit, which contains compilation

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """Records that `done` units are done; `metrics` are those of the last one."""
        metrics, now = metrics or {}, self.console.now()
        self.done, self._mark = done, self._mark or (now, done)
        rate, ended = self._rate(now), done >= self.total
        slow, evaluated = rate is not None and rate <= 1.0, any("/eval_" in metric for metric in metrics)
        if slow or evaluated or ended or now - self._shown >= self.console.quiet:
            self._shown = now
            values = [(name, metrics[metric], form) for metric, name, form in SHOWN if metric in metrics]
            values += _rewards(metrics)
            parts = [f"{self.name} {done:>{len(str(self.total))}}/{self.total}"]
            parts += [f"{name} {decimals(value, form)}" for name, value, form in values]
            if self.pace() and (self.bar is None or ended):
                parts.append(f"({self.pace()})")
            finite = all(math.isfinite(value) for _, value, _ in values)
            self.console.line("  ".join(parts), style="" if finite else "bold red")
        if self.bar is not None:
            self.bar(completed=done, pace=self.pace())

    def compiling(self, call: str) -> None:
        """Shows that the programs of one of the phase's calls compile, when its first one does."""
        if call not in self.calls or call in self._compiled:
            return
        self._compiled.add(call)
        text = f"compiling {call} ({self.calls.index(call) + 1} of {len(self.calls)})"
        if self.bar is not None:
            self.bar(pace=text)
        else:
            self.console.line(f"{self.name}: {text}")

    def _rate(self, now: float) -> float | None:
        """Returns units per second after the first one; None if it is not known yet."""
        if self._mark is None or self.done <= self._mark[1] or now <= self._mark[0]:
            return None
        return (self.done - self._mark[1]) / (now - self._mark[0])

    def pace(self) -> str:
        """Returns `12/s, 31 s left`, or at the end `took 46 s: 6.0 s for the first, then 12/s`; "" without a rate yet.

        The first unit contains what happens once: compilation, or the sampling of pairs.
        """
        rate = self._rate(now := self.console.now())
        speed = "" if rate is None else f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
        if self.done >= self.total:
            first = duration((self._mark or (now, 0))[0] - self._began)
            return f"took {duration(now - self._began)}" + (f": {first} for the first, then {speed}" if speed else "")
        return "" if rate is None else f"{speed}, {duration((self.total - self.done) / rate)} left"


def drop_closed_outputs() -> bool:
    """Discards standard output or error if its reader, such as a terminal, was closed, so that a run goes on.

    Returns whether a reader was closed.
    """
    gone = []
    for descriptor in (1, 2):
        reader = select.poll()
        reader.register(descriptor, 0)  # errors and hang-ups are always reported
        if reader.poll(0):
            gone.append(descriptor)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
    return bool(gone)


def validation_key(key: str, sources: Sequence[str] = ()) -> tuple[str, str, str] | None:
    """Splits a validation's metric into (source, measure, statistic); None for any other metric.

    `val-core/SOURCE/MEASURE/mean@K`, `val-core/SOURCE/MEASURE/best@K/mean`, `val-aux/SOURCE/NAME/mean@K`. A source may
    have slashes; so may a name whose source is among `sources`.
    """
    match = _VALIDATION.fullmatch(key)
    if match is None or "/" not in match["name"]:
        return None
    prefix = max((source for source in sources if match["name"].startswith(f"{source}/")), key=len, default=None)
    source, name = match["name"].rsplit("/", 1) if prefix is None else (prefix, match["name"][len(prefix) + 1 :])
    return source, name, match["statistic"]


def shown_columns(sample: Mapping[str, object]) -> list[str]:
    """Returns the columns of tables of samples: without those that the title has, and without nested ones."""
    hidden = ("stage", "step", "kind")
    return [name for name, value in sample.items() if name not in hidden and not isinstance(value, Mapping)]


def _rewards(metrics: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """Returns means of rewards and of costs by their names, if they are few, and the number of failures."""
    shown, failures = [], 0.0
    for kind in ("rewards", "costs"):
        keys = [key.split("/") for key in metrics if key.startswith(f"{kind}/")]
        names = [key[1] for key in keys if len(key) == 3 and key[2] == "mean"]
        if 1 < len(names) <= _SHOWN_REWARDS:
            shown += [(name, metrics[f"{kind}/{name}/mean"], ".3f") for name in names]
        failures += sum(metrics["/".join(key)] for key in keys if len(key) == 3 and key[2] == "failures")
    return [*shown, ("failures", failures, ".0f")] if failures else shown


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) >= 100 else decimals(value, ".2f")
    return clean(str(value), 160)
