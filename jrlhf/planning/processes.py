"""Which plans several processes can run."""

from collections.abc import Sequence

from jrlhf.errors import UserError
from jrlhf.meshes.plan import Plan


def refuse_cross_process(plan: Plan, process_of: Sequence[int]) -> None:
    """Lets pass a plan that the processes of a run can run: any where they are one, and of several processes
    a plan that has every call on one slice, with devices of each of them.

    JAX moves arrays between the devices of different processes only inside a program that all of those run. From one
    set of devices to another an array is copied outside of any program, for which JAX needs a transfer server beside
    every process (jax_cross_host_transfer_socket_address) and processes that hold arrays of which they have no shard.

    process_of: of every device, in the order in which the plan numbers them, the number of its process.

    Raises:
        UserError: the plan puts a call where a process has no device, or two calls on different slices.
    """
    processes = sorted(set(process_of))
    if len(processes) == 1:
        return
    remedy = "use plan=colocate, or run in one process"
    first, slice_of_first = None, None
    for call, placement in plan.placements.items():
        place = placement.devices
        present = set(process_of[place.start : place.stop])
        if absent := [process for process in processes if process not in present]:
            raise UserError(
                f"plan {plan.name} runs {call} on devices {place}, of which process {absent[0]} of {len(processes)} "
                f"has none, and JAX cannot bring arrays to or from there between two programs: {remedy}"
            )
        if first is None:
            first, slice_of_first = call, place
        elif place != slice_of_first:
            raise UserError(
                f"plan {plan.name} runs {first} on devices {slice_of_first} and {call} on {place}, and JAX cannot "
                f"bring arrays from one to the other where they belong to {len(processes)} processes: {remedy}"
            )
