"""Turns by ids: only appended, equal to the whole rendering where a template keeps its beginnings, and read again."""

import random
import unicodedata
from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from jrlhf.data.chat import render_chat
from jrlhf.data.rendering import FAMILIES, Answer, Renderer, ToolCall, make_renderer
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.errors import UserError

from .conftest import assistant, encode_prompts, from_rows, user
from .conversations import (
    CONTROL,
    TEMPLATES,
    TOKENIZERS,
    TOOLED,
    TOOLS,
    beginning,
    plain_results,
    tokenizer_of,
    turn,
)

RENDERERS = {form: make_renderer(tokenizer) for form, tokenizer in TOKENIZERS.items()}
QWEN = RENDERERS["qwen2.5"]
SPACED = ("llama2", "mistral", "generic")  # vocabularies that write a blank at each beginning


def encoded(tokenizer: Tokenizer, messages: Any, tools: Any = None, **options: Any) -> list[int]:
    """The ids of a whole conversation, as today's encoding gives them."""
    messages = [{key: value for key, value in message.items() if key not in ("calls", "tool")} for message in messages]
    variables = {} if tools is None else {"tools": tools}
    return tokenizer.encode(render_chat(tokenizer, messages, variables=variables, **options))


def past_end(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids after the first end of a turn."""
    return ids[next(place for place, token in enumerate(ids) if token in tokenizer.eos_ids) + 1 :]


def rendered_after(form: str, following: list[dict[str, Any]]) -> list[int]:
    """The ids of what a template writes after an answer's end, as today's encoding reads them."""
    messages = [user("a"), assistant("XYZZY"), *following]
    text = render_chat(TOKENIZERS[form], messages, add_generation_prompt=True).partition("XYZZY")[2]
    return past_end(TOKENIZERS[form], TOKENIZERS[form].encode(f"a{text}"))


def written(form: str, ids: list[int]) -> str:
    text = TOKENIZERS[form].decode(ids, special=True)
    return text.replace(" ", "") if form in SPACED else text


def expected_calls(form: str, message: dict[str, Any]) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") or message.get("calls") or []
    functions = [(one["function"]["name"], one["function"]["arguments"], one["id"]) for one in calls]
    return tuple(ToolCall(name, values, id if form == "mistral" else None) for name, values, id in functions)


def check_bridge(form: str, complete: list[int], following: list[dict[str, Any]]) -> None:
    """Holds the ids after an answer's end against the rendered messages, in which control texts are no control."""
    control, defused = TOKENIZERS[form].backend.get_added_tokens_decoder(), str.maketrans("<[", "((")
    harmless = [{**message, "content": message["content"].translate(defused)} for message in following]
    expected, clean = rendered_after(form, following), rendered_after(form, harmless)
    assert written(form, complete) == written(form, expected)
    assert [token for token in complete if token in control] == [token for token in clean if token in control]
    if [token for token in expected if token in control] == [token for token in clean if token in control]:
        assert complete == expected


def sampled(form: str, before: list[dict[str, Any]], ids: list[int], answer: dict[str, Any], tools: Any) -> list[int]:
    """The ids of an answer that follows `ids`, up to its end; `ids` are no beginning of those of a template that
    writes earlier turns in another way, so there the answer is that of a conversation of its own."""
    tokenizer = TOKENIZERS[form]
    whole = encoded(tokenizer, [*before, answer], tools)
    if whole[: len(ids)] != ids:
        before, tools = [user("a")], None
        whole, ids = encoded(tokenizer, [*before, answer]), encoded(tokenizer, before, add_generation_prompt=True)
        assert whole[: len(ids)] == ids
    return whole[len(ids) : len(whole) - len(past_end(tokenizer, whole[len(ids) :]))]


def check_dialogue(draw: random.Random, form: str) -> None:
    """Draws a dialogue and holds `ids`, `bridge` and `parse` against the encoding of whole conversations."""
    renderer, tokenizer = RENDERERS[form], TOKENIZERS[form]
    messages, tools = beginning(draw, form)
    ids = renderer.ids(messages, tools)
    assert ids == encoded(tokenizer, messages, tools, add_generation_prompt=True)
    whole = form != "qwen3"  # whether the ids are those of the whole conversation so far
    for _ in range(draw.randint(1, 3)):
        drawn = turn(draw, form)
        answer = sampled(form, messages, ids, drawn.answer, tools)
        parsed = renderer.parse(answer)
        assert parsed.calls == expected_calls(form, drawn.answer)
        content = parsed.content.rstrip(" ") if form == "llama2" else parsed.content  # its template ends with a blank
        assert content == drawn.answer["content"] or parsed.calls
        complete = renderer.bridge([*ids, *answer], drawn.following)
        following = drawn.following if form in TOOLED else plain_results(drawn.following)
        check_bridge(form, complete, following)
        if drawn.cut:
            answer = answer[: draw.randrange(len(answer))]
            appended = renderer.bridge([*ids, *answer], drawn.following)
            added = appended[: len(appended) - len(complete)]
            assert [*added, *complete] == appended
            assert added[-1] in tokenizer.eos_ids
            assert not tokenizer.decode(added).strip()
            complete = appended
        ids = [*ids, *answer, *complete]
        messages = [*messages, drawn.answer, *following]
        whole = whole and not drawn.cut and not any(one in turn["content"] for turn in following for one in CONTROL)
        if whole:
            assert ids == encoded(tokenizer, messages, tools, add_generation_prompt=True)


@pytest.mark.parametrize("form", TEMPLATES)
def test_drawn_dialogues(form: str):
    for seed in range(30):
        check_dialogue(random.Random(f"{form} {seed}"), form)


@pytest.mark.full
@pytest.mark.parametrize("form", TEMPLATES)
def test_many_drawn_dialogues(form: str):
    for seed in range(30, 1030):
        check_dialogue(random.Random(f"{form} {seed}"), form)


@pytest.mark.full
@pytest.mark.parametrize("form", TEMPLATES)
def test_same_ids_as_transformers(form: str):
    """The first turn; and which tokens control where messages hold their texts (`sanitize_control_tokens`)."""
    transformers = pytest.importorskip("transformers", reason="the peer that renders the same templates")
    tokenizer, renderer = TOKENIZERS[form], RENDERERS[form]
    names = {name: token for name, token in tokenizer.special_tokens.items() if name.endswith("_token")}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **names)
    options = {"chat_template": tokenizer.chat_template, "add_generation_prompt": True, "return_dict": False}
    control = tokenizer.backend.get_added_tokens_decoder()
    for seed in range(50):
        draw = random.Random(seed)
        messages, tools = beginning(draw, form)
        assert renderer.ids(messages, tools) == theirs.apply_chat_template(messages, tools=tools, **options)
        following = turn(draw, form).following
        whole = [user("a"), assistant("b"), *(following if form in TOOLED else plain_results(following))]
        expected = theirs.apply_chat_template(whole, sanitize_control_tokens=True, **options)
        appended = [token for token in renderer.bridge([], following) if token in control]
        assert appended == [token for token in expected if token in control][-len(appended) :]


