"""`Workload`: each role's models and the sizes of one iteration, from which memory and time are predicted."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct

from jrlhf.config.places import expanded
from jrlhf.config.schema import Config
from jrlhf.config.stages import optimizers_of
from jrlhf.errors import user_errors
from jrlhf.meshes.graph import Call, Graph, Kind
from jrlhf.meshes.plan import LayoutName, Plan
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.flops import attention_operations, head_weights, layer_weights, lora_weights
from jrlhf.models.hf.adapters import read_adapter_config
from jrlhf.models.lora import LoRAConfig, adapter_weights
from jrlhf.models.params import nested
from jrlhf.models.remat import Remat
from jrlhf.models.weights import HeadKind, WeightInfo, weights
from jrlhf.roles.graph import LEARNER
from jrlhf.roles.pretrained import adapter_of

if TYPE_CHECKING:
    from jrlhf.algorithms.own_optimizers import StateSizes

# The layouts that each kind of call can use; the first is the default. "compute": the model is only stored meanwhile.
LAYOUTS: dict[str, tuple[LayoutName, ...]] = {
    "generate": ("generate",),
    "infer": ("score", "train_tp"),
    "train": ("train", "train_tp"),
    "compute": ("train",),
}

# Elementwise work reads and writes more than a perfect fusion would, partly in float32: a trace of training on an H200
# showed 309 GB where `Numbers.traffic` without this factor counts 188.
_UNFUSED = 1.6


@dataclass(frozen=True)
class RoleModel:
    """One model of a role.

    trained: it has an optimizer state and float32 weights. A frozen model's matrices are in the compute dtype.
    lora: the model is an adapter on a base that all such roles share.
    is_base: the model is that base itself, without an adapter.
    int8: the layers of the base are stored as int8.
    wide: a frozen model with float32 weights, such as a reward model that the run has trained.
    state: of a trained model, what its optimizer stores; None: the two moments of AdamW.
    """

    config: ModelConfig
    head: HeadKind
    trained: bool
    lora: LoRAConfig | None = None
    is_base: bool = False
    int8: bool = False
    wide: bool = False
    state: "StateSizes | None" = None

    @property
    def shared(self) -> bool:
        """Whether the model computes with the shared base."""
        return self.lora is not None or self.is_base

    @cached_property  # counted once a model: a search asks for these thousands of times
    def numbers(self) -> "Numbers":
        return Numbers(self)


def weights_of(model: ModelConfig, head: HeadKind, lora: LoRAConfig | None, tensor: int = 1) -> tuple[WeightInfo, ...]:
    """Returns a model's own weights: all, or those of its adapter."""
    return weights(model, head, tensor) if lora is None else adapter_weights(model, lora, head, tensor)


class Numbers:
    """Sizes of a model from which its costs are computed.

    layer: weights in the matrices of a layer. head: weights of the head. adapters: weights of a layer's adapters.
    total: weights in all matrices. trained: weights that an update changes. cache: numbers of a position and layer in
        the KV cache. per_pair: operations of attention for a pair of positions in a layer.
    """

    def __init__(self, model: RoleModel):
        config = self._config = model.config
        self.layer = layer_weights(config) / config.layers
        self.head = head_weights(config, model.head)
        self.adapters = 0.0 if model.lora is None else lora_weights(config, model.lora) / config.layers
        table = config.embed * config.padded_vocab
        self.total = layer_weights(config) + table * (1 if model.head == "scalar" or config.tie_embeddings else 2)
        self.trained = self.total if model.lora is None else self.adapters * config.layers
        self.cache = 2.0 * config.kv_heads * config.head_dim
        self.per_pair = 4.0 * config.heads * config.head_dim
        self._local, self._window = sum(config.locality) / config.layers, config.window
        self._wide = 10.0 * config.embed  # two norms, two additions to the residual stream
        heads = 4.0 * (config.heads + config.kv_heads) * config.head_dim  # rotation, and attention's inputs and outputs
        self._sliced = heads + (3.0 if config.gated_mlp else 2.0) * config.mlp

    def attention(self, length: int) -> float:
        """Returns attention's forward operations per token and layer, averaged over rows of `length` and all layers."""
        return attention_operations(self._config, np.array([length])) / (length * self._config.layers)

    def seen(self, positions: float) -> float:
        """Returns how many of the positions before it a token sees, averaged over local and global layers."""
        if self._window is None:
            return positions
        return positions + self._local * (min(positions, self._window) - positions)

    def traffic(self, slices: int) -> float:
        """Returns how many numbers per token elementwise work reads and writes. Slices divide only heads and mlp."""
        return _UNFUSED * (self._wide + self._sliced / slices)


