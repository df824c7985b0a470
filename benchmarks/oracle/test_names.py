# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The peers' names in our pages and hints are theirs: TRL's and verl's as installed, Tunix' in its sources."""

import ast
import dataclasses
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

import pytest
import verl.trainer.config
from omegaconf import OmegaConf
from trl import DPOConfig, GRPOConfig, SFTConfig

from jrlhf.config.peers import PEERS
from tests.support.tutorials import page, settings

GENERATED = Path(verl.trainer.config.__file__).parent / "_generated_ppo_trainer.yaml"  # all of verl's settings
VERL = OmegaConf.to_container(OmegaConf.load(GENERATED), resolve=False)


def paths(mapping: object, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of nested mappings."""
    if isinstance(mapping, dict):
        for key, value in mapping.items():
            yield f"{prefix}{key}"
            yield from paths(value, f"{prefix}{key}.")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # by transformers
def test_trls_settings_make_its_config(tmp_path):
    text = settings(page("from-trl"))["GRPOConfig"]
    values = {key: ast.literal_eval(value) for key, value in text.items()}
    here = {"use_cpu": True, "bf16": False, "output_dir": str(tmp_path)}
    config = GRPOConfig(**values | here)
    assert config.generation_batch_size == 256
    assert all(getattr(config, key) == value for key, value in values.items() if key not in here)


def test_verls_settings_are_in_its_config():
    assert settings(page("from-verl"))[""].keys() <= set(paths(VERL))


def test_tunix_settings_are_fields_of_its_classes():
    classes, bases = {}, {}
    for file in files("google-tunix") or ():
        if file.match("tunix/rl/**/*.py") or file.match("tunix/sft/*.py") or file.match("tunix/rl/*.py"):
            for node in ast.walk(ast.parse(Path(str(file.locate())).read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    classes.setdefault(node.name, set()).update(
                        field.target.id for field in node.body if isinstance(field, ast.AnnAssign)
                    )
                    bases[node.name] = [ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases]

    def fields(name: str) -> set[str]:
        return classes.get(name, set()).union(*(fields(base) for base in bases.get(name, ())))

    for name, given in settings(page("from-tunix")).items():
        assert given.keys() <= fields(name), name


def test_the_names_that_lead_to_ours_are_theirs():
    trl = {field.name for config in (GRPOConfig, DPOConfig, SFTConfig) for field in dataclasses.fields(config)}
    verls = {".".join(path.split(".")[start:]) for path in paths(VERL) for start in range(path.count(".") + 1)}
    scripts = {"dataset_name", "model_name_or_path", "lora_r", "lora_alpha", "lora_target_modules", "reward_funcs"}
    scripts |= {"torch_dtype", "use_peft"}
    peft = {"lora_dropout", "r", "target_modules", "use_rslora"}
    ppo = {"cliprange", "cliprange_value", "num_mini_batches", "num_ppo_epochs", "response_length"}  # of TRL 1.12
    ppo |= {"reward_model_path", "sft_model_path", "total_episodes", "vf_coef"}
    guesses = {
        "batch_size",
        "data.dataset",
        "data.file",
        "data.files",
        "data.name",
        "data.path",
        "data.train",
        "dropout",
    }
    guesses |= {"max_new_tokens", "mesh.devices", "model.name"}  # nobody's names of these settings
    assert sorted(PEERS.keys() - trl - verls - scripts - peft - ppo - guesses) == []
