"""The keys of rows and messages that TRL, verl and OpenAI's fine-tuning define, and that jrlhf does not apply.

docs/data-and-rewards.md lists all keys: those that are applied, those without an effect, and these.
"""

import reprlib
from collections.abc import Mapping, Sized
from typing import Any

_MEDIA = "only text can be read: remove the column if the text is enough"

# Key -> the remedy in the sentence that refuses it. An empty value (null, false, 0, "", [], {}) is accepted.
ROWS: Mapping[str, str] = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    "functions": "describe the functions in tools",
    "agent_name": "a response is one turn, without tools that run: take such rows out, or remove the column",
}
# What trainers read in rows of one shape; in others these columns are for reward functions.
_IDS = {"input_ids": "the text is encoded again: remove the column"}
OF_SHAPES: Mapping[str, Mapping[str, str]] = {
    "text": _IDS,
    "messages": _IDS,
    "prompt-completion": _IDS
    | {"label": "a bad answer is not imitated: keep the rows with label true, or remove the column"},
    "preference": {"margin": "the losses have no margin: remove the column"},
}
EXTRA_INFO: Mapping[str, str] = {  # verl's column
    "need_tools_kwargs": "a response is one turn, in which no tool runs: take such rows out",
    "interaction_kwargs": "a response is one turn, without a partner: take such rows out",
}
MESSAGES: Mapping[str, str] = {
    "refusal": "write it as the content",
    "audio": _MEDIA,
    "function_call": "write it in tool_calls",
}


def refuse_keys(values: Mapping[str, Any], refused: Mapping[str, str], place: str) -> None:
    """Raises a ValueError for a key that is refused, and whose value has an effect. place: what has the keys."""
    for key in refused:
        if _has_effect(key, value := values.get(key)):
            raise ValueError(f"{place} has {key} {reprlib.repr(value)}, which is not supported: {refused[key]}")


def _has_effect(key: str, value: Any) -> bool:
    if key == "label":  # of KTO: whether the completion is a good answer
        return value is False
    if value is None or isinstance(value, int | float):
        return bool(value)
    empty = isinstance(value, Sized) and not len(value)
    return not empty and not (isinstance(value, str) and value == "single_turn_agent")  # verl's `agent_name`
