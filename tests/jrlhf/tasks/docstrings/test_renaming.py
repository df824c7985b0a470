import numpy as np

from jrlhf.tasks.docstrings.corpus import Example
from jrlhf.tasks.docstrings.renaming import rename, renaming_words


def renamed(signature: str, summary: str, words: tuple[str, ...] = ("zebra",)) -> tuple[str, str]:
    changed = rename(Example("m", "f", signature, summary), words, np.random.default_rng(0))
    return changed.signature, changed.summary


def test_a_shared_word_is_replaced_in_both():
    table = [
        (
            "def Mailbox.remove_folder(folder):",
            "Remove the folder.",
            ("def Mailbox.remove_zebra(zebra):", "Remove the zebra."),
        ),
        (
            "def Folder.getFolders(FOLDER):",
            "Return Folders of a folder.",
            ("def Zebra.getZebras(ZEBRA):", "Return Zebras of a zebra."),
        ),
        ("def f(self_none, remove):", "Remove it, none of self.", None),  # helper words and verbs stay
        ("def f(folder):", "Remove the folders.", ("def f(zebra):", "Remove the zebras.")),
        ("def f(folder):", "Remove it.", None),
        ("def f(fd):", "Close the fd.", None),  # too short a word to be told from an accident
    ]
    for signature, summary, expected in table:
        assert renamed(signature, summary) == (expected if expected is not None else (signature, summary))


def test_two_words_are_replaced_each_by_its_own():
    signature, summary = renamed(
        "def copy(source, target):", "Copy source to target.", tuple(f"new{i}" for i in range(999))
    )
    one, two = signature.removeprefix("def copy(").removesuffix("):").split(", ")
    assert summary == f"Copy {one} to {two}." and one != two


def test_an_example_is_not_changed_in_place_and_the_rest_stays():
    example = Example("m", "Box.f", "def Box.f(folder):", "Remove the folder.")
    changed = rename(example, ("zebra",), np.random.default_rng(0))
    assert example.summary == "Remove the folder."
    assert (changed.module, changed.name) == ("m", "Box.f")


def test_the_same_generator_gives_the_same_words():
    example = Example("m", "f", "def f(folder, name):", "Give the folder a name.")
    words = tuple(f"w{chr(97 + i)}" for i in range(26))
    drawn = [[rename(example, words, rng).summary for _ in range(20)] for rng in map(np.random.default_rng, (1, 1, 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 10


def test_words_to_rename_with_name_things():
    examples = [
        Example("m", "f", "def Box.remove_folder(folder, fd, self):", "Delete the lid."),
        Example("m", "g", "def HTTPServer.close(zone):", "Close it."),
    ]
    assert renaming_words(examples) == ("box", "folder", "http", "server", "zone")
