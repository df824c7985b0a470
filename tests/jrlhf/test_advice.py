"""What the program tells users to type exists and works: commands, options, settings, extras.

The sentences are collected from the sources, so that a new one is tested, too.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jrlhf import __main__
from jrlhf.config import Config, load_config
from jrlhf.config.keys import classes_of, kinds_of
from jrlhf.config.stages import STAGES
from jrlhf.run.console import Console
from jrlhf.run.directory import check_run, open_run
from tests.support.hub import serving
from tests.support.runs import ROOT

FOLDERS = ("jrlhf", "models", "ppo", "meshes", "kernels")
_COMMAND = re.compile(r"(?:python -m jrlhf\.\w+|jrlhf init)(?: (?:--?[a-z][\w-]*|\{\}\S*|[A-Z]{2}[\w/.]*|\d+x\w+))+")
_OPTION = re.compile(r"(?<![\w/-])--[a-z][\w-]*")
OF_OTHERS = {"--always", "--dirty", "--abbrev", "--head", "--upgrade", "--version", "--help"} | {
    "--xla_cpu_collective_call_terminate_timeout_seconds"
}


def sources() -> Iterator[Path]:
    linked = [ROOT / "jrlhf" / name for name in FOLDERS]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(link in path.parents for link in linked):
                yield path


@cache
def sentences() -> list[tuple[str, str]]:
    """(module, text) of every text in the sources but docstrings; a value that is formatted in is {}."""
    texts = []
    for path in sources():
        tree, parts = ast.parse(path.read_text(encoding="utf-8")), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
                parts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts.update(part for part in node.values if isinstance(part, ast.Constant))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                values = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                texts.append((module, "".join(map(str, values))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                texts.append((module, node.value))
    return texts


@cache
def options_of(command: str) -> set[str]:
    """The options of a command, from its parser's help."""
    module = importlib.import_module(__main__.COMMANDS[command][0])
    with pytest.MonkeyPatch.context() as patch:
        text: list[str] = []
        patch.setattr("argparse.ArgumentParser.print_help", lambda parser, *_: text.append(parser.format_help()))
        with pytest.raises(SystemExit):
            module.cli(["--help"])
    return set(_OPTION.findall(text[0]))


OWN = {module.removesuffix(".__main__"): command for command, (module, _) in __main__.COMMANDS.items()}


def test_every_option_that_is_named_is_one_of_its_command():
    every, checked = set().union(*map(options_of, __main__.COMMANDS)), 0
    for module, text in sentences():
        if " " not in text.strip():  # the definition of an option
            continue
        named = re.findall(r"python -m jrlhf\.(\w+)", text) or re.findall(r"jrlhf (init|train|plan|export)\b", text)
        commands = [{"new_config": "init"}.get(name, name) for name in named]
        own = set().union(*map(options_of, commands)) if commands else every
        if own_command := OWN.get(module.removesuffix(".__main__")):
            own |= options_of(own_command) | (options_of("train") if own_command in ("init", "plan") else set())
        for option in set(_OPTION.findall(text)) - OF_OTHERS:
            assert option in own, f"{module} names {option} in: {text}"
            checked += 1
    assert checked > 40


# Every command that a text of the sources names -> one as a user types it.
TYPED = {
    "jrlhf init {}": "jrlhf init --model Qwen/Qwen2.5-0.5B-Instruct",
    "python -m jrlhf.export RUN --push USER/NAME": "python -m jrlhf.export runs/r --push someone/mine",
    "python -m jrlhf.export {}": "python -m jrlhf.export 'my runs/r'",
    "python -m jrlhf.export {} --push USER/NAME": "python -m jrlhf.export 'my runs/r' --push someone/mine",
    "python -m jrlhf.generate --model MODEL": "python -m jrlhf.generate --model m",
    "python -m jrlhf.generate --model {}": "python -m jrlhf.generate --model 'my runs/r'",
    "python -m jrlhf.plan --config FILE --cluster 8xh100": "python -m jrlhf.plan --config quickstart --cluster 8xh100",
    "python -m jrlhf.plan --config FILE --profile": "python -m jrlhf.plan --config quickstart --profile",
    "python -m jrlhf.train --config FILE": "python -m jrlhf.train --config quickstart",
    "python -m jrlhf.train --config RUN/config.yaml --resume": "python -m jrlhf.train --config r/config.yaml --resume",
    "python -m jrlhf.train --config {}/config.yaml {}": "python -m jrlhf.train --config c.yaml name=a sft.steps=2",
    "python -m jrlhf.train --config {}/config.yaml --resume": "python -m jrlhf.train --config c.yaml --resume",
    "python -m jrlhf.train --config {}{}": "python -m jrlhf.train --config mine.yaml --dry-run",
}


