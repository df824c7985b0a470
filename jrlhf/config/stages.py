"""The sections of the stages. Each algorithm of reinforcement learning is a row of the table at the end."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar, Literal

from jrlhf.config.parse import Feature
from jrlhf.ppo.config import algorithms
from jrlhf.ppo.config.policy import PolicyConfig, check_one_division
from jrlhf.ppo.config.score import ScoreConfig
from jrlhf.ppo.fields import LONGEST, Section, between, checked, count, natural, non_negative, only_if, positive


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """The checkpoints of a stage."""

    keep: int = count(2)  # number of newest checkpoints that are kept; with 1, nothing replaces a damaged one
    # A metric of held-out rows, such as val-core/all/score/mean@1 or -sft/eval_loss (with the minus, small values are
    # good). The checkpoint with its best value is kept, too, and its stage ends with these weights. null: the last.
    best: str | None = checked(
        None,
        lambda name: bool(re.fullmatch(r"-?(val-\S+|(sft|reward_model|dpo)/eval_\S+)", name)),
        "a metric of held-out rows, such as val-core/all/score/mean@1 or -sft/eval_loss",
    )

    @property
    def validated(self) -> bool:
        """True if `best` is a metric of validations."""
        return (self.best or "").lstrip("-").startswith("val-")

    def best_in(self, stage: str) -> str | None:
        """The metric `best` if it is one of this stage."""
        own = (self.best or "").lstrip("-").startswith(f"{stage}/") or (self.validated and is_algorithm(stage))
        return self.best if own else None


@dataclass(frozen=True)
class StopConfig(Feature):
    """Ends a stage early, once a metric gets no better. The run then goes on as after the stage's last step."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("metric",)
    OFF: ClassVar[str] = "stop.metric=null"
    # A metric, such as val-core/all/score/mean@1; with a minus before it, small values are good. null: no early stop.
    metric: str | None = checked(
        None, lambda name: bool(re.fullmatch(r"-?\S+", name)), "the name of a metric, such as critic/score/mean"
    )
    patience: int = count(3)  # number of values in a row that are no better than the best one, which end the stage
    threshold: float = non_negative(0.0)  # by how much a better value must exceed the best one


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """An optimizer with a clipped global norm. One update is one step of the optimizer."""

    # adamw; muon; or a function of yours, my_optimizer.py:make or package.module:make, which gets this section and
    # returns an optax transformation of gradients to a direction (docs/algorithms.md#optimizers).
    optimizer: str = "adamw"
    learning_rate: float = non_negative(1e-5)  # after the warm-up
    # Updates over which the learning rate rises linearly from 0. A stage of no more updates takes a tenth of them.
    warmup: int = natural(20)
    # Fall of the learning rate after the warm-up: a cosine; linear; constant (no fall); or wsd (warm-up, stable,
    # decay), which is constant at first and linear in the last updates.
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # Share of the learning rate at the end; 1: it does not fall.
    final: float = between(0.1, 0.0, 1.0, **only_if(lambda own: own.schedule != "constant", "{path}.schedule=constant"))
    # Share of all updates that the linear part of wsd takes.
    decay: float = checked(
        0.2,
        lambda value: 0 < value <= 1,
        "above 0 and at most 1",
        bounds={"exclusiveMinimum": 0, "maximum": 1},
        **only_if(lambda own: own.schedule == "wsd", "{path}.schedule={section.schedule}"),
    )
    # As in AdamW, times the learning rate, with any optimizer. Matrices and tables decay, norms and biases do not.
    weight_decay: float = non_negative(0.01)
    b1: float = checked(0.9, lambda value: 0 <= value < 1, "at least 0 and below 1")  # decay of the gradients' mean
    b2: float = checked(0.95, lambda value: 0 <= value < 1, "at least 0 and below 1")  # decay of their squares' mean
    eps: float = positive(1e-8)  # added to the root of that mean
    max_grad_norm: float | None = positive(1.0)  # global norm to which gradients are clipped; null: not clipped

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule in ("linear", "wsd") and self.final == 1:
            self.refuse("final", f"below 1 with schedule={self.schedule}, which falls to it")

    def duration(self, updates: int) -> tuple[int, int | None]:
        """Returns the number of updates of the warm-up, and that of the fall at the end; None: there is no fall."""
        warmup = self.warmup if self.warmup < updates else updates // 10
        if self.final == 1 or self.schedule == "constant":
            return warmup, None
        fall = updates - warmup
        return warmup, max(min(fall, round(self.decay * updates)) if self.schedule == "wsd" else fall, 1)


