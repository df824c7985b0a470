"""Random config.json files: transformers' logits or a refusal that names the key; exports that transformers runs."""

import json
import os
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jrlhf.meshes import TRAIN, make_mesh
from jrlhf.models import export_hf
from jrlhf.models.forward import ShardedForward
from jrlhf.models.hf import load_hf, read_config
from jrlhf.models.hf.config import FAMILIES
from jrlhf.models.options import ForwardOptions
from tests.models.hf.drawn import DRAWN, NO_EFFECT, VOCAB, Drawn, draw
from tests.models.shared import fast_jit

torch = pytest.importorskip("torch", reason="the peer of these tests is torch: pip install 'jrlhf[dev]'")
transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install 'jrlhf[dev]'")

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the peer's own
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 14)).astype(np.int32)
PARTS, CONFIGS = 12, 42  # tests of the proof, and configs of each


def ours(directory: Path) -> tuple[Any, Any, np.ndarray]:
    """What config.json says, the weights, and the logits [B, T, V]."""
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    read, params = load_hf(directory, mesh)
    forward = ShardedForward(read.model, mesh, TRAIN, "lm", ForwardOptions())
    with jax.set_mesh(mesh):
        states = jax.device_get(fast_jit(forward.shard(forward.hidden))(params, TOKENS))
    logits = states @ jax.device_get(params.get("unembedding", params["embedding"]))[:VOCAB].T
    cap = read.model.softcap
    return read, params, logits if cap is None else cap * np.tanh(logits / cap)


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long), use_cache=False, return_dict=True).logits.numpy()


def theirs(drawn: Drawn, directory: Path) -> np.ndarray | None:
    """Writes config.json and random weights; returns transformers' logits, None where it cannot run the config."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(drawn.config))
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        weights = transformers.AutoModelForCausalLM.from_config(config).float().state_dict()
        draws = np.random.default_rng(0)
        for name, weight in weights.items():
            centre = 1.0 if weight.ndim == 1 and name.endswith("weight") and "gemma" not in drawn.family else 0.0
            weights[name] = (centre + 0.3 * draws.normal(size=weight.shape)).astype(np.float32)
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
        return logits_of(loaded(directory))
    except Exception:  # whatever transformers raises, it does not run this config
        return None


def loaded(directory: Path) -> Any:
    """transformers' model of the directory's weights, all of them."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def check(drawn: Drawn, directory: Path) -> str:
    """The outcome of a config: equal, refused, or neither, where transformers does not run it, and nor do we."""
    expected = theirs(drawn, directory)
    if expected is None:
        with pytest.raises(ValueError, match=r"config\.json: "):
            read_config(directory)
        return "neither"
    try:
        read, params, logits = ours(directory)
    except ValueError as error:
        assert any(key in str(error) for key in drawn.refused), f"refused without need: {error}"
        return "refused"
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4 * np.abs(expected).max())

    exported = directory / "export"
    export_hf(jax.device_get(params), read.model, exported, family=read.family)
    assert read_config(exported).model == read.model
    model = loaded(exported)
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    ids = torch.tensor(TOKENS[:1], dtype=torch.long)
    text = model.generate(ids, max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert text[0, -1] == expected[0, -1].argmax()
    return "equal"


def check_all(seeds: range, place: Path) -> Counter:
    outcomes, faults = Counter(), []
    for seed in seeds:
        drawn = draw(seed)
        try:
            outcomes[check(drawn, place / str(seed))] += 1
        except Exception as error:
            faults.append(f"seed {seed}: {drawn.config}: {type(error).__name__}: {str(error)[:500]}")
    assert not faults, f"{len(faults)} of {len(seeds)}: " + "\n".join(faults)
    return outcomes


@pytest.mark.proof("families")
@pytest.mark.parametrize("part", range(PARTS))
def test_many_drawn_configs(part, tmp_path):
    start = int(os.environ.get("PROOF_SEED", "0")) + part * CONFIGS
    outcomes = check_all(range(start, start + CONFIGS), tmp_path)
    assert outcomes["equal"] >= CONFIGS / 2, outcomes


@pytest.mark.proof("families")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_reads_is_known(family, tmp_path, monkeypatch):
    """Records what a model of transformers asks its config for, from the file to the last logit."""
    config = next(config for config in map(draw, range(99)) if config.family == family and not config.refused)
    assert theirs(config, tmp_path / "model") is not None
    kind = type(transformers.AutoConfig.from_pretrained(tmp_path / "model"))
    reads: set[str] = set()
    original: Any = kind.__getattribute__

    def recorded(self: Any, key: str) -> Any:
        reads.add(key)
        return original(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getattribute__", recorded)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
        logits_of(model.float())
        model.generate(torch.tensor(TOKENS, dtype=torch.long), max_new_tokens=2)
    own = {field.name for field in fields(kind)}
    reads = {key for key in reads if not key.startswith("_") and (key in own or not hasattr(kind, key))}
    table_keys = {*NO_EFFECT, *DRAWN, *vars(transformers.GenerationConfig())}
    for table in FAMILIES.values():
        table_keys |= {*table.keys.values(), *table.defaults, *table.neutral, *table.aliases}
    assert sorted(reads - table_keys) == []
