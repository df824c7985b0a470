"""`PromptStream`: gives prompts by the number of their group, and makes batches of groups that were drawn ahead."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.data.batches import Batch, put_prompts, put_rows
from jrlhf.data.types import Example
from jrlhf.fleet.state import Collected
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.generation.continuous import Prompt, ToHosts
from jrlhf.ppo.types import Rollout


class _Group(NamedTuple):
    """A group's prompt, on the host, and the examples and texts of its rows."""

    prompt: Prompt
    examples: Sequence[Example]
    texts: Sequence[str]


class PromptStream:
    """The endless stream of a run's prompts, one per group: group n is prompt n modulo U of batch n // U.

    take: number of a batch -> its prompts, on devices. groups: prompts of a batch, U. samples: rows of a group, S.
    read: copies arrays of `mesh` to the host, in every process.
    """

    def __init__(self, take: Callable[[int], Batch], mesh: Mesh, groups: int, samples: int, read: ToHosts = to_host):
        self._take, self._mesh, self._groups, self._samples, self._to_hosts = take, mesh, groups, samples, read
        self._read = lru_cache(maxsize=2)(self._read_batch)
        self._started: dict[int, _Group] = {}

    def prompt(self, number: int) -> Prompt:
        """Returns the prompt of a group, with its rows' keys. The group is stored until `batch` returns it."""
        return self._group(number).prompt

    def batch(self, collected: Collected, step: int, answers: Mapping[str, Any]) -> Batch:
        """Returns the batch of groups that were drawn ahead, with their rollout."""
        examples, texts = self.rows(collected)
        prompts = [self._started.pop(int(number)).prompt for number in collected.numbers]
        tokens, lengths = (np.stack([getattr(prompt, name) for prompt in prompts]) for name in ("tokens", "length"))
        tokens, lengths = put_prompts((tokens, lengths.astype(np.int32)), self._mesh, self._samples)
        keys = put_rows(jax.random.wrap_key_data(jnp.concatenate([prompt.keys for prompt in prompts])), self._mesh)
        rollout = self._rollout(prompts, collected)
        groups = zip(collected.numbers.tolist(), collected.workers.tolist(), strict=True)
        origins = [group for group in groups for _ in range(self._samples)]
        return Batch((tokens, lengths, keys), examples, texts, step, rollout, answers, origins)

    def rows(self, collected: Collected) -> tuple[list[Example], list[str]]:
        """The examples and their texts, one for each row."""
        groups = [self._group(int(number)) for number in collected.numbers]
        return [row for group in groups for row in group.examples], [row for group in groups for row in group.texts]

    def place(self, number: int) -> tuple[int, int]:
        """Returns the number of a group's batch, and the index of the group's first row in it."""
        batch, at = divmod(number, self._groups)
        return batch, at * self._samples

    def _group(self, number: int) -> _Group:
        if number not in self._started:
            batch, at = divmod(number, self._groups)
            self._started[number] = self._read(batch)[at]
        return self._started[number]

    def _read_batch(self, batch: int) -> list[_Group]:
        prompts = self._take(batch)
        tokens, lengths, keys = prompts.arrays
        tokens, lengths, data = self._to_hosts((tokens, lengths, jax.random.key_data(keys)))
        keys, groups = data.reshape(self._groups, self._samples, -1), []
        for at, (ids, length, own) in enumerate(zip(tokens, lengths, keys, strict=True)):
            rows = slice(at * self._samples, (at + 1) * self._samples)
            prompt = Prompt(batch * self._groups + at, ids, int(length), own)
            groups.append(_Group(prompt, prompts.examples[rows], prompts.texts[rows]))
        return groups

    def _rollout(self, prompts: Sequence[Prompt], collected: Collected) -> Rollout:
        """Writes each response right after its prompt."""
        drawn, width = collected.rows, len(prompts[0].tokens)
        count, limit = drawn.tokens.shape
        tokens, starts = np.zeros((count, width + limit), np.int32), np.zeros(count, np.int32)
        logprobs, versions = np.zeros(tokens.shape, np.float32), np.zeros_like(tokens)
        for row, length in enumerate(drawn.lengths):
            prompt = prompts[row // self._samples]
            starts[row] = prompt.length
            response = slice(prompt.length, prompt.length + length)
            tokens[row, : prompt.length] = prompt.tokens[: prompt.length]
            tokens[row, response] = drawn.tokens[row, :length]
            logprobs[row, response] = drawn.logprobs[row, :length]
            versions[row, response] = drawn.versions[row, :length]
        rows = tokens, starts, drawn.lengths, logprobs, drawn.finished, versions
        tokens, starts, lengths, logprobs, finished, versions = put_rows(rows, self._mesh)
        newest = to_devices(np.int32(collected.version), NamedSharding(self._mesh, P()))
        return Rollout(tokens, starts, lengths, logprobs, finished, newest, versions=versions)
