"""Whether a plan can be run: what it says of each call against the models, the batch and the devices."""

from collections.abc import Iterable, Mapping, Sequence

from jrlhf.config.check import indivisible, mesh_sizes
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Call, Graph
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import ModelConfig
from jrlhf.planning.slices import nested

SUITED = {"generate": ("generate",), "infer": ("score", "train_tp", "generate"), "train": ("train", "train_tp")}


def check_runs(plan: Plan, config: Config, graph: Graph, models: Mapping[str, ModelConfig], devices: int) -> None:
    """Checks a plan for the calls of the config's algorithm.

    models: role -> architecture, as `launch.architectures` has them.

    Raises:
        UserError: the first thing that cannot be run, with its remedy.
    """
    wanted = {call.name: call for call in graph if has_model(call, config)}
    missing, unknown = wanted.keys() - plan.placements.keys(), plan.placements.keys() - wanted.keys()
    if missing:
        raise UserError(f"{_named(config)} has no place for {_first(wanted, missing)}: add it to its calls")
    if unknown:
        raise UserError(
            f"{_named(config)} has a place for {min(unknown)}, which {graph.name} does not call with a model: leave it "
            f"out; its calls are {', '.join(wanted)}"
        )
    for name, call in wanted.items():
        _check_place(config, call, plan[name], models_of(call.role, config, models), devices)
        _check_rows(config, call, plan[name])
    _check_base(config, wanted.values(), plan, devices)
    check_nested(plan)


def check_nested(plan: Plan) -> None:
    """Refuses devices that overlap in part: between those neither weights nor values move without a host.

    Raises:
        UserError: which two calls, and the nearest devices that do not.
    """
    placed = list(plan.placements.items())
    for index, (name, placement) in enumerate(placed):
        for other, others in placed[:index]:
            one, two = others.devices, placement.devices
            if not nested([one, two]):
                union = Slice(min(one.start, two.start), max(one.stop, two.stop) - min(one.start, two.start))
                raise UserError(
                    f"devices {one} of {other} and {two} of {name} overlap in part: let them be the same, apart, or "
                    f"one within the other, such as {union} and {two}"
                )


def has_model(call: Call, config: Config) -> bool:
    """Whether a call is one of a model, rather than arithmetic or functions."""
    return call.kind != "compute" and not only_functions(call.role, config)


def only_functions(role: str, config: Config) -> bool:
    """Whether no model scores for this role."""
    parts = {"reward": config.rewards, "cost": config.costs}.get(role, ())
    learnt = role == "reward" and "reward_model" in config.stages
    return bool(parts) and not learnt and all(part.function is not None for part in parts)


def on_base(config: Config) -> set[str]:
    """The roles that are adapters on the shared base, or the base itself.

    Of rewards and costs those with an adapter among them: models of their own lie as SCORE stores them.
    """
    if config.lora is None:
        return set()
    shared = {"actor", "reference", "critic", "cost_critic"}
    shared -= {role for role in ("critic", "reference") if getattr(config.roles, role) is not None}
    shared -= set() if config.lora.critic else {"critic"}
    adapters = {"reward": config.rewards, "cost": config.costs}
    shared |= {role for role, parts in adapters.items() if any(part.adapter is not None for part in parts)}
    return shared | ({"reward"} if "reward_model" in config.stages else set())


