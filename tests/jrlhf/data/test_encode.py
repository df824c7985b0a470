"""Token ids of prompts, of sequences to learn and of answers to compare: against transformers' ids and by hand."""

import json
from dataclasses import replace

import pytest

from jrlhf.config.schema import ColumnsConfig as Columns
from jrlhf.data.chat import render_chat
from jrlhf.data.encode import encode_answered, tools_of
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example
from jrlhf.errors import UserError

from .conftest import (
    FAMILY,
    GOLDEN,
    QWEN,
    assistant,
    encode_chat,
    encode_preferences,
    encode_prompts,
    encode_sft,
    from_rows,
    user,
)

END = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}
EGGS = {"prompt": [user("How many eggs?")], "completion": [assistant("16 - 3 = 13")]}


def pieces(tokenizer: Tokenizer, ids: tuple[int, ...], learn: tuple[bool, ...]) -> list[tuple[bool, str]]:
    """The runs of learnt and other tokens, as text with its special tokens."""
    runs: list[tuple[bool, list[int]]] = []
    for token, learnt in zip(ids, learn, strict=True):
        if not runs or runs[-1][0] != learnt:
            runs.append((learnt, []))
        runs[-1][1].append(token)
    return [(learnt, tokenizer.backend.decode(run, skip_special_tokens=False)) for learnt, run in runs]


# Prompts.


@pytest.mark.parametrize("name", END)
def test_prompts(name: str):
    tokenizer = FAMILY[name]
    # Conversations up to the answer, or into the assistant's last words; plain text with its beginning: the ids of
    # transformers.
    rows = [
        ({"prompt": messages}, expected["prompt_ids"])
        for messages, expected in zip(GOLDEN["conversations"], GOLDEN[name]["conversations"], strict=True)
        if expected is not None
    ]
    rows += [({"prompt": row["text"]}, row["ids"]) for row in GOLDEN[name]["texts"]]
    prompts = encode_prompts(from_rows([row for row, _ in rows]), tokenizer, max_prompt=300)
    assert prompts.ids == tuple(tuple(ids) for _, ids in rows)
    assert prompts.texts[0] == render_chat(tokenizer, rows[0][0]["prompt"], add_generation_prompt=True)
    assert prompts.texts[-1] == rows[-1][0]["prompt"]
    assert (prompts.filtered, prompts.truncated, len(prompts.examples)) == (0, 0, len(rows))
    # Overlong ones.
    data = from_rows([{"prompt": "eggs"}, {"prompt": "How many eggs does she eat?"}, {"prompt": "a b"}])
    ids = encode_prompts(data, tokenizer, max_prompt=300).ids
    longest = len(ids[1])
    with pytest.raises(UserError) as caught:
        encode_prompts(data, tokenizer, max_prompt=longest - 1)
    assert str(caught.value) == (
        f"row 2: {longest} tokens are too many for at most {longest - 1}: raise the limit, or set overlong to "
        f"filter (leave such rows out) or truncate_left (cut their beginnings off); 1 of 3 rows are too long, the "
        f"longest has {longest} tokens"
    )
    filtered = encode_prompts(data, tokenizer, max_prompt=longest - 1, overlong="filter")
    assert (filtered.ids, filtered.filtered, filtered.truncated) == ((ids[0], ids[2]), 1, 0)
    assert [example.prompt for example in filtered.examples] == ["eggs", "a b"]
    assert filtered.describe().endswith("; 1 too long and left out")
    cut = encode_prompts(data, tokenizer, max_prompt=longest - 2, overlong="truncate_left")
    count = longest - 2 - len(tokenizer.prefix_ids)  # what begins every text stays
    assert cut.ids == (ids[0], (*tokenizer.prefix_ids, *ids[1][-count:]), ids[2])
    assert (cut.filtered, cut.truncated) == (0, 1)
    assert cut.describe().endswith("; 1 too long and cut off at the beginning")
    with pytest.raises(UserError, match="no row is left: 3 are longer than 0 tokens"):
        encode_prompts(data, tokenizer, max_prompt=0, overlong="filter")


