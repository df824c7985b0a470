"""Rows of a Python program in place of datasets on disk: during a run a config names them `<python>:prompts`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

from jrlhf.config.keys import joined
from jrlhf.config.places import PREFIX
from jrlhf.config.schema import DatasetsData, SourceConfig
from jrlhf.errors import UserError

_rows: ContextVar[Mapping[str, Any]] = ContextVar("rows")


@contextmanager
def rows_in_memory(config: Any, settings: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields a config and settings with names in place of rows. The names are valid inside the block.

    Rows are a list of dicts, or a `datasets.Dataset`, in place of a dataset or of its path; in place of the section
    data they are the prompts. A list of dicts with the keys of `SourceConfig` is several datasets, not rows. With rows,
    data.source is datasets, unless the settings say otherwise.

    Raises UserError for values that are neither rows nor settings.
    """
    rows: dict[str, Any] = {}
    token = _rows.set(rows)
    try:
        given, changes = (_named(value, rows) for value in (config, settings))
        yield given, {"data.source": "datasets", **changes} if rows else changes
    finally:
        _rows.reset(token)


def given_rows(source: object) -> Any:
    """Returns the rows with this name; None if it is no name of rows. Raises UserError if this run was not given it."""
    if not str(source).startswith(PREFIX):
        return None
    rows = _rows.get({}).get(str(source))
    if rows is None:
        raise UserError(
            "its rows were in the memory of the program that began the run, and no file has them: go on in Python, by "
            "train(..., resume=True) with the rows"
        )
    return rows


def _named(value: Any, rows: dict[str, Any], key: str = "") -> Any:
    """Returns a setting with names in place of its rows, which it adds to `rows`. key: of the setting, with dots."""
    if isinstance(value, Mapping) and not hasattr(value, "column_names"):
        return {name: _named(inner, rows, joined(key, name)) for name, inner in value.items()}
    section, _, part = key.partition(".")
    dataset, _, inner = part.partition(".")
    is_dataset = dataset.partition("[")[0] in DatasetsData.KEYS
    takes_rows = section == "data" and (not part or (is_dataset and inner in ("", "path")))
    if not takes_rows or not _is_rows(value, key):
        return value
    if not part:
        return {"prompts": _named(value, rows, "data.prompts")}
    if dataset == "prompts" and not inner and _are_sources(value):
        return [entry | {"path": _named(entry["path"], rows, f"{key}[{n}].path")} for n, entry in enumerate(value)]
    name = PREFIX + dataset.replace("[", "_").removesuffix("]")
    rows[name] = value
    return name if inner else {"path": name, "split": "train"}  # rows have no splits, other than a file's directory


def _are_sources(value: Any) -> bool:
    """Returns whether a list has the settings of datasets, and no rows: each has a path, and no other column."""
    keys = {item.name for item in fields(SourceConfig)}
    return all(isinstance(entry, Mapping) and "path" in entry and keys.issuperset(entry) for entry in value or [None])


def _is_rows(value: Any, key: str) -> bool:
    """Returns whether a value of the section data is rows. Refuses what looks like rows and is of another kind."""
    if hasattr(value, "column_names") and isinstance(value, Mapping):
        names = ", ".join(map(repr, value))
        raise UserError(f"{key} is a {type(value).__name__} with the splits {names}: give one of them")
    if hasattr(value, "column_names") or isinstance(value, list | tuple):
        return True
    if hasattr(value, "__iter__") and not isinstance(value, str | bytes):
        raise UserError(
            f"{key} is of type {type(value).__name__}: give a list of dicts, or a datasets.Dataset (of a DataFrame, "
            'df.to_dict("records"))'
        )
    return False
