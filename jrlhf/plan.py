"""`python -m jrlhf.plan --config C --cluster 16xh100`: finds the fastest plan on a described cluster.

With --profile, on the present devices: the parts of calls are measured first, and stored for plan=auto.
With --plan FILE, or the name of a usual plan, it predicts that plan without a search.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from jrlhf.algorithms.registry import planned_graph
from jrlhf.config.check import mesh_sizes
from jrlhf.config.load import config_names, load_config, parse_with_settings
from jrlhf.config.places import local
from jrlhf.config.schema import Config
from jrlhf.errors import UserError, exit_code_of_printing, user_errors
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.hardware import cluster as cluster_of
from jrlhf.meshes.plan import Plan
from jrlhf.planning import auto, plans, predict_async, profile, show
from jrlhf.planning.fusion import tiles
from jrlhf.planning.fusion.last_rows import Work
from jrlhf.planning.fusion.updates import fused_prices
from jrlhf.planning.memory import GIB
from jrlhf.planning.resolve import of_one_process
from jrlhf.planning.simulate import Simulation, simulate
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import leave_to_budgets
from jrlhf.ppo.fields import Section
from jrlhf.run.devices import select
from jrlhf.run.files import check_writable
from jrlhf.stages.setup import architectures

SECONDS = 20.0
_FULL = 0.9  # part of a device's memory above which users are told


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jrlhf.plan", description=__doc__)
    shipped = ", ".join(config_names())
    parser.add_argument("--config", required=True, help=f"a YAML file, or the name of a shipped config: {shipped}")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--cluster", help="its devices: 16xh100, v5p-512")
    group.add_argument("--profile", action="store_true", help="measure the local devices; minutes, the first time")
    parser.add_argument("--mean-response", type=float, help="mean number of tokens of a response; default: the maximum")
    spread = "sigma of lognormal response lengths, for asynchronous runs or score_rows; default: 0, all have the mean"
    parser.add_argument("--sigma", type=float, help=spread)
    parser.add_argument("--processes", type=int, help="number of processes of the run; default: one per host")
    usual = "predict this plan instead of searching: a file, colocate, split, standalone or disaggregated"
    parser.add_argument("--plan", metavar="FILE", help=usual)
    parser.add_argument("--seconds", type=float, help=f"seconds of the search; default: {SECONDS:g}")
    proposals = "number of plans to try, rounded up to whole turns; then the result depends only on the seed"
    parser.add_argument("--proposals", type=int, help=proposals)
    parser.add_argument("--seed", type=int, default=0, help="the random numbers of the search; default: 0")
    parser.add_argument(
        "--hypothetical",
        action="store_true",
        help="the search also tries stages of scores, and stages of rollouts, which no run executes",
    )
    overlap = "let iterations overlap; runs do not, because they read the metrics of each iteration"
    parser.add_argument("--overlap", action="store_true", help=overlap)
    parser.add_argument("--plot", metavar="FILE", help="the timeline as SVG or PNG")
    parser.add_argument("--save", metavar="FILE", help="the plan as YAML, for plan=FILE of a config")
    return parse_with_settings(parser, arguments)


def cli(arguments: Sequence[str] | None = None) -> int:
    return exit_code_of_printing(partial(_run, _arguments(arguments)))


def _run(options: argparse.Namespace) -> None:
    for name in ("plot", "save"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, local(f"--{name}", path))
            check_writable(f"--{name} {path}", getattr(options, name))
    if options.plot is not None:
        show.check_picture(options.plot)
    config = load_config(options.config, options.overrides)
    if config.algorithm is None and options.save is not None:
        raise UserError(f"--save {options.save} has no effect with {_unplanned(config)}: leave it out")
    say = partial(print, file=sys.stderr, flush=True)
    with user_errors():
        search = Search(**{item.name: getattr(options, item.name) for item in fields(Search)})
    planned = make_plan(config, search, say=say, progress=_progress if sys.stderr.isatty() else None)
    print(planned.text)
    for path, write in ((options.plot, planned.plot), (options.save, planned.save)):
        if path is not None:
            with _writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
    planned.check()


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another place") from error


@dataclass(frozen=True)
class Planned:
    """A plan of a config on a cluster, with its prediction. `str` gives a table of its calls and a timeline.

    prices: the seconds and bytes of the workload's calls on the cluster. outcome: the simulated plan. text: the
    command's output. problem: why no run can use the plan; empty if one can. asynchronous: the prediction for
    asynchronous training.
    """

    config: Config
    prices: CostModel
    outcome: Simulation
    text: str
    problem: str = ""
    asynchronous: predict_async.Prediction | None = None
    rollouts: Callable[[], Mapping[str, Sequence[Work]]] = dict  # examples by call, where rows are scored early

    @property
    def plan(self) -> Plan:
        """Call -> devices, layout, mesh and micro-batches."""
        return self.outcome.plan

    @property
    def seconds(self) -> float:
        """Seconds of an iteration; in asynchronous training, from update to update."""
        return self.outcome.seconds if self.asynchronous is None else self.asynchronous.seconds

    @property
    def peak(self) -> float:
        """Bytes on the fullest device."""
        return self.outcome.peak

    def plot(self, path: str | Path) -> None:
        """Draws the timeline into an SVG, PNG or PDF."""
        path = local("path", path)
        show.check_picture(path)
        workload, cluster = self.prices.workload, self.prices.cluster
        title = f"{workload.graph.name} on {cluster.devices} x {cluster.hardware.name}"
        with _writing(path):
            tables = show.tables(workload, self.plan, self.prices.per_process)
            show.plot(self.outcome, title, path, tables, self.rollouts())

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, for `plan: FILE` of a config."""
        text = leave_to_budgets(self.config, self.prices.workload.graph, self.plan).to_yaml()
        with _writing(path):
            local("path", path).write_text(text, encoding="utf-8")

    def check(self) -> None:
        """Raises UserError if no run can use the plan: it does not fit, or a call spans parts of several processes."""
        if self.problem:
            raise UserError(self.problem)

    def __str__(self) -> str:
        return f"{self.text}\n{self.problem}".strip()


