"""`PromptStream`: gives prompts by the number of their group, and makes batches of groups that were drawn ahead."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.data.batches import Batch, put_prompts, put_rows
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.generation.continuous import Prompt, ToHosts
from jrlhf.models.generation.decoding import Results, after_prompts, assemble
from jrlhf.ppo.types import Rollout
from jrlhf.rollouts.state import Collected


class _Group(NamedTuple):
    """A group's prompt, on the host; the prompts of its batch, without arrays; and its rows in this batch."""

    prompt: Prompt
    batch: Batch
    rows: slice


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

    def tile(self, collected: Collected) -> tuple[Batch, slice, Rollout]:
        """Returns the prompts of a group's batch, the group's rows in it, and these rows on the host."""
        (group,) = self._groups_of(collected)
        return group.batch, group.rows, self._rollout([group.prompt], collected)

    def batch(self, collected: Collected, step: int) -> tuple[Batch, Rollout]:
        """Returns the batch of groups that were drawn ahead, and their rollout."""
        groups = self._groups_of(collected)
        for number in collected.numbers.tolist():
            del self._started[number]
        prompts = [group.prompt for group in groups]
        tokens, lengths = (np.stack([getattr(prompt, name) for prompt in prompts]) for name in ("tokens", "length"))
        tokens, lengths = put_prompts((tokens, lengths.astype(np.int32)), self._mesh, self._samples)
        keys = put_rows(jax.random.wrap_key_data(jnp.concatenate([prompt.keys for prompt in prompts])), self._mesh)
        drawn = self._rollout(prompts, collected)
        version = to_devices(drawn.version, NamedSharding(self._mesh, P()))
        rows = {name: array for name, array in vars(drawn).items() if name != "version"}
        rollout = Rollout(**put_rows(rows, self._mesh), version=version)
        origins = zip(collected.numbers.tolist(), collected.workers.tolist(), strict=True)
        own = [(group.batch.examples[group.rows], group.batch.texts[group.rows]) for group in groups]
        examples, texts = ([row for rows in both for row in rows] for both in zip(*own, strict=True))
        by_row = [origin for origin in origins for _ in range(self._samples)]
        return Batch((tokens, lengths, keys), examples, texts, step, by_row), rollout

    def _groups_of(self, collected: Collected) -> list[_Group]:
        return [self._group(number) for number in collected.numbers.tolist()]

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
        shared = replace(prompts, arrays=())
        for at, (ids, length, own) in enumerate(zip(tokens, lengths, keys, strict=True)):
            rows = slice(at * self._samples, (at + 1) * self._samples)
            groups.append(_Group(Prompt(batch * self._groups + at, ids, int(length), own), shared, rows))
        return groups

    def _rollout(self, prompts: Sequence[Prompt], collected: Collected) -> Rollout:
        """Returns the rows of groups on the host, each response right after its prompt."""
        drawn, count = collected.rows, self._samples
        tokens = np.repeat(np.stack([prompt.tokens for prompt in prompts]), count, axis=0)
        starts = np.repeat(np.array([prompt.length for prompt in prompts], np.int32), count)
        results = Results(drawn.tokens, drawn.logprobs, drawn.lengths, drawn.finished)
        versions = after_prompts(drawn.versions, starts, drawn.lengths, tokens.shape[1], np)
        generation = assemble(tokens, starts, results, np)
        return Rollout(**vars(generation), version=np.int32(collected.version), versions=versions)  # type: ignore[arg-type]
