"""`jrlhf init`, or `python -m jrlhf.new_config`: asks for model, data, reward, algorithm and devices; writes a config.

Each answer is also an option: `jrlhf init --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k.jsonl -o mine.yaml`. Sizes
and rates come from the packaged configs, lengths and columns from a model and a dataset on this machine. The comments
are the descriptions of settings in the config's classes.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from jrlhf.config.descriptions import commented
from jrlhf.config.parse import build, parse_yaml
from jrlhf.config.places import is_address, local
from jrlhf.config.schema import ColumnsConfig, Config
from jrlhf.config.stages import ALGORITHMS, STAGES
from jrlhf.data.encode import Encoding
from jrlhf.data.read import is_hub_name, make_dataset, read_rows
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.errors import UserError, alike, beside, exit_code, parse_options, printable
from jrlhf.ppo.fields import default_of
from jrlhf.rewards import builtin
from jrlhf.rewards.user_code import resolve
from jrlhf.roles.pretrained import describe, is_here, is_model_name, locate
from jrlhf.run.devices import accelerator
from jrlhf.run.files import check_writable

ROWS = 1024  # number of rows of a dataset that are read; at most an eighth of them are held out
TINY, LEARNED, FUNCTION = "tiny", "learned", "function"
TASKS = ("docstrings", "arithmetic")
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")  # usual names of columns
TRUTHS = ("answer", "solution", "ground_truth", "target", "label", "output")


@dataclass(frozen=True)
class Answers:
    """The answers that determine the config. A later answer may depend on earlier ones."""

    model: str  # TINY, a directory or a hub name
    data: str  # one of TASKS, a file, a directory or a hub name
    algorithm: str
    prompt: str  # the column of the prompts; "" for TASKS and dpo
    reward: str  # LEARNED, FUNCTION, a built-in function, file.py:function, a reward model; "" for dpo
    devices: str  # auto, cpu, gpu, tpu, or a number of one kind: 8xgpu


QUESTIONS = {
    "model": f"Model: {TINY} (built in), a Hugging Face directory or hub name",
    "data": f"Data: {' or '.join(TASKS)} (for {TINY}), a file (jsonl, csv, parquet), a directory or a hub name",
    "algorithm": f"Algorithm: {', '.join(ALGORITHMS)}, or dpo for pairs",
    "prompt": "Prompt: the dataset's column with the prompts",
    "reward": f"Reward: {FUNCTION} (writes one to edit), FILE.py:FUNCTION, {', '.join(builtin.NAMES)}, "
    f"a reward model's directory or hub name, or {LEARNED} (from preferences; docstrings)",
    "devices": "Devices: auto, cpu, gpu, tpu, or a number of them such as 8xgpu",
}


def usual(name: str, given: Mapping[str, str]) -> str | None:
    """Returns the default answer; "" if there is none, None if the question does not apply."""
    data, pairs = given.get("data", ""), given.get("algorithm") == "dpo"
    prompt = None if pairs or data in TASKS else _column(data, PROMPTS) if data else ""
    return {
        "model": TINY,
        "data": TASKS[0] if given.get("model") == TINY else "",
        "algorithm": "ppo" if data == "docstrings" else "dpo" if _pairs(data) else "grpo",
        "prompt": prompt,
        "reward": None if pairs else {"docstrings": LEARNED, "arithmetic": "exact_match"}.get(data, FUNCTION),
        "devices": "auto",
    }[name]


def wrong(name: str, value: str, given: Mapping[str, str]) -> str:
    """Returns what is wrong with an answer, as the second half of a sentence; "" if nothing is wrong."""
    data, here = given.get("data", ""), name in ("model", "data", "reward") and is_here(value, name)
    match name:
        case "model" if value != TINY:
            if here:
                describe(value, "model")
            elif not (is_address(value) or is_model_name(value)):
                remedy = "give a directory, a hub name such as org/model, or s3:// or gs://BUCKET/PREFIX"
                return f"does not exist: {beside(value, remedy)}"
        case "data" if (given["model"] == TINY) != (value in TASKS):
            if value in TASKS:
                return f"trains a model of its own: start again with --model {TINY}, or name a dataset"
            own = f"model={TINY} learns only {' and '.join(TASKS)}, so start again with --model and another one"
            return f"does not go with the model: {alike(value, TASKS, own)}"
        case "data" if value not in TASKS and not (_rows(value) or is_hub_name(value)):
            return f"does not exist: {beside(value, 'name a file, a directory or a dataset on the hub')}"
        case "algorithm" if value not in (*ALGORITHMS, "dpo"):
            remedy = alike(value, (*ALGORITHMS, "dpo"), f"choose {', '.join(ALGORITHMS)} or dpo")
            return f"is no algorithm: {remedy}"
        case "algorithm" if value == "safe_rlhf" and data == "arithmetic":
            return "keeps a cost below a limit, and sums have no cost: choose another algorithm"
        case "algorithm" if value == "dpo" and data not in TASKS[:1]:
            lacking = [column for column in ("chosen", "rejected") if data in TASKS or not _column(data, [column])]
            own = "rename its columns, or name them in data.preferences.columns of a config of your own"
            remedy = "choose another algorithm" if data in TASKS else own
            return f"learns from pairs, and data={data} has no {' and '.join(lacking)}: {remedy}" if lacking else ""
        case "prompt" if (rows := _rows(data)) and value not in rows[0]:
            return f"is no column of {data}, which has {', '.join(rows[0])}"
        case "reward" if value == LEARNED and data != "docstrings":
            return "needs preferences, which only data=docstrings makes: choose another"
        case "reward" if _compares(value) and (data == "docstrings" or not _column(data, TRUTHS)):
            return f"compares with answers, which data={data} does not have: choose another"
        case "reward" if ".py:" in value:
            path, _, function = resolve(value, "reward").rpartition(":")
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            if not re.search(rf"\b{function.split('.')[0]}\b|import \*|\b__getattr__\b", text):
                return f"names no function: there is no {function} in {path}"
        case "reward" if not (value in (LEARNED, FUNCTION, *builtin.NAMES) or ":" in value or here):
            kinds = f"{FUNCTION}, {LEARNED}, {', '.join(builtin.NAMES)}, FILE.py:FUNCTION, or a reward model"
            remedy = alike(value, (FUNCTION, LEARNED, *builtin.NAMES), f"choose {kinds}")
            return "" if is_model_name(value) else f"is no reward: {remedy}"
        case "devices" if not re.fullmatch(r"auto|([1-9]\d{0,3}x)?(cpu|gpu|tpu)", value):
            return "is none of auto, cpu, gpu and tpu, nor a number of them such as 8xgpu"
    return ""


def complete(given: Mapping[str, str | None], ask: Callable[[str, str], str] | None) -> Answers:
    """Returns all answers. ask: (question, default) -> answer; None: defaults are used without questions.

    A wrong answer to a question is explained, and the question is asked again; a wrong one in `given` is a UserError.
    """
    answers: dict[str, str] = {}
    for name, question in QUESTIONS.items():
        value, default = given.get(name) or "", usual(name, answers)
        if value and default is None:
            raise UserError(f"{name}={value} has no effect with the other answers: leave it out")
        asks = ask if not value else None
        while default is not None:
            value = value or (asks(question, default).strip() if asks else "") or default
            try:
                fault = wrong(name, value, answers) if value or name == "prompt" else f"has no answer: give --{name}"
                if not fault:
                    break
                raise UserError(f"{name}={value} {fault}" if value else f"{name} {fault}")
            except UserError as error:  # also of a model or a file that cannot be read
                if not asks:
                    raise
                print(printable(f"{error} (Ctrl-C ends the questions)"))
            value = ""
        answers[name] = value
    return Answers(**answers)


@cache
def _rows(data: str) -> list[Any]:
    """Returns the first rows of a dataset on this machine; [] for any other dataset."""
    if not is_here(data):
        return []
    rows = [row for _, row in islice(read_rows(data), ROWS)]
    if not (rows and isinstance(rows[0], Mapping)):
        raise UserError(f"data={data} has no rows with columns: name a dataset that has some")
    return rows


def _column(data: str, names: Sequence[str]) -> str:
    """Returns the first of these columns that a dataset has; "" if it has none; for a hub dataset the first name."""
    rows = _rows(data)
    return next((name for name in names if not rows or name in rows[0]), "")


def _pairs(data: str) -> bool:
    """True if a dataset on this machine has pairs of answers."""
    rows = [] if data in ("", *TASKS) else _rows(data)
    return bool(rows) and {"chosen", "rejected"} <= rows[0].keys()


def _compares(reward: str) -> bool:
    """True if a built-in reward compares responses with the column `answer`."""
    return reward in builtin.NAMES and "answer" in signature(getattr(builtin, reward)).parameters


def settings_for(answers: Answers, reward_file: str) -> dict[str, Any]:
    """Returns the settings, by key, that differ from the defaults or that users often change."""
    own_task, algorithm, base = answers.data in TASKS, answers.algorithm, _packaged(answers)
    number, _, kind = answers.devices.rpartition("x")
    learned = answers.reward == LEARNED
    before = ["sft", *(["reward_model"] if learned else [])] if own_task else []
    config: dict[str, Any] = {"stages": [*before, algorithm]}
    config["device"] = {"platform": kind} | ({"simulated": int(number or 1)} if kind == "cpu" else {})
    if number:  # a divisor of all models' widths
        fsdp = math.gcd(int(number), 64)
        config["mesh"] = {"data": int(number) // fsdp, "fsdp": fsdp, "tensor": 1}
    config["model"] = base["model"] if own_task else {"path": answers.model}
    config["data"] = base["data"] if own_task else _dataset(answers, base["data"])
    if own_task and not (learned or algorithm == "dpo"):
        config["data"].pop("annotator", None)
    if not own_task and (kind in ("gpu", "tpu") or kind == "auto" and accelerator()):
        config["compute"] = {"dtype": "bfloat16"}
    if answers.reward not in ("", LEARNED):
        config["rewards"] = [_reward(answers, reward_file)]
    if algorithm == "safe_rlhf":
        config["costs"] = [{"name": "words", "function": "word_count"}]
    if "sampling" in base:
        config["sampling"] = base["sampling"]
    longest = config["data"]["max_response"]
    config |= {stage: base[stage] for stage in before} | {algorithm: _stage(answers, base, longest)}
    if not own_task and algorithm != "dpo":
        config["validation"] = {"every": 10}
    return _divided(config, int(number)) if number else config


def _packaged(answers: Answers) -> dict[str, Any]:
    """Returns the packaged config from which sizes and rates are taken."""
    special = {("docstrings", "dpo"): "quickstart-dpo", ("docstrings", "safe_rlhf"): "quickstart-safe"}
    general = {"docstrings": "quickstart", "arithmetic": "arithmetic-grpo"}.get(answers.data, "gsm8k-ppo")
    return yaml.safe_load(_file(f"{special.get((answers.data, answers.algorithm), general)}.yaml"))


def _file(name: str) -> str:
    return (resources.files("jrlhf.configs") / name).read_text(encoding="utf-8")


def _dataset(answers: Answers, base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section of a dataset: its columns, and lengths and chat settings that suit the model."""
    lengths = {key: base[key] for key in ("max_prompt", "max_response", "overlong", "heldout_rows")}
    chat, rows = True, _rows(answers.data)
    if is_here(answers.model):
        directory, half = locate(answers.model, "model"), describe(answers.model, "model").model.max_positions // 2
        tokenizer = load_tokenizer(directory)
        chat = tokenizer.chat_template is not None
        lengths |= {key: min(lengths[key], half) for key in ("max_prompt", "max_response")}
        if answers.prompt and 0 < len(rows) < ROWS:  # all rows were read: no prompt is longer than these
            with suppress(UserError):  # about a row: the dry run names it
                data = make_dataset([("", row) for row in rows], ColumnsConfig(prompt=answers.prompt), answers.data)
                prompts = Encoding(tokenizer, "filter", chat).prompts(data, lengths["max_prompt"])
                lengths["max_prompt"] = min(-(-max(map(len, prompts.ids)) // 8) * 8, lengths["max_prompt"])
    if rows:
        lengths["heldout_rows"] = min(lengths["heldout_rows"], max(len(rows) // 8, 1))
    key, names = "prompts", {"prompt": answers.prompt}
    if answers.algorithm == "dpo":
        key, names = "preferences", {"chosen": "chosen", "rejected": "rejected"}
    return {"source": "datasets", key: {"path": answers.data, "columns": names}, "chat": chat, **lengths}


def _reward(answers: Answers, reward_file: str) -> dict[str, Any]:
    answer = answers.reward
    if answer == FUNCTION:
        return {"name": "reward", "function": f"{reward_file}:reward"}
    if answer not in builtin.NAMES:
        return {"name": "reward", "function" if ":" in answer else "model": answer}
    reward: dict[str, Any] = {"name": answer, "function": answer}
    if answer == "format_regex":
        reward["options"] = {"pattern": ".+"}
    elif _compares(answer) and (column := _column(answers.data, TRUTHS)) != "answer":
        reward["columns"] = {"answer": column}
    return reward


def _stage(answers: Answers, base: Mapping[str, Any], longest: int) -> dict[str, Any]:
    algorithm, usual = answers.algorithm, base["stages"][-1]
    parts = {"micro_batch_tokens": 8192} if answers.data not in TASKS else {}
    if algorithm == "dpo":
        return base["dpo"] if usual == "dpo" else {"steps": 250, "batch": 64, "algorithm": {"beta": 0.1, **parts}}
    policy = default_of(STAGES[algorithm], "algorithm")
    taken = ["iterations", "rollout_batch", "save_every", "actor", *(["critic"] if policy.has_critic else [])]
    stage = {key: base[usual][key] for key in taken if key in base[usual]}
    own = base[usual]["algorithm"] if usual == algorithm and not parts else {"kl_coef": policy.kl_coef}
    if hasattr(policy, "samples"):
        own = {"samples": policy.samples} | own
    if algorithm == "safe_rlhf" and usual != algorithm:
        own["cost_limit"] = float(max(longest // 4, 1))  # words: about a third of those that fit
    return stage | {"algorithm": {**own, **({"minibatches": 4, **parts} if parts else {})}}


def _divided(config: dict[str, Any], devices: int) -> dict[str, Any]:
    """Increases batch sizes to the next number that divides over the devices."""

    def divide(section: dict[str, Any], key: str, usual: int, divisor: int = devices) -> None:
        section[key] = -(-section.get(key, usual) // divisor) * divisor

    *before, last = config["stages"]
    for stage in (*before, *([last] if last == "dpo" else [])):
        divide(config[stage], "batch", default_of(STAGES[stage], "batch"))
    if last == "dpo":
        divide(config.setdefault("sampling", {}), "batch", 128)
    else:
        algorithm = config[last]["algorithm"]
        rows = math.lcm(devices * algorithm.get("minibatches", 1), devices * algorithm.get("samples", 1))
        divide(config[last], "rollout_batch", rows, rows)
    return config


def write(answers: Answers, out: Path) -> list[Path]:
    """Writes the config and, if requested, a file with a reward function; returns the files.

    No file is overwritten: an existing reward.py is used as it is.
    """
    if out.is_dir():  # also an empty text
        raise UserError(f"-o {out} is a directory: name a file in it, such as mine.yaml")
    if out.exists():
        raise UserError(f"{out} exists and is not overwritten: choose another one with -o")
    reward_file = out.with_name("reward.py")
    options = shlex.join(word for name, value in vars(answers).items() if value for word in (f"--{name}", value))
    head = (
        f"Written by jrlhf init {options}. Settings that are not here have their defaults: --dry-run --all prints them."
    )
    schema = f"# yaml-language-server: $schema={resources.files('jrlhf.configs') / 'schema.json'}\n"
    files = {out: schema + commented(settings_for(answers, str(reward_file)), Config, head)}
    build(Config, parse_yaml(files[out], str(out)))  # checks that the file can be loaded
    if answers.reward == FUNCTION and not reward_file.exists():
        files[reward_file] = _file("reward.py")
    for path in files:
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
    """The command line; returns the exit code. On a terminal it asks for answers that no option gives."""
    parser = argparse.ArgumentParser(prog="jrlhf init", description=DESCRIPTION)
    for name, question in QUESTIONS.items():
        parser.add_argument(f"--{name}", help=question.partition(": ")[2])
    parser.add_argument("-o", "--out", default="mine.yaml", help="the file; default: mine.yaml")
    return exit_code(partial(_run, parse_options(parser, arguments)))


def _ask(question: str, usual: str) -> str:
    try:
        return input(f"{question}\n  [{usual}] " if usual else f"{question}\n  ")
    except EOFError as error:
        raise UserError(f"no answer to: {question}") from error


def _run(options: argparse.Namespace) -> None:
    out = local("-o", options.out)
    files = write(complete(vars(options), _ask if sys.stdin.isatty() else None), out)
    print(printable(f"wrote {' and '.join(map(str, files))}; next:"))
    for more in (" --dry-run", ""):
        print(printable(f"  python -m jrlhf.train --config {shlex.quote(str(out))}{more}"))


if __name__ == "__main__":
    sys.exit(cli())
