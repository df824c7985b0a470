"""Adapters in PEFT's format: logits and scores as PEFT computes them, files both ways, and what is refused.

adapters.json holds what peft 0.21, transformers 5.23 and torch 2.13 computed on a CPU for the directories that
`written` makes, and the settings that PEFT saves. It is written anew, where these are installed, with

    JRLHF_WRITE_ADAPTERS=1 python -m pytest tests/models/hf/test_adapters.py
"""

import json
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import (
    LoRAConfig,
    ModelConfig,
    init_lm,
    init_lora,
    lora_shardings,
    make_logprobs,
    make_scores,
    param_shardings,
)
from jrlhf.models.hf import export_adapter, export_hf, load_adapter
from tests.models.shared import fast_jit, unstacked

GOLDEN = Path(__file__).with_name("adapters.json")
CONFIG = ModelConfig(
    vocab_size=97, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64, qk_norm=True
)
LORA = {
    "lm": LoRAConfig(rank=3, alpha=6.0),
    "scalar": LoRAConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "up_proj", "down_proj"), rslora=True),
}
B, T = 8, 10


def drawn(init, seed) -> Any:
    """Numbers for a tree, from its order and the seed only."""
    generator = np.random.default_rng(seed)
    shapes = jax.eval_shape(init, jax.random.key(0))

    def values(path, leaf):
        x = generator.normal(size=leaf.shape).astype(np.float32)
        return 1 + 0.2 * x if path[-1].key == "scale" else 0.25 * x

    return jax.tree_util.tree_map_with_path(values, shapes)


def base() -> Any:
    params = drawn(partial(init_lm, CONFIG), 0)
    params["embedding"][CONFIG.vocab_size :] = 0
    return params


def adapter_of(head) -> Any:
    adapter = drawn(lambda key: init_lora(CONFIG, LORA[head], key, head), 1)
    if head == "scalar":
        adapter["value_head"]["bias"] = np.zeros_like(adapter["value_head"]["bias"])  # PEFT has none
    return adapter


