"""`Config` and its sections: the settings of a run. `load.py` reads a file, `check.py` checks sections together.

A section exists only if its stage or feature is used. A new setting is one line in one of these classes, with a comment
on its effect and unit, which is also its documentation; `parse.py` parses it and explains mistakes.
"""

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

from jrlhf.config.devices import DeviceConfig, DistributedConfig
from jrlhf.config.keys import as_line, kinds_of
from jrlhf.config.parse import Feature, changed, in_use
from jrlhf.config.places import HUB, PREFIX, StorageConfig, address, file_name, place
from jrlhf.config.stages import (
    OWN,
    STAGES,
    AsynchronousConfig,
    CheckpointConfig,
    DPOStageConfig,
    FleetSection,
    RewardModelConfig,
    RLStageConfig,
    SFTConfig,
    StopConfig,
    is_algorithm,
    names_a_stage,
)
from jrlhf.models.config.checks import MOST_STOP_BYTES
from jrlhf.models.config.decoder import MOST_LAYERS
from jrlhf.models.generation.schedule import Schedule
from jrlhf.ppo.fields import LONGEST, Section, between, checked, count, natural, non_negative, only_if, positive


def _axis(default: int) -> Any:
    return checked(default, lambda value: value >= 1 or value == -1, "at least 1, or -1 for the remaining devices")


@dataclass(frozen=True)
class MeshConfig(Section):
    """Sizes of the mesh axes. At most one is -1: it takes the remaining devices."""

    data: int = _axis(1)  # copies of the weights, each with its own rows
    fsdp: int = _axis(-1)  # parts into which weights and rows are divided
    tensor: int = _axis(1)  # parts into which each layer's computation is divided


@dataclass(frozen=True)
class ModelSection(Section):
    """The actor: a model directory, or fresh weights of these sizes."""

    path: str | None = address()  # a Hugging Face directory, a run's directory or a hub name; null: fresh weights
    vocab_size: int = count(1024)  # number of tokens
    embed: int = count(128)  # width of the residual stream
    layers: int = count(4, most=MOST_LAYERS)  # number of layers
    heads: int = count(4)  # number of attention heads
    kv_heads: int = count(2)  # number of key and value heads; divides heads
    # width of a head
    head_dim: int = checked(32, lambda value: value >= 2 and value % 2 == 0, "even: rotary positions turn pairs")
    mlp: int = count(384)  # width of the hidden layer
    max_positions: int = count(64)  # length of the longest sequence in tokens, prompt and response together
    rope_theta: float = positive(10_000.0)  # base of the rotary positions
    qk_norm: bool = False  # normalise queries and keys
    tie_embeddings: bool = True  # use one table for embedding and unembedding


# Parameters of dataflows that are no frozen policies of the config; see `jrlhf.algorithms.roles`.
OTHER_PARAMETERS = (
    *("actor", "reward", "estimator", "reference", "critic", "cost_critic", "cost", "learner", "pool", "constraint"),
    *("arithmetic", "prompts", "kl_coef"),
)


@dataclass(frozen=True)
class FrozenRole(Section):
    """A frozen policy of a dataflow of your own, under the name of the dataflow's parameter, such as a teacher."""

    path: str = address("")  # its model directory

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path is missing: name a model directory")


def _names_a_role(key: str, given: Mapping[str, Any]) -> bool:
    """False for a key that looks like a mistake in `critic` or `reference`."""
    return isinstance(given[key], Mapping) or not get_close_matches(str(key), ("critic", "reference"), n=1)


