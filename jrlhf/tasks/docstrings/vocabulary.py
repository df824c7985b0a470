"""The built-in task's vocabulary: a small byte-level BPE trained on the run's own texts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jrlhf.data.tokenizer import Tokenizer

PAD = "<pad>"
EOS = "<eos>"

# Inside an identifier a word has no blank before it, in prose it has one, and a vocabulary this small would spell the
# two with different tokens: a model could not copy "folder" out of `remove_folder`. So a word that touches what stands
# before it gets a joiner and a blank, which decoding takes out again: `remove_folder` is read as "remove", "_\u2060",
# " folder".
_JOINER = "\u2060 "
_TOUCHING = (
    r"(?<=[^\s\p{L}\x{2060}])(?=\p{L})"  # remove_|folder, Mailbox.|remove, (|folder
    r"|(?<=\p{Ll})(?=\p{Lu})"  # remove|Folder
    r"|(?<=\p{Lu})(?=\p{Lu}\p{Ll})"  # HTTP|Server
)
_WORDS = r" ?(?:\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}+|\p{Lo}+)|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """Train a byte-level BPE vocabulary of `vocab_size` tokens: `<pad>` = 0, `<eos>` = 1, the 256 bytes, then merges.

    Every text can be encoded, whatever its script. Equal texts in equal order give an equal tokenizer, bit for bit.

    Raises:
        ValueError: the vocabulary cannot hold the bytes and the special tokens, or the texts are too few to fill it.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 2
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: the bytes and the special tokens alone are {smallest} tokens"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(Regex(_TOUCHING), _JOINER)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Replace(_JOINER, "")])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    trained = backend.get_vocab_size()
    if trained != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} is too large for these texts: they give {trained} tokens")
    return wrap(backend)


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    """The tokenizer of a vocabulary with `<pad>` and `<eos>`, whose names inside a text are plain characters.

    Raises:
        ValueError: the vocabulary lacks one of them.
    """
    pad_id, eos_id = backend.token_to_id(PAD), backend.token_to_id(EOS)
    if pad_id is None or eos_id is None:
        raise ValueError(f"the vocabulary lacks {PAD} or {EOS}")
    backend.encode_special_tokens = True
    return Tokenizer(backend, (eos_id,), pad_id)


@dataclass(frozen=True)
class TokenPairs:
    """Prompts and responses as token ids, in the order given, without those that were too long.

    index: which of the given pairs each row is.
    prompts, responses: token ids a row; every response ends with `<eos>`.
    """

    index: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]


def encode_pairs(
    tokenizer: Tokenizer, prompts: Sequence[str], responses: Sequence[str], max_prompt: int, max_response: int
) -> TokenPairs:
    """Encode (prompt, response) pairs and keep those that fit. `len(prompts) - len(index)` pairs were dropped.

    Args:
        max_prompt: most tokens of a prompt.
        max_response: most tokens of a response, `<eos>` included.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts for {len(responses)} responses")
    rows = [
        (row, tuple(prompt), (*response, tokenizer.eos_id))
        for row, (prompt, response) in enumerate(
            zip(tokenizer.encode_batch(prompts), tokenizer.encode_batch(responses), strict=True)
        )
        if len(prompt) <= max_prompt and len(response) < max_response
    ]
    return TokenPairs(
        index=tuple(row for row, _, _ in rows),
        prompts=tuple(prompt for _, prompt, _ in rows),
        responses=tuple(response for _, _, response in rows),
    )
