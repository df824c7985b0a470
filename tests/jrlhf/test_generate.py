"""`python -m jrlhf.generate` as a user meets it, on a tiny model; what it draws is what the training engine draws."""

import io
import json
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jrlhf import api, generate
from jrlhf.config.schema import DatasetsData
from jrlhf.data.batches import pad_rows, put_rows, read_responses, row_keys
from jrlhf.data.encode import Encoding
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.data.types import Example, Response
from jrlhf.errors import UserError
from jrlhf.generate import Generator, cli
from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import LoRAConfig, SamplingConfig, init_lora, merge
from jrlhf.models.generation.decoding import Generation
from jrlhf.models.hf import export_adapter, load_hf, read_config
from jrlhf.roles.generating import engine_of
from jrlhf.roles.model import Architecture, Compute
from jrlhf.run.files import read_jsonl
from tests.jrlhf.data.conftest import FAMILY, assistant, encode_chat, user

QUESTION = "What is 1 plus 2?"
NEW = 8

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "actor", qkv_bias=True, layers=1)


@pytest.fixture
def ask(model, capsys):
    """Runs the command; returns (exit code, stdout, stderr)."""

    def run(*arguments: str, model: Path = model) -> tuple[int, str, str]:
        capsys.readouterr()
        own = ["--model", str(model), "--max-new-tokens", str(NEW), "--platform", "cpu"]
        return cli([*own, *arguments]), *capsys.readouterr()

    return run


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """Answers prompts with "4" and typed lines with "42", in two pieces, without a model; returns the token ids."""
    prompts: list[Any] = []

    def answer(self, encoded, key):
        prompts.extend(encoded.ids)
        return iter([Response((), "4", True)] * len(encoded.ids))

    def stream(self, ids, key):
        prompts.append(tuple(ids))
        return iter(["4", "42"])

    monkeypatch.setattr(Generator, "answer", answer)
    monkeypatch.setattr(Generator, "stream", stream)
    return prompts


def rows(ask, path: Path, *arguments: str, prompts: int = 2, **options) -> list[dict]:
    """The answers to a file of prompts."""
    questions = path / "questions.jsonl"
    asked = [{"prompt": f"What is 1 plus {n}?", "answer": 1 + n} for n in range(prompts)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    out = path / "out.jsonl"
    code, printed, error = ask("--file", str(questions), "--out", str(out), *arguments, **options)
    assert code == 0 and "--seed" in error and error.count("\n") == 1
    answers = list(read_jsonl(out))
    assert f"{len(answers)} answers in {out}" in printed
    return answers


@cache
def greedy_program(directory: Path):
    """The weights and the program that training generates with, on a mesh with another division."""
    tokenizer, built = load_tokenizer(directory), make_mesh(2, 2, 2)
    with jax.set_mesh(built):
        config, params = load_hf(directory, built, layout=GENERATE)
        sampling = SamplingConfig(
            max_new_tokens=NEW, temperature=0.0, stop_ids=tokenizer.eos_ids, token_limit=tokenizer.vocab_size
        )
        run = engine_of(Architecture(config.model, shared=True), built, Compute(), sampling, None, 1)
    return tokenizer, built, params, run


def trained_engine(directory: Path, prompts: list[str], *, adapter=None) -> list[str]:
    """The greedy answers of the training engine."""
    tokenizer, built, params, run = greedy_program(directory)
    with jax.set_mesh(built):
        if adapter is not None:
            params = merge(params, *reversed(adapter))
        encoded = Encoding(tokenizer, chat=True).prompts([Example(prompt=text) for text in prompts], 64)
        whole = [*encoded.ids, *encoded.ids[:1] * (8 - len(prompts))]
        tokens, lengths = put_rows(pad_rows(whole, 64), built)
        generation = run(params, tokens, lengths, row_keys(jax.random.key(0), 8, built))
        return [response.text for response in read_responses(tokenizer, jax.device_get(generation))][: len(prompts)]


def test_greedy_answers_are_those_of_the_training_engine_with_and_without_an_adapter(ask, tmp_path, model):
    config, lora = read_config(model).model, LoRAConfig(rank=2, alpha=8.0)
    shapes = jax.eval_shape(lambda key: init_lora(config, lora, key), jax.random.key(0))
    draw = np.random.default_rng(0)
    adapter = jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    export_adapter(adapter, config, lora, tmp_path / "adapter", base_name="actor")
    questions = [f"What is 1 plus {n}?" for n in range(2)]
    plain, adapted = (
        rows(ask, tmp_path, "--temperature", "0", *more) for more in ((), ("--adapter", str(tmp_path / "adapter")))
    )
    assert [row["prompt"] for row in plain] == [[{"role": "user", "content": question}] for question in questions]
    assert all(isinstance(row["finished"], bool) for row in plain)
    assert [row["answer"] for row in plain] == [1, 2]  # other columns stay
    texts, changed = ([row["completion"] for row in answers] for answers in (plain, adapted))
    assert texts == trained_engine(model, questions) != changed
    assert changed == trained_engine(model, questions, adapter=(lora, jax.tree.map(jnp.asarray, adapter)))


def test_whole_conversations_in_a_file_are_answered_anew(ask, asked, tmp_path):
    file, out = tmp_path / "talks.jsonl", tmp_path / "out.jsonl"
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "3"}]
    file.write_text(json.dumps({"messages": turns}))
    code, _, error = ask("--file", str(file), "--prompt", "Why?", "-n", "2", "--out", str(out))
    typed = [{"role": "user", "content": "Why?"}]
    assert code == 0 and error.count("\n") == 1
    assert [row["prompt"] for row in read_jsonl(out)] == [typed, typed, turns[:1], turns[:1]]
    file.write_text("".join(json.dumps({"messages": own}) + "\n" for own in (turns, turns[1:])))
    code, _, error = ask("--file", str(file), "--prompt", "Why?", "-n", "2")
    assert code == 2 and f"{file} line 2: the conversation has nothing before its answer" in error