@dataclass(frozen=True)
class RolesConfig(Section):
    """Model directories, X or {path: X}, of roles that do not start from the actor. Their tokenizer is the actor's.

    Any other key names a frozen policy for a dataflow of your own: `teacher: {path: Qwen/Qwen3-8B}`.
    """

    # null: the reward model that this run trained, else the actor with a new head
    critic: str | None = address(section=FrozenRole)
    reference: str | None = address(section=FrozenRole)  # null: the actor as it is before reinforcement learning
    frozen: Mapping[str, FrozenRole] = field(default_factory=dict, metadata={"named": (FrozenRole, _names_a_role)})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.frozen:
            if name in OTHER_PARAMETERS or not name.isidentifier() or keyword.iskeyword(name):
                taken = ", ".join(OTHER_PARAMETERS)
                raise ValueError(f"{name} must be the name of a parameter of your dataflow, and none of {taken}")

    @property
    def paths(self) -> dict[str, str]:
        """The model directory of each role that has one of its own."""
        given = {"critic": self.critic, "reference": self.reference}
        own = {name: role.path for name, role in self.frozen.items()}
        return {name: path for name, path in given.items() if path is not None} | own


LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_OWN_RANK = only_if(lambda section: section.path is None, "lora.path, whose adapter has its own")


@dataclass(frozen=True)
class LoRASection(Feature):
    """Low-rank adapters on one frozen base, which all roles with the actor's architecture share."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("rank", "path")
    OFF: ClassVar[str] = "lora.rank=null"
    rank: int | None = count(None)  # rank of new adapters; null: path is given
    path: str | None = place()  # a PEFT adapter of the actor to start from, with its own rank, alpha and targets
    alpha: float = positive(32.0, **_OWN_RANK)  # the adapter's output is scaled by alpha / rank
    rslora: bool = field(default=False, metadata=_OWN_RANK)  # scale by alpha / sqrt(rank) instead
    targets: tuple[LoRATarget, ...] = field(  # the matrices that get an adapter
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), metadata=_OWN_RANK
    )
    base: Literal["auto", "int8"] = "auto"  # type of the base: compute.dtype, or int8 matrices with a scale per channel
    # The critic is an adapter and a head on the same base; false: a separate model. Safe RLHF's cost critic is always
    # such an adapter.
    critic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.path is not None:
            self.refuse("rank", f"null with path={self.path}, whose adapter has its own rank")


@dataclass(frozen=True)
class ComputeConfig(Section):
    """Settings of the computation of models."""

    # Type of activations, of the weights' copy for generation and of frozen models; trained weights are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Values of a layer that the backward pass keeps, from least to most memory: its input in host memory; its input;
    # also attention's output; all products; everything.
    remat: Literal["offload", "full", "attention", "products", "gather"] = "full"
    # Implementation of the log-probabilities; null: the platform's default.
    logprob: Literal["reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None
    # Compute the loss of the policy, and of SFT, together with its gradient; false: compute logits twice, which needs
    # less memory.
    fused_loss: bool = True
    # With a single update per batch, the forward passes of the update also make the experience. Then all trained models
    # are in memory at the same time, and the policy's loss is not fused, because the advantages are not known yet.
    shared_passes: bool = False
    # Implementation for whole sequences; null: the platform's default. On GPUs, xla also reads whole caches to decode.
    attention: Literal["xla", "cudnn", "splash"] | None = None
    # Tokens that a device scores at a time, rows of similar length together; null: the whole batch with its padding.
    # Compiles each scoring model up to four times.
    score_tokens: int | None = count(None)
    # Rows that are scored together while others decode; null: all after the last; auto: chosen by a simulation.
    score_rows: int | Literal["auto"] | None = count(None)


Memory = Literal["device", "host"]


@dataclass(frozen=True)
class SleepConfig(Feature):
    """Parts of an algorithm's models that are offloaded to pinned host memory while others compute. Same results."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("optimizer", "actor", "critic", "reference", "reward")
    OFF: ClassVar[str] = "nothing asleep"
    optimizer: Memory = "device"  # the optimizer states of all trained roles; on the device for their updates only
    actor: Memory = "device"  # its float32 weights, also while their copy generates
    critic: Memory = "device"  # the critics of rewards and of costs
    # The frozen policies: the reference, also if only the evaluation needs it, and others that `roles` names.
    reference: Memory = "device"
    reward: Memory = "device"  # all reward models and cost models
    ahead: bool = False  # each call starts to load the parts for the next one: less waiting, more memory

    def weights_of(self, role: str) -> bool:
        """Returns whether a role's weights are offloaded to host memory between its calls."""
        section = {"cost_critic": "critic", "cost": "reward"}.get(role, role)
        return getattr(self, section if section in ("actor", "critic", "reward") else "reference") == "host"


