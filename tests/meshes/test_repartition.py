import os
import subprocess
import sys
from collections import Counter
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import GENERATE, TRAIN, make_mesh, reshard
from jrlhf.meshes.repartition import Copy, _boxes, _is_one_step, _schedule, division_between, rounds_of
from tests.support.reshard import lower_reshard
from tests.support.switches import EVEN, UNEVEN, Shape, check, shapes

SHAPES = shapes(8)


def exchanged_bytes(source: NamedSharding, target: NamedSharding, size: tuple[int, ...]) -> np.ndarray:
    """Carries out an exchange on the numbers of the elements; asserts its result, and counts what each device gets."""
    elements = np.arange(prod(size)).reshape(size)
    old = [elements[index] for index in source.devices_indices_map(size).values()]
    new = [elements[index] for index in target.devices_indices_map(size).values()]
    if _is_one_step(_boxes(source, size), _boxes(target, size)):
        return np.asarray([np.setdiff1d(after, before).size for before, after in zip(old, new, strict=True)])
    rounds, piece = _schedule(source, target, size)
    results, received = [np.full(part.shape, -1) for part in new], np.zeros(len(old), int)

    def box(corner: np.ndarray) -> tuple[slice, ...]:
        return tuple(slice(start, start + width) for start, width in zip(corner, piece, strict=True))

    for one in rounds:
        senders = {receiver: sender for sender, receiver in one.pairs}
        assert len(set(senders.values())) == len(senders) == len(one.pairs), "not a permutation"
        for device in np.flatnonzero(one.comes).tolist():
            sender = device if one.stays[device] else senders[device]
            results[device][box(one.placed[device])] = old[sender][box(one.taken[sender])]
            received[device] += prod(piece) * (sender != device)
    for result, expected in zip(results, new, strict=True):
        np.testing.assert_array_equal(result, expected)
    return received


def assert_minimal(source: NamedSharding, target: NamedSharding, size: tuple[int, ...]) -> None:
    """The exchange and the all-gather after it together send each device its part of the target without what it has."""
    between = division_between(source, target, size)
    if between is None:
        return
    elements = np.arange(prod(size)).reshape(size)
    own, middle, end = (list(one.devices_indices_map(size).values()) for one in (source, between, target))
    for device, received in enumerate(exchanged_bytes(source, between, size)):
        assert not np.setdiff1d(elements[middle[device]], elements[end[device]]).size, "not a part of the target"
        gathered = elements[end[device]].size - elements[middle[device]].size
        needed = np.setdiff1d(elements[end[device]], elements[own[device]]).size
        assert received + gathered == needed, (source, target, device)


@pytest.mark.parametrize("axes", [("embed", "mlp"), ("vocab", "embed"), ("embed", "kv_heads")])
def test_between_all_shapes_no_device_receives_what_it_does_not_use(axes: tuple[str, str]):
    for source, target, layout in product(SHAPES, SHAPES, (GENERATE, TRAIN)):
        old, new = (make_mesh(*shape) for shape in (source, target))
        assert_minimal(TRAIN.sharding(old, axes), layout.sharding(new, axes), (16, 24))
        if axes[1] == "kv_heads":  # fewer heads than `tensor` are whole on every device
            assert_minimal(TRAIN.sharding(old, axes), layout.sharding(new, (axes[0], None)), (16, 24))


def test_between_random_divisions():
    """Meshes of three sizes, which have no common refinement for six devices, and axes in any order."""
    rng, number = np.random.default_rng(0), 0
    while number < 60:
        count = int(rng.choice([4, 6, 8]))
        factors = [shape for shape in product((1, 2, 3, 4, 6), repeat=3) if prod(shape) == count]

        def drawn(count: int = count, factors: Any = factors) -> NamedSharding:
            mesh = Mesh(np.asarray(jax.devices()[:count]).reshape(factors[rng.integers(len(factors))]), ("a", "b", "c"))
            entries: list[list[str]] = [[], []]
            for axis in rng.permutation(["a", "b", "c"]):
                if rng.random() < 0.8:
                    entries[rng.integers(2)].append(str(axis))
            return NamedSharding(mesh, P(*map(tuple, entries)))

        source, target = drawn(), drawn()
        number += division_between(source, target, (24, 24)) is not None
        assert_minimal(source, target, (24, 24))
        if number % 20 == 1:
            host = np.arange(24 * 24, dtype=np.float32).reshape(24, 24)
            np.testing.assert_array_equal(reshard(jax.device_put(host, source), target), host)


