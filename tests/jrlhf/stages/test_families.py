"""A directory that transformers wrote goes through supervised learning and PPO, and transformers loads what comes out.

For each family. The models are random and tiny; torch's arithmetic is the independent one.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jrlhf.config.parse import build
from jrlhf.config.schema import Config, RewardConfig
from jrlhf.data.batches import put_rows
from jrlhf.data.encode import Encoding
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.data.types import Example, Response
from jrlhf.meshes import make_mesh
from jrlhf.models.hf import load_hf
from jrlhf.rewards.text_model import TextReward
from jrlhf.rewards.types import Sample
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.console import Console
from jrlhf.run.metrics import read_metrics
from jrlhf.run.profiler import CompilationWatch
from jrlhf.train import main

torch = pytest.importorskip("torch", reason="the peer of these tests is torch: pip install 'jrlhf[dev]'")
transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install 'jrlhf[dev]'")

pytestmark = [
    pytest.mark.proof("families"),
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the peer's own
]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
GPT_2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
# The class of its config, the tokenizer, and what differs from SIZES. Forward passes and exports of all families are
# tested in tests/models.
FAMILIES = {
    "llama3": ("LlamaConfig", "llama", SIZES | {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "qwen", SIZES | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "gemma", SIZES | {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 16}),
    "gpt2": ("GPT2Config", "qwen", GPT_2),
}
ADDED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write(directory: Path, family: str, tokenizers: Path, head: str = "AutoModelForCausalLM", **more) -> Path:
    """Saves a random model with transformers, and adds the files of a tokenizer."""
    kind, tokenizer, sizes = FAMILIES[family]
    loaded = load_tokenizer(tokenizers / tokenizer)
    special = {"bos_token_id": loaded.bos_id, "eos_token_id": list(loaded.eos_ids), "pad_token_id": loaded.pad_id or 0}
    config = getattr(transformers, kind)(vocab_size=loaded.vocab_size + 3, **sizes, **special, **more)
    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too must be the right ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    for name in ADDED:
        if (tokenizers / tokenizer / name).exists():
            shutil.copyfile(tokenizers / tokenizer / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def tokenizers() -> Path:
    return Path(__file__).parents[1] / "tokenizers"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_of_transformers_goes_through_a_run_and_out_again(family, tmp_path, tokenizers, settings):
    start = write(tmp_path / "start", family, tokenizers)
    config = settings(
        name=family,
        run_dir=str(tmp_path),
        stages=["sft", "ppo"],
        model={"path": str(start)},
        data={"max_prompt": 96},
        sft={"steps": 2, "learning_rate": 0.01},
        ppo={"iterations": 2},
    )
    main(build(Config, config))
    records = [record for record in read_metrics(tmp_path / family) if record["stage"] == "ppo"]
    assert len(records) == 2 and records[0]["objective/kl"] == 0.0
    assert max(record["actor/initial_ratio_gap"] for record in records) < 1e-5
    assert max(record["rollout/logprob_gap_max"] for record in records) < 1e-4
    end = tmp_path / family / "model"
    theirs, report = load(end, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    before = load(start).state_dict()
    for name, after in theirs.state_dict().items():
        assert not torch.equal(before[name], after), name
    # Longer than every window, and as many rows as devices.
    tokens = np.random.default_rng(0).integers(0, theirs.config.vocab_size, (8, 40))
    np.testing.assert_allclose(chosen(end, tokens), chosen_of_torch(theirs, tokens), atol=1e-4)
    theirs = transformers.AutoTokenizer.from_pretrained(end)
    question = [{"role": "user", "content": "What is 1 plus 2?"}]
    ids = theirs.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    encoded = Encoding(load_tokenizer(start)).prompts([Example(prompt=tuple(question))], 96)
    assert encoded.ids == (tuple(ids),)


def test_a_sequence_classifier_of_transformers_scores_alike(tmp_path, tokenizers):
    path = write(tmp_path, "gemma2", tokenizers, "AutoModelForSequenceClassification", num_labels=1)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    answers = ["3", "It is 3, because 1 and 2 are 3.", "I do not know", "é 日本", "It is 3, " * 9]
    samples, expected = [], []
    for answer in answers:
        sample = Sample(Example(({"role": "user", "content": "What is 1 plus 2?"},)), "", Response((), answer, True))
        samples.append(sample)
        talk = [*sample.example.prompt, *sample.completion]
        ids = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            expected.append(theirs(ids).logits.item())
    mesh = make_mesh(1, 4, 2)
    config, compute, key = build(Config, {}), Compute(), "rewards[0].model"
    with jax.set_mesh(mesh):
        model = InitialModels(config, mesh, compute, Console(enabled=False)).reward(str(path), key)
        own = RewardConfig(name="judge", model=str(path))
        reward = TextReward(own, key, model, RolePlacement.of(mesh), compute, kind="reward", usual=120)
        scores = list(reward.score(samples[:-1]).scores)
        with CompilationWatch() as compilations:
            scores += list(reward.score(samples[-1:]).scores)
            assert compilations.take()[0] == [], "a longer text is no new shape"
    assert 64 < ids.shape[1] <= 128, "and its shape is another"
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert np.ptp(expected) > 0.01


def load(directory: Path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **options)


def chosen(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Our log-probs of all tokens but each row's first."""
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        config, params = load_hf(directory, mesh)
        score = CompiledModel(Architecture(config.model), mesh, Compute()).score_logprobs(temperature=1.0)
        lengths = np.full(len(tokens), tokens.shape[1], np.int32)
        logprobs, _ = score(params, *put_rows((tokens.astype(np.int32), lengths), mesh))
        return np.asarray(logprobs)[:, 1:]


def chosen_of_torch(model, tokens: np.ndarray) -> np.ndarray:
    ids = torch.tensor(tokens, dtype=torch.long)
    with torch.no_grad():
        every = torch.log_softmax(model(ids).logits.float(), -1)
    return every[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy()
