"""Token ids of prompts, of sequences to learn and of answers to compare: against transformers' ids and by hand."""

import json
import os
import random
from dataclasses import replace
from itertools import product

import pytest
import tokenizers

from jrlhf.config.schema import ColumnsConfig as Columns
from jrlhf.data.chat import render_chat, template_variables
from jrlhf.data.encode import Encoding, encode_answered
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
    assert (
        texts[0] == texts[1] == render_chat(QWEN, [user("2?")], add_generation_prompt=True, variables={"tools": [tool]})
    )
    assert '"name": "add"' in texts[0] and "add" not in texts[2]
    pair = [row | {"chosen": [assistant("4")], "rejected": [assistant("5")]} for row in rows]
    encoded = encode_preferences(from_rows(pair), QWEN, max_length=300).chosen
    for row, ids in zip(rows, encoded, strict=True):  # what a reward model learns from is what it scores
        own = template_variables(row)
        assert encode_answered(QWEN, (user("2?"),), (assistant("4"),), variables=own, cut=True) == ids
    assert encoded[0] == encoded[1] != encoded[2]
    with pytest.raises(UserError, match="row 1: tools is not a list of objects in JSON"):
        encode_prompts(from_rows([{"prompt": [user("2?")], "tools": "[{"}]), QWEN, max_prompt=300)


THINKS = "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}{{ messages[-1].content }}"


def test_switches_of_a_row_reach_its_template():
    tokenizer = replace(QWEN, chat_template=THINKS, special_tokens={"enable_thinking": False})
    rows: list[dict] = [{"prompt": [user("2?")]}]
    rows += [{"prompt": [user("2?")], "chat_template_kwargs": {"enable_thinking": on}} for on in (True, False)]
    rows += [{"prompt": [user("2?")], "chat_template_kwargs": '{"enable_thinking": true}', "enable_thinking": False}]
    rows += [{"prompt": [user("2?")], "enable_thinking": True}, {"prompt": [user("2?")], "chat_template_kwargs": None}]
    data = from_rows(rows)
    assert encode_prompts(data, tokenizer, max_prompt=99).texts == ("<off>2?", "2?", "<off>2?", "2?", "2?", "<off>2?")
    assert len({from_rows([row]).fingerprint for row in rows[:3]}) == 3
    for row, off in zip(rows[1:3], (False, True), strict=True):
        own = template_variables(row)
        ids = encode_answered(tokenizer, (user("2?"),), (assistant("2?4"),), variables=own)
        assert tokenizer.decode(ids).startswith("<off>") is off
        encoded = encode_sft(from_rows([row | {"completion": [assistant("2?4")]}]), tokenizer, max_length=99)
        assert tokenizer.decode(encoded.ids[0]).startswith("<off>") is off
    for key in ("messages", "add_generation_prompt", "chat_template", "tokenize"):
        with pytest.raises(UserError, match=f"row 1: chat_template_kwargs sets {key}, which is no variable"):
            encode_prompts(from_rows([rows[0] | {"chat_template_kwargs": {key: True}}]), tokenizer, max_prompt=99)
    with pytest.raises(UserError, match="row 1: enable_thinking is 'yes', neither true nor false"):
        encode_prompts(from_rows([rows[0] | {"enable_thinking": "yes"}]), tokenizer, max_prompt=99)
    with pytest.raises(UserError, match="row 1: chat_template_kwargs is of type list, not an object"):
        encode_prompts(from_rows([rows[0] | {"chat_template_kwargs": [1]}]), tokenizer, max_prompt=99)


def test_texts_that_write_out_the_beginning_of_every_text_are_counted():
    for name, tokenizer in FAMILY.items():
        begin = tokenizer.backend.decode(tokenizer.prefix_ids, skip_special_tokens=False)
        rows = from_rows([{"prompt": "eggs"}, {"prompt": f"{begin}eggs"}])
        prompts = encode_prompts(rows, tokenizer, max_prompt=99)
        assert prompts.twice == (name != "qwen")  # qwen begins with no token
        assert ("; 1 write out the token that the tokenizer puts before every" in prompts.describe()) is (
            name != "qwen"
        )
        texts = from_rows([{"text": f"{begin}eggs"}])
        assert encode_sft(texts, tokenizer, max_length=99).twice == (name != "qwen")


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