def test_prompts_are_read_from_the_column_that_is_named(ask, asked, tmp_path):
    row, file, out = {"question": QUESTION, "answer": "3"}, tmp_path / "gsm8k.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(row))
    code, _, error = ask("--file", str(file), "--out", str(out))
    assert code == 2 and "the columns of" in error and "by --column" in error
    assert ask("--file", str(file), "--column", "question", "--out", str(out))[0] == 0
    assert [answer["prompt"][0]["content"] for answer in read_jsonl(out)] == [QUESTION]


def test_an_answer_ends_at_a_text(ask, monkeypatch, model, settings, tmp_path):
    """In a conversation too, which never shows what may begin that text; as typed, else as in the model's run."""
    code, whole, _ = ask("--prompt", QUESTION, "--seed", "3")
    answer = whole.partition("\n")[2].removesuffix("\n\n")
    stops = [answer[at : at + 3] for at in range(2, len(answer) - 3) if answer[at : at + 3].isascii()]
    stop = next(one for one in stops if one.isprintable() and one.strip() == one)
    before = answer.partition(stop)[0]
    for typed, text in (([], answer), (["--stop", stop], before), (["--stop", "\n!\n", "--stop", stop], before)):
        code, printed, error = ask("--prompt", QUESTION, "--seed", "3", *typed)
        assert code == 0 and printed == whole.replace(answer, text) and (str([stop]) in error) == (len(typed) == 2)
    _, printed, _ = ask("--prompt", QUESTION, "--seed", "3", "--stop", stop, "--keep-stop")
    kept_text = printed.partition("\n")[2].removesuffix("\n\n")
    assert kept_text.startswith(before + stop) and answer.startswith(kept_text)
    monkeypatch.setattr(generate, "STREAMED", 1)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    code, streamed, _ = ask("--seed", "3", "--stop", stop)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    code, longer, _ = ask("--seed", "3")
    assert streamed.removesuffix("\n") == longer.removesuffix("\n").partition(stop)[0]

    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(sampling={"stop": [stop], "keep_stop": True})))
    (tmp_path / "environment.txt").write_text("")
    policy = api.load(tmp_path)
    own = policy.tokenizer.stop
    assert own is not None and own[:2] == ((stop,), True)
    assert policy.generate(QUESTION, seed=3, max_new_tokens=NEW, temperature=1.0) == [kept_text]
    asked = {"seed": 3, "max_new_tokens": NEW, "temperature": 1.0, "keep_stop": False}
    assert policy.generate(QUESTION, **asked) == [before]
    assert policy.generate(QUESTION, **asked, stop=stop[:2]) == [answer.partition(stop[:2])[0]]
    assert policy.generate(QUESTION, **asked, stop=[]) == [answer]