def test_every_command_that_is_named_is_typed_here_and_taken(monkeypatch):
    """Whole: its arguments are parsed. What it does then is replaced; tests of the commands run it."""
    assert {match.rstrip(".") for _, text in sentences() for match in _COMMAND.findall(text)} == TYPED.keys()
    for form, typed in TYPED.items():
        assert set(_OPTION.findall(form)) <= set(_OPTION.findall(typed))
        assert type_in(typed, monkeypatch), typed


def type_in(line: str, monkeypatch) -> list[Any]:
    """The arguments with which a typed command would do its work."""
    words, taken = shlex.split(line), []
    name, *rest = words[1:] if words[0] == "jrlhf" else [words[2].removeprefix("jrlhf."), *words[3:]]
    module = importlib.import_module(__main__.COMMANDS[name][0])
    with monkeypatch.context() as patch:
        if name == "export":  # its work is a closure
            patch.setattr(module, "exit_code", lambda work: taken.append(work) or 0)
        else:
            patch.setattr(module, "_run", taken.append)
        assert module.cli(rest) == 0
    return taken


def test_every_extra_that_is_to_be_installed_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for _, text in sentences() for extra in re.findall(r"jrlhf\[([\w-]+)\]", text)}
    assert named and named <= extras.keys()


def _exists(key: str) -> bool:
    """Whether a dotted key is one of a config's, in any of the sections that may stand there."""
    first, *rest = key.split(".")
    classes = [STAGES[first]] if first in STAGES else list(classes_of(kinds_of(Config).get(first)))
    for name in rest:
        kinds = [kinds_of(section)[name] for section in classes if name in kinds_of(section)]
        if not kinds:
            return False
        classes = [section for kind in kinds for section in classes_of(kind)]
    return True


def test_every_setting_that_is_named_with_its_section_exists():
    sections = "|".join({*kinds_of(Config), *STAGES})
    named = re.compile(rf"(?<![\w./\[-])(?:{sections})(?:\.[a-z_]+)+(?![\w/(])")
    keys = {(module, key) for module, text in sentences() if " " in text for key in named.findall(text)}
    keys -= {("ppo.experience", "rollout.tokens")}  # an array
    assert [(module, key) for module, key in sorted(keys) if not _exists(key)] == [] and len(keys) > 60


ENDS = [  # the stages of a run, and its settings
    ("sft", []),
    ("sft", ["sft.final=1.0", "sft.warmup=1"]),
    ("sft", ["sft.final=1.0", "sft.warmup=700"]),  # a stage as short as this takes a tenth
    ("sft, grpo", []),
    ("ppo", []),
    ("ppo", ["ppo.critic.final=0.5"]),
    ("dpo", []),
    ("sft, reward_model", []),
    ("reward_model", []),
]


def printed(config: Config, capsys) -> dict[str, str]:
    """What a run tells at its end: purpose -> command."""
    capsys.readouterr()
    Console().commands(config)
    return dict(line.partition(": ")[::2] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("stages", "own"), ENDS)
