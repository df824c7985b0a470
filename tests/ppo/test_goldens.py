"""Comparison with results of verl 0.9.1 and TRL 1.16 for the same numbers, gradients included, without either.

`goldens/*.json` hold inputs, results and provenance. `benchmarks.oracle` writes them; it has the functions of ours and
of theirs that are compared, and the same comparison on many random inputs.
"""

import pytest

from benchmarks.oracle.checks import CHECKS, Check
from benchmarks.oracle.goldens import read

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

GOLDENS = {name: (arrays, result) for name, arrays, result in read()}


def test_every_check_has_a_golden():
    assert GOLDENS.keys() == {check.name for check in CHECKS}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_we_agree_with_the_golden(check: Check):
    arrays, result = GOLDENS[check.name]
    check.compare(check.ours(arrays), result)