@dataclass(frozen=True)
class Search(Section):
    """The cluster, and the budget of the search. With proposals the result depends only on the seed."""

    cluster: str | None = None  # the devices, such as "16xh100"; None: the present devices, measured
    mean_response: float | None = None  # tokens; None: the maximum
    sigma: float | None = None  # deviation of log response lengths, if asynchronous or with score_rows; None: 0
    processes: int | None = None  # number of processes of the run; None: one per host of the cluster
    plan: str | None = None  # a file, or the name of a usual plan, which is predicted without a search
    seconds: float | None = None
    proposals: int | None = None  # plans to price, rounded up to whole turns
    seed: int = 0
    hypothetical: bool = False  # also try stages of scores, and stages of rollouts, which no run executes
    overlap: bool = False  # let iterations overlap, which runs do not, because they read metrics


def make_plan(
    config: Config, search: Search, *, say: Callable[[str], None], progress: Callable[[int, float], None] | None = None
) -> Planned:
    """Searches for the fastest plan of a config, or predicts the given one; see docs/plans.md.

    say: called with lines about measurements. progress: called with (number of plans, seconds of the best).
    """
    _check_options(config, search)
    setting, sigma = _setting(config, search, say), search.sigma or 0.0
    prices = replace(setting.prices, processes=_processes(config, search, setting.prices.cluster))
    if search.plan is not None:
        prices, outcome, lines = _given(config, search, prices)
    elif config.asynchronous is not None and config.fleet is None:
        prices, outcome, lines = _divided(setting, prices, sigma)
    else:
        prices, outcome, lines = _searched(setting, search, prices, say, progress)
    more, rollouts = _tiled(config, search, prices, outcome.plan, sigma)
    lines += more
    asynchronous = None
    if config.asynchronous is not None:
        predictions = predict_async.alternatives(config, prices, outcome, sigma)
        lines += ["", *predict_async.describe(config, prices, predictions, sigma)]
        asynchronous = predictions[0]
    lines += _remarks(config, search, prices, outcome)
    problem = _problem(config, prices, outcome)
    return Planned(config, prices, outcome, "\n".join(lines), problem, asynchronous, rollouts)


