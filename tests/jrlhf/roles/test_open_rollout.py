"""Rows that are scored while others decode: each tile once, as soon as it may be, with the results of a later time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.config.parse import build
from jrlhf.config.schema import Config, RewardConfig
from jrlhf.data.batches import put_rows
from jrlhf.data.types import Example, Response
from jrlhf.meshes import make_mesh, to_devices
from jrlhf.ppo import Rollout
from jrlhf.rewards.text_model import TextReward
from jrlhf.rewards.types import Sample
from jrlhf.roles.actor import Actor
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Compute
from jrlhf.roles.open_rollout import DrawnAhead, OpenRollout
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.role import TrainedRole
from jrlhf.run.clock import Clock
from jrlhf.run.console import Console

ROWS, TILE, WIDTH = 8, 2, 5
DONE = ([3, 4, 5], [0, 2, 7], [1])  # the rows that are done after each chunk; row 6 is the last one


def mesh_on(*devices: int) -> Mesh:
    return make_mesh(1, len(devices), 1, devices=[jax.devices()[device] for device in devices])


def rows() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 9, (ROWS, WIDTH)).astype(np.int32)
    lengths = np.arange(ROWS, dtype=np.int32) % 3 + 1
    return {
        "tokens": tokens,
        "prompt_lengths": lengths,
        "response_lengths": lengths + 1,
        "logprobs": tokens / 7.0,
        "finished": lengths > 1,
    }


class Drawing:
    """An open rollout of these rows on a mesh. events: what was drawn and handed out, in order."""

    def __init__(self, mesh: Mesh):
        self.events: list[Any] = []
        self.open = OpenRollout(lambda hand_out: self._draw(hand_out, mesh), ROWS, TILE)

    def _draw(self, hand_out: Callable, mesh: Mesh) -> Rollout:
        done = np.zeros(ROWS, bool)
        for chunk in DONE:
            done[chunk] = True
            self.events.append("chunk")

            def read(tile: slice) -> Rollout:
                assert done[tile].all()
                now = {name: x[tile] for name, x in rows().items()}
                return Rollout(**now, version=np.int32(4))  # type: ignore[arg-type]

            hand_out(done, read, mesh)
        self.events.append("drawn")
        return Rollout(**put_rows(rows(), mesh), version=to_devices(np.int32(4), NamedSharding(mesh, P())))

    def note(self, rows: slice, tile: Rollout) -> int:
        self.events.append(rows.start)
        return int(tile.tokens.sum())


def test_a_tile_is_handed_out_at_the_first_look_at_which_its_rows_are_done():
    drawing, sums = Drawing(mesh_on(0)), rows()["tokens"].reshape(-1, TILE, WIDTH).sum(axis=(1, 2))
    early, late = drawing.open.each(drawing.note), drawing.open.each(drawing.note, devices=mesh_on(0).devices.flat)
    assert drawing.events == []  # nobody needs a row
    assert late.result() == sums.tolist()
    assert drawing.events == ["chunk", 4, "chunk", 2, "chunk", 0, "drawn", 6, *range(0, ROWS, TILE)]
    assert early.result() == sums.tolist() and drawing.open.result() is drawing.open.result()
    del drawing.events[:]
    assert drawing.open.each(drawing.note).result() == sums.tolist()  # all rows are there
    assert drawing.events == [*range(0, ROWS, TILE)]


def test_a_drawing_that_fails_is_not_repeated():
    asked = list[int]()
    broken = OpenRollout(lambda _: asked.append(0) or [][0], ROWS, TILE)
    for pending in (broken, broken.each(lambda *_: 0), broken):
        with pytest.raises(IndexError, match="list index out of range"):
            pending.result()
    assert len(asked) == 1


@pytest.mark.parametrize("devices", [(1, 2), (0, 1)], ids=["other devices", "the same devices"])
def test_results_of_tiles_are_those_of_all_rows_in_their_order(devices):
    drawing, mesh, seen = Drawing(mesh_on(0)), mesh_on(*devices), []

    @jax.jit
    def score(tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tokens * 0.5, jnp.sum(tokens, axis=1) + lengths

    def read(tile: Rollout) -> tuple[jax.Array, jax.Array]:
        seen.append("drawn" in drawing.events)
        assert tile.tokens.shape == (TILE, WIDTH) and tile.tokens.sharding.device_set == set(mesh.devices.flat)
        return score(tile.tokens, tile.lengths)

    tokens, sums = (part.result() for part in drawing.open.by_rows(read, mesh, outputs=2))
    expected = rows()
    np.testing.assert_array_equal(tokens, expected["tokens"] * 0.5)
    lengths = expected["prompt_lengths"] + expected["response_lengths"]
    np.testing.assert_array_equal(sums, expected["tokens"].sum(axis=1) + lengths)
    assert tokens.sharding.is_equivalent_to(put_rows(expected["tokens"], mesh).sharding, 2)
    assert seen == ([True] * 4 if 0 in devices else [False] * 3 + [True])  # not on devices that decode


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_model_that_reads_text_scores_tiles_while_others_decode(user: Path):
    """Each text gets the score of the text alone, though each tile is padded to its longest text."""
    drawing, mesh, seen = Drawing(mesh_on(0)), mesh_on(1, 2), []
    path, key = str(user / "reward"), "rewards[0].model"
    with jax.set_mesh(mesh):
        initial = InitialModels(build(Config, {}), mesh, Compute(), Console(enabled=False))
        judge, placement = RewardConfig(name="judge", model=path), RolePlacement.of(mesh)
        model, sizes = initial.reward(path, key), {"usual": 120, "rows": TILE}
        reward = TextReward(judge, key, model, placement, Compute(), kind="reward", **sizes)

    def read(rows: slice, tile: Rollout) -> list[Sample]:
        seen.append((rows.start, "drawn" in drawing.events))
        example = Example(({"role": "user", "content": "What is 1 plus 2?"},))
        texts = [
            f"{'It is 3, ' * int(length)}{number}"
            for number, length in enumerate(jax.device_get(tile.lengths), rows.start)
        ]
        return [Sample(example, "", Response((), text, True)) for text in texts]

    tiles = drawing.open.each(lambda rows, tile: reward.begin(read(rows, tile)), devices=mesh.devices.flat)
    scores = reward.finish(tiles.result()).scores
    assert seen == [(4, False), (2, False), (0, False), (6, True)]
    expected = [reward.score([sample]).scores[0] for sample in read(slice(0, ROWS), drawing.open.result())]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.ptp(expected) > 0.01


def test_what_is_not_drawn_yet_is_drawn_before_the_weights_change(monkeypatch: pytest.MonkeyPatch):
    drawing, mesh = Drawing(mesh_on(0)), mesh_on(0)
    ahead = DrawnAhead(drawing._draw(lambda *_: None, mesh), {})
    del drawing.events[:]
    monkeypatch.setattr(TrainedRole, "_train", lambda *_: drawing.events.append("trained"))
    unbound = object.__new__(Actor)
    unbound.placement, unbound.clock = RolePlacement.of(mesh), Clock()
    rollouts = {"generate": drawing.open, "generate_greedy": ahead}
    actor = unbound.bind(None, draw=lambda actor, method, prompts: rollouts[method])  # type: ignore[arg-type]
    assert actor.generate(None) is drawing.open and actor.generate_greedy(None) is ahead  # type: ignore[arg-type]
    assert drawing.events == [] and actor._open == [drawing.open]  # a rollout that was drawn ahead is not held
    actor._train("update", None)
    assert drawing.events == ["chunk", "chunk", "chunk", "drawn", "trained"] and actor._open == []
