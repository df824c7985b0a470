"""Loading of configs: all that a user can write, and the sentences on mistakes."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from jrlhf.config import (
    Config,
    build,
    config_names,
    config_yaml,
    load,
    load_config,
    make_config,
    settings_of,
    validate,
)
from jrlhf.config.keys import flatten
from jrlhf.config.parse import Feature, parse_yaml
from jrlhf.config.parse import override as put
from jrlhf.config.schema import DatasetConfig, DatasetsData, LoRASection
from jrlhf.errors import UserError
from jrlhf.ppo.fields import Section, checked, count
from jrlhf.roles.pretrained import fresh_model
from tools.config_reference import reference_table


@dataclass(frozen=True)
class Inner(Section):
    rate: float = 0.5
    steps: int = count(3)
    limit: float | None = None
    key: int = field(default=7, metadata={"from": "seed"})


@dataclass(frozen=True)
class Extra(Feature):
    SWITCHES = ("size",)
    OFF = "{path}.size=null"
    size: int | None = None
    colour: str = "red"


@dataclass(frozen=True)
class A(Section):
    source: Literal["a"] = "a"
    x: int = 1


@dataclass(frozen=True)
class B(Section):
    source: Literal["b"] = "b"
    y: int = 1

    @classmethod
    def unread(cls, key: str, value: object, chosen: str) -> str:
        return f"{key}={value} has no effect with {chosen}"


@dataclass(frozen=True)
class Outer(Section):
    needed: str = "a"
    kind: Literal["fast", "exact"] = "exact"
    flag: bool = False
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1,)
    label: str | None = None
    even: int = checked(2, lambda value: value % 2 == 0, "even")
    inner: Inner = Inner()
    extra: Extra | None = None
    data: A | B = A()


def outer(text: str) -> Outer:
    return build(Outer, parse_yaml(text, "test.yaml"))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_scalar_is_read_by_the_type_of_its_field():
    read = outer(
        """
        needed: 007
        kind: fast
        flag: TRUE
        names: [on, 1.0, "null", 2026-11-20]
        sizes: [010, +3, 1_000]
        label: yes
        inner: {rate: 1e-5, steps: 4, limit: 3}
        extra: {size: 2}
        data: {source: b, y: 3, x: 1}
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
        extra=Extra(2),
        data=B(y=3),
    )
    assert type(read.inner.limit) is float and type(read.needed) is str
    assert outer("label: null").label is None and outer("label: ").label is None
    assert outer("label: 'null'").label == "null" and outer("inner: ").inner == Inner()
    assert outer("extra: {size: null, colour: red}").extra is None  # a feature that is off has no section
    for value in ("!!python/object/apply:os.getcwd []", "!!int '3'", "!mine {b: 1}"):
        with pytest.raises(UserError, match=r"^test.yaml, line 1, column 4: not valid YAML: tags \(.+\) are not read"):
            parse_yaml(f"a: {value}", "test.yaml")


def test_python_values_are_accepted_where_their_type_fits():
    values = {"needed": "a", "flag": True, "sizes": (1, 2), "inner": {"rate": 1, "steps": 2.0}}
    assert build(Outer, values) == Outer(flag=True, sizes=(1, 2), inner=Inner(rate=1.0, steps=2))
    for values, message in (
        ({"steps": True}, "steps=True: it must be a whole number"),
        ({"rate": False}, "rate=False: it must be a finite number"),
    ):
        with pytest.raises(UserError, match=message):
            build(Inner, values)
    with pytest.raises(ValueError, match=r"^steps=0: it must be at least 1$"):
        Inner(steps=0)
    with pytest.raises(ValueError, match=r"^kind='slow': it must be one of fast, exact$"):
        Outer(kind="slow")  # pyright: ignore[reportArgumentType]


