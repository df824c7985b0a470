"""Rows to learn from, and rows that are held out."""

import json

import pytest

from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.data.datasets import keep_apart, load_task, prompt_text
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.errors import UserError

from .conftest import from_rows

ASKED = [f"question {number}" for number in range(60)]


def dataset(prompts, **columns):
    return from_rows([{"prompt": prompt, **columns} for prompt in prompts])


def texts(part) -> list[str]:
    return [prompt_text(example) for example in part.examples]


def test_no_prompt_is_both_learnt_and_held_out_however_often_it_comes():
    prompts = [f"question {number % 30}" for number in range(120)]
    split = keep_apart({"prompts": dataset(prompts)}, 10)["prompts"]
    assert len(split.heldout.examples) == 10
    heldout = set(texts(split.heldout))
    assert texts(split.trained) == [prompt for prompt in prompts if prompt not in heldout]
    # The split does not depend on the order of rows, and is shuffled.
    one, other = (keep_apart({"sft": dataset(rows, completion="x")}, 10)["sft"] for rows in (ASKED, ASKED[::-1]))
    assert texts(one.heldout) == texts(other.heldout) != ASKED[:10]
    with pytest.raises(UserError, match="data.heldout_rows=8 leaves nothing of rows to learn from: it has 8 rows"):
        keep_apart({"prompts": dataset(ASKED[:8])}, 8)
    with pytest.raises(UserError, match="data.heldout has every prompt of rows: name other rows to hold out"):
        keep_apart({"prompts": dataset(ASKED[:8]), "heldout": dataset(ASKED)}, 8)
    # Pairs without a common beginning have no prompt.
    pairs = keep_apart({"preferences": from_rows([{"chosen": text, "rejected": "No"} for text in ASKED])}, 8)
    assert [len(part.examples) for part in pairs["preferences"]] == [52, 8]


