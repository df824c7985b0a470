"""Reward models with a tokenizer of their own, which read an answer as text."""

import json

from jrlhf.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from jrlhf.models import ModelConfig
from jrlhf.roles.pretrained import locate

# A key of an exported reward model's config.json; "eos": an answer ends at its end-of-text token.
ENDS = "answers_end_with"


def reward_tokenizer(path: str, key: str, model: ModelConfig) -> Tokenizer:
    """Loads a reward model's own tokenizer."""
    return check_vocabulary(load_tokenizer(locate(path, key)), model.vocab_size)


def is_ours(path: str, key: str) -> bool:
    """True for a reward model that a run trained: it reads an answer up to its end-of-text token."""
    return json.loads((locate(path, key) / "config.json").read_text(encoding="utf-8")).get(ENDS) == "eos"
