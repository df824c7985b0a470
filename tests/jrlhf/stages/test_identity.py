"""What a run builds on outside its checkpoints: any change is refused, but of reward functions that stopped the run."""

import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from jrlhf import __version__
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig
from jrlhf.models.config.rope import RopeScaling
from jrlhf.rewards.user_code import imported_modules
from jrlhf.run.directory import RunDirectory
from jrlhf.stages.identity import FAILURES, Identity, note_failure, numbers

MODEL = ModelConfig(vocab_size=64, embed=16, layers=2, heads=2, kv_heads=2, head_dim=8, mlp=32, max_positions=32)
FUNCTIONS = frozenset({"reward mine", "cost other"})


def test_every_number_of_a_model_is_part_of_its_words():
    others = {"rope_scaling": RopeScaling("linear", 2.0), "local_layers": (True, False), "window": 4}
    words, changed = numbers("actor", MODEL), 0
    for item in fields(ModelConfig):
        value = getattr(MODEL, item.name)
        numeric = {bool: lambda x: not x, int: lambda x: 2 * x, float: lambda x: x / 2}.get(type(value), lambda x: 0.5)
        names = {"activation": "gelu_tanh", "norm": "layer", "positions": "learned"}
        other = others.get(item.name) or names.get(item.name) or numeric(value)
        needs = {"window": 4} if item.name in ("local_layers", "local_rope_theta") else {}
        try:
            model = replace(MODEL, **needs, **{item.name: other}) if item.name not in needs else MODEL
        except ValueError:  # a number that depends on another
            continue
        assert numbers("actor", model) != words, item.name
        changed += 1
    assert changed > 20 and words["actor.vocab_size"] == "64" and "actor.norm_eps" not in words


def test_any_other_word_is_refused_but_of_a_function_that_stopped_the_run(tmp_path):
    draw = random.Random(0)
    shared = {f"actor.{name}": name for name in "abc"} | {"reward mine modules": "m", "sizes": "2"}
    stage = {"corpus": "c", "reward mine": "f", "cost other": "o"}
    for number in range(100):
        run, accepts = RunDirectory(tmp_path / str(number)), draw.random() < 0.3
        run.path.mkdir()
        here = Identity(shared, FUNCTIONS, accepts).of_stage(stage)
        there, changed = dict(here), draw.sample(sorted(here.keys() - {"jrlhf"}), draw.choice((0, 1, 1, 2)))
        for key in changed:
            there[key] = "was"
            if draw.random() < 0.3:
                del there[key]
        stopped = draw.random() < 0.5
        failed = {key: there[key] for key in ("reward mine", "reward mine modules") if key in there}
        if stopped:
            note_failure(run, failed, "failed")
        elif "reward mine" in there:  # an earlier version of the function stopped the run, not this one
            note_failure(run, failed | {draw.choice(sorted(failed)): "earlier"}, "failed")
        mended = {"reward mine", "reward mine modules"} if stopped and "reward mine" in there else set()
        mended |= {"reward mine", "reward mine modules", "cost other"} if accepts else set()
        try:
            Identity(shared, FUNCTIONS, accepts).compare(run, "ppo", there, here)
        except UserError as error:
            assert set(changed) - mended and any(f"made with another {key} (" in str(error) for key in changed)
        else:
            assert set(changed) <= mended and len(run.changes) == len(changed)


def test_a_function_that_changed_after_the_last_step_is_for_a_new_run(tmp_path):
    """It would judge a model that never learnt from it. One that stopped the run, in its last answers, is mended."""
    words = {"sizes": "2", "reward mine": "new", "reward mine modules": "m"}
    there = Identity(words, FUNCTIONS).of_stage({"corpus": "c", "reward mine": "was"})
    for accepts in (False, True):
        identity = Identity(words, FUNCTIONS, accepts)
        here = identity.of_stage({"corpus": "c", "reward mine": "new"})
        run = RunDirectory(tmp_path / f"{accepts}")
        run.path.mkdir()

        def check(ended: bool, identity=identity, run=run, here=here) -> None:
            identity.check_known(run.path, "ppo", {**there, "records": "r"}, FUNCTIONS, ended=ended)  # before work
            assert run.changes == []
            identity.compare(run, "ppo", there, here, ended=ended)

        with pytest.raises(UserError, match=r"another reward mine \(was there, new here\): .* in a new run.* name="):
            check(ended=True)
        if accepts:
            check(ended=False)
            assert run.changes == ["with another reward mine (was there, new here)"]
            run.changes = []
        else:
            with pytest.raises(UserError, match="--accept-rewards"):
                check(ended=False)
        note_failure(run, {"reward mine": "was", "reward mine modules": "m"}, "failed")
        check(ended=True)
        assert run.changes == ["with another reward mine (was there, new here)"]


