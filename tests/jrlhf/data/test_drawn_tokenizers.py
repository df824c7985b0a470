"""Drawn tokenizer directories: the ids and texts of transformers, or a refusal that names the key at fault."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jrlhf.config.schema import ColumnsConfig
from jrlhf.data.chat import render_chat, template_variables
from jrlhf.data.read import make_dataset
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.tokenizer_files import NEUTRAL, load_tokenizer
from jrlhf.errors import UserError

from .conftest import FAMILIES

FIXTURES = ("qwen", "llama", "gemma", "mistral")
MODELS = (None, "llama", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2")
CLASSES = (
    None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "LlamaTokenizer",
    "Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "GPT2Tokenizer",
    "GPT2TokenizerFast", "CodeLlamaTokenizer",
)  # fmt: skip
REFUSED = (*NEUTRAL, "tokenizer_class", "added_tokens", "which token ends a text", "to end a text with")
# A template that reads no parts, directories without a template for a row, and templates that refuse messages.
REFUSED_CHATS = ("several parts", "no chat template", "refuses the messages", "fails on the messages", "Unk token")
TEXTS = [
    "How many eggs?", " a  b\n\n c", "x<|im_end|>  y <tool> z", "<s>[INST] é 日本 🎈 [/INST]</s>", "12 345's I'LL", "",
    "  <extra> <|eot_id|> \t<eos>", "Å ▁a\u00a0b", "a<mask><unk>b<pad>",
]  # fmt: skip
PARTS = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] | trim }};{% endif %}{% endfor %}"
    "{% endif %}{{ eos_token }}{% endfor %}{% if documents is not none %}{{ documents | length }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + (m.content | string) + '\n' }}{% endfor %}"
    "{{ image_token }}{{ pad_token }}"
    "{% if documents is not none %}{{ documents }}{% endif %}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}{{ eos_token }}"
TOOL = {"type": "function", "function": {"name": "add"}}


def flags(draw: random.Random) -> dict[str, bool]:
    return {flag: draw.random() < 0.4 for flag in ("lstrip", "rstrip", "single_word", "normalized")}


def special(draw: random.Random, text: str) -> Any:
    """A special token, as text or as an object."""
    return text if draw.random() < 0.6 else {"__type": "AddedToken", "content": text, **flags(draw), "special": True}


def directory(draw: random.Random, folder: Path) -> None:
    """Writes a tokenizer directory whose settings are drawn."""
    shutil.copytree(FAMILIES / draw.choice(FIXTURES), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    backend = json.loads((folder / "tokenizer.json").read_text())
    settings, added = json.loads(path.read_text()), backend["added_tokens"]
    if (model := draw.choice(MODELS)) is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model, "eos_token_id": added[1]["id"]}))
    if (name := draw.choice(CLASSES)) is None:
        settings.pop("tokenizer_class")
    else:
        settings["tokenizer_class"] = name
    fresh = max(*backend["model"]["vocab"].values(), *(token["id"] for token in added)) + 1
    if draw.random() < 0.4:
        token = {flag: added[0][flag] for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        listed = {str(entry["id"]): {**token, "content": entry["content"]} for entry in added}
        for entry in draw.sample(list(listed.values()), 2):
            entry |= flags(draw)
        if draw.random() < 0.2:
            listed.pop(next(iter(listed)))
        if draw.random() < 0.5:
            listed[str(fresh + (draw.random() < 0.1))] = {"content": "<tool>", "special": draw.random() < 0.5}
        settings["added_tokens_decoder"] = listed
    elif draw.random() < 0.2:
        (folder / "added_tokens.json").write_text(
            json.dumps({"<tool>": fresh} if draw.random() < 0.3 else {added[0]["content"]: added[0]["id"]})
        )
    elif draw.random() < 0.3:
        older = {"pad_token": {"content": "<extra>", **flags(draw)}, "additional_special_tokens": ["<tool>"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
    for key in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "image_token"):
        if draw.random() < 0.25:
            content = draw.choice([token["content"] for token in added])
            settings[key] = special(draw, draw.choice([content, content, "<extra>" if key != "eos_token" else content]))
        elif draw.random() < 0.1:
            settings[key] = None
    if draw.random() < 0.4:
        extra: Any = [special(draw, text) for text in draw.sample(["<tool>", "<extra>", added[0]["content"]], 2)]
        key = draw.choice(["additional_special_tokens", "extra_special_tokens"])
        settings[key] = {"tool_token": "<tool>"} if key.startswith("extra") and draw.random() < 0.4 else extra
    if draw.random() < 0.2:
        settings["model_specific_special_tokens"] = {
            draw.choice(["image_token", "tool_token"]): special(draw, "<tool>")
        }
    for key, values in {
        "legacy": (True, False, None),
        "add_prefix_space": (True, False, None),
        "add_bos_token": (True, False),
        "add_eos_token": (True, False),
        "clean_up_tokenization_spaces": (True, False),
        "model_max_length": (8, 2048, 1e30),
        "padding_side": ("left", "right"),
        "use_default_system_prompt": (True, False),
        "sp_model_kwargs": ({},),
    }.items():
        if draw.random() < 0.35:
            settings[key] = draw.choice(values)
    if draw.random() < 0.15:
        key = draw.choice(list(NEUTRAL))
        settings[key] = draw.choice([NEUTRAL[key][0], {"auto_map": {"AutoTokenizer": ["a.B", None]}}.get(key, True)])
    templates(draw, folder, settings)
    path.write_text(json.dumps(settings))


def templates(draw: random.Random, folder: Path, settings: dict[str, Any]) -> None:
    """Writes chat templates in one of the places where transformers looks for them."""
    if draw.random() < 0.4:
        settings["chat_template"] = draw.choice([PARTS, PARTS, PLAIN])
    elif draw.random() < 0.3:
        named = {"default": draw.choice([PARTS, PARTS, PLAIN]), "tool_use": TOOLS, "rag": "x"}
        settings["chat_template"] = [{"name": name, "template": named[name]} for name in draw.sample(list(named), 2)]
    if draw.random() < 0.2:
        (folder / "chat_template.jinja").write_text(draw.choice([PARTS, PARTS, PLAIN]))
    if draw.random() < 0.25:
        (folder / "additional_chat_templates").mkdir()
        for name in draw.sample(["tool_use", "rag"], draw.randint(0, 2)):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(TOOLS)


def row(draw: random.Random) -> dict[str, Any]:
    """A conversation, with what a row may give to its template."""

    def content() -> Any:
        texts = draw.choices([*TEXTS[:4], " padded "], k=draw.choice([1, 1, 1, 1, 2]))
        return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

    roles = draw.choice([["user"], ["user", "assistant"], ["system", "user"], ["user", "assistant", "user"]])
    own: dict[str, Any] = {"prompt": [{"role": role, "content": content()} for role in roles]}
    own |= {"tools": draw.choice([[], [TOOL]])} if draw.random() < 0.4 else {}
    switches = [{"enable_thinking": False}, {"documents": [{"title": "a", "text": "b"}]}, {"bos_token": "<|>"}]
    return own | ({"chat_template_kwargs": draw.choice(switches)} if draw.random() < 0.4 else {})


def differences(draw: random.Random, ours: Tokenizer, theirs: Any, seen: Counter[str]) -> None:
    """Compares texts, special tokens and conversations; counts them."""
    assert ours.special_tokens == theirs.special_tokens_map
    encodes = True
    for text in TEXTS:
        try:
            expected, whole = (theirs(text, add_special_tokens=flag)["input_ids"] for flag in (False, True))
        except Exception as error:  # the library raises bare `Exception`
            assert "Unk token" in str(error)  # its class names an unknown token that the vocabulary lacks
            seen["texts refused there"], encodes = seen["texts refused there"] + 1, False
            continue
        assert ours.encode(text) == expected, text
        begun = ours.encode_prompt(text)
        assert begun == whole[: len(begun)], text
        seen["texts"] += 1
    for _ in range(6):
        data = row(draw)
        (example,) = make_dataset([("row", data)], ColumnsConfig(), "rows").examples
        assert isinstance(example.prompt, tuple)
        asked = {"add_generation_prompt": data["prompt"][-1]["role"] != "assistant"}
        try:
            text = render_chat(ours, example.prompt, **asked, variables=template_variables(example.columns))
            ids = ours.encode(text)
        except UserError as error:
            assert any(name in str(error) for name in REFUSED_CHATS), error
            seen["conversations refused"] += 1
            continue
        asked |= {"tools": data.get("tools"), **data.get("chat_template_kwargs", {})}
        assert text == theirs.apply_chat_template(data["prompt"], tokenize=False, **asked)
        if encodes:
            assert ids == theirs.apply_chat_template(data["prompt"], return_dict=False, **asked)
        seen["conversations"] += 1


def compare(seeds: range, folder: Path) -> Counter[str]:
    """Compares drawn directories with transformers; returns how many were equal, refused, and how."""
    transformers = pytest.importorskip("transformers", reason="the peer that reads the same directories")
    transformers.logging.set_verbosity_error()
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw, path = random.Random(seed), folder / str(seed)
        directory(draw, path)
        try:
            ours = load_tokenizer(path)
        except UserError as error:
            assert any(name in str(error) for name in REFUSED), (seed, error)
            seen["refused"] += 1
            continue
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(path)
        except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
            seen[f"refused there: {type(error).__name__}"] += 1
            continue
        differences(draw, ours, theirs, seen)
        if seed % 4 == 0:  # a directory that transformers writes is read again
            theirs.save_pretrained(saved := path / "saved")
            if (config := path / "config.json").exists():
                shutil.copy(config, saved)
            differences(draw, load_tokenizer(saved), transformers.AutoTokenizer.from_pretrained(saved), seen)
            seen["saved"] += 1
        seen[type(theirs).__name__] += 1
        shutil.rmtree(path)
    return seen


def test_drawn_directories_have_the_ids_of_transformers_or_are_refused_by_name(tmp_path: Path):
    seen = compare(range(60), tmp_path)
    assert seen["conversations"] > 100 and seen["refused"] < 40 and seen["saved"] > 5, seen


@pytest.mark.full
def test_many_drawn_directories_have_the_ids_of_transformers_or_are_refused_by_name(tmp_path: Path):
    seen = compare(range(60, 660), tmp_path)
    classes = "TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer"
    assert min(seen[name] for name in classes) > 20 and seen["conversations"] > 1500 and seen["refused"] < 300, seen
