"""The families against transformers: logits, greedy generation and reward scores of the same small random directories.

parity.json holds what transformers 5.23 and torch 2.13 computed on a CPU, so that the check needs neither. It is
written anew, by an environment that has both, with

    JRLHF_WRITE_PARITY=1 python -m pytest tests/models/test_parity.py

Weights are drawn by numpy from each tensor's name; the directories are written here by hand, in the dialects that the
hub holds: v4's keys and v5's, with and without what a family's defaults give.
"""

import json
import os
import zlib
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, make_mesh
from jrlhf.models import SamplingConfig, export_hf, make_generate, make_logprobs, make_scores
from jrlhf.models.forward import ShardedForward
from jrlhf.models.hf.load import load_hf
from jrlhf.models.options import ForwardOptions
from tests.models.shared import fast_jit

GOLDEN = Path(__file__).with_name("parity.json")
B, T, R, V, LAYERS = 8, 14, 6, 97, 2
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **SIZES}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "query_pre_attn_scalar": 24, **SIZES, **GROUPED}

CONFIGS = {
    # Old directories name a rope scaling by "type"; every key with a default is left out.
    "llama_linear": LLAMA
    | {"num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": True}
    | {"rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "float32"},
    "llama3": LLAMA
    | {**GROUPED, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0}
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "torch_dtype": "float32"}
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 48,
        }
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"}
    | {**SIZES, **GROUPED, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 5}
    | {"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    | {**SIZES, **GROUPED, "max_position_embeddings": 64, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
    | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen2_windows": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    | {**SIZES, **GROUPED, "max_position_embeddings": 64, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    | {**SIZES, **GROUPED, "head_dim": 16, "max_position_embeddings": 64, "dtype": "float32"}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "tie_word_embeddings": False},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **GEMMA}
    | {"max_position_embeddings": 64, "sliding_window": 4, "torch_dtype": "float32"}
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **GEMMA}
    | {"max_position_embeddings": 64, "sliding_window": 4, "sliding_window_pattern": 2, "torch_dtype": "float32"}
    | {"rope_theta": 1000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"}
    | {"vocab_size": V, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "n_ctx": 64},
}
# How each family is computed: (mesh of the forward passes, layout of the language model, mesh of generation).
DEFAULT = (2, 2, 2), TRAIN, (2, 2, 2)
MESHES = {
    "llama_linear": ((1, 1, 1), TRAIN, (1, 1, 1)),
    "llama3": ((2, 2, 2), TRAIN_TP, (2, 1, 4)),
    "gpt2": ((1, 4, 2), TRAIN_TP, (1, 2, 4)),
}


def tensor(name, shape, model_type):
    """Random numbers that depend on the tensor's name only, of sizes that make every part of a model matter."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)
    if name.endswith("bias"):
        return 0.3 * values
    # What layers add to an embedding must outweigh it, or a model with a tied head repeats its last token.
    if len(shape) == 1:  # a norm's scale, which Gemma stores less one
        gemma = model_type.startswith("gemma")
        return 0.2 * values + (1 if not gemma else 2 if "post_" in name else 0)
    tables = {"model.embed_tokens.weight": 0.2, "transformer.wte.weight": 0.2, "lm_head.weight": 1.0}
    return values * tables.get(name, 0.35)


def write(directory, config, shapes):
    """A directory as the hub holds it. `shapes`: by name, of the first layer's tensors and those outside layers."""
    tensors = {}
    for name, shape in shapes.items():
        layered = ".layers.0." in name or ".h.0." in name
        for layer in range(LAYERS if layered else 1):
            full = name.replace(".0.", f".{layer}.") if layered else name
            tensors[full] = tensor(full, shape, config["model_type"])
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_both(directory, family, shapes):
    """(language model, reward model), over the same decoder."""
    config, head = CONFIGS[family], {"score.weight": [1, 32]}
    kind = str(config["architectures"][0]).removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    classifier = [f"{'Gemma3Text' if kind == 'Gemma3' else kind}ForSequenceClassification"]
    decoder = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    reward = config | {"architectures": classifier, "num_labels": 1, "pad_token_id": 0}
    return write(directory / "lm", config, shapes), write(directory / "reward", reward, decoder | head)


