"""The model's numbers: presets against published sizes, and what is refused."""

from typing import Any

import jax
import pytest

from jrlhf.models import PRESETS, ModelConfig, RopeScaling, init_lm

# The number of parameters of each checkpoint on the Hugging Face hub, tied tables counted once.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
}


def count(config):
    """Parameters without the tables' padding rows."""
    shapes = jax.eval_shape(lambda key: init_lm(config, key), jax.random.key(0))
    tables = 1 if config.tie_embeddings else 2
    padding = (config.padded_vocab - config.vocab_size) * config.embed * tables
    return sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padding


@pytest.mark.full
def test_presets_have_the_published_number_of_parameters():
    counts = {config: count(config) for config in set(PRESETS.values())}
    assert {name: counts[PRESETS[name]] for name in PUBLISHED} == PUBLISHED
    # Every other preset is an architecture that was counted, but for what has no weights.
    assert set(counts.values()) == set(PUBLISHED.values())


def test_gemma_3_has_its_names_on_the_hub():
    """The base of 270M has no suffix, that of 1B ends in -pt."""
    names = {name for name in PRESETS if "gemma-3" in name}
    assert names == {f"google/gemma-3-{end}" for end in ("270m", "270m-it", "1b-pt", "1b-it")}


def test_the_vocabulary_is_padded_to_a_multiple_of_128():
    for vocabulary, rows in ((1, 128), (128, 128), (129, 256), (151936, 151936)):
        assert ModelConfig.tiny(vocabulary).padded_vocab == rows


def test_numbers_out_of_range_are_refused():
    cases: Any = (
        ({"layers": 0}, "model layers=0 must be a positive integer"),
        ({"vocab_size": True}, "model vocab_size=True must be a positive integer"),
        ({"kv_heads": 3}, "model kv_heads=3 must divide heads=4"),
        ({"head_dim": 7}, "model head_dim=7 must be even"),
        ({"softcap": 0.0}, "model softcap=0.0 must be positive"),
        ({"rope_theta": float("inf")}, "model rope_theta=inf must be positive"),
        ({"embed_scale": float("nan")}, "model embed_scale=nan must be positive"),
        ({"activation": "relu"}, "model activation='relu': known are silu, gelu_tanh"),
        ({"norm": "batch"}, "model norm='batch': known are rms, layer"),
        ({"positions": "alibi"}, "model positions='alibi': known are rotary, learned"),
        ({"norm": "layer", "norm_offset": True}, "norm_offset=True needs norm='rms'"),
        ({"window": 0}, "model window=0 must be a positive integer"),
        ({"window": 4, "local_layers": (True, False)}, "local_layers has 2 flags for layers=4"),
        ({"window": 4, "local_layers": (1, 0, 1, 0)}, "must be a tuple of booleans"),
        ({"local_layers": (True,) * 4}, "need a window: without one no layer is local"),
        ({"positions": "learned", "rope_scaling": RopeScaling("linear", 2.0)}, "need positions='rotary'"),
    )
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            ModelConfig(**vars(ModelConfig.tiny(100)) | change)


def test_rope_scalings_out_of_range_are_refused():
    cases: Any = (
        (("yarn", 2.0), "rope_scaling kind='yarn': known are linear, llama3"),
        (("linear", 0.0), "rope_scaling factor=0.0 must be positive"),
        (("linear", 2.0, 1.0), "low_freq_factor=1.0 must be null: linear scaling has no bands"),
        (("llama3", 8.0, 1.0, 4.0), "original_max_positions=None must be positive: llama3 scaling needs it"),
        (("llama3", 8.0, 4.0, 4.0, 8192), "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
    )
    for numbers, message in cases:
        with pytest.raises(ValueError, match=message):
            RopeScaling(*numbers)


def test_layers_are_local_where_a_window_says_so():
    numbers: Any = vars(ModelConfig.tiny(100))
    assert ModelConfig(**numbers).locality == (False,) * 4
    assert ModelConfig(**numbers | {"window": 8}).locality == (True,) * 4
    mixed = (True, False, True, False)
    assert ModelConfig(**numbers | {"window": 8, "local_layers": mixed}).locality == mixed
    assert ModelConfig(**numbers | {"positions": "learned", "head_dim": 7}).head_dim == 7  # nothing is rotated
