"""`python -m jrlhf.plan --config C --cluster 16xh100`: the fastest plan on a cluster that need not be there.

With --profile, on the devices at hand: what calls consist of is measured there first, and kept for plan=auto.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml

from jrlhf.config import load_config
from jrlhf.errors import UserError

DONE, BAD_INPUT = 0, 2
SECONDS = 20.0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jrlhf.plan", description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML file, or the name of a shipped config: quickstart")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the file's: seed=1")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cluster", help="its devices: 16xh100, v5p-512")
    where.add_argument("--profile", action="store_true", help="the devices at hand, measured: minutes, the first time")
    parser.add_argument("--seconds", type=float, help=f"to search, {SECONDS:g} by default")
    parser.add_argument("--proposals", type=int, help="plans to look at, which makes a result a function of the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hypothetical", action="store_true", help="also plans with pipelines, which do not run")
    parser.add_argument(
        "--overlap", action="store_true", help="let iterations overlap, which a run, that reads metrics, does not"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the timeline as SVG or PNG")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the plan as YAML, for plan=FILE of a config")
    return parser.parse_intermixed_args(arguments)


def cli(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 done, 2 bad input."""
    options = _arguments(arguments)
    try:
        _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (KeyboardInterrupt, BrokenPipeError):
        return DONE
    return DONE


def _run(options: argparse.Namespace) -> None:
    from jrlhf.devices import select
    from jrlhf.launch import architectures
    from jrlhf.meshes.hardware import cluster
    from jrlhf.planning.activations import Backend
    from jrlhf.planning.auto import measure_here, prices_here
    from jrlhf.planning.describe import describe
    from jrlhf.planning.from_config import workload_of
    from jrlhf.planning.memory import call_bytes
    from jrlhf.planning.plot import check_ending, plot
    from jrlhf.planning.search import Budget, search
    from jrlhf.planning.times import Estimator

    for name in ("seconds", "proposals"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value} must be more than 0")
    if options.plot is not None:
        check_ending(options.plot)
    config = load_config(options.config, options.overrides)
    workload = workload_of(config, architectures(config))
    if options.profile:
        here = select(config.device)
        print(f"measured: {measure_here(workload, here, say=_say)}", file=sys.stderr)
        devices, prices = prices_here(config, workload, here)
    else:
        try:
            devices = cluster(options.cluster)
        except ValueError as error:
            raise UserError(f"--cluster {options.cluster}: {error}") from error
        platform = "tpu" if devices.hardware.name.startswith("v") else "gpu"
        backend = Backend(platform, config.compute.attention)
        prices = Estimator(workload, devices, bytes_of=partial(call_bytes, backend=backend))
    seconds = SECONDS if options.seconds is None and options.proposals is None else options.seconds
    result = search(
        workload,
        devices,
        prices,
        Budget(options.proposals, seconds),
        seed=options.seed,
        hypothetical=options.hypothetical,
        lockstep=not options.overlap,
        progress=_progress if sys.stderr.isatty() else None,
    )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(describe(workload, devices, prices, result))
    if options.plot is not None:
        title = f"{workload.graph.name} on {devices.devices} x {devices.hardware.name}"
        plot(result.best.simulation, title, options.plot)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(yaml.safe_dump(result.best.plan.as_dict(), sort_keys=False), encoding="utf-8")


def _say(curve: str) -> None:
    print(f"measuring {curve}", file=sys.stderr, flush=True)


def _progress(proposals: int, seconds: float) -> None:
    print(f"\r{proposals} plans, the best takes {seconds:.4g} s", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli())
