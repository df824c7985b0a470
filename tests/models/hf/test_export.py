"""The exported directory: names, shapes and bits; all or nothing."""

import gc
import json
import random
import re
import signal
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.meshes import GENERATE, TRAIN, make_mesh, reshard
from jrlhf.models import LoRAConfig, ModelConfig, export_hf, init_lora, lora_shardings, merge, param_shardings, to_int8
from jrlhf.models.hf import directories, drawn_with, export, hf_config, read_config
from jrlhf.models.hf.config import _GENERATION
from jrlhf.models.hf.directories import TEMPLATES
from tests.support.live import live_bytes

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


def test_weights_on_a_mesh_in_any_storage(reference, tmp_path):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    stacked = jax.device_put(reference.random_params(QWEN2), param_shardings(QWEN2, mesh, TRAIN))
    listed = reshard(stacked, param_shardings(QWEN2, mesh, GENERATE), dtype=jnp.bfloat16)
    half = [
        export_hf(stacked, QWEN2, tmp_path / "cast", dtype=jnp.bfloat16),
        export_hf(jax.device_get(stacked), QWEN2, tmp_path / "host", dtype=jnp.bfloat16),
        export_hf(listed, QWEN2, tmp_path / "listed", dtype=jnp.bfloat16),
    ]
    assert len({(directory / "model.safetensors").read_bytes() for directory in half}) == 1
    assert json.loads((half[0] / "config.json").read_text())["torch_dtype"] == "bfloat16"

    # As they are: generation's copy has norm scales in float32 beside matrices in bfloat16.
    path = export_hf(listed, QWEN2, tmp_path / "mixed") / "model.safetensors"
    weights = load_file(path)
    np.testing.assert_array_equal(weights["model.norm.weight"], stacked["final_norm"]["scale"])
    assert weights["model.norm.weight"].dtype == np.float32
    up = listed["layers"][1]["mlp"]["up"]
    np.testing.assert_array_equal(weights["model.layers.1.mlp.up_proj.weight"], np.asarray(up).T)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":  # torch reads no tensor that is not aligned
            assert (8 + length + entry["data_offsets"][0]) % weights[name].itemsize == 0


def test_tokenizer_files_are_copied_as_they_are(reference, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "model.safetensors"):
        (source / name).write_bytes(name.encode() + b"\r\n\xff")
    template = source / TEMPLATES / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    directory = export_hf(reference.random_params(LLAMA), LLAMA, tmp_path / "model", tokenizer_dir=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        assert (directory / name).read_bytes() == (source / name).read_bytes()
    assert len(list(directory.iterdir())) == 8
    # A model may be exported over the one that it came with.
    again = export_hf(reference.random_params(QWEN2), QWEN2, directory, tokenizer_dir=directory)
    assert len(list(again.iterdir())) == 8
    assert (again / TEMPLATES / "tool_use.jinja").read_text() == "{{ tools }}"
    (again / TEMPLATES / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="additional_chat_templates/mine.txt', which an export does not write"):
        export_hf(reference.random_params(QWEN2), QWEN2, directory, tokenizer_dir=source)
    assert (again / "merges.txt").read_bytes() == (source / "merges.txt").read_bytes()


def test_a_reward_model_is_a_classifier_with_one_label(reference, tmp_path):
    params = reference.random_params(LLAMA, "scalar")
    directory = export_hf(params, LLAMA, tmp_path / "model", pad_id=0, eos_ids=(3,))
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] == 0
    assert (config["num_labels"], config["id2label"]) == (1, {"0": "LABEL_0"})
    assert not (directory / "generation_config.json").exists()
    weights = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in weights
    np.testing.assert_array_equal(weights["score.weight"], params["value_head"]["kernel"][None])
    np.testing.assert_array_equal(weights["score.bias"], params["value_head"]["bias"][None])