@pytest.mark.full
@pytest.mark.parametrize(("form", "name"), [("qwen3", "Qwen3Renderer"), ("llama3", "Llama3Renderer")])
def test_same_ids_as_the_package_renderers(form: str, name: str):
    """It closes thinking that was cut off, and has no bridge where Qwen 3's template would drop thinking."""
    peer = pytest.importorskip("renderers", reason="the peer that appends turns by ids")
    transformers = pytest.importorskip("transformers", reason="its tokenizers")
    tokenizer, renderer = TOKENIZERS[form], RENDERERS[form]
    theirs = getattr(peer, name)(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend))
    compared = 0
    for seed in range(200):
        draw = random.Random(seed)
        messages, tools = beginning(draw, form)
        ids, drawn = renderer.ids(messages, tools), turn(draw, form)
        answer = sampled(form, messages, ids, drawn.answer, tools)[: -1 if drawn.cut else None]
        bridge = theirs.bridge_to_next_turn(ids, answer, drawn.following)
        parsed = theirs.parse_response(answer)
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
            (call.name, call.arguments) for call in renderer.parse(answer).calls
        ]
        if bridge is not None and not any(one in turn["content"] for turn in drawn.following for one in CONTROL):
            compared += 1
            assert bridge.token_ids == [*ids, *answer, *renderer.bridge([*ids, *answer], drawn.following)]
    assert compared > 50


def test_a_renderer_gives_the_ids_of_encoded_prompts():
    rows = [{"prompt": [user("é 🎈")], "tools": TOOLS}, {"prompt": [user("a"), assistant("b")]}]
    expected = encode_prompts(from_rows(rows), QWEN.tokenizer, max_prompt=999).ids
    assert tuple(QWEN.ids(rows[0]["prompt"], TOOLS)) == expected[0]
    assert tuple(QWEN.ids(rows[1]["prompt"])) == expected[1]  # is continued


