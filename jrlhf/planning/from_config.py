"""What a config asks of its devices in one iteration or step, as a workload."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Call, Graph
from jrlhf.meshes.plan import LayoutName, Placement, Plan
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.hf import read_adapter_config
from jrlhf.models.params import HeadKind
from jrlhf.planning.workload import RoleModel, Workload


def workload_of(config: Config, graph: Graph, models: Mapping[str, ModelConfig]) -> Workload:
    """Returns the workload of one iteration of an RL algorithm, or of one step of another stage.

    Lengths are what arrays are as wide as, on average too: how long answers will be is not in a config.

    models: role -> architecture, as `launch.architectures` finds them: "actor", "critic", "reward NAME", ...
    graph: its name is the stage's.
    """
    stage = graph.name
    compute = {"dtype": jnp.dtype(config.compute.dtype), "remat": config.compute.remat}
    prompt, response = config.data.max_prompt, config.data.max_response
    widths = {"prompt": prompt, "response": response, "mean_prompt": float(prompt), "mean_response": float(response)}
    if stage != config.algorithm:
        held, rows, key = _models(config, models, graph), config.sections[stage].batch, f"{stage}.batch"
        if stage == "reward_model":
            policy, reward = held["actor"][0], held["reward"][0]
            held = {"actor": (replace(policy, trained=False, wide=True),), "reward": (replace(reward, trained=True),)}
        if stage != "sft":
            rows, key = 2 * rows, f"2 x {key}"
        return Workload(graph, held, rows=rows, rows_key=key, fused_loss=False, spanned=(), **widths, **compute)
    section = config.rl
    shared = "learner" in graph.roles  # its passes are those of the experience: the head of a plain forward
    fused = config.compute.fused_loss and section.algorithm.ratio == "token" and not shared
    spanned = shared or (fused and not section.algorithm.ptx_coef)  # as `programs.on_policy_step`, `actor_step`
    return Workload(
        graph,
        _models(config, models, graph),
        rows=section.rollout_batch,
        rows_key=f"{config.algorithm}.rollout_batch",
        samples=section.samples,
        epochs=section.algorithm.epochs,
        minibatches=section.algorithm.minibatches,
        slots=config.rollout.slots,
        chunk=config.rollout.chunk,
        prefill=config.rollout.prefill,
        fused_loss=fused,
        spanned=("infer", "train") if spanned else ("infer",),
        **widths,
        **compute,
    )


def role_models(config: Config, models: Mapping[str, ModelConfig]) -> dict[str, RoleModel]:
    """Every model that a run has, by name: as in `models`, and rewards and costs that are adapters likewise.

    Raises:
        UserError: an adapter cannot be read.
    """
    lora, int8 = _adapter(config), config.lora is not None and config.lora.base == "int8"

    def on_base(role: str, adapter: LoRAConfig | None, head: HeadKind, *, trained: bool = False) -> RoleModel:
        return RoleModel(models[role], head, trained, adapter, is_base=adapter is None, int8=int8)

    def policy_like(role: str, head: HeadKind, *, trained: bool, own: bool) -> RoleModel:
        """A model that begins as the policy, or one of its own."""
        if lora is None or own:
            return RoleModel(models[role], head, trained)
        return on_base(role, lora, head, trained=trained)

    found = {"actor": policy_like("actor", "lm", trained=True, own=False)}
    for role in ("critic", "cost_critic"):
        if role in models:
            own = role == "critic" and (
                config.roles.critic is not None or (config.lora is not None and not config.lora.critic)
            )
            found[role] = policy_like(role, "scalar", trained=True, own=own)
    if "reference" in models:
        own = config.roles.reference is not None
        reference = policy_like("reference", "lm", trained=False, own=own)
        found["reference"] = on_base("reference", None, "lm") if config.reference_is_base else reference
    if "reward_model" in config.stages:
        learnt = RoleModel(models["reward"], "scalar", trained=False, wide=True)
        found["reward"] = learnt if lora is None else on_base("reward", lora, "scalar")
    for role, parts in (("reward", config.rewards), ("cost", config.costs)):
        for index, part in enumerate(parts):
            if part.model is not None:
                found[f"{role} {part.name}"] = RoleModel(models[f"{role} {part.name}"], "scalar", trained=False)
            if part.adapter is not None:
                adapter = _read(part.adapter, f"{role}s[{index}].adapter")
                found[f"{role} {part.name}"] = on_base("actor", adapter, "scalar")
    return found


def _models(config: Config, models: Mapping[str, ModelConfig], graph: Graph) -> dict[str, tuple[RoleModel, ...]]:
    """Role -> its models, of the roles that have calls with any."""
    found: dict[str, tuple[RoleModel, ...]] = {}
    for name, model in role_models(config, models).items():
        role = name.partition(" ")[0]
        found[role] = (*found.get(role, ()), model)
    if "learner" in graph.roles:
        found["learner"] = found["actor"] + found.get("critic", ())
    return {role: found[role] for role in graph.roles if role in found}


def _adapter(config: Config) -> LoRAConfig | None:
    """What the policy trains, where that is an adapter."""
    section = config.lora
    if section is None:
        return None
    if section.path is not None:
        return _read(section.path, "lora.path")
    assert section.rank is not None
    return LoRAConfig(rank=section.rank, alpha=section.alpha, targets=section.targets, rslora=section.rslora)


def _read(path: str, key: str) -> LoRAConfig:
    try:
        return read_adapter_config(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{key}={path}: {error}") from error


def divided(config: Config, workload: Workload, plan: Plan) -> Plan:
    """A plan with the parts into which budgets of tokens, and batches of reward models, divide a device's rows."""
    tokens = token_budgets(config, workload.graph.name)

    def parts(call: Call, placed: Placement) -> int:
        if call.role in ("reward", "cost") and call.kind == "infer":
            return max(placed.micro_batches, _scored_in(config, call.role, workload.rows))
        budget = tokens.get(call.kind)
        if budget is None:
            return placed.micro_batches
        rows = workload.rows // (placed.devices.count * (workload.minibatches if call.kind == "train" else 1))
        return max(1, -(-rows * workload.length // budget))

    placements = {
        name: replace(placed, micro_batches=parts(workload.graph[name], placed))
        for name, placed in plan.placements.items()
    }
    return replace(plan, placements=placements)


def token_budgets(config: Config, stage: str) -> dict[str, int | None]:
    """Kind of call -> the tokens that a device computes at a time, where a budget says so."""
    _, updates = updates_of(config, stage)
    return {"train": getattr(updates, "micro_batch_tokens", None), "infer": config.compute.score_tokens}


def updates_of(config: Config, stage: str) -> tuple[str, Any]:
    """The section that says in how many parts a stage's updates are computed, and its key."""
    section = config.sections[stage]
    return (f"{stage}.algorithm", section.algorithm) if hasattr(section, "algorithm") else (stage, section)


# Of a kind of call: a model that does not compute lies as it is trained.
LAYOUTS: dict[str, LayoutName] = {"generate": "generate", "infer": "score", "train": "train", "compute": "train"}


def _scored_in(config: Config, role: str, rows: int) -> int:
    """Models of their own read so many texts at a time; one that the run learnt reads all of them."""
    parts = {"reward": config.rewards, "cost": config.costs}[role]
    if "reward_model" in config.stages or any(part.adapter is not None for part in parts):
        return 1
    return max(1, rows // max((part.batch for part in parts if part.model is not None), default=rows))
