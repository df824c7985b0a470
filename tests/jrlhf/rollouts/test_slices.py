"""The state of a fleet, which a checkpoint writes while the fleet goes on."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.data.batches import Batch
from jrlhf.meshes import make_mesh
from jrlhf.models.generation.continuous import Decoding, RowProgress
from jrlhf.models.generation.decoding import Rows
from jrlhf.models.generation.occupancy import EMPTY
from jrlhf.models.generation.programs import Slots
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.identity import drawing_identity
from jrlhf.rollouts.prompts import PromptStream
from jrlhf.rollouts.schedule import Rules
from jrlhf.rollouts.slices import Published, SliceWorkers
from jrlhf.rollouts.state import Collected, Drawn
from tests.support.fleets import NO_RECOMPUTE


def aligned(x: np.ndarray) -> np.ndarray:
    """An equal array whose memory JAX takes as it is, where devices are CPUs."""
    memory = np.zeros(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    own = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    own[...] = x
    return own


class FourSlots:
    """Stands for the decoding: 4 rows of one token, which change the numbers of the slots as they are drawn."""

    room, rows = 4, ()

    def __init__(self, mesh):
        self.mesh = mesh
        keys = jax.random.split(jax.random.key(0), 4)
        drawn: Any = np.zeros((4, 1))
        slots = Slots([], Rows(keys, *[np.zeros(4, np.int32)] * 4), drawn, drawn)  # type: ignore[arg-type]
        self.state = Decoding(slots, aligned(np.full(4, EMPTY, np.int32)), aligned(np.zeros(4, np.int32)))

    def admit(self, weights, prompts):
        self.rows = tuple(prompt.number for prompt in prompts)
        self.state.owner[: len(prompts)] = self.rows

    def decode(self, weights):
        self.state.drawn[:] += 1
        rows, self.rows = self.rows, ()
        return [RowProgress(row, 0, 1, (np.full(1, row, np.int32), np.zeros(1, np.float32), True)) for row in rows]


def prompt(number: int) -> Any:
    return SimpleNamespace(number=number)


def test_a_state_stays_as_it_is_while_the_fleet_goes_on():
    mesh, weights = make_mesh(devices=jax.devices()[:1]), ({"layers": [{"bias": jnp.ones(1)}]}, {})
    with jax.set_mesh(mesh):
        workers = SliceWorkers([FourSlots(mesh)])  # type: ignore[list-item]
        numbers: Any = {"samples": 1, "limit": 1, "recompute": NO_RECOMPUTE}
        fleet: Any = Fleet([workers], mesh, Rules(2, 1, 1), prompt, lambda group: None, **numbers)
        expected = drawing_identity(weights[0])
        fleet._take(fleet._lanes[0], Published(0, weights, expected, None))
        fleet.collect()
        state = fleet.state()
        before = jax.tree.map(np.array, jax.device_get((state.started, state.decoding.owner, state.decoding.drawn)))
        fleet.publish(weights, expected)
        fleet.collect()
        after = jax.device_get((state.started, state.decoding.owner, state.decoding.drawn))
        jax.tree.map(np.testing.assert_array_equal, after, before)
        assert not np.array_equal(fleet.state().started.number, before[0].number)


def test_a_group_is_read_as_its_rows_are_in_a_synchronous_batch():
    """So a reward function draws the same random numbers, and reads the same texts, whether its group was drawn ahead
    or not."""
    texts = [f"row {row}" for row in range(6)]

    def take(number: int) -> Batch:
        keys = jax.random.split(jax.random.key(number), 6)
        tokens = np.arange(6, dtype=np.int32).reshape(3, 2) + 10 * number
        return Batch((tokens, np.array([1, 2, 2], np.int32), keys), texts, texts, number)  # type: ignore[arg-type]

    stream = PromptStream(take, None, groups=3, samples=2, read=lambda tree: tree)  # type: ignore[arg-type]
    drawn = Drawn.blank(2, limit=2)
    drawn.tokens[:], drawn.versions[:], drawn.lengths[:] = [[7, 8], [9, 0]], 5, [2, 1]
    for number, place in ((0, (0, 0)), (2, (0, 4)), (3, (1, 0)), (7, (2, 2))):
        batch, rows, tile = stream.tile(Collected(np.array([number]), np.array([0]), drawn, 6))
        assert (batch.step, rows.start, rows.stop) == (*place, place[1] + 2)
        assert batch.texts[rows] == texts[place[1] : place[1] + 2]
        prompt = np.arange(2) + place[1] + 10 * place[0]
        short = number in (0, 3)  # whose prompt has one token
        expected = [[prompt[0], 7, 8, 0], [prompt[0], 9, 0, 0]] if short else [[*prompt, 7, 8], [*prompt, 9, 0]]
        np.testing.assert_array_equal(tile.tokens, expected)
        np.testing.assert_array_equal(tile.versions, 5 * np.isin(tile.tokens, [7, 8, 9]) * (np.arange(4) >= 2 - short))
