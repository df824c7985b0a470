"""The engine against one program for the whole rollout: the same tokens, however the rows were scheduled."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import AXES, GENERATE, make_mesh
from jrlhf.meshes.plan import Slice
from jrlhf.models import (
    Engine,
    LoRAConfig,
    ModelConfig,
    SamplingConfig,
    Schedule,
    init_lm,
    init_lora,
    lora_shardings,
    make_generate,
    param_shardings,
    to_int8,
)
from jrlhf.models.attention import transposes_keys
from jrlhf.models.generation import chunks as in_chunks
from jrlhf.models.generation import decoding, programs
from jrlhf.models.generation.continuous import ContinuousBatch
from jrlhf.models.generation.decoding import Decoder
from jrlhf.models.generation.occupancy import LastRows
from jrlhf.models.generation.programs import Programs
from jrlhf.planning.fusion.last_rows import Rollouts, decode, sent_bytes
from jrlhf.run import processes
from tests.models.shared import SHALLOW

pytestmark = pytest.mark.usefixtures("quick_compilation")

# One layer; the test of every kind of model has two.
CONFIG = ModelConfig(
    vocab_size=150, embed=32, layers=1, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64, qk_norm=True
)
LORA = LoRAConfig(rank=2, alpha=8.0)
U, P, R = 16, 6, 24
# Stop tokens are common, so that lengths differ: from 2, by min_new_tokens, to the limit.
SAMPLING = SamplingConfig(R, temperature=0.9, min_new_tokens=2, stop_ids=tuple(range(0, 150, 12)))
FREE: Any = {"scoring": (), "step": lambda *_: 1.0, "prefill": lambda _: 0.0, "move": lambda *_: 0.0}


class Setting:
    """Weights and prompts on a mesh, and what the plain program draws."""

    def __init__(self, sizes, *, config=CONFIG, samples=1, lora=None, int8=False):
        self.mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        self.config, self.samples, self.lora = config, samples, lora
        generator = np.random.default_rng(3)
        lengths = generator.integers(1, P + 1, U).astype(np.int32)
        tokens = generator.integers(0, config.vocab_size, (U, P)).astype(np.int32)
        with jax.set_mesh(self.mesh):
            rows = jax.NamedSharding(self.mesh, jax.P(AXES))
            self.prompts = jax.device_put((tokens, lengths), rows)
            self.keys = jax.device_put(jax.random.split(jax.random.key(7), U * samples), rows)
            stacked = init_lm(config, jax.random.key(0))
            layers = [jax.tree.map(lambda x, i=i: 4 * x[i], stacked["layers"]) for i in range(config.layers)]
            base = jax.device_put({**stacked, "layers": layers}, param_shardings(config, self.mesh, GENERATE))
            base = to_int8(base) if int8 else base
            self.weights: Any = (base,)
            if lora is not None:
                adapter = jax.tree.map(lambda x: x + 0.1, init_lora(config, lora, jax.random.key(1)))
                self.weights = jax.device_put(adapter, lora_shardings(config, self.mesh, lora)), base

    def call(self, function, prompts, keys):
        first, *base = self.weights
        with jax.set_mesh(self.mesh):
            return jax.device_get(function(first, *prompts, keys, *base))

    def plain(self):
        program = jax.jit(make_generate(self.config, self.mesh, SAMPLING, lora=self.lora))
        repeated = jax.tree.map(lambda x: np.repeat(jax.device_get(x), self.samples, axis=0), self.prompts)
        return self.call(program, jax.device_put(repeated, self.keys.sharding), self.keys)

    def scheduled(self, schedule):
        engine = Engine(self.config, self.mesh, SAMPLING, schedule, samples=self.samples, lora=self.lora)
        return self.call(engine, self.prompts, self.keys)


def assert_same(actual, expected):
    for name in ("tokens", "prompt_lengths", "response_lengths", "finished"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def alone():
    setting = Setting((1, 1, 1), samples=2)
    return setting, setting.plain()


@pytest.mark.full
def test_tokens_do_not_depend_on_compaction_and_growing_caches(alone, monkeypatch):
    setting, expected = alone
    assert len(set(expected.response_lengths.tolist())) > 5 and expected.response_lengths.max() == R
    done = Counter()

    def counted(name, call):
        return lambda *arguments: done.update([name]) or call(*arguments)

    for name in ("take", "grow"):
        monkeypatch.setattr(Programs, name, counted(name, getattr(Programs, name)))
    monkeypatch.setattr(in_chunks, "warm", lambda *_: None)
    assert_same(setting.scheduled(Schedule(chunk=5, buckets=3, lengths=3, prefill=3)), expected)
    assert done["take"] > 0 and done["grow"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        # In slots that others had before, and in caches that are longer or shorter than those of one program.
        ((1, 2, 4), {"config": SHALLOW["gemma"]}),
        pytest.param((2, 2, 2), {"config": SHALLOW["gpt2"]}, marks=pytest.mark.proof("families")),
        ((1, 1, 1), {"lora": LORA, "int8": True}),
    ],
    ids=["windows", "learned positions", "adapter on int8"],
)
def test_every_kind_of_model_and_every_mesh_is_scheduled_alike(sizes, changes, monkeypatch):
    """Groups of devices refill and compact together; windows and positions count from a row's own start."""
    setting = Setting(sizes, **changes)
    monkeypatch.setattr(in_chunks, "warm", lambda *_: None)
    assert_same(setting.scheduled(Schedule(slots=8, chunk=6, buckets=2, lengths=2)), setting.plain())


