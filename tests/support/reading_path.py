"""Lists the core files that one iteration runs: `python -m tests.support.reading_path [CHECKOUT]`.

Trains GRPO on one device and records every file of the core in which a function body runs during the third iteration.
All compiled programs are dropped before that iteration, so that tracing counts, too. Works on older checkouts.
"""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ALWAYS = ("train.py", "stage.py", "stages/loop.py")  # the frame around the iteration counts in full
OUTSIDE = (  # services that a reader of the algorithm skips: a run's files and console, settings, errors
    *("run/ config/ errors.py configs/ runs.py files.py checkpoints.py resuming.py metrics.py tracking.py".split()),
    *("wandb_process.py console.py clock.py compilations.py profile.py preemption.py processes.py devices.py".split()),
    *("config.py stage_config.py strict.py consistency.py".split()),
)
CONFIG: dict[str, Any] = {
    "name": "path",
    "device": {"platform": "cpu", "simulated": 1},
    "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    "model": {"vocab_size": 14, "embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32}
    | {"max_positions": 16},
    "data": {"source": "arithmetic", "max_prompt": 6, "max_response": 4, "heldout_rows": 8},
    "arithmetic": {"terms": 2, "digits": 1, "problems": 60},
    "rewards": [{"name": "correct", "function": "exact_match"}],
    "stages": ["sft", "grpo"],
    "sft": {"steps": 2, "batch": 8, "warmup": 1},
    "grpo": {"iterations": 3, "rollout_batch": 16, "save_every": 3, "algorithm": {"samples": 4, "kl_coef": 0.02}},
    "evaluation": {"prompts": 8},
}


def record(checkout: Path) -> dict[str, int]:
    """Core file (relative to the checkout) -> its number of lines, for all files on the path of the third iteration."""
    import jax
    import yaml

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    sys.path.insert(0, str(checkout))
    from jrlhf import train

    try:
        from jrlhf.stages import loop
    except ImportError:
        from jrlhf import stage as loop  # type: ignore[attr-defined, no-redef]

    ran: set[str] = set()
    recording = threading.Event()

    def tracer(frame: FrameType, event: str, argument: Any) -> None:
        code: CodeType = frame.f_code
        if recording.is_set() and code.co_name != "<module>":
            ran.add(code.co_filename)

    original = loop.traced

    def traced(config: Any, path: Any, name: str, step: int, advance: Any) -> Any:
        if name == "grpo" and step == 3:
            jax.clear_caches()
            recording.set()
        try:
            return original(config, path, name, step, advance)
        finally:
            recording.clear()

    loop.traced = traced
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(yaml.safe_dump({**CONFIG, "run_dir": directory}))
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            code = train.cli(["--config", str(config)])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        assert code == 0, f"the training ended with {code}"
    files = {os.path.realpath(name) for name in ran}
    lines = {}
    for folder in ("jrlhf", "models", "ppo", "kernels", "meshes"):
        for path in sorted((checkout / folder).rglob("*.py")):
            path = Path(os.path.realpath(path))
            name = str(path.relative_to(checkout))
            inside = name.removeprefix("jrlhf/") if name.startswith("jrlhf/") else name
            if (str(path) in files or inside in ALWAYS) and not (inside != name and inside.startswith(OUTSIDE)):
                lines[name] = len(path.read_text().splitlines())
    return lines


if __name__ == "__main__":
    path = record(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    print(json.dumps({"files": len(path), "lines": sum(path.values()), "path": path}, indent=2))
