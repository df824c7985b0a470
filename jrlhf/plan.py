"""`python -m jrlhf.plan --config C --cluster 16xh100`: the fastest plan on a cluster that need not be there.

With --profile, on the devices at hand: what calls consist of is measured there first, and kept for plan=auto.
With --plan FILE, or the name of a usual one, what that plan takes; nothing is searched for.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jrlhf.config import load_config, parse_with_settings
from jrlhf.errors import UserError, exit_code_of_printing
from jrlhf.run.files import check_writable

SECONDS = 20.0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jrlhf.plan", description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML file, or the name of a shipped config: quickstart")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--cluster", help="its devices: 16xh100, v5p-512")
    group.add_argument("--profile", action="store_true", help="the devices at hand, measured: minutes, the first time")
    parser.add_argument("--mean-response", type=float, help="tokens of a response in the mean; default: the maximum")
    parser.add_argument("--processes", type=int, help="of the run; by default one a host of the cluster")
    parser.add_argument("--plan", metavar="FILE", help="price this one: a file, colocate, split or standalone")
    parser.add_argument("--seconds", type=float, help=f"to search, {SECONDS:g} by default")
    parser.add_argument("--proposals", type=int, help="plans to look at, which makes a result a function of the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hypothetical", action="store_true", help="also plans with pipelines, which do not run")
    overlap = "let iterations overlap, which a run, that reads metrics, does not"
    parser.add_argument("--overlap", action="store_true", help=overlap)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the timeline as SVG or PNG")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the plan as YAML, for plan=FILE of a config")
    return parse_with_settings(parser, arguments)


def cli(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    return exit_code_of_printing(partial(_run, _arguments(arguments)))


def _run(options: argparse.Namespace) -> None:
    from jrlhf.algorithms.registry import planned_graph
    from jrlhf.config.check import mesh_sizes
    from jrlhf.meshes.hardware import cluster
    from jrlhf.planning import auto, fit, plans, show
    from jrlhf.planning.search import Found
    from jrlhf.planning.simulate import simulate
    from jrlhf.planning.workload import without_budgeted, workload_of
    from jrlhf.run.devices import select
    from jrlhf.stages.setup import architectures

    _check_options(options)
    if options.plot is not None:
        show.check_picture(options.plot)
    config = load_config(options.config, options.overrides)
    for name in ("plan", "save") if config.algorithm is None else ():
        if (value := getattr(options, name)) is not None:
            what = f"stages=[{', '.join(config.stages)}], which run by no plan"
            raise UserError(f"--{name} {value} has no effect with {what}: leave it out")
    models = architectures(config)
    graph = planned_graph(config)
    workload, mean = workload_of(config, graph, models), options.mean_response
    if mean is not None:
        if not 1 <= mean <= workload.response:
            raise UserError(f"--mean-response {mean:g} must be from 1 to data.max_response={workload.response}")
        workload = replace(workload, mean_response=mean)
    if options.profile:
        here, say = select(config.device), partial(print, "measuring", file=sys.stderr, flush=True)
        print(f"measured: {auto.measure_here(workload, here, say)}", file=sys.stderr)
        devices, prices = auto.prices_here(config, workload, here)
    else:
        try:
            devices = cluster(options.cluster)
        except ValueError as error:
            raise UserError(f"--{error}") from error
        prices = auto.prices_of(config, workload, devices)
    processes = (1 if options.profile else devices.hosts) if options.processes is None else options.processes
    if options.processes is not None and (processes < 1 or devices.devices % processes):
        raise UserError(f"--processes {processes} must divide the {devices.devices} devices: each has equally many")
    seconds = SECONDS if options.seconds is None and options.proposals is None else options.seconds
    lockstep, terminal = not options.overlap, sys.stderr.isatty()
    if options.plan is None:
        measured = lambda changed, workload, _: auto.prices_here(changed, workload, here)[1]  # noqa: E731
        setting = auto.Setting(config, graph, models, devices, measured if options.profile else auto.prices_of, mean)
        result = setting.search(
            prices,
            grows=not options.profile,
            proposals=options.proposals,
            seconds=seconds,
            seed=options.seed,
            hypothetical=options.hypothetical,
            lockstep=lockstep,
            processes=processes,
            progress=_progress if terminal else None,
        )
        outcome = result.best
        if terminal:
            print(file=sys.stderr)
        print(show.describe(workload, devices, prices, result))
        if processes > 1:
            print(f"{processes} processes run every call on all devices; --processes 1 shows what slices would gain")
        for name in [call.name for call in workload.calls if workload.on_base(call.role)][:1]:
            data, fsdp, tensor = outcome.plan[name].sizes
            print(f"a base under adapters is in the mesh: mesh.data={data} mesh.fsdp={fsdp} mesh.tensor={tensor}")
    else:
        if not options.profile and options.plan in plans.NAMES:
            mesh_sizes(config.mesh, devices.devices, simulates=False)
        plan = plans.plan_of_config(replace(config, plan=options.plan), workload, devices.devices)
        outcome = Found(plan, simulate(workload.graph, plan, prices, lockstep=lockstep))
        print(show.describe_plan(workload, devices, prices, outcome))
    if options.plot is not None:
        title = f"{workload.graph.name} on {devices.devices} x {devices.hardware.name}"
        _write("plot", options.plot, partial(show.plot, outcome.simulation, title))
    if options.save is not None:
        text = plans.plan_yaml(without_budgeted(config, graph, outcome.plan))
        _write("save", options.save, lambda path: path.write_text(text, encoding="utf-8"))
    process_of = [number * processes // devices.devices for number in range(devices.devices)]
    plans.refuse_cross_process(outcome.plan, process_of)
    fit.check_fits(config, workload, outcome.plan, prices, prices.backend)


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"--{option} {path} cannot be written ({error.strerror}): choose another place") from error


def _check_options(options: argparse.Namespace) -> None:
    for name in ("seconds", "proposals"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} {value} must be more than 0 and finite")
        if value is not None and options.plan is not None:
            raise UserError(f"--{name} {value} has no effect with --plan, which searches for nothing: leave one out")
    for name in ("plot", "save"):
        if (path := getattr(options, name)) is not None:
            check_writable(f"--{name} {path}", path)


def _progress(proposals: int, seconds: float) -> None:
    print(f"\r{proposals} plans, the best takes {seconds:.4g} s", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli())
