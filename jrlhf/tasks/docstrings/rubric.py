"""The known judge ("gold"): how good a docstring's summary line is for a signature, by PEP 257 and by what it says.

The program's reward model learns from pairs that this rubric ranks; the policy never sees the rubric
itself, so that its score measures what the learned reward is worth. Source: https://peps.python.org/pep-0257/ ("The
docstring is a phrase ending in a period. It prescribes the function or method's effect as a command, not as a
description"; "The one-line docstring should NOT be a signature reiterating the function/method parameters").
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from jrlhf.tasks.docstrings.corpus import Example

# The share of each item in the score.
WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "one_line": 0.5,
        "imperative": 2.0,
        "capital": 1.0,
        "full_stop": 1.5,
        "length": 0.5,
        "own_words": 1.0,
        "known_words": 1.0,
        "specific": 2.0,
    }
)

_SHORTEST, _LONGEST = 3, 15  # words of a summary that is neither a label nor a paragraph
_COMMON_SHARE = 0.01  # of the corpus' summaries: a word in more of them than this tells functions apart poorly

# Verbs with which the summaries of Python functions begin, in their base form. A closed list: an open rule ("no -s, no
# -ing") would take any noun, and a policy that is paid for it would find that out.
_VERBS = frozenset(
    """
    abort accept acquire activate add adjust advance allow append apply arrange ask assemble assert assign
    associate assume attach attempt authenticate await backup begin bind block bring broadcast build
    byte-compile cache calculate call cancel capture cast catch center chain change check choose clean cleanup
    clear clip clone close coerce collapse collect combine comment commit compare compile complete compress
    compute concatenate configure connect construct consume continue control convert copy correct count create
    customize deactivate deallocate debug decide declare decode decompress decorate decrease decrement dedent
    define defer delay delegate delete dequeue describe deserialize destroy detach detect determine disable
    disassemble discard disconnect dismiss dispatch display divide do download draw drop dump duplicate echo
    edit emit enable encode end enqueue ensure enter enumerate erase escape establish evaluate examine exchange
    execute exit expand export express extend extract fail feed fetch figure fill filter finalize find finish
    fire fix flash flatten flip flush fold follow force fork format forward free freeze generate get give go
    grab group guess handle hash hide highlight identify ignore implement import increase increment indent
    indicate inform inherit initialise initialize initiate inject insert inspect install instantiate instruct
    interact interpret interrupt intersect invalidate invert invoke isolate issue iterate join jump keep kill
    launch let limit link list listen load locate lock log login logout look lookup lower make map mark match
    measure merge mimic modify monitor move multiply name negate normalise normalize notify obtain offer omit
    open optimize order output override pack pad parse pass patch pause peek perform permit pickle place plot
    point poll pop populate post prepare prepend preserve pretty-print prevent print probe process produce
    prompt propagate protect provide prune publish pull purge push put query quit quote raise randomize reach
    read rebuild recalculate receive recognize reconfigure reconstruct record recover redirect redo reduce
    refactor refresh refuse register reject release reload remember remove rename render reopen reorder repeat
    replace report reposition represent request require reraise reschedule reserve reset resize resolve restart
    restore restrict resume retrieve retry return reverse revert rewind rewrite roll rotate round run sample
    save scale scan schedule scroll search seek select send separate serialize serve set setup shift show shrink
    shuffle shutdown shut signal simplify simulate skip sleep slice solve sort spawn specify split squeeze
    standardize start stop store strip submit subscribe substitute subtract sum summarize supply suppress
    suspend swap switch synchronize tag take tell terminate test throw toggle tokenize trace track transfer
    transform translate transmit trap traverse treat trigger trim truncate try turn typecheck unbind uncomment
    undo unescape uninstall unindent unlink unload unlock unmap unmark unpack unquote unregister unset
    unsubscribe untag unwrap update upgrade upload use validate verify view visit wait wake walk warn watch
    widen withdraw work wrap write yield zip
    """.split()
)

# Words that say nothing about one function rather than another.
_STOPWORDS = frozenset(
    """
    a about above after again all also an and any are as at be been before being below between both but by can
    cannot could def did do does doing done down each either else etc for from further had has have having he
    her here him his how i if in into is it its itself just may me might more most must my need needs no nor not
    now of off on once only or other otherwise our out over own per same self shall she should since so some
    such than that the their them then there these they this those through to too under until up upon us use
    used user uses using very via was we well were what when where whether which while who whose why will with
    within without would you your cls args arg kwargs kwds kw init new none true false return returns
    """.split()
)

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
    def from_corpus(cls, examples: Sequence[Example]) -> "Rubric":
        """Learns from the training examples which words are known, and which are common."""
        summaries = [{stem(word) for word in words(example.summary)} for example in examples]
        counts = Counter(word for summary in summaries for word in summary)
        names = {stem(word) for example in examples for word in words(example.signature)}
        common = {word for word, count in counts.items() if count > _COMMON_SHARE * len(examples)}
        return cls(frozenset(names | counts.keys()), frozenset(common))

    def items(self, signature: str, summary: str) -> dict[str, float]:
        """Every item's mark in [0, 1], by name, in the order of `WEIGHTS`.

        one_line: there is text, and all of it on one line.
        imperative: it begins with a verb in its base form ("Return", not "Returns" or "Returning").
        capital: its first character is a capital letter.
        full_stop: it ends with a full stop, and not with several.
        length: 3 to 15 words; a third less for each word too few or too many.
        own_words: it does not repeat the signature.
        known_words: every word occurs in the corpus or in this signature; one half where one does not, 0 where more do
            not.
        specific: it speaks of what the signature names (class, function or parameters): one half for a word that is
            common in the corpus, 1 for a rarer one or for two common ones.
        """
        subject = _subject(signature)
        used = words(summary)
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
            "length": _length(len(summary.split())),
            "own_words": float(len(used) > 0 and not _repeats(signature, subject, summary)),
            "known_words": max(0.0, 1.0 - unknown / 2) if used else 0.0,
            "specific": min(1.0, sum(0.5 if word in self.common else 1.0 for word in specific)),
        }

    def score(self, signature: str, summary: str) -> float:
        """The weighted mean of the items, in [0, 1]."""
        items = self.items(signature, summary)
        return sum(weight * items[name] for name, weight in WEIGHTS.items()) / sum(WEIGHTS.values())


def is_imperative(summary: str) -> bool:
    """True for a line that begins with a command: a verb's base form, or an adverb and then the verb.

    The verb is one of a closed list, or such a one after "re", "un", "de" or "pre". "List of names." is no command: it
    names a thing.
    """
    line = [word.strip(",:;.!") for word in summary.lower().split()]
    if len(line) > 1 and line[0].endswith("ly"):
        line = line[1:]
    return bool(line) and _is_verb(line[0]) and not (len(line) > 1 and line[1] in _PREDICATES)


def words(text: str) -> list[str]:
    """The words of a text in lower case; identifiers are split at camelCase and snake_case boundaries."""
    return [word.lower() for word in WORD.findall(text)]


def is_content(word: str) -> bool:
    """True for a lower-case word that tells one function from others."""
    return len(word) > 1 and word not in _STOPWORDS


@cache
def stem(word: str) -> str:
    """A word without its inflection: "files", "filing" and "file" have one stem. Rough: only compared with others."""
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
    return _contains(part, word) or (len(part) >= 3 and (word.startswith(part) or _is_skeleton(part, word)))


def _contains(part: str, word: str) -> bool:
    return stem(part) == stem(word) or (len(word) >= 4 and word in part)


def _speaks_of(subject: frozenset[str], word: str) -> bool:
    return is_content(word) and any(related(part, word) for part in subject)


def _is_skeleton(part: str, word: str) -> bool:
    letters = iter(word)
    return part[0] == word[0] and not _VOWELS & set(part) and all(letter in letters for letter in part)


def _subject(signature: str) -> frozenset[str]:
    """The words of class, function and parameters that mean something; defaults are not the function's own words."""
    return frozenset(word for word in words(_DEFAULT_VALUE.sub("", signature.removeprefix("def "))) if is_content(word))


def _repeats(signature: str, subject: frozenset[str], summary: str) -> bool:
    """Whether the line writes a call ("close() -> None"), uses the name as a label, or strings three of its words."""
    name = signature.removeprefix("def ").partition("(")[0].rpartition(".")[2]
    called = f"{name}(" in summary or " -> " in summary or _CALL_AT_START.match(summary) is not None
    labelled = summary.startswith((f"{name} ", f"{name}:")) and not _is_verb(name)
    copied = [all(_speaks_of(subject, word) for word in words(chunk)) and chunk.isalpha() for chunk in summary.split()]
    strung = any(all(copied[start : start + 3]) for start in range(len(copied) - 2))
    return called or labelled or strung


def _is_verb(word: str) -> bool:
    return word in _VERBS or any(
        word.startswith(p) and word.removeprefix(p).lstrip("-") in _VERBS for p in _VERB_PREFIXES
    )


def _length(count: int) -> float:
    return max(0.0, 1.0 - max(_SHORTEST - count, count - _LONGEST, 0) / 3)