MISTAKES = {
    "{knd: fast}": "knd is not a known key: did you mean kind?",
    "{steps: 2}": "steps is not a known key: did you mean inner.steps?",
    "{inner: {stepz: 2}}": "inner.stepz is not a known key: did you mean inner.steps?",
    "{inner: {zzz: 2}}": "inner.zzz is not a known key: known are rate, steps, limit",
    "{inner: 3}": "inner=3: it is a section, write inner.KEY=VALUE for one of rate, steps, limit",
    "{inner: {steps: 0}}": "inner.steps=0: it must be at least 1",
    "{inner: {flag: true}}": "inner.flag is not a known key: did you mean flag, at the top level?",
    "{inner: {colour: blue}}": "inner.colour is not a known key: did you mean extra.colour?",
    "{inner: {stepz: {}}}": "inner.stepz is not a known key: known are rate, steps, limit",
    "{outer: {colour: blue}}": "outer is not a known key: did you mean extra.colour?",
    "{inner: {key: 1}}": "inner.key is not a known key: the run's seed is used, set that",
    "{inner: {rate: abc}}": "inner.rate=abc: it must be a finite number",
    "{inner: {rate: nan}}": "inner.rate=nan: it must be a finite number",
    "{flag: null}": "flag has no value: give it one, or leave the key out for its default",
    "{kind: FAST}": "kind=FAST: it must be one of fast, exact, did you mean fast",
    "{kind: fst}": "kind=fst: it must be one of fast, exact, did you mean fast",
    "{flag: 1}": "flag=1: it must be true or false",
    "{even: 3}": "even=3: it must be even",
    "{even: 2.5}": "even=2.5: it must be a whole number",
    "{even: 1e3}": "even=1e3: it must be a whole number, write 1000",
    "{even: 1e999}": "even=1e999: it must be a whole number",
    "{even: [2]}": "even=[2]: it must be a whole number",
    "{names: {b: 1}}": "names={b: 1}: it must be a list, write [{b: 1}]",
    "{sizes: [1, x]}": "sizes[1]=x: it must be a whole number",
    "{needed: {a: 1}}": "needed={a: 1}: it must be text",
    "{extra: {colour: blue}}": "extra.colour=blue has no effect with extra.size=null: leave it out",
    "{data: {source: c}}": "data.source=c: it must be one of a, b",
    "{data: {y: 2}}": "data.y=2 has no effect with data.source=a",
    "{data: {z: 2}}": "data.z is not a known key: known are source, x",
    "{needed: a, needed: b}": "test.yaml, line 1: needed is given twice, keep one",
    "needed: a\ninner:\n  steps: 1\n  steps: 2": "test.yaml, line 4: steps is given twice, keep one",
    "{[1]: 2}": "test.yaml, line 1: a key must be a word",
}
NO_YAML = {  # the beginning of the sentence
    "a: b: c": "test.yaml, line 1, column 5: not valid YAML",
    "a: [1": "test.yaml, line 1",
    "a:\n\tb: 2": "test.yaml, line 2, column 1: not valid YAML: found character '\\t' that cannot start any token,",
    "a: 1\n---\nb: 2": "test.yaml, line 2",
    "a: &x [1]\nb: *x": "test.yaml, line 2, column 4: not valid YAML: aliases are not read, write the value out",
    "a: \x01": "test.yaml: not valid YAML: special characters are not allowed",
    "[" * 5000: "test.yaml",
}


def test_a_mistake_is_one_sentence_with_key_value_and_remedy():
    for text, message in (MISTAKES | NO_YAML).items():
        with pytest.raises(UserError) as caught:
            outer(text)
        sentence = str(caught.value)
        assert sentence == message or (text in NO_YAML and sentence.startswith(message)), (text[:80], sentence)
        assert "\n" not in sentence


def test_overrides_take_the_same_path(tmp_path):
    path = write(tmp_path, "name: base\nppo: {iterations: 7}\n")
    overrides = ["name=007", "ppo.actor.learning_rate=3e-6", "--seed=5", "ppo.algorithm.kl_target=null"]
    overrides += ["mesh={fsdp: 2}", "mesh.tensor=4", "run_dir=a=b: #c", "device.simulated=8", "lora.rank=4"]
    config = load_config(path, [*overrides, "sft.steps=1", "sft.steps=2"])  # the last one wins, as on a command line
    assert config.name == "007" and config.seed == 5 and config.sft.steps == 2 and config.lora == LoRASection(rank=4)
    assert config.rl.actor.learning_rate == 3e-6 and config.rl.iterations == 7
    assert config.rl.algorithm.kl_target is None and config.device.simulated == 8
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (1, 2, 4) and config.run_dir == "a=b: #c"


