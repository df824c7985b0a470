"""Initial weights, logical axes, and where a mesh keeps what."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, make_mesh
from jrlhf.models import ModelConfig, init_lm, init_scalar, init_sharded, param_shardings, scalar_from
from jrlhf.models.params import model_axes
from tests.models.shared import GEMMA, GPT_2, fast_jit

CONFIG = ModelConfig(
    vocab_size=200, embed=64, layers=3, heads=8, kv_heads=2, head_dim=16, mlp=96, max_positions=32, tie_embeddings=False
)


@pytest.fixture(scope="module")
def initial():
    return jax.device_get(jax.jit(partial(init_lm, CONFIG))(jax.random.key(0)))


def test_shards_have_the_promised_sizes():
    mesh = make_mesh(fsdp=2, tensor=4)
    shapes = jax.eval_shape(partial(init_lm, CONFIG), jax.random.key(0))

    def shard(layout, *path):
        leaf: Any = shapes
        sharding: Any = param_shardings(CONFIG, mesh, layout)
        for key in path:
            leaf, sharding = leaf[key], sharding[key]
        return sharding.shard_shape(leaf.shape)

    for layout in (TRAIN, TRAIN_TP, SCORE):
        assert shard(layout, "embedding") == shard(layout, "unembedding") == (256 // 4, 64 // 2)
        assert shard(layout, "layers", "attention", "wq") == (3, 64 // 2, 8 // 4, 16)
        assert shard(layout, "layers", "attention", "wk") == (3, 64 // 2, 2, 16)  # 2 heads for 4 devices: not sharded
        assert shard(layout, "layers", "attention", "wo") == (3, 8 // 4, 16, 64 // 2)
        assert shard(layout, "layers", "mlp", "down") == (3, 96 // 4, 64 // 2)
        assert shard(layout, "layers", "mlp_norm", "scale") == (3, 64)
    layers = param_shardings(CONFIG, mesh, GENERATE)["layers"]
    assert len(layers) == CONFIG.layers
    assert layers[1]["mlp"]["up"].shard_shape((64, 96)) == (64, 96 // 4)
    assert layers[2]["attention"]["wo"].shard_shape((8, 16, 64)) == (8 // 4, 16, 64)
    scalar = param_shardings(CONFIG, mesh, TRAIN, "scalar")
    assert model_axes(CONFIG, mesh, "scalar")["value_head"] == {"kernel": ("norm",), "bias": ()}
    wide = make_mesh(fsdp=4, tensor=2)
    assert model_axes(CONFIG, wide, "lm")["layers"]["attention"]["wk"][2] == "kv_heads"
    assert scalar["value_head"]["kernel"].shard_shape((64,)) == (64,)


def test_a_seed_gives_the_numbers_that_it_always_gave(initial):
    """Draw n of the model, and of a layer, has the key with number n folded in; the layers share one draw's key."""
    std, small = CONFIG.initializer_range, CONFIG.initializer_range / (2 * CONFIG.layers) ** 0.5

    @fast_jit
    def expected(key):
        fold, normal = jax.random.fold_in, jax.random.normal
        layer_key = jax.random.split(fold(key, 1), CONFIG.layers)[2]
        tables = [std * normal(fold(key, number), (200, 64)) for number in (0, 2)]
        attention = std * normal(fold(layer_key, 1), (64, 2, 16)), small * normal(fold(layer_key, 3), (8, 16, 64))
        return *tables, *attention, small * normal(fold(layer_key, 6), (96, 64))

    layer = jax.tree.map(lambda x: x[2], initial["layers"])
    weights = [initial["embedding"][:200], initial["unembedding"][:200], layer["attention"]["wk"]]
    weights += [layer["attention"]["wo"], layer["mlp"]["down"]]
    for weight, drawn in zip(weights, expected(jax.random.key(0)), strict=True):
        np.testing.assert_allclose(weight, drawn, rtol=1e-6)
    for table in (initial["embedding"], initial["unembedding"]):
        assert (table[200:] == 0).all()
    assert (initial["layers"]["mlp_norm"]["scale"] == 1).all()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(initial))