def test_the_family_is_that_of_the_template():
    names = {form: [name for name, row in FAMILIES.items() if row is RENDERERS[form].family] for form in TEMPLATES}
    assert names == {
        "qwen2.5": ["chatml"], "qwen3": ["qwen3"], "smollm2": ["chatml"], "llama3": ["llama3"], "mistral": ["mistral"],
        "llama3-plain": ["generic"], "llama2": ["generic"], "gemma2": ["gemma"], "gemma3": ["gemma"],
        "generic": ["generic"],
    }  # fmt: skip
    assert make_renderer(QWEN.tokenizer, "qwen3").family.thinks
    with pytest.raises(UserError, match="'qwen' is none of llama3, mistral"):
        make_renderer(QWEN.tokenizer, "qwen")


_MESSAGE = "{{ '<|' + m.role + '|>' + m.content + eos_token }}"
REFUSED = {
    "{% for m in messages %}[{{ loop.index }}]" + _MESSAGE + "{% endfor %}": "another way once others follow",
    "{% for m in messages %}{{ '(now)' if loop.last }}" + _MESSAGE + "{% endfor %}": "another way once others follow",
    "{{ messages | length }}{% for m in messages %}" + _MESSAGE + "{% endfor %}": "another way once others follow",
    "{% for m in messages %}{% if m.role == 'user' %}"
    + _MESSAGE
    + "{% endif %}{% endfor %}": "does not show an answer",
    "{% for m in messages[:2] %}" + _MESSAGE + "{% endfor %}": "shows no user's message after an answer",
    "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}": "no end-of-text token: name its end in eos",
    "{{ raise_exception('one turn') if messages | length > 1 }}": "refuses the messages: one turn",
}


def test_templates_that_no_turn_can_be_appended_to_are_refused():
    for template, sentence in REFUSED.items():
        with pytest.raises(UserError, match=sentence):
            make_renderer(replace(TOKENIZERS["generic"], chat_template=template))
    unread = TEMPLATES["qwen2.5"].replace("<tool_call>\\n", "<function>\\n")
    renderer = make_renderer(tokenizer_of("qwen2.5", unread))
    assert renderer.ids([user("a")])
    with pytest.raises(UserError, match="in a form that jrlhf does not read"):
        renderer.ids([user("a")], TOOLS)
    for form, messages, sentence in (
        ("gemma3", [{"role": "system", "content": "a"}], "no message of the role 'system'"),
        ("qwen2.5", [user("a"), assistant("b")], "no message of the role 'assistant'"),
        ("qwen2.5", [{"content": "b"}], "has no role: give a mapping"),
        ("qwen2.5", [], "no message follows the answer"),
        ("gemma2", [user("a"), user("b")], "refuses the messages"),
    ):
        with pytest.raises(UserError, match=sentence):
            RENDERERS[form].bridge([1], messages)


def bridged(renderer: Renderer, answer: str, *messages: Any) -> str:
    return renderer.tokenizer.decode(renderer.bridge(renderer.tokenizer.encode(answer), messages), special=True)


def test_the_end_of_a_turn_is_added_once():
    header = "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert bridged(QWEN, "a<|im_end|>", user("b")) == f"\n{header}"
    for answer in ("a", "", "a<|endoftext|>", "<tool_call>\n{"):  # another end of text is no end of a turn
        assert bridged(QWEN, answer, user("b")) == f"<|im_end|>\n{header}"
    llama = RENDERERS["llama3"]
    assert bridged(llama, "a<|eom_id|>", user("b")) == bridged(llama, "a<|eot_id|>", user("b"))
    tool = [{"role": "tool", "content": content} for content in ("1", "2")]
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    for form in ("qwen2.5", "qwen3", "smollm2"):
        expected = f"\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
        assert bridged(RENDERERS[form], "<|im_end|>", *tool) == expected
    assert f"user\n{results}<end_of_turn>" in bridged(RENDERERS["gemma2"], "", *tool)


def test_switches_and_templates_for_tools_reach_the_next_turn():
    tokenizer = TOKENIZERS["qwen3"]
    silent = make_renderer(replace(tokenizer, special_tokens={**tokenizer.special_tokens, "enable_thinking": False}))
    assert bridged(silent, "", user("b")).endswith("assistant\n<think>\n\n</think>\n\n")
    tooled = replace(tokenizer, chat_template=TEMPLATES["smollm2"], tool_template=TEMPLATES["qwen3"])
    assert "user\n<tool_response>\n1\n<" in bridged(make_renderer(tooled), "", {"role": "tool", "content": "1"})


def test_ids_of_calls_fit_mistral():
    def result(id: str) -> str:
        message = {"role": "tool", "content": "1", "tool_call_id": id}
        return bridged(RENDERERS["mistral"], "</s>", message).split('"call_id": "')[1].split('"')[0]

    assert result("aZ0123456") == "aZ0123456"
    assert len(result("call_0")) == 9
    assert result("call_0") == result("call_0") != result("call_1")


