"""Stages on the devices of several processes: gradients equal those of the whole model."""

import json
from pathlib import Path

import pytest

from tests.support.launched import launch

STAGED = """
import json, sys
from types import SimpleNamespace
from jrlhf.config.schema import DeviceConfig, DistributedConfig
from jrlhf.run.devices import select

devices = select(DeviceConfig(platform="cpu", simulated=2), DistributedConfig(timeout=60))
from tests.models.conftest import random_params
from tests.models.test_pipeline import *

kind, family, schedule, layout, start, whole, part = json.loads(sys.argv[1])
options = ForwardOptions(lora=LORA if layout == "generate" else None)
layout = {"train": TRAIN, "train_tp": TRAIN_TP, "generate": GENERATE}[layout]
config = FAMILIES[family]
if schedule == "interleaved":
    config = replace(config, layers=5, local_layers=(True, False, True, True, False))
own = np.asarray(devices[start : start + int(np.prod(whole))])
groups = tuple(make_mesh(*part, devices=half) for half in np.split(own, 2))
given = SimpleNamespace(random_params=random_params), kind, config, make_mesh(*whole, devices=own), layout, options
(metrics, expected), (staged, actual) = gradients(*given), gradients(*given, groups, schedule)
same_gradients(actual, expected)
for name, value in metrics.items():
    np.testing.assert_allclose(staged[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
print(json.dumps({name: float(value) for name, value in staged.items()}))
"""

# kind, family, schedule, layout, the first of the 8 devices, sizes of the whole mesh and of each group of devices
CASES = {
    "a stage in each of two processes": ("sft", "gemma", "1f1b", "train", 3, (1, 2, 1), (1, 1, 1)),
    "stages that span processes": ("grpo", "llama", "gpipe", "train_tp", 0, (1, 4, 2), (1, 2, 2)),
    "both stages in the last process": ("critic", "gpt2", "zb-h1", "train", 6, (1, 2, 1), (1, 1, 1)),
    "adapters": ("dpo", "gemma", "interleaved", "generate", 3, (1, 2, 1), (1, 1, 1)),
}


@pytest.mark.proof("processes")
@pytest.mark.parametrize("case", CASES)
def test_stages_of_four_processes_have_the_gradients_of_the_whole_model(case, tmp_path: Path):
    launched = launch(4, tmp_path, "-c", STAGED, json.dumps(CASES[case]))
    first, *others = launched.answers(400)
    assert first and all(metrics == first for metrics in others)
