"""The gold rubric: scores a docstring's summary line for a signature, by PEP 257 and by its content.

The program's reward model learns from pairs that this rubric ranks; the policy never sees the rubric
itself, so its score measures the quality of the learned reward. Source: https://peps.python.org/pep-0257/ ("The
docstring is a phrase ending in a period. It prescribes the function or method's effect as a command, not as a
description"; "The one-line docstring should NOT be a signature reiterating the function/method parameters").
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jrlhf.tasks.docstrings.corpus import DocumentedFunction

# The items of the rubric: their weights in the score, and what they ask for. Each has a mark in [0, 1].
ITEMS: Mapping[str, tuple[float, str]] = {
    "one_line": (0.5, "there is text, and all of it on one line"),
    "imperative": (2.0, "it begins with a verb in its base form: Return, not Returns or Returning"),
    "capital": (1.0, "its first character is a capital letter"),
    "full_stop": (1.5, "it ends with a full stop, and not with several"),
    "length": (0.5, "3 to 15 words; a third less for each word too few or too many"),
    "own_words": (1.0, "it does not repeat the signature"),
    "known_words": (1.0, "all words occur in the corpus or in this signature; half if one does not, 0 if more"),
    "specific": (2.0, "it uses words of the class, function or parameters; half for a single common word"),
}
WEIGHTS: Mapping[str, float] = {name: weight for name, (weight, _) in ITEMS.items()}

_SHORTEST, _LONGEST = 3, 15  # words of a summary that is neither a label nor a paragraph
_COMMON_SHARE = 0.01  # a word in a larger share of the corpus' summaries hardly distinguishes functions


def _word_list(name: str) -> frozenset[str]:
    return frozenset(Path(__file__).with_name(name).read_text(encoding="utf-8").split())


# Verbs with which the summaries of Python functions begin, in their base form. A closed list, because an open rule ("no
# -s, no -ing") would accept any noun, and a policy would learn to exploit that.
_VERBS = _word_list("verbs.txt")
_STOPWORDS = _word_list("stopwords.txt")  # they do not distinguish functions

_VERB_PREFIXES = ("re", "un", "de", "pre")
_PREDICATES = frozenset({"of", "is", "are", "was", "were"})  # after "list" or "name", they make it a noun

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # one word of prose, or one of those that an identifier joins
_DEFAULT_VALUE = re.compile(r"=[^,)]*")
_VOWELS = frozenset("aeiou")
_CALL_AT_START = re.compile(r"[\w.]+\(")

_SUFFIXES = (
    "ations", "ation", "ators", "ating", "ments", "ator", "ated", "ates", "able", "ible", "ment", "ings", "ions",
    "ate", "ing", "ion", "ers", "ors", "ies", "ied", "er", "or", "ed", "es", "s", "e", "y",
)  # fmt: skip


@dataclass(frozen=True)
class Rubric:
    """Scores a summary line for a signature. It knows only the words of a corpus.

    vocabulary: stems of every word in the corpus' summaries and signatures.
    common: stems that more than one summary in a hundred has, such as those of "value", "given" and "list".
    """

    vocabulary: frozenset[str]
    common: frozenset[str]

    @classmethod
    def from_corpus(cls, examples: Sequence[DocumentedFunction]) -> "Rubric":
        """Learns from the training examples which words are known, and which are common."""
        summaries = [{stem(word) for word in words(example.summary)} for example in examples]
        counts = Counter(word for summary in summaries for word in summary)
        names = {stem(word) for example in examples for word in words(example.signature)}
        common = {word for word, count in counts.items() if count > _COMMON_SHARE * len(examples)}
        return cls(frozenset(names | counts.keys()), frozenset(common))

    def items(self, signature: str, summary: str) -> dict[str, float]:
        """Returns every item's mark, by name, in the order of `WEIGHTS`."""
        subject = _subject(signature)
        used, count = words(summary), len(summary.split())
        is_known = [stem(word) in self.vocabulary or any(_contains(part, word) for part in subject) for word in used]
        unknown = is_known.count(False) + summary.count("\ufffd")  # what decoding makes of bytes that are no text
        specific = {
            stem(word) for word, is_word in zip(used, is_known, strict=True) if is_word and _speaks_of(subject, word)
        }
        return {
            "one_line": float(summary.strip() != "" and "\n" not in summary),
            "imperative": float(is_imperative(summary)),
            "capital": float(summary[:1].isupper()),
            "full_stop": float(summary.endswith(".") and not summary.endswith("..")),
            "length": max(0.0, 1.0 - max(_SHORTEST - count, count - _LONGEST, 0) / 3),
            "own_words": float(len(used) > 0 and not _repeats(signature, subject, summary)),
            "known_words": max(0.0, 1.0 - unknown / 2) if used else 0.0,
            "specific": min(1.0, sum(0.5 if word in self.common else 1.0 for word in specific)),
        }

    def score(self, signature: str, summary: str) -> float:
        """Returns the weighted mean of the items, in [0, 1]."""
        items = self.items(signature, summary)
        return sum(weight * items[name] for name, weight in WEIGHTS.items()) / sum(WEIGHTS.values())


