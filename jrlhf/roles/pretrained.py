"""Model directories: their location, their architecture, and their weights on the mesh."""

import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.config.places import expanded, is_address
from jrlhf.config.schema import Config, DatasetsData, LoRASection, ModelSection
from jrlhf.data.hub import hub_reason
from jrlhf.data.read import is_hub_name
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.tokenizer_files import check_vocabulary, load_tokenizer
from jrlhf.errors import UserError, beside, one_line, user_errors
from jrlhf.meshes.layout import TRAIN, Layout
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.hf.adapters import load_adapter, read_adapter_config
from jrlhf.models.hf.config import HFConfig, read_config
from jrlhf.models.hf.directories import CARD
from jrlhf.models.hf.load import check_hf, load_hf
from jrlhf.models.hf.presets import PRESETS
from jrlhf.models.init import init_lm
from jrlhf.models.lora import LoRAConfig, adapter_weights, lora_shardings
from jrlhf.models.params import Params, param_shardings
from jrlhf.models.weights import HeadKind
from jrlhf.run.contents import HUB
from jrlhf.storage.outward import hub_requests

# The files to download of a model directory: never code, and no weights but safetensors.
_DESCRIPTIONS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", CARD)
_WEIGHTS = ("*.safetensors",)
# Other formats of the same weights; templates in a folder belong to the model.
_IGNORED = [*(f"*/{name}" for name in (*_DESCRIPTIONS, *_WEIGHTS) if name != "*.jinja"), "consolidated*"]