def models_of(role: str, config: Config, models: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """The architectures that a role computes with."""
    if role == "learner":
        return [models[each] for each in ("actor", "critic") if each in models]
    found = [model for name, model in models.items() if name == role or name.startswith(f"{role} ")]
    adapters = {"reward": config.rewards, "cost": config.costs}.get(role, ())
    return found + [models["actor"] for part in adapters if part.adapter is not None]


def _check_place(config: Config, call: Call, placed: Placement, models: Sequence[ModelConfig], devices: int) -> None:
    named = f"{_named(config)} has {call.name}"
    if placed.devices.stop > devices:
        raise UserError(
            f"{named} on devices {placed.devices}, and there are {devices}, numbered from 0: choose others, or use more"
        )
    if placed.pipeline > 1:
        raise UserError(
            f"{named} in pipeline={placed.pipeline} stages, which can be priced and not run: use fsdp or tensor instead"
        )
    shared = call.role in on_base(config)
    suited = ("generate",) if shared else SUITED[call.kind]
    if placed.layout not in suited:
        whose = f"a {'shared base' if shared else f'call to {call.kind}'}"
        raise UserError(f"{named} in layout={placed.layout}, and {whose} needs {' or '.join(suited)}: choose that")
    for model in models:
        for key, written, size, axis, parts in indivisible(model, placed.fsdp, placed.tensor):
            choices = ", ".join(str(each) for each in range(1, placed.devices.count + 1) if size % each == 0)
            raise UserError(
                f"{named} with {axis}={parts}, which does not divide its model's {key}={written}: choose {axis} from "
                f"{choices}"
            )


def _check_rows(config: Config, call: Call, placed: Placement) -> None:
    stage, section, algorithm = config.algorithm, config.rl, config.rl.algorithm
    named, parts, count = f"{_named(config)} has {call.name}", placed.micro_batches, placed.devices.count
    divisor, over = count * parts, f"{count} device(s)" + (f" x {parts} micro-batches" if parts > 1 else "")
    if call.kind == "train":
        divisor = count * parts * algorithm.minibatches
        over = f"{count} device(s) x {algorithm.minibatches} minibatches x {parts} micro-batches"
    _check_divides(named, f"{stage}.rollout_batch", section.rollout_batch, divisor, over)
    groups, samples, slots = placed.data * placed.fsdp, section.samples, config.rollout.slots
    if call.kind == "generate":
        if placed.micro_batches > 1:
            raise UserError(
                f"{named} in micro_batches={placed.micro_batches}: leave that out, and set rollout.slots, the rows "
                "that decode at a time"
            )
        over = f"{samples} samples of a prompt on {groups} group(s) of devices"
        _check_divides(named, f"{stage}.rollout_batch", section.rollout_batch, samples * groups, over)
        if slots is not None:
            _check_divides(named, "rollout.slots", slots, count, f"{count} device(s)")
            if slots < samples * groups:
                raise UserError(f"{named}, where rollout.slots={slots} has no room for {over}: raise it")
    budget = {"infer": ("compute.score_tokens", config.compute.score_tokens)}
    budget["train"] = (f"{stage}.algorithm.micro_batch_tokens", algorithm.micro_batch_tokens)
    key, tokens = budget.get(call.kind, ("", None))
    if placed.micro_batches > 1 and tokens is not None:
        raise UserError(
            f"{named} in micro_batches={placed.micro_batches}, and {key}={tokens} divides them, too: leave one out"
        )
    if placed.micro_batches > 1 and call.role == "learner":
        raise UserError(f"{named} in micro_batches={placed.micro_batches}, and shared passes are one: leave that out")


def _check_divides(named: str, key: str, number: int, divisor: int, over: str) -> None:
    if number % divisor:
        raise UserError(f"{named}, where {key}={number} does not divide over {over}: choose a multiple of {divisor}")


def _check_base(config: Config, calls: Iterable[Call], plan: Plan, devices: int) -> None:
    """Adapters of one base, and all that is trained of them, are where the base is: everywhere."""
    for call in calls:
        placed = plan[call.name]
        if call.role not in on_base(config):
            continue
        if (placed.devices.count, placed.sizes) != (devices, mesh_sizes(config.mesh, devices)):
            raise UserError(
                f"{_named(config)} has {call.name} on devices {placed.devices}, and what lora adapts is one base on "
                f"all {devices} in the config's mesh, which its roles share: put it there, or set plan=colocate"
            )


def _named(config: Config) -> str:
    return f"plan={config.plan}"


def _first(ordered: Mapping[str, Call], among: set[str]) -> str:
    return next(name for name in ordered if name in among)