@dataclass(frozen=True)
class Workload:
    """One iteration of an algorithm, or one step of another stage.

    models: by role, for roles whose calls use a model. A role may have several: a fused update trains actor and critic
        in one program, and a sum of reward models scores with each.
    rows: responses of an iteration. samples: responses to each prompt. rows_key, parts_key: the settings for the rows
        and for the parts of an update, for messages.
    prompt, response: widths of the token arrays. mean_prompt, mean_response: average lengths.
    slots: rows that decode at a time, None for all. chunk: steps of one decode program, None for all. prefill: as in
        `models.Schedule`. last_groups, score_rows: as in the config.
    spanned: the kinds of calls in which a policy's head predicts responses only, not prompts.
    recomputed_stages: stages compute as in a run: the backward operation computes the forward pass again, and scoring
        begins with copies of weights.
    """

    graph: Graph
    models: Mapping[str, tuple[RoleModel, ...]]
    rows: int
    prompt: int
    response: int
    mean_prompt: float
    mean_response: float
    samples: int = 1
    epochs: int = 1
    minibatches: int = 1
    slots: int | None = None
    chunk: int | None = None
    prefill: int | None = None
    last_groups: int | Literal["auto"] | None = None
    score_rows: int | Literal["auto"] | None = None
    dtype: Any = jnp.dtype(jnp.float32)
    remat: Remat = "full"
    fused_loss: bool = True
    spanned: tuple[Kind, ...] = ("infer", "train")
    recomputed_stages: bool = True
    rows_key: str = "rows"
    parts_key: str = "micro_batches"

    @property
    def length(self) -> int:
        """T: the width of a batch of tokens."""
        return self.prompt + self.response

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def calls(self) -> list[Call]:
        """The calls that use a model. Only these have a placement."""
        return [call for call in self.graph if self.has_model(call)]

    def has_model(self, call: Call) -> bool:
        return call.kind != "compute" and call.role in self.models

    def on_base(self, role: str) -> bool:
        """Whether a role computes with the base that adapters share."""
        return any(model.shared for model in self.models.get(role, ()))

    def layouts(self, call: Call) -> tuple[LayoutName, ...]:
        """The layouts that the call can use. The shared base is always stored in GENERATE."""
        return ("generate",) if self.on_base(call.role) else LAYOUTS[call.kind]

    def rows_of(self, call: Call) -> int:
        """The rows that a call computes: twice as many where one pass scores an adapter and its bare base."""
        return self.rows * (2 if call.method == "logprobs_with_base" else 1)


def workload_of(config: Config, graph: Graph, models: Mapping[str, ModelConfig]) -> Workload:
    """Returns the workload of a stage of the config.

    graph: the calls of the stage, with its name. models: role -> architecture: "actor", "critic", "reward NAME", ...

    Mean lengths are the widths of the arrays, because a config does not tell how long answers will be. If prompts are
    continued, the widths of all calls are those of the longest.
    """
    stage, prompt, response = graph.name, config.data.max_prompt, config.data.max_response
    # A token has at least a byte.
    prompt += max((responses * response + size for responses, size in graph.continued), default=0)
    roles = _models_of_roles(config, models, graph)
    workload = partial(
        Workload,
        graph,
        prompt=prompt,
        response=response,
        mean_prompt=float(prompt),
        mean_response=float(response),
        dtype=jnp.dtype(config.compute.dtype),
        remat=config.compute.remat,
        parts_key=f"{config.update_section(stage)[0]}.micro_batches",
    )
    if stage != config.algorithm:
        rows, key = config.sections[stage].batch, f"{stage}.batch"
        if stage == "reward_model":
            policy, reward = roles["actor"][0], roles["reward"][0]
            roles = {"actor": (replace(policy, trained=False, wide=True),), "reward": (replace(reward, trained=True),)}
        if stage != "sft":  # batches of pairs
            rows, key = 2 * rows, f"2 x {key}"
        fused = stage == "sft" and config.compute.fused_loss
        return workload(_with_states(config, stage, roles), rows=rows, rows_key=key, fused_loss=fused, spanned=())
    section, algorithm = config.rl, config.rl.algorithm
    # A fused update's passes also make the experience, so its head is that of a plain forward pass.
    learner = "learner" in graph.roles
    fused = config.compute.fused_loss and not algorithm.couples_tokens and not learner
    spanned = learner or (fused and not algorithm.ptx_coef)  # texts of the pretraining mix have no response
    return workload(
        _with_states(config, stage, roles),
        rows=section.rollout_batch,
        rows_key=f"{stage}.rollout_batch",
        samples=section.samples,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        slots=config.rollout.slots,
        chunk=config.rollout.chunk,
        prefill=config.rollout.prefill,
        last_groups=config.rollout.last_groups,
        score_rows=config.compute.score_rows,
        fused_loss=fused,
        spanned=("infer", "train") if spanned else ("infer",),
    )


