"""config.json: published ones, both dialects, the inverse, and what is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from jrlhf.models.config.rope import RopeScaling
from jrlhf.models.hf import hf_config, read_config
from jrlhf.models.hf.presets import PRESETS

# config.json and generation_config.json as their hub repositories have them.
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())


def write(directory, config, generation=None):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def differences(one, other):
    return {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}


def test_published_configs_are_their_presets_and_what_they_say_beside_the_model(tmp_path):
    reads = {}
    for name, entry in PUBLISHED.items():
        reads[name] = read = read_config(write(tmp_path / name, entry["config"], entry.get("generation_config")))
        assert read.head == "lm" and read.family == entry["config"]["model_type"], name
        preset = PRESETS.get(name, PRESETS.get(name.split("/")[1]))
        assert preset is not None and differences(read.model, preset) == set(), name
    llama, qwen = reads["meta-llama/Llama-3.1-8B-Instruct"], reads["Qwen/Qwen2.5-0.5B-Instruct"]
    assert (llama.eos_ids, llama.bos_id, llama.pad_id) == ((128001, 128008, 128009), 128000, None)
    assert llama.dtype == "bfloat16" and reads["meta-llama/Llama-2-7b-hf"].dtype == "float16"
    assert (qwen.eos_ids, qwen.pad_id) == ((151645, 151643), 151643)  # of generation_config.json
    gemma, gpt2 = reads["google/gemma-3-1b-it"], reads["openai-community/gpt2"]
    assert (gemma.eos_ids, gemma.pad_id) == ((1, 106), 0)
    assert (gpt2.eos_ids, gpt2.dtype) == ((50256,), "float32")


def test_version_5_keys(tmp_path):
    old = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]["config"]
    moved = {key: old[key] for key in ("torch_dtype", "rope_theta", "rope_scaling")}
    new = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5} | moved["rope_scaling"]}
    new |= {key: value for key, value in old.items() if key not in moved}
    assert read_config(write(tmp_path / "4", old)) == read_config(write(tmp_path / "5", new))


def test_our_numbers_survive_a_config(tmp_path, configs):
    for name, config in configs.items():
        written = hf_config(config)
        assert written["model_type"] == name.split()[0]
        assert read_config(write(tmp_path / name, written)).model == config
        scalar = read_config(write(tmp_path / name, hf_config(config, "scalar")))
        assert (scalar.head, scalar.model) == ("scalar", config)


@pytest.mark.proof("families")
def test_transformers_has_the_same_defaults_and_writes_the_same_numbers(tmp_path, configs):
    """Compares every family, in the keys of version 5."""
    auto = pytest.importorskip("transformers", reason="it says what its defaults are").AutoConfig
    for name, config in configs.items():
        bare = read_config(write(tmp_path / "bare", {"model_type": name.split()[0]}))
        default = auto.for_model(name.split()[0]).to_dict() | {"architectures": None}
        assert differences(bare, read_config(write(tmp_path / "full", default))) == set(), name
        auto.from_pretrained(write(tmp_path / name / "4", hf_config(config))).save_pretrained(tmp_path / name / "5")
        assert "rope_parameters" in (tmp_path / name / "5" / "config.json").read_text() or name == "gpt2"
        assert read_config(tmp_path / name / "5").model == config


def test_a_family_is_kept_where_it_can_be(configs):
    plain = configs["llama"]
    assert hf_config(plain)["model_type"] == "llama"
    assert hf_config(plain, family="mistral")["model_type"] == "mistral"
    assert hf_config(configs["qwen2"], family="mistral")["model_type"] == "qwen2"
    odd = replace(plain, embed=30)  # transformers refuses a Llama whose heads do not divide its width
    assert hf_config(odd)["model_type"] == "mistral"
    # Ways of saying the same.
    same = replace(configs["gemma2"], query_scale=1 / 24**0.5)
    assert hf_config(same) == hf_config(configs["gemma2"])
    window = replace(plain, window=8)
    assert hf_config(replace(window, local_layers=(True,) * 3)) == hf_config(window)
    assert hf_config(replace(window, local_layers=(False,) * 3)) == hf_config(plain)


def test_no_family_computes_it(configs):
    cases: Any = (
        ("llama", {"softcap": 30.0}, "softcap=30.0 cannot be exported: no .* and llama is the nearest"),
        ("qwen2", {"qk_norm": True}, "cannot be exported: .* qwen"),
        ("llama", {"window": 8, "local_layers": (True, False, True)}, "qkv_bias=False cannot .* and qwen2 is the near"),
        ("gemma2", {"query_scale": 0.3}, "query_scale=0.3 cannot be exported"),
        ("gpt2", {"gated_mlp": True}, "gated_mlp=True cannot be exported: .* gpt2 is the nearest"),
        ("gemma2", {"embed": 30, "embed_scale": 30**0.5}, "embed=30, heads=4 cannot be exported"),
        ("mistral", {"mlp_bias": True}, "cannot be exported"),
        ("gemma3_text", {"attention_softcap": 50.0}, "attention_softcap=50.0 cannot .* and gemma3_text is the nearest"),
    )
    for name, changes, message in cases:
        with pytest.raises(ValueError, match=message):
            hf_config(replace(configs[name], **changes))


def test_an_unknown_family_is_refused(configs):
    with pytest.raises(ValueError, match="family 'mixtral' is not supported: known are llama"):
        hf_config(configs["llama"], family="mixtral")


LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
GEMMA3 = LLAMA | {"model_type": "gemma3_text"}
TYPES = ["sliding_attention", "full_attention"]
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": TYPES}


def test_the_rotary_parameters_of_gemma_3(tmp_path):
    """A scaling belongs to the global layers, whose other parameters stay: so transformers 5.24 reads them."""
    bands = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    nested = {
        "full_attention": {"rope_theta": 500.0, "original_max_position_embeddings": 24},
        "sliding_attention": {"rope_theta": 50.0},
    }
    cases: Any = (
        ({}, 1e6, 1e4, None),
        ({"rope_theta": 7, "rope_local_base_freq": 9.0}, 7.0, 9.0, None),
        ({"rope_parameters": nested}, 500.0, 50.0, None),
        ({"rope_parameters": nested, "rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},)
        + (500.0, 50.0, RopeScaling("linear", 2.0)),
        ({"rope_parameters": nested, "rope_scaling": bands, "original_max_position_embeddings": 8},)
        + (500.0, 50.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 24)),
        ({"rope_scaling": bands, "original_max_position_embeddings": 8, "max_position_embeddings": 99},)
        + (1e6, 1e4, RopeScaling("llama3", 8.0, 1.0, 4.0, 99)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 7.0}, 7.0, 1e4, None),
    )
    for settings, theta, local, scaling in cases:
        model = read_config(write(tmp_path, GEMMA3 | {"layer_types": TYPES} | settings)).model
        assert (model.rope_theta, model.local_rope_theta, model.rope_scaling) == (theta, local, scaling), settings


def test_other_names_of_keys(tmp_path):
    """GPT-2's general names count before its own."""
    names = {"hidden_size": 32, "n_embd": 64, "num_attention_heads": 2, "n_head": 4, "max_position_embeddings": 99}
    model = read_config(write(tmp_path, {"model_type": "gpt2", **names})).model
    assert (model.embed, model.heads, model.max_positions, model.layers) == (32, 2, 99, 12)


