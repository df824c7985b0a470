"""Export to a Hugging Face directory that `transformers` and inference engines load."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jrlhf.models.config import ModelConfig
from jrlhf.models.params import Params

SHARD_BYTES = 5_000_000_000


def export_hf(
    params: Params,
    config: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    tokenizer_json: str | None = None,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
    bos_id: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a language model as config.json, generation_config.json and safetensors, with its tokenizer if given.

    All or nothing: the files are written beside `directory` and then take its place. A previous export is replaced.

    Args:
        params: as `init_lm`, on the host (numpy arrays or addressable jax arrays), in the dtype to export.
        tokenizer_json: the text of a `tokenizers` tokenizer.json.
        eos_ids: the tokens that end a response.
        shard_bytes: the largest weights file; a larger model is written as several, with an index.

    Raises:
        ValueError: no Hugging Face architecture computes what this config says; a special id not in the vocabulary.
        FileExistsError: `directory` holds something else than a model.
    """
    directory = Path(directory)
    eos = list(eos_ids)
    special = {"bos": bos_id, "eos": eos[0] if len(eos) == 1 else eos or None, "pad": pad_id}
    for name, ids in special.items():
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"{name} id {token} is outside the vocabulary of {config.vocab_size} tokens")
    if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").exists():
        raise FileExistsError(f"{directory} is not empty and holds no model: choose another directory for the export")

    ids = {f"{name}_token_id": ids for name, ids in special.items()}
    dtype = np.asarray(params["embedding"]).dtype.name
    directory.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_json(written / "config.json", hf_config(config) | ids | {"torch_dtype": dtype})
        _write_json(written / "generation_config.json", {"do_sample": True, **ids})
        if tokenizer_json is not None:
            _write_tokenizer(written, tokenizer_json, special, config.max_positions)
        _write_weights(written, hf_weights(params, config), shard_bytes)
        written.chmod(0o755)  # mkdtemp makes it private
        _replace(directory, written)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    return directory


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json, but for the special tokens and the dtype.

    Raises:
        ValueError: no Hugging Face architecture computes what this config says.
    """
    if config.softcap is not None:
        raise ValueError(f"a model with softcap={config.softcap} cannot be exported: no supported family has one")
    if config.qk_norm and config.qkv_bias:
        raise ValueError(
            "a model with qk_norm and qkv_bias cannot be exported: Qwen3 has no biases, Qwen2 no such norm"
        )
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    common = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
    if kind == "llama":
        return common | {"attention_bias": False, "mlp_bias": False}
    return common | {"use_sliding_window": False} | ({"attention_bias": False} if kind == "qwen3" else {})


def hf_weights(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every weight in Hugging Face's names and [out, in] order, one at a time."""

    def rows(table: Any) -> np.ndarray:
        return np.asarray(table)[: config.vocab_size]

    def projected(weight: np.ndarray) -> np.ndarray:  # [D, N, H] -> [N * H, D]
        return weight.reshape(weight.shape[0], -1).T

    yield "model.embed_tokens.weight", rows(params["embedding"])
    layers = params["layers"]
    attention, mlp = layers["attention"], layers["mlp"]
    for index in range(config.layers):
        name = f"model.layers.{index}"
        yield f"{name}.input_layernorm.weight", np.asarray(layers["attention_norm"]["scale"])[index]
        for short in "qkv":
            yield f"{name}.self_attn.{short}_proj.weight", projected(np.asarray(attention[f"w{short}"])[index])
            if config.qkv_bias:
                yield f"{name}.self_attn.{short}_proj.bias", np.asarray(attention[f"b{short}"])[index].reshape(-1)
        output = np.asarray(attention["wo"])[index]
        yield f"{name}.self_attn.o_proj.weight", output.reshape(-1, output.shape[-1]).T
        if config.qk_norm:
            yield f"{name}.self_attn.q_norm.weight", np.asarray(attention["query_norm"]["scale"])[index]
            yield f"{name}.self_attn.k_norm.weight", np.asarray(attention["key_norm"]["scale"])[index]
        yield f"{name}.post_attention_layernorm.weight", np.asarray(layers["mlp_norm"]["scale"])[index]
        for short in ("gate", "up", "down"):
            yield f"{name}.mlp.{short}_proj.weight", np.asarray(mlp[short])[index].T
    yield "model.norm.weight", np.asarray(params["final_norm"]["scale"])
    if not config.tie_embeddings:
        yield "lm_head.weight", rows(params["unembedding"])


def _write_weights(directory: Path, weights: Iterator[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    """model.safetensors, or several files of at most `shard_bytes` (but at least one weight) and their index."""
    shard: dict[str, np.ndarray] = {}
    names: list[list[str]] = []
    total = 0

    def flush() -> None:
        path = directory / f"shard-{len(names)}"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes it private
        names.append(list(shard))
        shard.clear()

    for name, weight in weights:
        if shard and sum(array.nbytes for array in shard.values()) + weight.nbytes > shard_bytes:
            flush()
        # Contiguous: safetensors 0.8 writes a strided array's memory as it lies, which is a different matrix.
        shard[name] = np.ascontiguousarray(weight)
        total += weight.nbytes
    flush()

    if len(names) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    places = {}
    for index, contained in enumerate(names):
        file = f"model-{index + 1:05d}-of-{len(names):05d}.safetensors"
        (directory / f"shard-{index}").rename(directory / file)
        places |= dict.fromkeys(contained, file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _write_tokenizer(directory: Path, text: str, special: Mapping[str, Any], max_positions: int) -> None:
    tokenizer = json.loads(text)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    # A unigram model's vocabulary is a list of (token, score); the others' are token -> id.
    if isinstance(vocabulary, dict):
        tokens = {index: token for token, index in vocabulary.items()}
    else:
        tokens = {index: entry[0] for index, entry in enumerate(vocabulary)}
    tokens |= {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", [])}
    named = {}
    for name, ids in special.items():
        first = ids[0] if isinstance(ids, list) else ids
        if first is not None and first in tokens:
            named[f"{name}_token"] = tokens[first]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_positions, **named}
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace(directory: Path, written: Path) -> None:
    """Puts `written` in the place of `directory`."""
    if not directory.exists():
        written.rename(directory)
        return
    previous = written.with_name(f"{written.name}-previous")
    directory.rename(previous)
    written.rename(directory)
    shutil.rmtree(previous)
