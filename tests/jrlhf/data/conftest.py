"""Tokenizers of four families and the ids that transformers gives; datasets of rows in memory, encoded in one line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jrlhf.config.schema import ColumnsConfig
from jrlhf.data.chat import render_chat
from jrlhf.data.encode import Encoding
from jrlhf.data.read import USUAL, Dataset, make_dataset
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.data.types import Pairs, Prompts, Sequences

FAMILIES = Path(__file__).parents[1] / "tokenizers"
GOLDEN = json.loads((FAMILIES / "golden.json").read_text(encoding="utf-8"))
FAMILY = {name: load_tokenizer(FAMILIES / name) for name in ("qwen", "llama", "gemma", "mistral")}
QWEN = FAMILY["qwen"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def from_rows(rows: Iterable[Mapping[str, Any]], *, columns: ColumnsConfig = USUAL) -> Dataset:
    return make_dataset(((f"row {number}", row) for number, row in enumerate(rows, start=1)), columns, "rows")


def encode_chat(tokenizer: Tokenizer, messages: Any, **options: Any) -> list[int]:
    return tokenizer.encode(render_chat(tokenizer, messages, **options))


def encode_prompts(data: Any, tokenizer: Tokenizer, *, max_prompt: int, **options: Any) -> Prompts:
    return Encoding(tokenizer, **options).prompts(data, max_prompt)


def encode_sft(data: Any, tokenizer: Tokenizer, *, max_length: int, **options: Any) -> Sequences:
    return Encoding(tokenizer, **options).sequences(data, max_length)


def encode_preferences(data: Any, tokenizer: Tokenizer, *, max_length: int, **options: Any) -> Pairs:
    return Encoding(tokenizer, **options).pairs(data, max_length)