@dataclass(frozen=True)
class ActorOptimizerConfig(OptimizerConfig):
    """The actor's optimizer in reinforcement learning."""

    learning_rate: float = 1e-6
    warmup: int = 10
    final: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class CriticOptimizerConfig(ActorOptimizerConfig):
    """The critic's optimizer in reinforcement learning."""

    learning_rate: float = 1e-5


@dataclass(frozen=True)
class PipelineConfig(Feature):
    """Pipeline stages: groups of neighbouring devices, each with a part of the layers."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("stages",)
    OFF: ClassVar[str] = "{path}.stages=null"
    # Number of groups of devices, each with its part of mesh.fsdp, which this number must divide; null: no stages.
    stages: int | None = count(None, "at least 2", least=2)
    # Order of an update's operations: docs/plans.md#pipelines.
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"


_EQUAL_PARTS = only_if(lambda section: section.pipeline is None, "{path}.pipeline, whose parts have equally many rows")


@dataclass(frozen=True)
class PairsStageConfig(OptimizerConfig):
    """Settings of the stages that learn from fixed rows."""

    steps: int = count(250)  # updates
    batch: int = count(64)  # rows, or pairs, per update
    eval_every: int = count(50)  # steps between evaluations on held-out rows
    save_every: int = count(100)  # steps between checkpoints
    # Update, and score held-out rows, in pipeline stages: same result up to rounding; needs micro_batches. null: none.
    pipeline: PipelineConfig | None = None

    @property
    def updates(self) -> int:
        """The number of updates of the stage."""
        return self.steps

    @property
    def pipeline_stages(self) -> int:
        """The number of pipeline stages; 1: models compute whole."""
        return 1 if self.pipeline is None else self.pipeline.stages or 1

    def evaluates(self, step: int) -> bool:
        """True if held-out rows are evaluated after this step: the first, the last, and every `eval_every`-th."""
        return step == 0 or (step + 1) % self.eval_every == 0 or step + 1 == self.steps


@dataclass(frozen=True)
class SFTConfig(PairsStageConfig):
    """Supervised fine-tuning on prompts and their responses."""

    steps: int = 500
    eval_every: int = 100
    micro_batches: int = count(1)  # parts in which a batch is computed: less memory, the same result
    # Parts of about this number of tokens per device instead; null: off.
    micro_batch_tokens: int | None = count(None, **_EQUAL_PARTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_division(self.micro_batches, self.micro_batch_tokens)


@dataclass(frozen=True)
class RewardModelConfig(SFTConfig):
    """A Bradley-Terry model of preferences, from a dataset or from the annotator of the built-in task."""

    weight: float = 1.0  # weight of its scores in the sum of the rewards
    steps: int = 250
    batch: int = 96  # pairs per update
    eval_every: int = 50  # steps between evaluations on held-out pairs


@dataclass(frozen=True)
class DPOStageConfig(PairsStageConfig):
    """Direct preference optimisation on pairs from a dataset, or from the annotator of the built-in task."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    algorithm: algorithms.DPOConfig = algorithms.DPOConfig()


_VIRTUAL = only_if(lambda section: section.clock == "virtual", "{path}.clock=wall")


