"""The model's numbers: presets against published sizes, and what is refused."""

import jax
import numpy as np
import pytest

from jrlhf.models import ModelConfig, init_lm


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # The number of parameters of the checkpoint on the Hugging Face hub, tied tables counted once.
        (ModelConfig.llama3_8b(), 8_030_261_248),
        (ModelConfig.qwen2_5_0_5b(), 494_032_768),
        (ModelConfig.qwen3_0_6b(), 596_049_920),
        (ModelConfig.qwen3_8b(), 8_190_735_360),
    ],
    ids=["llama3_8b", "qwen2_5_0_5b", "qwen3_0_6b", "qwen3_8b"],
)
def test_presets_have_the_published_number_of_parameters(config, parameters):
    shapes = jax.eval_shape(lambda key: init_lm(config, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters


def test_tiny_has_about_a_million_parameters():
    shapes = jax.eval_shape(lambda key: init_lm(ModelConfig.tiny(1024), key), jax.random.key(0))
    assert 0.8e6 < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 1.2e6


@pytest.mark.parametrize(("vocabulary", "rows"), [(1, 128), (128, 128), (129, 256), (151936, 151936)])
def test_the_vocabulary_is_padded_to_a_multiple_of_128(vocabulary, rows):
    assert ModelConfig.tiny(vocabulary).padded_vocab == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "model layers=0 must be a positive integer"),
        ({"embed": 12.0}, "model embed=12.0 must be a positive integer"),
        ({"vocab_size": True}, "model vocab_size=True must be a positive integer"),
        ({"kv_heads": 3}, "model kv_heads=3 must divide heads=4"),
        ({"head_dim": 7}, "model head_dim=7 must be even"),
        ({"norm_eps": 0.0}, "model norm_eps=0.0 must be positive"),
        ({"rope_theta": -1.0}, "model rope_theta=-1.0 must be positive"),
        ({"initializer_range": float("nan")}, "model initializer_range=nan must be positive"),
        ({"softcap": 0.0}, "model softcap=0.0 must be positive"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    numbers = vars(ModelConfig.tiny(100)) | change
    with pytest.raises(ValueError, match=message):
        ModelConfig(**numbers)


def test_configs_are_hashable_and_compare_by_value():
    assert ModelConfig.tiny(100) == ModelConfig.tiny(100)
    assert len({ModelConfig.tiny(100), ModelConfig.tiny(100), ModelConfig.tiny(101)}) == 2
    assert np.isclose(ModelConfig.tiny(100).norm_eps, 1e-6)