def test_the_rounds_are_as_many_as_the_busiest_device_needs():
    rng = np.random.default_rng(0)
    for devices, number in ((3, 20), (8, 60), (64, 500)):
        ends = rng.integers(devices, size=(number, 2)).tolist()
        copies = [Copy(sender, receiver, (piece,)) for piece, (sender, receiver) in enumerate(ends)]
        rounds = rounds_of(copies)
        assert sorted(copy for one in rounds for copy in one) == sorted(copies)
        for one in rounds:
            assert len({copy.sender for copy in one}) == len({copy.receiver for copy in one}) == len(one)
        busiest = max(max(Counter(end).values()) for end in zip(*ends, strict=True))
        assert len(rounds) == busiest


def test_axes_that_are_dropped_need_no_division_on_the_way():
    """So the programs of these switches are those of `jax.device_put` alone."""
    for shape in SHAPES:
        mesh = make_mesh(*shape)
        for axes in (("embed", "mlp"), ("mlp", "embed")):
            assert division_between(TRAIN.sharding(mesh, axes), GENERATE.sharding(mesh, axes), (16, 24)) is None


@pytest.mark.parametrize(("source", "target"), [((2, 2, 2), (2, 1, 4)), ((2, 1, 4), (1, 4, 2))])
def test_an_exchange_takes_no_more_temporary_memory_than_a_group(source: Shape, target: Shape):
    """Stacked layers that are exchanged and unstacked: send and receive buffers and the new part exist at once."""
    limit, layers, axes = 2**20, 8, ("embed", "mlp")
    old, new = TRAIN.sharding(make_mesh(*source), (None, *axes)), TRAIN.sharding(make_mesh(*target), axes)
    tree = {name: jax.ShapeDtypeStruct((layers, 256, 512), np.float32, sharding=old) for name in "ab"}
    programs = lower_reshard(tree, dict.fromkeys(tree, [new] * layers), group_bytes=limit)
    for program in programs:
        memory = program.compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes <= limit + 4096, memory  # and tables of positions


PAIRS = [((1, 8, 1), (1, 2, 4)), ((1, 4, 2), (1, 2, 4))]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pair if pair in PAIRS else pytest.param(*pair, marks=pytest.mark.full)
        for pair in product(SHAPES, SHAPES)
        if pair[0] != pair[1]
    ],
)
def test_compiled_switch(source: Shape, target: Shape, capfd: pytest.CaptureFixture[str]):
    """One decoder layer: bytes of the compiled HLO against counted elements, values, and no complaint of XLA."""
    check(EVEN, source, target, values=True)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.full
def test_compiled_switch_of_uneven_shapes(capfd: pytest.CaptureFixture[str]):
    """Twelve heads, two key-value heads and a vocabulary with padding, over the shapes that hold them."""
    fitting = [shape for shape in SHAPES if shape[2] in (1, 2, 4)]
    for source, target in [*zip(fitting, fitting[1:], strict=False), *zip(fitting[2:], fitting, strict=False)]:
        check(UNEVEN, source, target, values=True)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.proof("switches")
@pytest.mark.parametrize("part", range(2))
def test_compiled_switch_on_16_devices(part: int):
    """Every fifth of 210 pairs, from a random one on: all shapes are sources and targets."""
    first = int(os.environ.get("PROOF_SEED", "0")) % 5 + 5 * part
    command = [sys.executable, "-m", "tests.support.switches", "16", str(first), "10"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": ""})
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.splitlines()) == 21 and "rematerialization" not in run.stderr
