"""Reward models with their own tokenizer, which read an answer as text."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from jrlhf.config.schema import RewardConfig
from jrlhf.data.batches import pad_rows, program_width, put_rows
from jrlhf.data.chat import template_variables
from jrlhf.data.encode import encode_answered
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.tokenizer_files import check_vocabulary, load_tokenizer
from jrlhf.data.types import Ids
from jrlhf.errors import RewardFailure, UserError
from jrlhf.meshes.transfers import to_host
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.hf.config import ENDS
from jrlhf.models.hf.files import parse_json
from jrlhf.models.params import Params
from jrlhf.rewards.types import INVALID, Kind, Sample, Scored
from jrlhf.roles.model import Compute, Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.pretrained import locate
from jrlhf.run.clock import may_deadlock

Begun = tuple[Sequence[Sample], list[Array]]  # samples, and the scores [batch] of each batch of them


def reward_tokenizer(path: str, key: str, model: ModelConfig) -> Tokenizer:
    return check_vocabulary(load_tokenizer(locate(path, key)), model.vocab_size)


def is_ours(path: str, key: str) -> bool:
    """True for a reward model that a run trained: it reads an answer up to its end-of-text token."""
    return parse_json((locate(path, key) / "config.json").read_bytes()).get(ENDS) == "eos"


class TextReward:
    """A frozen reward model that reads text: `encode_answered` tokenizes it again with the model's own tokenizer.

    Its scores are those of transformers, which reads them at the last token that is not the model's pad.
    A score that is not finite is a failure, as in reward functions.

    key: the setting that names the model, for messages. usual: maximum sequence length under the actor's tokenizer.
    rows: rows of a tile; no more than these are scored together. None: as many as the config says.
    """

    def __init__(
        self,
        reward: RewardConfig,
        key: str,
        model: Model,
        placement: RolePlacement,
        compute: Compute,
        *,
        kind: Kind,
        usual: int,
        rows: int | None = None,
    ):
        assert reward.model is not None
        self._key, self.identity, self._model = f"{key}={reward.model}", model.fingerprint(), placement.store(model)
        self._tokenizer = reward_tokenizer(reward.model, key, model.config)
        self._cut = is_ours(reward.model, key)
        self._special = reward.special_tokens
        self._called = f"{kind} {reward.name}"
        self._on_failure = INVALID if reward.on_failure == "exclude" else reward.on_failure
        place = placement["score"]
        compiled = place.compiled(self._model.architecture, compute)
        self._mesh = compiled.mesh
        divisor = self._mesh.size * place.parts
        self._batch = -(-min(reward.batch, rows or reward.batch) // divisor) * divisor
        self._most = model.config.max_positions
        # Widths for texts of usual length. This tokenizer may make longer rows.
        self._widths = sorted({program_width(length, self._most, 64) for length in (usual // 4, usual // 2, usual)})
        self._warm = False
        self._score = compiled.score_sequences()

    def score(self, samples: Sequence[Sample], step: int = 0) -> Scored:
        """Returns the model's score of every sample."""
        return self.finish([self.begin(samples)])

    def begin(self, samples: Sequence[Sample]) -> Begun:
        """Starts to score samples, in batches of one shape."""
        sequences = [self._encode(sample) for sample in samples]
        params = self._model.onloaded().params
        if not self._warm:  # also compiles what later texts may need
            for width in self._widths:
                self._scores(params, [sequences[0][:1]], width)
            self._warm = True
        width = max(program_width(max(map(len, sequences)), self._most, 64), self._widths[0])
        starts = range(0, len(sequences), self._batch)
        return samples, [self._scores(params, sequences[start : start + self._batch], width) for start in starts]

    def finish(self, parts: Sequence[Begun]) -> Scored:
        """Waits for the scores of all samples, in order."""
        samples = [sample for own, _ in parts for sample in own]
        batches = to_host([batches for _, batches in parts])
        scores = [np.concatenate(own)[: len(part)] for own, (part, _) in zip(batches, parts, strict=True)]
        scores = np.concatenate(scores).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(scores))
        if not len(bad):
            return Scored(scores)
        if self._on_failure is None:
            raise RewardFailure(
                f"{self._called} ({self._key}) gave {scores[bad[0]]} to {samples[bad[0]].response.text[:200]!r}: use "
                "another model, or give on_failure a score to go on with"
            )
        scores[bad] = self._on_failure
        return Scored(scores, failures={"nan": len(bad)})

    def _scores(self, params: Params, sequences: Sequence[Ids], width: int) -> Float[Array, "batch"]:
        """Returns the scores of a batch, followed by meaningless ones if it is not full. One program per width."""
        full = [*sequences, *[sequences[0]] * (self._batch - len(sequences))]
        with jax.set_mesh(self._mesh):
            scores = self._score(params, *put_rows(pad_rows(full, width), self._mesh))
        return jax.block_until_ready(scores) if may_deadlock(self._mesh.size) else scores

    def _encode(self, sample: Sample) -> Ids:
        sample = sample.marked if self._special else sample
        try:
            ids = encode_answered(
                self._tokenizer,
                sample.example.prompt,
                sample.completion,
                variables=template_variables(sample.example.columns),
                finished=sample.response.finished,
                cut=self._cut,
            )
        except UserError as error:
            raise UserError(f"{self._key}: {error}") from error
        if len(ids) > self._most:
            raise UserError(
                f"{self._key} reads {self._most} tokens at most, and a prompt with its answer "
                f"has {len(ids)} for it: lower data.max_prompt or data.max_response"
            )
        return ids