def _processes(config: Config, search: Search, cluster: Cluster) -> int:
    """Returns the number of processes of the run: the given one, or one for each host of a described cluster."""
    if search.processes is not None and (search.processes < 1 or cluster.devices % search.processes):
        raise UserError(
            f"processes={search.processes} must divide the {cluster.devices} devices: each has equally many"
        )
    return search.processes or (1 if search.cluster is None or of_one_process(config) else cluster.hosts)


_Priced = tuple[CostModel, Simulation, list[str]]  # the prices of a plan, the simulated plan, and lines about it


def _given(config: Config, search: Search, prices: CostModel) -> _Priced:
    """Predicts the plan that the options name."""
    devices = prices.cluster.devices
    if search.cluster is not None and search.plan in plans.NAMES:
        mesh_sizes(config.mesh, devices, simulates=False)
    with user_errors():
        config = replace(config, plan=search.plan)
    plan = plans.plan_of_config(config, prices.workload, devices)
    prices = fused_prices(prices, plan)
    outcome = simulate(prices.workload.graph, plan, prices, lockstep=not search.overlap)
    return prices, outcome, [show.describe_plan(prices, outcome)]


def _divided(setting: auto.Setting, prices: CostModel, sigma: float) -> _Priced:
    """Finds the fastest division of the devices between rollouts and training."""
    divisions = predict_async.choose(setting, sigma)
    lines = [show.describe_plan(prices, divisions[0].outcome), "", "divisions of the devices, the fastest first:"]
    return prices, divisions[0].outcome, lines + predict_async.table(divisions)


def _searched(
    setting: auto.Setting,
    search: Search,
    prices: CostModel,
    say: Callable[[str], None],
    progress: Callable[[int, float], None] | None,
) -> _Priced:
    """Searches for the fastest plan."""
    seconds = SECONDS if search.seconds is None and search.proposals is None else search.seconds
    if progress is None:
        say("searching" if seconds is None else f"searching for {seconds:g} seconds")
    result = setting.search(
        processes=prices.processes,
        lockstep=not search.overlap,
        hypothetical=search.hypothetical,
        proposals=search.proposals,
        seconds=seconds,
        seed=search.seed,
        progress=progress,
    )
    if progress is not None:
        print(file=sys.stderr)
    workload, plan = prices.workload, result.best.plan
    prices = fused_prices(prices, plan)
    lines = [show.describe(prices, result)]
    if shared := [call.name for call in workload.calls if workload.on_base(call.role)]:
        mesh = zip(("data", "fsdp", "tensor"), plan[shared[0]].stored, strict=True)
        lines.append(f"a base under adapters is in the mesh: {' '.join(f'mesh.{axis}={n}' for axis, n in mesh)}")
    return prices, result.best, lines


def _tiled(
    config: Config, search: Search, prices: CostModel, plan: Plan, sigma: float
) -> tuple[list[str], Callable[[], Mapping[str, Sequence[Work]]]]:
    """Returns lines about rows that are scored while others decode, and `Planned.rollouts`."""
    if config.compute.score_rows is None:
        return [], dict
    lines, lengths = list[str](), predict_async.lengths_of_a_new_run(prices.workload)
    if search.mean_response is not None:
        lengths = predict_async.assumed_lengths(prices.workload, sigma)
    if config.compute.score_rows == "auto":
        rows, line = tiles.choose_tiles(config, prices.workload, plan, lengths, lambda: prices)
        config = tiles.with_tiles(config, rows)
        lines += ["", line]
    if config.compute.score_rows is None:
        return lines, dict
    lines += ["", *tiles.describe(config, prices, plan, lengths)]
    return lines, partial(tiles.examples, config, prices, plan, lengths)