OVERRIDES = {
    "seed": "override 'seed' is not understood: write key=value, for example seed=1",
    "ppo..x=1": "override 'ppo..x=1' is not understood: write key=value, for example seed=1",
    "seed.x=1": "override 'seed.x=1': seed=3 is no section, it has no x",
    "model={embed.x: 1}": "model.embed.x is not a known key: did you mean model.embed?",
    "ppo={actor.warmup: 3}": "ppo.actor.warmup: dots in keys are not read here, write {actor: {warmup: 3}}",
    "seed=": "seed has no value: give it one, or leave the key out for its default",
    "seed=-1": "seed=-1: it must be from 0 to 4294967295",
    "learning_rate=1": "learning_rate is not a known key: did you mean sft.learning_rate",
    "data={source: datasets, prompt: {path: a}}": "data.prompt is not a known key: did you mean data.prompts?",
    "rewards[0].weight=2": "override 'rewards[0].weight=2': rewards is a list of 0 part(s), numbered from 0: name",
    "rewards.weight=2": "rewards={weight: 2}: it must be a list, write [{weight: 2}]",
    "data.prompts.0.weight=2": "override 'data.prompts.0.weight=2': data.prompts is a list of 0 part(s), numbered",
    "data={source: datasets, prompts: [a]}": "data.prompts[0]=a: it is a section, write data.prompts=[{KEY: VALUE}]",
    "data={source: datasets, prompts: [{path: a, weight: 0}]}": "data.prompts[0].weight=0.0: it must be above 0 and",
    "data={source: datasets, prompts: [{path: a, name: b c}]}": "data.prompts[0].name='b c': it must be a word of at",
    "data={source: datasets, prompts: [{path: a, wieght: 2}]}": "data.prompts[0].wieght is not a known key: did you",
    "data.prompts=[{path: x}]": "data.prompts[0].path=x is not read by the built-in task: set data.source=datasets",
    "rewards.0.weight=2": "override 'rewards.0.weight=2': rewards is a list of 0 part(s), numbered from 0: name a key",
    "sft.learning_rate=-1": "sft.learning_rate=-1.0: it must be at least 0 and finite",
    "sft.steps=[1": "sft.steps, line 1",
    "sft.steps=2147483648": "sft.steps=2147483648: it must be at most 2147483647",
    "model.layers=100000000": "model.layers=100000000: it must be at most 10000",
    "model.path=https://host/m": "model.path='https://host/m': it must be a path on this machine, a hub name such as",
    "run_dir=ftp://host/runs": "run_dir='ftp://host/runs': it must be a path on this machine, s3://BUCKET/PREFIX or gs",
    "run_dir=~nobody-of-this-name/x": "run_dir='~nobody-of-this-name/x': it must be a path on this machine, s3://",
    "run_dir=s3://bucket/../x": "run_dir='s3://bucket/../x': it must be a path on this machine, s3://BUCKET/PREFIX or",
    "run_dir=a\0b": "run_dir='a\\x00b': it must be text, without NUL",
    "run_dir=\ud800": "run_dir='\\ud800': it must be text, without NUL and halves of surrogate pairs",
    f"model.path={'x' * 300}": "model.path='xxx",
    "ppo.algorithm.clip_low=7": "ppo.algorithm.clip_low=7.0: it must be in (0, 1]",
    "ppo.algorithm.seed=1": "ppo.algorithm.seed is not a known key: the run's seed is used, set that",
    "sampling.temperature=0": "sampling.temperature=0.0: it must be above 0 and finite",
    "data.annotator={prompts: 1, foreign_lines: 2}": "data.annotator.foreign_lines=2: it must be 0 with a single",
    "mesh.fsdp=0": "mesh.fsdp=0: it must be at least 1, or -1 for the remaining devices",
    "model.head_dim=3": "model.head_dim=3: it must be even: rotary positions turn pairs",
    "name=../escape": "name='../escape': it must be letters",
    f"name={'x' * 256}": "name='xxx",
    f"rewards=[{{name: {'ü' * 123}, function: f}}]": "rewards[0].name='üüü",
    "device={platform: gpu, simulated: 2}": "device.simulated=2: it must be null on a gpu",
    "stages=[stf]": "stages[0]=stf: it must be one of sft, reward_model, dpo, ppo, grpo, dr_grpo",
    "lora={rank: 4, path: p}": "lora.rank=4: it must be null with path=p, whose adapter has its own rank",
    "lora={rank: 4, targets: all-linear}": "lora.targets=all-linear: it must be a list of q_proj, k_proj, v_proj,",
    "rewards=[my.py:f]": "rewards[0]=my.py:f: it is a section, write rewards=[{KEY: VALUE}] for one of name, model,",
    "lora.alpha=4": "lora.alpha=4.0 has no effect with lora.rank=null: leave it out",
    "sleep.ahead=true": "sleep.ahead=True has no effect with nothing asleep: leave it out",
    "validation.k=2": "validation.k=2 has no effect with validation.every=null: leave it out",
    "data.sft.path=x": "data.sft.path=x is not read by the built-in task: set data.source=datasets",
    "data.sft.split=x": "data.sft.split=x has no effect with data.sft.path=null: leave it out",
    "data.heldout_rows=0": "data.heldout_rows=0 has no effect with data.source=docstrings: leave it out",
    "data={source: datasets, prompts: {columns: {prompt: q}}}": "data.prompts.columns.prompt=q has no effect with",
    "dpo.steps=9": "section dpo has no effect with stages=[sft, reward_model, ppo]: leave it out",
}