def test_plain_prompts_become_the_users_turn_where_chat_is_on():
    data = from_rows([{"question": "2 + 2?", "answer": "4"}], columns=Columns(prompt="question"))
    plain = encode_prompts(data, QWEN, max_prompt=300)
    assert plain.examples == data.examples and plain.texts == ("2 + 2?",)
    chat = encode_prompts(data, QWEN, max_prompt=300, chat=True, system="Be brief.")
    messages = ({"role": "system", "content": "Be brief."}, user("2 + 2?"))
    assert chat.examples == (Example(prompt=messages, columns={"question": "2 + 2?", "answer": "4"}),)
    assert list(chat.ids[0]) == encode_chat(QWEN, messages, add_generation_prompt=True)
    own = ({"role": "system", "content": "Be wordy."}, user("2 + 2?"))
    encoded = encode_prompts([Example(own)], QWEN, max_prompt=300, system="Be brief.")
    assert encoded.examples[0].prompt == own
    with pytest.raises(UserError, match="row 1: a system message is given for plain text: make that a conversation"):
        encode_prompts(data, QWEN, max_prompt=300, system="Be brief.")


def test_the_last_answer_of_whole_conversations_is_left_out():
    turns = [user("2?"), assistant("4"), user("3?"), assistant("9")]
    prompts = encode_prompts(from_rows([{"messages": turns}]), QWEN, max_prompt=300)
    assert list(prompts.ids[0]) == encode_chat(QWEN, turns[:3], add_generation_prompt=True)
    assert prompts.examples[0].prompt == tuple(turns[:3])
    for system in (None, "Be brief."):
        with pytest.raises(UserError, match="row 1: the conversation has nothing before its answer: remove the row"):
            encode_prompts(from_rows([{"messages": turns[1:2]}]), QWEN, max_prompt=300, system=system)
    continued = encode_prompts([Example(tuple(turns))], QWEN, max_prompt=300)  # a prompt is taken as it is
    assert list(continued.ids[0]) == encode_chat(QWEN, turns, continue_final=True)


def test_a_row_that_cannot_be_rendered_is_named():
    rows = [{"prompt": [user("a")]}, {"prompt": [user("a"), user("b")]}]
    with pytest.raises(UserError, match="row 2: the chat template refuses the messages: Conversation roles must alt"):
        encode_prompts(from_rows(rows), FAMILY["gemma"], max_prompt=99)
    with pytest.raises(UserError, match="^row 2: the chat template refuses"):
        encode_prompts(from_rows(rows).examples, FAMILY["gemma"], max_prompt=99)
    with pytest.raises(UserError, match="row 1: the prompt is empty"):
        encode_prompts([Example("")], FAMILY["qwen"], max_prompt=99)


def test_tools_of_a_row_reach_the_template():
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [{"prompt": [user("2?")], "tools": tools} for tools in ([tool], json.dumps([tool]), None)]
    texts = encode_prompts(from_rows(rows), QWEN, max_prompt=300).texts
    assert texts[0] == texts[1] == render_chat(QWEN, [user("2?")], add_generation_prompt=True, tools=[tool])
    assert '"name": "add"' in texts[0] and "add" not in texts[2]
    pair = [row | {"chosen": [assistant("4")], "rejected": [assistant("5")]} for row in rows]
    encoded = encode_preferences(from_rows(pair), QWEN, max_length=300).chosen
    for row, ids in zip(rows, encoded, strict=True):  # what a reward model learns from is what it scores
        assert encode_answered(QWEN, (user("2?"),), (assistant("4"),), tools=tools_of(row), cut=True) == ids
    assert encoded[0] == encoded[1] != encoded[2]
    with pytest.raises(UserError, match="row 1: the tools are not a list in JSON"):
        encode_prompts(from_rows([{"prompt": [user("2?")], "tools": "[{"}]), QWEN, max_prompt=300)


# What is learnt.


