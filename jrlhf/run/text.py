"""Texts as people read them: numbers, durations, and texts of models without control characters."""

import re
import unicodedata

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\x1b[\]PX^_].*?(?:\x1b\\|\x07|$)"  # OSC and other strings: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]",  # the other, short ones
    re.DOTALL,
)


def duration(seconds: float) -> str:
    """Writes seconds as `4.2 s`, `31 s`, `3 min 12 s` or `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def decimals(value: float, form: str = ".3f") -> str:
    """Formats a number with a number of decimals, such as "+.3f"; one near zero with two significant digits instead."""
    sign, digits = form.removesuffix("f").split(".")
    small = digits > "0" and 0 < abs(value) < 10.0 ** (1 - int(digits))
    return format(value + 0.0, f"{sign}#.2g" if small else form)  # -0.0 is 0


def clean(text: str, limit: int | None = None) -> str:
    """Makes a text one line without escapes, control and direction characters.

    Models generate such characters, and a terminal would interpret them. Joiners stay: they are parts of emoji and of
    words in Persian and Indic scripts. limit: maximum number of characters.
    """
    spaced = (" " if c in "\n\r\t\v\f\x85\u2028\u2029" else c for c in _ESCAPES.sub("", text))
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn")
    text = "".join(c for c in spaced if c in "\u200c\u200d" or unicodedata.category(c) not in hidden)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def clean_lines(text: str) -> str:
    """Returns `clean` of each line of a text, whose line ends stay."""
    return "\n".join(map(clean, re.split(r"\r\n|\r|\n", text)))
