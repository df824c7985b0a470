"""Faults of a weight transfer, made below the code that reports, are all seen; clean transfers never are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.errors import RunFailure
from jrlhf.meshes import GENERATE, TRAIN, make_mesh, reshard
from jrlhf.models import LoRAConfig, ModelConfig, init_lm, init_lora, lora_shardings, param_shardings
from jrlhf.models.generation.continuous import Prompt, RowProgress
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.identity import adapter_identity, differences, drawing_identity, trained_identity
from jrlhf.rollouts.schedule import Rules
from jrlhf.rollouts.slices import Published, SliceWorkers
from tests.support.fleets import NO_RECOMPUTE

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=30, embed=16, layers=3, heads=2, kv_heads=2, head_dim=8, mlp=16, max_positions=8, tie_embeddings=False
)
MESH = dict(zip(("data", "fsdp", "tensor"), (2, 2, 2), strict=True))


@pytest.fixture(scope="module")
def versions():
    """Two versions of the weights on a trainer's mesh, and these weights as rollouts take them, in bfloat16."""
    mesh = make_mesh(**MESH)
    with jax.set_mesh(mesh):

        def drawn():
            weights = init_lm(CONFIG, jax.random.key(0))
            # Norm scales start at 1 in every layer, and two equal layers may be swapped.
            noise = jax.tree.map(lambda x: np.cos(np.arange(x.size, dtype=x.dtype)).reshape(x.shape), weights)
            first = jax.tree.map(lambda x, y: x + 0.01 * y, weights, noise)
            return first, jax.tree.map(lambda x: x * 1.01, first)

        first, second = jax.jit(drawn, out_shardings=(param_shardings(CONFIG, mesh, TRAIN),) * 2)()
        shardings = param_shardings(CONFIG, mesh, GENERATE)
        drawing = [reshard(tree, shardings, dtype=jnp.bfloat16) for tree in (first, second)]
    return (first, second), drawing


def changed(name: str, change: Callable, layer: int = 1) -> Callable:
    """A fault of one weight of one layer; name: its path, such as attention.wq."""

    def fault(old: Any, new: Any) -> Any:
        def at(path, leaf):
            path = jax.tree_util.keystr(path, simple=True, separator=".")
            return change(leaf) if path.endswith(name) and (layer < 0 or f"layers.{layer}." in path) else leaf

        return jax.tree_util.tree_map_with_path(at, new)

    return fault


def layers(order: Callable[[list, list], list]) -> Callable:
    return lambda old, new: {**new, "layers": order(old["layers"], new["layers"])}


def bit_flipped(x):
    x = np.array(x)
    x.view(np.uint16).flat[0] ^= 1
    return x


def one_nan(x):
    x = np.array(x)
    x.flat[0] = np.nan
    return x


def exchanged(one: str, two: str) -> Callable:
    def swap(old: Any, new: Any) -> Any:
        layer = dict(new["layers"][1])
        layer["mlp"] = {**layer["mlp"], one: layer["mlp"][two], two: layer["mlp"][one]}
        return {**new, "layers": [new["layers"][0], layer, *new["layers"][2:]]}

    return swap


# What a transfer may do to the weights, on the host: (the version before, the new version) -> what arrives.
FAULTS: dict[str, Callable[[Any, Any], Any]] = {
    "the update is lost": lambda old, new: old,
    "one layer is late": layers(lambda old, new: [new[0], old[1], new[2]]),
    "only the first layers arrive": layers(lambda old, new: [*new[:2], *old[2:]]),
    "only the layers arrive": lambda old, new: {**old, "layers": new["layers"]},
    "all but the layers arrives": lambda old, new: {**new, "layers": old["layers"]},
    "two layers are swapped": layers(lambda old, new: [new[1], new[0], new[2]]),
    "the layers are reversed": layers(lambda old, new: new[::-1]),
    "a layer comes twice": layers(lambda old, new: [new[0], new[0], new[2]]),
    "a layer is missing": layers(lambda old, new: new[:2]),
    "a square matrix is transposed": changed("mlp.gate", lambda x: x.T),
    "two matrices of one shape are exchanged": exchanged("gate", "up"),
    "two heads are exchanged": changed("attention.wq", lambda x: x[:, ::-1]),
    "rows are shifted by one": changed("mlp.up", lambda x: np.roll(x, 1, axis=0)),
    "a matrix is zero": changed("mlp.down", np.zeros_like),
    "a matrix is the old one times 2": changed("attention.wo", lambda x: x * 2),
    "a sign is lost": changed("attention.wk", np.abs),
    "one bit is flipped": changed("attention.wv", bit_flipped),
    "one number is NaN": changed("mlp.down", one_nan),
    "norm scales are ones": changed("scale", np.ones_like, layer=-1),
    "matrices were rounded to float8 on the way": changed(
        "mlp.up", lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype), layer=-1
    ),
    "matrices stay in float32": changed("mlp.up", lambda x: x.astype(jnp.float32), layer=-1),
    "the embedding serves as unembedding": lambda old, new: {**new, "unembedding": new["embedding"]},
    "an update is applied to another base": lambda old, new: jax.tree.map(lambda x, y: y + (y - x), old, new),
}