def batch():
    """Right-padded rows of unequal lengths; 0 pads, and is no token of theirs."""
    generator = np.random.default_rng(1)
    lengths = np.array([T, 3, 9, 12, 5, T, 7, 10], np.int32)
    tokens = generator.integers(1, V, (B, T)).astype(np.int32)
    return np.where(np.arange(T)[None, :] < lengths[:, None], tokens, 0), lengths


def ours(family, lm):
    """The config, logits [B, T, V] and log-probabilities [B, T]."""
    sizes, layout, _ = MESHES.get(family, DEFAULT)
    tokens, _ = batch()
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
    read, params = load_hf(lm, mesh, layout=layout)
    forward = ShardedForward(read.model, mesh, layout, "lm", ForwardOptions())
    hidden = forward.shard(forward.hidden)
    logprobs = make_logprobs(read.model, mesh, layout)
    with jax.set_mesh(mesh):
        states, (chosen, _) = jax.device_get(
            fast_jit(lambda params, tokens: (hidden(params, tokens), logprobs(params, tokens)))(params, tokens)
        )
        logits = states @ jax.device_get(params.get("unembedding", params["embedding"]))[:V].T
        if read.model.softcap is not None:
            logits = read.model.softcap * np.tanh(logits / read.model.softcap)
    return SimpleNamespace(model=read.model, logits=logits, logprobs=chosen)


def scored(family, reward, model):
    """Our scores [B] by the same decoder."""
    sizes, *_ = MESHES.get(family, DEFAULT)
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
    classifier, params = load_hf(reward, mesh, layout=SCORE, head="scalar")
    assert (classifier.head, classifier.model) == ("scalar", model)
    with jax.set_mesh(mesh):
        return jax.device_get(fast_jit(make_scores(model, mesh, SCORE))(params, *batch()))


def greedy(family, lm):
    """Our greedy responses [B, R]."""
    (tokens, lengths), (*_, sizes) = batch(), MESHES.get(family, DEFAULT)
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
    read, params = load_hf(lm, mesh, layout=GENERATE)
    with jax.set_mesh(mesh):
        generate = fast_jit(make_generate(read.model, mesh, SamplingConfig(R, temperature=0.0)))
        out = jax.device_get(generate(params, tokens, lengths, jax.random.split(jax.random.key(0), B)))
    rows = np.arange(B)[:, None]
    return out.tokens[rows, lengths[:, None] + np.arange(R)[None, :]]


