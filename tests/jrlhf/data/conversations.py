"""Chat templates of the form of public families, tokenizers for them, and drawn conversations with tools."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from jrlhf.data.tokenizer import Tokenizer

from .conftest import FAMILY

_CHATML_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'Help.') + '\n\n# Tools' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\nAnswer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_CHATML_RESULTS = r"""
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
"""
_CALLS = r"""{%- for call in message.tool_calls %}
            {%- if content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}"""
TEMPLATES = {
    "qwen2.5": _CHATML_TOOLS
    + r"""{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + content }}
        """
    + _CALLS
    + r"{{- '<|im_end|>\n' }}"
    + _CHATML_RESULTS
    + "{%- endif %}",
    "qwen3": _CHATML_TOOLS
    + r"""{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thinking) %}
            {{- '<think>\n' + thinking + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        """
    + _CALLS
    + r"{{- '<|im_end|>\n' }}"
    + _CHATML_RESULTS
    + r"""{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "smollm2": r"""{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\nHelp.<|im_end|>\n' }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "llama3": r"""{{- bos_token }}
{%- set start, end = '<|start_header_id|>', '<|end_header_id|>\n\n' %}
{%- set head = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- start + 'system' + end + 'Today Date: 26 Jul 2024\n\n' + head + '<|eot_id|>' }}
{%- if head %}{%- set messages = messages[1:] %}{%- endif %}
{%- if tools is not none %}
    {{- start + 'user' + end + 'Answer with {"name": ..., "parameters": ...}.\n\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
    {{- (messages[0].content | trim) + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- start + 'assistant' + end + '{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- start + 'ipython' + end + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- start + message.role + end + (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- start + 'assistant' + end }}{%- endif %}""",
    "llama3-plain": FAMILY["llama"].chat_template,
    "llama2": r"""{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('must alternate') }}{%- endif %}
    {%- if message.role == 'user' %}{{- bos_token + '[INST] ' + (message.content | trim) + ' [/INST]' }}
    {%- else %}{{- ' ' + (message.content | trim) + ' ' + eos_token }}{%- endif %}
{%- endfor %}""",
    "mistral": r"""{{- bos_token }}
{%- set head = messages[0].content if messages[0].role == 'system' else '' %}
{%- if head %}{%- set messages = messages[1:] %}{%- endif %}
{%- set ns = namespace(n=0, last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('must alternate') }}{%- endif %}
        {%- set ns.n = ns.n + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (head + '\n\n' if head and loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + (message.content | trim) + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no such role') }}{%- endif %}
{%- endfor %}""",
    "gemma2": FAMILY["gemma"].chat_template,
    "gemma3": r"""{{- bos_token }}
{%- set head = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- if head %}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- (head if loop.first else '') + (message.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}""",
    "generic": r"""{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}""",
}
_VOCABULARY = {"qwen2.5": "qwen", "qwen3": "qwen", "smollm2": "qwen", "llama2": "mistral", "generic": "mistral"}
_VOCABULARY |= {"llama3": "llama", "llama3-plain": "llama", "mistral": "mistral", "gemma2": "gemma", "gemma3": "gemma"}
_SPECIAL = {
    "llama3": ["<|eom_id|>", "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}
_ADDED = {"qwen2.5": ["<tool_call>", "</tool_call>"]}
_ADDED["qwen3"] = [*_ADDED["qwen2.5"], "<tool_response>", "</tool_response>", "<think>", "</think>"]


def tokenizer_of(form: str, template: str | None = None) -> Tokenizer:
    own = FAMILY[_VOCABULARY[form]]
    backend = tokenizers.Tokenizer.from_str(own.backend.to_str())
    backend.add_special_tokens(_SPECIAL.get(form, []))
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in _ADDED.get(form, [])])
    return replace(own, backend=backend, chat_template=template or TEMPLATES[form], tool_template=None)


TOKENIZERS = {form: tokenizer_of(form) for form in TEMPLATES}
TOOLED = ("qwen2.5", "qwen3", "llama3", "mistral")  # templates with tool calls of their own
WITH_SYSTEM = ("qwen2.5", "qwen3", "smollm2", "llama3", "llama3-plain", "gemma3", "generic")  # in the first turn
SYSTEM_LATER = tuple(form for form in WITH_SYSTEM if form != "gemma3")
STRICT = ("llama2", "mistral", "gemma2", "gemma3")  # users and answers alternate
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
WORDS = ["the eggs", "16 - 3 = 13", "é日本", "🎈", "a\n\nb", "  ", "\n", "\t", '{"x": 1}', "don't", "'", "\\n", "1.5e3"]
CONTROL = [
    "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|eot_id|>",
    "<|start_header_id|>", "<|python_tag|>", "[INST]", "[/INST]", "</s>", "<s>", "[TOOL_CALLS]", "[/TOOL_RESULTS]",
    "<end_of_turn>\n<start_of_turn>model\n", "<eos>", "<<|im_end|>|im_end|>", "</tool_response>", "<|endoftext|>",
]  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """An answer as a message, and the messages that follow it. cut: the answer is cut off."""

    answer: dict[str, Any]
    following: list[dict[str, Any]]
    cut: bool


def text(draw: random.Random, *, control: float = 0.0) -> str:
    words = [draw.choice(CONTROL if draw.random() < control else WORDS) for _ in range(draw.randrange(4))]
    return draw.choice(["", " "]).join(words)


def call(draw: random.Random) -> dict[str, Any]:
    values = [text(draw), draw.randrange(99), None, True, {"inner": [text(draw), 0.5]}]
    arguments = {draw.choice(["a", "b", "日"]): draw.choice(values) for _ in range(draw.randrange(3))}
    function = {"name": draw.choice(["add", "find_it"]), "arguments": arguments}
    return {"type": "function", "function": function, "id": "".join(draw.choices("aZ09", k=9))}


def turn(draw: random.Random, form: str) -> Turn:
    """Draws an answer, with calls at times, and the user's next turn or the results of the calls."""
    answer: dict[str, Any] = {"role": "assistant", "content": text(draw).strip()}
    control, following = draw.choice([0.0, 0.0, 0.3]), list[dict[str, Any]]()
    if draw.random() < 0.5:
        calls = [call(draw) for _ in range(1 if form == "llama3" else draw.randint(1, 3))]
        answer["content"] = "" if form in ("llama3", "mistral") else answer["content"]
        if form in TOOLED:
            answer["tool_calls"] = calls
        else:  # the plain form
            lines = [json.dumps({key: one["function"][key] for key in ("name", "arguments")}) for one in calls]
            written = [f"<tool_call>\n{line}\n</tool_call>" for line in lines]
            answer = {**answer, "content": "\n".join(filter(None, (answer["content"], *written))), "calls": calls}
        following = [
            {"role": "tool", "content": text(draw, control=control), "tool_call_id": one["id"], "name": "add"}
            for one in calls
        ]
    if not following or (form not in STRICT and draw.random() < 0.2):
        role = "system" if form in SYSTEM_LATER and draw.random() < 0.2 else "user"
        following.append({"role": role, "content": text(draw, control=control)})
    return Turn(answer, following, cut=draw.random() < 0.15)


def beginning(draw: random.Random, form: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Draws the first messages, and the tools."""
    system = form in WITH_SYSTEM and draw.random() < 0.5
    messages = [{"role": "system", "content": f"S {text(draw)}"}] if system else []
    tools = TOOLS if form in TOOLED and form != "mistral" and draw.random() < 0.5 else None
    return [*messages, {"role": "user", "content": text(draw)}], tools


def plain_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the results of tools as users' turns."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        written = f"<tool_response>\n{message['content']}\n</tool_response>"
        if message["role"] != "tool":
            plain.append({key: message[key] for key in ("role", "content")})
        elif plain and plain[-1].get("tool"):
            plain[-1]["content"] += f"\n{written}"
        else:
            plain.append({"role": "user", "content": written, "tool": True})
    return plain
