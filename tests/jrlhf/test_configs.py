"""The packaged configs: each is sound as it is, without its weights and data, and its memory is what it must be."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest

from jrlhf.config import config_names, load_config
from jrlhf.config.schema import DatasetsData
from jrlhf.configs.questions import write

# The number of devices that each is for, and what such a device has, in GiB.
DEVICES = {
    "gsm8k-ppo": (1, 74),
    "llama3-8b-ppo": (8, 74),
    "llama3-70b-ppo": (256, 95),
    "quickstart": (4, 4),
    "quickstart-dpo": (4, 4),
    "quickstart-safe": (4, 4),
    "qwen3-8b-lora": (1, 74),
    "smollm2-grpo": (1, 8),
    "smollm2-ppo": (1, 8),
}
GB = 1e9
DIGIT = 0.005 * 2**30 / GB  # half of the last digit that is printed, in GB


PROGRAM = """
import sys
from jrlhf.train import cli
for name, memory in zip(sys.argv[2::2], sys.argv[3::2]):
    sizes = ["device.platform=cpu", f"device.simulated={sys.argv[1]}", f"device.memory={memory}"]
    assert cli(["--config", name, "--dry-run", *sizes]) == 0, name
    print("\\f", end="")
"""


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where the runs are started: it has the files that configs/questions.py writes."""
    write(directory := tmp_path_factory.mktemp("start"))
    return directory


@pytest.fixture(scope="module")
def plans(directory) -> Mapping[str, str]:
    """The output of `--dry-run` for each, on simulated devices; nothing may be fetched. One process for each number."""
    started = {}
    for count in {count for count, _ in DEVICES.values()}:
        own = {name: str(memory) for name, (number, memory) in DEVICES.items() if number == count}
        arguments = [sys.executable, "-c", PROGRAM, str(count), *(word for pair in own.items() for word in pair)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        started[tuple(own)] = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=directory
        )
    printed = {}
    for names, process in started.items():
        output, error = process.communicate(timeout=300)
        assert process.returncode == 0, (names, error)
        printed |= dict(zip(names, output.split("\f"), strict=False))
    return printed


def gigabytes(number: str, unit: str) -> float:
    """The size that a plan writes as "1.5 GiB"."""
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit) / GB


def test_every_packaged_config_is_known_here():
    """Those of the built-in sums differ in their algorithm alone: tests/jrlhf/arithmetic looks at all of them."""
    assert set(DEVICES) == {name for name in config_names() if not name.startswith("arithmetic-")}


def test_a_dry_run_needs_neither_weights_nor_data(plans, directory):
    for name, (devices, memory) in DEVICES.items():
        plan, config = plans[name], load_config(name)
        if "dpo" in config.stages:
            sizes = re.search(r"^plan of a step of dpo on data=(\d+) x fsdp=(\d+) x tensor=(\d+):$", plan, re.MULTILINE)
            assert sizes is not None and prod(map(int, sizes.groups())) == devices
            assert "reference.logprobs" in plan and "critic " not in plan.split("memory of")[1]
        else:
            assert f"plan of an iteration of {config.algorithm}, colocate, on {devices} device(s):" in plan
        if isinstance(config.data, DatasetsData) and config.data.prompts is not None:
            assert f"model.path={config.model.path} is not here" in plan
            path = str(config.data.datasets["prompts"].path)
            assert (directory / path).exists() or f"data.prompts.path={path} is not here" in plan
        # Everything fits the device that the config is for.
        head, *calls = plan[plan.index("memory of one device") :].split("\n\n")[0].splitlines()
        assert head.endswith(f"which has {memory} GiB; predicted, as XLA compiles for GPUs:"), name
        totals = [gigabytes(*line.split()[1:3]) for line in calls[1:]]
        assert len(totals) >= 2 and 0 < max(totals) < memory * 2**30 / GB, name


