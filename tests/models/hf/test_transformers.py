"""There and back: what transformers saves, loaded and exported again, is the same model to transformers, bit for bit.

The numbers that the families compute are compared in tests/models/test_parity.py, whose goldens need no torch.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.models import export_hf
from jrlhf.models.hf import load_hf

torch = pytest.importorskip("torch", reason="transformers computes with torch")
transformers = pytest.importorskip("transformers", reason="it writes and reads the directories")

SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SAVED = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **BANDS}},
    "llama biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "gpt2": {"n_inner": 96, "bos_token_id": 1, "eos_token_id": 1},
}
GPT2_SIZES = {"vocab_size": 150, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "pad_token_id": 0}


def saved(directory, name, head, dtype):
    """A random model as transformers saves it."""
    family = name.split()[0]
    labels = {"num_labels": 1} if head == "scalar" else {}
    config = transformers.AutoConfig.for_model(
        family, **(GPT2_SIZES if family == "gpt2" else SIZES), **SAVED[name], **labels
    )
    build = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    model = build.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases too
            weight.add_(0.1 * torch.randn_like(weight))
    model.to(dtype).save_pretrained(directory, max_shard_size="40KB")
    return model


def outputs(model):
    tokens = torch.tensor(np.random.default_rng(0).integers(1, 150, (2, 12)))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(
    ("head", "dtype", "layout"),
    [("lm", torch.float32, TRAIN), ("scalar", torch.bfloat16, GENERATE)],
    ids=["lm", "scalar"],
)
@pytest.mark.parametrize("name", SAVED)
def test_there_and_back(tmp_path, name, head, dtype, layout):
    model = saved(tmp_path / "theirs", name, head, dtype)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    hf, params = load_hf(tmp_path / "theirs", mesh, layout=layout, head=head, dtype=None)
    assert (hf.family, hf.head, hf.dtype, hf.pad_id) == (name.split()[0], head, str(dtype).split(".")[1], 0)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} <= {jnp.dtype(hf.dtype), jnp.dtype(jnp.float32)}

    export_hf(params, hf.model, tmp_path / "ours", family=hf.family, eos_ids=hf.eos_ids, pad_id=0, shard_bytes=40_000)
    # Read back too: casting a model rounds its rotary frequencies, reading one does not.
    model, again = (type(model).from_pretrained(tmp_path / name, dtype=dtype).eval() for name in ("theirs", "ours"))
    described = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert described["architectures"] == [type(model).__name__] == [type(again).__name__]
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    for key, weight in theirs.items():
        assert torch.equal(weight, ours[key]), key
    assert torch.equal(outputs(model), outputs(again))


def test_a_plain_auto_class_finds_the_export(tmp_path, configs, reference):
    for name in ("mistral", "gemma3_text"):
        for head, auto in (
            ("lm", transformers.AutoModelForCausalLM),
            ("scalar", transformers.AutoModelForSequenceClassification),
        ):
            params = reference.random_params(configs[name], head)
            if head == "scalar":
                params["value_head"]["bias"] = np.zeros((), np.float32)
            directory = export_hf(params, configs[name], tmp_path / f"{name}-{head}", pad_id=0)
            described = json.loads((directory / "config.json").read_text())
            assert type(auto.from_pretrained(directory)).__name__ == described["architectures"][0]
