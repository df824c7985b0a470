"""The launch scripts, with a stand-in for the command that reaches the machines."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "configs" / "launch"


@pytest.mark.parametrize("overrides", [[], ["seed=1", "ppo.algorithm={epochs: 2, minibatches: 4}"]])
def test_every_host_of_a_pod_gets_the_overrides_and_nothing_else(tmp_path, overrides):
    """gcloud is a script that writes down its arguments, NUL between them."""
    (tmp_path / "gcloud").write_text('#!/bin/bash\nprintf \'%s\\0\' "$@" >>"$CALLED"\n')
    (tmp_path / "gcloud").chmod(0o755)
    variables = {"TPU": "pod", "ZONE": "here", "BUCKET": "gs://bucket", "SOURCE": "https://host/jrlhf.whl"}
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLED": str(tmp_path / "called")}
    command = ["bash", str(LAUNCH / "tpu-pod.sh"), "quickstart", *overrides]
    subprocess.run(command, check=True, env=os.environ | variables | paths, cwd=tmp_path, timeout=60)
    *_, last = (tmp_path / "called").read_text().removesuffix("\0").split("\0")
    (train,) = (line for line in last.splitlines() if "jrlhf.train" in line)
    _, given = train.split("device.platform=tpu")
    assert shlex.split(given) == [*overrides, "$resume"]


def test_what_a_pod_needs_is_asked_for():
    missing = subprocess.run(
        ["bash", str(LAUNCH / "tpu-pod.sh"), "quickstart"],
        env={"PATH": os.environ["PATH"], "TPU": "pod", "ZONE": "here", "BUCKET": "gs://bucket"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert missing.returncode != 0 and "SOURCE" in missing.stderr