def test_a_wrong_override_is_one_sentence(tmp_path):
    for override, message in OVERRIDES.items():
        with pytest.raises(UserError) as caught:
            load_config(write(tmp_path, "seed: 3"), [override])
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value), (override, str(caught.value))


def test_prompts_are_a_dataset_or_a_list_of_them(tmp_path):
    path = write(tmp_path, "stages: [grpo]\ndata: {source: datasets, prompts: [{path: a/x.jsonl}, {path: 'm/y:main'}]}")
    data: Any = load_config(path, ["data.prompts.1.weight=2", "data.prompts[1].columns.prompt=q"]).data
    assert [(source.called, source.weight, source.columns.prompt) for source in data.prompts] == [
        ("x", 1.0, None),
        ("y-main", 2.0, "q"),
    ]
    config = load_config(path, ["data.prompts=[{path: b.jsonl, name: c.d}]"])
    assert build(Config, yaml.safe_load(config_yaml(config))) == config
    assert [part.called for part in vars(config.data)["prompts"]] == ["c.d"]
    alone: Any = load_config(path, ["data.prompts={path: b.jsonl}"]).data
    assert alone.prompts == DatasetConfig(path="b.jsonl") and alone.datasets == {"prompts": alone.prompts}


def test_a_part_of_a_list_is_set_by_its_number(tmp_path):
    path = write(tmp_path, "rewards: [{name: a, function: exact_match}, {name: b, function: 'f.py:g'}]")
    parts = ["rewards.0.weight=2", "rewards[1].function=h.py:k", "rewards.1.options.depth=3"]
    first, second = load_config(path, parts).rewards
    assert (first.name, first.weight, first.function) == ("a", 2.0, "exact_match")
    assert (second.function, second.options) == ("h.py:k", {"depth": 3})
    whole = load_config(path, ["rewards=[{name: c, function: word_count}]", "rewards.0.name=d"]).rewards
    assert [(part.name, part.function) for part in whole] == [("d", "word_count")]
    for wrong in ("rewards.2.weight=1", "rewards.weight=1", "rewards[x].weight=1", "rewards.0=1"):
        with pytest.raises(UserError, match=r"rewards is a list of 2 part\(s\), numbered .* as in rewards\.0\."):
            load_config(path, [wrong])


def test_a_command_line_removes_a_stages_section(tmp_path):
    path = write(tmp_path, "stages: [sft, ppo]\nppo: {iterations: 3}\nrewards: [{name: a, function: exact_match}]")
    with pytest.raises(UserError, match=r"section ppo has no effect .*: leave it out \(ppo=null on a command line\)"):
        load_config(path, ["stages=[sft, grpo]"])
    assert load_config(path, ["stages=[sft, grpo]", "ppo=null"]).stages == ("sft", "grpo")
    assert load_config(path, ["ppo=null"]).rl.iterations == load_config(path, ["ppo={}"]).rl.iterations != 3