# Llama 3.1's form: a system block of its own before every conversation.
KNOWLEDGE = """{{- bos_token }}{%- set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday is 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
LEARNERS = {**FAMILY, "llama 3.1": replace(FAMILY["llama"], chat_template=KNOWLEDGE)}


@pytest.mark.parametrize("name", LEARNERS)
def test_exactly_the_assistants_words_are_learned_in_conversations_of_any_shape(name: str):
    """Conversations of up to five turns, the first of any role, against the words themselves."""
    tokenizer, end = LEARNERS[name], END[name.split()[0]]
    roles = {"s": "system", "u": "user", "a": "assistant"}
    shapes = ["".join(shape) for n in (1, 2, 3, 4, 5) for shape in product("ua", repeat=n)]
    refused = 0
    for shape in [first + shape for first in ("", "s") for shape in shapes if "a" in shape]:
        turns: list[dict] = [{"role": roles[role], "content": f"{role}{n} said"} for n, role in enumerate(shape)]
        turns[-1] |= {"weight": 0} if shape[-1] == "a" and shape.count("a") > 1 else {}
        words = [turn["content"] + end for turn in turns if turn["role"] == "assistant" and "weight" not in turn]
        try:
            encoded = encode_sft(from_rows([{"messages": turns}]), tokenizer, max_length=300)
        except UserError as error:
            assert "refuses the messages" in str(error) and name == "gemma"
            refused += 1
            continue
        learned = "".join(text for yes, text in pieces(tokenizer, encoded.ids[0], encoded.learn[0]) if yes)
        assert [part.strip() + end for part in learned.split(end)[:-1]] == words, shape  # Mistral's begin with a blank
        assert learned.endswith(end)
    assert refused == (110 if name == "gemma" else 0)  # of 114; its template wants user, assistant, user, ...


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
    with pytest.raises(UserError, match="row 1: it has two answers to compare: name .* in data.preferences.path"):
        encode_sft(from_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}]), QWEN, max_length=300)


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


def test_the_prompt_of_two_texts_ends_at_a_border_of_tokens_that_both_have():
    pieces = [
        "Human: 2?",
        "\n\nAssistant:",
        " blue",
        "blueish",
        "<|assistant|>",
        "<|action|>",
        "日本",
        "日曜",
        " ",
        "a",
    ]
    draw, cut = random.Random(0), 0
    for tokenizer in FAMILY.values():
        backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        backend.add_special_tokens(["<|assistant|>", "<|action|>"])
        tokenizer = replace(tokenizer, backend=backend)
        begin = len(tokenizer.prefix_ids)
        row = {"chosen": "2?<|assistant|>4", "rejected": "2?<|action|>add"}
        pairs = encode_preferences(from_rows([row]), tokenizer, max_length=99)
        asked = tokenizer.encode_prompt("2?")
        assert pairs.chosen[0][: pairs.prompt_lengths[0]] == tuple(asked)
        assert pairs.chosen[0][len(asked)] == backend.token_to_id("<|assistant|>")
        for _ in range(60):
            common, *answers = ("".join(draw.choices(pieces, k=draw.randint(0, 3))) for _ in range(3))
            texts = [common + answer for answer in answers]
            whole = [tokenizer.encode(text) for text in texts]
            if whole[0] == whole[1]:
                continue
            data = from_rows([dict(zip(("chosen", "rejected"), texts, strict=True))])
            pairs = encode_preferences(data, tokenizer, max_length=99)
            (length,), both = pairs.prompt_lengths, (pairs.chosen[0], pairs.rejected[0])
            # Prompt and answer have the tokens of the whole text, and the prompt those of the prompt alone.
            assert both == tuple((*tokenizer.prefix_ids, *ids, tokenizer.eos_id) for ids in whole)
            (example,) = Encoding(tokenizer).with_prompts(data).examples
            assert tuple(tokenizer.encode_prompt(str(example.prompt))) == both[0][:length]
            shared = len(os.path.commonprefix([list(ids) for ids in both]))
            assert begin <= length <= shared
            for border in range(length + 1 - begin, shared + 1 - begin):  # no later border would do
                text = backend.decode(whole[0][:border], skip_special_tokens=False)
                assert tokenizer.encode(text) != whole[0][:border] or not all(one.startswith(text) for one in texts)
            cut += length > begin
    assert cut > 100


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
