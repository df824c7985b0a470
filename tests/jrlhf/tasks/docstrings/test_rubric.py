import random

import numpy as np
import pytest

from jrlhf.tasks.docstrings.corpus import Corpus, DocumentedFunction, load_corpus
from jrlhf.tasks.docstrings.rubric import WEIGHTS, Rubric, is_imperative, stem

SIGNATURE = "def Mailbox.remove_folder(folder, force=False):"
LINES = [
    "Remove the empty folder.",
    "Return the value.",
    "Set the value of the given list.",
    "Open a file for reading.",
]
# "value" is in more than one summary of a hundred, "folder" in fewer.
RUBRIC = Rubric.from_corpus(
    [DocumentedFunction("m", "f", "def f(x):", f"Return the value {'abc'[i % 3]}.") for i in range(150)]
    + [DocumentedFunction("m", "f", "def f(x):", line) for line in LINES]
)


def mark(item: str, summary: str, signature: str = SIGNATURE) -> float:
    return RUBRIC.items(signature, summary)[item]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_every_item_rewards_what_it_names():
    table: dict[str, dict[str, float]] = {
        "one_line": {"Remove the folder.": 1, "Remove\nthe folder.": 0, "": 0, "  ": 0},
        "capital": {"Remove it.": 1, "remove it.": 0, "'x' is removed.": 0, "": 0},
        "full_stop": {"Remove it.": 1, "Remove it": 0, "Remove it...": 0, "Remove it!": 0, "": 0},
        "length": {
            "Remove the folder.": 1,
            "one " * 15: 1,
            "Remove it.": 2 / 3,
            "Remove.": 1 / 3,
            "": 0,
            "one " * 17: 1 / 3,
            "one " * 30: 0,
        },
        "own_words": {
            "Remove the named folder.": 1,
            "Remove the folder(s).": 1,
            "Call close() on the folder.": 1,
            "remove_folder(folder) deletes it.": 0,
            "Delete it as remove_folder() does.": 0,
            "folder, force -> None": 0,
            "remove_folder: delete it.": 0,
            "remove_folder deletes it.": 0,
            "Mailbox remove folder now.": 0,
            "": 0,
        },
        "known_words": {
            "Remove the value.": 1,
            "Removing values, opened lists.": 1,
            "Remove the mailbox.": 1,
            "Remove the qzx.": 0.5,
            "Remove qzx wvb.": 0,
            "Remove qzx wvb tgh rfv.": 0,
            "Remove the val\ufffd.": 0.0,
            "12 34.": 0,
            "": 0,
        },
        "specific": {
            "Return the value.": 0,
            "Open a file.": 0,
            "Return the true value.": 0,
            "Delete an empty folder.": 1,
            "Close the mailbox.": 1,
            "Folder of mailbox removed by force.": 1,
            "Folderish things.": 0,
            "": 0,
        },
    }
    for item, marks in table.items():
        for summary, expected in marks.items():
            assert mark(item, summary) == pytest.approx(expected), (item, summary)


def test_marks_depend_on_the_words_of_the_signature():
    assert RUBRIC.common == {stem(word) for word in ("return", "the", "value", "a", "b", "c")}
    box, common = "def Box.__init__(self, *args, **kwargs):", "def set_value(value, folder):"
    for item, signature, summary, expected in [
        ("specific", common, "Return the value.", 0.5),  # common words tell less of a function
        ("specific", common, "Return the value as a value.", 0.5),
        ("specific", common, "Return the value in the folder.", 1),
        ("specific", common, "Return the folder.", 1),
        ("own_words", "def remove(entry):", "remove the entry", 1),  # a name that is a verb may begin the line
        ("own_words", "def folder(entry):", "folder removes", 0),
        ("specific", "def f(mode='force', self=None):", "Use force.", 0),  # a function is not about its defaults
        ("specific", box, "Return the args of self.", 0),
        ("specific", box, "Make a box.", 1),
    ]:
        assert mark(item, summary, signature) == expected, (signature, summary)


def test_commands_are_imperative_and_descriptions_are_not():
    commands = (
        "Return the value.|return True if so|Recursively remove the tree.|Re-open the file.|Reopen the file."
        "|Unregister a handler.|Decode, then parse.|List the names.|Check for errors.|Close."
    )
    descriptions = (
        "Returns the value.|Returning the value.|Returned by the parser.|The value.|List of names."
        "|Name of the file.|Called when done.|Helper for close.|Deprecated.|Recursively removes the tree."
        "|Reblah the file.|If set, return it.|get_name(x)|"
    )
    assert [line for line in commands.split("|") if not is_imperative(line)] == []
    assert [line for line in descriptions.split("|") if is_imperative(line)] == []


def test_score_is_the_weighted_mean_of_the_items():
    items = RUBRIC.items(SIGNATURE, "removes the folder")
    assert list(items) == list(WEIGHTS)
    expected = sum(WEIGHTS[name] * items[name] for name in items) / sum(WEIGHTS.values())
    assert RUBRIC.score(SIGNATURE, "removes the folder") == pytest.approx(expected)
    assert RUBRIC.score(SIGNATURE, "Remove the empty folder.") == pytest.approx(1.0)
    assert RUBRIC.score(SIGNATURE, "") == 0.0
    faulty = ["removes the folder", "remove the folder", "Remove the folder", "Remove the folder."]
    scores = [RUBRIC.score(SIGNATURE, line) for line in faulty]  # fixing one fault always raises the score
    assert scores == sorted(scores) and len(set(scores)) == 4


@pytest.mark.full
def test_real_lines_beat_generic_foreign_bad_and_senseless_ones(corpus: Corpus):
    """The order that the rubric is for, on functions whose modules it has never seen."""
    rubric = Rubric.from_corpus(corpus.train)
    style = ("one_line", "imperative", "capital", "full_stop")
    marks = [rubric.items(example.signature, example.summary) for example in corpus.heldout]
    good = [all(items[name] == 1 for name in style) for items in marks]
    follow = [example for example, is_good in zip(corpus.heldout, good, strict=True) if is_good]
    rest = [example for example, is_good in zip(corpus.heldout, good, strict=True) if not is_good]
    assert 0.4 < np.mean(good) < 0.75

    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz    "

    def mean(pairs: list[tuple[str, str]]) -> float:
        return float(np.mean([rubric.score(signature, line) for signature, line in pairs]))

    specific = mean([(e.signature, e.summary) for e in follow])
    generic = max(
        mean([(e.signature, line) for e in corpus.heldout])
        for line in ("Return a value.", "Return the given object.", "Set the value of the given name.")
    )
    foreign = mean([(e.signature, rng.choice(follow).summary) for e in corpus.heldout])
    bad = mean([(e.signature, e.summary) for e in rest])
    senseless = mean([(e.signature, "".join(rng.choice(letters) for _ in range(40))) for e in corpus.heldout])
    assert specific > generic + 0.1
    assert generic > foreign - 0.01
    assert foreign > bad > senseless + 0.3
    named = np.mean([items["specific"] for items, is_good in zip(marks, good, strict=True) if is_good])
    misnamed = np.mean([rubric.items(e.signature, rng.choice(follow).summary)["specific"] for e in corpus.heldout])
    assert named > 0.7 and misnamed < 0.1
    assert Rubric.from_corpus(tuple(reversed(corpus.train))) == rubric
