"""The built-in task's vocabulary: a small byte-level BPE trained on the run's own texts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jrlhf.config.schema import DataConfig
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Ids
from jrlhf.tasks.docstrings.corpus import DocumentedFunction

PAD = "<pad>"
EOS = "<eos>"

# A word has no blank before it inside an identifier, but it has one in prose, and a small vocabulary would encode the
# two with different tokens: a model could not copy "folder" from `remove_folder`. So a word that touches the preceding
# text gets a joiner and a blank, which decoding removes again: `remove_folder` becomes "remove", "_\u2060", " folder".
_JOINER = "\u2060 "
_TOUCHING = (
    r"(?<=[^\s\p{L}\x{2060}])(?=\p{L})"  # remove_|folder, Mailbox.|remove, (|folder
    r"|(?<=\p{Ll})(?=\p{Lu})"  # remove|Folder
    r"|(?<=\p{Lu})(?=\p{Lu}\p{Ll})"  # HTTP|Server
)
_WORDS = r" ?(?:\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}+|\p{Lo}+)|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """Trains a byte-level BPE vocabulary of `vocab_size` tokens: `<pad>` = 0, `<eos>` = 1, the 256 bytes, then merges.

    Texts of every script can be encoded. Equal texts in equal order give an equal tokenizer, bit for bit. Raises
    ValueError if the vocabulary is too small for the bytes, or the texts are too few to fill it.
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
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    trained = backend.get_vocab_size()
    if trained != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} is too large for these texts: they give {trained} tokens")
    return wrap(backend)


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    """Makes the tokenizer of a vocabulary with `<pad>` and `<eos>`. Inside a text these names are plain characters."""
    pad_id, eos_id = backend.token_to_id(PAD), backend.token_to_id(EOS)
    if pad_id is None or eos_id is None:
        raise ValueError(f"the vocabulary lacks {PAD} or {EOS}")
    backend.encode_special_tokens = True
    return Tokenizer(backend, (eos_id,), pad_id)


@dataclass(frozen=True)
class Split:
    """The examples within the length limits, with their token ids. A response ends with `<eos>`."""

    examples: tuple[DocumentedFunction, ...]
    prompts: tuple[Ids, ...]
    responses: tuple[Ids, ...]
    dropped: int = 0  # examples that were too long


def encode_split(tokenizer: Tokenizer, examples: Sequence[DocumentedFunction], data: DataConfig) -> Split:
    """Encodes the examples of at most `data.max_prompt` and, with `<eos>`, `data.max_response` tokens."""
    rows = [
        (example, prompt, response)
        for example, (prompt, response) in zip(examples, encode_examples(tokenizer, examples), strict=True)
        if fits(prompt, response, data)
    ]
    survivors, prompts, responses = zip(*rows, strict=True) if rows else ((), (), ())
    return Split(survivors, prompts, responses, len(examples) - len(survivors))


def encode_examples(tokenizer: Tokenizer, examples: Sequence[DocumentedFunction]) -> list[tuple[Ids, Ids]]:
    """Returns token ids of each example's prompt and of its summary with `<eos>`."""
    prompts = tokenizer.encode_batch([example.prompt for example in examples])
    summaries = tokenizer.encode_batch([example.summary for example in examples])
    return [(tuple(p), (*s, tokenizer.eos_id)) for p, s in zip(prompts, summaries, strict=True)]


def fits(prompt: Ids, response: Ids, data: DataConfig) -> bool:
    return len(prompt) <= data.max_prompt and len(response) <= data.max_response