@dataclass(frozen=True)
class AsynchronousConfig(Section):
    """Rollouts on their own devices (`plan: disaggregated` or `auto`), which continue while the actor is trained.

    Counts alone determine the tokens of each update: on a virtual clock a decode step takes 1 and an update
    `update_steps`. So a run has the same bits on any hardware, and after a kill, unless `clock` is "wall".
    """

    # Maximum age of a token with full weight: versions between the weights that drew it and the weights that learn from
    # it; 0: a synchronous run.
    staleness: int = natural(1, most=1000)
    # Allows a staleness above 1 without algorithm.old_logprobs=rollout or algorithm.importance.
    uncorrected: bool = False
    on_new_weights: Literal["keep_cache", "prefill_again", "finish"] = "keep_cache"
    """What happens to unfinished rows when new weights arrive. "keep_cache": they continue with the new weights and the
    keys and values of the old ones (PipelineRL, arXiv:2509.19128). "prefill_again": their caches are recomputed (AReaL,
    arXiv:2505.24298). "finish": they are finished with the old weights, and no row starts in the meantime."""
    clock: Literal["virtual", "wall"] = "virtual"
    """What determines which rows form a batch, and between which chunks weights change. "virtual": counts of tokens, so
    a run can be reproduced. "wall": the order of arrival, so no process waits for another, and runs differ."""
    # Time of one update on the virtual clock, in decode steps.
    update_steps: int = count(128, most=10**6, **_VIRTUAL)
    # Time from the last token of a prompt's responses to their scores on the virtual clock, in decode steps.
    reward_steps: int = natural(0, most=10**6, **_VIRTUAL)
    # Number of batches of decode slots, each with the same share of the slots. Results depend on it, but not on the
    # number of processes. null: fleet.workers, else 1.
    logical_workers: int | None = count(None, most=1024)
    logprob_check: Literal["stop", "warn", "off"] = "stop"
    """What happens if a worker's log-probabilities differ from those that the trainer recomputes by more than rounding
    explains. "stop": the run ends. "warn": it prints a sentence for each such worker, counts in async/logprob_alarms,
    and learns from the tokens. "off": nothing is recomputed."""


@dataclass(frozen=True)
class FleetSection(Feature):
    """Processes that draw the rollouts of asynchronous training, each with its own devices."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("workers",)
    OFF: ClassVar[str] = "fleet.workers=null"
    # number of processes; results do not depend on it, and fleet.yaml changes it in a run
    workers: int | None = count(None, most=1024)
    # Where they run; local: on this machine; ray: on the Ray cluster of this machine or of RAY_ADDRESS.
    engine: Literal["local", "ray"] = "local"
    # The GPUs of each process, as CUDA_VISIBLE_DEVICES, such as ["4,5", "6,7"]; empty: on CPUs, simulated devices.
    devices: tuple[str, ...] = ()
    # Seconds for one chunk or one transfer after which a process is replaced. After the first ones, which compile, it
    # is replaced earlier: after 10 times the longest recent one of the same kind, but at least 10 seconds.
    deadline: float = positive(600.0, most=LONGEST)
    # How new weights are sent; full: all trained weights; delta: only the changed bits, if that is less. Equal results.
    transfer: Literal["full", "delta"] = "full"
    # With delta, number of updates after which all weights are sent again.
    anchor_every: int = count(100, **only_if(lambda section: section.transfer == "delta", "fleet.transfer=full"))


@dataclass(frozen=True)
class RLStageConfig(Section):
    """Reinforcement learning against the rewards. Every algorithm's section has these keys and its own `algorithm`."""

    # A function used instead of the algorithm's own iteration, package.module:function or file.py:function; null: none.
    dataflow: str | None = None
    iterations: int = count(40)  # batches of experience to learn from
    rollout_batch: int = count(128)  # responses per iteration: prompts times the samples of each
    save_every: int = count(10)  # iterations between checkpoints
    actor: ActorOptimizerConfig = ActorOptimizerConfig()
    algorithm: PolicyConfig = PolicyConfig()
    scores: ScoreConfig = ScoreConfig()  # changes a response's score before the algorithm gets it
    asynchronous: AsynchronousConfig | None = None
    # A prompt whose responses have at least this mean score, before it is shaped, is left out of later epochs, while a
    # batch of others remains (ScaleRL's no-positive-resampling, arXiv:2510.13786: a pass rate of 0.9); null: off.
    solved_score: float | None = None

    @property
    def updates(self) -> int:
        """The number of updates of each trained role in the stage."""
        return self.iterations * self.algorithm.epochs * self.algorithm.minibatches

    def optimizer_of(self, role: str) -> ActorOptimizerConfig:
        """The optimizer of a trained role: the actor's, or the critics'."""
        return self.actor

    @property
    def samples(self) -> int:
        """The number of responses to each prompt."""
        return self.algorithm.samples if isinstance(self.algorithm, algorithms.GRPOConfig) else 1


