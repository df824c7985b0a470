"""Comparison with results of verl 0.9.1 and TRL 1.16 for the same numbers, gradients included, without either.

`goldens/*.json` hold inputs, results and provenance. `benchmarks.oracle` writes them; it has the functions of ours and
of theirs that are compared, and the same comparison on many random inputs.
"""

import pytest

from benchmarks.oracle.checks import CHECKS, Check
from benchmarks.oracle.goldens import read

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

GOLDENS = {name: (arrays, result) for name, arrays, result in read()}
# Each repeats a function and branches of other checks with other options.
REPEATED = """
verl: gae/1.0-0.95 gae/1.0-1.0 gae/0.99-0.0 whiten/True grpo/pairs grpo/no-std rloo_vectorized/plain tokens/1.0
verl: reinforce_plus_plus/1.0 importance/sequence masks/token masks/all value/None policy/cispo
verl: policy/token-mean policy/seq-mean-token-sum policy/seq-mean-token-mean policy/constant policy/entropy policy/gspo
trl: policy/grpo policy/grpo-kl policy/gspo policy/bnpo policy/dapo policy/cispo policy/dr_grpo grpo-advantages/no-std
trl: rloo-advantages/2 rloo-advantages/4 dpo/sharp dpo/sigmoid
"""
FULL = {
    f"{peer}/{name}"
    for peer, names in (row.split(": ") for row in REPEATED.split("\n")[1:-1])
    for name in names.split()
}


def test_every_check_has_a_golden():
    assert GOLDENS.keys() == {check.name for check in CHECKS} > FULL


@pytest.mark.parametrize(
    "check", [pytest.param(x, marks=pytest.mark.full if x.name in FULL else (), id=x.name) for x in CHECKS]
)
def test_we_agree_with_the_golden(check: Check):
    arrays, result = GOLDENS[check.name]
    check.compare(check.ours(arrays), result)
