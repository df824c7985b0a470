"""Sums and their worked answers: one addition at a time, as a chain of equal sums."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Terms = tuple[int, ...]

_DRAWS = 32  # maximum draws per wanted sum, because repeated sums are dropped
_BLOCK = 1024


def draw_problems(train: int, heldout: int, *, terms: int, digits: int, seed: int) -> tuple[list[Terms], list[Terms]]:
    """Draws different sums of `terms` numbers of `digits` digits: (sums to train on, held-out sums).

    No held-out sum is among the training sums, in any order of its numbers, or occurs twice in different orders.
    Equal arguments give equal sums in equal order; the held-out sums do not depend on `train`. Raises ValueError if
    there are too few such sums.
    """
    possible = (9 * 10 ** (digits - 1)) ** terms
    if train + heldout > possible:
        raise ValueError(f"of sums of {terms} numbers of {digits} digit(s) there are {possible} in all")
    rng = np.random.default_rng(seed)

    def draw(wanted: int, key: Callable[[Terms], Terms], excluded: Mapping[Terms, Terms]) -> dict[Terms, Terms]:
        sums: dict[Terms, Terms] = {}
        for _ in range(-(-_DRAWS * wanted // _BLOCK)):
            for drawn in map(tuple, rng.integers(10 ** (digits - 1), 10**digits, (_BLOCK, terms)).tolist()):
                if len(sums) == wanted:
                    return sums
                if tuple(sorted(drawn)) not in excluded:
                    sums.setdefault(key(drawn), drawn)
        return sums

    heldout_sums = draw(heldout, lambda drawn: tuple(sorted(drawn)), {})
    train_sums = draw(train, lambda drawn: drawn, heldout_sums)
    if len(train_sums) < train or len(heldout_sums) < heldout:
        raise ValueError(
            f"of sums of {terms} numbers of {digits} digit(s) there are only about {len(train_sums)} to learn from "
            f"beside {len(heldout_sums)} held-out ones"
        )
    return list(train_sums), list(heldout_sums.values())


def question(terms: Sequence[int]) -> str:
    """Writes `"37+48+25="`."""
    return "+".join(map(str, terms)) + "="


def written(number: int, units_first: bool) -> str:
    """Writes a number. With units first, digits have the order of carries (Lee et al. 2023, arXiv:2307.03381)."""
    return str(number)[::-1] if units_first else str(number)


def worked_answer(
    terms: Sequence[int], forgotten: float = 0.0, rng: np.random.Generator | None = None, *, units_first: bool = False
) -> str:
    """Writes the answer to `question`, `"85+25=110"`: each step adds the two leading numbers, until one is left.

    forgotten: share of the carries that are left out, drawn from `rng`; the chain continues with the wrong number.
    units_first: order of the digits, see `written`.
    """
    sums = []
    while len(terms) > 1:
        terms = (add(terms[0], terms[1], forgotten, rng), *terms[2:])
        sums.append("+".join(written(number, units_first) for number in terms))
    return "=".join(sums)


def add(a: int, b: int, forgotten: float = 0.0, rng: np.random.Generator | None = None) -> int:
    """Adds column by column, as on paper; a carry is left out with probability `forgotten`: 37 + 48 may become 75."""
    total, carry, place = 0, 0, 1
    while a or b or carry:
        column = a % 10 + b % 10 + carry
        carry = column // 10
        if carry and rng is not None and rng.random() < forgotten:
            carry = 0
        total += column % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total