def batch():
    generator = np.random.default_rng(2)
    lengths = np.array([T, 3, 9, 5, 7, 2, T, 8], np.int32)
    tokens = generator.integers(1, CONFIG.vocab_size, (B, T)).astype(np.int32)
    return np.where(np.arange(T)[None, :] < lengths[:, None], tokens, 0), lengths


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{"base", "lm", "scalar"} -> the directory of the base and of its two adapters."""
    place = tmp_path_factory.mktemp("adapters")
    export_hf(base(), CONFIG, place / "base", eos_ids=[1], pad_id=0)
    for head in ("lm", "scalar"):
        export_adapter(adapter_of(head), CONFIG, LORA[head], place / head, base_name=str(place / "base"))
    return place


def ours(head, directory):
    """What the adapter in `directory` computes on the base: log-probabilities, or scores."""
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    tokens, lengths = batch()
    with jax.set_mesh(mesh):
        lora, adapter = load_adapter(directory, CONFIG, mesh)
        frozen = jax.device_put(unstacked(base()), param_shardings(CONFIG, mesh, GENERATE))
        if head == "lm":
            function = fast_jit(make_logprobs(CONFIG, mesh, GENERATE, lora=lora))
            return np.asarray(function(adapter, tokens, frozen)[0])
        return np.asarray(fast_jit(make_scores(CONFIG, mesh, GENERATE, lora=lora))(adapter, tokens, lengths, frozen))


def theirs(head, written):
    """The same by PEFT, and the PEFT model."""
    torch = pytest.importorskip("torch", reason="compares with peft itself, which needs torch")
    transformers = pytest.importorskip("transformers", reason="compares with peft itself, which needs transformers")
    peft = pytest.importorskip("peft", reason="compares with peft itself")
    tokens, lengths = batch()
    inputs = torch.tensor(tokens), torch.tensor(np.arange(T)[None, :] < lengths[:, None])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if head == "lm":
            model = transformers.AutoModelForCausalLM.from_pretrained(written / "base", dtype=torch.float32)
        else:
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                written / "base", num_labels=1, pad_token_id=0, dtype=torch.float32
            )
        model = peft.PeftModel.from_pretrained(model, written / head).eval()
        logits = model(input_ids=inputs[0], attention_mask=inputs[1].long()).logits
    if head == "scalar":
        return logits[:, 0].numpy(), model
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, inputs[0][:, 1:, None].long())[..., 0]
    return np.pad(chosen.numpy(), ((0, 0), (1, 0))), model


def compare(actual, expected):
    if actual.ndim == 2:  # what follows a row's end means nothing
        real = np.arange(T)[None, :] < batch()[1][:, None]
        actual, expected = actual[real], expected[real]
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_an_adapter_computes_what_peft_computed(written, head):
    compare(ours(head, written / head), np.array(json.loads(GOLDEN.read_text())[head], np.float32))


@pytest.mark.proof("families")
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_peft_reads_what_we_write_and_we_read_what_peft_writes(written, head, tmp_path):
    expected, model = theirs(head, written)
    compare(ours(head, written / head), expected)
    model.save_pretrained(tmp_path)
    if os.environ.get("JRLHF_WRITE_ADAPTERS"):
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        golden[head] = np.round(expected.astype(float), 5).tolist()
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        golden[f"{head} settings"] = settings | {"base_model_name_or_path": "example/base"}
        GOLDEN.write_text(json.dumps(golden, sort_keys=True) + "\n")
    mine, same = (
        load_file(written / head / "adapter_model.safetensors"),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    assert mine.keys() == same.keys()
    for name, tensor in mine.items():
        np.testing.assert_array_equal(tensor, same[name])
    lora, adapter = load_adapter(tmp_path, CONFIG, make_mesh(1, 2, 2, devices=jax.devices()[:4]))
    assert lora == LORA[head]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(adapter), adapter_of(head))


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_files_go_round_bit_for_bit(written, head, tmp_path):
    """From a mesh, on which PEFT's own settings are read too; also a head's bias, which PEFT has not."""
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    adapter = adapter_of(head)
    if head == "scalar":
        adapter["value_head"]["bias"] = np.float32(0.75) * np.ones_like(adapter["value_head"]["bias"])
    with jax.set_mesh(mesh):
        placed = jax.device_put(adapter, lora_shardings(CONFIG, mesh, LORA[head], head))
    export_adapter(placed, CONFIG, LORA[head], tmp_path / "out", card={"README.md": b"Trained by jrlhf"})
    assert (tmp_path / "out" / "README.md").read_bytes() == b"Trained by jrlhf"
    export_adapter(placed, CONFIG, LORA[head], tmp_path / "out")  # in the place of the first
    assert not (tmp_path / "out" / "README.md").exists()
    settings = json.loads(GOLDEN.read_text())[f"{head} settings"]
    for theirs in (False, True):
        if theirs:
            (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(settings))
        lora, read = load_adapter(tmp_path / "out", CONFIG, mesh)
        assert lora == LORA[head]
        for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(placed), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.sharding == y.sharding and x.dtype == jnp.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def change(directory, target, settings=(), tensors=()):
    """A copy of an adapter with some settings and tensors changed; None takes one away."""
    target.mkdir()
    config = json.loads((directory / "adapter_config.json").read_text()) | dict(settings)
    (target / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    stored = load_file(directory / "adapter_model.safetensors") | dict(tensors)
    save_file({k: v for k, v in stored.items() if v is not None}, target / "adapter_model.safetensors")
    return target


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


def test_what_we_do_not_compute_is_refused_by_name(written, tmp_path):
    cases: Any = (
        ({"peft_type": "LOHA"}, {}, "peft_type='LOHA' is not supported: only LORA is"),
        ({"task_type": "SEQ_2_SEQ_LM"}, {}, "task_type='SEQ_2_SEQ_LM' is not supported: known are CAUSAL_LM, SEQ_CLS"),
        ({"use_dora": True}, {}, "use_dora=True is not supported"),
        ({"bias": "all"}, {}, "bias='all' is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, {}, "rank_pattern={'q_proj': 8} is not supported"),
        ({"layers_to_transform": [0]}, {}, "layers.1.mlp.down_proj.lora_A.weight is no part of an adapter that can"),
        ({"layers_to_transform": {"a": 1}, "layers_pattern": 3}, {}, "layers_pattern=3 do not say which modules"),
        ({"target_modules": "(q_proj"}, {}, r"target_modules='\(q_proj' do not say which modules are adapted"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"modules_to_save": 5}, {}, "modules_to_save=5 is not supported"),
        ({"modules_to_save": [["score"]]}, {}, r"modules_to_save=\[\['score'\]\] is not supported"),
        ({"use_rslora": "no"}, {}, "use_rslora='no' must be true or false"),
        ({"lora_alpha": 10**400}, {}, "lora alpha=1.* must be positive and finite"),
        ({}, {"x.lora_A": np.zeros(3, np.float32)}, "an adapter of x cannot be loaded"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa' is not supported: it changes the base"),
        ({"something_new": 0.0}, {}, "something_new=0.0 is not supported"),
        ({"r": "8"}, {}, "r='8' and lora_alpha=6.0 must be numbers"),
        ({"r": 5}, {}, r"lora_A.weight has shape \[3, 32\] where this model needs \[5, 32\]"),
        ({"target_modules": ["q_proj", "lm_head"]}, {}, "an adapter of lm_head cannot be loaded"),
        ({}, {A: None}, f"tensor {A} is missing: the adapter is not whole"),
        ({}, {A: np.zeros((3, 32), np.int32)}, f"{A} is I32: known are F32, BF16, F16"),
        ({}, {"base_model.model.lm_head.weight": np.zeros(3, np.float32)}, "lm_head.weight is no part of an adapter"),
    )
    for number, (settings, tensors, message) in enumerate(cases):
        directory = change(written / "lm", tmp_path / str(number), settings, tensors)
        with pytest.raises(ValueError, match=message):
            load_adapter(directory, CONFIG, make_mesh(devices=jax.devices()[:1]))


def test_target_patterns_and_missing_task_types_are_read(written, tmp_path):
    """The file tells what is adapted, where the settings hold a pattern; dropout is training's business."""
    changes = {"target_modules": ".*_proj", "task_type": None, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    changes["exclude_modules"] = ["lm_head"]
    lora, _ = load_adapter(
        change(written / "lm", tmp_path / "changed", changes), CONFIG, make_mesh(devices=jax.devices()[:1])
    )
    assert lora == LORA["lm"]


SOME: list[tuple[dict[str, Any], str]] = [  # settings, and a pattern of the modules that they leave out
    ({"layers_to_transform": [1]}, r"layers\.0\."),
    ({"layers_to_transform": 0, "layers_pattern": "layers"}, r"layers\.1\."),
    ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, r"layers\.0\."),
    ({"target_modules": r".*layers\.0\..*_proj"}, r"layers\.1\."),
    ({"target_modules": r".*(layers\.0\.self_attn.*|layers\.1\.mlp.*)"}, r"layers\.(0\.mlp|1\.self_attn)"),
    ({"target_modules": ["model.layers.1.mlp.up_proj", "q_proj"]}, r"^(?!.*(layers\.1\.mlp\.up_proj|q_proj))"),
    ({"exclude_modules": ["model.layers.0.self_attn.q_proj", "down_proj"]}, r"layers\.0\.self_attn\.q_proj|down_proj"),
    ({"exclude_modules": r".*layers\.1.*"}, r"layers\.1\."),
]