def is_imperative(summary: str) -> bool:
    """True if a line begins with a command: a verb's base form, or an adverb and then the verb.

    The verb is in a closed list, possibly after the prefix "re", "un", "de" or "pre". "List of names." is no command,
    because "list" is a noun there.
    """
    line = [word.strip(",:;.!") for word in summary.lower().split()]
    if len(line) > 1 and line[0].endswith("ly"):
        line = line[1:]
    return bool(line) and _is_verb(line[0]) and not (len(line) > 1 and line[1] in _PREDICATES)


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case; identifiers are split at camelCase and snake_case boundaries."""
    return [word.lower() for word in WORD.findall(text)]


def is_content(word: str) -> bool:
    """True if a lower-case word distinguishes a function from others."""
    return len(word) > 1 and word not in _STOPWORDS


@cache
def stem(word: str) -> str:
    """Removes the inflection: "files", "filing" and "file" have one stem. Rough: stems are only compared."""
    for suffix in _SUFFIXES:
        shorter = word.removesuffix(suffix)
        if shorter != word and len(shorter) >= 3 and not (suffix == "s" and shorter.endswith("s")):
            word = shorter
            break
    return word[:-1] if len(word) > 2 and word[-1] == word[-2] else word


def related(part: str, word: str) -> bool:
    """True if a word of a summary refers to a part of an identifier.

    They share a stem ("parsing", "parser"), or the part abbreviates the word ("dir", "directory"; "msg", "message"), or
    the word is inside a part that joins several ("line" in "readline").
    """
    if _contains(part, word) or (len(part) >= 3 and word.startswith(part)):
        return True
    letters = iter(word)  # without vowels, all letters of the part occur in the word in this order
    consonants = len(part) >= 3 and part[0] == word[0] and not _VOWELS & set(part)
    return consonants and all(letter in letters for letter in part)


def _contains(part: str, word: str) -> bool:
    return stem(part) == stem(word) or (len(word) >= 4 and word in part)


def _speaks_of(subject: frozenset[str], word: str) -> bool:
    return is_content(word) and any(related(part, word) for part in subject)


def _subject(signature: str) -> frozenset[str]:
    """Returns the content words of class, function and parameters; defaults are not the function's own words."""
    return frozenset(word for word in words(_DEFAULT_VALUE.sub("", signature.removeprefix("def "))) if is_content(word))


def _repeats(signature: str, subject: frozenset[str], summary: str) -> bool:
    """True if the line is a call ("close() -> None"), uses the name as a label, or repeats 3 of its words in a row."""
    name = signature.removeprefix("def ").partition("(")[0].rpartition(".")[2]
    called = f"{name}(" in summary or " -> " in summary or _CALL_AT_START.match(summary) is not None
    labelled = summary.startswith((f"{name} ", f"{name}:")) and not _is_verb(name)
    copied = [all(_speaks_of(subject, word) for word in words(chunk)) and chunk.isalpha() for chunk in summary.split()]
    strung = any(all(copied[start : start + 3]) for start in range(len(copied) - 2))
    return called or labelled or strung


def _is_verb(word: str) -> bool:
    prefixed = (word.removeprefix(prefix).lstrip("-") for prefix in _VERB_PREFIXES if word.startswith(prefix))
    return word in _VERBS or any(base in _VERBS for base in prefixed)
