"""The exceptions for users, and how a command reports them."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher, get_close_matches
from itertools import islice, takewhile
from pathlib import Path

DONE, FAILED, BAD_INPUT, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130  # 75: requeue; 130: the convention of shells
LONGEST = 1500  # maximum characters of a sentence, which may quote input of any length


class Sentence(Exception):
    """An exception whose text says it all: a notebook shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        return [f"{type(self).__name__}: {self}"]


class UserError(Sentence):
    """Bad input, in one sentence: what is wrong, its value, the remedy. The program prints it and exits with 2.

    The text has one line and no control characters. The middle of long words and of a long text is left out.
    """

    def __str__(self) -> str:
        words = (word if len(word) < 300 else f"{word[:150]}...{word[-100:]}" for word in super().__str__().split())
        text = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(words))
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 500]} ... {text[-400:]}"


class RewardFailure(UserError):
    """A reward function failed on a sample, and no setting says which score such samples get.

    identity: `Facts.identity` of the function that failed.
    """

    def __init__(self, message: str, identity: Mapping[str, str] | None = None):
        super().__init__(message)
        self.identity = dict(identity or {})


class RunFailure(Sentence):
    """The run cannot go on although its input is good, for example with a full disk: one sentence, exit code 1."""


class Preempted(Sentence):
    """The run was asked to stop and has saved its state. by_hand: by Ctrl-C, in this process."""

    by_hand = False


@contextmanager
def user_errors(of: str = "") -> Iterator[None]:
    """Turns a ValueError or OSError of the block into a UserError. of: the setting at fault, with its value."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(f"{of}: {error}" if of else str(error)) from error


def report(error: BaseException) -> int | None:
    """Prints in a sentence why a command ended; returns its exit code, or None for an error that needs a traceback."""
    if isinstance(error, UserError):
        sentence, code = f"error: {error}", BAD_INPUT
    elif isinstance(error, RunFailure):
        sentence, code = f"error: {error}", FAILED
        # Threads that still write fail for the same reason, and each would print a traceback.
        logging.disable()
        threading.excepthook = sys.unraisablehook = lambda *_: None
    elif isinstance(error, Preempted):
        sentence, code = f"{error}; go on with --resume", PREEMPTED
    elif isinstance(error, KeyboardInterrupt):
        sentence, code = "interrupted", INTERRUPTED
    else:
        return None
    print(printable(sentence), file=sys.stderr)
    return code


def one_line(error: BaseException, *, kind: bool = False) -> str:
    """Returns an error's message, all its lines in one, or its class if it has none. kind: begins with the class.

    The first line alone is often a heading, and the reason follows. The middle of a very long message is left out.
    """
    text, name = " ".join(str(error).split()), type(error).__name__
    text = text if len(text) <= 600 else f"{text[:400]} ... {text[-150:]}"
    return f"{name}: {text}" if kind and text else text or name


def path_error(path: str | os.PathLike[str]) -> str | None:
    """Returns why a path cannot be looked up; None if it can, also if nothing is there.

    For example: a name is too long, links form a loop, a folder may not be read, or the text holds a null byte.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def alike(word: str, names: Iterable[str], otherwise: str) -> str:
    """Returns the remedy for a name that does not exist: the most similar of `names`, or else `otherwise`.

    The first of equally similar names.
    """
    ratio, best = max(
        ((SequenceMatcher(None, name, word).ratio(), name) for name in names), key=lambda pair: pair[0], default=(0, "")
    )
    return f"did you mean {best}?" if ratio >= 0.6 else otherwise  # the bound of `get_close_matches`


def beside(path: Path | str, otherwise: str) -> str:
    """Returns the remedy for a path that does not exist: a similar one, or else `otherwise`."""
    path = Path(os.path.expanduser(path))
    gone = next((part for part in reversed((path, *path.parents)) if not os.path.lexists(part)), None)
    if gone is None:
        return otherwise
    with suppress(OSError):
        for name in get_close_matches(gone.name, [entry.name for entry in islice(gone.parent.iterdir(), 10_000)]):
            meant = gone.with_name(name) / path.relative_to(gone)
            # Equal suffixes alone make no names alike.
            if meant.exists() and get_close_matches(gone.stem, [Path(name).stem], cutoff=0.7):
                return f"did you mean {meant}?"
    return otherwise


def expanded(text: Path | str, key: str = "") -> Path:
    """Returns a path with the home directory in place of `~`; with an unknown user it stays unchanged.

    All paths from outside come through here: what the system cannot look up is refused with its reason. key: the
    setting or argument, for the message.
    """
    path = Path(os.path.expanduser(text))
    if (reason := path_error(path)) is not None:
        what = f"{key}={text}" if key else text
        raise UserError(f"{what} cannot be looked up on this machine ({reason}): correct the path")
    return path


def printable(text: str) -> str:
    """Returns the text with control and direction characters escaped, which terminals interpret; not line ends."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line without settings."""
    refuse_unknown_options(parser, sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args(arguments)


def refuse_unknown_options(
    parser: argparse.ArgumentParser, words: Iterable[str], note: Callable[[str], str] = lambda word: ""
) -> None:
    """Names a mistyped option, where argparse would miss a required one first. note: (option) -> the sentence's end."""
    options = list(parser._option_string_actions)
    for word in takewhile(lambda word: word != "--", words):
        name = word.partition("=")[0]
        is_option = name[:1] == "-" and (name[1:2] == "-" or name[1:2].isalpha()) and " " not in word
        if is_option and name[:2] not in options and not any(option.startswith(name) for option in options):
            meant = get_close_matches(name, options, 1, 0.8)
            parser.error(f"{word} is no option{f', did you mean {meant[0]}?' if meant else ''}{note(word)}")


def exit_code(run: Callable[[], object]) -> int:
    """Runs a command and returns its exit code. Raises unexpected errors, which have no sentence."""
    try:
        run()
    except BaseException as error:
        code = report(error)
        if code is None:
            raise
        return code
    return DONE


def exit_code_of_printing(run: Callable[[], object]) -> int:
    """`exit_code` of a command that only prints; a closed pipe also ends it normally."""
    try:
        return exit_code(run)
    except BrokenPipeError:
        return DONE
