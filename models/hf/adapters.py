"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

A projection's two matrices are stored transposed: lora_A.weight [r, in] and lora_B.weight [out, r]. A reward model's or
a critic's scalar head is saved with them as `score`, as PEFT does for task type SEQ_CLS.
"""

import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jrlhf.meshes.transfers import to_devices
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.hf.directories import ADAPTER_FILES, CARD, PLOT, previous_export, replace_directory
from jrlhf.models.hf.files import DTYPES, NOT_FINITE, Tensor, on_host, read_header, read_object, write_json
from jrlhf.models.hf.values import is_one_of
from jrlhf.models.lora import LoRAConfig, adapted, lora_shardings
from jrlhf.models.params import Params, leaf_at, nested
from jrlhf.models.weights import PROJECTIONS, HeadKind, WeightInfo

_CONFIG, _WEIGHTS = ADAPTER_FILES
_PREFIX = "base_model.model."
_TASKS: dict[str, HeadKind] = {"CAUSAL_LM": "lm", "SEQ_CLS": "scalar"}

# Settings of adapter_config.json that are supported, or that do not change a trained adapter's outputs: its origin, its
# initialisation or regularisation, and numbers that belong to settings which are refused when set.
_SUPPORTED = frozenset(
    """
    peft_type task_type r lora_alpha target_modules use_rslora modules_to_save bias init_lora_weights
    auto_mapping exclude_modules eva_config base_model_name_or_path inference_mode lora_dropout megatron_core
    peft_version qalora_group_size revision runtime_config layers_to_transform layers_pattern
    """.split()
)

_WHERE = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_UNSET = (None, False, {}, [])  # a setting that is not in use


def export_adapter(
    adapter: Params,
    config: ModelConfig,
    lora: LoRAConfig,
    directory: str | os.PathLike[str],
    *,
    base_name: str | None = None,
    card: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes an adapter in PEFT's format, for task type SEQ_CLS with a scalar head, else for CAUSAL_LM.

    All or nothing: a new directory is written, which then replaces `directory` if `previous_export` allows it.
    The bias of a scalar head, which PEFT lacks, is written as `score.bias` if it is not zero; PEFT ignores it, and
    `load_adapter` reads it.

    adapter: as `init_lora`, on the host or on a mesh. If several processes share it, all of them must call this, and
        process 0 writes.
    base_name: the hub name or the directory of the base, for PEFT to find it.
    card: README.md and progress.png, name -> bytes, which are written next to the weights.
    """
    directory = Path(directory)
    previous_export(directory, {_CONFIG, _WEIGHTS, CARD, PLOT}.__contains__)
    host, tensors = jax.tree.map(on_host, adapter), {}
    for weight in adapted(config, lora):
        stacked = leaf_at(host, weight.path)
        for index in range(config.layers):
            module = _module(weight, index)
            a, b = stacked["a"][index], stacked["b"][index]
            tensors[f"{module}.lora_A.weight"] = a.reshape(-1, lora.rank).T
            tensors[f"{module}.lora_B.weight"] = b.reshape(lora.rank, -1).T
    scalar = "value_head" in host
    if scalar:
        tensors[f"{_PREFIX}score.weight"] = host["value_head"]["kernel"][None]
        if host["value_head"]["bias"] != 0:
            tensors[f"{_PREFIX}score.bias"] = host["value_head"]["bias"].reshape(1)

    def write(folder: Path) -> None:
        write_json(folder / _CONFIG, _settings(lora, scalar, base_name))
        # Contiguous: safetensors 0.8 writes a strided array's memory in its own order, which is a different matrix.
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, folder / _WEIGHTS, metadata={"format": "pt"})
        (folder / _WEIGHTS).chmod(0o644)  # safetensors makes it private

    return replace_directory(directory, write, card)