def test_text_of_control_tokens_stays_text():
    """Letter by letter what the message says, also for tokens that take in blanks, or that a normalizer makes."""
    backend = tokenizer_of("generic").backend
    backend.add_special_tokens([tokenizers.AddedToken("<|x|>", lstrip=True, rstrip=True, special=True)])
    backend.add_special_tokens([tokenizers.AddedToken("<|K|>", normalized=True, special=True), "x|>b"])
    steps = [tokenizers.normalizers.NFKC(), backend.normalizer]
    backend.normalizer = tokenizers.normalizers.Sequence(steps)
    renderer = make_renderer(replace(TOKENIZERS["generic"], backend=backend))
    control = {token for token in backend.get_added_tokens_decoder() if token != backend.token_to_id("<unk>")}
    for content in ("a</s>b", f"a{' ' * 2000}<|x|>{' ' * 9}b", "<\u212a|>a<|\u212a|>b", "<|x|>b", "</s>" * 999):
        ids = renderer.bridge([], [user(content)])
        assert [backend.id_to_token(token) for token in ids if token in control] == ["</s>", "</s>"]
        shown = unicodedata.normalize("NFKC", f"<|user|>\n{content}</s>").replace(" ", "")
        assert shown in renderer.tokenizer.decode(ids, special=True).replace(" ", "")
    text = TOKENIZERS["mistral"].decode(RENDERERS["mistral"].bridge([1], [user("a</s>b [INST]c</s>d")]), special=True)
    assert "a</s>b [INST]c</s>d" in text