def test_every_fault_is_seen(versions):
    (_, trained), drawing = versions
    with jax.set_mesh(make_mesh(**MESH)):
        expected = jax.device_get(trained_identity(trained, dtype=jnp.dtype(jnp.bfloat16)))
        assert differences(jax.device_get(drawing_identity(drawing[1])), expected) == []
    old, new = jax.device_get(drawing)  # on one device: identities do not depend on it
    assert differences(jax.device_get(drawing_identity(new)), expected) == []
    seen = {
        name: differences(jax.device_get(drawing_identity(fault(old, new))), expected) for name, fault in FAULTS.items()
    }
    assert len(seen) >= 20 and [name for name, wrong in seen.items() if not wrong] == []


@pytest.mark.full
def test_faults_of_adapters_are_seen(versions):
    """And what is right is right: the trainer's base, with an adapter of the trainer's."""
    _, (other, base) = versions
    lora = LoRAConfig(2, 8.0)
    mesh = make_mesh(**MESH)
    with jax.set_mesh(mesh):
        shardings = lora_shardings(CONFIG, mesh, lora)

        def drawn(key):
            adapter = init_lora(CONFIG, lora, key)
            return adapter, jax.tree.map(lambda x: x + 0.1, adapter)

        old, new = jax.jit(drawn, out_shardings=(shardings, shardings))(jax.random.key(0))
        expected = drawing_identity(base) | adapter_identity(new)
        assert differences(*jax.device_get((drawing_identity(base, new), expected))) == []
        faults = {
            "adapter is not applied": (base, None),
            "adapter is an older one": (base, old),
            "adapter is on another base": (other, new),
        }
        seen = {name: differences(*jax.device_get((drawing_identity(*own), expected))) for name, own in faults.items()}
    assert all(seen.values()), seen
    assert not any(name.startswith("adapter") for name in seen["adapter is on another base"])


class Batch:
    """Stands for the decoding: rows of one token that are done at once."""

    room, state, rows = 4, None, ()

    def admit(self, weights, prompts):
        self.rows = tuple(prompt.number for prompt in prompts)

    def decode(self, weights):
        rows, self.rows = self.rows, ()
        return [RowProgress(row, 0, 1, (np.zeros(1, np.int32), np.zeros(1, np.float32), True)) for row in rows]


def test_nothing_is_learned_from_what_wrong_weights_drew(versions):
    (first, second), (old, new) = versions
    mesh = make_mesh(**MESH)

    def prompt(number: int) -> Prompt:
        return Prompt(number, np.zeros(1, np.int32), 1, np.zeros(1))

    def fleet() -> Any:
        rules, workers = Rules(2, 1, 1), SliceWorkers([Batch()])  # type: ignore[list-item]
        numbers: Any = {"samples": 1, "limit": 1, "recompute": NO_RECOMPUTE}
        own: Any = Fleet([workers], mesh, rules, prompt, print, **numbers)
        first_identity = trained_identity(first, dtype=jnp.dtype(jnp.bfloat16))
        own._take(own._lanes[0], Published(0, (old, {}), first_identity, None))
        return own

    expected = trained_identity(second, dtype=jnp.dtype(jnp.bfloat16))
    with jax.set_mesh(mesh):
        clean, lost, changing, changed = fleet(), fleet(), fleet(), fleet()
        for one in (clean, lost, changing, changed):
            assert list(one.collect().numbers) == [0, 1]
        clean.publish((new, {}), expected)
        assert list(clean.collect().numbers) == [2, 3]
        lost.publish((old, {}), expected)
        with pytest.raises(RunFailure, match="version 1 are not the trainer's: .* differ, .* first"):
            lost.collect()
        changed.publish((new, {}), expected)
        changed._lanes[0].workers._weights = old, {}  # before they draw
        with pytest.raises(RunFailure, match="version 1"):
            changed.collect()
        changing.publish((new, {}), expected)
        changing._lanes[0].workers._weights = old, {}  # they change while they draw ahead
        changing.publish((new, {}), expected)
        with pytest.raises(RunFailure, match="version 1"):
            changing.collect()


@pytest.mark.proof("kills")
def test_a_thousand_clean_updates_raise_no_alarm(versions):
    (params, _), _ = versions
    mesh = make_mesh(**MESH)
    shardings = param_shardings(CONFIG, mesh, GENERATE)
    with jax.set_mesh(mesh):
        update = jax.jit(lambda tree, step: jax.tree.map(lambda x: x + 1e-3 * jnp.sin(x * 1e3 + step), tree))
        for step in range(1000):
            params = update(params, step)
            identities = (
                drawing_identity(reshard(params, shardings, dtype=jnp.bfloat16)),
                trained_identity(params, dtype=jnp.dtype(jnp.bfloat16)),
            )
            assert differences(*jax.device_get(identities)) == []