@dataclass(frozen=True)
class ColumnsConfig(Section):
    """The names of a dataset's columns; null: the name of the key."""

    prompt: str | None = None  # text, or a conversation
    completion: str | None = None  # the answer to learn
    chosen: str | None = None  # the better answer of a pair
    rejected: str | None = None  # the worse answer of a pair
    messages: str | None = None  # a whole conversation
    text: str | None = None  # plain text to imitate
    source: str | None = None  # the origin of a row in a mixed dataset; origins are measured separately


@dataclass(frozen=True)
class DatasetConfig(Feature):
    """A dataset."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("path",)
    OFF: ClassVar[str] = "{path}.path=null"
    path: str | None = place(also=HUB)  # a file (jsonl, csv, parquet), a directory, or a hub name
    split: str = "train"  # the split of a directory or a hub dataset that has several
    columns: ColumnsConfig = ColumnsConfig()


@dataclass(frozen=True)
class SourceConfig(DatasetConfig):
    """One of several datasets from which prompts are drawn."""

    # Its name in metrics, and the data_source of its rows that have none; null: the name of the file.
    name: str | None = file_name(None, r"[\w.-]+", 200, "a word of at most 200 bytes: it names metrics")
    weight: float = positive(1.0, most=1e9)  # its share of the prompts is this divided by the sum of all weights

    @property
    def called(self) -> str:
        """The name of the source: its own, or else the last part of its path, without the ending of a file."""
        last = str(self.path).removeprefix(PREFIX).rstrip("/").rpartition("/")[2]
        return self.name or re.sub(r"[^\w.-]", "-", last.removesuffix(Path(last).suffix)) or "-"


@dataclass(frozen=True)
class DataConfig(Section):
    """The data of a run, of one of three kinds, which `source` names."""

    source: str = ""  # the kind of data
    max_prompt: int = count(20)  # longest prompt in tokens
    max_response: int = count(24)  # longest response in tokens, end of text included

    @classmethod
    def unread(cls, key: str, value: object, chosen: str) -> str:
        """Returns the sentence on a key of this kind of data in a config of another kind."""
        if isinstance(value, tuple) and value and isinstance(value[0], DatasetConfig):
            key, value = f"{key}[0]", value[0]
        if isinstance(value, DatasetConfig):
            return f"{key}.path={value.path} is not read by the built-in task: set data.source=datasets"
        return f"{key}={value} has no effect with {chosen}: leave it out"


@dataclass(frozen=True)
class AnnotatorConfig(Section):
    """Preferences of the built-in task's annotator, which compares sampled responses by a rubric."""

    prompts: int = count(1500)  # prompts for which responses are sampled
    samples_per_prompt: int = count(4)  # responses to each of them
    foreign_lines: int = natural(0)  # real lines of other functions among the candidates of a prompt
    margin: float = non_negative(0.05)  # scores whose difference is not larger than this are a tie
    heldout_prompts: int = count(256)  # prompts whose pairs measure the accuracy
    label_flip: float = between(0.05, 0.0, 0.5)  # share of preferences that the annotator gets wrong

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.foreign_lines and min(self.prompts, self.heldout_prompts) == 1:
            self.refuse("foreign_lines", "0 with a single prompt, which has no other function's line")


@dataclass(frozen=True)
class DocstringsData(DataConfig):
    """The built-in task of writing summary lines of functions of the standard library: source docstrings."""

    source: Literal["docstrings"] = "docstrings"
    renaming: float = between(0.5, 0.0, 1.0)  # share of the examples of sft whose words are replaced
    annotator: AnnotatorConfig = AnnotatorConfig()


