"""A critic or reference whose table has other unused rows than the actor's, as models of one family have."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.errors import UserError
from jrlhf.models.hf import read_config
from jrlhf.run.metrics import read_metrics
from jrlhf.stages.setup import check_sources, load_task, select_mesh
from jrlhf.train import main


def with_rows(source: Path, directory: Path, rows: int) -> Path:
    """A copy of a model whose tables have this number of rows; new ones are zero."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            table = tensors[name]
            tensors[name] = np.concatenate([table, np.zeros((rows, table.shape[1]), table.dtype)])[:rows]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return directory


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_other_unused_rows_are_accepted_and_rows_that_tokens_need_are_not(role, tmp_path, user, settings):
    tokens, actor = load_tokenizer(user / "actor").vocab_size, read_config(user / "actor").model.vocab_size
    for rows in (tokens - 1, tokens, actor + 40):
        path = with_rows(user / ("critic" if role == "critic" else "actor"), tmp_path / str(rows), rows)
        config = build(Config, settings(roles={role: str(path)}))
        mesh, models = select_mesh(config)
        assert models[role].vocab_size == rows
        task = load_task(config, models["actor"])
        if rows >= tokens:
            check_sources(config, task, models["actor"], mesh)
            continue
        with pytest.raises(UserError, match=f"roles.{role}=.* vocabulary of {rows}, .* has {tokens} tokens"):
            check_sources(config, task, models["actor"], mesh)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_unused_rows_change_no_values_and_count_in_the_reference_s_softmax(tmp_path, user, settings):
    records = []
    for more in (0, 40):
        actor, critic = (read_config(user / name).model.vocab_size for name in ("actor", "critic"))
        roles = {
            "critic": str(with_rows(user / "critic", tmp_path / f"critic{more}", critic + more)),
            "reference": str(with_rows(user / "actor", tmp_path / f"reference{more}", actor + more)),
        }
        run = settings(name=f"run{more}", run_dir=str(tmp_path), roles=roles, ppo={"iterations": 1})
        main(build(Config, run))
        records.append(read_metrics(tmp_path / f"run{more}")[0])
    same, other = records
    for name in ("critic/values/mean", "critic/score/mean", "response_length/mean"):
        np.testing.assert_allclose(other[name], same[name], rtol=1e-5)
    assert same["objective/kl"] == 0 < other["objective/kl"]
