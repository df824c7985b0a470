"""`Context`: the settings and services that all stages of a run share."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.data.task import Task
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models.generation.occupancy import LastRowsPolicy
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.rewards.mixture import Rewards
from jrlhf.rewards.of_config import open_rewards
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Compute, Model
from jrlhf.roles.placement import CallPlacement, RolePlacement
from jrlhf.roles.planned_placement import call_placement, staged
from jrlhf.roles.sampling import Sampler
from jrlhf.run.clock import Stopwatch
from jrlhf.run.console import Console
from jrlhf.run.directory import RunDirectory
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.run.tracking import Tracker
from jrlhf.stages.identity import Identity


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
    placements: Mapping[str, RolePlacement] = field(default_factory=dict)  # by role, for reinforcement learning
    moves: LastRowsPolicy | None = None  # chooses where the last rows of rollouts decode, if a simulation does

    def placement(self, role: str) -> RolePlacement:
        """The placement of a role's calls in reinforcement learning. Without a plan, it is the whole mesh."""
        return self.placements.get(role, RolePlacement.of(self.mesh))

    def stage_placement(self, stage: str) -> RolePlacement:
        """The placement of updates and scores in a stage that learns from fixed rows: in its pipeline stages, or on the
        whole mesh, where weights are stored in any case."""
        devices = list(self.mesh.devices.flat)
        whole = Placement(Slice(0, len(devices)), "train", *self.mesh.devices.shape)
        update, score = (
            call_placement(staged(self.config, stage, kind, whole), devices) for kind in ("train", "infer")
        )
        return RolePlacement(CallPlacement(self.mesh), {"update": update, "logprobs": score, "score": score})

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
            token_limit=tokenizer.vocab_size if spare else None,
        )

    @property
    def initial(self) -> InitialModels:
        """Makes the models from which the run starts."""
        return InitialModels(self.config, self.mesh, self.compute, self.console)

    def open_rewards(
        self, policy: Model, trained: Model | None
    ) -> AbstractContextManager[tuple[Rewards, Rewards | None]]:
        """Starts the processes of the rewards and costs, and loads their models. trained: the run's reward model."""
        return open_rewards(self.initial, self.task, self.run.path, self.placement, policy, trained)

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