def load_adapter(directory: str | os.PathLike[str], config: ModelConfig, mesh: Mesh) -> tuple[LoRAConfig, Params]:
    """Loads an adapter that PEFT or `export_adapter` wrote, in float32, stored as `lora_shardings` says.

    It has a scalar head if its task type is SEQ_CLS. Dropout, which only training uses, is ignored. A layer that the
    settings leave out has an adapter of zeros, which computes nothing and never changes.

    Raises ValueError for tensors that are missing, unknown, of another shape, or not finite.
    """
    directory = Path(directory)
    settings, lora, head, tensors = _read(directory)

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        module, matrix, _ = name.removeprefix(_PREFIX).partition(".lora_")
        if matrix and not _is_target(settings, module):
            return np.zeros(shape, np.float32)
        if name not in tensors:
            raise ValueError(f"{directory / _WEIGHTS}: tensor {name} is missing: the adapter is not whole")
        tensor = tensors.pop(name)
        if tensor.shape != shape:
            raise ValueError(
                f"{directory / _WEIGHTS}: {name} has shape {list(tensor.shape)} where this model needs {list(shape)}: "
                "is it an adapter of another base?"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{directory / _WEIGHTS}: {name} is {tensor.dtype}: known are {', '.join(DTYPES)}")
        array = tensor.view().astype(np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"{directory / _WEIGHTS} holds {name!r} with {NOT_FINITE}")
        return array

    leaves: list[tuple[tuple[str, ...], np.ndarray]] = []
    for weight in adapted(config, lora):
        modules = [_module(weight, index) for index in range(config.layers)]
        inputs, outputs = weight.layer_shape[: weight.inputs], weight.layer_shape[weight.inputs :]
        rows, columns = (lora.rank, prod(inputs)), (prod(outputs), lora.rank)
        a = np.stack([take(f"{module}.lora_A.weight", rows).T for module in modules])
        b = np.stack([take(f"{module}.lora_B.weight", columns).T for module in modules])
        a, b = a.reshape(config.layers, *inputs, lora.rank), b.reshape(config.layers, lora.rank, *outputs)
        leaves += [((*weight.path, "a"), a), ((*weight.path, "b"), b)]
    adapter = nested(leaves)
    if head == "scalar":
        kernel = take(f"{_PREFIX}score.weight", (1, config.embed))[0]
        bias = take(f"{_PREFIX}score.bias", (1,))[0] if f"{_PREFIX}score.bias" in tensors else np.float32(0)
        adapter["value_head"] = {"kernel": kernel, "bias": bias}
    if tensors:
        raise ValueError(f"{directory / _WEIGHTS}: {min(tensors)} is no part of an adapter that can be loaded here")
    return lora, to_devices(adapter, lora_shardings(config, mesh, lora, head))


def _module(weight: WeightInfo, layer: int) -> str:
    return _PREFIX + weight.names["llama"].format(layer=layer).removesuffix(".weight")


def read_adapter_config(directory: str | os.PathLike[str]) -> LoRAConfig:
    """An adapter's rank, scale and targets; its weights are not read."""
    return _read(Path(directory))[1]


def _is_target(settings: Mapping[str, Any], module: str) -> bool:
    """True if PEFT adapts a module, such as model.layers.0.mlp.up_proj (its `check_target_module_exists`)."""

    def named(patterns: Any) -> bool:
        if isinstance(patterns, str):
            return re.fullmatch(patterns, module) is not None
        return any(f".{module}".endswith(f".{name}") for name in patterns or ())

    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if settings.get("exclude_modules") and named(settings["exclude_modules"]):
        return False
    if targets in (None, "all-linear"):
        targets = PROJECTIONS
    if isinstance(targets, list) and module in targets:
        return True
    if layers in (None, []) or not named(targets):
        return named(targets)
    patterns = settings.get("layers_pattern") or r"[^.]*"
    matches = [re.match(rf".*\.{p}\.(\d+)\.", module) for p in ([patterns] if isinstance(patterns, str) else patterns)]
    numbers = [int(match[1]) for match in matches if match]
    return bool(numbers) and numbers[0] in (layers if isinstance(layers, list) else [layers])


def _read(directory: Path) -> tuple[dict[str, Any], LoRAConfig, HeadKind, dict[str, Tensor]]:
    """Returns the settings, ours of them, the kind of head, and the positions of the tensors in the file."""
    path = directory / _CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: an adapter is a directory with {_CONFIG} and {_WEIGHTS}")
    settings = read_object(path, "fetch it again", "an adapter's settings should be")
    head = _check(settings, path)
    path = directory / _WEIGHTS
    if not path.exists():
        other = path.with_suffix(".bin")
        hint = f": {other.name} is a pickle, save the adapter as safetensors" if other.exists() else ""
        raise FileNotFoundError(f"{path} does not exist{hint}")
    tensors = read_header(path)
    return settings, _config(settings, tensors, directory), head, tensors


def _settings(lora: LoRAConfig, scalar: bool, base_name: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "use_rslora": lora.rslora,
        "modules_to_save": ["classifier", "score"] if scalar else None,  # as PEFT's own default for SEQ_CLS
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _check(settings: dict[str, Any], path: Path) -> HeadKind:
    """Refuses settings that are not supported; returns the kind of head."""
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type={settings.get('peft_type')!r} is not supported: only LORA is")
    task = settings.get("task_type")
    if task not in (None, *_TASKS):
        raise ValueError(f"{path}: task_type={task!r} is not supported: known are {', '.join(_TASKS)}")
    head = "lm" if task is None else _TASKS[task]
    saved = settings.get("modules_to_save")
    saved = [] if saved is None else saved
    head_modules = ("classifier", "score") if head == "scalar" else ()
    if not isinstance(saved, list) or not all(module in head_modules for module in saved):
        raise ValueError(
            f"{path}: modules_to_save={saved!r} is not supported: beside an adapter only `score` can be trained, for "
            "task_type SEQ_CLS"
        )
    if settings.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={settings['bias']!r} is not supported: biases belong to the frozen base")
    # Other initialisations change the base at the start, so that the adapter fits only its own base.
    begun = settings.get("init_lora_weights", True)
    if not (isinstance(begun, bool) or begun in ("gaussian", "eva", "orthogonal")):
        raise ValueError(f"{path}: init_lora_weights={begun!r} is not supported: it changes the base's weights")
    try:
        _is_target(settings, "model.layers.0.mlp.up_proj")
    except (TypeError, re.error) as error:
        named = ", ".join(f"{key}={settings[key]!r}" for key in _WHERE if settings.get(key))
        raise ValueError(f"{path}: {named} do not say which modules are adapted ({error})") from error
    for name, value in settings.items():
        if name not in _SUPPORTED and not is_one_of(value, _UNSET):
            raise ValueError(f"{path}: {name}={value!r} is not supported: load it without, or merge it into its base")
    return head


def _config(settings: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> LoRAConfig:
    """Returns the adapter's settings. The targets are those with weights in the file, because in adapter_config.json
    they may be a pattern, with exclusions."""
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    named = settings.get("target_modules")
    if isinstance(named, list) and not settings.get("exclude_modules"):
        targets |= {str(module).rpartition(".")[2] for module in named}
    unknown = targets - set(PROJECTIONS)
    if unknown or not targets:
        raise ValueError(
            f"{directory}: an adapter of {', '.join(sorted(unknown)) or 'nothing'} cannot be loaded: "
            f"known are {', '.join(PROJECTIONS)}"
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ValueError(f"{directory / _CONFIG}: r={rank!r} and lora_alpha={alpha!r} must be numbers")
    rslora = settings.get("use_rslora")
    if not isinstance(rslora, bool | None):
        raise ValueError(f"{directory / _CONFIG}: use_rslora={rslora!r} must be true or false")
    return LoRAConfig(rank, alpha, tuple(targets), rslora=bool(rslora))
