"""What transformers and PEFT read and write of a pretrained model: exports, adapters, and adapters that are merged."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.data.batches import put_rows
from jrlhf.meshes import GENERATE
from jrlhf.models import LoRAConfig, export_hf, init_lora, lora_shardings, merge, to_int8
from jrlhf.models.hf import export_adapter, load_adapter, load_hf
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Architecture, Compute
from tests.real.conftest import CHATS, Peer, logits_of, mesh_of

pytestmark = [
    pytest.mark.proof("real"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
LORA = LoRAConfig(rank=8, alpha=24.0)
CHANGED = 0.5  # nats by which an adapter changes some log-probability


def bits(tensor: Any) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_the_same_model_to_transformers(peer, tmp_path, dtype):
    """Every bit of every weight, so the same logits; the same prompts, ends and greedy answers; tied embeddings."""
    import torch
    import transformers

    read, params = load_hf(peer.directory, mesh_of(fsdp=2, tensor=3))
    ends: dict[str, Any] = {"eos_ids": read.eos_ids, "pad_id": read.pad_id, "bos_id": read.bos_id}
    out = export_hf(params, read.model, tmp_path / "out", dtype=dtype, tokenizer_dir=peer.directory, **ends)
    theirs, ours = (peer.load(path, dtype=getattr(torch, dtype)) for path in (peer.directory, out))
    assert ours.config.tie_word_embeddings and ours.dtype == getattr(torch, dtype)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        assert bits(weight) == bits(ours.state_dict()[name]), name
    tokens = peer.rows()
    np.testing.assert_array_equal(logits_of(ours, tokens), logits_of(theirs, tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for messages in CHATS:
        ids = tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False)
        assert ids == peer.chat(messages)
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id == tokenizer.eos_token_id
    asked = torch.tensor([peer.chat(CHATS[0])])
    answers = [model.generate(asked, do_sample=False, max_new_tokens=32).tolist() for model in (ours, theirs)]
    assert answers[0] == answers[1] and answers[0][0][-1] == tokenizer.eos_token_id


def by_adapter(peer: Peer, tokens: np.ndarray, adapter: Any, lora: LoRAConfig, int8: bool = False) -> np.ndarray:
    """Log-probabilities [B, T - 1] by an adapter that is not merged, on three devices that share the heads."""
    mesh = mesh_of(tensor=3)
    read, base = load_hf(peer.directory, mesh, layout=GENERATE)
    score = CompiledModel(Architecture(read.model, lora, shared=True), mesh, Compute()).score_logprobs(temperature=1.0)
    with jax.set_mesh(mesh):
        placed = put_rows((tokens, np.full(len(tokens), tokens.shape[1], np.int32)), mesh)
        adapter = jax.device_put(adapter, lora_shardings(read.model, mesh, lora))
        return np.asarray(score(adapter, *placed, to_int8(base) if int8 else base)[0])[:, 1:]


def merged(peer: Peer, adapter: Any, lora: LoRAConfig, out: Path, **options: Any) -> Any:
    """The merged model as transformers reads it."""
    read, base = load_hf(peer.directory, mesh_of(tensor=3), layout=GENERATE)
    base = to_int8(base) if options.pop("int8", False) else base
    with jax.set_mesh(mesh_of(tensor=3)):
        placed = jax.device_put(adapter, lora_shardings(read.model, mesh_of(tensor=3), lora))
    export_hf(base, read.model, out, adapter=placed, lora=lora, **options)
    whole = merge(base, placed, lora)
    again = export_hf(whole, read.model, out.with_name("again"), dtype=options.get("dtype"))
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    return peer.load(out)


def test_an_adapter_of_peft_computes_and_merges_as_in_peft(peer, tmp_path):
    """Random numbers in all seven projections; unmerged, merged in float32, and merged and rounded to bfloat16."""
    import peft
    import torch

    tokens = np.resize(peer.rows(), (6, 96))
    modules: Any = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    config = peft.LoraConfig(r=8, lora_alpha=24, target_modules=modules, task_type="CAUSAL_LM")
    model, generator = peft.get_peft_model(peer.load(), config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.03 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    expected = peer.chosen(tokens, model.eval().base_model.model)
    assert np.abs(expected - peer.chosen(tokens)).max() > CHANGED
    lora, adapter = load_adapter(tmp_path / "adapter", load_hf(peer.directory, mesh_of())[0].model, mesh_of())
    adapter = jax.device_get(adapter)
    assert lora == LORA
    np.testing.assert_allclose(by_adapter(peer, tokens, adapter, lora), expected, atol=3e-4)
    theirs = model.merge_and_unload()
    ours = merged(peer, adapter, lora, tmp_path / "merged")
    for (name, mine), (same, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == same
        np.testing.assert_allclose(mine.detach().numpy(), other.detach().numpy(), atol=2e-6, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(peer.chosen(tokens, ours), expected, atol=3e-4)
    half = merged(peer, adapter, lora, tmp_path / "half", dtype=jnp.bfloat16)
    for mine, exact in zip(half.parameters(), ours.parameters(), strict=True):  # rounded once
        assert bits(mine.detach()) == bits(exact.detach().bfloat16().float())


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_our_adapter_is_read_by_peft(peer, tmp_path, int8):
    """On the weights as they are, and on an int8 base, whose matrices transformers then gets rounded."""
    import peft

    tokens = np.resize(peer.rows(), (6, 96))
    config = load_hf(peer.directory, mesh_of())[0].model
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_lora(config, LORA, key), jax.random.key(0))
    adapter = jax.tree.map(lambda leaf: 0.03 * draw.normal(size=leaf.shape).astype(np.float32), shapes)
    export_adapter(adapter, config, LORA, tmp_path / "adapter", base_name=str(peer.directory))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (8, 24.0)
    base = peer.load()
    if int8:
        read, params = load_hf(peer.directory, mesh_of(), layout=GENERATE)
        base = peer.rounded(to_int8(params), read.model, tmp_path / "rounded")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = peer.chosen(tokens, model.base_model.model)
    assert np.abs(expected - peer.chosen(tokens)).max() > CHANGED
    np.testing.assert_allclose(by_adapter(peer, tokens, adapter, LORA, int8), expected, atol=3e-4)
    whole = merged(peer, adapter, LORA, tmp_path / "merged", int8=int8)
    np.testing.assert_allclose(peer.chosen(tokens, whole), expected, atol=3e-4)