def test_the_settings_of_generation_go_round(reference, tmp_path):
    """All but the ids, which are those of the export, and what names their writer."""
    params = reference.random_params(LLAMA)
    settings = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    source = export_hf(params, LLAMA, tmp_path / "source", eos_ids=(3,))
    assert json.loads((source / "generation_config.json").read_text())["do_sample"] is True
    more = {"eos_token_id": [7, 8], "transformers_version": "4.42.3", "_from_model_config": True}
    (source / "generation_config.json").write_text(json.dumps(settings | more))
    read = read_config(source)
    assert read.eos_ids == (7, 8)
    out = export_hf(params, LLAMA, tmp_path / "out", eos_ids=(5,), pad_id=0, generation=read.generation)
    written = json.loads((out / "generation_config.json").read_text())
    assert written == settings | {"eos_token_id": 5, "pad_token_id": 0, "bos_token_id": None}


def test_written_settings_of_sampling_are_read_by_us_and_by_transformers_as_they_were(tmp_path, reference):
    """Random ones, over those of a model that would change what is drawn."""
    peer = pytest.importorskip("transformers", reason="the peer is transformers").GenerationConfig
    base = {"do_sample": False, "repetition_penalty": 1.05, "num_beams": 4, "top_k": 20, "use_cache": False}
    out = export_hf(reference.random_params(LLAMA), LLAMA, tmp_path, eos_ids=(3,))
    draw, own = random.Random(0), json.loads((out / "generation_config.json").read_text())
    for _ in range(50):
        some = {"temperature": draw.uniform(0.1, 2), "top_k": draw.choice([None, 1, 50]), "max_new_tokens": 8}
        some |= {"top_p": draw.choice([None, 0.5]), "min_new_tokens": draw.randint(0, 8)}
        some |= {"min_p": draw.choice([None, 0.1])}
        written = drawn_with(base, some)
        (out / "generation_config.json").write_text(json.dumps(own | written))
        read = read_config(out)
        assert {"top_k": None, "top_p": None, "min_p": None, **read.sampling} == some
        theirs = peer.from_pretrained(out)
        theirs.validate()
        assert theirs.do_sample and (theirs.top_k or None, theirs.top_p) == (some["top_k"], some["top_p"] or 1.0)
        for name in ("temperature", "min_p", "max_new_tokens", "min_new_tokens"):
            assert getattr(theirs, name) == some[name]
        assert theirs.repetition_penalty in (None, 1.0) and theirs.num_beams in (None, 1) and not theirs.use_cache