def test_whole_prompts_are_compared():
    """A question may stand in the system message, and two questions may differ in an earlier answer alone."""

    def turns(*contents: str) -> list[dict]:
        roles = ("system", "user", "assistant", "user")
        return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]

    asked = dataset([turns(text, "Answer.") for text in ASKED[:40]])
    split = keep_apart({"prompts": asked}, 8)["prompts"]
    assert (len(split.trained.examples), len(split.heldout.examples)) == (32, 8)
    split = keep_apart({"prompts": dataset([turns("s", "Guess.", text, "Why?") for text in ASKED[:40]])}, 8)["prompts"]
    assert (len(split.trained.examples), len(split.heldout.examples)) == (32, 8)
    tools = [{"type": "function", "function": {"name": text}} for text in ASKED[:40]]
    rows = from_rows([{"prompt": turns("s", "Act."), "tools": [tool]} for tool in tools])
    assert len({prompt_text(example) for example in rows.examples}) == 40
    # Several answers to one question are one prompt, also as whole conversations; so is the question as text.
    answers = from_rows([{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
                         for text in ASKED[:3]])  # fmt: skip
    assert {*texts(answers), *texts(dataset(["q"])), *texts(dataset([turns("", "q")[1:]]))} == {"q"}
    # One prompt alone cannot be divided, however few rows are to be held out.
    with pytest.raises(UserError, match="has 40 rows and 1 prompts, set it to 0, name rows of their own in data.held"):
        keep_apart({"prompts": dataset([turns("s", "q")] * 40)}, 1)
    assert not keep_apart({"prompts": dataset([turns("s", "q")] * 40)}, 0)["prompts"].heldout.examples


def test_what_one_dataset_holds_out_no_other_learns_from():
    turns = [[{"role": "user", "content": prompt}] for prompt in ASKED[:50]]  # the same prompts as conversations
    pairs = dataset(ASKED[5:], chosen="a", rejected="b")
    splits = keep_apart({"sft": dataset(ASKED, completion="x"), "prompts": dataset(turns), "preferences": pairs}, 8)
    heldout = {text for split in splits.values() for text in texts(split.heldout)}
    assert all(len(split.heldout.examples) == 8 for split in splits.values())
    assert all(not heldout & set(texts(split.trained)) for split in splits.values())
    # The order is a hash of the prompt: the datasets hold mostly the same ones out, not three sets of eight.
    assert len(heldout) < 16
    # Held-out prompts of their own replace those that are kept apart, and leave training.
    splits = keep_apart({"prompts": dataset(ASKED), "heldout": dataset(ASKED[:5])}, 8)
    assert sorted(texts(splits["heldout"].heldout)) == ASKED[:5]
    assert not splits["prompts"].heldout.examples and texts(splits["prompts"].trained) == ASKED[5:]


@pytest.mark.parametrize("ends, expected", [("\n\n", "\n"), ("\n ", ""), (": ", ""), ("?!", "")])
def test_a_typed_line_is_to_end_as_all_prompts_do(tmp_path, user, ends, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q {row}{ends[row % 2]}"}) + "\n" for row in range(16)))
    data = {"source": "datasets", "prompts": {"path": str(path)}, "heldout_rows": 4, "max_prompt": 16}
    sections = {"stages": ["grpo"], "model": {"path": str(user / "actor")}, "data": data}
    for chat in (False, True):
        config = build(Config, sections | {"data": data | {"chat": chat, "max_prompt": 100}})
        task = load_task(config, load_tokenizer(user / "actor"))
        assert (task.chat, task.prompt_end) == (chat, "" if chat else expected)


def test_rows_that_are_left_out_are_counted(tmp_path, user):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q {row // 3}"}) + "\n" for row in range(30)))  # each prompt thrice
    data = {"source": "datasets", "prompts": {"path": str(path)}, "heldout_rows": 4, "max_prompt": 16}
    grpo = {"rollout_batch": 8, "algorithm": {"samples": 2}}
    sections = {"stages": ["grpo"], "model": {"path": str(user / "actor")}, "data": data, "grpo": grpo}
    config = build(Config, sections | {"rewards": [{"function": "exact_match"}]})
    description = load_task(config, load_tokenizer(user / "actor")).description
    # 4 rows are of two prompts, of which all 6 rows are not learned from.
    assert "data.prompts: 2 more rows left out, whose prompts are held out" in description


def mixture(user, tmp_path, *names, **changes):
    """The task of a config whose prompts come from these files; each has 20 rows."""
    files = {name: tmp_path / f"{name}.jsonl" for name in names}
    for name, file in files.items():
        own = {"data_source": "own"} if name == "columned" else {}
        file.write_text("".join(json.dumps({"prompt": f"{name} {n}", **own}) + "\n" for n in range(20)))
    prompts = [{"path": str(file)} | changes.pop(name, {}) for name, file in files.items()]
    data = {"source": "datasets", "prompts": prompts, "heldout_rows": 3, "max_prompt": 64} | changes
    config = build(Config, {"stages": ["grpo"], "model": {"path": str(user / "actor")}, "data": data})
    return load_task(config, load_tokenizer(user / "actor"))


def test_a_mixture_has_the_rows_of_all_sources_with_their_names(user, tmp_path):
    task = mixture(user, tmp_path, "a", "columned", "b", a={"weight": 2}, b={"name": "bees"})
    assert task.prompts is not None and task.heldout is not None
    assert [(source.name, source.count, source.weight) for source in task.prompts.sources] == [
        ("a", 17, 2.0),
        ("columned", 17, 1.0),
        ("bees", 17, 1.0),
    ]
    assert [example.source for example in task.prompts.examples] == ["a"] * 17 + ["own"] * 17 + ["bees"] * 17
    assert task.prompts.names == ("a", "bees", "own")
    assert [text.split()[0] for text in task.prompts.texts] == ["a"] * 17 + ["columned"] * 17 + ["b"] * 17
    assert [example.source for example in task.heldout.examples] == ["a", "own", "bees"] * 3
    assert not {*task.prompts.texts} & {*task.heldout.texts} and len({*task.prompts.texts, *task.heldout.texts}) == 60
    assert "data.prompts[2]: " in task.description and "data.prompts: a gives 50.0% of the prompts" in task.description
    same = mixture(user, tmp_path, "a", "columned", "b", a={"weight": 3}, b={"name": "bees"})
    assert same.fingerprint == task.fingerprint != mixture(user, tmp_path, "a", "columned", "b").fingerprint
    heldout = {"path": str(tmp_path / "columned.jsonl")}
    apart = mixture(user, tmp_path, "a", "b", heldout=heldout)
    assert apart.prompts is not None and apart.heldout is not None
    assert [source.count for source in apart.prompts.sources] == [20, 20] and len(apart.heldout.ids) == 20
    with pytest.raises(UserError, match=r"^data.heldout_rows=20 leaves nothing of .*a.jsonl to learn from"):
        mixture(user, tmp_path, "a", "b", heldout_rows=20)
    with pytest.raises(UserError, match=r"^data.prompts\[1\]: .*gone.jsonl does not exist"):
        mixture(user, tmp_path, "a", "b", b={"path": str(tmp_path / "gone.jsonl")})


def test_answers_of_conversations_are_left_out_in_a_mixture(user, tmp_path):
    """Each source has a shape of its own: messages end with an answer, prompts may end with its beginning."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for name, column in (("whole", "messages"), ("begun", "prompt")):
        rows = [{column: [{"role": "user", "content": f"{name} {n}"}, turns[1]]} for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"a": {"path": str(tmp_path / "whole.jsonl")}, "b": {"path": str(tmp_path / "begun.jsonl")}}
    task = mixture(user, tmp_path, "a", "b", **paths)
    assert task.prompts is not None
    assert [len(example.prompt) for example in task.prompts.examples] == [1] * 17 + [2] * 17
