"""Built-in reward functions: most score an answer as right (1.0, or `right`) or wrong (0.0, or `wrong`).

They are ordinary reward functions with options. `answer` is a column of the dataset (name another one with
`columns: {answer: ...}`; verl rows have `ground_truth`).
"""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

from jrlhf.errors import UserError, alike
from jrlhf.rewards.numbers import check_extract, read_number

NAMES = ("exact_match", "format_regex", "numeric_answer", "math_verify", "word_count")
# Identify the functions in checkpoints, in place of the file's hash, so that a run resumes after edits of this text.
# Give a function another one when it gives any response another score.
IDENTITIES: dict[str, str] = dict.fromkeys(NAMES, "1")


def spec_of(name: str, called: str) -> str:
    """Returns the module and function of a built-in reward. Raises UserError where there is none of the name."""
    if name not in NAMES:
        remedy = alike(name, NAMES, "write others as package.module:function or path/file.py:function")
        raise UserError(f"{called}: {name!r} is none of the built-in rewards ({', '.join(NAMES)}): {remedy}")
    if name == "math_verify" and find_spec("math_verify") is None:
        raise UserError(f"{called}: math_verify needs its extra, pip install 'jrlhf[math]'")
    return f"{__name__}:{name}"


def check_options(name: str, options: Mapping[str, Any], called: str) -> None:
    """Refuses values that options of a built-in reward cannot have. A worker refuses unknown options."""
    hints = get_type_hints(globals()[name])
    expected = {bool: "true or false", float: "a number", str: "text, in quotes"}
    if "answer" in options and "answer" in hints:
        raise UserError(f"{called}: options.answer: each row has an answer of its own, name its column: columns.answer")
    if name == "format_regex" and "pattern" not in options:
        raise UserError(f"{called}: format_regex needs a regular expression: give options.pattern")
    for option, value in options.items():
        kinds = get_args(hints.get(option)) or (hints.get(option),)  # text, or text and null
        given = float if type(value) is int else type(value)
        if kinds[0] in expected and given not in kinds:
            raise UserError(f"{called}: options.{option}={value!r}: it must be {expected[kinds[0]]}")
    try:
        if options.get("pattern") is not None:
            _compiled(options["pattern"])
        check_extract(options.get("extract", "auto"))
    except UserError as error:
        raise UserError(f"{called}: {error}") from error


def exact_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    pattern: str | None = None,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_space: bool = False,
    right: float = 1.0,
    wrong: float = 0.0,
) -> list[float | None]:
    """Compares the response with the answer, after stripping white space and Unicode normalization (NFC).

    answer: the text; or a list of texts, each of which is right. A row without an answer fails ("none").
    pattern: a regular expression. The text of its last match in the response (of its first group, if it has one) is
        compared, instead of all of the response; without a match it is wrong.
    ignore_case, ignore_punctuation: compare without. ignore_space: runs of white space count as one space.
    """
    search = None if pattern is None else _compiled(pattern)

    def normal(text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        if ignore_case:
            text = text.casefold()
        if ignore_punctuation:
            text = "".join(c for c in text if c not in string.punctuation and unicodedata.category(c)[0] != "P")
        return " ".join(text.split()) if ignore_space else text.strip()

    def score(completion: Any, answers: Any) -> float | None:
        if answers is None:
            return None
        text: str | None = _text(completion)
        if search is not None:
            matches = list(search.finditer(text))
            text = matches[-1][1 if search.groups else 0] if matches else None
        accepted = answers if isinstance(answers, (list, tuple)) else [answers]
        return right if text is not None and normal(text) in {normal(str(a)) for a in accepted} else wrong

    return [score(*pair) for pair in zip(completions, answer, strict=True)]


def format_regex(
    completions: Sequence[Any], *, pattern: str, whole: bool = True, right: float = 1.0, wrong: float = 0.0
) -> list[float]:
    """Checks the form of the response: `pattern` must match from beginning to end, or (`whole=False`) somewhere.

    A dot matches line breaks too. A pattern that backtracks without end is stopped by the reward's deadline.
    """
    compiled = _compiled(pattern)
    match = compiled.fullmatch if whole else compiled.search
    return [right if match(_text(completion)) else wrong for completion in completions]


def numeric_answer(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    extract: str = "auto",
    tolerance: float = 1e-6,
    right: float = 1.0,
    wrong: float = 0.0,
) -> list[float | None]:
    """Compares the number in the response with the number in the answer. They may differ by `tolerance` (absolute).

    Marks between digits, of currency and percent are dropped (50% is 50); 1/2 and \\frac{1}{2} are one half, and
    1.5\\times 10^{3} is 1500. `rewards/numbers.py` has the whole grammar of a number.

    answer: a number, or a text from which one is read as from a response (GSM8K's "... #### 42"). A row whose answer
        has no number fails ("none").
    extract: where the response has its number. "boxed": in the last \\boxed{...}. "hash": in the line behind the last
        ####, as in GSM8K. There must be one number, maybe with a unit, and nothing else: 2^{10}, (1,2) and 5\\pi are
        wrong. "last": the last number that is no part of an expression.
        "auto": the first of these that the response has.
    """
    check_extract(extract)

    def score(completion: Any, truth: Any) -> float | None:
        expected = read_number(str(truth), "auto")
        if expected is None:
            return None
        number = read_number(_text(completion), extract)
        return right if number is not None and abs(number - expected) <= tolerance else wrong

    return [score(*pair) for pair in zip(completions, answer, strict=True)]


def math_verify(
    completions: Sequence[Any], answer: Sequence[Any], *, right: float = 1.0, wrong: float = 0.0
) -> list[float | None]:
    """Compares the mathematical expression in the response with the answer's, by the optional package math-verify.

    answer: an expression, in LaTeX or plain; or a text with one between dollars or in \\boxed{...}. A row from whose
        answer nothing can be read fails ("none").
    """
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    def score(completion: Any, truth: Any) -> float | None:
        text = str(truth)
        marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        expected = parse(text if marked else f"${text}$")  # unmarked, only the last number of \{1, 2\} would be read
        if not expected:
            return None
        return right if verify(expected, parse(_text(completion))) else wrong

    return [score(*pair) for pair in zip(completions, answer, strict=True)]


def word_count(completions: Sequence[Any]) -> list[float]:
    """Returns the number of words of the response, for use as a cost or, with a negative weight, as a penalty."""
    return [float(len(_text(completion).split())) for completion in completions]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"options.pattern={pattern!r} is no regular expression ({error}): correct it") from error


def _text(completion: Any) -> str:
    """Returns the text itself, or the contents of the messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion if isinstance(message, Mapping))