def _remarks(config: Config, search: Search, prices: CostModel, outcome: Simulation) -> Iterator[str]:
    """Yields warnings: the run has one process and the cluster several hosts, or the devices are nearly full."""
    alone, hosts = of_one_process(config), prices.cluster.hosts
    if alone and search.cluster is not None and hosts > 1:
        yield (
            f"{alone} is for runs of one process, which has the devices of one host, and {search.cluster} has "
            f"{hosts} hosts: this is a prediction only"
        )
    if config.device.memory is None and _FULL * prices.capacity < outcome.peak <= prices.capacity:
        yield (
            "the fullest device has less than a tenth of its memory free, and predictions err by some percent: "
            f"device.memory={_FULL * prices.capacity / GIB:.3g} admits only plans that leave a tenth free"
        )


def _problem(config: Config, prices: CostModel, outcome: Simulation) -> str:
    """Returns why no run can use the plan; "" if one can."""
    devices, processes = prices.cluster.devices, prices.processes
    try:
        plans.refuse_cross_process(outcome.plan, [number * processes // devices for number in range(devices)])
        auto.check_fits(config, prices, outcome)
    except UserError as error:
        return str(error)
    return ""


def _setting(config: Config, search: Search, say: Callable[[str], None]) -> auto.Setting:
    """Returns the config on the described cluster, or on the present devices, which are measured."""
    graph, mean = planned_graph(config), search.mean_response
    if search.cluster is None:
        here = select(config.device)
    else:
        with user_errors():
            here = cluster_of(search.cluster)
    setting = auto.Setting(config, graph, architectures(config), here, mean)
    if mean is not None and not 1 <= mean <= setting.workload.response:
        raise UserError(f"mean_response={mean:g} must be from 1 to data.max_response={setting.workload.response}")
    if not isinstance(here, Cluster):
        path = profile.default_path(here)
        earlier, measuring = profile.load(path), lambda part: say(f"measuring {part}")
        profile.save(profile.measure(setting.workload, here, profile=earlier, say=measuring), path)
        say(f"measured: {path}")
    return setting


def _check_options(config: Config, search: Search) -> None:
    """Refuses options that have no effect with the config, or that it cannot have."""
    sigma, alone, plan = search.sigma, of_one_process(config), search.plan
    if "dpo" in config.stages and config.algorithm is None and config.dpo.pipeline is not None:
        raise UserError("dpo.pipeline has no place in a search of plans: leave it out; --dry-run predicts its memory")
    for name, value in (("seconds", search.seconds), ("proposals", search.proposals)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}={value} must be more than 0 and finite")
        if value is not None and plan is not None:
            raise UserError(
                f"{name}={value} (--{name}) has no effect with plan={plan}, which searches for nothing: leave one out"
            )
    if config.algorithm is None and plan is not None:
        raise UserError(f"plan={plan} has no effect with {_unplanned(config)}: leave it out")
    key = "" if config.asynchronous is None else f"{config.algorithm}.asynchronous"
    if sigma is not None and not key and config.compute.score_rows is None:
        settings = "asynchronous training or compute.score_rows"
        raise UserError(f"sigma={sigma:g} has no effect without {settings}: leave it out")
    if sigma is not None and not 0 <= sigma <= 3:
        raise UserError(f"sigma={sigma:g} must be from 0 to 3")
    if sigma and search.mean_response is None:
        raise UserError(f"sigma={sigma:g} needs mean_response: without it all responses have the greatest length")
    if alone and search.processes not in (None, 1):
        raise UserError(f"processes={search.processes}: {alone} is for runs of one process, leave one of them out")
    if not key or config.fleet is not None:
        return
    if search.overlap:
        raise UserError(f"overlap=True has no effect with {key}, whose updates run beside rollouts: leave it out")
    for name in ("seconds", "proposals", "hypothetical") if plan is None else ():
        if value := getattr(search, name):
            raise UserError(
                f"{name}={value} (--{name}) has no effect with {key}, whose divisions of the devices are few and all "
                "priced: leave it out"
            )


def _unplanned(config: Config) -> str:
    return f"stages=[{', '.join(config.stages)}], which run by no plan"


def _progress(proposals: int, seconds: float) -> None:
    print(f"\r{proposals} plans, the best takes {seconds:.4g} s", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli())
