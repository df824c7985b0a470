"""`Sampler`: responses of a policy and scores of a reward model, for any number of rows, outside of iterations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from jrlhf.data.batches import pad_rows, put_rows, read_responses, row_keys, whole_batches
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Response
from jrlhf.meshes.transfers import to_host
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.roles.generating import engine_of
from jrlhf.roles.model import Compute, Model, generation_weights, weights_at
from jrlhf.roles.placement import CallPlacement
from jrlhf.run.profiler import deadline


@dataclass(frozen=True)
class Sampler:
    """Answers prompts and scores sequences in batches of one size. It uses the programs of rollouts where it can.

    sampling, schedule, batch, samples: the settings of rollouts (batch: rows; samples: responses per prompt).
    deadline: seconds for a batch; a longer one ends the process.
    """

    mesh: Mesh
    compute: Compute
    tokenizer: Tokenizer
    sampling: SamplingConfig
    schedule: Schedule
    batch: int
    samples: int
    max_prompt: int
    deadline: float

    def sample(
        self,
        policy: Model,
        prompts: Sequence[Sequence[int]],
        key: jax.Array,
        sampling: SamplingConfig | None = None,
    ) -> list[Response]:
        """One response to each prompt. The same key gives the same texts. sampling: by default that of rollouts."""
        sampling = sampling or self.sampling
        schedule = self.schedule_for(sampling)
        generate = engine_of(policy.architecture, self.mesh, self.compute, sampling, schedule, 1)
        weights = generation_weights(policy.onloaded(), self.mesh, self.compute)
        responses: list[Response] = []
        for rows, count in whole_batches(len(prompts), self.batch):  # one shape needs one program
            tokens, lengths = put_rows(pad_rows([prompts[row] for row in rows], self.max_prompt), self.mesh)
            keys = row_keys(jax.random.fold_in(key, rows[0]), self.batch, self.mesh)
            with deadline(self.deadline):
                generation = to_host(generate(weights, tokens, lengths, keys, *policy.frozen))
            responses += read_responses(self.tokenizer, generation, slice(count))
        return responses

    def schedule_for(self, sampling: SamplingConfig) -> Schedule:
        """Returns the rollouts' schedule; or one of few programs, where the former would compile many only for this.

        The latter prefills prompts in waves, as rollouts do: all at once they may not fit into memory.
        """
        planned, limit = replace(self.schedule, last_groups=None), sampling.max_new_tokens
        shared = sampling == self.sampling and self.samples == 1
        if shared or planned.slots is not None or planned.is_one_program(self.batch, limit):
            return planned
        rows = self.batch * self.mesh.shape["tensor"] // self.mesh.size  # rows of one `tensor` group of devices
        wave = planned.waves(rows, rows, self.max_prompt)[-1]
        return Schedule(chunk=limit, buckets=1, lengths=1, prefill=wave)

    def scores(
        self,
        reward: Model,
        sequences: Sequence[Sequence[int]],
        placement: CallPlacement | None = None,
        *,
        limit: int | None = None,
    ) -> np.ndarray:
        """The reward model's score of each sequence, prompt and response together.

        placement: by default the mesh. limit: tokens of the longest possible response, by default that of rollouts.
        """
        reward, length = reward.onloaded(), self.max_prompt + (limit or self.sampling.max_new_tokens)
        placement = placement or CallPlacement(self.mesh)
        score = placement.compiled(reward.architecture, self.compute).score_sequences()
        weights = weights_at(reward, reward.architecture, placement.stored.mesh, self.compute)
        least = placement.mesh.size * placement.parts
        scores = []
        for rows, count in whole_batches(len(sequences), max(1, self.batch // least) * least):
            tokens, lengths = put_rows(pad_rows([sequences[row] for row in rows], length), placement.mesh)
            with deadline(self.deadline):
                scores.append(to_host(score(weights, tokens, lengths, *reward.frozen))[:count])
        return np.concatenate(scores)
