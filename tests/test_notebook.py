"""The notebook runs from top to bottom, on a tiny setting."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "colab" / "quickstart.ipynb"


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code"
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own libraries
def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv(
        "JRLHF_NOTEBOOK_OVERRIDES",
        "model.embed=32 model.layers=2 model.heads=2 model.kv_heads=2 model.head_dim=16 model.mlp=64 sft.steps=4 "
        "sft.batch=16 reward_model.prompts=24 reward_model.heldout_prompts=16 reward_model.samples_per_prompt=2 "
        "reward_model.steps=4 reward_model.batch=8 ppo.iterations=3 ppo.rollout_batch=16 evaluation.prompts=16",
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    assert "gold on 16 held-out signatures" in printed
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()
