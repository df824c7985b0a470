"""Traces of chosen iterations, for TensorBoard's profile plugin and for Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from jrlhf.config.schema import Config
from jrlhf.run.processes import is_main

Result = TypeVar("Result")

PROFILE = "profile"  # a run's directory of traces


def traced(config: Config, run_dir: Path, stage: str, step: int, iteration: Callable[[], Result]) -> Result:
    """`iteration()`, whose work is recorded where the config names it: in run_dir/profile/STAGE-STEP.

    The trace holds the device's programs and, on the host, one annotation for the iteration and one for each timed
    call. It ends when all that the iteration returns is computed, or when the iteration fails.

    step: counted from 1, as in metrics.jsonl.
    """
    with jax.profiler.StepTraceAnnotation(stage, step_num=step):
        wanted = config.profile
        if wanted is None or not is_main() or step not in wanted.iterations:
            return iteration()
        if stage != (wanted.stage or config.stages[-1]):
            return iteration()
        with jax.profiler.trace(run_dir / PROFILE / f"{stage}-{step}"):
            return jax.block_until_ready(iteration())