@pytest.mark.full
def test_several_answers_to_a_prompt_differ_and_do_not_depend_on_the_batch(ask, tmp_path):
    answers = rows(ask, tmp_path, "-n", "3", "--seed", "1", prompts=4)  # in two batches of 8
    assert len(answers) == 12 and len({row["completion"] for row in answers}) > 6
    assert [row["prompt"][0]["content"] for row in answers] == [f"What is 1 plus {n // 3}?" for n in range(12)]
    assert rows(ask, tmp_path, "-n", "3", "--seed", "1", "--batch", "16", prompts=4) == answers


def test_the_seed_decides(ask, monkeypatch):
    keys = []

    def answer(self, encoded, key):
        keys.append(jax.random.key_data(key).tolist())
        return iter([Response((), "4", True)])

    monkeypatch.setattr(Generator, "answer", answer)
    for seed in "112":
        assert ask("--prompt", QUESTION, "--seed", seed)[0] == 0
    assert keys[0] == keys[1] != keys[2]


def test_prompts_on_the_command_line_are_answered_in_order(ask, asked, model):
    code, printed, error = ask("--prompt", QUESTION, "--prompt", "Why?", "--temperature", "0")
    assert code == 0
    assert (
        error
        == f"{model} answers in up to {NEW} tokens, at temperature 0 (as asked, else the default), with --seed 0\n"
    )
    assert printed.index("What is 1 plus 2?") < printed.index("Why?")
    assert "<|im_start|>user" in printed
    code, raw, _ = ask("--prompt", QUESTION, "--temperature", "0", "--raw")
    assert code == 0 and raw.startswith(f"> {QUESTION}\n") and "<|im_start|>" not in raw
    code, other, _ = ask("--prompt", QUESTION, "--temperature", "0", "--system", "Be brief.")
    assert code == 0 and "Be brief." in other


def test_a_conversation_remembers_what_was_said(ask, asked, monkeypatch, model):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n\nAnd 3?\n"))
    assert ask("--temperature", "0") == (0, "42\n42\n", "")
    turns = (("user", QUESTION), ("assistant", "42"), ("user", "And 3?"))
    talk = [{"role": role, "content": content} for role, content in turns]
    encoded = Encoding(load_tokenizer(model)).prompts([Example(prompt=tuple(talk[:n])) for n in (1, 3)], 120)
    assert asked == [*encoded.ids]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n{'Why? ' * 99}\nAnd 3?\n"))
    code, answers, error = ask("--temperature", "0")
    assert (code, answers, asked[2:]) == (2, "42\n42\n", asked[:2])  # a line that is too long is left out
    first, last = error.splitlines()
    assert first.startswith("error: line 2: prompt 1 has") and last.startswith("error: no answer to line 2")


def test_an_answer_has_no_blank_that_the_template_writes(monkeypatch):
    """Mistral's answers begin with a blank, which its template writes before each message of the assistant."""
    mistral, mesh = FAMILY["mistral"], make_mesh(8, 1, 1)
    talk = user("How many?"), assistant("It is 4")
    whole, asked = (encode_chat(mistral, talk[:n], add_generation_prompt=n == 1) for n in (2, 1))
    fields: Any = map(np.array, ([whole], [len(asked)], [len(whole) - len(asked)], [[]], [True]))
    rows = Generation(*fields)
    monkeypatch.setattr(generate, "engine_of", lambda *_: lambda *_: rows)
    sizes = SimpleNamespace(max_positions=200)
    model: Any = SimpleNamespace(config=sizes, architecture=None, params=None, frozen=())
    for chat, text in ((True, "It is 4"), (False, "  It is 4")):
        form = generate.Asked(DatasetsData(), chat=chat)
        generator = Generator(model, mistral, mesh, Compute(), SamplingConfig(8), 8, form, "the default")
        prompts = generator.encode([Example("How many?")])
        assert [one.text for one in generator.answer(prompts, jax.random.key(0))] == [text]


def test_answers_have_their_lines_and_no_escapes(ask, monkeypatch):
    texts = ["def f():", "def f():\n    return", "def f():\n    return 1\r\n\x1b[2J\n# end\ufffd"]
    shown = "def f():\n    return 1\n\n# end\ufffd\n"
    monkeypatch.setattr(Generator, "stream", lambda *_: iter(texts))
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n\n"))
    assert ask() == (0, shown, "")
    monkeypatch.setattr(Generator, "answer", lambda *_: iter([Response((), texts[-1], True)]))
    assert ask("--raw", "--prompt", "Why?")[:2] == (0, f"> Why?\n{shown}\n")


