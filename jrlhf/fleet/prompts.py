"""The prompts of a run by the number of their group, and batches of groups that were drawn ahead."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from jrlhf.data.batches import Batch, put_prompts, put_rows
from jrlhf.data.types import Example
from jrlhf.fleet.slices import Collected
from jrlhf.meshes import to_devices, to_host
from jrlhf.models.generation.continuous import Prompt
from jrlhf.ppo import Rollout


class _Stretch(NamedTuple):
    """The prompts of one synchronous batch, on the host."""

    tokens: Int[np.ndarray, "U P"]
    lengths: Int[np.ndarray, "U"]
    keys: np.ndarray  # [U, S, ...]: data of the rows' PRNG keys
    examples: Sequence[Example]  # of rows
    texts: Sequence[str]


class PromptStream:
    """The endless stream of a run's prompts, one a group: group n is prompt n modulo U of batch n // U.

    take: number of a batch -> its prompts, on devices. groups: prompts of a batch, U. samples: rows of a group, S.
    """

    def __init__(self, take: Callable[[int], Batch], mesh: Mesh, groups: int, samples: int):
        self._take, self._mesh, self._groups, self._samples = take, mesh, groups, samples
        self._stretch = lru_cache(maxsize=16)(self._read)

    def prompt(self, number: int) -> Prompt:
        """The prompt of a group, with its rows' keys."""
        batch, at = divmod(number, self._groups)
        stretch = self._stretch(batch)
        return Prompt(number, stretch.tokens[at], int(stretch.lengths[at]), stretch.keys[at])

    def batch(self, collected: Collected, step: int, version: int, answers: Mapping[str, Any]) -> Batch:
        """The batch of groups that were drawn ahead, with their rollout. version: of the weights that draw now."""
        prompts = [self.prompt(int(number)) for number in collected.numbers]
        tokens, lengths = (np.stack([getattr(prompt, name) for prompt in prompts]) for name in ("tokens", "length"))
        tokens, lengths = put_prompts((tokens, lengths.astype(np.int32)), self._mesh, self._samples)
        keys = put_rows(jax.random.wrap_key_data(jnp.concatenate([prompt.keys for prompt in prompts])), self._mesh)
        examples, texts = self.rows(collected)
        rollout = self._rollout(prompts, collected, version)
        return Batch((tokens, lengths, keys), examples, texts, step, rollout, answers)

    def rows(self, collected: Collected) -> tuple[list[Example], list[str]]:
        """The examples and their texts, one for each row."""
        places = [divmod(int(number), self._groups) for number in collected.numbers]
        rows = [(self._stretch(batch), at * self._samples + s) for batch, at in places for s in range(self._samples)]
        return [own.examples[row] for own, row in rows], [own.texts[row] for own, row in rows]

    def place(self, number: int) -> tuple[int, int]:
        """The batch of a group, and the number of the group's first row in it."""
        batch, at = divmod(number, self._groups)
        return batch, at * self._samples

    def _read(self, number: int) -> _Stretch:
        batch = self._take(number)
        tokens, lengths, keys = batch.arrays
        tokens, lengths, data = to_host((tokens, lengths, jax.random.key_data(keys)))
        keys = data.reshape(self._groups, self._samples, -1)
        return _Stretch(tokens, lengths, keys, batch.examples, batch.texts)

    def _rollout(self, prompts: Sequence[Prompt], collected: Collected, version: int) -> Rollout:
        """Writes each response right after its prompt."""
        (count, limit), width = collected.tokens.shape, len(prompts[0].tokens)
        tokens, starts = np.zeros((count, width + limit), np.int32), np.zeros(count, np.int32)
        logprobs, versions = np.zeros(tokens.shape, np.float32), np.zeros_like(tokens)
        for row, length in enumerate(collected.lengths):
            prompt = prompts[row // self._samples]
            starts[row] = prompt.length
            response = slice(prompt.length, prompt.length + length)
            tokens[row, : prompt.length] = prompt.tokens[: prompt.length]
            tokens[row, response] = collected.tokens[row, :length]
            logprobs[row, response] = collected.logprobs[row, :length]
            versions[row, response] = collected.versions[row, :length]
        rows = tokens, starts, collected.lengths, logprobs, collected.finished, versions
        tokens, starts, lengths, logprobs, finished, versions = put_rows(rows, self._mesh)
        newest = to_devices(np.int32(version), NamedSharding(self._mesh, P()))
        return Rollout(tokens, starts, lengths, logprobs, finished, newest, versions=versions)
