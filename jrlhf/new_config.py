"""`jrlhf init`, or `python -m jrlhf.new_config`: asks for model, data, reward, algorithm and devices; writes a config.

Each answer is also an option: `jrlhf init --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k.jsonl -o mine.yaml`. Sizes
and rates are those of the packaged configs. The comments are what the classes of the config say of their settings.
"""

import argparse
import difflib
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from jrlhf.config import Config, build
from jrlhf.config.descriptions import descriptions, summary
from jrlhf.config.parse import classes_of, kinds_of, parse_yaml
from jrlhf.config.places import is_address
from jrlhf.config.stages import ALGORITHMS, STAGES, RLStageConfig
from jrlhf.errors import UserError, exit_code, printable
from jrlhf.ppo.fields import default_of
from jrlhf.rewards.builtin import NAMES as BUILTIN
from jrlhf.run.files import check_writable

TINY, LEARNED, FUNCTION = "tiny", "learned", "function"
TASKS = ("docstrings", "arithmetic")
WIDTH = 110
REWARD = '''\
"""The reward of {config}: one number for each completion, a larger one is better."""


def reward(prompts, completions, **columns):
    """Returns the scores. `columns` has the dataset's other columns, a list each, such as `answer`."""
    return [score(text(completion)) for completion in completions]


def score(answer):
    """Replace this: it prefers answers of about twenty words."""
    return max(0.0, 1.0 - abs(len(answer.split()) - 20) / 20)


def text(completion):
    """A completion is a string, or in a conversation a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''


@dataclass(frozen=True)
class Answers:
    """What the config is to be of. A later answer may depend on the ones before it."""

    model: str  # TINY, a directory or a hub name
    data: str  # one of TASKS, a file, a directory or a hub name
    algorithm: str
    reward: str  # LEARNED, FUNCTION, a built-in function, file.py:function, a reward model; "" for dpo
    devices: str  # auto, cpu, gpu, tpu, or a number of one kind: 8xgpu

    @property
    def count(self) -> int | None:
        """The number of devices, if it is given."""
        number, times, _ = self.devices.rpartition("x")
        return int(number) if times else None


def _check_model(value: str, given: Mapping[str, str]) -> None:
    if "://" in value and not is_address(value):
        raise UserError(f"model={value}: it must be {TINY}, a directory, a hub name, or s3:// or gs://BUCKET/PREFIX")


def _check_data(value: str, given: Mapping[str, str]) -> None:
    if (given["model"] == TINY) != (value in TASKS):
        raise UserError(
            f"data={value} does not go with model={given['model']}: the built-in tasks ({', '.join(TASKS)}) train a "
            f"{TINY} model of their own, and a dataset needs a Hugging Face model"
        )


def _check_algorithm(value: str, given: Mapping[str, str]) -> None:
    if value not in (*ALGORITHMS, "dpo"):
        close = difflib.get_close_matches(value, ALGORITHMS, n=1)
        meant = f"did you mean {close[0]}" if close else f"it must be one of {', '.join(ALGORITHMS)}, dpo"
        raise UserError(f"algorithm={value}: {meant}")
    if value == "dpo" and given["data"] == "arithmetic":
        raise UserError("algorithm=dpo learns from pairs, which data=arithmetic does not have: choose another")


def _check_reward(value: str, given: Mapping[str, str]) -> None:
    if given["algorithm"] == "dpo":
        if value:
            raise UserError(f"reward={value} has no effect with algorithm=dpo: leave it out")
    elif value == LEARNED and given["data"] != "docstrings":
        raise UserError(f"reward={LEARNED} needs preferences, which only data=docstrings makes: choose another")
    elif value in BUILTIN and value not in ("format_regex", "word_count") and given["data"] == "docstrings":
        raise UserError(f"reward={value} compares with answers, which data=docstrings does not have: choose another")
    elif not (value in (LEARNED, FUNCTION, *BUILTIN) or re.search(r"[/:.]", value) or Path(value).is_dir()):
        kinds = f"{FUNCTION}, {LEARNED}, {', '.join(BUILTIN)}, FILE.py:FUNCTION, or the name of a reward model"
        raise UserError(f"reward={value}: it must be one of {kinds}")


def _check_devices(value: str, given: Mapping[str, str]) -> None:
    if not re.fullmatch(r"auto|([1-9]\d{0,3}x)?(cpu|gpu|tpu)", value):
        raise UserError(f"devices={value}: it must be auto, cpu, gpu or tpu, or a number of them such as 8xgpu")


# Answer: the question, the answer if none is given, and what it must satisfy.
Question = tuple[str, Callable[[Mapping[str, str]], str], Callable[[str, Mapping[str, str]], None]]
QUESTIONS: dict[str, Question] = {
    "model": (f"Model: {TINY} (built in), a Hugging Face directory or hub name", lambda given: TINY, _check_model),
    "data": (
        f"Data: {' or '.join(TASKS)} (built in, for {TINY}), a file (jsonl, csv, parquet), a directory or a hub name",
        lambda given: TASKS[0] if given["model"] == TINY else "",
        _check_data,
    ),
    "algorithm": (
        f"Algorithm: {', '.join(ALGORITHMS)}, or dpo for pairs",
        lambda given: "ppo" if given["data"] == "docstrings" else "grpo",
        _check_algorithm,
    ),
    "reward": (
        f"Reward: {FUNCTION} (writes one to edit), FILE.py:FUNCTION, {', '.join(BUILTIN)}, a reward model's directory "
        f"or hub name, or {LEARNED} (from preferences; docstrings)",
        lambda given: {"docstrings": LEARNED, "arithmetic": "exact_match"}.get(given["data"], FUNCTION),
        _check_reward,
    ),
    "devices": (
        "Devices: auto, cpu, gpu, tpu, or a number of them such as 8xgpu",
        lambda given: "auto",
        _check_devices,
    ),
}


def complete(given: Mapping[str, str | None], ask: Callable[[str, str], str] | None) -> Answers:
    """Returns all answers. ask: (question, default) -> answer; None: the default is taken without a question.

    A wrong answer to a question is explained, and the question is asked again; a wrong one in `given` is a UserError.
    """
    answers: dict[str, str] = {}
    for name, (question, default, check) in QUESTIONS.items():
        value, asked = given.get(name) or None, False
        while True:
            if value is None and name == "reward" and answers["algorithm"] == "dpo":
                value = ""
            elif value is None:
                asked, usual = ask is not None, default(answers)
                value = (ask(question, usual).strip() if ask else "") or usual
            if not value and name != "reward":
                error = UserError(f"{name} has no answer: give --{name}")
            else:
                try:
                    check(value, answers)
                    break
                except UserError as wrong:
                    error = wrong
            if not asked:
                raise error
            print(printable(str(error)))
            value = None
        answers[name] = value
    return Answers(**answers)


def settings_for(answers: Answers, reward_file: str) -> dict[str, Any]:
    """Returns the settings, by key, that differ from the defaults or that a user will want to change."""
    own_task, algorithm = answers.data in TASKS, answers.algorithm
    base = _packaged(answers)
    kind, devices = answers.devices.rpartition("x")[2], answers.count
    learned = answers.reward == LEARNED
    before = ["sft", *(["reward_model"] if learned else [])] if own_task else []
    config: dict[str, Any] = {"stages": [*before, algorithm]}
    config["device"] = {"platform": kind} | ({"simulated": devices or 1} if kind == "cpu" else {})
    if devices is not None:  # a divisor of all models' widths
        fsdp = math.gcd(devices, 64)
        config["mesh"] = {"data": devices // fsdp, "fsdp": fsdp, "tensor": 1}
    config["model"] = base["model"] if own_task else {"path": answers.model}
    if not own_task and kind != "cpu":
        config["compute"] = {"dtype": "bfloat16"}
    config["data"] = dict(base["data"])
    if own_task and not (learned or algorithm == "dpo"):
        config["data"].pop("annotator", None)
    if not own_task:
        (rows, columns) = ("preferences", ("chosen", "rejected")) if algorithm == "dpo" else ("prompts", ("prompt",))
        dataset = {"path": answers.data, "columns": {name: name for name in columns}}
        lengths = {key: base["data"][key] for key in ("max_prompt", "max_response", "overlong", "heldout_rows")}
        config["data"] = {"source": "datasets", rows: dataset, "chat": True, **lengths}
    if answers.reward not in ("", LEARNED):
        config["rewards"] = [_reward(answers.reward, reward_file)]
    if algorithm == "safe_rlhf":
        config["costs"] = [{"name": "words", "function": "word_count"}]
    if "sampling" in base:
        config["sampling"] = base["sampling"]
    config |= {stage: base[stage] for stage in before}
    config[algorithm] = _stage(answers, base)
    if not own_task and algorithm != "dpo":
        config["validation"] = {"every": 10}
    return _divided(config, devices or 1)


def _packaged(answers: Answers) -> dict[str, Any]:
    """Returns the packaged config whose sizes and rates are taken."""
    special = {"docstrings": {"dpo": "quickstart-dpo", "safe_rlhf": "quickstart-safe"}}.get(answers.data, {})
    general = {"docstrings": "quickstart", "arithmetic": "arithmetic-grpo"}.get(answers.data, "gsm8k-ppo")
    file = resources.files("jrlhf.configs") / f"{special.get(answers.algorithm, general)}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _reward(answer: str, reward_file: str) -> dict[str, Any]:
    if answer == FUNCTION:
        return {"name": "reward", "function": f"{reward_file}:reward"}
    if answer in BUILTIN:
        return {"name": answer, "function": answer} | (
            {"options": {"pattern": ".+"}} if answer == "format_regex" else {}
        )
    return {"name": "reward", "function" if ":" in answer else "model": answer}


def _stage(answers: Answers, base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the algorithm's section."""
    algorithm, usual = answers.algorithm, base["stages"][-1]
    parts = {"micro_batch_tokens": 8192} if answers.data not in TASKS else {}
    if algorithm == "dpo":
        return base["dpo"] if usual == "dpo" else {"steps": 250, "batch": 64, "algorithm": {"beta": 0.1, **parts}}
    section: Any = STAGES[algorithm]
    assert issubclass(section, RLStageConfig)
    policy = default_of(section, "algorithm")
    taken = ["iterations", "rollout_batch", "save_every", "actor", *(["critic"] if policy.has_critic else [])]
    stage = {key: base[usual][key] for key in taken if key in base[usual]}
    own = base[usual]["algorithm"] if usual == algorithm and not parts else {"kl_coef": policy.kl_coef}
    if hasattr(policy, "samples"):
        own = {"samples": policy.samples} | own
    if algorithm == "safe_rlhf" and usual != algorithm:
        own["cost_limit"] = 100.0
    return stage | {"algorithm": {**own, **({"minibatches": 4, **parts} if parts else {})}}


def _divided(config: dict[str, Any], devices: int) -> dict[str, Any]:
    """Raises batches to the next number that divides over the devices, where it is given and the usual one does not."""
    *before, last = config["stages"]
    for stage in (*before, *([last] if last == "dpo" else [])):
        batch = config[stage].get("batch", default_of(STAGES[stage], "batch"))
        config[stage] = config[stage] | {"batch": -(-batch // devices) * devices}
    if last == "dpo":
        batch = config.get("sampling", {}).get("batch", 128)
        if batch % devices:
            config["sampling"] = config.get("sampling", {}) | {"batch": -(-batch // devices) * devices}
        return config
    algorithm = config[last]["algorithm"]
    divisor = math.lcm(devices * algorithm.get("minibatches", 1), devices * algorithm.get("samples", 1))
    return config | {last: config[last] | {"rollout_batch": -(-config[last]["rollout_batch"] // divisor) * divisor}}


def commented(settings: Mapping[str, Any], head: str) -> str:
    """Returns the settings as YAML, in the order of the config's classes, with what each one means as its comment."""
    keys = sorted(settings, key=list(kinds_of(Config)).index)
    blocks = [_comment(head, ""), *([*_lines({key: settings[key]}, Config, "")] for key in keys)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _lines(settings: Mapping[str, Any], cls: Any, indent: str) -> Iterator[str]:
    texts, kinds = descriptions(cls), kinds_of(cls)
    for key in sorted(settings, key=list(kinds).index):
        value, text = settings[key], texts.get(key, "")
        sections = classes_of(kinds[key])
        if isinstance(value, Mapping) and sections:
            section = next(
                (one for one in sections if value.get("source") == getattr(one(), "source", None)), sections[0]
            )
            yield from _comment(summary(section) or text, indent)
            yield f"{indent}{key}:"
            yield from _lines(value, section, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from _comment(text, indent)
            yield f"{indent}{key}:"
            for item in value:
                first, *others = (
                    line for line in _lines(item, classes_of(kinds[key].__args__[0])[0], "") if line[0] != "#"
                )
                yield from (f"{indent}  - {first}", *(f"{indent}    {line}" for line in others))
        else:
            scalar = (
                yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
            )
            line = f"{indent}{key}: {scalar}"
            if text and len(line) + len(text) + 4 <= WIDTH:
                yield f"{line}  # {text}"
            else:
                yield from _comment(text, indent)
                yield line


def _comment(text: str, indent: str) -> list[str]:
    text = text if len(text) < 2 * WIDTH else text.partition(". ")[0] + "."
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def write(answers: Answers, out: Path) -> list[Path]:
    """Writes the config, and a function of rewards where one was asked for; returns the files. None is overwritten."""
    if out.is_dir():  # also an empty text
        raise UserError(f"-o {out} is a directory: name a file in it, such as mine.yaml")
    reward_file = out.with_name("reward.py")
    options = shlex.join(word for name, value in vars(answers).items() if value for word in (f"--{name}", value))
    head = (
        f"Written by jrlhf init {options}. Settings that are not here have their defaults: --dry-run --all prints them."
    )
    files = {out: commented(settings_for(answers, str(reward_file)), head)}
    if answers.reward == FUNCTION:
        files[reward_file] = REWARD.format(config=out.name)
    build(Config, parse_yaml(files[out], str(out)))  # whatever an answer holds, the file can be read
    for path in files:
        if path.exists():
            remedy = f"give --reward {path}:FUNCTION to use it" if path == reward_file else "choose another one with -o"
            raise UserError(f"{path} exists and is not overwritten: {remedy}")
        check_writable(str(path), path)
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): choose another one with -o") from error
    return list(files)


DESCRIPTION = "Writes a config to start from. Asks for what no option says; without a terminal it takes the defaults."


def cli(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. On a terminal it asks for what no option answers."""
    parser = argparse.ArgumentParser(prog="jrlhf init", description=DESCRIPTION)
    for name, (question, _, _) in QUESTIONS.items():
        parser.add_argument(f"--{name}", help=question.partition(": ")[2])
    parser.add_argument("-o", "--out", type=Path, default=Path("mine.yaml"), help="the file; default: mine.yaml")
    return exit_code(partial(_run, parser.parse_args(arguments)))


def _ask(question: str, usual: str) -> str:
    try:
        return input(f"{question}\n  [{usual}] ")
    except EOFError as error:
        raise UserError(f"no answer to: {question}") from error


def _run(options: argparse.Namespace) -> None:
    files = write(complete(vars(options), _ask if sys.stdin.isatty() else None), options.out)
    print(printable(f"wrote {' and '.join(map(str, files))}; next:"))
    for more in (" --dry-run", ""):
        print(printable(f"  python -m jrlhf.train --config {options.out}{more}"))


if __name__ == "__main__":
    sys.exit(cli())
