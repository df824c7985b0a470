"""Consistent renaming: an augmentation that teaches a small model to read the signature instead of remembering it.

The corpus has about five thousand lines, and a model of a million parameters memorises them before it learns to copy
words from the signature into the line. So a word that the signature and the summary of a training example share may be
replaced by another word in both: `def Mailbox.remove_folder(folder):`, "Remove the folder." becomes
`def Mailbox.remove_lock(lock):`, "Remove the lock." Then the model must learn to copy.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jrlhf.tasks.docstrings.corpus import DocumentedFunction
from jrlhf.tasks.docstrings.rubric import WORD, is_content, is_imperative, words


def renaming_words(examples: Sequence[DocumentedFunction]) -> tuple[str, ...]:
    """Returns the words that may replace others: all nouns in the signatures, sorted."""
    candidates = {word for example in examples for word in words(example.signature)}
    return tuple(sorted(word for word in candidates if _names_a_thing(word)))


def rename(example: DocumentedFunction, vocabulary: Sequence[str], rng: np.random.Generator) -> DocumentedFunction:
    """Replaces every noun that occurs in both the signature and the summary of an example.

    Verbs stay, so that a command remains a command; plurals and capital letters are preserved. An example whose parts
    share no noun is returned unchanged.
    """
    summary = set(words(example.summary))
    shared = {
        word for word in words(example.signature) if _names_a_thing(word) and not summary.isdisjoint((word, f"{word}s"))
    }
    shared -= {f"{word}s" for word in shared}  # a plural follows its singular
    names = {word: vocabulary[int(rng.integers(len(vocabulary)))] for word in sorted(shared)}

    def other(match: re.Match[str]) -> str:
        word = match.group()
        lower = word.lower()
        if lower in names:
            return _like(word, names[lower])
        if lower.endswith("s") and lower[:-1] in names:
            return _like(word[:-1], names[lower[:-1]]) + word[-1]
        return word

    return replace(example, signature=WORD.sub(other, example.signature), summary=WORD.sub(other, example.summary))


def _names_a_thing(word: str) -> bool:
    return len(word) >= 3 and is_content(word) and not is_imperative(word)


def _like(word: str, new: str) -> str:
    if word.isupper() and len(word) > 1:
        return new.upper()
    return new.capitalize() if word[0].isupper() else new