def locate(path: str, key: str, *, weights: bool = False) -> Path:
    """The directory of a model: a Hugging Face directory, a run's model/, or the local copy of an address or hub name.

    key: the setting that names it, for the error. weights: download weights, too, not only their description.
    """
    wanted = _DESCRIPTIONS + (_WEIGHTS if weights else ())
    if is_address(path):
        from jrlhf.storage.models import fetch

        return fetch(path, key, wanted)
    directory = expanded(path, key)
    if (directory / "config.json").is_file():
        return directory
    if (directory / "model" / "config.json").is_file():
        return directory / "model"
    if (directory / "config.yaml").is_file():
        raise UserError(
            f"{key}={path} is a run that has not finished: python -m jrlhf.export {shlex.quote(path)} writes that of "
            "its newest checkpoint"
        )
    if (directory / "adapter_config.json").is_file():
        raise UserError(f"{key}={path} is an adapter: name its base here, and this directory in --adapter or lora.path")
    if directory.exists():
        raise UserError(f"{key}={path} holds no model: there is neither a config.json nor a model/config.json in it")
    if not is_model_name(path):
        remedy = beside(path, "name a model directory, a run, or a hub name such as org/model")
        raise UserError(f"{key}={path} does not exist: {remedy}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetch_files = partial(snapshot_download, path, allow_patterns=[*wanted])
    try:
        with hub_requests():
            try:
                return Path(fetch_files(ignore_patterns=_IGNORED))
            except LocalEntryNotFoundError:  # offline: a cached copy without a model card is enough
                return Path(fetch_files(ignore_patterns=[*_IGNORED, CARD], local_files_only=True))
    except Exception as error:  # the library's own, the network's, the file system's
        reason = hub_reason(error, path) or f"it cannot be downloaded ({one_line(error, kind=True)})"
        near = beside(path, "")
        near = f" ({near})" if near else ""
        raise UserError(f"{key}={path} is no directory in {Path.cwd()}{near}, and {reason}") from error


def describe(path: str, key: str) -> HFConfig:
    with user_errors(f"{key}={path}"):
        return read_config(locate(path, key))


def architecture(path: str, key: str) -> ModelConfig:
    """The architecture of a model directory, or of a hub name; presets need no access to the hub."""
    return PRESETS[path] if not is_here(path) and path in PRESETS else describe(path, key).model


def own_tokenizer(path: str, key: str, data: DatasetsData, vocab_size: int) -> Tokenizer:
    """The tokenizer in a model's directory, with the settings of the data."""
    tokenizer = check_vocabulary(load_tokenizer(locate(path, key), eos=data.eos), vocab_size)
    return replace(tokenizer, special_tokens={**tokenizer.special_tokens, **data.template})


def fresh_model(model: ModelSection) -> ModelConfig:
    """Returns the architecture with the sizes that a config names."""
    sizes = {name: getattr(model, name) for name in ModelSection.__dataclass_fields__ if name != "path"}
    with user_errors():
        return ModelConfig(**sizes)


def is_here(path: str, key: str = "") -> bool:
    """True if a path to a model or to data is on this machine; otherwise it may be a name on the hub."""
    return expanded(path, key).exists()


def hub_names(config: Config) -> list[str]:
    """Returns the settings that name a model or a dataset of the hub, as seen from the current directory."""
    models = [config.model.path, *config.roles.paths.values()]
    models += [part.model for part in (*config.rewards, *config.costs)]
    names = [path for path in models if path is not None and is_model_name(path) and not is_here(path)]
    if isinstance(config.data, DatasetsData):
        names += [part.path for part in config.data.datasets.values() if part.path and is_hub_name(part.path)]
    return list(dict.fromkeys(names))


def hub_model(path: str | None, names: Collection[str]) -> str | None:
    """Returns the hub name of a model that is named by it or by a directory in the hub's cache; else None.

    names: the names that the run took from the hub; a relative directory may look like such a name.
    """
    if path is None:
        return None
    if cached := re.search(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+/?$", path):
        return f"{cached[1]}/{cached[2]}"
    return path if path in names else None


def base_name(path: str | None, names: Collection[str]) -> str | None:
    """Returns the base's name in an adapter's config: its hub name, an address, or else an absolute path."""
    name = hub_model(path, names)
    return name if name is not None or path is None else path if is_address(path) else str(expanded(path).absolute())


def check_origins(names: Collection[str], run: Path) -> None:
    """Refuses names that would be downloaded from the hub although the run did not take them from there."""
    listed = (run / HUB).read_text(encoding="utf-8").splitlines() if (run / HUB).exists() else names
    for name in names:
        if name not in listed:
            raise UserError(
                f"{name} is no directory here, and the run in {run} did not take it from the hub: start this in the "
                "directory in which the run began"
            )


def load_weights(
    path: str,
    key: str,
    mesh: Mesh,
    *,
    head: HeadKind = "lm",
    layout: Layout = TRAIN,
    dtype: jnp.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[HFConfig, Params]:
    """A model directory's weights, stored on the mesh in `layout`, in `dtype`."""
    options = {"layout": layout, "head": head, "dtype": dtype, "progress": progress}
    with user_errors(f"{key}={path}"):
        return load_hf(locate(path, key, weights=True), mesh, **options)


def check_weights(path: str, key: str, *, head: HeadKind = "lm", numbers: bool = False) -> HFConfig:
    """Checks that `load_weights` will find what it needs. Reads headers and, only with `numbers`, the weights."""
    with user_errors(f"{key}={path}"):
        return check_hf(locate(path, key, weights=True), head=head, numbers=numbers)


def adapter_of(section: LoRASection, actor: ModelConfig) -> LoRAConfig:
    """Returns the settings of the actor's adapter, new or from a file; refuses one that does not fit the actor."""
    with user_errors("lora"):
        if section.path is not None:
            lora = read_adapter_config(expanded(section.path))
        else:
            assert section.rank is not None
            lora = LoRAConfig(rank=section.rank, alpha=section.alpha, targets=section.targets, rslora=section.rslora)
        adapter_weights(actor, lora)
        return lora


def actor_adapter(section: LoRASection, actor: ModelConfig, mesh: Mesh) -> tuple[LoRAConfig, Params | None]:
    """The adapter that a run trains, and its weights if the config names a directory. Checks that it fits the actor."""
    with user_errors("lora"):
        if section.path is None:
            lora = adapter_of(section, actor)
            lora_shardings(actor, mesh, lora)
            return lora, None
        lora, adapter = load_adapter(_adapter(section.path, "lora.path"), actor, mesh)
        if "value_head" in adapter:
            raise ValueError(f"path={section.path} is a reward model's adapter: name one of a language model")
        return lora, adapter


def _adapter(path: str, key: str) -> Path:
    directory = expanded(path, key)
    if not directory.exists():
        raise ValueError(f"{path} does not exist: {beside(path, 'name the directory of an adapter')}")
    return directory


def reward_adapter(config: Config, path: str, key: str, actor: ModelConfig, mesh: Mesh) -> tuple[LoRAConfig, Params]:
    """Loads a reward model that is an adapter and a head on the actor's base."""
    if config.lora is None:
        raise UserError(f"{key}={path} is put on the actor's frozen base, which only lora has: set lora.rank")
    with user_errors(f"{key}={path}"):
        lora, adapter = load_adapter(_adapter(path, key), actor, mesh)
    if "value_head" not in adapter:
        raise UserError(f"{key}={path}: it has no scalar head (task type SEQ_CLS): name a reward model's adapter")
    return lora, adapter


def abstract_weights(model: ModelConfig, mesh: Mesh) -> Params:
    """Shapes, dtypes and shardings of a language model's weights in TRAIN storage, without arrays."""
    shapes = jax.eval_shape(lambda: init_lm(model, jax.random.key(0)))
    shardings = param_shardings(model, mesh, TRAIN)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def is_model_name(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts) and not path.endswith("/")
