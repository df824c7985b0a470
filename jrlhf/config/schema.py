"""The configuration of a run: its sections, and how it is found and loaded.

A new setting is one line in one of the dataclasses; `jrlhf.config.parse` reads it, checks it and explains mistakes.
What the sections demand of each other is in `consistency.py`.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from jrlhf.config.parse import (
    Section,
    between,
    build,
    checked,
    count,
    natural,
    non_negative,
    override,
    parse_yaml,
    positive,
    to_yaml,
)
from jrlhf.config.stages import (
    ALGORITHMS,
    DAPOStageConfig,
    DPOStageConfig,
    DrGRPOStageConfig,
    GRPOStageConfig,
    GSPOStageConfig,
    PPOStageConfig,
    ReinforcePPBaselineStageConfig,
    ReinforcePPStageConfig,
    ReMaxStageConfig,
    RewardModelConfig,
    RLOOStageConfig,
    RLStageConfig,
    SafeRLHFStageConfig,
    SFTConfig,
    Stage,
)
from jrlhf.errors import UserError
from jrlhf.models.generation.schedule import Schedule


@dataclass(frozen=True)
class DeviceConfig(Section):
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    simulated: int | None = count(None)  # split the CPU into so many devices, in every process
    memory: float | None = positive(None)  # GiB of a device, to be checked against; null: what an accelerator says

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.simulated is not None and self.platform in ("gpu", "tpu"):
            raise ValueError(
                f"simulated={self.simulated}: it must be null on a {self.platform}: only CPU devices are simulated"
            )


@dataclass(frozen=True)
class DistributedConfig(Section):
    """The processes of a run, all of which run the same program. Where nothing is said, a cluster may say it."""

    # auto: as many as the keys below, JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the cluster
    # that JAX finds say, else one; off: one.
    mode: Literal["auto", "off"] = "auto"
    coordinator: str | None = None  # HOST:PORT of process 0, the same in every process
    processes: int | None = count(None)
    process: int | None = natural(None)  # the number of this one, from 0 on
    timeout: float = checked(300.0, lambda value: value >= 1, "at least 1")  # seconds in which all must have come
    # Seconds after which a process that says nothing is given up, and the run with it.
    heartbeat: float = checked(100.0, lambda value: value >= 1, "at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coordinator is not None and re.fullmatch(r".+:\d+", self.coordinator) is None:
            raise ValueError(f"coordinator={self.coordinator}: it must be HOST:PORT, for instance 10.0.0.1:8476")


@dataclass(frozen=True)
class MeshConfig(Section):
    """Sizes of the mesh axes. At most one is -1: it takes the devices that the others leave."""

    data: int = checked(1, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")
    fsdp: int = checked(-1, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")
    tensor: int = checked(1, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")


@dataclass(frozen=True)
class ModelSection(Section):
    """The actor: a model directory, or fresh weights of these sizes."""

    path: str | None = None  # a Hugging Face directory, a run's directory or a hub name; null: fresh weights
    vocab_size: int = count(1024)
    embed: int = count(128)
    layers: int = count(4)
    heads: int = count(4)
    kv_heads: int = count(2)
    head_dim: int = checked(32, lambda value: value >= 2 and value % 2 == 0, "even: rotary positions turn pairs")
    mlp: int = count(384)
    max_positions: int = count(64)  # the longest sequence, prompt and response together
    rope_theta: float = positive(10_000.0)
    qk_norm: bool = False
    tie_embeddings: bool = True


@dataclass(frozen=True)
class RolesConfig(Section):
    """Directories of the roles that do not start from the actor. Their tokenizer must be the actor's."""

    critic: str | None = None  # null: the reward model that this run learnt, else the actor with a new head
    reference: str | None = None  # null: the actor as it is before reinforcement learning


LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class LoRASection(Section):
    """Low-rank adapters on one frozen base, which serves every role that is the actor's architecture."""

    rank: int | None = count(None)  # null, with path null: all weights are trained
    path: str | None = None  # a PEFT adapter of the actor to start from; it brings its own rank, alpha and targets
    alpha: float = positive(32.0)  # the adapter's output is scaled by alpha / rank
    rslora: bool = False  # by alpha / sqrt(rank) instead
    targets: tuple[LoRATarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    base: Literal["auto", "int8"] = "auto"  # auto: compute.dtype; int8: the layers' matrices, by output channel
    # The critic is an adapter and a head on the same base; false: a model of its own. Safe RLHF's critic of the costs
    # is such an adapter in any case.
    critic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.path is not None:
            raise ValueError(f"rank={self.rank}: it must be null with path={self.path}, whose adapter has its own rank")

    @property
    def on(self) -> bool:
        """Whether adapters are trained rather than all weights."""
        return self.rank is not None or self.path is not None


@dataclass(frozen=True)
class ComputeConfig(Section):
    # Of activations, of the generation copy and of frozen models; weights in training are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # What the backward pass keeps of a layer: its input, on the host or here; attention's output; products; everything.
    remat: Literal["offload", "full", "attention", "products", "gather"] = "full"
    logprob: Literal["reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None  # null: the platform's default
    fused_loss: bool = True  # the policy's loss and its gradient are computed together; false: logits are made twice
    # With a single update a batch: its passes make the experience, too. What all trained models keep exists at once,
    # and the loss is not fused, for the advantages are not known yet.
    shared_passes: bool = False
    attention: Literal["xla", "cudnn", "splash"] | None = None  # of whole sequences; null: the platform's default
    # A device scores about so many tokens at a time, rows of similar length together; null: the whole batch with its
    # padding. Compiles each model that scores up to four times over.
    score_tokens: int | None = count(None)


SLEEP_PARTS = ("optimizer", "actor", "critic", "reference", "reward")  # the keys of what can wait on the host


@dataclass(frozen=True)
class SleepConfig(Section):
    """What of an algorithm's models waits in pinned memory of the host while others compute. Results stay the same."""

    optimizer: Literal["device", "host"] = "device"  # of every role that is trained: brought for its updates only
    actor: Literal["device", "host"] = "device"  # its float32 weights, also while their copy generates
    critic: Literal["device", "host"] = "device"  # of rewards, and of costs
    reference: Literal["device", "host"] = "device"  # the policy as it was, also where only the evaluation needs it
    reward: Literal["device", "host"] = "device"  # all reward models, and cost models
    ahead: bool = False  # a call begins with bringing what the next one needs: less waiting, more memory


@dataclass(frozen=True)
class ColumnsConfig(Section):
    """What a dataset calls its columns, where it is not the name here."""

    prompt: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    messages: str | None = None
    text: str | None = None
    source: str | None = None  # which of several mixed datasets a row is from; measured separately


@dataclass(frozen=True)
class DatasetConfig(Section):
    path: str | None = None  # a file (jsonl, csv, parquet), a directory, or a hub name
    split: str = "train"  # of a directory or a hub dataset that has several
    columns: ColumnsConfig = ColumnsConfig()


@dataclass(frozen=True)
class DataConfig(Section):
    """A built-in task, or datasets, one for each stage that the run has."""

    source: Literal["docstrings", "arithmetic", "datasets"] = "docstrings"
    sft: DatasetConfig = DatasetConfig()  # prompts with completions, conversations or text
    preferences: DatasetConfig = DatasetConfig()  # chosen and rejected answers
    prompts: DatasetConfig = DatasetConfig()  # for reinforcement learning
    heldout: DatasetConfig = DatasetConfig()  # prompts to validate on, in place of rows that are kept apart
    heldout_rows: int = natural(64)  # kept apart from what a stage learns from, to measure with
    chat: bool = False  # prompts that are plain text become a user's turn in the model's chat template
    system: str | None = None  # a system message for conversations that have none
    template: Mapping[str, Any] = field(default_factory=dict)  # what the chat template is told, e.g. enable_thinking
    eos: tuple[str, ...] = ()  # tokens that end a response, in place of those that the model's files name
    max_prompt: int = count(20)  # tokens
    max_response: int = count(24)  # tokens, end of text included
    overlong: Literal["error", "filter", "truncate_left"] = "error"  # what is done with rows longer than that


@dataclass(frozen=True)
class ArithmeticConfig(Section):
    """Sums, worked out one addition at a time: data.source=arithmetic. data.heldout_rows of them are kept apart."""

    terms: int = checked(2, lambda value: value >= 2, "at least 2")
    digits: int = checked(2, lambda value: 1 <= value <= 9, "from 1 to 9")  # of each term
    problems: int = count(3000)  # sums to learn from
    demonstrations: int | None = count(None)  # so many of them have a worked answer, for sft; null: all
    forgotten: float = between(0.0, 0.0, 1.0)  # share of the carries that worked answers leave out
    units_first: bool = False  # numbers in answers are written from their units on, the order in which carries go

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demonstrations is not None and self.demonstrations > self.problems:
            raise ValueError(
                f"demonstrations={self.demonstrations}: it must be at most problems={self.problems}, or null for all"
            )


@dataclass(frozen=True)
class RewardConfig(Section):
    """One reward of the weighted sum: a model directory, or a function that runs in processes of its own."""

    name: str = checked("reward", lambda value: re.fullmatch(r"[\w.-]+", value) is not None, "a word: it names metrics")
    model: str | None = None  # a directory with a sequence classifier of one label, such as a run's reward_model
    adapter: str | None = None  # a PEFT directory of a reward model on the actor's base; it reads the actor's tokens
    function: str | None = None  # package.module:function, file.py:function, or one of jrlhf/rewards/builtin.py
    weight: float = 1.0  # 0: it is measured and logged, and nothing learns from it
    workers: int = count(1)  # processes of a function
    deadline: float = positive(30.0)  # seconds for a batch; a function that takes longer is stopped
    # The score in place of one that a function or a model failed to give; null: a failure ends the run.
    on_failure: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the function, by name
    columns: Mapping[str, Any] = field(default_factory=dict)  # its parameter: the dataset's column, where names differ
    batch: int = count(16)  # rows that a model scores at a time


@dataclass(frozen=True)
class CheckpointConfig(Section):
    keep: int = count(2)  # newest ones; with 1 there is nothing to fall back to


@dataclass(frozen=True)
class ExportConfig(Section):
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of model/; auto: as the weights came, float32 if fresh


@dataclass(frozen=True)
class EvaluationConfig(Section):
    prompts: int = count(256)  # held-out prompts
    samples: int = count(3)  # texts shown while it runs
    # Iterations between validations on them, the first before any; null: at the end only.
    every: int | None = count(None)
    k: int = count(1)  # responses to each prompt in a validation
    temperature: float | None = non_negative(None)  # of a validation; null: that of the rollouts, 0: greedy


@dataclass(frozen=True)
class WandbConfig(Section):
    """Weights & Biases, beside metrics.jsonl and TensorBoard. What fails there neither stops nor slows the run."""

    project: str | None = None  # null: off
    entity: str | None = None  # null: the user's default
    group: str | None = None
    mode: Literal["online", "offline"] = "online"  # offline: into the run's wandb/, for `wandb sync`


@dataclass(frozen=True)
class ProfileConfig(Section):
    """Iterations of a stage that jax.profiler records, each into a directory in the run's profile/."""

    iterations: tuple[int, ...] = checked(
        (), lambda value: all(each >= 1 for each in value), "iterations, the first of which is 1"
    )
    stage: Stage | None = None  # null: the last one


@dataclass(frozen=True)
class Config(Section):
    name: str = checked(
        "quickstart",
        lambda value: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", value) is not None,
        "letters, digits, '.', '_' and '-': it names the run's directory",
    )
    seed: int = checked(0, lambda value: 0 <= value < 2**32, "from 0 to 4294967295")
    run_dir: str = "runs"
    deadline: float = positive(3600.0)  # seconds for an iteration; a longer one ends the run and shows where it hung
    stages: tuple[Stage, ...] = ("sft", "reward_model", "ppo")
    device: DeviceConfig = DeviceConfig()
    distributed: DistributedConfig = DistributedConfig()
    mesh: MeshConfig = MeshConfig()
    # On which devices each call of reinforcement learning runs: colocate, split, standalone, auto, or a plan's file.
    plan: str = "colocate"
    model: ModelSection = ModelSection()
    compute: ComputeConfig = ComputeConfig()
    sleep: SleepConfig = SleepConfig()
    roles: RolesConfig = RolesConfig()
    lora: LoRASection = LoRASection()
    data: DataConfig = DataConfig()
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    rewards: tuple[RewardConfig, ...] = ()  # besides the reward model that the run learns
    costs: tuple[RewardConfig, ...] = ()  # of safe_rlhf: their sum is kept below its limit
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    dpo: DPOStageConfig = DPOStageConfig()
    ppo: PPOStageConfig = PPOStageConfig()
    grpo: GRPOStageConfig = GRPOStageConfig()
    dr_grpo: DrGRPOStageConfig = DrGRPOStageConfig()
    dapo: DAPOStageConfig = DAPOStageConfig()
    gspo: GSPOStageConfig = GSPOStageConfig()
    rloo: RLOOStageConfig = RLOOStageConfig()
    reinforce_pp: ReinforcePPStageConfig = ReinforcePPStageConfig()
    reinforce_pp_baseline: ReinforcePPBaselineStageConfig = ReinforcePPBaselineStageConfig()
    remax: ReMaxStageConfig = ReMaxStageConfig()
    safe_rlhf: SafeRLHFStageConfig = SafeRLHFStageConfig()
    rollout: Schedule = Schedule()  # how rows share the devices while they are generated
    checkpoints: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    wandb: WandbConfig = WandbConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def algorithm(self) -> str | None:
        """The stage of reinforcement learning, if there is one."""
        return next((stage for stage in self.stages if stage in ALGORITHMS), None)

    @property
    def rl(self) -> RLStageConfig:
        """Its section; without such a stage ppo's, which also says how a policy is looked at."""
        return getattr(self, self.algorithm or "ppo")

    @property
    def reference_is_base(self) -> bool:
        """The reference is the frozen base under the actor's adapter: no stage before RL has trained the adapter."""
        untrained = self.lora.path is None and not {"sft", "dpo"} & set(self.stages)
        return self.lora.on and self.roles.reference is None and untrained


def config_yaml(config: Config) -> str:
    """The config as YAML that `load_config` reads back to an equal one; of the algorithms' sections only the run's."""
    return to_yaml(config, without=set(ALGORITHMS) - {config.algorithm or "ppo"})


def load_config(path_or_name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file, or of a name among the packaged ones, with `key=value` overrides.

    Raises:
        UserError: one sentence that names the key, the value and the remedy.
    """
    source = _find(path_or_name)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"config {path_or_name} cannot be read: {reason}") from error
    mapping = parse_yaml(text, path_or_name)
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, dict):
        raise UserError(f"config {path_or_name} must hold `key: value` lines, but it holds no keys")
    for assignment in overrides:
        override(mapping, assignment)
    return build(Config, mapping)


def config_names() -> list[str]:
    """The packaged configs that `--config NAME` finds."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _packaged().iterdir() if entry.name.endswith(".yaml"))


def _packaged() -> Traversable:
    return resources.files("jrlhf.configs")


def _find(path_or_name: str) -> Path | Traversable:
    path = Path(path_or_name)
    if path.is_file():
        return path
    names = config_names()
    if path_or_name in names:
        return _packaged() / f"{path_or_name}.yaml"
    if path.is_dir():
        raise UserError(f"config {path_or_name} is a directory: name a YAML file, or one of {', '.join(names)}")
    close = difflib.get_close_matches(path.stem, names, n=1)
    hint = f"did you mean {close[0]}" if close else f"name a YAML file, or one of {', '.join(names)}"
    raise UserError(f"config {path_or_name} does not exist: {hint}")
