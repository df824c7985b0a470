"""DAPO's dynamic sampling: draws prompts until informative groups fill a batch."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jrlhf.data.batches import Batch, put_rows
from jrlhf.meshes.transfers import to_host
from jrlhf.ppo.config.algorithms import DAPOConfig
from jrlhf.ppo.types import Rollout
from jrlhf.rewards.combine import extremes, named
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.placement import RolePlacement, call, loop_condition
from jrlhf.run.clock import Clock, timed

T = TypeVar("T")
Kept = tuple[Rollout, Array]  # the rows of the batch so far, and their scores


class DynamicSampler:
    """Fills the batch of an iteration of DAPO, round by round.

    A group is informative if its finite scores, before they are shaped, are not all equal. Rows that `truncation`
    leaves out do not count. After `max_rounds` rounds the rest of the batch is filled with groups that are not
    informative, in their order.

    After an iteration `draws`, `prompts`, `raw`, `parts` and `metrics()` are its results.

    reward: scores the rounds; its `raw` has their scores before they are shaped, its `parts` those of each reward.
    """

    draws: int  # number of prompt batches drawn so far, in all iterations
    prompts: Batch  # the prompts of the batch, row by row
    raw: Float[np.ndarray, "B"]  # the batch's scores before they were shaped
    parts: dict[str, Float[np.ndarray, "B"]]  # its scores by each reward

    def __init__(self, placement: RolePlacement, algorithm: DAPOConfig, clock: Clock, reward: Rewards):
        self.placement, self.clock, self._reward = placement, clock, reward
        self._samples, self._max_rounds, self._counts = algorithm.samples, algorithm.max_rounds, algorithm.counts

    def start(self, draws: int, draw_batch: Callable[[int], Batch]) -> None:
        """Begins an iteration after `draws` batches of prompts. draw_batch: number of a batch -> its prompts."""
        self._draw_batch, self.draws, self._first, self._metrics = draw_batch, draws, draws, {}
        self._batch: Kept | None = None
        self._informative = np.zeros(0, bool)  # one flag per group of the batch
        self._drawn = self._useful = 0  # numbers of groups in all rounds

    @loop_condition
    def wants_more(self) -> bool:
        rounds = self.draws - self._first
        return rounds == 0 or (rounds < self._max_rounds and self._informative.sum() < len(self._informative))

    @call("compute", "prompts")
    def draw(self) -> Batch:
        self.draws += 1
        return self._draw_batch(self.draws - 1)

    @call("compute", "kept")
    @timed("pool")
    def keep(self, rollout: Rollout, scores: Array, prompts: Batch) -> Kept:
        """Adds a round's informative groups to the batch, while there is room. Returns the batch so far.

        The reward must have scored these prompts: its raw scores tell which groups are informative.
        """
        raw, parts = to_host((self._reward.raw[prompts.step], self._reward.parts[prompts.step]))
        counted = self._counts(to_host(rollout.finished))
        fresh = informative(np.where(counted, raw, np.nan), self._samples)
        if self._batch is None:  # the first round; merged with itself, so that the program is compiled in any case
            self._batch, self._informative = (rollout, scores), fresh
            self.prompts, self.raw, self.parts = prompts, raw, parts
            source = np.arange(len(fresh))
        else:
            source = _merged(self._informative, fresh)
        self._drawn += fresh.size
        self._useful += int(fresh.sum())
        rows = (source[:, None] * self._samples + np.arange(self._samples)).reshape(-1)
        chosen = put_rows(rows.astype(np.int32), self.placement["keep"].mesh)
        batch: Kept = _take(self._batch, (rollout, scores), chosen)

        old = self.prompts
        self.prompts = Batch(
            prompts.arrays,
            _chosen(old.examples, prompts.examples, rows),
            _chosen(old.texts, prompts.texts, rows),
            old.step,
            origins=_chosen(old.origins, prompts.origins, rows),
            follow=old.follow,
        )
        self.raw = np.concatenate([self.raw, raw])[rows]
        self.parts = {name: np.concatenate([own, parts[name]])[rows] for name, own in self.parts.items()}
        self._informative, self._batch = np.concatenate([self._informative, fresh])[source], batch
        return batch

    @call("compute", "rollout", "scores")
    def batch(self, batch: Kept) -> Kept:
        """The batch of the iteration, full or not."""
        self._metrics = named("critic/score", extremes(put_rows(self.raw, self.placement["batch"].mesh)))
        return batch

    def metrics(self) -> dict[str, float | Array]:
        """Number of rounds, share of informative groups drawn, share of others in the batch; and raw scores.

        The raw scores of the batch replace those of the last scoring. Metrics of single rewards stay those of the last.
        """
        return self._metrics | {
            "dapo/rounds": float(self.draws - self._first),
            "dapo/informative": self._useful / self._drawn,
            "dapo/filled": float(np.mean(~self._informative)),
        }


def _chosen(old: Sequence[T], new: Sequence[T], rows: Int[np.ndarray, "B"]) -> list[T]:
    """The entries of these rows, those of `new` after those of `old`; none if there are none."""
    both = [*old, *new]
    return [both[row] for row in rows] if both else both


def informative(scores: Float[np.ndarray, "B"], samples: int) -> Bool[np.ndarray, "G"]:
    """Mask of the groups whose finite scores are not all equal; nothing is learned from a row with another score."""
    groups = scores.reshape(-1, samples)
    finite = np.isfinite(groups)
    return np.where(finite, groups, -np.inf).max(axis=1) > np.where(finite, groups, np.inf).min(axis=1)


def _merged(batch: Bool[np.ndarray, "G"], fresh: Bool[np.ndarray, "G"]) -> Int[np.ndarray, "G"]:
    """The groups of the next batch, given which are informative; fresh groups are numbered after those of the batch.

    Every informative group of the batch keeps its place; informative fresh groups take the other places, in order.
    """
    source = np.arange(len(batch))
    free, newcomers = np.flatnonzero(~batch), np.flatnonzero(fresh) + len(batch)
    count = min(len(free), len(newcomers))
    source[free[:count]] = newcomers[:count]
    return source


@jax.jit
def _take(batch, fresh, rows: Int[Array, "B"]):
    """Takes `rows` of both, where fresh rows are numbered after those of the batch. Scalars come from `fresh`."""

    def take(old: Array, new: Array) -> Array:
        if old.ndim == 0:
            return new
        axes = jax.typeof(old).sharding.spec[0]
        both = jnp.concatenate([jax.reshard(x, jax.P()) for x in (old, new)])
        return both.at[rows].get(out_sharding=jax.P(axes, *[None] * (old.ndim - 1)))

    return jax.tree.map(take, batch, fresh)