@dataclass(frozen=True)
class PPOStageConfig(RLStageConfig):
    critic: CriticOptimizerConfig = CriticOptimizerConfig()

    def optimizer_of(self, role: str) -> ActorOptimizerConfig:
        return self.actor if role == "actor" else self.critic


def optimizers_of(stage: str, section: Any) -> dict[str, OptimizerConfig]:
    """Returns key, such as `ppo.actor` -> settings of each optimizer of a stage. Critics share one."""
    if isinstance(section, OptimizerConfig):
        return {stage: section}
    roles = ("actor", "critic") if isinstance(section, PPOStageConfig) else ("actor",)
    return {f"{stage}.{role}": section.optimizer_of(role) for role in roles}


@dataclass(frozen=True)
class DAPOScoreConfig(ScoreConfig):
    """Scores as in DAPO's paper, where the buffer is 4,096 of 20,480 tokens."""

    overlong_buffer: float | None = 0.2


def _rl(algorithm: PolicyConfig, **more: Any) -> type[RLStageConfig]:
    """Returns the class of an algorithm's section: shared keys, those of `algorithm`, and other defaults in `more`."""
    own = [(name, type(value), value) for name, value in {"algorithm": algorithm, **more}.items()]
    base = PPOStageConfig if algorithm.has_critic else RLStageConfig
    return make_dataclass(type(algorithm).__name__, own, bases=(base,), frozen=True)


# Algorithm: its section, its title, and its file in algorithms/, which defines a function with the file's name.
_ROWS: dict[str, tuple[type[Section], str, str]] = {
    "dpo": (DPOStageConfig, "DPO", "dpo"),
    "ppo": (_rl(algorithms.PPOConfig()), "PPO", "ppo"),
    "grpo": (_rl(algorithms.GRPOConfig()), "GRPO", "grpo"),
    "dr_grpo": (_rl(algorithms.DrGRPOConfig()), "Dr. GRPO", "grpo"),
    "dapo": (_rl(algorithms.DAPOConfig(), scores=DAPOScoreConfig()), "DAPO", "dapo"),
    "gspo": (_rl(algorithms.GSPOConfig()), "GSPO", "grpo"),
    "rloo": (_rl(algorithms.RLOOConfig()), "RLOO", "grpo"),
    "reinforce_pp": (_rl(algorithms.ReinforcePPConfig()), "REINFORCE++", "reinforce_pp"),
    "reinforce_pp_baseline": (_rl(algorithms.ReinforcePPBaselineConfig()), "REINFORCE++-baseline", "grpo"),
    "remax": (_rl(algorithms.ReMaxConfig()), "ReMax", "remax"),
    "safe_rlhf": (_rl(algorithms.SafeRLHFConfig()), "Safe RLHF", "safe_rlhf"),
}
STAGES: dict[str, type[Section]] = {"sft": SFTConfig, "reward_model": RewardModelConfig}
STAGES |= {name: section for name, (section, _, _) in _ROWS.items()}
TITLES = {name: title for name, (_, title, _) in _ROWS.items()}
FILES = {name: file for name, (_, _, file) in _ROWS.items()}
ALGORITHMS = tuple(name for name, section in STAGES.items() if issubclass(section, RLStageConfig))
# A stage of one's own is reinforcement learning by its `dataflow`, with the settings and the roles of this one.
OWN = "grpo"


def is_algorithm(stage: str) -> bool:
    """True for a stage of reinforcement learning, also for one of one's own."""
    return stage in ALGORITHMS or stage not in STAGES


def names_a_stage(key: str, given: Mapping[str, Any]) -> bool:
    """True if an unknown key of a config is the section of a stage of one's own: `stages` names it, or it has a
    dataflow. given: the config as it was given."""
    words = re.findall(r"[^][,'\" ]+", str(given.get("stages")))
    return key in words or (isinstance(given[key], Mapping) and "dataflow" in given[key])