@pytest.mark.full
def test_tokens_do_not_depend_on_how_keys_are_stored(alone, monkeypatch):
    setting, expected = alone
    assert transposes_keys(setting.mesh)  # on accelerators they are stored as values are
    for module in (programs, decoding):
        monkeypatch.setattr(module, "transposes_keys", lambda mesh: False)
    schedule = Schedule(slots=4, chunk=5, buckets=2, lengths=2, prefill=2)
    assert_same(setting.scheduled(schedule), expected)
    assert_same(setting.plain(), expected)


@pytest.fixture
def compiled():
    """How often XLA has compiled a program of each name."""
    names: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names[str(details["fun_name"]).removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_engine_draws_the_tokens_of_one_program_and_compiles_nothing_after_the_first_call(
    alone, compiled, monkeypatch
):
    """Samples share a prefill and a prompt, and rows that are told to be done have all their tokens."""
    setting, expected = alone
    schedule = Schedule(slots=8, chunk=6, buckets=2, lengths=2)
    engine = Engine(CONFIG, setting.mesh, SAMPLING, schedule, samples=2)
    prefill, prefilled = Decoder.prefill, set()

    def counting(decoder, params, prompts, size):
        prefilled.add(len(prompts))
        return prefill(decoder, params, prompts, size)

    monkeypatch.setattr(Decoder, "prefill", counting)
    others = [jax.device_put(jax.random.split(jax.random.key(seed), 2 * U), setting.keys.sharding) for seed in range(3)]
    compiled.clear()
    assert_same(setting.call(engine, setting.prompts, setting.keys), expected)
    holding_the_model = {"_run_chunk": 2 * 2, "_prefilled": 2}
    rows = {"_filled_rows": 2, "_taken_rows": 1}
    caches = {"filled_cache": 2 * 2, "_taken": 2, "empty_cache": 2}
    compiled.pop("grown_cache", None)  # one that the engines of a process share
    assert compiled == holding_the_model | rows | caches and prefilled == set(schedule.waves(U, 4, P)) == {1, 4}
    compiled.clear()
    for keys in others:  # other lengths, so other moments at which rows come and go
        setting.call(engine, setting.prompts, keys)
    looks = []

    def watch(done, assemble, mesh):
        drawn = assemble(slice(2, None))
        for name in ("tokens", "response_lengths", "finished"):
            np.testing.assert_array_equal(getattr(drawn, name)[done[2:]], getattr(expected, name)[2:][done[2:]])
        looks.append(done)

    setting.call(partial(engine, watch=watch), setting.prompts, setting.keys)
    assert not compiled
    assert all((later >= earlier).all() for earlier, later in pairwise(looks))
    # Rows 8 and up wait for a slot at first. The last look, at which all are done, is the end of the call.
    assert not looks[0][8:].any() and looks[0].sum() == (expected.response_lengths[:8] <= 6).sum()
    assert looks[-1].any() and not looks[-1].all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "groups", "rows", "buckets", "changes"),
    [
        ((4, 1, 1), 1, 6, 1, {"samples": 2}),
        ((4, 1, 1), 2, None, 2, {"samples": 2}),  # slots are halved before the move, and not after it
        pytest.param((2, 2, 2), 2, None, 1, {"lora": LORA}, marks=pytest.mark.proof("families")),
    ],
)
def test_the_last_rows_move_to_fewer_devices_and_keep_their_bits(
    sizes, groups, rows, buckets, changes, compiled, monkeypatch
):
    """They move at the first look at which few enough are left and fit; a call may say that they stay: then the looks
    are those of the simulator."""
    setting = Setting(sizes, **changes)
    schedule = Schedule(chunk=1, buckets=buckets, lengths=1 if setting.lora is None else 2)  # 2: caches grow
    options = {"samples": setting.samples, "lora": setting.lora}
    settings = replace(schedule, last_groups=groups, last_rows=rows)
    engine, looks, counts = Engine(setting.config, setting.mesh, SAMPLING, settings, **options), [], set()
    decoding = ContinuousBatch.decode

    def counted(self, weights):
        counts.add((len(self.owner), self.owner.shape[1]))
        return decoding(self, weights)

    def watch(done, assemble, mesh):
        looks.append((~done, [*mesh.devices.flat]))

    monkeypatch.setattr(ContinuousBatch, "decode", counted)

    every = [*setting.mesh.devices.flat]
    whole = partial(engine, watch=watch, last=LastRows(len(every) // sizes[2]))  # groups: all of them
    stayed = setting.call(whole, setting.prompts, setting.keys)
    places = Slice(0, len(every)), sizes[2]
    chunks = decode(Rollouts(schedule, U, setting.samples, P, R, *places, tile=2, **FREE), stayed.response_lengths)
    np.testing.assert_array_equal([~chunk.done for chunk in chunks[:-1]], [left for left, _ in looks])
    looks.clear()
    moved = setting.call(partial(engine, watch=watch), setting.prompts, setting.keys)
    for name in ("tokens", "logprobs", "response_lengths", "finished"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(stayed, name), err_msg=name)
    slots = schedule.slot_counts(U * setting.samples // (len(every) // sizes[2]), sizes[2])[-1]
    fewer = every[: groups * sizes[2]]
    all_groups = len(every) // sizes[2]
    assert counts == {(all_groups, slots * 2**halving) for halving in range(buckets)} | {(groups, slots)}
    few = [np.sum(left) <= (rows or len(left)) for left, _ in looks]
    fit = [left.reshape(groups, -1).sum(axis=1).max() <= slots for left, _ in looks]
    first = 1 + np.flatnonzero(np.logical_and(few, fit))[0]  # the first chunk that ends elsewhere
    assert 1 < first < len(looks)
    assert [devices for _, devices in looks] == [every] * first + [fewer] * (len(looks) - first)
    others = jax.device_put(jax.random.split(jax.random.key(1), U * setting.samples), setting.keys.sharding)
    compiled.clear()
    results = []
    setting.call(lambda *arguments: results.append(engine(*arguments)) or results[0], setting.prompts, others)
    assert not compiled
    assert all(leaf.sharding == setting.keys.sharding for leaf in jax.tree.leaves(results[0]))  # on all devices again


@pytest.mark.full
def test_the_simulator_of_the_last_rows_has_the_looks_of_the_engine(monkeypatch):
    """The same rows are done at each look, of groups of two devices, in slots that others had before; and the chunks
    have the same slots and caches."""
    setting, looks, sizes, simulated = Setting((2, 1, 2), samples=2), [], [], []
    schedule = Schedule(16, 2, 2, 2, 2)
    decoding = ContinuousBatch.decode

    def sized(self, weights):
        progress = decoding(self, weights)
        sizes.append((self.owner.shape[1], self.state.slots.caches[0].size))
        return progress

    monkeypatch.setattr(in_chunks, "warm", lambda *_: None)
    monkeypatch.setattr(ContinuousBatch, "decode", sized)
    engine = Engine(CONFIG, setting.mesh, SAMPLING, schedule, samples=2)
    watch = partial(engine, watch=lambda done, *_: looks.append(done))
    lengths = setting.call(watch, setting.prompts, setting.keys).response_lengths
    priced = Rollouts(schedule, U, 2, P, R, Slice(0, 4), 2, tile=2, **FREE)
    chunks = decode(replace(priced, step=lambda *size: simulated.append(size) or 1.0), lengths)
    (slots, positions), expected = zip(*sizes, strict=True), zip(*simulated, strict=True)
    assert slots == next(expected)
    assert np.all(np.array(positions) <= next(expected))  # the simulator takes all prompts for the longest
    assert len(looks) > 8
    np.testing.assert_array_equal([chunk.done for chunk in chunks[:-1]], looks)
    assert chunks[-1].done.all()


def test_the_bytes_that_the_simulator_prices_are_those_that_are_sent(monkeypatch):
    """A process without a device that decodes gets each row once, when it is done; or no row, if nothing reads it."""
    setting, sent, rows = Setting((1, 1, 1)), list[bytes](), list[int]()
    client = SimpleNamespace(key_value_set_bytes=lambda key, data: sent.append(data))
    monkeypatch.setattr(in_chunks, "warm", lambda *_: None)
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "absent_processes", lambda mesh: [SimpleNamespace(process_index=1)])
    monkeypatch.setattr(processes.multihost, "get_jax_distributed_client", lambda: client)

    def read(tree, mask=None):
        arrays = processes.to_all_hosts(tree, mask)
        if mask is not None:
            rows.append(int(mask.sum()))
            assert len(sent[-1]) == sent_bytes(rows[-1], R)
        return arrays

    engine = Engine(CONFIG, setting.mesh, SAMPLING, Schedule(slots=8, chunk=6, buckets=1, lengths=1))
    setting.call(partial(engine, read=read, shares=True), setting.prompts, setting.keys)
    assert sum(rows) == U and len(rows) > 2
    setting.call(partial(engine, read=read), setting.prompts, setting.keys)
    assert sum(rows) == U


def test_what_does_not_fit_is_refused():
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    engine = partial(Engine, CONFIG, mesh, SAMPLING)
    arguments = jnp.zeros((U, P), jnp.int32), jnp.ones(U, jnp.int32), jax.random.split(jax.random.key(0), U)
    with pytest.raises(ValueError, match="decode slots: a batch of 3 rows cannot be divided over 2 devices"):
        engine(Schedule(slots=3))({}, *arguments)
    with pytest.raises(ValueError, match="16 prompts with 2 samples each need 32 keys, not 16"):
        engine(samples=2)({}, *arguments)
    arguments = *arguments[:2], jax.random.split(jax.random.key(0), 4 * U)
    with pytest.raises(ValueError, match="4 samples .* each of 2 groups of devices has 2: raise slots to 8"):
        engine(Schedule(slots=4), samples=4)({}, *arguments)
    arguments = *arguments[:2], jax.random.split(jax.random.key(0), 5 * U)
    with pytest.raises(ValueError, match="raise slots to 16"):  # 10 would not divide
        Engine(CONFIG, make_mesh(2, 1, 4), SAMPLING, Schedule(slots=8), samples=5)({}, *arguments)
    with pytest.raises(ValueError, match="stop id 150"):
        Engine(CONFIG, mesh, SamplingConfig(4, stop_ids=(150,)))