def theirs(lm, reward):
    """The same from transformers, float32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def load(kind, directory):
        model, info = kind.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        return model.eval()

    tokens, lengths = batch()
    ids = torch.tensor(tokens, dtype=torch.long)
    mask = torch.arange(T)[None, :] < torch.tensor(lengths)[:, None]
    model = load(AutoModelForCausalLM, lm)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask.long()).logits.numpy()
        scores = load(AutoModelForSequenceClassification, reward)(ids, attention_mask=mask.long()).logits[:, 0]
        rows = [
            model.generate(
                row[None, :length],
                attention_mask=mask[index, None, :length].long(),
                do_sample=False,
                min_new_tokens=R,
                max_new_tokens=R,
                eos_token_id=None,
                pad_token_id=0,
            )[0, length:]
            for index, (row, length) in enumerate(zip(ids, lengths.tolist(), strict=True))
        ]
    return SimpleNamespace(logits=logits, logprobs=chosen(logits), scores=scores.numpy(), greedy=np.stack(rows))


def chosen(logits):
    """Log-probabilities of the batch's tokens [B, T], 0 at t = 0."""
    wide = logits.astype(np.float64)[:, :-1]
    top = wide.max(-1, keepdims=True)
    log_p = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    return np.pad(np.take_along_axis(log_p, batch()[0][:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


def first_layer_shapes(family, directory):
    """The shapes that `write` needs, of the directory that transformers would write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    left_out = ("architectures", "torch_dtype", "dtype")
    config = {key: value for key, value in CONFIGS[family].items() if key not in left_out}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    later = [f".{kind}.{layer}." for kind in ("layers", "h") for layer in range(1, LAYERS)]
    return {name: list(x.shape) for name, x in tensors.items() if not any(part in name for part in later)}


@pytest.fixture(scope="module")
def goldens(tmp_path_factory):
    if os.environ.get("JRLHF_WRITE_PARITY"):
        written = {}
        for family in CONFIGS:
            directory = tmp_path_factory.mktemp(family)
            shapes = first_layer_shapes(family, directory / "shapes")
            result = theirs(*write_both(directory, family, shapes))
            written[family] = {
                "shapes": shapes,
                "logprobs": np.round(result.logprobs, 5).tolist(),
                "scores": np.round(result.scores.astype(np.float64), 5).tolist(),
                "greedy": result.greedy.tolist(),
            }
        lines = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in written.items())
        GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    return json.loads(GOLDEN.read_text())


# What these compute, the other families compute too; Gemma 3 has Qwen 3's norms of queries and keys.
REPEATED = ("llama_linear", "mistral", "qwen2", "qwen2_windows", "qwen3")
SCORED = ("gemma3", "gpt2")  # a score is computed from all decoders alike


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.proof("families")] if name in REPEATED else []) for name in CONFIGS],
)
def case(request, goldens, tmp_path_factory):
    """One family: what is known of it, its directories, and what we compute from them."""
    name, golden = request.param, goldens[request.param]
    lm, reward = write_both(tmp_path_factory.mktemp(name), name, golden["shapes"])
    own, drawn = ours(name, lm), cache(partial(greedy, name, lm))
    scores = cache(partial(scored, name, reward, own.model))
    return SimpleNamespace(name=name, golden=golden, lm=lm, reward=reward, ours=own, scores=scores, greedy=drawn)


def real():
    tokens, lengths = batch()
    return np.arange(T)[None, :] < lengths[:, None]


def test_the_families_compute_what_transformers_computed(case):
    """Against the numbers on file, to their five digits."""
    np.testing.assert_allclose(
        case.ours.logprobs[real()], np.array(case.golden["logprobs"])[real()], rtol=2e-5, atol=1e-4
    )
    if case.name in SCORED:
        np.testing.assert_allclose(case.scores(), case.golden["scores"], rtol=2e-5, atol=1e-4)


@pytest.mark.full
def test_the_families_draw_what_transformers_drew(case):
    """The most likely tokens. (`generation/test_generate.py` compares with the plain decoder's log-probabilities.)"""
    np.testing.assert_array_equal(case.greedy(), case.golden["greedy"])


@pytest.mark.proof("families")
def test_the_families_compute_what_transformers_computes(case):
    """Every logit of every real token within 2e-4 of the largest, reward scores, and greedy text token for token."""
    pytest.importorskip("torch", reason="compares with transformers itself, which needs torch")
    pytest.importorskip("transformers", reason="compares with transformers itself")
    expected = theirs(case.lm, case.reward)
    error = np.abs(case.ours.logits - expected.logits)[real()]
    assert error.max() < 2e-4 * np.abs(expected.logits[real()]).max()
    np.testing.assert_allclose(case.ours.logprobs[real()], expected.logprobs[real()], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(case.scores(), expected.scores, rtol=2e-4, atol=1e-4)
    np.testing.assert_array_equal(case.greedy(), expected.greedy)
    # A test only where the models say something: responses that change, and tokens of many probabilities.
    assert (expected.greedy[:, 1:] != expected.greedy[:, :-1]).any(axis=1).sum() > B // 4
    assert expected.logprobs[real()].std() > 0.5


@pytest.mark.proof("families")
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_what_transformers_reads_is_the_same_after_an_export(case, head, tmp_path):
    """Bit for bit, from the storage of training and of generation; a plain Auto class finds the model's own class."""
    torch = pytest.importorskip("torch", reason="transformers computes with torch")
    transformers = pytest.importorskip("transformers", reason="it reads the directories")
    auto = getattr(transformers, "AutoModelForCausalLM" if head == "lm" else "AutoModelForSequenceClassification")
    mesh, source = make_mesh(data=2, fsdp=2, tensor=2), case.lm if head == "lm" else case.reward
    read, params = load_hf(source, mesh, layout=TRAIN if head == "lm" else GENERATE, head=head, dtype=None)
    export_hf(params, read.model, tmp_path / "ours", family=read.family, pad_id=0, shard_bytes=40_000)
    theirs, ours = (auto.from_pretrained(path, dtype=torch.float32).eval() for path in (source, tmp_path / "ours"))
    described = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert described["architectures"] == [type(theirs).__name__] == [type(ours).__name__]
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours.state_dict()[name]), name
    tokens = torch.tensor(batch()[0][:2], dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