def test_what_a_run_says_at_its_end_is_not_refused(stages, own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"stages: [{stages}]\n")
    config = load_config("mine.yaml", [*own, "run_dir=my runs", "name=r"])
    open_run(config).close()
    commands = printed(config, capsys)
    if stages == "reward_model":
        ((purpose, setting),) = commands.items()
        assert "in a config" in purpose and setting == "rewards: [{model: my runs/r/reward_model}]"
        return
    assert type_in(commands.pop("to talk to it"), monkeypatch)[0].model == "my runs/r"
    assert commands["to upload it"].startswith("python -m jrlhf.export 'my runs/r' --push ")
    assert type_in(commands.pop("to upload it"), monkeypatch)
    assert len(commands) == (not stages.endswith("reward_model"))
    for command in commands.values():
        (options,) = type_in(command, monkeypatch)
        longer = load_config(options.config, options.overrides)
        stage = config.stages[-1]
        assert longer.length(stage) == 2 * config.length(stage) and options.resume == (longer.name == "r")
        check_run(longer, options.resume)


TINY = (
    "python -m jrlhf.train --config arithmetic-grpo device.platform=cpu device.simulated=1 mesh.fsdp=1 mesh.tensor=1 "
    "data.problems=64 data.heldout_rows=8 model.embed=32 model.layers=1 "
    "'sft={steps: 2, batch: 16, warmup: 1}' 'grpo={iterations: 2, rollout_batch: 16, algorithm: {samples: 4}}' "
)


class Shell:
    """Types commands into a shell in a directory, as a user does."""

    def __init__(self, directory: Path, environment: dict[str, str]):
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        cache = {"JAX_COMPILATION_CACHE_DIR": str(directory / "programs")}  # many commands compile the same programs
        cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.options: Any = {"cwd": directory, "env": environment | own | cache}

    def __call__(self, command: str, code: int = 0) -> str:
        done = subprocess.run(["bash", "-c", command], input="", capture_output=True, text=True, **self.options)
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("stages", ["sft", "sft, grpo"])
def test_commands_that_a_run_prints_do_what_they_say(stages, tmp_path):
    with serving() as hub:
        shell = Shell(tmp_path, hub.environment(tmp_path / "home"))
        output = shell(f"{TINY} name=r 'stages=[{stages}]'")
        commands = dict(re.findall(r"^(to \w+ .*?): (python .*)$", output, re.M))
        assert [purpose.split(",")[0] for purpose in commands] == [
            "to talk to it",
            "to upload it",
            "to train it longer",
        ]
        talk, upload, longer = commands.values()
        shell(talk)
        shell(upload.replace("USER/NAME", "someone/mine"))
        assert "models/someone/mine" in hub.repositories
        assert "has finished: nothing is left" in shell("python -m jrlhf.train --config runs/r/config.yaml --resume")
        output = shell(longer)
        assert ("grpo goes on after step 2 of 4" in output) == ("grpo" in stages)
        assert (tmp_path / "runs" / ("r" if "grpo" in stages else "r-longer") / "report.html").is_file()


@pytest.mark.full
def test_a_reward_that_changed_is_refused_before_work_and_the_remedies_work(tmp_path):
    """Once the run has ended, only a new run learns from the changed function."""
    shell, rewards = Shell(tmp_path, dict(os.environ)), tmp_path / "rewards.py"
    rewards.write_text("def low(completions, **_):\n    return [-float(len(text)) for text in completions]\n")
    train = f"{TINY} 'stages=[sft, grpo]' 'rewards=[{{name: low, function: rewards.py:low}}]'"
    shell(f"{train} name=r")
    rewards.write_text(rewards.read_text().replace("-float", "float"))
    before = (tmp_path / "runs" / "r" / "summary.json").read_bytes()
    for more in ("", " --accept-rewards"):
        output = shell(f"{train} name=r --resume{more}", code=2)
        assert "answering" not in output and "accept-rewards" not in output and "another name=" in output
    assert (tmp_path / "runs" / "r" / "summary.json").read_bytes() == before
    output = shell(f"{train} name=r --resume grpo.iterations=4", code=2)
    assert "answering" not in output and "--accept-rewards" in output
    assert "grpo goes on after step 2 of 4" in shell(f"{train} name=r --resume grpo.iterations=4 --accept-rewards")
    shell(f"{train} name=new")
