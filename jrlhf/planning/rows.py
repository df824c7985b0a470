"""Whether a placement can divide the rows of a call, and what to change if it cannot."""

from collections.abc import Iterator

from jrlhf.meshes.graph import Call
from jrlhf.meshes.plan import Placement
from jrlhf.models.config.divisors import divisors
from jrlhf.planning.workload import Workload


def undivided_rows(workload: Workload, call: Call, placement: Placement) -> Iterator[str]:
    """Yields the reasons why a placement cannot divide the rows, each with a remedy.

    Every device must get equally many rows in every minibatch and micro-batch. A group of devices that generates gets
    whole prompts, with all their samples.
    """
    parts, groups, slots = placement.micro_batches, placement.data * placement.fsdp, workload.slots
    count = groups * placement.tensor  # the stages of a pipeline share their rows
    devices, samples = f"{count} device(s)", workload.samples * groups
    prompts = f"{workload.samples} samples of a prompt on {groups} group(s) of devices"
    match call.kind:
        case "train":
            over = f"{devices} x {workload.minibatches} minibatches x {parts} micro-batches"
            rules = [(workload.rows_key, workload.rows, count * parts * workload.minibatches, over)]
            if "estimator.pairs_of_group" in [other.name for other in workload.graph]:
                pairs = f"{workload.samples} samples for each pair on {devices}"
                rules.append((workload.rows_key, workload.rows, workload.samples * count, pairs))
        case "generate":
            rules = [(workload.rows_key, workload.rows, count, devices)]
            rules.append((workload.rows_key, workload.rows, samples, prompts))
            if slots is not None:
                rules.append(("rollout.slots", slots, placement.devices.count, devices))
        case _:
            over = devices + (f" x {parts} micro-batches" if parts > 1 else "")
            rules = [(workload.rows_key, workload.rows, count * parts, over)]
            if call.kind == "infer" and isinstance(workload.score_rows, int):
                rules.append(("compute.score_rows", workload.score_rows, count * parts, over))
    choices = parts if call.kind == "train" else 1
    yield from (_undivided(*rule, choices, workload.parts_key) for rule in rules if rule[1] % rule[2])
    if call.kind == "generate" and slots is not None and slots < samples:
        yield f"rollout.slots={slots} has no room for {prompts}: raise it"


def stuck_rows(workload: Workload, call: Call, placement: Placement) -> str | None:
    """Returns the reason why a rollout's last rows cannot move to fewer groups of devices, with a remedy; else None."""
    groups, last = placement.groups, workload.last_groups
    if call.kind != "generate" or last is None:
        return None
    if last == "auto":
        return "is one group of devices: rollout.last_groups=auto has no effect, leave it out" if groups == 1 else None
    if last < groups and groups % last == 0:
        return None
    fewer = ", ".join(map(str, divisors(groups)[:-1]))
    remedy = f"take {' or '.join(fewer.rsplit(', ', 1))}, or leave it out" if fewer else "leave it out"
    return (
        f"has {groups} group(s) of {placement.tensor} device(s), and the last rows cannot move to "
        f"rollout.last_groups={last} of them: {remedy}"
    )


def _undivided(key: str, rows: int, divisor: int, over: str, parts: int, parts_key: str) -> str:
    """Returns a sentence on rows that `divisor` does not divide. parts: the micro-batches in it, which may be fewer."""
    fewer = next((some for some in range(parts - 1, 0, -1) if rows % (divisor // parts * some) == 0), None)
    other = "" if fewer is None else f", or take {parts_key}={fewer}"
    return f"{key}={rows} does not divide over {over}: choose a multiple of {divisor}{other}"
