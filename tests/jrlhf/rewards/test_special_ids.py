"""Rules of transformers that depend on special ids, for each role and each pad: none, another token, end-of-text, a
token of the text. The peer reads each row alone, without padding.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.config.parse import build
from jrlhf.config.schema import Config, RewardConfig
from jrlhf.data.batches import put_rows
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.data.types import Example, Response
from jrlhf.meshes import make_mesh
from jrlhf.models import LoRAConfig, ModelConfig, init_lora
from jrlhf.models.hf import export_adapter, load_hf, read_config
from jrlhf.ppo import Rollout
from jrlhf.rewards.of_config import open_rewards
from jrlhf.rewards.text_model import TextReward
from jrlhf.rewards.types import Sample
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.console import Console
from jrlhf.stages import finalize

torch = pytest.importorskip("torch", reason="the peer of these tests is torch: pip install 'jrlhf[dev]'")
transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install 'jrlhf[dev]'")

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the peer's own
]

MESH, T = make_mesh(1, 1, 1, devices=jax.devices()[:1]), 12
GEMMA = {"activation": "gelu_tanh", "norm_offset": True, "post_norms": True, "embed_scale": 4.0}
GPT_2 = {"norm": "layer", "positions": "learned", "gated_mlp": False, "activation": "gelu_tanh", "heads": 2}
GPT_2 |= {"kv_heads": 2, "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_embeddings": True}
FAMILIES = {
    "llama": ("llama", {"tie_embeddings": False}),
    "qwen2": ("qwen", {"qkv_bias": True}),
    "gemma2": ("gemma", GEMMA),
    "gpt2": ("qwen", GPT_2),
}
PADS = "none", "other", "eos", "text"


def pad_of(pad: str, eos: int) -> int | None:
    return {"none": None, "other": 7, "eos": eos, "text": 20}[pad]


def set_pad(directory: Path, pad: int | None) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": pad}))
    return directory


def rows(eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that end with each of the special ids, once or more often, or hold nothing else."""
    draw, texts = np.random.default_rng(0), []
    for token in (7, eos, 20, 9):
        text = draw.integers(30, 60, 6).tolist()
        texts += [[*text, token], [*text[:2], token, token, *text[:1], token, eos], [token, token, token]]
    lengths = np.array([len(text) for text in texts], np.int32)
    return np.array([text + [7] * (T - len(text)) for text in texts], np.int32), lengths


def score(config: ModelConfig, pad_id: int | None) -> Any:
    return CompiledModel(Architecture(config, pad_id=pad_id), MESH, Compute()).score_sequences()


def load_unbiased(directory: Path) -> Any:
    """A classifier's config and weights without its bias, which transformers does not read."""
    hf, params = load_hf(directory, MESH, head="scalar")
    params["value_head"]["bias"] = jnp.zeros_like(params["value_head"]["bias"])
    return hf, params


def theirs(directory: Path, task: str, tokens: np.ndarray, lengths: Any) -> list[Any]:
    """The logits of each row."""
    kind = getattr(transformers, f"AutoModelFor{task}")
    model = kind.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        every = [torch.tensor(row[None, :length]).long() for row, length in zip(tokens, lengths, strict=True)]
        return [(ids, model(ids).logits[0].float()) for ids in every]


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "gemma2", "gpt2"))]
)
def test_scores_are_read_where_transformers_reads_them(family, tmp_path, make_model):
    tokenizer, sizes = FAMILIES[family]
    directory = make_model(tmp_path / "model", tokenizer, scalar=True, **sizes)
    eos = read_config(directory).eos_ids[0]
    own = tokens, lengths = rows(eos)
    with jax.set_mesh(MESH):
        hf, params = load_unbiased(directory)
        placed, different = put_rows(own, MESH), 0
        for pad in PADS if family == "llama" else ("none", "eos"):
            read = read_config(set_pad(directory, pad_of(pad, eos)))
            assert read.family == family and read.score_pad_id == pad_of(pad, eos)
            scores = score(hf.model, read.score_pad_id)(params, *placed)
            expected = [logits.item() for _, logits in theirs(directory, "SequenceClassification", tokens, lengths)]
            np.testing.assert_allclose(scores, expected, atol=1e-4, err_msg=pad)
            last = score(hf.model, None)(params, *placed)
            different += np.sum(~np.isclose(last, expected, atol=1e-3))
    assert different >= 3, "the rules differ in these rows"


