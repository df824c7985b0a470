"""Reading compiled programs."""

import re
from collections import Counter

from jax.stages import Compiled

_KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
_OPERATION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = .*?\s({_KINDS})(?:-start)?\(", re.MULTILINE)


def collectives(program: Compiled | str) -> Counter[str]:
    """How many collectives of each kind stand in a compiled program, given as such or as its HLO text.

    An asynchronous pair (`-start`, `-done`) counts once, and so does one in the body of a loop, however often it runs.
    """
    text = program if isinstance(program, str) else program.as_text()
    assert text is not None, "every backend that we know prints its HLO"
    return Counter(_OPERATION.findall(text))
