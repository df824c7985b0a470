import numpy as np

from jrlhf.tasks.docstrings.corpus import DocumentedFunction
from jrlhf.tasks.docstrings.renaming import rename, renaming_words


def renamed(signature: str, summary: str, words: tuple[str, ...] = ("zebra",)) -> tuple[str, str]:
    example = DocumentedFunction("m", "Box.f", signature, summary)
    changed = rename(example, words, np.random.default_rng(0))
    assert (example.summary, changed.module, changed.name) == (summary, "m", "Box.f")
    return changed.signature, changed.summary


def test_words_that_both_parts_share_are_replaced_in_both():
    for before, after in [
        (
            ("def Mailbox.remove_folder(folder):", "Remove the folder."),
            ("def Mailbox.remove_zebra(zebra):", "Remove the zebra."),
        ),
        (
            ("def Folder.getFolders(FOLDER):", "Return Folders of a folder."),
            ("def Zebra.getZebras(ZEBRA):", "Return Zebras of a zebra."),
        ),
        (("def f(self_none, remove):", "Remove it, none of self."), None),  # helper words and verbs stay
        (("def f(folder):", "Remove the folders."), ("def f(zebra):", "Remove the zebras.")),
        (("def f(folder):", "Remove it."), None),
        (("def f(fd):", "Close the fd."), None),  # too short a word to be told from an accident
    ]:
        assert renamed(*before) == (after or before)
    words = tuple(f"new{i}" for i in range(999))
    signature, summary = renamed("def copy(source, target):", "Copy source to target.", words)
    one, two = signature.removeprefix("def copy(").removesuffix("):").split(", ")
    assert summary == f"Copy {one} to {two}." and one != two


def test_the_same_generator_gives_the_same_words():
    example = DocumentedFunction("m", "f", "def f(folder, name):", "Give the folder a name.")
    words = tuple(f"w{chr(97 + i)}" for i in range(26))
    drawn = [[rename(example, words, rng).summary for _ in range(20)] for rng in map(np.random.default_rng, (1, 1, 2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 10


def test_words_to_rename_with_name_things():
    signatures = ("def Box.remove_folder(folder, fd, self):", "def HTTPServer.close(zone):")
    examples = [DocumentedFunction("m", "f", signature, "Delete the lid.") for signature in signatures]
    assert renaming_words(examples) == ("box", "folder", "http", "server", "zone")
