"""DAPO's dynamic sampling: prompts are drawn until groups that can teach something fill a batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jrlhf.data.batches import Batch, put_rows
from jrlhf.meshes import to_host, transfer
from jrlhf.ppo import Rollout
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.placement import RolePlacement, call, loop_condition
from jrlhf.run.clock import Clock, timed


class Pool:
    """The batch that an iteration of DAPO fills, round by round.

    A group teaches something if its scores, as the rewards gave them and before they are shaped, are not all equal.
    After `max_rounds` rounds the rest of the batch is filled with groups that teach nothing, as they came.

    draw_batch: number of a batch -> its prompts.
    """

    draws: int  # batches drawn so far, over all iterations; assigned by whoever runs them
    taken: Batch  # the prompts of the last full batch, row by row

    def __init__(
        self,
        draw_batch: Callable[[int], Batch],
        rewards: Rewards,
        where: Mesh | RolePlacement,
        *,
        samples: int,
        max_rounds: int,
        clock: Clock,
    ):
        self._draw_batch, self._rewards, self.placement = draw_batch, rewards, RolePlacement.of(where)
        self._samples, self._max_rounds, self.clock = samples, max_rounds, clock
        self.start(0)

    def start(self, draws: int) -> None:
        """An iteration begins."""
        self.draws, self._first, self._drawn, self._found = draws, draws, 0, 0
        self._kept: tuple[Rollout, Array, Array] | None = None
        self._informative = np.zeros(0, bool)

    @loop_condition
    def wants_more(self) -> bool:
        """Whether another round is to be generated."""
        rounds = self.draws - self._first
        return rounds == 0 or (rounds < self._max_rounds and self._informative.sum() < len(self._informative))

    @call("compute", "prompts")
    def draw(self) -> Batch:
        """The prompts of the next round."""
        self.draws += 1
        return self._draw_batch(self.draws - 1)

    @call("compute", "kept")
    @timed("pool")
    def keep(self, rollout: Rollout, scores: Array, prompts: Batch) -> tuple[Rollout, Array, Array]:
        """Takes a round's informative groups into the batch, while there is room. Returns the batch so far: rollout,
        scores and, before they were shaped, their sums."""
        mesh = self.placement["keep"].mesh
        raw = transfer(self._rewards.raw, mesh)
        fresh = informative(to_host(raw), self._samples)
        if self._kept is None:  # the first round; merged with itself, so that the program is compiled in any case
            self._kept, self.taken, self._informative = (rollout, scores, raw), prompts, fresh
            source = np.arange(len(fresh))
        else:
            source = _merged(self._informative, fresh)
        self._drawn += fresh.size
        self._found += int(fresh.sum())
        rows = (source[:, None] * self._samples + np.arange(self._samples)).reshape(-1)
        kept: tuple[Rollout, Array, Array] = _taken(
            self._kept, (rollout, scores, raw), put_rows(rows.astype(np.int32), mesh)
        )
        examples, texts = [*self.taken.examples, *prompts.examples], [*self.taken.texts, *prompts.texts]
        self.taken = Batch(
            prompts.arrays, [examples[row] for row in rows], [texts[row] for row in rows], self.taken.step
        )
        self._informative, self._kept = np.concatenate([self._informative, fresh])[source], kept
        return kept

    @call("compute", "rollout", "scores")
    def batch(self, kept: tuple[Rollout, Array, Array]) -> tuple[Rollout, Array]:
        """The batch as it is, full or not."""
        rollout, scores, raw = kept
        self._rewards.restate(raw)
        return rollout, scores

    def metrics(self) -> dict[str, float]:
        """What the iteration drew: rounds; informative groups among all; and the batch's groups that are not."""
        return {
            "dapo/rounds": float(self.draws - self._first),
            "dapo/informative": self._found / self._drawn,
            "dapo/filled": float(np.mean(~self._informative)),
        }


def informative(scores: Float[np.ndarray, "B"], samples: int) -> Bool[np.ndarray, "G"]:
    """Which groups' scores are not all equal."""
    groups = scores.reshape(-1, samples)
    return groups.max(axis=1) > groups.min(axis=1)


def _merged(kept: Bool[np.ndarray, "G"], fresh: Bool[np.ndarray, "G"]) -> Int[np.ndarray, "G"]:
    """Which groups of both, the fresh ones numbered behind the kept ones, make the next batch.

    Every kept group that is informative stays in its place; the others' places go to fresh ones, in their order.
    """
    source = np.arange(len(kept))
    places, newcomers = np.flatnonzero(~kept), np.flatnonzero(fresh) + len(kept)
    count = min(len(places), len(newcomers))
    source[places[:count]] = newcomers[:count]
    return source


@jax.jit
def _taken(kept, fresh, rows: Int[Array, "B"]):
    """Rows of both, the fresh ones numbered behind the kept ones; what belongs to no row is the fresh one's."""

    def take(old: Array, new: Array) -> Array:
        if old.ndim == 0:
            return new
        axes = jax.typeof(old).sharding.spec[0]
        both = jnp.concatenate([jax.reshard(x, jax.P()) for x in (old, new)])
        return both.at[rows].get(out_sharding=jax.P(axes, *[None] * (old.ndim - 1)))

    return jax.tree.map(take, kept, fresh)
