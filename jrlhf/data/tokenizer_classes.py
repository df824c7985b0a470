"""The tokenizer classes of transformers 5 that build their own pipeline, whatever tokenizer.json has.

`AutoTokenizer` takes the class from tokenizer_config.json and from the model's type. Most classes use tokenizer.json as
it is. The four below take only vocabulary, merges, added tokens and post-processor from it.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

_LLAMA, _GEMMA, _QWEN, _GPT2 = "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"
_GENERIC = (
    "PreTrainedTokenizer",
    "TokenizersBackend",
    "PythonBackend",
    "BloomTokenizer",
)  # take tokenizer.json as it is
_OF_FAMILIES = {"gpt2": _GPT2, "gemma2": _GEMMA, "gemma3_text": _GEMMA, "qwen2": _QWEN, "qwen3": _QWEN}
_END = "<|endoftext|>"
# Class -> the special tokens that it has where tokenizer_config.json does not name them.
CLASSES: Mapping[str, Mapping[str, str]] = {
    _LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    _GEMMA: {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
    _QWEN: dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
    _GPT2: dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
}
_BLANK = "▁"  # what SentencePiece writes for a blank
_QWENS_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> str | None:
    """Returns which of `CLASSES` transformers makes of a directory; None: one that takes tokenizer.json as it is.

    settings, config: the content of tokenizer_config.json and of config.json. Refuses other classes by name.
    """
    family = config.get("model_type")
    own = _OF_FAMILIES.get(family) if isinstance(family, str) else None
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = own if named is None or family == "qwen2" else str(named).removesuffix("Fast")
    if name is None or name in _GENERIC or family == "mistral" or (name == _LLAMA and _is_byte_level(backend)):
        return None
    if name not in CLASSES:
        raise ValueError(
            f"tokenizer_class {named} is not supported: choose another tokenizer, or write PreTrainedTokenizerFast "
            "there, which takes tokenizer.json as it is"
        )
    if not isinstance(backend.model, tokenizers.models.BPE):
        kind = type(backend.model).__name__
        raise ValueError(f"tokenizer_class {named} is not supported with a {kind} model: choose another tokenizer")
    return name


def rebuild(backend: tokenizers.Tokenizer, name: str, settings: Mapping[str, Any], unk: str | None) -> None:
    """Replaces the pipeline of a tokenizer by that of a class.

    settings: the content of tokenizer_config.json. unk: the token that Gemma's has for unknown characters.
    """
    prefix = settings.get("add_prefix_space")
    blanks = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == _LLAMA:
        scheme = "never" if prefix is not None and not prefix else "always" if settings.get("legacy") else "first"
        normalizer, words = None, pre_tokenizers.Metaspace(_BLANK, scheme, split=False)
        decoder = decoders.Sequence([*blanks, *[decoders.Strip(" ", 1, 0)] * (scheme != "never")])
    elif name == _GEMMA:  # there is no blank left to split at
        normalizer, words, decoder = normalizers.Replace(" ", _BLANK), None, decoders.Sequence(blanks)
    elif name == _QWEN:
        split = pre_tokenizers.Split(Regex(_QWENS_WORDS), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
        normalizer, words = normalizers.NFC(), pre_tokenizers.Sequence([split, letters])
        decoder = decoders.ByteLevel()
    else:
        normalizer, words = None, pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
        decoder = decoders.ByteLevel()
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, words, decoder  # pyright: ignore
    model: Any = backend.model
    model.dropout, model.ignore_merges, model.unk_token = None, False, unk if name == _GEMMA else None
    model.fuse_unk = model.byte_fallback = name in (_LLAMA, _GEMMA)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """True if the vocabulary is one of bytes, such as Llama 3's."""
    parts = backend.pre_tokenizer, backend.decoder, backend.post_processor, backend.normalizer
    return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)
