"""`OpenRollout`: rows of a rollout are scored while its other rows still decode.

An open rollout is drawn when a call first needs all of its rows. Before that, calls that treat rows independently, such
as those of reference, critic and rewards, only register a function of a tile: a fixed number of neighbouring rows,
padded to the width of the rollout. After a chunk of decode steps, each tile whose rows are all done is passed to reward
functions, and to calls on devices that do not decode then. Other calls get their tiles once all rows are drawn.

A call runs the same program on the same tiles in both cases, so its results do not depend on the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jrlhf.data.batches import put_rows
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.transfers import to_host
from jrlhf.ppo.types import Rollout
from jrlhf.roles.placement import Pending
from jrlhf.run.clock import may_deadlock

T = TypeVar("T")
ReadRows = Callable[[slice], Rollout]  # returns finished rows on the host
HandOut = Callable[
    [Bool[np.ndarray, "B"], ReadRows, Mesh], None
]  # (mask of finished rows, read, mesh of the other rows)
OF_ROWS = "tokens", "prompt_lengths", "response_lengths", "logprobs", "finished"  # fields of a rollout


@dataclass
class _Reader:
    """A registered function of tiles, which runs while other rows decode on devices other than `devices`."""

    function: Callable[[slice, Rollout], Any]
    devices: frozenset[Device]
    results: dict[int, Any] = field(default_factory=dict)  # by the number of a tile


class OpenRollout(Pending[Rollout]):
    """A rollout of `count` rows that is drawn when a call first needs all of it; mutable until then.

    draw: draws it, and calls its argument after each chunk of decode steps with the finished rows.
    rows: number of rows of a tile.
    """

    def __init__(self, draw: Callable[[HandOut], Rollout], count: int, rows: int):
        super().__init__(partial(self._drawn, draw))
        self._readers = list[_Reader]()
        self._tiles = [slice(first, first + rows) for first in range(0, count, rows)]
        self._whole: Rollout | None = None  # on the host, once it is drawn

    def _drawn(self, draw: Callable[[HandOut], Rollout]) -> Rollout:
        """Draws the whole rollout, and passes all tiles to all readers."""
        rollout = draw(self._hand_out)
        whole = self._whole = to_host(rollout)
        for reader in self._readers:
            self._complete(reader, whole)
        self._readers.clear()
        return rollout

    def each(self, function: Callable[[slice, Rollout], T], *, devices: Iterable[Device] = ()) -> Pending[list[T]]:
        """Returns the pending results of `function(rows, tile)` for all tiles, in order. Tiles are on the host.

        Tiles may be passed in any order, and while other rows decode on devices other than `devices`.
        """
        reader = _Reader(function, frozenset(devices))
        if self._whole is None:
            self._readers.append(reader)
        else:
            self._complete(reader, self._whole)

        def results() -> list[T]:
            self.result()
            return [reader.results[tile] for tile in range(len(self._tiles))]

        return Pending(results)

    def by_rows(self, function: Callable[[Rollout], Any], mesh: Mesh, outputs: int = 1) -> Any:
        def of_tile(_: slice, tile: Rollout) -> Any:
            with jax.set_mesh(mesh):
                return function(replace(tile, **put_rows({name: getattr(tile, name) for name in OF_ROWS}, mesh)))

        tiles = self.each(of_tile, devices=mesh.devices.flat)
        joined = Pending(lambda: _join(tiles.result(), mesh))
        return joined if outputs == 1 else tuple(Pending(partial(_part, joined, number)) for number in range(outputs))

    def _hand_out(self, done: Bool[np.ndarray, "B"], read: ReadRows, mesh: Mesh) -> None:
        """Passes tiles whose rows are all done to the readers that may read them now."""
        ready = [number for number, rows in enumerate(self._tiles) if done[rows].all()]
        wanted = [
            (reader, number)
            for reader in self._readers
            for number in ready
            if number not in reader.results and reader.devices.isdisjoint(mesh.devices.flat)
        ]
        tiles = {number: read(self._tiles[number]) for number in {number for _, number in wanted}}
        for reader, number in wanted:
            reader.results[number] = reader.function(self._tiles[number], tiles[number])

    def _complete(self, reader: _Reader, whole: Rollout) -> None:
        for number, rows in enumerate(self._tiles):
            if number not in reader.results:
                tile = replace(whole, **{name: getattr(whole, name)[rows] for name in OF_ROWS})
                reader.results[number] = reader.function(rows, tile)


class DrawnAhead(Pending[Rollout]):
    """A rollout that was drawn before its iteration. Readers got each group as a tile, as soon as it was complete.

    results: kind of a reader -> what it returned for each group, in order.
    """

    def __init__(self, rollout: Rollout, results: Mapping[str, Sequence[Any]]):
        super().__init__(lambda: rollout)
        self.result()  # there is nothing to wait for
        self.results = results


def _join(tiles: Sequence[Any], mesh: Mesh) -> Any:
    with jax.set_mesh(mesh):
        joined = _concatenated(tiles)
    return jax.block_until_ready(joined) if may_deadlock(mesh.size) else joined


@jax.jit
def _concatenated(tiles: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *tiles)


def _part(joined: Pending[Any], number: int) -> Any:
    return joined.result()[number]