MINE = "stages: [sft, mine]\nmine: {dataflow: d.py:f, iterations: 20, actor: {learning_rate: 1.0e-5}}\n"
OF_ONES_OWN = {  # settings in a file with MINE -> the sentence, or its beginning
    "stages=[sft, mien]": "stages[1]=mien: it must be one of sft, reward_model, dpo, ppo, grpo",
    "stages=[sft, yours]": "stages[1]=yours: it must be one of sft, reward_model, dpo, ppo, grpo",
    "stages=[sft, grpo]": "section mine has no effect with stages=[sft, grpo]: name it there, or leave it out (mine",
    "mine=null": "stages[1]=mine: it must be one of sft, reward_model, dpo, ppo, grpo",
    "mine.dataflow=null": "stages[1]=mine is a stage of your own without a function: set mine.dataflow",
    "mine.itertions=3": "mine.itertions is not a known key: did you mean mine.iterations?",
    "mine.learning_rate=3": "mine.learning_rate is not a known key: did you mean mine.actor.learning_rate?",
    "mine.rollout_batch=0": "mine.rollout_batch=0: it must be at least 1",
    "mine=3": "mine=3: it is a section, write mine.KEY=VALUE for one of dataflow, iterations",
    "mine.critic.warmup=1": "mine.critic is not a known key: it is a setting of ppo, safe_rlhf only",
    "yours.iterations=3": "yours is not a known key: did you mean",
    "stages=[class] ; class.dataflow=d.py:f": "stages[0]=class: a stage of your own needs a name of letters, digits",
    "stages=[a-b] ; a-b.dataflow=d.py:f": "stages[0]=a-b: a stage of your own needs a name of letters, digits and '_'",
    "stages=[model] ; mine=null": "stages[0]=model is no stage but another key of the config: name one of sft, reward",
    "stages=[grpoo] ; mine=null ; grpoo.iterations=3": "stages[0]=grpoo is a stage of your own without a function: set "
    "grpoo.dataflow, did you mean grpo",
    "stages=[grpo] ; mine=null ; grpoo.iterations=3": "grpoo is not a known key: did you mean grpo.iterations",
}


def test_a_stage_of_ones_own_has_a_section_of_its_name(tmp_path):
    path = write(tmp_path, MINE)
    config = load_config(path, ["mine.iterations=3", "mine.asynchronous.staleness=2", "mine.algorithm.samples=2"])
    assert (config.algorithm, config.rl.iterations, config.rl.dataflow, config.samples) == ("mine", 3, "d.py:f", 2)
    assert config.asynchronous is not None and config.length("mine") == 3 and config.checkpoints.best_in("mine") is None
    assert build(Config, yaml.safe_load(config_yaml(config))) == config
    assert build(Config, yaml.safe_load(config_yaml(config, defaults=False))) == config
    assert make_config(path, {"mine": {"iterations": 3}, "mine.algorithm": {"samples": 2}}).rl.iterations == 3
    assert load_config(path, ["stages=[sft]"]).algorithm is None  # a run of its first stages
    for other in (
        load_config(path, ["stages=[sft, grpo]", "mine=null"]),
        make_config(path, {"stages": [], "mine": None}),
    ):
        assert "mine" not in other.sections
    assert load_config(path, ["stages=mine"]).stages == ("mine",)


def test_a_mistake_in_a_stage_of_ones_own_is_one_sentence(tmp_path):
    path = write(tmp_path, MINE)
    for overrides, message in OF_ONES_OWN.items():
        with pytest.raises(UserError) as caught:
            load_config(path, overrides.split(" ; "))
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value), (overrides, str(caught.value))
    for overrides, end in (
        ("stages=[sft, mien]", ", did you mean mine"),
        ("mine=null", "mine={dataflow: FILE.py:FUNCTION}"),
    ):
        with pytest.raises(UserError, match=f"{end}$"):
            load_config(path, [overrides])


