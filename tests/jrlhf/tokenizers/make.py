"""Makes the model directories beside it and golden.json, what transformers makes of them.

    python tests/jrlhf/tokenizers/make.py

Small vocabularies of the four kinds that are in use, with the special tokens of Qwen 2.5, Llama 3, Gemma 2 and Mistral,
and chat templates of the same form as those models'. Needs transformers.
"""

import json
import shutil
from pathlib import Path

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEXTS = [
    "Janet has 16 eggs. She eats three of them and sells the others for $2 each. How much does she earn?",
    "The answer is 26 dollars, because 16 - 3 = 13 and 13 * 2 = 26. You are a helpful assistant; be brief.",
    "def add(a, b):\n    return a + b\n\nWhat does the function return for 1 and 2? It returns 3.",
] * 4
WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML = """{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- set ns.first = false %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level(size: int, names: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(special(*names))
    return backend


def sentence_piece(size: int, names: list[str], dummy_prefix: bool) -> tokenizers.Tokenizer:
    """Blanks as U+2581, bytes for what the vocabulary lacks; with `dummy_prefix` every text begins with a blank."""
    replace = normalizers.Replace(" ", "\u2581")
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if dummy_prefix else replace
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581?[^\u2581\n]+|\u2581+|\n+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if dummy_prefix else [])
    )
    first = [*names, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=size, special_tokens=first, show_progress=False))
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    content["pre_tokenizer"] = None  # it only kept merges within words while training
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def begins_with(backend: tokenizers.Tokenizer, name: str) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, backend.token_to_id(name))]
    )
    return backend


def write(name: str, backend: tokenizers.Tokenizer, settings: dict, **files: dict | str) -> None:
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "tokenizer.json").write_text(backend.to_str(pretty=False) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | settings
    for file, content in ({"tokenizer_config.json": settings} | files).items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (directory / file).write_text(text, encoding="utf-8")


def make() -> None:
    qwen = byte_level(330, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    ends = [qwen.token_to_id("<|im_end|>"), qwen.token_to_id("<|endoftext|>")]
    write(
        "qwen",
        qwen,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "chat_template": CHATML},
        **{"generation_config.json": {"eos_token_id": ends}},
    )
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    llama = begins_with(byte_level(330, names), "<|begin_of_text|>")
    named = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": {"content": "<|eot_id|>"}}
    write(
        "llama",
        llama,
        {},
        **{
            "special_tokens_map.json": named,
            "chat_template.jinja": LLAMA,
            "generation_config.json": {"eos_token_id": [llama.token_to_id(name) for name in (names[1], names[4])]},
        },
    )
    gemma = sentence_piece(380, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], False)
    write(
        "gemma",
        begins_with(gemma, "<bos>"),
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "chat_template": [{"name": "default", "template": GEMMA}, {"name": "tool_use", "template": "{{ 1 / 0 }}"}],
        },
        **{"generation_config.json": {"eos_token_id": [1, gemma.token_to_id("<end_of_turn>")]}},
    )
    mistral = sentence_piece(380, ["<s>", "</s>", "[INST]", "[/INST]"], True)
    write(
        "mistral",
        begins_with(mistral, "<s>"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL},
        **{"config.json": {"eos_token_id": 1}},
    )


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS = [
    turns("How many eggs?"),
    turns("How many eggs?", "16 - 3 = 13"),
    turns("  How many\n\neggs? ", "\n13 ", "é 日本 🎈 <b>&amp;</b>", "It's 26."),
    turns("What does add(1, 2) return?", "3", "And <|im_end|> </s>?", system="Be brief."),
]


def golden() -> dict:
    """What transformers makes of every conversation and of plain texts; None where the template refuses."""
    result: dict[str, object] = {"transformers": transformers.__version__}
    for name in ("qwen", "llama", "gemma", "mistral"):
        theirs = transformers.AutoTokenizer.from_pretrained(HERE / name)
        chats = []
        for messages in CONVERSATIONS:
            own = messages[-1]["role"] == "assistant"
            try:
                chats.append(
                    {
                        "ids": theirs.apply_chat_template(messages, return_dict=False),
                        "prompt_ids": theirs.apply_chat_template(
                            messages, add_generation_prompt=not own, continue_final_message=own, return_dict=False
                        ),
                    }
                )
            except Exception:
                chats.append(None)
        texts = ["How many eggs?", " 16 - 3 = 13\n", "é 日本 🎈"]
        result[name] = {
            "conversations": chats,
            "texts": [{"text": text, "ids": theirs(text)["input_ids"]} for text in texts],
            "special_tokens": theirs.special_tokens_map,
        }
    return result


if __name__ == "__main__":
    make()
    content = {"made by": "tests/jrlhf/tokenizers/make.py", "conversations": CONVERSATIONS, **golden()}
    (HERE / "golden.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