@pytest.mark.parametrize("seed", range(3))
def test_settings_of_generation_in_an_older_config_are_those_that_transformers_finds(seed, reference, tmp_path):
    """Random ones, also next to a generation_config.json, which then counts alone."""
    peer = pytest.importorskip("transformers", reason="the peer is transformers").GenerationConfig
    draw, params = random.Random(seed), reference.random_params(LLAMA)
    source = export_hf(params, LLAMA, tmp_path / "source", eos_ids=(3,))
    if seed:
        (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config |= {"do_sample": draw.random() < 0.5, "use_cache": True, "output_attentions": False, "top_h": None}
    for name in ("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"):
        config |= {name: round(draw.uniform(0.1, 0.9), 3)} if draw.random() < 0.7 else {}
    for name in ("max_length", "min_length", "top_k", "num_beams", "no_repeat_ngram_size", "num_return_sequences"):
        config |= {name: draw.randint(2, 9)} if draw.random() < 0.7 else {}
    (source / "config.json").write_text(json.dumps(config | {"suppress_tokens": [4], "bad_words_ids": [[1, 2]]}))
    out = export_hf(params, LLAMA, tmp_path / "out", eos_ids=(3,), generation=read_config(source).generation)
    file = "config.json" if seed else "generation_config.json"
    theirs = peer.from_pretrained(source, config_file_name=file, _from_model_config=bool(seed)).to_dict()
    ours = peer.from_pretrained(out).to_dict()
    ours |= {name: theirs[name] for name in ("_from_model_config", "use_cache", "output_attentions")}
    assert ours == theirs


def test_every_setting_of_transformers_that_chooses_tokens_is_known():
    """Those that it has in addition choose no token: outputs, caches, speed of the same tokens, ids and metadata."""
    peer = pytest.importorskip("transformers", reason="the peer is transformers").GenerationConfig()
    others = r"(use|output|return|cache|compile|disable|low|prefill|is|max_cache|prompt_lookup|assistant|num_assistant|"
    others += r"target|max_matching|speculation|continuous|watermarking|decoder_start|bos|eos|pad|_|transformers)_?.*"
    assert {name for name in peer.to_dict() if not re.fullmatch(others, name)} <= set(_GENERATION)


def test_an_export_is_all_or_nothing(reference, tmp_path, monkeypatch):
    params = reference.random_params(LLAMA)
    directory = export_hf(params, LLAMA, tmp_path / "model", eos_ids=(3,))
    before = (directory / "config.json").read_text()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_tensors", fail)
        with pytest.raises(OSError, match="disk full"):
            export_hf(params, LLAMA, directory, eos_ids=(4,))
    assert (directory / "config.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    export_hf(params, LLAMA, directory, eos_ids=(4, 5))
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


KILLED = """
import os, signal, sys
from pathlib import Path
from jrlhf.models.hf import directories

directory, moment, remaining = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def killed(*_, **__):
    global remaining
    remaining -= 1
    if remaining < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return method(*_, **__)

owner = directories.shutil if moment == "rmtree" else directories.Path if moment == "rename" else directories
method = getattr(owner, moment)
setattr(owner, moment, killed)
with directories._replacing(directory) as folder:
    (folder / "config.json").write_text("second")
"""


@pytest.mark.parametrize(
    ("moment", "before", "whole"),
    [
        pytest.param("_sync", 0, "first", id="written"),
        pytest.param("rename", 0, "first", id="before the renames"),
        pytest.param("rename", 1, "first", id="between the renames"),
        pytest.param("rmtree", 0, "second", id="after the renames"),
    ],
)
def test_the_next_export_heals_one_that_was_killed(tmp_path, moment, before, whole):
    model, others = tmp_path / "model", [".model-mine", ".model-base-abcd1234.partial"]
    for other in others:
        (tmp_path / other / "previous").mkdir(parents=True)
    with directories._replacing(model) as folder:
        (folder / "config.json").write_text("first")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(model), moment, str(before)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".model-*.partial"))) == 2
    with directories._replacing(model) as folder:
        assert (model / "config.json").read_text() == whole
        with directories._replacing(model) as later:  # at the same time: its folder is left alone
            (later / "config.json").write_text("later")
        (folder / "config.json").write_text("last")
    assert (model / "config.json").read_text() == "last"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "model"])


