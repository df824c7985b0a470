r"""`read_number`: the exact number in an answer, or None where the answer gives no single number.

The grammar of a number: a sign; digits, in groups of three or not (1,000, 1 000, 1\,000); decimals; a power of ten
(1.5e3, 1.5\times 10^{3}, 10^{-3}); a fraction (1/2, \frac{1}{2}, \frac12) or a mixed number (1\frac{1}{2}, 1 1/2).
Marks of currency and percent are dropped. An expression such as 2^{10}, 5\pi or (1,2) is none.
"""

import re
from decimal import Decimal
from fractions import Fraction

from jrlhf.errors import UserError

EXTRACTS = ("auto", "boxed", "hash", "last")
LONGEST = 400  # limit of a number's characters and of its exponent: exact arithmetic with larger ones takes too long

_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|(?<![0-9]\ )[0-9]{1,3}(?:\ [0-9]{3})+)(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_EXPONENT = r"10\s*\^\s*(?:[-+]?[0-9]+|\{\s*[-+]?[0-9]+\s*\})"
_NUMBER = rf"""(?P<sign>(?<![\w)}}\]])[-+])?(?:
    (?:(?P<whole>[0-9]+)\ +(?!0))?(?P<above>{_UNSIGNED})\ ?/\ ?(?P<below>{_UNSIGNED})
    |(?P<ten>{_EXPONENT})
    |(?P<digits>{_UNSIGNED})(?P<power>[eE][-+]?[0-9]+|\ ?(?:\\times|\\cdot|[×·x*])\ ?{_EXPONENT})?)"""
_FREE = re.compile(_NUMBER, re.VERBOSE)

_WORDS = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for \text{...} with words alone
# Words behind a number that change it.
_SCALES = r"(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial|pi)(?:s|th|ths)?\b"
_OTHERS = r"(?:and|or|to|not|plus|minus|times|over|mod|half|halves|thirds?|quarters?|sin|cos|tan|log)\b"
_SHORT = r"(?:k?m/[hs]|[cmk]m|[mk]g|ml|ft|in|mi|hrs?|min|sec|lbs?|oz|mph)(?![A-Za-z])"  # units that may follow at once
_LONG = rf"(?!{_SCALES}|{_OTHERS})[A-Za-z][A-Za-z'’-]{{2,}}+"
_UNIT = rf"""(?:\ ?(?:%|°|\^\ ?\{{?\\circ\}}?)|\ ?/?\ ?(?:{_WORDS}|{_SHORT})|(?:\ |\ ?/\ ?){_LONG})
    (?:\^[23]|\^\{{[23]\}}|[²³])?,?"""
_EXACT = re.compile(rf"(?:{_WORDS}|\ )*+{_NUMBER}(?:{_UNIT})*+\ ?", re.VERBOSE | re.IGNORECASE)

# What makes a number in a text a part of an expression.
_BEFORE = re.compile(
    r"(?:[\w.^_{\\√±]|\\pm\ ?|[\w)}\]]\ ?[+*/×·÷]\ ?|[\w)}\]]-|[0-9],|[\w)}\]]\ -\ |[0-9]:)\Z", re.VERBOSE
)
_AFTER = re.compile(
    rf"""[)}}\]]*\ ?\^|[_{{(][\w{{(]|[.:][0-9]|,\ ?[-+]?[.0-9]|\ ?-\ ?[0-9]|[^\W\d_](?![^\W\d_])|\ ?{_SCALES}
    |\ ?[+×·÷]\ ?[\w(\\]|\ ?/\ ?(?!{_LONG})[\w(\\]|\ ?\*\ ?[0-9(\\]|\ ?\\(?!end|right|Right|implies)[A-Za-z]""",
    re.VERBOSE | re.IGNORECASE,
)


def check_extract(extract: str) -> None:
    if extract not in EXTRACTS:
        raise UserError(f"options.extract={extract!r}: it must be auto, boxed, hash or last")


def read_number(text: str, extract: str) -> Fraction | None:
    """Returns the number in an answer; `extract` as in `numeric_answer`.

    In a box and behind #### there must be one number, maybe with a unit, and nothing else. In other text it is the last
    number that is no part of an expression.
    """
    boxed, hashed = _boxed(text), text.rpartition("####")
    if extract == "boxed" or (extract == "auto" and boxed is not None):
        return None if boxed is None else _exact(boxed)
    if extract == "hash" or (extract == "auto" and hashed[1]):
        return _exact(hashed[2].strip().partition("\n")[0]) if hashed[1] else None
    plain = _plain(text.replace("\\boxed{", " "))
    return next((_value(match) for match in reversed([*_FREE.finditer(plain)]) if _stands_alone(plain, match)), None)


def _exact(text: str) -> Fraction | None:
    match = _EXACT.fullmatch(" ".join(_plain(text).split()).lstrip(" *_`").rstrip(" *_`."))
    return None if match is None else _value(match)


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    before, after = text[max(match.start() - 8, 0) : match.start()], text[match.end() : match.end() + 16]
    in_tuple = re.search(r", ?\Z", before) and re.match(r" ?\\?[)}\]]", after)
    return not (_BEFORE.search(before) or _AFTER.match(after) or in_tuple)


_MARKS = re.compile(r"\\?[$€£¥]|</?[A-Za-z_]+>|\\!")
_BLANKS = re.compile(r"\\[,;:\ ()\[\]]|\\q?quad\b|[~\t\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}]|\ +")
_TEXTS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\ ?\{((?:[^{}]|\{[^{}]*\})*)\}")
_CHANGING = re.compile(rf"[0-9]|\b(?:{_SCALES}|{_OTHERS})", re.IGNORECASE)
_PART = rf"(?:\{{\ ?([-+]?{_UNSIGNED})\ ?\}}|\ ?([0-9]))"
_FRACTION = re.compile(rf"([0-9]\ ?)?\\[dt]?frac{_PART}{_PART}(?![0-9])")


def _plain(text: str) -> str:
    """Returns the text with one spelling of each sign, mark, blank and fraction."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\%", "%")
    text = _BLANKS.sub(" ", _MARKS.sub("", text))
    text = _TEXTS.sub(lambda match: f" {match[1]} " if _CHANGING.search(match[1]) else f" {_WORDS}", text)
    text = _FRACTION.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2] or m[3]}/{m[4] or m[5]}", text)
    return re.sub(" +", " ", text)


def _value(match: re.Match[str]) -> Fraction | None:
    whole, above, below, ten, digits, power = match.group("whole", "above", "below", "ten", "digits", "power")
    if len(match[0]) > LONGEST:
        return None
    exponent = int(re.findall(r"[-+]?[0-9]+", ten or power)[-1]) if ten or power else 0
    if abs(exponent) > LONGEST:
        return None
    value = _decimal(above or digits or "1") * Fraction(10) ** exponent
    if below is not None:
        if not (divisor := _decimal(below)) or (whole and value >= divisor):
            return None
        value = int(whole or 0) + value / divisor
    return -value if match["sign"] == "-" else value


def _decimal(digits: str) -> Fraction:
    return Fraction(Decimal(digits.replace(",", "").replace(" ", "")))


def _boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...}, whose braces may be nested; None if it is missing or not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None
