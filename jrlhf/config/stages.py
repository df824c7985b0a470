"""What each stage of a run may be told: a section of its name. Every algorithm's own numbers are in `ppo/config.py`."""

from dataclasses import dataclass
from typing import Literal, get_args

from jrlhf.config.parse import Section, between, checked, count, natural, non_negative, positive
from jrlhf.ppo.config import (
    DAPOConfig,
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PolicyConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    RLOOConfig,
    SafeRLHFConfig,
    check_one_division,
)
from jrlhf.ppo.shaping import ScoreConfig

Algorithm = Literal[
    "ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "safe_rlhf"
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
Stage = Literal["sft", "reward_model", "dpo", Algorithm]


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW under a clipped global norm. One update is one step of the optimizer."""

    learning_rate: float = non_negative(1e-5)  # after the warm-up
    warmup: int = natural(20)  # updates over which it rises linearly from 0
    final: float = between(0.1, 0.0, 1.0)  # the part of it that is left at the end of its cosine
    weight_decay: float = non_negative(0.01)
    b1: float = checked(0.9, lambda value: 0 <= value < 1, "at least 0 and below 1")  # decay of the mean of gradients
    b2: float = checked(0.95, lambda value: 0 <= value < 1, "at least 0 and below 1")  # of the mean of their squares
    eps: float = positive(1e-8)  # added to the root of that mean
    max_grad_norm: float | None = positive(1.0)  # null: not clipped

    def duration(self, updates: int) -> tuple[int, int | None]:
        """The numbers of updates over which the learning rate rises, and then falls (None: it stays)."""
        warmup = min(self.warmup, updates)
        return warmup, None if self.final == 1.0 else max(updates - warmup, 1)


@dataclass(frozen=True)
class SFTConfig(OptimizerConfig):
    """Supervised fine-tuning on prompts and their responses."""

    steps: int = count(500)
    batch: int = count(64)  # rows
    micro_batches: int = count(1)  # parts in which a batch is computed: less memory, the same result
    micro_batch_tokens: int | None = count(None)  # parts of about so many tokens a device in its place, as in PPOConfig
    renaming: float = between(0.5, 0.0, 1.0)  # share of examples whose words are replaced: docstrings/renaming.py
    eval_every: int = count(100)  # steps
    save_every: int = count(100)  # steps between checkpoints

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_division(self.micro_batches, self.micro_batch_tokens)


@dataclass(frozen=True)
class RewardModelConfig(OptimizerConfig):
    """A Bradley-Terry model of preferences: of a dataset's, or of the built-in task's annotator."""

    weight: float = 1.0  # in the sum of rewards
    # The built-in task only: which responses its annotator compares.
    prompts: int = count(1500)  # for which responses are sampled
    samples_per_prompt: int = count(4)
    foreign_lines: int = natural(0)  # real lines of other functions among the candidates
    margin: float = non_negative(0.05)  # gold scores no further apart than this are a tie
    heldout_prompts: int = count(256)  # whose pairs measure the accuracy
    label_flip: float = between(0.05, 0.0, 0.5)  # share of preferences that the annotator gets wrong
    # Every task.
    steps: int = count(250)
    batch: int = count(96)  # pairs
    micro_batches: int = count(1)  # as in sft
    micro_batch_tokens: int | None = count(None)  # as in sft, of both sequences of pairs
    eval_every: int = count(50)  # steps
    save_every: int = count(100)  # steps between checkpoints

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_division(self.micro_batches, self.micro_batch_tokens)


@dataclass(frozen=True)
class DPOStageConfig(OptimizerConfig):
    """Direct preference optimisation: of a dataset's pairs, or of the built-in task's annotator.

    Which responses that one compares is in section reward_model, though such a run has no stage of that name.
    """

    learning_rate: float = non_negative(1e-6)  # after the warm-up
    weight_decay: float = non_negative(0.0)
    steps: int = count(250)
    batch: int = count(64)  # pairs
    eval_every: int = count(50)  # steps
    save_every: int = count(100)  # steps between checkpoints
    algorithm: DPOConfig = DPOConfig()


@dataclass(frozen=True)
class RLStageConfig(Section):
    """Reinforcement learning against the rewards. Each algorithm's section has these keys and its own `algorithm`."""

    # A function in place of the algorithm's iteration, package.module:function or file.py:function: algorithms.py.
    dataflow: str | None = None
    iterations: int = count(40)
    rollout_batch: int = count(128)  # rows: prompts, times the samples of each where an algorithm has groups
    temperature: float = positive(1.0)
    top_k: int | None = count(None)
    top_p: float | None = checked(None, lambda value: 0 < value <= 1, "above 0 and at most 1")
    min_new_tokens: int = natural(0)
    save_every: int = count(10)  # iterations between checkpoints
    actor: OptimizerConfig = OptimizerConfig(learning_rate=1e-6, warmup=10, final=1.0, weight_decay=0.0)
    algorithm: PolicyConfig = PolicyConfig()
    scores: ScoreConfig = ScoreConfig()  # what is done with a score before the algorithm sees it

    @property
    def samples(self) -> int:
        """Responses to each prompt."""
        return self.algorithm.samples if isinstance(self.algorithm, GRPOConfig) else 1


@dataclass(frozen=True)
class PPOStageConfig(RLStageConfig):
    critic: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, warmup=10, final=1.0, weight_decay=0.0)
    algorithm: PPOConfig = PPOConfig()


@dataclass(frozen=True)
class GRPOStageConfig(RLStageConfig):
    algorithm: GRPOConfig = GRPOConfig()


@dataclass(frozen=True)
class DrGRPOStageConfig(RLStageConfig):
    algorithm: DrGRPOConfig = DrGRPOConfig()


@dataclass(frozen=True)
class DAPOStageConfig(RLStageConfig):
    algorithm: DAPOConfig = DAPOConfig()
    scores: ScoreConfig = ScoreConfig(overlong_buffer=0.2)  # the paper's 4,096 of 20,480 tokens


@dataclass(frozen=True)
class GSPOStageConfig(RLStageConfig):
    algorithm: GSPOConfig = GSPOConfig()


@dataclass(frozen=True)
class RLOOStageConfig(RLStageConfig):
    algorithm: RLOOConfig = RLOOConfig()


@dataclass(frozen=True)
class ReinforcePPStageConfig(RLStageConfig):
    algorithm: ReinforcePPConfig = ReinforcePPConfig()


@dataclass(frozen=True)
class ReinforcePPBaselineStageConfig(RLStageConfig):
    algorithm: ReinforcePPBaselineConfig = ReinforcePPBaselineConfig()


@dataclass(frozen=True)
class ReMaxStageConfig(RLStageConfig):
    algorithm: ReMaxConfig = ReMaxConfig()


@dataclass(frozen=True)
class SafeRLHFStageConfig(PPOStageConfig):
    algorithm: SafeRLHFConfig = SafeRLHFConfig()
