"""The configuration of a run: its sections, how it is found and loaded, and what its sections demand of each other.

A new setting is one line in one of the dataclasses; `jrlhf.strict` reads it, checks it and explains mistakes.
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from jrlhf.errors import UserError
from jrlhf.ppo.config import PPOConfig
from jrlhf.strict import Section, between, build, checked, count, natural, non_negative, override, parse_yaml, positive


@dataclass(frozen=True)
class DeviceConfig(Section):
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    simulated: int | None = count(None)  # split the CPU into so many devices

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.simulated is not None and self.platform in ("gpu", "tpu"):
            raise ValueError(
                f"simulated={self.simulated}: it must be null on a {self.platform}: only CPU devices are simulated"
            )


@dataclass(frozen=True)
class MeshConfig(Section):
    """Sizes of the mesh axes. At most one is -1: it takes the devices that the others leave."""

    data: int = checked(1, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")
    fsdp: int = checked(-1, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")
    tensor: int = checked(1, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")


@dataclass(frozen=True)
class ModelSection(Section):
    """The decoder of every role."""

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
class ComputeConfig(Section):
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations and of the generation copy; weights are float32
    remat: Literal["full", "gather"] = "full"  # what the backward pass recomputes: the layers, or only gathered weights
    logprob: Literal["reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None  # null: the platform's default


@dataclass(frozen=True)
class DataConfig(Section):
    source: Literal["docstrings"] = "docstrings"
    max_prompt: int = count(20)  # tokens; longer prompts are left out
    max_response: int = count(24)  # tokens, end of text included


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW under a clipped global norm. One update is one step of the optimizer."""

    learning_rate: float = non_negative(1e-3)  # after the warm-up
    warmup: int = natural(20)  # updates over which it rises linearly from 0
    final: float = between(0.1, 0.0, 1.0)  # the part of it that is left at the end of its cosine
    weight_decay: float = non_negative(0.01)
    max_grad_norm: float | None = positive(1.0)  # null: not clipped


@dataclass(frozen=True)
class SFTConfig(OptimizerConfig):
    """Supervised fine-tuning on prompts and their responses."""

    learning_rate: float = non_negative(2e-3)
    steps: int = count(500)
    batch: int = count(64)  # rows
    renaming: float = between(0.5, 0.0, 1.0)  # share of examples whose words are replaced, see jrlhf/renaming.py
    eval_every: int = count(100)  # steps
    save_every: int = count(100)  # steps between checkpoints


@dataclass(frozen=True)
class RewardModelConfig(OptimizerConfig):
    """A Bradley-Terry model of an annotator's preferences between sampled responses."""

    learning_rate: float = non_negative(5e-4)
    prompts: int = count(1500)  # for which responses are sampled
    samples_per_prompt: int = count(4)
    foreign_lines: int = natural(0)  # real lines of other functions among the candidates
    margin: float = non_negative(0.05)  # gold scores no further apart than this are a tie
    heldout_prompts: int = count(256)  # whose pairs measure the accuracy
    label_flip: float = between(0.05, 0.0, 0.5)  # share of preferences that the annotator gets wrong
    steps: int = count(250)
    batch: int = count(96)  # pairs
    eval_every: int = count(50)  # steps
    save_every: int = count(100)  # steps between checkpoints


@dataclass(frozen=True)
class PPOStageConfig(Section):
    """Reinforcement learning against the reward model, tied to the SFT model by a KL penalty."""

    iterations: int = count(40)
    rollout_batch: int = count(128)  # rows
    temperature: float = positive(1.0)
    top_k: int | None = count(None)
    top_p: float | None = checked(None, lambda value: 0 < value <= 1, "above 0 and at most 1")
    min_new_tokens: int = natural(0)
    save_every: int = count(10)  # iterations between checkpoints
    actor: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, warmup=2, final=1.0, weight_decay=0.0)
    critic: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, warmup=2, final=1.0, weight_decay=0.0)
    algorithm: PPOConfig = PPOConfig(kl_target=4.0, kl_horizon=500.0)


@dataclass(frozen=True)
class CheckpointConfig(Section):
    keep: int = count(2)  # newest ones; with 1 there is nothing to fall back to


@dataclass(frozen=True)
class EvaluationConfig(Section):
    prompts: int = count(256)  # held-out prompts
    samples: int = count(3)  # texts shown while it runs


Stage = Literal["sft", "reward_model", "ppo"]


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
    mesh: MeshConfig = MeshConfig()
    model: ModelSection = ModelSection()
    compute: ComputeConfig = ComputeConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    ppo: PPOStageConfig = PPOStageConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


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


# --- What the sections demand of each other ---