def test_other_added_tokens_and_unknown_letters_stay():
    """White space and words that no template names, as in Gemma's vocabulary; unknown letters; a single letter."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    backend.add_special_tokens(["</s>", "<unk>", "§"])
    backend.add_tokens(["\n\n", "<table>"])
    template = "{% for m in messages %}{{ m.content + eos_token }}\n\n{% endfor %}"
    tokenizer = Tokenizer(backend, tuple(backend.encode("</s>").ids), chat_template=template)
    renderer = make_renderer(replace(tokenizer, special_tokens={"eos_token": "</s>"}))
    content = "a\n\n<table>日日a日§\ue000\ue004\ue000a"
    expected = tokenizer.encode(f"</s>\n\n{content[:-4]}") + tokenizer.encode("a</s>\n\n")
    assert renderer.bridge([], [user(content)]) == expected
    with pytest.raises(UserError, match="the tokenizer fails"):
        renderer.bridge([], [user("\ud800")])


ADD = ToolCall("add", {"a": 1})
GOOD = '{"name": "add", "arguments": {"a": 1}}'


def failed(answer: Answer) -> str:
    (call,) = answer.calls
    assert (call.name, call.arguments) == ("", {})
    return str(call.error)


@pytest.mark.parametrize("form", ["qwen2.5", "qwen3", "smollm2", "gemma2", "generic"])
def test_calls_between_marks(form: str):
    def parse(text: str) -> Answer:
        return RENDERERS[form].parse(TOKENIZERS[form].encode(text))

    assert parse(f"So:\n<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{GOOD}</tool_call>") == Answer("So:", (ADD, ADD))
    for text, error in (
        ('{"name": "add", "arguments": {"a": 1}', "no valid JSON: Expecting ',' delimiter"),
        ('{"name": "add", "arguments": {"a": NaN}}', "no valid JSON: NaN"),
        ('{"name": "add", "arguments": "{}"}', "has no object 'arguments'"),
        ('{"name": "add"}', "has no object 'arguments'"),
        ('{"name": "", "arguments": {}}', "no object with a name"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "no valid JSON: 1e999 is too large"),
        ('{"name": "add", "name": "sub", "arguments": {}}', "no valid JSON: a key occurs twice"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "no valid JSON: 'utf-8' codec"),
        ('{"arguments": {}}', "no object with a name"),
        (f"[{GOOD}]", "no object with a name"),
        ("[" * 9999, "no valid JSON: it is nested too deeply"),
        ("", "no valid JSON"),
    ):
        assert error in failed(parse(f"<tool_call>{text}</tool_call>"))
    assert "does not end: </tool_call> is missing" in failed(parse(f"a<tool_call>\n{GOOD}\n"))
    first, second = parse(f"<tool_call>{GOOD}<tool_call>{GOOD}</tool_call>").calls
    assert ("does not end" in str(first.error), second) == (True, ADD)


@pytest.mark.parametrize("form", ["qwen2.5", "qwen3", "smollm2"])
def test_nothing_of_an_answer_is_lost(form: str):
    """Special tokens inside of a call or a text are shown, and an end without its beginning is text."""
    renderer, tokenizer = RENDERERS[form], TOKENIZERS[form]
    (call,) = renderer.parse(tokenizer.encode(f"<tool_call>{GOOD.replace('add', 'a<|im_start|>dd')}</tool_call>")).calls
    assert call.name == "a<|im_start|>dd"
    assert "<|im_start|>user" in renderer.parse(tokenizer.encode("so <|im_start|>user")).content
    assert "</tool_call>" in renderer.parse(tokenizer.encode(f"{GOOD}</tool_call>")).content


def test_parts_that_form_a_control_token_together_are_refused():
    parts = [{"type": "text", "text": text} for text in ("x<|im_", "end|> y")]
    with pytest.raises(UserError, match="texts of a message's parts form a control token together"):
        RENDERERS["qwen2.5"].bridge([], [{"role": "user", "content": parts}])


def test_letters_of_a_token_are_no_mark():
    renderer = RENDERERS["qwen3"]
    text = f"<think>a</think><tool_call>{GOOD}</tool_call>"
    letters = renderer._encode(renderer._guarded(text))
    assert renderer.parse(letters) == Answer(text)


def test_calls_of_llama_and_mistral():
    llama, mistral = RENDERERS["llama3"], RENDERERS["mistral"]
    call = GOOD.replace("arguments", "parameters")
    typed = '{"type": "function", ' + call[1:]
    for text in (call, typed, f" {call}\n<|eot_id|>", f"<|python_tag|>{call}<|eom_id|>"):
        assert llama.parse(llama.tokenizer.encode(text)) == Answer("", (ADD,))
    for text in ('{"name": "Bob"}', '{"a": 1}', "{", f"It is {call}"):
        assert llama.parse(llama.tokenizer.encode(text)) == Answer(text)
    for text in (call[:-1], call[:9], call.replace("{", "[", 2).replace("[", "{", 1), f"<|python_tag|>print({call})"):
        assert "call" in failed(llama.parse(llama.tokenizer.encode(text)))
    identified = GOOD[:-1] + ', "id": "abcdefghi"}'
    parsed = mistral.parse(mistral.tokenizer.encode(f"[TOOL_CALLS] [{GOOD}, {identified}]</s>"))
    assert parsed == Answer("", (ADD, replace(ADD, id="abcdefghi")))
    assert "no list of calls" in failed(mistral.parse(mistral.tokenizer.encode(f"[TOOL_CALLS] {GOOD}")))
    assert "no valid JSON" in failed(mistral.parse(mistral.tokenizer.encode(f"[TOOL_CALLS] [{GOOD}")))


def test_thinking():
    renderer, tokenizer = RENDERERS["qwen3"], TOKENIZERS["qwen3"]
    opened = TEMPLATES["qwen3"].replace("'<|im_start|>assistant\\n' }}\n", "'<|im_start|>assistant\\n<think>\\n' }}\n")
    begun = make_renderer(replace(tokenizer, chat_template=opened))
    assert (renderer._begun_thinking, begun._begun_thinking) == (False, True)
    call = f"<tool_call>\n{GOOD}\n</tool_call>"
    for text, answer in (
        (f"<think>\na\n</think>\n\nb\n{call}<|im_end|>", Answer("b", (ADD,), "a")),
        (f"<think>\na {GOOD}\n</think>\n\nb", Answer("b", (), f"a {GOOD}")),
        ("<think>\n\n</think>\n\nb", Answer("b", (), "")),
        (f"<think>\na{call}", Answer("", (), f"a{call}")),  # cut off
        (f"a\n</think>\n\nb{call}", Answer("b", (ADD,), "a")),
    ):
        assert renderer.parse(tokenizer.encode(text)) == answer
    assert renderer.parse(tokenizer.encode(f"b {call}")) == Answer("b", (ADD,))
    assert begun.parse(tokenizer.encode("a")) == Answer("", (), "a")
    assert begun.parse(tokenizer.encode("a\n</think>\n\nb")) == Answer("b", (), "a")
    ids = renderer.ids([user("a")])
    ids += tokenizer.encode("<think>\nc\n</think>\n\nd<|im_end|>")
    ids += renderer.bridge(ids, [user("b")])  # the template would drop the thinking now
    assert "<think>\nc\n</think>\n\nd<|im_end|>\n<|im_start|>user\nb" in tokenizer.decode(ids, special=True)
