"""The configuration: what a user can write, and what is said about what a user cannot."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
import yaml

from jrlhf.config import schema as config_module
from jrlhf.config.check import validate
from jrlhf.config.parse import Section, build, checked, count, flatten, parse_yaml, to_yaml
from jrlhf.config.schema import Config, config_names, load_config
from jrlhf.errors import UserError
from jrlhf.roles.pretrained import fresh_model


@dataclass(frozen=True)
class Inner(Section):
    rate: float = 0.5
    steps: int = count(3)
    limit: float | None = None
    key: int = field(default=7, metadata={"from": "seed"})


@dataclass(frozen=True)
class Outer(Section):
    needed: str
    kind: Literal["fast", "exact"] = "exact"
    flag: bool = False
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1,)
    label: str | None = None
    even: int = checked(2, lambda value: value % 2 == 0, "even")
    inner: Inner = field(default_factory=Inner)


def outer(text: str) -> Outer:
    return build(Outer, parse_yaml(text, "test.yaml"))


def write(tmp_path, text: str) -> str:
    path = tmp_path / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def sentence(error: UserError) -> str:
    text = str(error)
    assert "\n" not in text and text
    return text


def test_every_scalar_is_read_by_its_fields_type():
    read = outer(
        """
        needed: 007
        kind: fast
        flag: TRUE
        names: [on, 1.0, "null", 2026-11-20]
        sizes: [010, +3, 1_000]
        label: yes
        inner: {rate: 1e-5, steps: 4, limit: 3}
        """
    )
    assert read == Outer(
        needed="007",
        kind="fast",
        flag=True,
        names=("on", "1.0", "null", "2026-11-20"),
        sizes=(10, 3, 1000),
        label="yes",
        inner=Inner(rate=1e-5, steps=4, limit=3.0),
    )
    assert type(read.inner.limit) is float and type(read.needed) is str


def test_null_is_none_only_where_the_type_allows_it_and_only_unquoted():
    assert outer("{needed: a, label: null}").label is None
    assert outer("{needed: a, label: }").label is None
    assert outer("{needed: a, label: 'null'}").label == "null"
    assert outer("{needed: a, inner: }").inner == Inner()
    with pytest.raises(UserError, match=r"^flag has no value: give it one, or leave the key out for its default$"):
        outer("{needed: a, flag: null}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{needed: a, knd: fast}", "knd is not a known key: did you mean kind?"),
        ("{needed: a, steps: 2}", "steps is not a known key: did you mean inner.steps?"),
        ("{needed: a, rat: 2}", "rat is not a known key: did you mean inner.rate?"),
        ("{needed: a, inner: {stepz: 2}}", "inner.stepz is not a known key: did you mean inner.steps?"),
        ("{needed: a, inner: {zzz: 2}}", "inner.zzz is not a known key: known are rate, steps, limit"),
        ("{needed: a, inner: 3}", "inner=3: it is a section, write inner.KEY=VALUE for one of rate, steps, limit"),
        ("{kind: fast}", "the config lacks needed: give it a value"),
        ("{needed: a, kind: fst}", "kind=fst: it must be one of fast, exact, did you mean fast"),
        ("{needed: a, kind: 3}", "kind=3: it must be one of fast, exact"),
        ("{needed: a, flag: 1}", "flag=1: it must be true or false"),
        ("{needed: a, flag: on}", "flag=on: it must be true or false"),
        ("{needed: a, even: 3}", "even=3: it must be even"),
        ("{needed: a, even: true}", "even=true: it must be a whole number"),
        ("{needed: a, even: 2.5}", "even=2.5: it must be a whole number"),
        ("{needed: a, even: 1e3}", "even=1e3: it must be a whole number, write 1000"),
        ("{needed: a, even: 1e999}", "even=1e999: it must be a whole number"),
        ("{needed: a, even: [2]}", "even=[2]: it must be a whole number"),
        ("{needed: a, inner: {steps: 0}}", "inner.steps=0: it must be at least 1"),
        ("{needed: a, inner: {key: 1}}", "inner.key is not a known key: the run's seed is used, set that"),
        ("{needed: a, inner: {rate: abc}}", "inner.rate=abc: it must be a finite number"),
        ("{needed: a, inner: {rate: nan}}", "inner.rate=nan: it must be a finite number"),
        ("{needed: a, inner: {rate: .inf}}", "inner.rate=.inf: it must be a finite number"),
        ("{needed: a, names: b}", "names=b: it must be a list, write [b]"),
        ("{needed: a, sizes: [1, x]}", "sizes[1]=x: it must be a whole number"),
        ("{needed: {a: 1}}", "needed={a: 1}: it must be text"),
        ("{needed: a, needed: b}", "test.yaml, line 1: needed is given twice, keep one"),
        ("needed: a\ninner:\n  steps: 1\n  steps: 2", "test.yaml, line 4: steps is given twice, keep one"),
        ("{needed: a, [1]: 2}", "test.yaml, line 1: a key must be a word"),
    ],
)
def test_a_mistake_is_one_sentence_with_key_value_and_remedy(text, message):
    with pytest.raises(UserError) as caught:
        outer(text)
    assert sentence(caught.value) == message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: b: c", "test.yaml, line 1, column 5: not valid YAML"),
        ("a: [1", "test.yaml, line 1"),
        ("a: 1\n\tb: 2", "test.yaml, line 2"),
        ("a: 1\n---\nb: 2", "test.yaml, line 2"),
        ("a: &x [1]\nb: *x", "test.yaml, line 2, column 4: not valid YAML: aliases are not read, write the value out"),
        ("a: \x01", "test.yaml: not valid YAML: special characters are not allowed"),
        ("[" * 5000, "test.yaml"),
    ],
)
def test_what_is_not_yaml_is_named_with_its_line(text, where):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "test.yaml")
    assert sentence(caught.value).startswith(where)


def test_tags_construct_nothing():
    assert parse_yaml("a: !!python/object/apply:os.getcwd []", "test.yaml") == {"a": []}


def test_python_values_are_accepted_where_their_type_fits():
    assert build(Outer, {"needed": "a", "flag": True, "sizes": (1, 2), "inner": {"rate": 1, "steps": 2.0}}) == Outer(
        needed="a", flag=True, sizes=(1, 2), inner=Inner(rate=1.0, steps=2)
    )
    with pytest.raises(UserError, match="steps=True: it must be a whole number"):
        build(Inner, {"steps": True})
    with pytest.raises(UserError, match="rate=False: it must be a finite number"):
        build(Inner, {"rate": False})


def test_a_section_checks_itself_also_when_python_makes_it():
    with pytest.raises(ValueError, match=r"^steps=0: it must be at least 1$"):
        Inner(steps=0)


def test_overrides_take_the_same_path(tmp_path):
    path = write(tmp_path, "name: base\nppo: {iterations: 7}\n")
    config = load_config(
        path,
        [
            "name=007",
            "ppo.actor.learning_rate=3e-6",
            "--seed=5",
            "stages=[sft]",
            "ppo.algorithm.kl_target=null",
            "mesh={fsdp: 2}",
            "mesh.tensor=4",
            "run_dir=a=b: #c",
            "device.simulated=8",
            "sft.steps=1",
            "sft.steps=2",
        ],
    )
    assert config.name == "007" and config.seed == 5 and config.stages == ("sft",)
    assert config.ppo.actor.learning_rate == 3e-6 and config.ppo.iterations == 7
    assert config.ppo.algorithm.kl_target is None
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (1, 2, 4)
    assert config.run_dir == "a=b: #c" and config.device.simulated == 8
    assert config.sft.steps == 2  # the last one wins, as on every command line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed' is not understood: write key=value, for example seed=1"),
        ("=1", "override '=1' is not understood: write key=value, for example seed=1"),
        ("ppo..x=1", "override 'ppo..x=1' is not understood: write key=value, for example seed=1"),
        ("seed.x=1", "override 'seed.x=1': seed=3 is no section, it has no x"),
        ("seed=", "seed has no value: give it one, or leave the key out for its default"),
        ("seed=-1", "seed=-1: it must be from 0 to 4294967295"),
        ("learning_rate=1", "learning_rate is not a known key: did you mean sft.learning_rate"),
        ("sft.lerning_rate=1", "sft.lerning_rate is not a known key: did you mean sft.learning_rate?"),
        ("sft.learning_rate=-1", "sft.learning_rate=-1.0: it must be at least 0 and finite"),
        ("sft.learning_rate=nan", "sft.learning_rate=nan: it must be a finite number"),
        ("sft.steps=0", "sft.steps=0: it must be at least 1"),
        ("sft.steps=[1", "sft.steps, line 1"),
        ("ppo.algorithm.clip_low=7", "ppo.algorithm.clip_low=7.0: it must be in (0, 1]"),
        ("ppo.algorithm.kl_estimator=k4", "ppo.algorithm.kl_estimator=k4: it must be one of k1, k2, k3"),
        ("ppo.temperature=0", "ppo.temperature=0.0: it must be above 0 and finite"),
        ("ppo.top_p=1.5", "ppo.top_p=1.5: it must be above 0 and at most 1"),
        ("reward_model.label_flip=0.6", "reward_model.label_flip=0.6: it must be from 0 to 0.5"),
        ("mesh.fsdp=0", "mesh.fsdp=0: it must be at least 1, or -1 for the remaining devices"),
        ("model.head_dim=3", "model.head_dim=3: it must be even: rotary positions turn pairs"),
        ("name=../escape", "name='../escape': it must be letters"),
        ("name=", "name='': it must be letters"),
        ("device={platform: gpu, simulated: 2}", "device.simulated=2: it must be null on a gpu"),
        ("stages=[stf]", "stages[0]=stf: it must be one of sft, reward_model, dpo, ppo, grpo, dr_grpo"),
    ],
)
def test_a_wrong_override_is_one_sentence(tmp_path, override, message):
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, "seed: 3"), [override])
    assert sentence(caught.value).startswith(message)


def test_files_that_are_not_configs(tmp_path):
    missing = str(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"none.yaml does not exist: "):
        load_config(missing)
    with pytest.raises(UserError, match=r"is a directory: name a YAML file"):
        load_config(str(tmp_path))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary.yaml cannot be read: not UTF-8 text"):
        load_config(str(binary))
    with pytest.raises(UserError, match=r"must hold `key: value` lines"):
        load_config(write(tmp_path, "- 1\n- 2"))


def test_an_empty_file_is_all_defaults_and_a_byte_order_mark_is_no_key(tmp_path):
    assert load_config(write(tmp_path, "")) == Config()
    assert load_config(write(tmp_path, "\ufeffseed: 3")).seed == 3


def test_names_find_packaged_configs(tmp_path, monkeypatch):
    (tmp_path / "quickstart.yaml").write_text("seed: 11")
    (tmp_path / "pod.yaml").write_text("seed: 12")
    monkeypatch.setattr(config_module, "_packaged", lambda: tmp_path)
    assert config_names() == ["pod", "quickstart"]
    assert load_config("quickstart").seed == 11
    with pytest.raises(UserError, match=r"^config quickstrt does not exist: did you mean quickstart$"):
        load_config("quickstrt")
    with pytest.raises(UserError, match=r"^config configs/pod.yml does not exist: did you mean pod$"):
        load_config("configs/pod.yml")
    with pytest.raises(UserError, match=r"^config zzz does not exist: name a YAML file, or one of pod, quickstart$"):
        load_config("zzz")


def test_every_packaged_config_loads_and_fits_its_own_devices():
    for name in config_names():
        config = load_config(name)
        if config.device.simulated is not None:
            validate(config, config.device.simulated, {"actor": fresh_model(config.model)})


def test_the_resolved_config_reads_back_equal(tmp_path):
    config = load_config(
        write(tmp_path, "run_dir: 'null'\nname: '1e5'\nsft: {learning_rate: 1.2345678901234567e-7}\nstages: [sft]"),
        ["ppo.top_k=5", "ppo.algorithm.dual_clip=3"],
    )
    text = to_yaml(config)
    assert load_config(write(tmp_path, text)) == config
    assert yaml.safe_load(text)["ppo"]["algorithm"]["dual_clip"] == 3.0
    assert list(yaml.safe_load(text)) == [each.name for each in dataclasses.fields(Config)]


def test_flatten_gives_dotted_keys():
    assert flatten(parse_yaml("a: {b: 1, c: {d: null}}\ne: [1, 2]", "x")) == {
        "a.b": "1",
        "a.c.d": "null",
        "e": "[1, 2]",
    }


def test_loading_a_config_starts_no_backend():
    program = (
        "from jrlhf.config.schema import Config; from jrlhf.config.check import validate; "
        "from jrlhf.roles.pretrained import fresh_model; "
        "validate(Config(), 4, {'actor': fresh_model(Config().model)}); from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