@dataclass(frozen=True)
class ArithmeticData(DataConfig):
    """The built-in task of sums, worked out one addition at a time: source arithmetic."""

    source: Literal["arithmetic"] = "arithmetic"
    heldout_rows: int = natural(64)  # held-out sums, for measurements
    terms: int = checked(2, lambda value: value >= 2, "at least 2")  # numbers in a sum
    digits: int = checked(2, lambda value: 1 <= value <= 9, "from 1 to 9")  # digits of each number
    problems: int = count(3000)  # sums to learn from
    demonstrations: int | None = count(None)  # number of them that have a worked answer, for sft; null: all
    forgotten: float = between(0.0, 0.0, 1.0)  # share of the carries that worked answers leave out
    units_first: bool = False  # write numbers in answers from their units on, the order in which carries go

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demonstrations is not None and self.demonstrations > self.problems:
            self.refuse("demonstrations", f"at most problems={self.problems}, or null for all")


@dataclass(frozen=True)
class DatasetsData(DataConfig):
    """Datasets of the user, one for each stage of the run: source datasets."""

    KEYS: ClassVar[tuple[str, ...]] = ("sft", "preferences", "prompts", "heldout")
    source: Literal["datasets"] = "datasets"
    sft: DatasetConfig | None = None  # prompts with completions, conversations or text
    preferences: DatasetConfig | None = None  # chosen and rejected answers
    # Prompts for reinforcement learning; a list of datasets, from which they are drawn by weight.
    prompts: DatasetConfig | tuple[SourceConfig, ...] | None = None
    heldout: DatasetConfig | None = None  # prompts for validation; null: held-out rows of prompts
    heldout_rows: int = natural(64)  # held-out rows of each dataset from which a stage learns, for measurements
    chat: bool = False  # a plain text prompt becomes a user's turn in the model's chat template
    system: str | None = None  # system message for conversations that have none
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template, e.g. enable_thinking
    eos: tuple[str, ...] = ()  # tokens that end a response; empty: those that the model's files name
    overlong: Literal["error", "filter", "truncate_left"] = "error"  # what is done with rows that are too long

    @property
    def datasets(self) -> dict[str, DatasetConfig]:
        """The datasets that are given, by their keys, such as sft; those of a list are prompts[0], prompts[1], ..."""
        given = {key: getattr(self, key) for key in self.KEYS}
        listed = given.pop("prompts") if isinstance(given["prompts"], tuple) else ()
        given |= {f"prompts[{index}]": source for index, source in enumerate(listed)}
        return {key: dataset for key, dataset in given.items() if dataset is not None}


_FUNCTION = only_if(lambda section: section.kind in (None, "function"), "{path}.{section.kind}")
_PROCESSES = only_if(lambda part: part.kind in (None, "function") and not part.in_process, "{path}.{section.caller}")