def test_numbers_are_written_as_transformers_takes_them(configs):
    """A float never as an integer; and a Gemma without local layers has a window, which transformers asks for."""
    for name in ("gemma2", "gemma3_text"):
        written = hf_config(replace(configs[name], window=None, local_layers=(), local_rope_theta=None, softcap=3))
        assert written.get("sliding_window", 4096) is not None and set(written["layer_types"]) == {"full_attention"}
        assert repr(written["final_logit_softcapping"]) == "3.0"


def test_what_we_do_not_compute_is_refused_by_name(tmp_path):
    cases: Any = (
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported: choose a model of gemma2,"),
        ({}, "model_type None is not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\) is not supported"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic' is not supported"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_type linear needs a factor"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling 'linear' must be an object"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "for full_attention are not supported in a llama"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "yarn.* in the local layers"),
        (LLAMA | {"hidden_act": None}, "hidden_act None is not supported: known are silu"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size '4096' must be an integer"),
        (LLAMA | {"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6' must be a number"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes' must be true or false"),
        (LLAMA | {"hidden_size": 30}, "hidden_size 30 cannot be divided by num_attention_heads 4"),
        (LLAMA | {"num_key_value_heads": 3}, "kv_heads=3 must divide heads=4"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is unknown"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id '</s>' must be an integer"),
        (LLAMA | {"architectures": ["LlamaForTokenClassification"]}, "TokenClassification'.* are not supported"),
        (LLAMA | {"architectures": 5}, "architectures 5 are not supported: known are Llama"),
        (LLAMA | {"id2label": 5}, "id2label 5 must be an object"),
        (LLAMA | {"rms_norm_eps": 10**400}, r"rms_norm_eps 1000000000... \(401 digits\) is too large for a number"),
        (LLAMA | {"hidden_size": 10**400}, r"hidden_size 1000000000... \(401 digits\) is no size of a model"),
        (LLAMA | {"vocab_size": 2**31}, "vocab_size 2147483648 is no size of a model"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": 5}}, "sliding_attention 5 must be an object"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "num_labels 2 is not supported"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types are not supported in a llama"),
        (GEMMA3 | {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention are not"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "must list one type for each of the 2 layers"),
        (GEMMA3 | {"sliding_window": None}, "2 layers are local, but there is no sliding_window"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported: .* with .* null"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0.0 must be positive"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is"),
        (LLAMA | {"is_causal": 0}, "is_causal 0 is not supported: choose a model with is_causal true"),
        (LLAMA | {"text_config": {"vocab_size": 5}}, "text_config {'vocab_size': 5} is not supported"),
        (LLAMA | {"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config {'head_dim': 4} is not .*: all"),
        (QWEN2 | {"use_sliding_window": False}, "1 layers are local, but there is no sliding_window"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 5.0}, "layer_types": TYPES}, "rope_parameters .* each with its"),
        (GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 2.0}, "layer_types": TYPES}, "each with its rope_type"),
        ({"model_type": "gpt2", "n_embd": 30}, "n_embd 30 cannot be divided by n_head 12"),
    )
    for config, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            read_config(write(tmp_path, config))
        assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_directories_without_a_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no directory .*nowhere"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no config.json"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(FileNotFoundError, match="only an adapter: load its base model, org/base,"):
        read_config(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "holds a list where an object"), ("[" * 9999, "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"config.json {message}"):
            read_config(tmp_path)


def test_special_tokens(tmp_path):
    def tokens(config, generation=None):
        read = read_config(write(tmp_path, LLAMA | config, generation))
        return read.eos_ids, read.bos_id, read.pad_id

    assert tokens({}) == ((2,), 1, None)
    assert tokens({"eos_token_id": None, "bos_token_id": None, "pad_token_id": -1}) == ((), None, None)
    assert tokens({"eos_token_id": 5}, {"eos_token_id": [7, 6], "pad_token_id": 3}) == ((7, 6), 1, 3)
    assert tokens({"eos_token_id": 5}, {"eos_token_id": None}) == ((5,), 1, None)
    (tmp_path / "generation_config.json").unlink()
    assert tokens({"vocab_size": 2}) == ((), 1, None)  # a default is of the family's usual vocabulary
    assert tokens({"eos_token_id": [4, 100]}) == ((4,), 1, None)