def _with_states(
    config: Config, stage: str, roles: Mapping[str, tuple[RoleModel, ...]]
) -> dict[str, tuple[RoleModel, ...]]:
    """Returns the models of a stage's roles with what the optimizers of the trained ones store.

    Raises UserError for an optimizer that cannot train its model.
    """
    optimizers = optimizers_of(stage, config.sections[stage])

    def stateful(model: RoleModel) -> RoleModel:
        key = stage if stage in optimizers else f"{stage}.{'actor' if model.head == 'lm' else 'critic'}"
        if not model.trained or optimizers[key].optimizer == "adamw":
            return model
        from jrlhf.algorithms.own_optimizers import state_sizes

        shapes = {
            w.path: ShapeDtypeStruct(w.shape, jnp.float32) for w in weights_of(model.config, model.head, model.lora)
        }
        return replace(model, state=state_sizes(optimizers[key], key, nested(shapes.items())))

    return {role: tuple(map(stateful, models)) for role, models in roles.items()}


def _models_of_roles(
    config: Config, models: Mapping[str, ModelConfig], graph: Graph
) -> dict[str, tuple[RoleModel, ...]]:
    """Returns the models of the graph's roles; rewards and costs that are adapters have one each."""
    section = config.lora
    lora = None if section is None else adapter_of(section, models["actor"])
    int8 = section is not None and section.base == "int8"
    roles = defaultdict[str, tuple[RoleModel, ...]](tuple)

    def adapted(role: str, adapter: LoRAConfig | None, head: HeadKind, *, trained: bool = False) -> RoleModel:
        return RoleModel(models[role], head, trained, adapter, is_base=adapter is None, int8=int8)

    # Role, head, whether it is trained, and whether it has its own model instead of starting from the policy.
    policies: Sequence[tuple[str, HeadKind, bool, bool]] = (
        ("actor", "lm", True, False),
        ("critic", "scalar", True, config.roles.critic is not None or (section is not None and not section.critic)),
        ("cost_critic", "scalar", True, False),
        ("reference", "lm", False, config.roles.reference is not None),
        *((name, "lm", False, True) for name in config.roles.frozen),
    )
    for role, head, trained, own in policies:
        if role == "reference" and role in models and config.reference_is_base:
            roles[role] += (adapted(role, None, head),)
        elif role in models:
            plain = lora is None or own
            model = RoleModel(models[role], head, trained) if plain else adapted(role, lora, head, trained=trained)
            roles[role] += (model,)
    if "reward_model" in config.stages:
        learned = RoleModel(models["reward"], "scalar", trained=False, wide=True)
        roles["reward"] += (learned if lora is None else adapted("reward", lora, "scalar"),)
    for key, role, part in config.rewards_and_costs if config.algorithm is not None else ():  # used by algorithms only
        if part.adapter is not None:
            with user_errors(f"{key}.adapter={part.adapter}"):
                adapter = read_adapter_config(expanded(part.adapter))
            roles[role] += (adapted("actor", adapter, "scalar"),)
        elif part.model is not None:
            roles[role] += (RoleModel(models[f"{role} {part.name}"], "scalar", trained=False),)
    if LEARNER in graph.roles:
        roles[LEARNER] = roles["actor"] + roles.get("critic", ())
    return {role: roles[role] for role in graph.roles if role in roles}


def with_budgets(config: Config, workload: Workload, plan: Plan) -> Plan:
    """Returns the plan with the micro-batches that token budgets and the batches of reward models lead to."""
    budgets, placements = token_budgets(config, workload.graph.name), {}
    for name, placement in plan.placements.items():
        call, parts = workload.graph[name], placement.micro_batches
        budget = budgets.get(call.kind)
        if call.role in ("reward", "cost") and call.kind == "infer":
            parts = max(parts, _reward_batches(config, call.role, workload.rows))
        elif budget is not None:
            rows = workload.rows // (placement.devices.count * (workload.minibatches if call.kind == "train" else 1))
            parts = max(1, -(-rows * workload.length // budget))
        placements[name] = replace(placement, micro_batches=parts)
    return replace(plan, placements=placements)


def leave_to_budgets(config: Config, graph: Graph, plan: Plan) -> Plan:
    """Returns the plan without micro-batches where a token budget divides the rows."""
    budgets = token_budgets(config, graph.name)
    placements = {
        name: placement if budgets.get(graph[name].kind) is None else replace(placement, micro_batches=1)
        for name, placement in plan.placements.items()
    }
    return Plan(plan.name, placements)


def token_budgets(config: Config, stage: str) -> dict[str, int | None]:
    """Returns kind of call -> the number of tokens that a device computes at a time; None: no limit."""
    _, section = config.update_section(stage)
    return {"train": getattr(section, "micro_batch_tokens", None), "infer": config.compute.score_tokens}


def _reward_batches(config: Config, role: str, rows: int) -> int:
    """Returns the number of batches of a role's loaded reward models. A model that the run trains reads one batch."""
    parts = {"reward": config.rewards, "cost": config.costs}[role]
    if "reward_model" in config.stages or any(part.adapter is not None for part in parts):
        return 1
    return max(1, rows // max((part.batch for part in parts if part.model is not None), default=rows))