@dataclass(frozen=True)
class ClientConfig(Feature):
    """An OpenAI-compatible chat endpoint that a reward function asks, by its parameter `client`."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("url",)
    OFF: ClassVar[str] = "{path}.url=null"
    # The address before /chat/completions, such as http://host:8000/v1, without a key.
    url: str | None = None
    model: str | None = None  # the model to ask; null: the only one that the endpoint lists
    key_env: str | None = None  # the name of the environment variable with the key, such as OPENAI_API_KEY
    concurrent: int = count(64, most=4096)  # requests in flight of all workers together
    timeout: float = positive(20.0, most=LONGEST)  # seconds of one request; at most the deadline of the reward
    retries: int = natural(3, most=100)  # further attempts after a failed connection, a timeout, and status 429 or 5xx
    temperature: float | None = non_negative(0.0)  # null: the endpoint's
    max_tokens: int | None = count(1024)  # longest answer; a longer one is a failure; null: the endpoint's
    cache: bool = True  # store answers beside the logs: an equal request, also after a resume, gets the same answer

    def __post_init__(self) -> None:
        super().__post_init__()
        # Messages must not show a key, which a mistake may put here.
        if self.url is not None and re.search("[@?#]", self.url):
            raise ValueError("url must have no @, ? or #: give the key by key_env")
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,99}", self.key_env):
            raise ValueError("key_env must be the name of an environment variable, in capitals, and not the key")
        if self.url is not None and not re.fullmatch(r"https?://[!-~]+", self.url):
            self.refuse("url", "an address such as http://localhost:8000/v1")


@dataclass(frozen=True)
class RewardConfig(Section):
    """One reward of the weighted sum: a model directory, or a function that runs in its own processes."""

    # The name in metrics.
    name: str = file_name("reward", r"[\w.-]+", 244, "a word of at most 244 bytes: it names metrics and a file")
    model: str | None = address()  # a directory with a sequence classifier of one label, such as a run's reward_model
    adapter: str | None = place()  # a PEFT directory of a reward model on the actor's base; it reads the actor's tokens
    function: str | None = place()  # package.module:function, file.py:function, or one of jrlhf/rewards/builtin.py
    weight: float = 1.0  # factor in the sum; 0: it is only measured and logged
    workers: int = count(1, most=1024, **_PROCESSES)  # processes of a function
    deadline: float = positive(30.0, most=1e6, **_PROCESSES)  # seconds per batch, after which a function is stopped
    # Call the function in the training process, if it cannot be sent to another one: then nothing stops a call, a crash
    # ends the run, and a resume checks only the name of a Python function.
    in_process: bool = field(default=False, metadata=_FUNCTION)
    # The score used when a function or a model fails to give one; exclude: the response is not learned from, and counts
    # in no statistic; null: a failure ends the run.
    on_failure: float | Literal["exclude"] | None = checked(
        None, lambda value: not isinstance(value, str) and abs(value) < 3.4e38, "finite in float32"
    )
    # A function's None for one response: it does not judge it, adds 0 to the sum, and is in no mean of the reward.
    skip_none: bool = field(default=False, metadata=_FUNCTION)
    abstain: bool = field(default=False, metadata=_FUNCTION)  # None excludes the response, as on_failure=exclude does
    options: Mapping[str, Any] = field(default_factory=dict, metadata=_FUNCTION)  # a function's further arguments
    # {parameter of the function: column of the dataset}, where the two names differ.
    columns: Mapping[str, Any] = field(default_factory=dict, metadata=_FUNCTION)
    # Keep special tokens, such as <think>, in the text of a response, except padding and its end.
    special_tokens: bool = field(
        default=False, metadata=only_if(lambda section: section.kind != "adapter", "{path}.{section.kind}")
    )
    client: ClientConfig | None = None
    # Number of rows that a model scores at a time; at most compute.score_rows, if that is set.
    batch: int = count(16, **only_if(lambda section: section.model is not None, "{path}.{section.kind}"))

    @property
    def kind(self) -> str | None:
        return next((kind for kind in ("model", "adapter", "function") if getattr(self, kind) is not None), None)

    @property
    def caller(self) -> str | None:
        return "in_process=true" if self.in_process else self.kind


def are_stops(texts: tuple[str, ...]) -> bool:
    """True for texts at which responses may end."""
    return all(texts) and sum(len(text.encode(errors="replace")) for text in texts) <= MOST_STOP_BYTES


@dataclass(frozen=True)
class SamplingSection(Section):
    """Sampling settings of responses, in rollouts and in all other sampling."""

    temperature: float = positive(1.0)  # logits are divided by it
    top_k: int | None = count(None)  # draw from the k most likely tokens; null: from all
    # Draw from the most likely tokens that have this probability together; null: from all.
    top_p: float | None = checked(None, lambda value: 0 < value <= 1, "above 0 and at most 1")
    # Draw from tokens with at least this share of the most likely token's probability; null: from all.
    min_p: float | None = checked(None, lambda value: 0 < value <= 1, "above 0 and at most 1")
    min_new_tokens: int = natural(0)  # tokens before a response may end
    # Texts that end a response, after the token that completes one of them, such as ["\n\n", "###"].
    stop: tuple[str, ...] = checked((), are_stops, f"texts of at most {MOST_STOP_BYTES} bytes together, none empty")
    # A stop text stays in what rewards and outputs read; its tokens are always a part of the response.
    keep_stop: bool = field(default=False, metadata=only_if(lambda section: section.stop, "{path}.stop=[]"))
    batch: int = count(128)  # responses sampled at a time in a run without reinforcement learning

    @property
    def drawing(self) -> dict[str, Any]:
        """The settings that decide which tokens are drawn, by their names in `SamplingConfig`."""
        return {name: value for name, value in vars(self).items() if name not in ("batch", "stop", "keep_stop")}


@dataclass(frozen=True)
class ExportConfig(Section):
    """The trained model in Hugging Face form."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: that of the loaded weights, float32 for fresh ones


