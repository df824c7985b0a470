"""Chat templates: the ids that transformers gives, and templates that misbehave."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from jrlhf.data import chat
from jrlhf.data.chat import dated, render_chat
from jrlhf.data.template import _render
from jrlhf.errors import UserError

from .conftest import FAMILIES, FAMILY, GOLDEN, QWEN, encode_chat

USER = ({"role": "user", "content": "How many eggs?"},)


def test_same_ids_as_transformers():
    """Against the committed ids of transformers (tokenizers/make.py). A row that the template refuses is null there."""
    refused = []
    for name, tokenizer in FAMILY.items():
        for messages, expected in zip(GOLDEN["conversations"], GOLDEN[name]["conversations"], strict=True):
            if expected is None:
                refused.append(name)
                with pytest.raises(UserError, match="refuses the messages"):
                    encode_chat(tokenizer, messages)
                continue
            own = messages[-1]["role"] == "assistant"
            assert encode_chat(tokenizer, messages) == expected["ids"], name
            prompt = encode_chat(tokenizer, messages, add_generation_prompt=not own, continue_final=own)
            assert prompt == expected["prompt_ids"], name
    assert refused == ["gemma"]  # it has no system role


@pytest.mark.full
def test_the_committed_ids_are_what_transformers_gives_today():
    transformers = pytest.importorskip("transformers", reason="the peer that the golden ids are of")
    for name in FAMILY:
        theirs = transformers.AutoTokenizer.from_pretrained(FAMILIES / name)
        for messages, expected in zip(GOLDEN["conversations"], GOLDEN[name]["conversations"], strict=True):
            if expected is not None:
                assert theirs.apply_chat_template(messages, return_dict=False) == expected["ids"], name
        for row in GOLDEN[name]["texts"]:
            assert theirs(row["text"])["input_ids"] == row["ids"], name


TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'é'"}}]
TRICKY = [
    "{{ messages | tojson }}|{{ {'b': '<&>', 'a': 'é'} | tojson(indent=2) }}",
    "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}\n  {% for m in messages %}\n    {% set ns.n = ns.n + 1 %}\n{% endfor %}\n{{ ns.n }}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %} {{ eos_token }}{{ bos_token is defined }}",
    "{{ messages[-1].reasoning_content }}|{{ messages[-1].thinking }}|{{ messages[0].missing }}|{{ tools | tojson }}",
    "{% macro say(m) %}{{ m['role'] | upper }}: {{ m.content.strip()[:3] }}{% endmacro %}{{ say(messages[0]) }}",
    "{{ strftime_now('%Y') | length }}{{ messages[0].tool_calls is defined }}",
]


@pytest.mark.full
def test_same_text_as_transformers():
    """The peer renders all that templates use of Jinja and beyond it."""
    transformers = pytest.importorskip("transformers", reason="the peer that renders the same templates")
    messages = [
        {"role": "user", "content": " <b>How</b>  many? ", "tool_calls": None},
        {"role": "assistant", "content": "13", "reasoning": "16 - 3"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(FAMILIES / "qwen")
    for template in TRICKY:
        expected = theirs.apply_chat_template(messages, chat_template=template, tools=TOOLS, tokenize=False)
        assert render_chat(replace(QWEN, chat_template=template), messages, variables={"tools": TOOLS}) == expected, (
            template
        )


def test_a_continued_message_ends_where_its_text_does():
    messages = (*USER, {"role": "assistant", "content": "It is "})
    assert render_chat(QWEN, messages, continue_final=True).endswith("assistant\nIt is ")
    # The template of llama strips.
    assert render_chat(FAMILY["llama"], messages, continue_final=True).endswith("\n\nIt is")
    with pytest.raises(UserError, match="does not show the last message"):
        render_chat(replace(QWEN, chat_template="{{ messages[0].content }}"), messages, continue_final=True)
    with pytest.raises(UserError, match="no text that could be continued"):
        render_chat(QWEN, ({"role": "assistant", "tool_calls": [{}]},), continue_final=True)


def test_switches_of_a_template_reach_it():
    template = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ eos_token }}"
    tokenizer = replace(QWEN, chat_template=template)
    assert render_chat(tokenizer, USER) == "<|im_end|>"
    tokenizer = replace(tokenizer, special_tokens={**tokenizer.special_tokens, "enable_thinking": False})
    assert render_chat(tokenizer, USER) == "<think></think><|im_end|>"


MISBEHAVING = {
    "{{ raise_exception('roles must alternate') }}": "the chat template refuses the messages: roles must alternate",
    "{% for m in messages %}": "not valid Jinja: .* \\(line 1\\)",
    "{{ messages[0].content + 1 }}": "fails on the messages: TypeError",
    "{{ messages[7].content }}": "refuses the messages: .* has no element 7",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "must not: access to attribute '__class__'",
    "{{ messages.append({}) }}": "must not",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "must not",
    "{{ raise_exception.__globals__.json }}": "must not",
    "{{ (messages | attr('__class__')).mro() }}": "must not",
    "{{ '{0.__class__.__mro__}'.format(messages) | length + none }}": "must not",
    "{% for i in range(10**9) %}x{% endfor %}": "fails on the messages: OverflowError: Range too big",
    "{% include '/etc/passwd' %}": "fails on the messages: TypeError: no loader",
}


def test_a_template_that_misbehaves_is_one_sentence_with_its_cause():
    for template, sentence in MISBEHAVING.items():
        with pytest.raises(UserError, match=sentence):
            render_chat(replace(QWEN, chat_template=template), USER)


ENDLESS = "{{ 10 ** (10 ** 9) }}"  # one operation, which no thread of its process could end
LARGE = {
    "{{ 'x' * 10 ** 10 }}": "takes more than 1 GiB of memory",
    "{{ 'x' * 4 * 10 ** 7 }}": "writes more than",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "fails on the messages: RecursionError",
}


def test_a_template_has_limits_of_time_and_size(monkeypatch):
    for template, sentence in LARGE.items():
        with pytest.raises(UserError, match=f"^the chat template .*{sentence}"):
            render_chat(replace(QWEN, chat_template=template), USER)
    with monkeypatch.context() as patch:
        patch.setattr(chat, "SECONDS", 0.5)
        with pytest.raises(UserError, match="^the chat template does not end well: no answer within 0.5 s"):
            render_chat(replace(QWEN, chat_template=ENDLESS), USER)
    assert render_chat(replace(QWEN, chat_template="{{ messages[0].content }}"), USER) == "How many eggs?"
    with pytest.raises(UserError, match="the tokenizer .* fails .* that it is given"):
        encode_chat(replace(QWEN, chat_template="{{ '\\ud800' }}"), USER)


# Gemma 3's way with parts, and Llama 3.1's, which has none.
JOINED = "{% for m in messages %}{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}{% endfor %}"
PRINTED = "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}"


def test_each_template_joins_the_parts_of_a_message_itself():
    parts = [{"type": "text", "text": " How many "}, {"type": "text", "text": "eggs? "}]
    tokenizer, message = replace(QWEN, chat_template=JOINED), {"role": "user", "content": parts}
    assert render_chat(tokenizer, [message]) == "How manyeggs?"
    assert render_chat(tokenizer, [message], continue_final=True) == "How manyeggs?"
    assert len(parts) == 2 and parts[1]["text"] == "eggs? "  # messages are not changed
    for template, sentence in ((PRINTED, "cannot read a message of several parts"), (QWEN.chat_template, "TypeError")):
        with pytest.raises(UserError, match=sentence):
            render_chat(replace(QWEN, chat_template=template), [message])


def test_what_cannot_be_rendered_is_refused():
    with pytest.raises(
        UserError,
        match="has no chat template, but the data are conversations: .* plain-text prompts with data.chat=false",
    ):
        render_chat(replace(QWEN, chat_template=None), USER)
    with pytest.raises(UserError, match="without messages"):
        render_chat(QWEN, ())
    message = {"role": "assistant", "content": "13", "name": None}
    render_chat(QWEN, (message,), continue_final=True)
    assert message == {"role": "assistant", "content": "13", "name": None}  # messages are not changed


def test_runs_in_several_threads_write_their_own_days():
    tokenizer, both = replace(QWEN, chat_template="{{ strftime_now('%Y-%m-%d') }}"), threading.Barrier(2, timeout=60)

    def run(day: str) -> str:
        with dated(day):
            both.wait()
            return render_chat(tokenizer, USER)

    days = ["2024-07-26", "2025-01-01"]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, days)) == days


def test_outside_of_runs_templates_write_the_time_in_utc(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Etc/GMT+9")
        time.tzset()
        before = datetime.now(UTC)
        text = _render("{{ strftime_now('%Y-%m-%dT%H:%M:%S+00:00') }}", {}, None)["text"]
    time.tzset()
    assert before.replace(microsecond=0) <= datetime.fromisoformat(text) <= datetime.now(UTC)