def test_a_run_that_learnt_from_plain_text_is_asked_in_plain_text(ask, asked, tmp_path, model):
    (tmp_path / "model").symlink_to(model)
    for recorded, chat in (({"chat": False}, False), ({"chat": True}, True), ({}, True)):
        (tmp_path / "prompting.json").write_text(json.dumps(recorded))
        code, printed, _ = ask("--prompt", "Why?", "--temperature", "0", model=tmp_path)
        assert code == 0 and ("<|im_start|>user" in printed) is chat
    for damaged in ("{", "[]"):
        (tmp_path / "prompting.json").write_text(damaged)
        code, printed, error = ask("--prompt", "Why?", model=tmp_path)
        assert code == 2 and "prompting.json is not" in error and error.count("\n") == 1 and printed == ""


def test_a_typed_line_ends_as_prompts_did_in_training(ask, asked, tmp_path, model, monkeypatch):
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "prompting.json").write_text(json.dumps({"chat": False, "prompt_end": "\n"}))
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n\n"))
    assert ask(model=tmp_path) == (0, "42\n", "")
    for prompt in ("Why?", "Why?\n"):
        assert ask("--prompt", prompt, model=tmp_path)[:2] == (0, "> Why?\n4\n\n")
    plain = Encoding(load_tokenizer(model), chat=False).prompts([Example(prompt="Why?\n")], 64)
    assert asked == [*plain.ids] * 3


def test_an_export_without_its_run_is_asked_as_the_run_was(ask, asked, tmp_path, model):
    model = shutil.copytree(model, tmp_path / "out" / "model")
    prompting = model / "prompting.json"
    prompting.write_text('{"chat": false, "prompt_end": "\\n"}')
    for place in (model, model.parent):
        assert ask("--prompt", "Why?", model=place)[1] == "> Why?\n4\n\n"
    plain = Encoding(load_tokenizer(model), chat=False).prompts([Example(prompt="Why?\n")], 64)
    assert asked == [*plain.ids] * 2
    for content, sentence in (
        ('{"prompt_end": 3}', "prompting.json: prompt_end is 3, not a str"),
        ("{", "export or download the model again"),
    ):
        prompting.write_text(content)
        code, _, error = ask("--prompt", "Why?", model=model)
        assert code == 2 and sentence in error and error.count("\n") == 1


def test_answers_of_a_run_are_as_long_as_in_its_training(tmp_path, user, monkeypatch):
    asked = []

    def stop(path, sampling, answering, **_):
        asked.append(answering.data.max_response)
        raise UserError("far enough")

    monkeypatch.setattr(generate, "load", stop)
    (tmp_path / "config.yaml").write_text("data: {max_response: 3}\n")
    for model in (tmp_path, user / "actor"):
        assert cli(["--model", str(model), "--prompt", "Why?"]) == 2
    assert asked == [3, 256]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# (the run's config, the model's generation_config.json, what is typed)
# -> temperature, top_k, top_p, min_new_tokens, max_new_tokens; words of the greeting
SAMPLED = [
    (None, {}, "", (1.0, None, None, 0, 64), "at temperature 1 (the default)"),  # 256 would leave no room
    (
        *(None, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 5}, ""),
        *((0.6, 20, 0.9, 0, 5), "in up to 5 tokens, at temperature 0.6, top_k 20, top_p 0.9 (generation_config.json)"),
    ),
    (None, {"do_sample": False, "temperature": 0.6, "top_k": 9}, "", (0.0, None, None, 0, 64), "at temperature 0 (gen"),
    (
        None,
        {"temperature": 0.6, "top_k": 0, "top_p": 1.0, "max_new_tokens": 4096},
        "",
        (0.6, None, None, 0, 64),
        "temperature 0.6 (gen",
    ),
    (
        *(None, {"temperature": 0.6, "top_k": 20}, "--temperature 0.3 --max-new-tokens 7"),
        *((0.3, 20, None, 0, 7), "(as asked, else generation_config.json)"),
    ),
    (
        *({"sampling": {"temperature": 0.7, "top_p": 0.5, "min_new_tokens": 2}}, {"temperature": 0.6, "top_k": 20}, ""),
        *((0.7, None, 0.5, 2, 12), "at temperature 0.7, top_p 0.5 (the run's sampling)"),
    ),
    (
        *({"sampling": {"top_p": 0.5, "min_new_tokens": 5}}, {}, "--top-p 1 --max-new-tokens 3"),
        *((1.0, None, 1.0, 3, 3), "(as asked, else the run's sampling)"),
    ),
    ({"stages": ["ppo"]}, {"temperature": 0.6}, "", (1.0, None, None, 0, 12), "(the run's sampling)"),
    # A run that samples nothing and sets nothing changes nothing.
    ({"stages": ["sft"]}, {"temperature": 0.6, "max_new_tokens": 99}, "", (0.6, None, None, 0, 12), "(generation_conf"),
]