def test_a_role_is_a_path_or_a_section_with_one(tmp_path):
    settings = "roles.reference=a", "roles.reference.path=a", "roles.reference={path: a}"
    plain, *others = (load_config(write(tmp_path, "stages: [ppo]"), [setting]) for setting in settings)
    assert plain.roles.reference == "a" and all(other == plain for other in others)
    for form in ("a", "{path: a}"):
        path = write(tmp_path, f"stages: [ppo]\nroles: {{reference: {form}, critic: {form}}}")
        config = load_config(path)
        assert config.roles.paths == {"critic": "a", "reference": "a"} and "critic: a\n" in config_yaml(config)
        for changed in (load_config(path, ["roles.critic.path=b"]), load_config(path, ["roles.critic=b"])):
            assert changed.roles.paths == {"critic": "b", "reference": "a"}
        changes: list[Any] = [{"roles": {"critic": {"path": "b"}}}, {"roles.critic.path": "b"}, {"roles.critic": "b"}]
        assert all(make_config(path, change).roles.critic == "b" for change in changes)
        for off in ("roles.critic=null", "roles.critic.path=null"):
            assert load_config(path, [off]).roles.critic is None
    for wrong, message in {
        "roles.critic.pth=a": "roles.critic.pth is not a known key: did you mean roles.critic.path?",
        "roles.critic.path=x://a": "roles.critic='x://a': it must be a path on this machine",
        "roles.critc=a": "roles.critc is not a known key: did you mean roles.critic?",
        "roles.teacher=a": "roles.teacher=a: it is a section, write roles.teacher.path=a",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            load_config(write(tmp_path, "stages: [ppo]"), [wrong])


def test_settings_in_a_text_are_words_of_a_shell():
    text = """sft.steps=20 data.system="Be brief = good." 'stages=[sft, grpo]' plan=a=b"""
    settings = settings_of(text)
    assert settings == {"sft.steps": "20", "data.system": "Be brief = good.", "stages": "[sft, grpo]", "plan": "a=b"}
    rewards = "rewards='[{name: a, function: exact_match}]'"
    config = make_config({"model": {"path": "m"}, "data": {"source": "datasets"}}, settings_of(f"{text} {rewards}"))
    assert config.stages == ("sft", "grpo") and config.sft.steps == 20 and config.rewards[0].name == "a"
    assert isinstance(config.data, DatasetsData) and config.data.system == "Be brief = good."
    assert settings_of(" ") == {}
    with pytest.raises(UserError, match="'brief' in the settings .* is not key=value: put a value with blanks in"):
        settings_of("data.system=Be brief")
    with pytest.raises(UserError, match="No closing quotation"):
        settings_of("data.system='Be brief")


def test_a_command_line_switches_a_feature_of_the_file_off(tmp_path):
    path = write(
        tmp_path,
        "validation: {every: 4, k: 2}\nprofile: {iterations: [3], stage: ppo}\nlora: {rank: 4, targets: [other]}\n"
        "sleep: {optimizer: host, ahead: true}",
    )
    switched = ["validation.every=null", "profile.iterations=[]", "lora.rank=null", "sleep.optimizer=device"]
    off = load_config(path, switched)
    assert (off.validation, off.profile, off.lora, off.sleep) == (None, None, None, None)
    named = load_config(path, [*switched, "wandb.project={a}"]).wandb
    assert named is not None and named.project == "{a}"  # an override of a text is taken as it is
    with pytest.raises(UserError, match="validation.k=3 has no effect with validation.every=null: leave it out"):
        load_config(path, [*switched, "validation.k=3"])


def test_files_and_names_that_are_not_configs(tmp_path, monkeypatch):
    (tmp_path / "quickstart.yaml").write_text("seed: 11")
    (tmp_path / "pod.yaml").write_text("seed: 12")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.txt").write_text("- 1\n- 2")
    monkeypatch.setattr(load, "_packaged", lambda: tmp_path)
    assert config_names() == ["pod", "quickstart"] and load_config("quickstart").seed == 11
    for name, message in {
        str(tmp_path / "none.yaml"): "none.yaml does not exist: ",
        str(tmp_path): "is a directory: name a YAML file",
        "/dev/null": "config /dev/null is no regular file: name a YAML file",
        str(tmp_path / "binary.txt"): "binary.txt cannot be read: not UTF-8 text",
        str(tmp_path / "list.txt"): "must hold `key: value` lines",
        "quickstrt": "config quickstrt does not exist: did you mean quickstart",
        "configs/pod.yml": "config configs/pod.yml does not exist: did you mean pod",
        "zzz": "config zzz does not exist: name a YAML file, or one of pod, quickstart",
    }.items():
        with pytest.raises(UserError) as caught:
            load_config(name)
        assert message in str(caught.value)


def test_every_packaged_config_fits_its_own_devices_and_tells_nothing():
    for name in config_names():
        config = load_config(name)
        assert config.notices == ()
        if config.device.simulated is not None:
            validate(config, config.device.simulated, {"actor": fresh_model(config.model)})


def test_the_resolved_config_reads_back_equal_and_has_the_sections_in_use(tmp_path):
    text = "run_dir: 'null'\nname: '1e5'\nsft: {learning_rate: 1.2345678901234567e-7}\nstages: [sft]"
    config = load_config(write(tmp_path, text), ["sampling.top_k=5"])
    resolved = config_yaml(config)
    assert load_config(write(tmp_path, resolved)) == config
    sections = set(yaml.safe_load(resolved))
    assert "sft" in sections and not {"reward_model", "ppo", "grpo", "lora", "sleep", "wandb", "validation"} & sections
    assert load_config(write(tmp_path, "name: run")) == Config() == Config(lora=LoRASection())  # all defaults
    for empty in ("", "# nothing", "{}", "null"):
        assert load_config(write(tmp_path, empty), ["stages=[sft]"]).stages == ("sft",)
        with pytest.raises(UserError, match="is empty: name the run's stages"):
            load_config(write(tmp_path, empty), ["seed=1"])
    assert load_config(write(tmp_path, "\ufeffseed: 3")).seed == 3  # a byte order mark is no key
    assert flatten(parse_yaml("a: {b: 1, c: {d: null}}\ne: [1, 2]", "x")) == {
        "a.b": "1",
        "a.c.d": "null",
        "e": "[1, 2]",
    }


def test_settings_that_are_not_the_defaults_read_back_to_the_same_config(tmp_path):
    overrides = ["lora.rank=4", "rewards=[{function: exact_match}]", "grpo.asynchronous={staleness: 2}"]
    for name, changes in (*((name, []) for name in config_names()), ("arithmetic-grpo", overrides)):
        config = load_config(name, changes)
        short = config_yaml(config, defaults=False)
        assert load_config(write(tmp_path, short)) == config
        assert len(short.splitlines()) < len(config_yaml(config).splitlines()) / 2
        if name not in ("quickstart-safe", "arithmetic-grpo"):
            continue
        for key, value in flatten(parse_yaml(short, name)).items():  # nothing may be left out
            rest = [f"{other}={given}" for other, given in flatten(parse_yaml(short, name)).items() if other != key]
            tag = key in ("data.source", "name") or value == "{}"
            assert tag or not same(config, rest), (name, key)


def same(config: Config, assignments: list[str]) -> bool:
    mapping: dict = {}
    for assignment in assignments:
        put(mapping, assignment)
    try:
        return build(Config, mapping) == config
    except UserError:
        return False


def test_a_run_is_called_as_its_file(tmp_path):
    for file, name in (
        ("mine.yaml", "mine"),
        ("my file (2).yaml", "my-file--2-"),
        (".yaml", "yaml"),
        ("??.yml", "run"),
    ):
        path = tmp_path / file
        path.write_text("seed: 1")
        assert load_config(str(path)).name == name
        assert load_config(str(path), ["name=other"]).name == "other"


def test_every_setting_is_described():
    table = reference_table()
    assert "|  |" not in table and "| `kl_horizon` | `10000.0` | Time constant" in table and "## data.sft" in table


def test_a_section_of_a_stage_that_is_left_out_is_told(tmp_path):
    unused = load_config(write(tmp_path, "stages: [sft, ppo]\nreward_model: {steps: 9}"))
    assert unused.notices == ("section reward_model has no effect with stages=[sft, ppo]",)