@dataclass(frozen=True)
class EvaluationConfig(Section):
    """The comparison on held-out prompts at the end of a run."""

    prompts: int | None = count(None)  # held-out prompts that are answered, the first ones; null: all
    samples: int = count(3)  # texts shown during a run


_NOT_GREEDY = only_if(lambda section: section.temperature != 0, "{path}.temperature=0")


@dataclass(frozen=True)
class ValidationConfig(Feature):
    """Measurements on the held-out prompts during reinforcement learning."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("every",)
    OFF: ClassVar[str] = "validation.every=null"
    every: int | None = count(None)  # iterations between validations, of which the first is before any iteration
    # Held-out prompts that are answered, the first ones; null: evaluation.prompts or, if that is null, 256.
    prompts: int | None = count(None)
    k: int = count(1)  # responses to each prompt
    temperature: float | None = non_negative(None)  # null: that of the rollouts; 0: greedy
    top_k: int | None = count(None, **_NOT_GREEDY)  # null: that of the rollouts
    # null: that of the rollouts; 1: draw from all tokens
    top_p: float | None = checked(None, lambda value: 0 < value <= 1, "above 0 and at most 1", **_NOT_GREEDY)
    # null: that of the rollouts
    min_p: float | None = checked(None, lambda value: 0 < value <= 1, "above 0 and at most 1", **_NOT_GREEDY)
    max_response: int | None = count(None)  # longest response in tokens; null: data.max_response

    def due(self, step: int) -> bool:
        """True if the weights after so many iterations are validated."""
        return self.every is not None and step % self.every == 0

    @property
    def drawing(self) -> dict[str, Any]:
        """The settings of sampling that are not those of rollouts, by their names in `SamplingConfig`."""
        own = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        own["max_new_tokens"] = self.max_response
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class WandbConfig(Feature):
    """Weights & Biases, in addition to metrics.jsonl and TensorBoard. Its failures neither stop nor slow the run."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("project",)
    OFF: ClassVar[str] = "wandb.project=null"
    project: str | None = None  # the project's name
    entity: str | None = None  # a user or team; null: the user's default
    group: str | None = None  # a name that groups runs; null: none
    mode: Literal["online", "offline"] = "online"  # offline: write to the run's wandb/, for `wandb sync`


