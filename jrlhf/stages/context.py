"""`Context`: the settings and services that all stages of a run share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.data.task import Task
from jrlhf.models.generation.occupancy import LastRowsPolicy
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.roles.model import Compute
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.sampling import Sampler
from jrlhf.run.clock import Stopwatch
from jrlhf.run.console import Console
from jrlhf.run.directory import RunDirectory
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.run.tracking import Tracker
from jrlhf.stages.identity import Identity
from jrlhf.stages.watching import Hook


@dataclass(frozen=True)
class Context:
    """A run's settings and services. None of its fields changes during the run."""

    config: Config
    mesh: Mesh
    compute: Compute
    task: Task
    vocab_size: int  # the actor's vocabulary size
    run: RunDirectory
    console: Console
    preemption: PreemptionGuard
    identity: Identity
    phases: Stopwatch = field(default_factory=Stopwatch)
    trackers: Sequence[Tracker] = ()
    hooks: Sequence[tuple[str, Hook]] = ()  # with the settings that name them; in process 0
    # By role, for reinforcement learning; by stage, for those that learn from fixed rows.
    placements: Mapping[str, RolePlacement] = field(default_factory=dict)
    moves: LastRowsPolicy | None = None  # chooses where the last rows of rollouts decode, if a simulation does

    def placement(self, role: str) -> RolePlacement:
        """The placement of a role's calls in reinforcement learning. Without a plan, it is the whole mesh."""
        return self.placements.get(role, RolePlacement.of(self.mesh))

    @property
    def length(self) -> int:
        """The width T of every batch of tokens."""
        return self.config.data.max_prompt + self.config.data.max_response

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling settings of responses, in rollouts and everywhere else."""
        tokenizer = self.task.tokenizer
        spare = tokenizer.vocab_size < self.vocab_size  # the embedding has rows without a token
        return SamplingConfig(
            max_new_tokens=self.config.data.max_response,
            **self.config.sampling.drawing,
            stop_ids=tokenizer.eos_ids,
            stops=tokenizer.stop and tokenizer.stop.table,
            token_limit=tokenizer.vocab_size if spare else None,
        )

    @property
    def sampler(self) -> Sampler:
        """Answers prompts outside of iterations."""
        return Sampler(
            self.mesh,
            self.compute,
            self.task.tokenizer,
            self.sampling,
            self.config.rollout,
            batch=self.config.sampled_rows,
            samples=self.config.samples,
            max_prompt=self.config.data.max_prompt,
            deadline=self.config.deadline,
        )
