"""Traces: of the chosen iterations only, and ended whatever happens in them."""

import jax
import jax.numpy as jnp
import pytest

from jrlhf.config import Config, load_config
from jrlhf.config.check import validate
from jrlhf.config.schema import ProfileConfig
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig
from jrlhf.run.profiler import traced


def test_chosen_iterations_leave_a_trace(tmp_path):
    config = Config(profile=ProfileConfig(iterations=(2, 3), stage="sft"))
    add = jax.jit(lambda x: x + 1)
    for step in (1, 2):
        assert traced(config, tmp_path, "sft", step, lambda step=step: (add(jnp.ones(())), {"x": "text"}))[0] == 2
        traced(config, tmp_path, "ppo", step, lambda: None)
    with pytest.raises(ZeroDivisionError):
        traced(config, tmp_path, "sft", 3, lambda: 1 // 0)
    assert sorted(each.name for each in (tmp_path / "profile").iterdir()) == ["sft-2", "sft-3"]
    (tensorboard,) = (tmp_path / "profile" / "sft-2").glob("plugins/profile/*/*.xplane.pb")
    (perfetto,) = (tmp_path / "profile" / "sft-2").glob("plugins/profile/*/*.trace.json.gz")
    assert tensorboard.stat().st_size > 0 and perfetto.stat().st_size > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profile.iterations=[0]"], r"iterations=.*it must be iterations, the first of which is 1"),
        (["profile.iterations=[3,41]"], "profile.iterations has 41, but ppo ends after 40"),
        (
            ["profile.iterations=[3]", "stages=[sft]", "profile.stage=ppo"],
            r"profile.stage=ppo is not among stages=\[sft\]",
        ),
    ],
)
def test_iterations_that_will_not_come_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        config = load_config("quickstart", ["ppo.iterations=40", "device.platform=cpu", *overrides])
        validate(config, 4, {"actor": ModelConfig.tiny(config.model.vocab_size)})


def test_nothing_is_traced_by_default():
    assert Config().profile is None