BIASES = {"bq", "bk", "bv", "bo", "up_bias", "down_bias", "bias"}


def initial_vectors(changes) -> dict[str, list[Any]]:
    """Name -> all new weights of that name, but matrices of layers, which take long to draw."""
    config = ModelConfig(**{**vars(CONFIG), **changes})

    def init(key):
        vectors: dict[str, list[Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(init_lm(config, key)):
            if path[-1].key in {*BIASES, "scale", "positions"}:
                vectors.setdefault(path[-1].key, []).append(leaf)
        return vectors

    return jax.device_get(fast_jit(init)(jax.random.key(0)))


def test_biases_begin_at_zero_and_offset_scales_too():
    gpt2, gemma = initial_vectors(GPT_2), initial_vectors(GEMMA)
    assert gpt2.keys() == BIASES | {"scale", "positions"} and gemma.keys() == {"scale"}
    assert gpt2["positions"][0].std() == pytest.approx(0.02, rel=0.1) and gpt2["positions"][0].shape == (32, 64)
    assert not any(leaf.any() for name in BIASES for leaf in gpt2[name])
    assert all((leaf == 1).all() for leaf in gpt2["scale"])
    assert len(gemma["scale"]) == 7 and not any(leaf.any() for leaf in gemma["scale"])


def test_sharded_initial_weights_do_not_depend_on_the_mesh(initial):
    mesh = make_mesh(fsdp=4, tensor=2)
    params = init_sharded(CONFIG, jax.random.key(0), mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), initial)
    assert jax.tree.map(lambda x: x.sharding, params) == param_shardings(CONFIG, mesh, TRAIN)


def test_scalar_models_start_from_other_models(initial):
    reward = scalar_from(initial)
    assert "unembedding" not in reward
    assert (reward["value_head"]["kernel"] == np.zeros(64)).all() and reward["value_head"]["bias"] == 0
    for name in ("embedding", "layers", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, reward[name], initial[name])

    trained = reward | {"value_head": {"kernel": jnp.arange(64.0), "bias": jnp.ones(())}}
    critic = scalar_from(trained, keep_head=True)
    jax.tree.map(np.testing.assert_array_equal, critic, trained)
    shared = {id(leaf) for leaf in jax.tree.leaves(critic)} & {id(leaf) for leaf in jax.tree.leaves(trained)}
    assert not shared  # donating one model must not delete the other
    assert (scalar_from(trained)["value_head"]["kernel"] == np.zeros(64)).all()
    with pytest.raises(ValueError, match="keep_head=True needs a model with a scalar head"):
        scalar_from(initial, keep_head=True)


def test_scalar_models_are_stored_as_their_shardings_say():
    mesh = make_mesh(fsdp=4, tensor=2)
    config = ModelConfig(**{**vars(CONFIG), **GPT_2})  # with learned positions
    shapes = jax.eval_shape(partial(init_lm, config), jax.random.key(0))
    ones = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    with jax.set_mesh(mesh):
        reward = scalar_from(jax.device_put(ones, param_shardings(config, mesh, TRAIN)))
        critic = scalar_from(reward, keep_head=True)
    assert reward["positions"].shape == (32, 64)
    for model in (reward, critic):
        assert jax.tree.map(lambda x: x.sharding, model) == param_shardings(config, mesh, TRAIN, "scalar")


def test_scalar_heads_begin_at_zero_or_small():
    config = ModelConfig(**{**vars(CONFIG), "embed": 512, "layers": 1, "mlp": 8, "heads": 1, "kv_heads": 1})
    zero, drawn = (
        fast_jit(lambda key, zero=zero: init_scalar(config, key, zero_head=zero)["value_head"])(jax.random.key(0))
        for zero in (True, False)
    )
    assert (zero["kernel"] == jnp.zeros(512)).all()
    assert float(drawn["kernel"].std()) == pytest.approx(513**-0.5, rel=5 / 1024**0.5)
    assert drawn["bias"] == 0
