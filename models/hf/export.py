"""Exports a model to a Hugging Face directory that `transformers` and inference engines load."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.hf.config import hf_config
from jrlhf.models.hf.directories import TEMPLATES, TOKENIZER_FILES, is_model_file, previous_export, replace_directory
from jrlhf.models.hf.files import PlannedTensor, on_host, write_json, write_tensors
from jrlhf.models.hf.names import TensorView, weight_table
from jrlhf.models.lora import LoRAConfig, headed, merge_layers
from jrlhf.models.modules import has_int8, is_int8
from jrlhf.models.params import Params, leaf_at
from jrlhf.models.weights import HeadKind

SHARD_BYTES = 5_000_000_000
_OF_ITS_WRITER = ("transformers_version", "_from_model_config")  # no settings of generation


def export_hf(
    params: Params,
    config: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    adapter: Params | None = None,
    lora: LoRAConfig | None = None,
    dtype: DTypeLike | None = None,
    family: str | None = None,
    tokenizer_json: str | None = None,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
    bos_id: int | None = None,
    generation: Mapping[str, Any] | None = None,
    card: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a model as config.json and safetensors, with its tokenizer if given.

    A language model becomes a causal one with a generation_config.json; a scalar model becomes a sequence classifier
    with one label, whose `score` in transformers has no bias. Our bias, if it is not zero, is written as `score.bias`,
    which `load_hf` reads and transformers ignores (all scores are then lower by it).

    All or nothing: a new directory is written, which then replaces `directory`, a previous export.
    One layer is fetched to the host at a time. If several processes share the arrays, all of them must call this, and
    process 0 writes.

    params: as `init_lm` or `init_scalar`, on the host or on a mesh, in any layout's storage.
    adapter, lora: `params` are the base of this adapter, on the same mesh, as floats or int8. The result of `merge` is
        written, merged a layer at a time; each sum is rounded once, to the dtype that is written.
    dtype: float32, bfloat16 or float16, to which every number is rounded; None for the weights' own.
    family: the `model_type` to prefer, as `HFConfig.family`; see `hf_config`.
    tokenizer_json: the text of a `tokenizers` tokenizer.json.
    tokenizer_dir: a directory whose tokenizer files are copied as they are.
    eos_ids: the tokens that end a response.
    generation: settings of the generation_config.json, as `HFConfig.generation`; its token ids are those given here.
    card: README.md and progress.png, name -> bytes, which are written next to the weights.
    shard_bytes: the largest weights file; a larger model is written as several, with an index.

    Raises ValueError for arguments that exclude each other, int8 weights, and ids outside of the vocabulary.
    """
    directory = Path(directory)
    if (adapter is None) != (lora is None):
        raise ValueError("give both adapter and lora, or neither")
    if lora is None and has_int8(params):
        raise ValueError("int8 weights cannot be exported: give the adapter that they are the base of, or dequantise")
    if adapter is not None:
        params = headed(params, adapter)
    head: HeadKind = "scalar" if "value_head" in params else "lm"
    eos = list(eos_ids)
    special = {"bos": bos_id, "eos": eos[0] if len(eos) == 1 else eos or None, "pad": pad_id}
    for name, ids in special.items():
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"{name} id {token} is outside the vocabulary of {config.vocab_size} tokens")
    if tokenizer_json is not None and tokenizer_dir is not None:
        raise ValueError("give tokenizer_json or tokenizer_dir, not both: a model has one tokenizer")
    copied = [] if tokenizer_dir is None else _tokenizer_files(Path(tokenizer_dir))
    previous_export(directory, is_model_file)

    described = hf_config(config, head, family)
    merged = None
    if adapter is not None and lora is not None:
        to = params["embedding"].dtype if dtype is None else dtype  # merged matrices are rounded to it
        merged = lambda layer, index: merge_layers(layer, adapter, index, lora, to)  # noqa: E731
    tensors = hf_weights(params, config, family=described["model_type"], dtype=dtype, change=merged)
    ids = {f"{name}_token_id": ids for name, ids in special.items()}

    def write(folder: Path) -> None:
        write_json(folder / "config.json", described | ids | {"torch_dtype": tensors[0].dtype.name})
        if head == "lm":
            settings = {key: value for key, value in (generation or {}).items() if key not in _OF_ITS_WRITER}
            write_json(folder / "generation_config.json", {"do_sample": True, **settings, **ids})
        if tokenizer_json is not None:
            _write_tokenizer(folder, tokenizer_json, special, config.max_positions)
        for file in copied:
            copy = folder / file.relative_to(Path(str(tokenizer_dir)))
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        write_tensors(folder, tensors, shard_bytes)

    if jax.process_index() != 0:
        for tensor in tensors:  # this process's share of fetching them
            tensor.fetch()
    return replace_directory(directory, write, card)


