"""The built-in sums: they are right, differ from the held-out ones, and their characters are the tokens."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jrlhf.config import Config, config_names, load_config
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig, export_hf, init_lm
from jrlhf.planning.dryrun import describe
from jrlhf.rewards.builtin import exact_match, numeric_answer
from jrlhf.tasks.arithmetic.problems import add, draw_problems, question, worked_answer
from jrlhf.tasks.arithmetic.task import CHARACTERS, load_task, make_tokenizer

CONFIGS = [name for name in config_names() if name.startswith("arithmetic-")]
SIZES = [(2, 2), (3, 2), (5, 1), (2, 4)]


MESH = ["device.simulated=8", "mesh.fsdp=2", "mesh.tensor=4"]  # of the tests' devices


def config(*overrides: str) -> Config:
    return load_config("arithmetic-grpo", [*MESH, *overrides])


def test_every_link_of_a_worked_answer_is_the_sum_by_pythons_own_arithmetic():
    for terms, digits in SIZES:
        learnt, heldout = draw_problems(60, 20, terms=terms, digits=digits, seed=3)
        for numbers in learnt + heldout:
            assert all(len(str(number)) == digits for number in numbers)
            links = (question(numbers) + worked_answer(numbers)).split("=")
            assert len(links) == terms
            assert {eval(link) for link in links} == {sum(numbers)}
            assert links[0] == "+".join(map(str, numbers)) and links[-1] == str(sum(numbers))


def test_answers_may_be_written_from_the_units_on():
    assert worked_answer((37, 48, 25), units_first=True) == "58+52=011"
    one, other = (load_task(config(f"data.units_first={value}")) for value in ("true", "false"))
    assert one.prompts is not None and other.prompts is not None
    assert one.prompts.texts == other.prompts.texts
    for reversed_, plain in zip(one.prompts.examples, other.prompts.examples, strict=True):
        assert reversed_.completion == reversed_.columns["answer"] == plain.columns["answer"][::-1]


def test_carries_are_forgotten_as_often_as_is_said():
    """A column has one carry to forget, and none without one: 4.5 standard deviations of 4,000 sums."""
    rng = np.random.default_rng(0)
    assert {add(3, 6, 0.3, rng) for _ in range(50)} == {9}
    sums = [add(7, 8, 0.3, rng) for _ in range(4000)]
    assert set(sums) == {5, 15}
    assert sums.count(5) / 4000 == pytest.approx(0.3, abs=4.5 * np.sqrt(0.3 * 0.7 / 4000))
    for a, b in rng.integers(0, 10_000, (100, 2)).tolist():  # without its carries each column is added by itself
        columns = [(int(x) + int(y)) % 10 for x, y in zip(f"{a:05}", f"{b:05}", strict=True)]
        assert add(a, b, 1.0, rng) == int("".join(map(str, columns)))
        assert add(a, b, 0.0, rng) == add(a, b) == a + b
    assert worked_answer((58, 67, 99), 1.0, rng) == "15+99=4"


def test_sums_depend_on_the_seed_alone_and_no_heldout_one_is_learned_from():
    learned, heldout = draw_problems(3500, 512, terms=2, digits=2, seed=0)
    unordered = [tuple(sorted(problem)) for problem in heldout]
    assert len(set(learned)) == 3500 and len(set(unordered)) == 512
    assert not {tuple(sorted(problem)) for problem in learned} & set(unordered)
    sizes = {"terms": 2, "digits": 3}
    learned, heldout = draw_problems(200, 50, **sizes, seed=1)
    assert (learned, heldout) == draw_problems(200, 50, **sizes, seed=1)
    more = draw_problems(300, 50, **sizes, seed=1)
    assert more[0][:200] == learned and more[1] == heldout
    others = draw_problems(200, 50, **sizes, seed=2)
    assert others[0] != learned and others[1] != heldout
    for wanted in [(81, 1), (1, 46)]:
        with pytest.raises(ValueError, match="of sums of 2 numbers of 1 digit"):
            draw_problems(*wanted, terms=2, digits=1, seed=0)


def test_first_terms_are_spread_evenly():
    """Each of the nine digits in a ninth of the places: 4.5 standard deviations of 3,000 draws."""
    learned, _ = draw_problems(3000, 1, terms=2, digits=2, seed=0)
    counts = np.bincount([number // 10 for numbers in learned for number in numbers], minlength=10)[1:]
    np.testing.assert_allclose(counts / 6000, 1 / 9, atol=4.5 * np.sqrt(1 / 9 * 8 / 9 / 6000))


def test_a_character_is_a_token_and_every_text_comes_back():
    tokenizer = make_tokenizer()
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (1,), 14)
    for text in (CHARACTERS, "37+48=85", "007", ""):
        ids = tokenizer.encode(text)
        assert ids == [CHARACTERS.index(character) + 2 for character in text]
        assert tokenizer.decode([*ids, tokenizer.eos_id, 0]) == text


def test_the_tasks_own_answers_are_right_and_others_wrong():
    task = load_task(config("data.problems=100", "data.heldout_rows=30"))
    assert task.prompts is not None and task.heldout is not None
    assert (len(task.prompts.ids), len(task.heldout.ids)) == (100, 30)
    for prompts in (task.prompts, task.heldout):
        assert [task.tokenizer.decode(row) for row in prompts.ids] == list(prompts.texts)
        answers = [example.columns["answer"] for example in prompts.examples]
        completions = [example.completion for example in prompts.examples]
        assert set(exact_match(completions, answers)) == set(numeric_answer(completions, answers)) == {1.0}
        assert set(exact_match([f"{completion}1" for completion in completions], answers)) == {0.0}
        assert set(numeric_answer([str(int(answer) + 1) for answer in answers], answers)) == {0.0}


def test_demonstrations_are_the_first_sums_and_forget_anew_at_every_step():
    task = load_task(config("data.demonstrations=7", "data.forgotten=0"))
    assert task.sft is not None and task.prompts is not None and task.sft.count == 7
    batch = task.sft.batch(np.array([6, 0]), 0)
    first = task.prompts.examples[0]
    assert task.tokenizer.decode(batch.ids[1]) == f"{first.prompt}{first.completion}"
    learned = [token for token, learn in zip(batch.ids[1], batch.learn[1], strict=True) if learn]
    assert learned == [*task.tokenizer.encode(str(first.completion)), task.tokenizer.eos_id]
    task, rows = load_task(config("data.forgotten=0.5")), np.arange(200)
    assert task.sft is not None and task.prompts is not None
    one, again, next_step = (task.sft.batch(rows, step).ids for step in (0, 0, 1))
    assert one == again and one != next_step
    examples = task.prompts.examples
    texts = [task.tokenizer.decode(row) for row in one]
    assert 0.3 < np.mean([text == f"{e.prompt}{e.completion}" for text, e in zip(texts, examples, strict=False)]) < 0.8
    assert all(str(eval(str(e.prompt)[:-1]))[::-1] == e.columns["answer"] for e in examples)  # for rewards


def test_fingerprints_tell_what_is_learned_from_apart():
    few = ["data.problems=200", "data.demonstrations=200", "data.heldout_rows=20"]
    changes = ["seed=0", "seed=1", "data.problems=300", "data.demonstrations=9", "data.heldout_rows=21"]
    changes += ["data.forgotten=0.1", "data.units_first=false"]
    words = [load_task(config(*few, change)).fingerprint for change in changes]
    assert len(set(words)) == len(words) and load_task(config(*few)).fingerprint == words[0]


def test_settings_that_do_not_go_together():
    table = [
        (["data.digits=3"], "are too short for sums of 8 tokens and answers of 5: raise them"),
        (["data.problems=9000"], "data.problems=9000 with data.heldout_rows=512: of sums"),
        (["model.vocab_size=13"], "model.vocab_size=13 is too small: data.source=arithmetic has 14 tokens"),
        (["data.demonstrations=3501"], "data.demonstrations=3501: it must be at most problems=3500, or"),
        (["data.terms=1"], "data.terms=1: it must be at least 2"),
        (["data.chat=true"], "data.chat=True has no effect with data.source=arithmetic"),
        (["data.renaming=0.1"], "data.renaming=0.1 has no effect with data.source=arithmetic"),
    ]
    for overrides, message in table:
        with pytest.raises(UserError, match=".*".join(message.split())):
            describe(config(*overrides))


def test_configs_differ_in_their_algorithm_alone():
    """`--dry-run` describes the sums and the algorithm; up to the algorithm's section the configs are equal."""
    first, pace = config(), ("iterations", "rollout_batch", "actor")
    for name in CONFIGS:
        settings, algorithm = load_config(name, MESH), name.removeprefix("arithmetic-")
        assert settings.stages == ("sft", algorithm)
        assert [getattr(settings.rl, key) for key in pace] == [getattr(first.rl, key) for key in pace]
        sections = {"sft": settings.sft, "grpo": first.rl}
        assert replace(settings, name=first.name, stages=first.stages, sections=sections) == first
    plan = describe(first)
    assert "3500 sums to learn from, 3500 of them with worked answers, 512 held out" in plan
    assert "iteration of grpo, colocate, on" in plan


@pytest.mark.full
def test_transformers_reads_the_tokenizer_of_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = ModelConfig(14, 8, 1, 1, 1, 8, mlp=8, max_positions=16), make_tokenizer()
    shapes = jax.eval_shape(partial(init_lm, model), jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    ends = {"eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    theirs = transformers.AutoTokenizer.from_pretrained(
        export_hf(zeros, model, tmp_path / "model", tokenizer_json=tokenizer.to_json(), **ends)
    )
    assert theirs("37+48=", add_special_tokens=False).input_ids == tokenizer.encode("37+48=")
    assert theirs.decode(tokenizer.encode("37+48=85"), skip_special_tokens=True) == "37+48=85"
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)
