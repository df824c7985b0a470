"""Minibatches, micro-batches and micro-batches by length: their rows, on any mesh, by one program."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.meshes.by_length import ByLength, bucket_widths, fold_by_length, map_by_length, row_ends
from jrlhf.meshes.rows import check_divisible, draw_minibatch, split_rows
from jrlhf.ppo import (
    DPOConfig,
    PPOConfig,
    PreferenceBatch,
    TrainState,
    make_actor_step,
    make_preference_step,
    make_sft_step,
)

ROWS, TIME, BUDGET = 32, 64, 96
WIDTHS = (16, 32, 48, 64)
CONFIG = PPOConfig(epochs=2, minibatches=2, entropy_coef=0.05, dual_clip=1.5, seed=3)
LENGTHS = {
    "mixed": np.random.default_rng(0).integers(1, TIME + 1, ROWS),
    "sorted": np.linspace(1, TIME, ROWS).astype(int),
    "all equal": np.full(ROWS, 33),
    "full": np.full(ROWS, TIME),
    "one long": np.where(np.arange(ROWS) == 5, TIME, 3),
    "some empty": np.where(np.arange(ROWS) % 3 == 0, 0, 20),
    "empty": np.zeros(ROWS, int),
}


def placed(place):
    """(over how many devices rows are divided, a function that puts a tree there, a context)"""
    axes = ("data", "fsdp") if "some" in place else ("data", "fsdp", "tensor")
    mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=AxisType.Auto if "auto" in place else AxisType.Explicit)

    def put(tree):
        def spec(x):
            return P(axes if np.ndim(x) and x.shape[0] == ROWS else None) if np.ndim(x) else P()

        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)

    # A program on Auto axes does not know that rows are divided over some of them only: its micro-batches suit all.
    return 4 if place == "some axes" else 8, put, jax.set_mesh(mesh)


full = pytest.mark.full
PLACES = ("all axes", "auto, some axes", pytest.param("some axes", marks=full))


def numbered(lengths):
    """Tokens that tell each row and position apart, and what a row is called."""
    clock = np.arange(TIME)[None]
    return np.where(clock < lengths[:, None], 1 + clock + TIME * np.arange(ROWS)[:, None], 0), np.arange(ROWS)


def predicted_tokens(lengths, devices):
    """Number of computed tokens: the longest row and as many as fit at its width; then the longest of the rest."""
    left, tokens = sorted(lengths[lengths > 0].tolist(), reverse=True), 0
    share = ROWS // devices
    while left:
        width = next(width for width in WIDTHS if width >= left[0])
        fit = max(1, BUDGET // width)
        rows = math.ceil(share / math.ceil(share / fit)) * devices
        left, tokens = left[rows:], tokens + rows * width
    return tokens


@pytest.mark.parametrize("place", PLACES)
def test_every_row_counts_once_whatever_the_lengths_and_the_program_is_one(place):
    devices, put, context = placed(place)

    def computed(rows, lengths):
        def add(total, micro):
            tokens, names = micro
            row_sums = jnp.sum(tokens, 1)
            return total[0] + jnp.sum(row_sums), total[1] + jnp.sum(row_sums * names), total[2] + tokens.size

        return fold_by_length(add, (jnp.int32(0), jnp.int32(0), jnp.int32(0)), rows, ByLength(lengths, BUDGET))

    compiled: Any = jax.jit(computed)
    with context:
        for lengths in LENGTHS.values():
            tokens, names = numbered(lengths)
            got = compiled(*put(((tokens.astype(np.int32), names.astype(np.int32)), lengths.astype(np.int32))))
            expected = tokens.sum(), (tokens.sum(1) * names).sum(), predicted_tokens(lengths, devices)
            assert tuple(map(int, got)) == expected
        assert compiled._cache_size() == 1


@pytest.mark.parametrize("place", PLACES)
def test_a_mapped_function_gives_each_row_its_results_in_its_place(place):
    _, put, context = placed(place)
    seen = []

    def function(micro):
        tokens, lengths = micro
        jax.debug.inspect_array_sharding(tokens, callback=seen.append)
        sums = jnp.cumsum(tokens, 1)
        last = jax.vmap(lambda row, length: row[length - 1])(sums, lengths)
        return {"sums": sums, "pairs": jnp.stack([sums, -sums], 2).astype(jnp.float32), "last": last}

    def map_tokens(tokens, lengths):
        return map_by_length(function, (tokens, lengths), ByLength(lengths, BUDGET))

    mapped: Any = jax.jit(map_tokens)
    with context:
        for lengths in LENGTHS.values():
            tokens, _ = numbered(lengths)
            got = mapped(*put((tokens.astype(np.int32), lengths.astype(np.int32))))
            sums, real = np.cumsum(tokens, 1), np.arange(TIME)[None] < lengths[:, None]
            np.testing.assert_array_equal(np.where(real, got["sums"], 0), np.where(real, sums, 0))
            np.testing.assert_array_equal(np.where(real, got["pairs"][..., 1], 0), np.where(real, -sums, 0))
            np.testing.assert_array_equal(np.where(lengths > 0, got["last"], 0), np.where(lengths > 0, sums[:, -1], 0))
            assert not any(x.is_fully_replicated for x in jax.tree.leaves(got))
        assert mapped._cache_size() == 1
    assert len(seen) >= len(WIDTHS)
    assert not any(sharding.is_fully_replicated for sharding in seen)


def test_rows_travel_once_and_not_inside_the_loops():
    _, put, context = placed("all axes")
    tokens, names = numbered(LENGTHS["mixed"])
    with context:
        rows, lengths = put(((tokens.astype(np.float32), names.astype(np.int32)), LENGTHS["mixed"].astype(np.int32)))

        def doubled(rows, lengths):
            return map_by_length(lambda micro: micro[0] * 2, rows, ByLength(lengths, BUDGET))

        compiled = jax.jit(doubled).lower(rows, lengths).compile().as_text()
    assert compiled is not None

    def counted(text):
        names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
        return [text.count(f" {name}(") for name in names]

    gathers, sums, *others = counted(compiled)
    # Lengths, both leaves of the rows, and the results on their way back; one sum of counts a width.
    assert gathers <= 4 and sums <= len(WIDTHS) and others == [0, 0, 0]
    assert counted(compiled[compiled.index("\nENTRY ") :]) == [gathers, sums, *others]  # none in the body of a loop


def test_widths():
    for length, widths in {8: (8,), 16: (16,), 44: (16, 32, 44), 64: WIDTHS, 512: (128, 256, 384, 512)}.items():
        assert bucket_widths(length) == widths
    assert bucket_widths(600) == (256, 384, 512, 600)


def test_the_end_of_a_row_is_past_its_last_token_that_counts():
    mask = np.array([[False, True, False, True, False], [False] * 5, [True] * 5])
    np.testing.assert_array_equal(jax.jit(row_ends)(mask), [4, 0, 5])


SHORT = 32  # of two widths


def experience_of(toy, lengths):
    """Made-up experience with rows of half these lengths; the first two tokens are the prompt."""
    experience = toy.experience(ROWS, SHORT)
    clock, lengths = np.arange(SHORT)[None], lengths // 2
    mask = (clock >= 2) & (clock < lengths[:, None])
    # Numbers that are not zero also where nothing is to be learnt.
    noise = jnp.asarray(np.random.default_rng(5).normal(size=(3, ROWS, SHORT)), jnp.float32)
    return replace(experience, response_mask=jnp.asarray(mask), advantages=noise[0], returns=noise[1], values=noise[2])


def test_weights_and_metrics_are_those_of_whole_minibatches(toy):
    optimizer = optax.sgd(0.5)
    configs = CONFIG, replace(CONFIG, micro_batch_tokens=BUDGET // 2)
    whole, parts = (make_actor_step(toy.logprobs, optimizer, config) for config in configs)
    for name in ("mixed", "one long", "some empty", "empty"):
        experience = experience_of(toy, LENGTHS[name])
        expected, actual = (step(TrainState.create(toy.params()[0], optimizer), experience) for step in (whole, parts))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
    jitted: Any = parts
    assert jitted._cache_size() == 1


def test_pairs_too(toy):
    _, put, context = placed("all axes")
    rng, optimizer = np.random.default_rng(0), optax.sgd(0.5)
    chosen, rejected = rng.integers(0, toy.vocab, (2, ROWS, SHORT)).astype(np.int32)
    lengths, others = (np.maximum(LENGTHS[name] // 2, 2).astype(np.int32) for name in ("mixed", "sorted"))
    batch = PreferenceBatch(*map(jnp.asarray, (chosen, lengths, rejected, others)))
    make = partial(make_preference_step, toy.scores, optimizer, centre=0.1)
    with context:
        expected, got = (
            jax.device_get(step(put(TrainState.create(toy.params()[1], optimizer)), put(batch)))
            for step in (make(), make(micro_batch_tokens=BUDGET))
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_two_ways_to_divide_are_one_clear_error(toy):
    sft = partial(make_sft_step, toy.logprobs, optax.sgd(0.5))
    pairs = partial(make_preference_step, toy.scores, optax.sgd(0.5))
    for make in (PPOConfig, DPOConfig, sft, pairs):
        with pytest.raises(ValueError, match=r"^micro_batches=2: it must be 1 with micro_batch_tokens"):
            make(micro_batches=2, micro_batch_tokens=8192)
        with pytest.raises(ValueError, match=r"^micro_batch_tokens=0: it must be at least 1, or null$"):
            make(micro_batch_tokens=0)


PARTS = 4


def draw_all(rows, key):
    return jnp.stack([draw_minibatch(rows, key, index, PARTS) for index in range(PARTS)])


def test_every_row_once_and_one_of_every_group_in_each_minibatch():
    drawn = np.asarray(jax.jit(draw_all)(jnp.arange(ROWS), jax.random.key(0)))
    assert drawn.shape == (PARTS, ROWS // PARTS)
    np.testing.assert_array_equal(np.sort(drawn.ravel()), np.arange(ROWS))
    np.testing.assert_array_equal(drawn // PARTS, np.tile(np.arange(ROWS // PARTS), (PARTS, 1)))


def test_rows_of_a_tree_stay_together_and_keys_differ():
    rows = {"id": jnp.arange(ROWS), "wide": jnp.arange(ROWS)[:, None, None] * jnp.ones((1, 3, 2), jnp.int32)}
    draw = jax.jit(lambda key: draw_minibatch(rows, key, 1, PARTS))
    drawn, other = draw(jax.random.key(0)), draw(jax.random.key(1))
    assert drawn["wide"].shape == (ROWS // PARTS, 3, 2)
    np.testing.assert_array_equal(drawn["wide"][:, 2, 1], drawn["id"])
    assert np.any(drawn["id"] != other["id"])


def test_the_shuffle_is_uniform():
    groups = 4000
    drawn = jax.jit(draw_minibatch, static_argnums=3)(jnp.arange(groups * PARTS), jax.random.key(2), 0, PARTS)
    counts = np.bincount(np.asarray(drawn) % PARTS, minlength=PARTS)
    sigma = np.sqrt(groups / PARTS * (1 - 1 / PARTS))
    assert np.all(np.abs(counts - groups / PARTS) < 5 * sigma)


def test_micro_batches_are_strided():
    parts = split_rows(jnp.arange(12), 3)
    np.testing.assert_array_equal(parts, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]])


def test_micro_batches_of_one_row():
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.arange(8), NamedSharding(mesh, P(("data", "fsdp", "tensor"))))
        scanned = jax.jit(lambda rows: jax.lax.scan(lambda sum, row: (sum + row.sum(), row), 0, split_rows(rows, 8)))
        total, parts = scanned(rows)
    assert total == 28
    np.testing.assert_array_equal(parts, np.arange(8)[:, None])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_nothing_is_communicated_and_the_mesh_does_not_matter(axis_type):
    def split(rows, key, index):
        return split_rows(draw_minibatch(rows, key, index, PARTS), 2)

    host = np.arange(64 * 3).reshape(64, 3)
    expected = jax.jit(split)(host, jax.random.key(5), 3)
    mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=axis_type)
    with jax.set_mesh(mesh):
        rows = jax.device_put(host, NamedSharding(mesh, P(("data", "fsdp", "tensor"), None)))
        compiled = jax.jit(split).lower(rows, jax.random.key(5), 3).compile()
        text = compiled.as_text()
        assert text is not None
        for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter"):
            assert collective not in text
        parts = compiled(rows, jax.random.key(5), 3)
        assert not parts.is_fully_replicated
        np.testing.assert_array_equal(parts, expected)


def test_rows_that_do_not_divide_are_one_clear_error():
    with pytest.raises(ValueError, match=r"^30 rows do not divide into minibatches=4 x micro_batches=2: .* of 8 rows$"):
        check_divisible(jnp.zeros(30), 4, 2)
    check_divisible(jnp.zeros(32), 4, 2)
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.zeros(32), NamedSharding(mesh, P(("data", "fsdp"))))
        check_divisible(rows, 2, 2)
        with pytest.raises(ValueError, match=r"make 4 a micro-batch, .* over 8 devices: .* a multiple of 64 rows$"):
            check_divisible(rows, 4, 2)
