"""Where rollout processes run: what a config or a file of a run's directory asks for, and what is refused."""

from collections.abc import Iterable
from dataclasses import asdict

from jrlhf.config.check import fleet_violations
from jrlhf.config.parse import build, parse_yaml
from jrlhf.config.schema import Config
from jrlhf.config.stages import FleetSection
from jrlhf.errors import UserError
from jrlhf.rollouts.processes.ray_worker import check_package
from jrlhf.rollouts.processes.shared import AVAILABLE
from jrlhf.run.contents import FLEET
from jrlhf.run.directory import run_path
from jrlhf.run.processes import several

Place = tuple[int, str]  # number of a process, and its GPUs as CUDA_VISIBLE_DEVICES; empty: all of its environment


def check_processes(section: FleetSection, platform: str, devices: int) -> None:
    """Refuses processes that this machine cannot run. devices: number per process, that of `actor.generate`."""
    named, listed = f"fleet.workers={section.workers}", f"fleet.devices=[{', '.join(section.devices)}]"
    if not AVAILABLE:
        raise UserError(f"{named} needs the memory files of Linux, which this machine lacks: leave fleet out")
    if several():
        raise UserError(f"{named} serves a trainer of one process, and this run has several: leave fleet out")
    if platform == "tpu":
        raise UserError(f"{named} needs GPUs or CPUs, and a TPU serves one process: leave fleet out")
    if section.engine == "ray" and section.devices:
        raise UserError(f"{listed} has no effect with fleet.engine=ray, which chooses the GPUs: leave it out")
    if section.engine == "ray":
        check_package()
    if platform == "cpu" and section.devices:
        raise UserError(f"{listed} has no effect on a CPU, whose devices are simulated: leave it out")
    uneven = any(len(entry.split(",")) != devices for entry in section.devices or [""])
    if platform == "gpu" and section.engine == "local" and uneven:
        raise UserError(
            f"{listed} must name {devices} GPU(s) for each process, as many as actor.generate has in the plan, and "
            "other ones than the trainer's CUDA_VISIBLE_DEVICES: set it"
        )


def asked_places(config: Config, platform: str, devices: int) -> list[Place]:
    """Returns the places of the processes: those of the file FLEET or, without it, of the config.

    Raises UserError if no such processes can run. devices: number per process.
    """
    path, fleet = run_path(config) / FLEET, config.fleet
    assert fleet is not None
    try:
        text = path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        check_processes(fleet, platform, devices)
        return _places(fleet)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): mend or delete it") from error
    content = parse_yaml(text, str(path))
    given = content if isinstance(content, dict) else {}
    if not {"workers"} <= given.keys() <= {"workers", "devices"} or given["workers"] in (None, "null"):
        raise UserError(f"{path} must have the key workers, for GPUs of this machine also devices, and no others")
    try:
        fleet = build(FleetSection, asdict(fleet) | given, "fleet")
        for sentence in fleet_violations(config, fleet):
            raise UserError(sentence)
        check_processes(fleet, platform, devices)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return _places(fleet)


def _places(section: FleetSection) -> list[Place]:
    return list(enumerate(section.devices or [""] * (section.workers or 1)))


def gpus_of(places: Iterable[Place]) -> set[str]:
    return {gpu.strip() for _, devices in places for gpu in devices.split(",") if gpu}