def mesh_sizes(mesh: MeshConfig, device_count: int) -> tuple[int, int, int]:
    """The sizes of (data, fsdp, tensor) on so many devices, -1 resolved.

    Raises:
        UserError: their product is not the number of devices.
    """
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    written = f"mesh data={mesh.data}, fsdp={mesh.fsdp}, tensor={mesh.tensor}"
    if sizes.count(-1) > 1:
        raise UserError(f"{written}: only one axis may be -1, give the others a size")
    known = math.prod(size for size in sizes if size != -1)
    wrong = device_count % known if -1 in sizes else device_count - known
    if wrong:
        divisors = ", ".join(map(str, _divisors(device_count)))
        raise UserError(
            f"{written} does not fit {device_count} device(s): choose sizes whose product is {device_count} "
            f"(its divisors are {divisors}), or set device.simulated={known} to simulate that many on the CPU"
        )
    data, fsdp, tensor = (device_count // known if size == -1 else size for size in sizes)
    return data, fsdp, tensor


def validate(config: Config, device_count: int) -> None:
    """Checks what no section can check alone, before anything is compiled or written.

    Raises:
        UserError: the first violation, with its remedy.
    """
    _check_stages(config)
    data, fsdp, tensor = mesh_sizes(config.mesh, device_count)
    _check_model(config, fsdp, tensor, device_count)
    _check_batches(config, data * fsdp * tensor)
    _check_sampling(config)


def _check_stages(config: Config) -> None:
    stages = config.stages
    if not stages:
        raise UserError("stages=[]: name at least one of sft, reward_model, ppo")
    repeated = [stage for stage in stages if stages.count(stage) > 1]
    if repeated:
        raise UserError(f"stages={_list(stages)}: {repeated[0]} is named more than once, keep one")
    needs = {"sft": (), "reward_model": ("sft",), "ppo": ("sft", "reward_model")}
    for index, stage in enumerate(stages):
        for needed in needs[stage]:
            if needed not in stages[:index]:
                raise UserError(
                    f"stages={_list(stages)}: {stage} starts from the result of {needed}, name {needed} before it"
                )


def _check_model(config: Config, fsdp: int, tensor: int, device_count: int) -> None:
    model, data = config.model, config.data
    if model.heads % model.kv_heads:
        raise UserError(
            f"model.kv_heads={model.kv_heads} must divide model.heads={model.heads}: choose one of "
            f"{', '.join(map(str, _divisors(model.heads)))}"
        )
    if data.max_prompt + data.max_response > model.max_positions:
        raise UserError(
            f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} need "
            f"{data.max_prompt + data.max_response} positions: raise model.max_positions={model.max_positions}"
        )
    padded_vocab = -(-model.vocab_size // 128) * 128
    kv_heads = tensor if model.kv_heads < tensor else model.kv_heads  # fewer kv-heads than slices are repeated
    for key, written, size, axis, parts in (
        ("embed", model.embed, model.embed, "fsdp", fsdp),
        ("heads", model.heads, model.heads, "tensor", tensor),
        ("kv_heads", model.kv_heads, kv_heads, "tensor", tensor),
        ("mlp", model.mlp, model.mlp, "tensor", tensor),
        ("vocab_size", model.vocab_size, padded_vocab, "tensor", tensor),
    ):
        if size % parts:
            choices = ", ".join(str(divisor) for divisor in _divisors(size) if divisor <= device_count)
            raise UserError(
                f"model.{key}={written} does not divide over mesh.{axis}={parts}: "
                f"choose another model.{key}, or mesh.{axis} from {choices}"
            )


def _check_batches(config: Config, devices: int) -> None:
    algorithm = config.ppo.algorithm
    parts = devices * algorithm.minibatches * algorithm.micro_batches
    described = f"{devices} device(s)"
    for key, rows, divisor, over in (
        ("sft.batch", config.sft.batch, devices, described),
        ("reward_model.batch", config.reward_model.batch, devices, described),
        (
            "ppo.rollout_batch",
            config.ppo.rollout_batch,
            parts,
            f"{described} x {algorithm.minibatches} minibatches x {algorithm.micro_batches} micro-batches",
        ),
    ):
        if rows % divisor:
            below = rows // divisor * divisor
            choices = " or ".join(str(size) for size in (below, below + divisor) if size)
            raise UserError(
                f"{key}={rows} does not divide over {over}: choose a multiple of {divisor}, such as {choices}"
            )


def _check_sampling(config: Config) -> None:
    ppo = config.ppo  # whatever the stages: a policy is also looked at when PPO does not train it
    if ppo.rollout_batch >= 5 * ppo.algorithm.kl_horizon:
        raise UserError(
            f"ppo.algorithm.kl_horizon={ppo.algorithm.kl_horizon:g} must exceed a fifth of "
            f"ppo.rollout_batch={ppo.rollout_batch}: the KL coefficient could turn negative, raise the horizon"
        )
    if ppo.min_new_tokens > config.data.max_response:
        raise UserError(
            f"ppo.min_new_tokens={ppo.min_new_tokens} exceeds data.max_response={config.data.max_response}: lower it"
        )
    if ppo.top_k is not None and ppo.top_k > config.model.vocab_size:
        raise UserError(f"ppo.top_k={ppo.top_k} exceeds model.vocab_size={config.model.vocab_size}: lower it, or null")


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"
