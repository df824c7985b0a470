"""Numbers in answers: random spellings of known numbers, and expressions that are no number."""

import random
import time
from fractions import Fraction

import pytest

from jrlhf.rewards.numbers import read_number

SEPARATORS = "", ",", "{,}", "\\,", " ", "\\ ", "\N{THIN SPACE}"
UNITS = "", "\\%", "%", " apples", "\\text{ cm}", "\\text{ cm}^2", " dollars per day", "/hour", "^\\circ", " km/h", "."
EXPRESSIONS = (  # N is a number: a reader that takes a number out of one of these is half right
    r"N^{10} N^2 2^{N} N\pi \pi{}N Nx N+1 1+N Nx+1 x+N x=N -x-N N! |N| N:1 1:N Ni Ne f(N) x_{N} Ny^2 [N,1] (N,1) (1,N) "
    r"\{1,N\} \sqrt{N} N\sqrt{2} N\times3 3\cdot{}N \frac{N}{x} \frac{x}{N} \log_{N}{3} N\frac{1}{2}\pi \pm{}N "
    r"\infty{}N N\cup\{1\} N\text{~or~}1 N\text{~million}"
).split()


def grouped(rng: random.Random, whole: int) -> str:
    """Writes an integer with one of the marks between groups of three digits."""
    return f"{whole:,}".replace(",", rng.choice(SEPARATORS))


def spelled(rng: random.Random) -> tuple[str, Fraction]:
    """Returns a number's text in LaTeX, and its value."""
    whole, part, below = (rng.randrange(most) for most in (rng.choice([10, 1000, 10**7]), 999, 98))
    above, below, sign = part % (below + 2), below + 2, rng.choice(["", "", "-", "\N{MINUS SIGN}", "+"])
    number, factor = Fraction(whole), Fraction(-1 if sign in ("-", "\N{MINUS SIGN}") else 1)
    power = rng.randrange(-9, 9)
    ratio = f"\\{rng.choice(['', 'd', 't'])}frac{{{above}}}{{{below}}}"
    digit, other = rng.randrange(10), rng.randrange(1, 10)
    ten = rng.choice([f"\\times 10^{{{power}}}", f" \\cdot 10^{{{power}}}", f"e{power}", f" x 10^{power}"])
    forms = [
        (grouped(rng, whole), number),
        (f"{grouped(rng, whole)}.{part:03}", number + Fraction(part, 1000)),
        (f".{part:03}", Fraction(part, 1000)),
        (f"{whole}/{below}", number / below),
        (ratio, Fraction(above, below)),
        (f"\\frac{digit}{other}", Fraction(digit, other)),
        (f"\\frac{{{digit}}}{other}", Fraction(digit, other)),
        (f"{digit}.{part:03}{ten}", (digit + Fraction(part, 1000)) * Fraction(10) ** power),
        (f"10^{{{power}}}", Fraction(10) ** power),
    ]
    if above:
        forms += [(f"{whole}{ratio}", number + Fraction(above, below))]
        forms += [(f"{whole} {above}/{below}", number + Fraction(above, below))]
    text, value = rng.choice(forms)
    return rng.choice(["", "", "\\$"]) + sign + text, factor * value


def test_every_spelling_of_a_number_has_its_value():
    rng = random.Random(0)
    for _ in range(600):
        text, value = spelled(rng)
        unit = rng.choice(UNITS)
        assert read_number(f"2 so \\boxed{{{text}{unit}}} 3", "auto") == value, text + unit
        assert read_number(f"2 so #### {text}{unit}\n3", "auto") == value, text + unit
        assert read_number(f"The answer is {text}, as 1 + 1 shows.", "auto") == value, text
        assert read_number(f"{text}", "last") == value, text


def test_what_is_no_number_is_never_half_right():
    rng = random.Random(1)
    for expression in EXPRESSIONS:
        numbers = [spelled(rng)[0].lstrip("\\$+-\N{MINUS SIGN}") for _ in range(20)]
        for number in ("7", "12", "1.5", *(number for number in numbers if not number.startswith("10^"))):
            text = expression.replace("N", number)
            assert read_number(f"\\boxed{{{text}}}", "auto") is None, text
            assert read_number(f"#### {text}", "auto") is None, text


def test_parts_of_expressions_in_a_text_are_no_answers():
    parts = {"5-3": None, "5 - 3": None, "1,50": None, "3:2": None, "2020-05-06": None, "5/3x": None, "1/2/3": None}
    answers = {"10-4=6": 6, "$5/hour": 5, "5 / day": 5, "is -5": -5, "(5)": 5, "x = 1,500": 1500}
    for text, value in {**parts, **answers}.items():
        assert read_number(text, "auto") == read_number(f"So {text}.", "last") == value, text


def test_long_answers_take_no_long_time():
    for end in (
        "!",
        " min" * 3000 + "!",
        " 1" * 3000,
        "." * 3000 + "!",
        "\\text{" * 1000,
        " 1 000" * 1000,
        "9" * 3000,
        "<a" * 3000,
    ):
        for text in (f"\\boxed{{5{end}}}", f"#### 5{end}", f"so 5{end}"):
            start = time.perf_counter()
            read_number(text, "auto")
            assert time.perf_counter() - start < 1, text[:40]


@pytest.mark.full
def test_values_are_those_of_math_verify():
    """Where both read a number: of spellings that math-verify reads too, mixed numbers and e-notation left out."""
    parse = pytest.importorskip("math_verify", reason="pip install 'jrlhf[math]'").parse
    rng, equal = random.Random(2), 0
    for _ in range(400):
        text, value = spelled(rng)
        theirs = parse(f"$\\boxed{{{text}}}$")
        if theirs and getattr(theirs[0], "is_Rational", False):
            ours = read_number(f"\\boxed{{{text}}}", "auto")
            assert ours == value
            equal += ours is not None and Fraction(int(theirs[0].p), int(theirs[0].q)) == ours
    assert equal > 200