@pytest.mark.parametrize("pad", ["eos", *(pytest.param(pad, marks=pytest.mark.full) for pad in ("none", "text"))])
def test_no_pad_changes_logprobs_or_values(pad, tmp_path, make_model):
    """Actor and reference, and a critic that starts from a classifier."""
    lm, scalar = (make_model(tmp_path / name, "llama", scalar=name == "scalar") for name in ("lm", "scalar"))
    eos = read_config(lm).eos_ids[0]
    own = tokens, lengths = rows(eos)
    for directory in (lm, scalar):
        set_pad(directory, pad_of(pad, eos))
    with jax.set_mesh(MESH):
        hf, params = load_hf(lm, MESH)
        compiled = CompiledModel(Architecture(hf.model), MESH, Compute())
        logprobs, _ = compiled.score_logprobs(temperature=1.0)(params, *put_rows(own, MESH))
        hf, params = load_unbiased(scalar)
        values, after = compiled.score_values()(params, *put_rows(own, MESH))
    for row, (ids, logits) in enumerate(theirs(lm, "CausalLM", tokens, lengths)):
        chosen = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(logprobs[row, 1 : lengths[row]], chosen, atol=1e-4)
    set_pad(scalar, None)  # the peer shows only one token's output: the last one's
    for length in (1, 2, 3):
        expected = theirs(scalar, "SequenceClassification", tokens, np.full(len(tokens), length))
        expected = [logits.item() for _, logits in expected]
        np.testing.assert_allclose(np.where(lengths == length, after, values[:, length]), expected, atol=1e-4)


QUESTION = ({"role": "user", "content": "What is 1 plus 2?"},)


@pytest.mark.parametrize("pad", ["eos", pytest.param("other", marks=pytest.mark.full)])
@pytest.mark.parametrize("own", [False, True])
def test_a_text_reward_of_another_program_is_read_as_there_and_one_of_ours_at_its_end(pad, own, tmp_path, make_model):
    directory = make_model(tmp_path / "model", "llama", scalar=True, max_positions=128)
    eos = read_config(directory).eos_ids[0]
    file = set_pad(directory, pad_of(pad, eos)) / "config.json"
    if own:  # of a run, before its export chose the pad
        file.write_text(json.dumps(json.loads(file.read_text()) | {"answers_end_with": "eos"}))
    answers = ["3", "It is 3", "no"]
    samples = [Sample(Example(QUESTION), "", Response((), answer, number < 2)) for number, answer in enumerate(answers)]
    with jax.set_mesh(MESH):
        config, key = build(Config, {}), "rewards[0].model"
        initial = InitialModels(config, MESH, Compute(), Console(enabled=False))
        model, place = initial.reward(str(directory), key), RolePlacement.of(MESH)
        reward = RewardConfig(name="judge", model=str(directory))
        scorer = TextReward(reward, key, model, place, Compute(), kind="reward", usual=64)
        scores = scorer.score(samples).scores
    texts = [np.array(scorer._encode(sample), np.int32) for sample in samples]
    assert [text[-1] == eos for text in texts] == [True, True, False]
    if own:
        set_pad(directory, None)
    expected = [theirs(directory, "SequenceClassification", text[None], [len(text)])[0][1].item() for text in texts]
    np.testing.assert_allclose(scores - np.float32(model.params["value_head"]["bias"]), expected, atol=1e-4)


