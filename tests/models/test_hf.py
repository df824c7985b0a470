"""The exported directory: names, shapes and bits; all or nothing."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.models import ModelConfig, export_hf, hf
from jrlhf.models.hf import hf_config

LLAMA = ModelConfig(
    vocab_size=200, embed=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=48, max_positions=64, tie_embeddings=False
)
QWEN3 = ModelConfig(**{**vars(LLAMA), "qk_norm": True, "tie_embeddings": True})
QWEN2 = ModelConfig(**{**vars(LLAMA), "qkv_bias": True})
TOKENIZER = json.dumps(
    {
        "added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 1, "content": "<eos>"}],
        "model": {"type": "BPE", "vocab": {"a": 2}, "merges": []},
    }
)


def expected_shapes(config):
    """Names and [out, in] shapes as `transformers` creates them."""
    D, F, V = config.embed, config.mlp, config.vocab_size
    Q, KV = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (V, D)
    for i in range(config.layers):
        layer = {
            "input_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (Q, D),
            "self_attn.k_proj.weight": (KV, D),
            "self_attn.v_proj.weight": (KV, D),
            "self_attn.o_proj.weight": (D, Q),
            "post_attention_layernorm.weight": (D,),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
        }
        if config.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        if config.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (Q,), "self_attn.k_proj.bias": (KV,), "self_attn.v_proj.bias": (KV,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@pytest.mark.parametrize("config", [LLAMA, QWEN3, QWEN2], ids=["llama", "qwen3", "qwen2"])
def test_names_shapes_and_bits(reference, tmp_path, config):
    params = reference.random_params(config)
    directory = export_hf(params, config, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    assert {name: weight.shape for name, weight in weights.items()} == expected_shapes(config)

    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], params["embedding"][:200])
    attention = params["layers"]["attention"]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}.self_attn."
        for head in range(config.heads):
            rows = slice(head * 16, head * 16 + 16)
            np.testing.assert_array_equal(weights[f"{prefix}q_proj.weight"][rows], attention["wq"][layer, :, head].T)
            np.testing.assert_array_equal(weights[f"{prefix}o_proj.weight"][:, rows], attention["wo"][layer, head].T)
        for head in range(config.kv_heads):
            rows = slice(head * 16, head * 16 + 16)
            np.testing.assert_array_equal(weights[f"{prefix}k_proj.weight"][rows], attention["wk"][layer, :, head].T)
            np.testing.assert_array_equal(weights[f"{prefix}v_proj.weight"][rows], attention["wv"][layer, :, head].T)
            if config.qkv_bias:
                np.testing.assert_array_equal(weights[f"{prefix}k_proj.bias"][rows], attention["bk"][layer, head])
        if config.qk_norm:
            np.testing.assert_array_equal(weights[f"{prefix}k_norm.weight"], attention["key_norm"]["scale"][layer])
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(
                weights[f"model.layers.{layer}.mlp.{name}_proj.weight"], params["layers"]["mlp"][name][layer].T
            )
    np.testing.assert_array_equal(weights["model.norm.weight"], params["final_norm"]["scale"])
    if not config.tie_embeddings:
        np.testing.assert_array_equal(weights["lm_head.weight"], params["unembedding"][:200])


def test_configs_name_the_architecture(reference, tmp_path):
    params = jax.tree.map(partial(jnp.asarray, dtype=jnp.bfloat16), reference.random_params(QWEN3))
    directory = export_hf(params, QWEN3, tmp_path / "model", tokenizer_json=TOKENIZER, eos_ids=(1,), pad_id=0)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["model_type"] == "qwen3"
    assert config["vocab_size"] == 200 and config["head_dim"] == 16 and config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (1, 0, None)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 1
    assert (directory / "tokenizer.json").read_text() == TOKENIZER
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    assert (tokenizer["eos_token"], tokenizer["pad_token"], tokenizer["model_max_length"]) == ("<eos>", "<pad>", 64)
    weights = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(weights["model.norm.weight"], np.asarray(params["final_norm"]["scale"]))
    assert hf_config(LLAMA)["architectures"] == ["LlamaForCausalLM"]
    assert hf_config(QWEN2)["architectures"] == ["Qwen2ForCausalLM"]


def test_a_large_model_is_written_in_several_files(reference, tmp_path):
    params = reference.random_params(LLAMA)
    whole = load_file(export_hf(params, LLAMA, tmp_path / "whole") / "model.safetensors")
    directory = export_hf(params, LLAMA, tmp_path / "parts", shard_bytes=30_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in whole.values())
    parts = {file.name: load_file(file) for file in files}
    assert all(sum(w.nbytes for w in part.values()) <= 30_000 for part in parts.values())
    assert set(index["weight_map"]) == set(whole)
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(parts[file][name], whole[name])


def test_an_export_is_all_or_nothing(reference, tmp_path, monkeypatch):
    params = reference.random_params(LLAMA)
    directory = export_hf(params, LLAMA, tmp_path / "model", eos_ids=(3,))
    before = (directory / "config.json").read_text()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "_write_weights", fail)
        with pytest.raises(OSError, match="disk full"):
            export_hf(params, LLAMA, directory, eos_ids=(4,))
    assert (directory / "config.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    export_hf(params, LLAMA, directory, eos_ids=(4, 5))
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_exported_is_refused(reference, tmp_path):
    params = reference.random_params(LLAMA)
    with pytest.raises(ValueError, match="softcap=30.0 cannot be exported"):
        export_hf(params, ModelConfig(**{**vars(LLAMA), "softcap": 30.0}), tmp_path / "model")
    with pytest.raises(ValueError, match="qk_norm and qkv_bias cannot be exported"):
        hf_config(ModelConfig(**{**vars(LLAMA), "qk_norm": True, "qkv_bias": True}))
    with pytest.raises(ValueError, match="eos id 200 is outside the vocabulary of 200 tokens"):
        export_hf(params, LLAMA, tmp_path / "model", eos_ids=(1, 200))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("dear diary")
    with pytest.raises(FileExistsError, match="notes is not empty and holds no model"):
        export_hf(params, LLAMA, tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "dear diary"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