@pytest.mark.parametrize("name", END)
def test_completions_assistant_turns_and_texts_are_learned_with_their_ends(name: str):
    tokenizer, end = FAMILY[name], END[name]
    # Plain answers.
    rows = [{"prompt": "How many eggs?", "completion": " 13"}, {"prompt": "How many eggs?", "completion": "13"}]
    encoded = encode_sft(from_rows(rows), tokenizer, max_length=99)
    for row, ids, learn, length in zip(rows, encoded.ids, encoded.learn, encoded.prompt_lengths, strict=True):
        assert ids[:length] == encode_prompts([Example(row["prompt"])], tokenizer, max_prompt=99).ids[0]
        assert learn == (False,) * length + (True,) * (len(ids) - length) and ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(ids) == row["prompt"] + row["completion"]
    # A conversational completion: all that the template writes, up to the end of the turn.
    encoded = encode_sft(from_rows([EGGS]), tokenizer, max_length=300)
    whole = tuple(encode_chat(tokenizer, [*EGGS["prompt"], *EGGS["completion"]]))
    ids, length = encoded.ids[0], encoded.prompt_lengths[0]
    prompt = encode_prompts(from_rows([{"prompt": EGGS["prompt"]}]), tokenizer, max_prompt=300).ids[0]
    assert ids[:length] == prompt
    assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]).strip() == ""
    ((begun, _), (learning, text)) = pieces(tokenizer, ids, encoded.learn[0])
    assert (begun, learning, text.strip()) == (False, True, "16 - 3 = 13" + end)
    # The same as a whole conversation: the tokens of generation and of training are equal for any shape of the data.
    turns = from_rows([{"messages": [*EGGS["prompt"], *EGGS["completion"]]}])
    assert encode_sft(turns, tokenizer, max_length=300).ids == encoded.ids
    assert encode_prompts(turns, tokenizer, max_prompt=300).ids == (prompt,)
    # A conversation of several turns; what comes after the last answer teaches nothing.
    turns = [user("How many?"), assistant("13 eggs."), user("And now?"), assistant("26")]
    encoded = encode_sft(from_rows([{"messages": turns}, {"messages": turns[:3]}]), tokenizer, max_length=300)
    runs = pieces(tokenizer, encoded.ids[0], encoded.learn[0])
    assert [text.strip() for learning, text in runs if learning] == ["13 eggs." + end, "26" + end]
    assert encoded.ids[0] == tuple(encode_chat(tokenizer, turns))[: len(encoded.ids[0])]
    assert pieces(tokenizer, encoded.ids[1], encoded.learn[1]) == runs[:2]
    assert encoded.prompt_lengths[0] == len(encode_chat(tokenizer, turns[:1], add_generation_prompt=True))
    numbers = sum(map(sum, encoded.learn)), sum(map(len, encoded.ids))
    assert encoded.describe().endswith("; {} of {} tokens are learnt".format(*numbers))
    # A text.
    encoded = encode_sft(from_rows([{"text": "Janet has 16 eggs."}]), tokenizer, max_length=99)
    assert encoded.ids == ((*tokenizer.encode_prompt("Janet has 16 eggs."), tokenizer.eos_id),)
    assert encoded.learn == ((False, *[True] * (len(encoded.ids[0]) - 1)),)
    assert encoded.prompt_lengths == (1,)