@pytest.mark.parametrize(("settings", "left_out"), SOME)
def test_an_adapter_of_some_layers_has_zeros_in_the_others(written, tmp_path, settings, left_out):
    whole = load_file(written / "lm" / "adapter_model.safetensors")
    gone = {name for name in whole if re.search(left_out, name)}
    directory = change(written / "lm", tmp_path / "some", settings, dict.fromkeys(gone))
    mesh = make_mesh(devices=jax.devices()[:1])
    lora, adapter = load_adapter(directory, CONFIG, mesh)
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in whole.keys() - gone}
    assert 0 < len(gone) < len(whole) and set(lora.targets) == targets
    rounded = export_adapter(jax.device_get(adapter), CONFIG, lora, tmp_path / "again")
    again = load_file(rounded / "adapter_model.safetensors")
    for name, tensor in again.items():
        np.testing.assert_array_equal(tensor, np.zeros_like(tensor) if name in gone else whole[name])

    tensor_name = min(whole.keys() - gone)
    change(directory, tmp_path / "half", {}, {tensor_name: None})
    with pytest.raises(ValueError, match=f"{tensor_name} is missing: the adapter is not whole"):
        load_adapter(tmp_path / "half", CONFIG, mesh)


@pytest.mark.parametrize(("settings", "left_out"), SOME)
def test_the_layers_left_out_are_those_that_peft_leaves_out(written, settings, left_out):
    peft = pytest.importorskip("peft", reason="compares with peft itself")
    from peft.tuners.tuners_utils import check_target_module_exists

    named = json.loads((written / "lm" / "adapter_config.json").read_text()) | settings
    keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    config = peft.LoraConfig(**{key: named[key] for key in keys if key in named})
    for name in load_file(written / "lm" / "adapter_model.safetensors"):
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        assert bool(check_target_module_exists(config, module)) == (re.search(left_out, name) is None), name


def test_half_adapters_are_refused(written, tmp_path):
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(FileNotFoundError, match="an adapter is a directory with adapter_config.json"):
        load_adapter(tmp_path, CONFIG, mesh)
    directory = change(written / "scalar", tmp_path / "a", {}, {"base_model.model.score.weight": None})
    with pytest.raises(ValueError, match="score.weight is missing"):
        load_adapter(directory, CONFIG, mesh)
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is cut short"):
        load_adapter(directory, CONFIG, mesh)
    weights.rename(directory / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="adapter_model.bin is a pickle"):
        load_adapter(directory, CONFIG, mesh)
    (directory / "adapter_config.json").write_text('{"peft_type": ')
    with pytest.raises(ValueError, match="is not JSON"):
        load_adapter(directory, CONFIG, mesh)


def test_only_an_adapters_own_files_are_replaced(written, tmp_path):
    export_adapter(adapter_of("lm"), CONFIG, LORA["lm"], tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match="holds 'README.md', which an export does not write and would delete"):
        export_adapter(adapter_of("lm"), CONFIG, LORA["lm"], tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