QWEN, LLAMA, LLAMA_70B = 0.494032768, 8.030261248, 70.553706496  # parameters in units of 1e9
SMOLLM2 = 0.134515008
SCALAR = LLAMA - 128256 * 4096 / 1e9  # a scalar model has no unembedding
# The sides of a layer's seven projections in Qwen3 8B, each of which gets an adapter of rank 32.
EMBED, HEADS, KV_HEADS, MLP = 4096, 32 * 128, 8 * 128, 12288
SIDES = [(EMBED, HEADS), (EMBED, KV_HEADS), (EMBED, KV_HEADS), (HEADS, EMBED), *[(EMBED, MLP)] * 3]
ADAPTER = 36 * 32 * sum(map(sum, SIDES)) / GB
# Gemma 2 27B: 27,227,128,320 parameters, embeddings tied; every device has all norms, four a layer, in float32.
NORMS = 46 * 4 * 4608
GEMMA = 2 * (27_227_128_320 - NORMS) / 256 + 4 * NORMS
MEMORY = [  # config, what a role keeps or a call needs of a device, GB by the published sizes, relative tolerance
    # Float32 weights, two moments, a bfloat16 copy; the reference is another.
    ("gsm8k-ppo", "actor", "weights", 4 * QWEN, 1e-3),
    ("gsm8k-ppo", "actor", "optimizer", 8 * QWEN, 1e-3),
    ("gsm8k-ppo", "actor.generate", "generation weights", 2 * QWEN, 1e-3),
    ("gsm8k-ppo", "reference", "weights", 2 * QWEN, 1e-3),
    ("llama3-8b-ppo", "actor", "weights", 4 * LLAMA / 8, 1e-3),
    ("llama3-8b-ppo", "actor.generate", "generation weights", 2 * LLAMA, 1e-3),
    ("llama3-8b-ppo", "critic", "optimizer", 8 * SCALAR / 8, 1e-3),
    ("llama3-8b-ppo", "reference", "weights", 2 * LLAMA / 8, 1e-3),
    ("llama3-8b-ppo", "reward", "weights", 2 * SCALAR / 8, 1e-3),
    # 8,190,735,360 parameters in bfloat16, and adapters.
    ("qwen3-8b-lora", "base", "weights", 16.38, 6e-4),
    ("qwen3-8b-lora", "actor", "weights", 4 * ADAPTER, 1e-3),
    ("qwen3-8b-lora", "critic", "optimizer", 8 * ADAPTER, 1e-3),
    ("smollm2-grpo", "actor", "weights", 4 * SMOLLM2, 1e-3),
    ("smollm2-ppo", "critic", "optimizer", 8 * SMOLLM2, 5e-3),
    # The generation copy is divided over tensor=8 alone.
    ("llama3-70b-ppo", "actor", "weights", 4 * LLAMA_70B / 256, 5e-3),
    ("llama3-70b-ppo", "actor.generate", "generation weights", 2 * LLAMA_70B / 8, 5e-3),
    ("llama3-70b-ppo", "reward", "weights", GEMMA / GB, 1e-3),
]


def test_memory_is_that_of_the_published_sizes(plans):
    def needed(plan: str, row: str) -> dict[str, float]:
        """Part -> GB of a device."""
        line = re.search(rf"^  {row} +(?:[\d.]+ [KMG]?i?B +)+(\D.*)$", plan, re.MULTILINE)
        assert line is not None, row
        parts = (part.rsplit(" ", 2) for part in line[1].split(", "))
        return {name: gigabytes(number, unit) for name, number, unit in parts}

    for name, row, part, size, tolerance in MEMORY:
        assert needed(plans[name], row)[part] == pytest.approx(size, rel=tolerance, abs=DIGIT), (name, row, part)
    config = load_config("gsm8k-ppo")
    positions = config.data.max_prompt + config.data.max_response
    cache = 2 * 24 * 2 * 64 * positions * config.rl.rollout_batch * 2  # k and v, layers, heads, size, bfloat16
    measured = needed(plans["gsm8k-ppo"], "actor.generate")["KV cache"]
    assert cache / GB < measured < 1.1 * cache / GB  # and that of the prompts that are read
    assert "\n  reference " not in plans["qwen3-8b-lora"] and "no switch" in plans["qwen3-8b-lora"]