@dataclass(frozen=True)
class ProfileConfig(Feature):
    """Iterations of a stage that jax.profiler records, each in its own directory in the run's profile/."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("iterations",)
    OFF: ClassVar[str] = "profile.iterations=[]"
    iterations: tuple[int, ...] = checked(  # numbers of iterations; the first is 1
        (), lambda value: all(number >= 1 for number in value), "iterations, the first of which is 1"
    )
    stage: str | None = None  # one of the run's stages; null: the last one


@dataclass(frozen=True)
class Config(Section):
    """The settings of the whole run."""

    name: str = file_name(  # the run's directory in run_dir; a config file without this key gives its own name
        "run", r"(?a)\w[\w.-]*", 255, "letters, digits, '.', '_' and '-', at most 255: it names the run's directory"
    )
    # Seed of all random numbers.
    seed: int = checked(0, lambda value: 0 <= value < 2**32, "from 0 to 4294967295", most=2**32 - 1)
    run_dir: str = address("runs", also="")  # directory of all runs, or its address in an object store
    # Seconds per iteration, and per batch of held-out answers; a longer one ends the run and shows where it hung.
    deadline: float = positive(3600.0, most=LONGEST)
    # The run ends after this number of updates in a row are skipped because numbers are not finite; 0 or null: it never
    # ends for this reason.
    stop_after_skipped: int | None = natural(5)
    # What the run does, in this order: sft, reward_model, and dpo or one algorithm. An algorithm of your own has any
    # other name, and a section of this name with the keys of grpo, of which it sets `dataflow`.
    stages: tuple[str, ...] = ("sft", "reward_model", "ppo")
    device: DeviceConfig = DeviceConfig()
    distributed: DistributedConfig = DistributedConfig()
    mesh: MeshConfig = MeshConfig()
    # Devices of each call of reinforcement learning: colocate, split, standalone, disaggregated, auto, or the file of a
    # plan.
    plan: str = place("colocate")
    model: ModelSection = ModelSection()
    compute: ComputeConfig = ComputeConfig()
    sleep: SleepConfig | None = None
    roles: RolesConfig = RolesConfig()
    lora: LoRASection | None = None
    data: DocstringsData | ArithmeticData | DatasetsData = DocstringsData()
    rewards: tuple[RewardConfig, ...] = ()  # rewards, in addition to a reward model that the run trains
    costs: tuple[RewardConfig, ...] = ()  # costs for safe_rlhf, which keeps their sum below its limit
    sections: Mapping[str, Any] = field(  # stage -> its settings
        default_factory=dict, metadata={"table": STAGES, "named": (STAGES[OWN], names_a_stage)}
    )
    sampling: SamplingSection = SamplingSection()
    rollout: Schedule = Schedule()  # how rows share the devices while they are generated
    fleet: FleetSection | None = None
    checkpoints: CheckpointConfig = CheckpointConfig()
    stop: StopConfig | None = None
    # Functions that are called after each step of every stage, package.module:function or file.py:function; they get an
    # `Iteration` and may return "stop", which ends the stage.
    hooks: tuple[str, ...] = ()
    export: ExportConfig = ExportConfig()
    storage: StorageConfig = StorageConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    validation: ValidationConfig | None = None
    wandb: WandbConfig | None = None
    prometheus: bool = False  # write metrics.prom after each iteration, for the textfile collector of node_exporter
    profile: ProfileConfig | None = None
    notices: tuple[str, ...] = field(default=(), compare=False, metadata={"from": ""})  # told when a run begins

    def __post_init__(self) -> None:
        """Raises ValueError for a section that no stage of the run has, and for a stage that is none."""
        super().__post_init__()
        for name in (*self.stages, *self.sections):
            if name not in STAGES:
                self._check_own_stage(name)
        for name, value in vars(self).items():
            object.__setattr__(self, name, in_use(value, name))
        learner = self.algorithm or ("dpo" if "dpo" in self.stages else None)
        for name in self.sections:
            # A run that is reduced to its first stages may keep the sections of the others.
            if name in self.stages or not learner or not list(changed(self.sections[name])):
                continue
            void = f"section {name} has no effect with stages={as_line(self.stages)}"
            if name not in ("sft", "reward_model"):  # whose stages may be left out of a config that has them
                named = "" if name in STAGES else "name it there, or "
                raise ValueError(f"{void}: {named}leave it out ({name}=null on a command line)")
            object.__setattr__(self, "notices", (*self.notices, void))
        complete = {stage: self.sections.get(stage) or STAGES[stage]() for stage in self.stages}
        object.__setattr__(self, "sections", complete)

    def _check_own_stage(self, name: str) -> None:
        """Raises ValueError unless the name is possible for a stage of one's own, and has a section with a dataflow."""
        given = f"stages[{self.stages.index(name)}]={name}" if name in self.stages else f"section {name}"
        if name in kinds_of(Config):
            raise ValueError(f"{given} is no stage but another key of the config: name one of {', '.join(STAGES)}")
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"{given}: a stage of your own needs a name of letters, digits and '_', no word of Python")
        close = get_close_matches(name.lower(), [*STAGES, *(self.sections.keys() - {name})], n=1)
        meant, section = f", did you mean {close[0]}" if close else "", self.sections.get(name)
        if section is None:
            own = meant or f", or have a section of its own, {name}={{dataflow: FILE.py:FUNCTION}}"
            raise ValueError(f"{given}: it must be one of {', '.join(STAGES)}{own}")
        if section.dataflow is None:
            raise ValueError(f"{given} is a stage of your own without a function: set {name}.dataflow{meant}")

    @property
    def algorithm(self) -> str | None:
        """The stage of reinforcement learning, if there is one."""
        return next((stage for stage in self.stages if is_algorithm(stage)), None)

    @property
    def rl(self) -> RLStageConfig:
        return self.sections[str(self.algorithm)]

    def update_section(self, stage: str) -> tuple[str, Any]:
        """Returns the key and the section of the settings that divide a stage's updates into parts."""
        section = self.sections[stage]
        return (f"{stage}.algorithm", section.algorithm) if hasattr(section, "algorithm") else (stage, section)

    @property
    def asynchronous(self) -> AsynchronousConfig | None:
        return None if self.algorithm is None else self.rl.asynchronous

    @property
    def sft(self) -> SFTConfig:
        return self.sections["sft"]

    @property
    def reward_model(self) -> RewardModelConfig:
        return self.sections["reward_model"]

    @property
    def dpo(self) -> DPOStageConfig:
        return self.sections["dpo"]

    @property
    def rewards_and_costs(self) -> list[tuple[str, Literal["reward", "cost"], RewardConfig]]:
        """Each reward and each cost with its key, such as `rewards[0]`, and its kind."""
        kinds: dict[Literal["reward", "cost"], tuple[RewardConfig, ...]] = {"reward": self.rewards, "cost": self.costs}
        return [(f"{kind}s[{index}]", kind, part) for kind, parts in kinds.items() for index, part in enumerate(parts)]

    def length(self, stage: str) -> int:  # in iterations, or steps
        section = self.sections[stage]
        return section.iterations if is_algorithm(stage) else section.steps

    @property
    def sampled_rows(self) -> int:  # or scored, at a time
        return self.rl.rollout_batch if self.algorithm else self.sampling.batch

    @property
    def drawing(self) -> dict[str, Any]:
        """The settings with which the trained model is to be sampled. It is empty if they are those of its base: the
        run learns from no samples of its own, and the config sets no sampling."""
        own = self.sampling.drawing
        follows = self.algorithm is None and self.model.path is not None and own == SamplingSection().drawing
        return {} if follows else {**own, "max_new_tokens": self.data.max_response}

    @property
    def samples(self) -> int:  # responses to each prompt
        return self.rl.samples if self.algorithm else 1

    @property
    def logical_workers(self) -> int:
        assert self.asynchronous is not None
        return self.asynchronous.logical_workers or (1 if self.fleet is None else self.fleet.workers or 1)

    @property
    def offloading(self) -> SleepConfig:
        """The memory in which each model is stored between calls, also in a run without offloading."""
        return self.sleep or SleepConfig()

    @property
    def reference_is_base(self) -> bool:
        """The reference is the frozen base under the actor's adapter: no stage before RL has trained the adapter."""
        untrained = self.lora is not None and self.lora.path is None and not {"sft", "dpo"} & set(self.stages)
        return untrained and self.roles.reference is None
