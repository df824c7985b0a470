"""Metrics of the responses to the prompts of each source."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from jrlhf.data.types import Example


def by_source(
    names: Sequence[str],
    examples: Sequence[Example],
    scores: Float[np.ndarray, "B"] | None,
    parts: Mapping[str, Float[np.ndarray, "B"]],
    lengths: Int[np.ndarray, "B"],
) -> dict[str, float]:
    """Returns metrics `source/NAME/...` of a batch's rows, for each source that has some.

    They are its share of the rows, and means of the scores, of each reward and of the response lengths; as in the
    metrics of all rows, scores that are not finite and rows that a reward does not judge count in no mean.
    """
    metrics, owners = dict[str, float](), np.array([example.source for example in examples])
    figures = {} if scores is None else {"score/mean": scores}
    figures |= {f"rewards/{reward}/mean": values for reward, values in parts.items()}
    for name in names:
        own, head = owners == name, f"source/{name or 'unnamed'}"
        if own.any():
            finite = {key: values[own & np.isfinite(values)] for key, values in figures.items()}
            metrics |= {f"{head}/{key}": float(values.mean()) for key, values in finite.items() if len(values)}
            metrics |= {f"{head}/response_length/mean": float(lengths[own].mean()), f"{head}/share": float(own.mean())}
    return metrics