@pytest.mark.parametrize(("run", "generation", "typed", "expected", "greeting"), SAMPLED)
def test_answers_are_drawn_as_typed_else_as_in_the_run_else_as_the_model_says(
    run, generation, typed, expected, greeting, tmp_path, model, settings, monkeypatch, capsys
):
    own = shutil.copytree(model, tmp_path / "model")
    (own / "generation_config.json").write_text(json.dumps(generation))
    if run is not None:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(**run)))
        (tmp_path / "environment.txt").write_text("")
    drawn = []
    monkeypatch.setattr(Generator, "stream", lambda self, *_: drawn.append(self.sampling) or iter(["4"]))
    monkeypatch.setattr("sys.stdin", Terminal("Why?\n\n"))
    for place in [own] if run is None else [tmp_path, own]:  # a run, and the model in it
        sys.stdin.seek(0)
        assert cli(["--model", str(place), "--platform", "cpu", *typed.split()]) == 0
        assert greeting in capsys.readouterr().out
        sampling, names = drawn.pop(), ("temperature", "top_k", "top_p", "min_new_tokens", "max_new_tokens")
        assert tuple(getattr(sampling, name) for name in names) == expected


def test_a_setting_of_the_model_that_cannot_be_read_is_named_with_its_file(ask, tmp_path, model):
    own = shutil.copytree(model, tmp_path / "model")
    for generation, sentence in (({"temperature": "hot"}, "temperature=hot"), ({"top_p": 3}, "top_p=3.0")):
        (own / "generation_config.json").write_text(json.dumps(generation))
        code, _, error = ask("--prompt", "a", model=own)
        assert code == 2 and "generation_config.json" in error and sentence in error


def test_bad_input_is_one_sentence(ask, tmp_path, user):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    table = [
        (["--out", "x.jsonl", "--prompt", "a"], "--out holds the answers to --file"),
        (["--column", "question", "--prompt", "a"], "--column holds the prompts of --file: give a file"),
        (["--out", ".", "--file", "gone.jsonl"], "--out . is a directory"),
        (["--out", "/dev/null/x", "--file", "gone.jsonl"], "--out /dev/null/x cannot be written (Not a directory)"),
        (["--prompt", "a", "-n", "0"], "must be at least 1"),
        (["--prompt", "a", "-n", "9" * 30], "must be at most 65536"),
        (["--prompt", "a", "--seed", "9" * 30], "must be a number of at most 64 bits"),
        (["-n", "2"], "in a conversation each turn has one"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2.0"),
        (["--prompt", "a", "--min-p", "2"], "min_p=2.0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "a", "--max-new-tokens", "128"], "leaves no room for a prompt: the model has 128"),
        (["--prompt", "a " * 200], "and with max_new_tokens="),
        (["--raw", "--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--raw", "--system", "b"], "leave the message out"),
        (["--file", "gone.jsonl"], "gone.jsonl does not exist"),
        (["--prompt", "a", "--adapter", "gone"], "gone/adapter_config.json does not exist"),
        (["--prompt", "a", "--platform", "tpu"], "tpu"),
        (["--prompt", "a", "--top-k", "0"], "top_k"),
        (["--prompt", "a", "--stop", ""], "stop=('',): it must be texts of at most 256 bytes together, none empty"),
        (["--prompt", "a", "--stop", "x<|im_end|>"], "holds the special token '<|im_end|>', which texts of responses"),
        (["--prompt", "a", "--keep-stop"], "keep_stop leaves stop in the answer, and there is none: give it"),
        (["--prompt", "a", "--model", str(tmp_path / "gone")], "does not exist"),
        (["--prompt", "a", "--model", str(tmp_path)], "holds no model"),
        (
            ["--prompt", "a", "--model", str(tmp_path / "adapter")],
            "is an adapter: name its base here, and this directory in --adapter",
        ),
        (["--prompt", "a", "--model", str(user / "reward")], "holds a reward model"),
    ]
    for arguments, message in table:
        code, printed, error = ask(*arguments)
        assert code == 2 and message in error and error.count("\n") == 1 and printed == "", arguments