def test_before_other_work_all_words_are_compared_that_are_known(tmp_path):
    identity = Identity({"sizes": "2", "corpus": "c", "reward mine": "f", "cost other": "o"}, FUNCTIONS)
    good = identity.of_stage({"reward mine": "f", "cost other": "o"}) | {"reference": "r", "records": {}}

    def check(stage: str, there: dict, functions=frozenset[str]()) -> None:
        identity.check_known(tmp_path, stage, there, functions, ended=True)

    check("ppo", good, FUNCTIONS)
    for word in ("sizes", "corpus", "reward mine", "cost other"):
        for there in (good | {word: "was"}, {key: value for key, value in good.items() if key != word}):
            with pytest.raises(UserError, match=f"another {word} "):
                check("ppo", there, FUNCTIONS)
    check("sft", identity.of_stage({"start": "s"}))  # which calls no function
    with pytest.raises(UserError, match="another corpus"):
        check("sft", identity.of_stage({"start": "s"}) | {"corpus": "was"})
    check("ppo", {}, FUNCTIONS)  # of a damaged checkpoint


def test_a_stage_records_the_modules_of_the_functions_that_it_calls():
    identity = Identity({"sizes": "2", "reward mine modules": "m"}, FUNCTIONS)
    assert "reward mine modules" in identity.of_stage({"reward mine": "f"})
    assert identity.of_stage({"corpus": "c"}).keys() == {"jrlhf", "sizes", "corpus"}


def test_a_difference_names_the_versions_that_wrote_and_read_the_checkpoint(tmp_path):
    run, identity = RunDirectory(tmp_path), Identity({"corpus": "c"}, FUNCTIONS)
    here = identity.of_stage({"start": "s"})
    identity.compare(run, "sft", here | {"jrlhf": "0.0.1"}, here)
    versions = f"another corpus \\(d there, c here\\), by jrlhf 0.0.1, and this is {__version__}: "
    with pytest.raises(UserError, match=versions):
        identity.compare(run, "sft", here | {"corpus": "d", "jrlhf": "0.0.1"}, here)
    with pytest.raises(UserError, match=r"another corpus \(d there, c here\): "):
        identity.compare(run, "sft", here | {"corpus": "d"}, here)
    with pytest.raises(UserError, match=f"is of a jrlhf that recorded no version, and this is {__version__}: resume"):
        identity.compare(run, "sft", {"identity": "1", "corpus": "c", "start": "s"}, here)
    identity.compare(run, "sft", {}, here)  # of a damaged checkpoint


def test_what_a_reward_file_imports_is_found(tmp_path, monkeypatch):
    files = {
        "main.py": "import os, numpy, helper\nfrom package.inner import f\n\ndef score():\n    import late\n",
        "helper.py": "import other_helper as o\nfrom jrlhf.errors import UserError\n",
        "other_helper.py": "import helper\nimport absent\n",
        "late.py": "",
        "unused.py": "",
        "package/__init__.py": "",
        "package/inner.py": "from . import sibling\nfrom .sibling import g\nfrom ..package import cousin\n",
        "package/sibling.py": "g = f = 1\n",
        "package/cousin.py": "x = (\n",
    }
    for name, text in files.items():
        Path(tmp_path / name).parent.mkdir(exist_ok=True)
        Path(tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    modules = imported_modules(str(tmp_path / "main.py"))
    inner = {"package", "package.inner", "package.sibling", "package.cousin"}
    assert modules.keys() == {"helper", "other_helper", "late"} | inner
    for name in ("helper.py", "other_helper.py", "late.py", "package/sibling.py", "unused.py"):
        (tmp_path / name).write_text(files[name] + "# changed\n")
        assert (imported_modules(str(tmp_path / "main.py")) != modules) == (name != "unused.py"), name
        (tmp_path / name).write_text(files[name])


def test_a_torn_record_of_a_failure_does_not_take_the_next_one_along(tmp_path):
    run, here = RunDirectory(tmp_path), {"reward mine": "mended"}
    for word in ("first", "second"):
        note_failure(run, {"reward mine": word}, "failed")
        with open(tmp_path / FAILURES, "ab") as file:
            file.write(b'{"reward mine": "th')  # a kill in the middle of a line
        Identity(functions=FUNCTIONS).compare(run, "ppo", {"reward mine": word}, here)
    assert len(run.changes) == 2
