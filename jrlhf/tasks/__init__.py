"""Built-in tasks, which use only the interfaces that users have."""

from collections.abc import Iterable

from jrlhf.data.types import Ids, Sequences


def sequences(texts: Iterable[tuple[Ids, Ids]]) -> Sequences:
    """Joins each prompt and its response; only the tokens of the response are learned."""
    rows = list(texts)
    return Sequences(
        ids=tuple(prompt + response for prompt, response in rows),
        learn=tuple((False,) * len(prompt) + (True,) * len(response) for prompt, response in rows),
        prompt_lengths=tuple(len(prompt) for prompt, _ in rows),
    )
