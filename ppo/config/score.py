"""The settings of how scores are shaped."""

from dataclasses import dataclass
from typing import Literal

from jrlhf.ppo.fields import Section, checked, non_negative, only_if, positive


def _is_buffer(value: float) -> bool:
    return not isinstance(value, bool) and (0 < value < 1 or (value >= 1 and value % 1 == 0))


@dataclass(frozen=True)
class ScoreConfig(Section):
    """Changes to a response's score before the algorithm gets it. The default changes nothing."""

    # How the scores of several rewards become one: by a weighted sum; or each is normalised over the responses to a
    # prompt first, so that none outweighs the others by its scale (GDPO, arXiv:2601.05242, section 3).
    combine: Literal["sum", "normalise_then_sum"] = "sum"
    normalise: bool = False  # (score - running mean) / running standard deviation
    # Clip scores, normalised or not, to [-clip, clip]; null: no clipping.
    clip: float | None = positive(None, "positive and finite, or null to switch it off")
    missing_eos_penalty: float = non_negative(0.0)  # subtracted if the length limit cut the response off
    length_penalty: float = non_negative(0.0)  # subtracted for each response token
    # Number of tokens before the length limit, or their share of it (0 < x < 1), in which a penalty grows from 0 to
    # overlong_penalty; null: no such penalty.
    overlong_buffer: float | None = checked(
        None, _is_buffer, "a positive number of tokens, a share of the length limit in (0, 1), or null to switch it off"
    )
    overlong_penalty: float = non_negative(  # the penalty at the limit
        1.0, **only_if(lambda section: section.overlong_buffer is not None, "{path}.overlong_buffer=null")
    )

    def overlong_tokens(self, max_response: int) -> int | None:
        """overlong_buffer in tokens, of a limit of `max_response`: a share is rounded, to at least one token."""
        buffer = self.overlong_buffer
        if buffer is None:
            return None
        return int(buffer) if buffer >= 1 else max(1, round(buffer * max_response))
