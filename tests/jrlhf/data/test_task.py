"""Which rows are learnt from and which are held out."""

import pytest

from jrlhf.data.datasets import keep_apart, prompt_text
from jrlhf.errors import UserError

from .conftest import from_rows


def dataset(prompts, **columns):
    return from_rows([{"prompt": prompt, **columns} for prompt in prompts])


def texts(part) -> list[str]:
    return [prompt_text(example) for example in part.examples]


def test_no_prompt_is_both_learnt_and_held_out_however_often_it_comes():
    prompts = [f"question {number % 30}" for number in range(120)]
    split = keep_apart({"prompts": dataset(prompts)}, 10)["prompts"]
    assert len(split.heldout.examples) == 10
    assert not set(texts(split.trained)) & set(texts(split.heldout))
    assert len(split.trained.examples) == sum(prompt not in set(texts(split.heldout)) for prompt in prompts)


def test_what_one_dataset_holds_out_no_other_learns_from():
    asked = [f"question {number}" for number in range(60)]
    turns = [[{"role": "user", "content": prompt}] for prompt in asked[:50]]  # the same prompts as conversations
    splits = keep_apart(
        {"sft": dataset(asked, completion="x"), "prompts": dataset(turns), "preferences": pairs(asked[5:])}, 8
    )
    heldout = {text for split in splits.values() for text in texts(split.heldout)}
    assert all(len(split.heldout.examples) == 8 for split in splits.values())
    assert all(not heldout & set(texts(split.trained)) for split in splits.values())
    # The order is a hash of the prompt: the datasets hold mostly the same ones out, not three sets of eight.
    assert len(heldout) < 16


def pairs(prompts):
    return from_rows([{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in prompts])


def test_held_out_prompts_of_their_own_replace_those_kept_apart_and_leave_training():
    asked = [f"question {number}" for number in range(20)]
    splits = keep_apart({"prompts": dataset(asked), "heldout": dataset(asked[:5])}, 8)
    assert sorted(texts(splits["heldout"].heldout)) == asked[:5]
    assert not splits["prompts"].heldout.examples and texts(splits["prompts"].trained) == asked[5:]


def test_the_split_does_not_depend_on_the_order_of_rows_and_is_shuffled():
    asked = [f"question {number}" for number in range(40)]
    one, other = (keep_apart({"sft": dataset(rows, completion="x")}, 10)["sft"] for rows in (asked, asked[::-1]))
    assert texts(one.heldout) == texts(other.heldout) != asked[:10]


def test_nothing_left_to_learn_from_is_an_error():
    with pytest.raises(UserError, match="data.heldout_rows=8 leaves nothing of rows to learn from: it has 8 rows"):
        keep_apart({"prompts": dataset([f"question {number}" for number in range(8)])}, 8)