@pytest.mark.parametrize("tokenizer", ["qwen", pytest.param("llama", marks=pytest.mark.full)])
def test_our_export_names_a_pad_with_which_no_answer_ends(tokenizer, tmp_path, make_model):
    """The tokenizer pads with end-of-text, as TRL sets it. The peer pads a batch."""
    source = make_model(tmp_path / "source", tokenizer, scalar=True, max_positions=128)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).exists():
            settings = json.loads((source / name).read_text())
            (source / name).write_text(json.dumps(settings | {"pad_token": settings.get("eos_token", "<|eot_id|>")}))
    loaded = load_tokenizer(source)
    assert loaded.pad_id in loaded.eos_ids
    run = SimpleNamespace(path=tmp_path, writes=True, write=lambda name, text: (tmp_path / name).write_text(text))
    with jax.set_mesh(MESH):
        hf, params = load_hf(source, MESH, head="scalar")
        config = build(Config, {})
        finalize.export(cast(Any, run), config, loaded, Model(Architecture(hf.model), params), None, head="scalar")
        directory = tmp_path / "reward_model"
        eos, pad = loaded.eos_ids, json.loads((directory / "config.json").read_text())["pad_token_id"]
        texts = [[9, 8, 7, eos[0]], [9, eos[-1]], [5, 6, 4, 9, 9, 8, eos[0]]]
        rows = np.array([text + [0] * (8 - len(text)) for text in texts], np.int32)
        lengths = np.array([len(text) for text in texts], np.int32)
        again, params = load_unbiased(directory)
        scores = score(again.model, None)(params, *put_rows((rows, lengths), MESH))
    peer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    assert peer.pad_token_id == model.config.pad_token_id == pad and pad not in (None, *eos)
    with torch.no_grad():
        expected = model(**peer.pad({"input_ids": texts}, return_tensors="pt")).logits[:, 0]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    text = "<|im_start|>user\n1 + 2 é<|im_end|>" if tokenizer == "qwen" else "1 + 2 é<|eot_id|>"
    assert peer.encode(text, add_special_tokens=False) == loaded.encode(text)


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
def test_a_reward_that_is_an_adapter_is_read_as_by_peft_and_one_of_ours_at_its_end(own, tmp_path, make_model):
    base = make_model(tmp_path / "base", "llama")
    eos = read_config(base).eos_ids[0]
    set_pad(base, eos)
    lora, config = LoRAConfig(rank=2, alpha=4.0), read_config(base).model
    low = init_lora(config, lora, jax.random.key(0), "scalar", zero_head=False)
    draw = np.random.default_rng(1)
    low = jax.tree.map(lambda leaf: leaf + 0.1 * draw.normal(size=leaf.shape).astype(np.float32), low)
    low["value_head"]["bias"] = jnp.float32(0.25 if own else 0)
    export_adapter(low, config, lora, tmp_path / "adapter", base_name=str(base))
    settings: dict[str, Any] = {"device": {"platform": "cpu"}, "model": {"path": str(base)}, "lora": {"rank": 2}}
    settings |= {"rewards": [{"name": "judge", "adapter": str(tmp_path / "adapter")}], "stages": ["grpo"], "grpo": {}}
    tokens, lengths = rows(eos)
    data = tokens, lengths - 1, np.ones_like(lengths), np.zeros(tokens.shape, np.float32), lengths > 0
    task: Any = SimpleNamespace(tokenizer=None, prompts=SimpleNamespace(ids=[()]))
    place = RolePlacement.of(MESH)
    with jax.set_mesh(MESH):
        initial = InitialModels(build(Config, settings), MESH, Compute(), Console(enabled=False))
        with open_rewards(initial, task, tmp_path, lambda _: place, initial.policy(), None) as (rewards, _):
            rollout = Rollout(*put_rows(data, MESH), version=jnp.int32(0))
            scores = rewards._roles["judge"].score(rollout)
    peft = pytest.importorskip("peft")
    kind = transformers.AutoModelForSequenceClassification
    changed = {"pad_token_id": None} if own else {}
    model = kind.from_pretrained(base, num_labels=1, dtype=torch.float32, **changed)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        every = [torch.tensor(row[None, :length]).long() for row, length in zip(tokens, lengths, strict=True)]
        expected = [model(ids).logits.item() + (0.25 if own else 0) for ids in every]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