def test_what_cannot_be_exported_is_refused(reference, tmp_path):
    params = reference.random_params(LLAMA)
    with pytest.raises(ValueError, match="softcap=30.0 cannot be exported"):
        export_hf(params, ModelConfig(**{**vars(LLAMA), "softcap": 30.0}), tmp_path / "model")
    with pytest.raises(ValueError, match="model.norm.weight is int32: export float32, bfloat16 or float16"):
        export_hf({**params, "final_norm": {"scale": np.ones(32, np.int32)}}, LLAMA, tmp_path / "model")
    with pytest.raises(ValueError, match="model.embed_tokens.weight is float64: export float32"):
        export_hf(params, LLAMA, tmp_path / "model", dtype=np.float64)
    with pytest.raises(ValueError, match="tokenizer_json or tokenizer_dir, not both"):
        export_hf(params, LLAMA, tmp_path / "model", tokenizer_json=TOKENIZER, tokenizer_dir=tmp_path)
    with pytest.raises(ValueError, match="holds no tokenizer: none of tokenizer.json,"):
        export_hf(params, LLAMA, tmp_path / "model", tokenizer_dir=tmp_path)
    with pytest.raises(ValueError, match="eos id 200 is outside the vocabulary of 200 tokens"):
        export_hf(params, LLAMA, tmp_path / "model", eos_ids=(1, 200))
    with pytest.raises(ValueError, match="both adapter and lora, or neither"):
        export_hf(params, LLAMA, tmp_path / "model", lora=LoRAConfig(rank=2, alpha=2.0))
    with pytest.raises(ValueError, match="int8 weights cannot be exported: give the adapter .* or dequantise"):
        export_hf(jax.eval_shape(to_int8, params), LLAMA, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_only_an_exports_own_files_are_replaced(reference, tmp_path):
    params = reference.random_params(LLAMA)
    write = partial(export_hf, params, LLAMA, tokenizer_json=TOKENIZER)
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    for shard_bytes in (30_000, 10**9, 30_000):  # of one kind over the other
        card = {"README.md": b"Trained by jrlhf, %d" % shard_bytes, "progress.png": b"\x89"}
        assert write(link, shard_bytes=shard_bytes, card=card) == link
        assert all((real / name).read_bytes() == content for name, content in card.items())
        assert link.is_symlink() and (real / "tokenizer.json").exists()
        assert (real / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    before = sorted(real.iterdir())

    def refused(name):
        with pytest.raises(FileExistsError, match=f"real holds '{name}', which .* delete: move it away"):
            write(real)

    (real / "mine.txt").write_text("dear diary")
    refused("mine.txt")
    assert (real / "mine.txt").read_text() == "dear diary"
    (real / "mine.txt").unlink()
    (real / "merges.txt").mkdir()
    refused("merges.txt")
    (real / "merges.txt").rmdir()
    (real / "vocab.json").symlink_to(tmp_path / "elsewhere")
    refused("vocab.json")
    (real / "vocab.json").unlink()
    with pytest.raises(FileExistsError, match="config.json is a file: choose another directory"):
        write(real / "config.json")
    assert sorted(real.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("storage", ["stacked", pytest.param("int8", marks=pytest.mark.full)])
def test_an_adapter_is_merged_layer_by_layer(reference, tmp_path, storage):
    """The files of `merge`'s weights, while no layer's merged weights outlive it."""
    config, lora = ModelConfig(**{**vars(LLAMA), "layers": 5}), LoRAConfig(rank=2, alpha=6.0)
    mesh = make_mesh(1, 1, 2, devices=jax.devices()[:2])
    host = reference.random_params(config)
    with jax.set_mesh(mesh):
        base = jax.device_put(host, param_shardings(config, mesh, TRAIN))
        if storage != "stacked":
            base = reshard(base, param_shardings(config, mesh, GENERATE))
        shapes = jax.eval_shape(lambda key: init_lora(config, lora, key, "scalar"), jax.random.key(0))
        adapter = jax.tree.map(lambda x: np.linspace(0, 0.1, x.size, dtype=x.dtype).reshape(x.shape), shapes)
        adapter = jax.device_put(adapter, lora_shardings(config, mesh, lora, "scalar"))
        base = to_int8(base) if storage == "int8" else base
        merged = merge(base, adapter, lora)
        whole = export_hf(merged, config, tmp_path / "whole")
        del merged
        gc.collect()
        before, most = sum(live_bytes().values()), 0
        original = export.on_host

        def watched(array, dtype=None):
            nonlocal most
            most = max(most, sum(live_bytes().values()))
            return original(array, dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export, "on_host", watched)
            parts = export_hf(base, config, tmp_path / "parts", adapter=adapter, lora=lora)
    for file in whole.iterdir():
        assert (parts / file.name).read_bytes() == file.read_bytes()
    layer = sum(x.nbytes for x in jax.tree.leaves(host["layers"])) / config.layers
    assert before + 0.9 * layer < most < before + 3.1 * layer  # taken from the stack, merged, and the last one's