def hf_weights(
    params: Params,
    config: ModelConfig,
    *,
    family: str,
    dtype: DTypeLike | None = None,
    change: Callable[[Params, int], Params] | None = None,
) -> list[PlannedTensor]:
    """Returns every tensor of the model, with Hugging Face's names and order. They should be fetched in this order.

    change: (a layer, its index) -> the layer to write. The other parameters: see `export_hf`.
    """
    layers, current = params["layers"], {}
    first = {**params, "layers": layers[0] if isinstance(layers, list) else layers}

    def fetch(weights: tuple[TensorView, ...], layer: int | None) -> np.ndarray:
        if layer is not None and current.get("layer") != layer:
            taken = _take(layers, layer)
            current.update(layer=layer, layers=taken if change is None else change(taken, layer))
        tree = params if layer is None else current
        parts = [weight.to_file(on_host(leaf_at(tree, weight.path), dtype)) for weight in weights]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    tensors = []
    for name, weights, layer in _tensors(params, config, family):
        leaf = leaf_at(first, weights[0].path)
        own = params["embedding"].dtype if is_int8(leaf) else leaf.dtype
        written = np.dtype(own if dtype is None else dtype)
        tensors.append(PlannedTensor(name, weights[0].file_shape, written, partial(fetch, weights, layer)))
    return tensors


def _tensors(
    params: Params, config: ModelConfig, family: str
) -> Iterator[tuple[str, tuple[TensorView, ...], int | None]]:
    """Yields (name, the weights in it, their layer) of every tensor: tables, layers, final norm, head."""
    head: HeadKind = "scalar" if "value_head" in params else "lm"
    tensors: dict[str, tuple[TensorView, ...]] = {}
    for weight in weight_table(config, family, head):
        tensors[weight.name] = (*tensors.get(weight.name, ()), weight)
    if head == "scalar" and not np.any(on_host(params["value_head"]["bias"])):
        del tensors["score.bias"]
    for layered, group in groupby(tensors.items(), lambda tensor: tensor[1][0].layered):
        members = list(group)  # the table has one layer, where all of them go
        for index in range(config.layers) if layered else (None,):
            yield from ((name.format(layer=index), weights, index) for name, weights in members)


def _take(layers: Any, index: int) -> Params:
    """One layer, of a list or a stack; weights on a mesh stay there."""
    if isinstance(layers, list):
        return layers[index]
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(layers)):
        return jax.tree.map(lambda stack: stack[index], layers)
    return _take_on_devices(layers, np.int32(index))


@jax.jit
def _take_on_devices(layers: Params, index: jax.Array) -> Params:
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, index, keepdims=False), layers)


def _tokenizer_files(directory: Path) -> list[Path]:
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not files:
        raise ValueError(f"{directory} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    return [*files, *sorted((directory / TEMPLATES).glob("*.jinja"))]


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
    first = {name: ids[0] if isinstance(ids, list) else ids for name, ids in special.items()}
    named = {f"{name}_token": tokens[token] for name, token in first.items() if token in tokens}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_positions, **named}
    write_json(directory / "tokenizer_config.json", settings)