THINKING = """{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_template_that_rewrites_earlier_turns():
    """Templates of reasoning models drop the thoughts of all answers but the last; what they write is learnt."""
    tokenizer = replace(QWEN, chat_template=THINKING)
    turns = [user("2?"), assistant("<think>hm</think>4"), user("3?"), assistant("<think>oh</think>9")]
    encoded = encode_sft(from_rows([{"messages": turns}]), tokenizer, max_length=300)
    runs = pieces(tokenizer, encoded.ids[0], encoded.learn[0])
    assert [text for learning, text in runs if learning] == ["4<|im_end|>", "<think>oh</think>9<|im_end|>"]
    unmarked = replace(tokenizer, eos_ids=(330,))  # a base model, which ends texts but no turns
    with pytest.raises(UserError, match="ends an assistant turn with no end-of-text token"):
        encode_sft(from_rows([{"messages": turns}]), unmarked, max_length=300)


def test_a_template_that_does_not_go_on_from_its_prompt_is_refused():
    tokenizer = replace(QWEN, chat_template="{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="row 1: the chat template writes the prompt in another way once its answer"):
        encode_sft(from_rows([{"prompt": [user("a")], "completion": [assistant("b")]}]), tokenizer, max_length=99)


def test_an_end_of_text_is_added_where_the_template_has_none():
    """A base model with a chat template: its turns end with a token that does not end its texts."""
    base = replace(QWEN, eos_ids=(330,))
    row = {"prompt": [user("2?")], "completion": [assistant("4")]}
    encoded = encode_sft(from_rows([row]), base, max_length=99)
    assert pieces(base, encoded.ids[0], encoded.learn[0])[1] == (True, "4<|im_end|>\n<|endoftext|>")
    turns = {"messages": [user("2?"), assistant("4"), user("3?"), assistant("9")]}
    encoded = encode_sft(from_rows([turns]), base, max_length=99)
    learning = [text for yes, text in pieces(base, encoded.ids[0], encoded.learn[0]) if yes]
    assert learning == ["4<|im_end|>\n", "9<|im_end|>\n<|endoftext|>"]


def test_a_text_that_ends_itself_is_not_ended_twice_and_plain_answers_in_a_chat():
    rows = [{"prompt": "2?", "completion": "4<|endoftext|>"}, {"prompt": "2?", "completion": "4"}]
    encoded = encode_sft(from_rows(rows), QWEN, max_length=99)
    assert [ids[-2:] for ids in encoded.ids] == [(*QWEN.encode("4"), 330), (*QWEN.encode("4"), 332)]
    data = from_rows([{"question": "2?", "answer": "4"}], columns=Columns(prompt="question", completion="answer"))
    chat = encode_sft(data, QWEN, max_length=99, chat=True)
    same = encode_sft(from_rows([{"prompt": [user("2?")], "completion": [assistant("4")]}]), QWEN, max_length=99)
    assert (chat.ids, chat.learn) == (same.ids, same.learn)


def test_overlong_sequences():
    rows = [{"prompt": "How many eggs does she eat?", "completion": "three"}, {"prompt": "2?", "completion": "4"}]
    data = from_rows(rows)
    whole = encode_sft(data, QWEN, max_length=99)
    size, prompt = len(whole.ids[0]), whole.prompt_lengths[0]
    with pytest.raises(UserError, match=f"row 1: {prompt} tokens of prompt and {size - prompt} of answer are too many"):
        encode_sft(data, QWEN, max_length=size - 1)
    assert encode_sft(data, QWEN, max_length=size).ids == whole.ids
    filtered = encode_sft(data, QWEN, max_length=size - 1, overlong="filter")
    assert (filtered.ids, filtered.filtered, len(filtered.examples)) == (whole.ids[1:], 1, 1)
    cut = encode_sft(data, QWEN, max_length=size - 2, overlong="truncate_left")
    assert (cut.ids[0], cut.learn[0]) == (whole.ids[0][2:], whole.learn[0][2:])
    assert (cut.prompt_lengths, cut.truncated) == ((prompt - 2, whole.prompt_lengths[1]), 1)
    with pytest.raises(UserError, match="even without the prompt"):
        encode_sft(data, QWEN, max_length=size - prompt, overlong="truncate_left")
    # Whole conversations and texts lose their own beginning.
    turns = from_rows([{"messages": [user("How many eggs?"), assistant("13"), user("Now?"), assistant("26")]}])
    everything = encode_sft(turns, QWEN, max_length=300)
    end = encode_sft(turns, QWEN, max_length=30, overlong="truncate_left")
    assert end.ids[0] == everything.ids[0][-30:]
    assert end.learn[0] == (False, *everything.learn[0][-29:])


def test_a_row_with_nothing_to_learn_is_refused():
    rows = [{"prompt": "a"}, {"prompt": [user("a")]}, {"messages": [user("a")]}]
    for examples in ([Example("", "")], *(from_rows([row]) for row in rows)):
        with pytest.raises(UserError, match="row 1: there is nothing to learn"):
            encode_sft(examples, QWEN, max_length=300)


# Answers to compare.


@pytest.mark.parametrize("name", END)
def test_pairs_have_the_tokens_of_sft_and_reward_models_read_them(name: str):
    tokenizer = FAMILY[name]
    explicit = {"prompt": [user("2?")], "chosen": [assistant("4")], "rejected": [assistant("5, no")]}
    implicit = {"chosen": [user("2?"), assistant("4")], "rejected": [user("2?"), assistant("5, no")]}
    for row in (explicit, implicit):
        pairs = encode_preferences(from_rows([row]), tokenizer, max_length=99)
        for column, answer in (("chosen", "4"), ("rejected", "5, no")):
            encoded = encode_sft([Example((user("2?"),), (assistant(answer),))], tokenizer, max_length=99)
            assert getattr(pairs, column) == encoded.ids
            assert pairs.prompt_lengths == encoded.prompt_lengths
    plain = {"prompt": "2?", "chosen": " 4", "rejected": " 5, no"}
    texts = encode_preferences(from_rows([plain]), tokenizer, max_length=99)
    assert texts.chosen == encode_sft([Example("2?", " 4")], tokenizer, max_length=99).ids
    assert texts.rejected == encode_sft([Example("2?", " 5, no")], tokenizer, max_length=99).ids
    # An implicit prompt that is empty.
    pairs = encode_preferences(from_rows([{"chosen": "Yes.", "rejected": "No."}]), tokenizer, max_length=99)
    assert pairs.chosen == encode_sft([Example("", "Yes.")], tokenizer, max_length=99).ids
    assert pairs.prompt_lengths == (len(tokenizer.prefix_ids),)
    # A reward model reads the whole template; one that a run trained reads what it was trained on.
    row = {"prompt": "2?", "chosen": "4", "rejected": "5"}
    pairs = encode_preferences(from_rows([row]), tokenizer, max_length=99, chat=True)
    whole = tuple(encode_chat(tokenizer, [user("2?"), assistant("4")]))  # apply_chat_template's ids: test_chat.py
    assert encode_answered(tokenizer, "2?", "4") == whole
    assert encode_answered(tokenizer, (user("2?"),), (assistant("4"),)) == whole
    cut = encode_answered(tokenizer, "2?", "4", cut=True)
    assert cut == pairs.chosen[0] == whole[: len(cut)] and cut[-1] in tokenizer.eos_ids
    assert not set(whole[len(cut) :]) & set(tokenizer.eos_ids)
    unfinished = encode_answered(tokenizer, "2?", "4", finished=False)
    assert unfinished == whole[: len(unfinished)] and tokenizer.decode(unfinished).endswith("4")
    assert unfinished[-1] not in tokenizer.eos_ids


def test_a_reward_model_without_a_template_reads_the_texts_and_their_end():
    bare = replace(QWEN, chat_template=None)
    pairs = encode_preferences(from_rows([{"prompt": "2?", "chosen": " 4", "rejected": "5"}]), bare, max_length=99)
    assert encode_answered(bare, "2?", " 4") == pairs.chosen[0]
    assert encode_answered(bare, "2?", " 4", finished=False) == pairs.chosen[0][:-1]
    with pytest.raises(UserError, match="no chat template"):
        encode_answered(bare, (user("2?"),), "4")


def test_pairs_that_say_nothing_or_do_not_fit_are_counted():
    rows = [
        {"prompt": "How many eggs?", "chosen": "13", "rejected": "12"},
        {"prompt": "How many eggs?", "chosen": "13", "rejected": "13"},
        {"prompt": "2?", "chosen": "4", "rejected": "It is five, or so I think."},
    ]
    pairs = encode_preferences(from_rows(rows), QWEN, max_length=99)
    assert (len(pairs.chosen), pairs.same, pairs.filtered) == (2, 1, 0)
    assert pairs.describe().endswith("; 1 with two equal answers left out")
    longest = len(pairs.rejected[1])
    fewer = encode_preferences(from_rows(rows), QWEN, max_length=longest - 1, overlong="filter")
    assert (fewer.chosen, fewer.same, fewer.filtered) == (pairs.chosen[:1], 1, 1)
    with pytest.raises(UserError, match="row 3: .* of prompt and .* of answer are too many for at most"):
        encode_preferences(from_rows(rows), QWEN, max_length=longest - 1)
    lost = 2
    limit = max(len(pairs.chosen[0]), len(pairs.rejected[0])) - lost
    cut = encode_preferences(from_rows(rows[:1]), QWEN, max_length=limit, overlong="truncate_left")
    assert cut.prompt_lengths[0] == pairs.prompt_lengths[0] - lost and cut.truncated == 1
    assert (cut.chosen[0], cut.rejected[0]) == (pairs.chosen[0][lost:], pairs.rejected[0][lost:])
    with pytest.raises(UserError, match="no row is left: 1 have two equal answers, give other"):
        encode_preferences(from_rows(rows[1:2]), QWEN, max_length=99)
    with pytest.raises(UserError, match="row 1: there are no two answers to compare"):
        encode_preferences([Example("a", "b")], QWEN, max_length=99)
