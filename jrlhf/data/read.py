"""Reads datasets from files and from the hub, and converts rows of the usual shapes to examples."""

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from jrlhf.config.places import expanded
from jrlhf.config.schema import ColumnsConfig
from jrlhf.data.hub import hub_reason
from jrlhf.data.memory import given_rows
from jrlhf.data.row_keys import EXTRA_INFO, MESSAGES, OF_SHAPES, ROWS, refuse_keys
from jrlhf.data.types import Example, Message, Text
from jrlhf.errors import UserError, alike, beside, one_line
from jrlhf.models.hf.files import check_file, parse_json
from jrlhf.run.devices import host_memory
from jrlhf.storage.outward import hub_requests

Shape = Literal["preference", "prompt-completion", "verl", "prompt-only", "messages", "text"]
Numbered = tuple[str, Any]  # (position of a row, for messages; the row)

SPLIT = "train"  # the default split
_SPLITS = (SPLIT, "test", "validation", "valid", "val", "dev", "eval")
_ABOUT = ("dataset_info.json", "dataset_infos.json")  # files beside the data in old downloads from the hub
_ROLES = ("system", "developer", "user", "assistant", "tool")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
USUAL = ColumnsConfig()
_BOM = b"\xef\xbb\xbf"
_WRITTEN_OUT = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:.*\}\s*\]\s*", re.DOTALL)  # in a cell of CSV

_USUAL = {field.name: field.name for field in fields(ColumnsConfig)} | {"source": "data_source"}
# The fields that each shape needs, the most specific shape first.
_NEEDS: dict[Shape, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "prompt-completion": ("prompt", "completion"),
    "prompt-only": ("prompt",),
    "messages": ("messages",),
    "text": ("text",),
}


@dataclass(frozen=True)
class Dataset:
    """A dataset, read and checked.

    shape: how the rows were read. "preference": a prompt and two answers, the prompt possibly implicit in what the two
        have in common: it is found here in messages, and by `Encoding.with_prompts` in texts. "prompt-completion";
        "prompt-only"; "verl": prompts with `data_source` and `reward_model`.
        "messages": each example's prompt is the whole conversation, whose assistant turns are learned. "text": the
        prompt is empty and the completion is the text.
    """

    source: str  # the file, directory or hub name
    shape: Shape
    examples: tuple[Example, ...]
    columns: tuple[str, ...]  # all columns, in their order
    fingerprint: str  # a hash of examples and shape, which does not depend on the file format
    names: Mapping[str, str]  # field of the examples -> the column that it was read from
    places: tuple[str, ...]  # position of each example, for messages

    def take(self, rows: Sequence[int]) -> "Dataset":
        """Returns the dataset with only these examples, in this order. The fingerprint stays that of the whole."""
        examples, places = (tuple(column[row] for row in rows) for column in (self.examples, self.places))
        return replace(self, examples=examples, places=places)

    def named(self, source: str) -> "Dataset":
        """Returns the dataset with a source for the rows that have none."""
        examples = tuple(row if row.source else replace(row, source=source) for row in self.examples)
        fingerprint = _fingerprint(self.shape, examples, self.places)
        return replace(self, examples=examples, fingerprint=fingerprint)

    def describe(self) -> str:
        """Returns one line for the log: number of rows, shape, and the column of each field."""
        chats = sum(not isinstance(example.prompt, str) for example in self.examples)
        kind = {0: "plain text", len(self.examples): "conversations"}.get(chats, f"{chats} conversations")
        used = ", ".join(name if name == column else f"{column} as {name}" for name, column in self.names.items())
        others = [column for column in self.columns if column not in self.names.values()]
        rest = f"; other columns: {', '.join(others)}" if others else ""
        bare = sum(not example.prompt for example in self.examples) if self.shape == "preference" else 0
        rest += f"; {bare} have no prompt, because their answers begin differently" if bare else ""
        return f"{self.source}: {len(self.examples)} {self.shape} rows ({kind}) from {used}{rest}"


def read_dataset(source: Path | str, *, columns: ColumnsConfig = USUAL, split: str = SPLIT) -> Dataset:
    """Reads a dataset and checks every row of it.

    source: a .jsonl, .ndjson, .json, .csv or .parquet file; a directory that `datasets.save_to_disk` wrote or that
        contains such files; a name on the hub, with its configuration after a colon ("openai/gsm8k:main"); or a name
        of rows in memory (`rows_in_memory`).
    columns: names that differ from the usual ones. They determine the shape of the rows: with `prompt="question"` a
        GSM8K row is a prompt, with `completion="answer"` in addition a prompt and its completion.
    split: the split of a directory or of a hub dataset. If there are no splits, as in a file, all rows are read.
    """
    called = "memory" if given_rows(source) is not None else str(source)
    return make_dataset(read_rows(source, split), columns, called)


def read_rows(source: Path | str, split: str = SPLIT) -> Iterator[Numbered]:
    """Returns the unprocessed rows of a dataset, each with its position. source, split: as in `read_dataset`."""
    if (given := given_rows(source)) is not None:
        _check_whole("memory", split)
        return _from_memory(given)
    path = expanded(source)
    if "[" in split and path.exists():
        raise UserError(f"split={split!r} slices, which only datasets on the hub can be: name the split alone")
    if path.is_dir():
        return _from_directory(path, split)
    if path.exists():
        _check_whole(path, split)
        return _from_file(path)
    name, _, configuration = str(source).partition(":")
    library = hub_library(source)

    def load() -> Any:
        with hub_requests():
            return library.load_dataset(name, configuration or None, split=split)

    return _from_arrow(str(source), load, split)


def hub_library(source: Path | str) -> ModuleType:
    """Returns the library that loads a dataset from the hub. Refuses a source that cannot be a name on the hub."""
    given_rows(source)  # has a sentence of its own for a name of rows
    if not is_hub_name(source):
        remedy = beside(source, "name a file, a directory or a dataset on the hub")
        raise UserError(f"{source} does not exist: {remedy}")
    return _datasets(str(source))


def is_hub_name(source: Path | str) -> bool:
    """True if a source can only be a dataset on the hub: it is no file or directory, and no file name."""
    path = expanded(source)
    return bool(_HUB_NAME.fullmatch(str(source))) and path.suffix not in _READERS and not path.exists()


def _check_whole(path: Path | str, split: str) -> None:
    if split != SPLIT:
        raise UserError(f"{path} has no splits and is read whole, not split={split!r}: leave split out, or name a part")


# Rows of files, each with its position.


def _from_file(path: Path) -> Iterator[Numbered]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"{path} is none of {', '.join(_READERS)}: convert it, for example to lines such as "
            '{"prompt": "..."} in a .jsonl file, or rename it to what it is'
        )
    try:
        check_file(path, host_memory())
        yield from reader(path)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _json_lines(path: Path) -> Iterator[Numbered]:
    for number, line in enumerate(path.read_bytes().removeprefix(_BOM).split(b"\n"), start=1):
        place = f"{path} line {number}"
        try:
            if line.strip():
                yield place, parse_json(line)
        except UnicodeDecodeError as error:
            raise UserError(f"{place} is not UTF-8 text ({error.reason}): convert the file") from error
        except ValueError as error:
            raise UserError(f"{place} is not a whole JSON object ({error}): repair it or remove the line") from error


def _json(path: Path) -> Iterator[Numbered]:
    """Yields the rows of an array of objects, or of JSON lines, which many .json files contain."""
    content = path.read_bytes().removeprefix(_BOM)
    if not content.lstrip().startswith(b"["):
        yield from _json_lines(path)
        return
    try:
        rows = parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not a whole JSON array ({error}): repair the file") from error
    yield from _numbered(path, rows)


def _csv(path: Path) -> Iterator[Numbered]:
    longest = csv.field_size_limit(sys.maxsize)  # by default cells are limited to 128 KiB
    lines: list[tuple[int, list[str]]] = [(0, [])]
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines += ((reader.line_num, cells) for cells in reader)
    except csv.Error as error:
        raise UserError(f"{path} is not CSV after line {lines[-1][0]} ({error}): repair it there") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text after line {lines[-1][0]} ({error.reason}): convert it") from error
    finally:
        csv.field_size_limit(longest)
    header = lines[1][1] if len(lines) > 1 else []
    if len(header) == 1 and (mark := re.search(r"[;\t|]", header[0])):
        raise UserError(f"{path} separates its columns by {mark[0]!r}: separate them by commas")
    if padded := [name for name in header if name != name.strip()]:
        raise UserError(f"{path} has blanks around the name {padded[0].strip()!r}: remove blanks beside the commas")
    if len(set(header)) < len(header):
        raise UserError(f"{path} has two columns of one name in its first line ({', '.join(header)}): rename one")
    for line, cells in lines[2:]:
        if len(cells) not in (0, len(header)):
            raise UserError(f"{path} line {line} has {len(cells)} cells for {len(header)} columns: repair or remove it")
        if cells:
            yield f"{path} line {line}", dict(zip(header, cells, strict=True))


def _parquet(path: Path) -> Iterator[Numbered]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs pyarrow to be read: pip install 'jrlhf[hf]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            yield from _numbered(path, (row for batch in file.iter_batches() for row in batch.to_pylist()))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({one_line(error)}): fetch the file again") from error


_READERS: dict[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _numbered(source: Path | str, rows: Iterable[Any]) -> Iterator[Numbered]:
    return ((f"{source} row {number}", row) for number, row in enumerate(rows, start=1))


def _from_directory(path: Path, split: str) -> Iterator[Numbered]:
    several = (path / "dataset_dict.json").exists()
    if several or (path / "state.json").exists():
        if not several:
            _check_whole(path, split)
        return _from_arrow(str(path), partial(_datasets(str(path)).load_from_disk, str(path)), split)
    for folder in (path, path / "data"):
        files = sorted(file for file in folder.glob("*") if file.suffix.lower() in _READERS and file.name not in _ABOUT)
        if files:
            break
    else:
        raise UserError(f"{path} holds no dataset: no {', '.join(_READERS)} file, and not what save_to_disk writes")
    splits = {file: _split_of(file.name) for file in files}
    if any(splits.values()):
        files = [file for file, name in splits.items() if name == split]
        if not files:
            there = sorted({name for name in splits.values() if name})
            raise UserError(f"{path} has no split {split!r}: it has {', '.join(there)}")
    else:
        _check_whole(path, split)
    if len({file.suffix.lower() for file in files}) > 1:
        raise UserError(f"{path} mixes {', '.join(file.name for file in files[:5])}: name one of the files")
    return (row for file in files for row in _from_file(file))


def _split_of(file: str) -> str | None:
    """Returns the split in a file's name: any name in the format of the hub's shards, or one of the usual prefixes."""
    if shard := re.match(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b", file):
        return shard[1]
    return next((name for name in _SPLITS if re.match(rf"{name}(?![a-z])", file)), None)


def _from_arrow(source: str, load: Callable[[], Any], split: str) -> Iterator[Numbered]:
    try:
        dataset = load()
    except Exception as error:  # from the library, the network or the file system
        reason = hub_reason(error, source) or one_line(error)
        raise UserError(f"the dataset {source} (split {split!r}) cannot be loaded: {reason}") from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise UserError(f"{source} has no split {split!r}: it has {', '.join(dataset)}")
        dataset = dataset[split]
    return _numbered(source, _rows_of(dataset))


def _rows_of(dataset: Any) -> Iterator[Any]:
    """Yields the rows of a `datasets.Dataset` as Python values, whatever the format is that its user has set."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield from table.to_pylist()


def _from_memory(rows: Any) -> Iterator[Numbered]:
    """Yields the rows that a Python program has given."""
    for place, row in _numbered("memory", _rows_of(rows) if hasattr(rows, "with_format") else rows):
        if isinstance(row, Mapping) and (other := [name for name in row if not isinstance(name, str)]):
            raise UserError(f"{place} has a column {other[0]!r}, which is no text: rename it")
        yield place, row


def _datasets(source: str) -> ModuleType:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"{source} is no file: to load it from disk or the hub, pip install 'jrlhf[hf]', which brings datasets"
        ) from error
    return datasets


# Rows -> examples.


def make_dataset(numbered: Iterable[Numbered], columns: ColumnsConfig, source: str) -> Dataset:
    """Returns the dataset of rows, each a mapping from a column to its value."""
    rows = list(numbered)
    if not rows:
        raise UserError(f"{source} has no rows: name a dataset that has some")
    for place, row in rows:
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise UserError(f"{place} is of type {kind}, not an object with columns: repair it or remove it")
    there = tuple(dict.fromkeys(str(column) for _, row in rows for column in row))
    shape, names = _detect(columns, there, source)
    examples = []
    for place, row in rows:
        missing = [column for column in names.values() if column not in row]
        if missing:
            raise UserError(f"{place} has no column {missing[0]!r}, only {', '.join(row)}: repair it or remove it")
        try:
            examples.append(_example(shape, names, row, there))
        except ValueError as error:
            raise UserError(f"{place}: {error}: repair it or remove it") from error
    if shape == "prompt-only" and {"data_source", "reward_model"} <= set(there):
        shape = "verl"
    places = tuple(place for place, _ in rows)
    return Dataset(source, shape, tuple(examples), there, _fingerprint(shape, examples, places), names, places)


def _detect(columns: ColumnsConfig, there: Sequence[str], source: str) -> tuple[Shape, dict[str, str]]:
    """Returns the shape, and which column each field of it is read from."""
    given = {name: column for name, column in asdict(columns).items() if column is not None}
    listed = f"the columns of {source} are {', '.join(there)}"
    for name, column in given.items():
        if column not in there:
            remedy = alike(column, there, "name one of these")
            raise UserError(f"{name} is to be read from a column {column!r}, but {listed}: {remedy}")
    names = {name: column for name, column in (_USUAL | given).items() if column in there}
    half = {"chosen", "rejected"} & set(names) if not given else set()
    if len(half) == 1:  # a mistake, not a prompt with an additional column
        (other,) = {"chosen", "rejected"} - half
        raise UserError(f"{listed}: {other} is missing, name its column in the dataset's key columns, or add it")
    for shape, needed in _NEEDS.items():
        shape_fields = {*needed, "source", *(["prompt"] if shape == "preference" else [])}
        if set(needed) <= set(names) and set(given) <= shape_fields:
            return shape, {name: column for name, column in names.items() if name in shape_fields}
    shapes = ", or ".join(" and ".join(needed) for needed in _NEEDS.values())
    raise UserError(
        f"{listed}: in the dataset's key columns, such as data.prompts.columns, name those that are {shapes} "
        "(jrlhf.generate: the prompt's by --column)"
    )


def _example(shape: Shape, names: Mapping[str, str], row: Mapping[str, Any], there: Sequence[str]) -> Example:
    """Returns the example of a row. A ValueError says what is wrong with the row."""
    unread = {key: value for key, value in row.items() if key not in names.values()}
    refuse_keys(unread, {**ROWS, **OF_SHAPES.get(shape, {})}, "the row")
    if isinstance(extra := row.get("extra_info"), Mapping):
        refuse_keys(extra, EXTRA_INFO, "extra_info")
    texts = {name: _text(row[column], column) for name, column in names.items() if name != "source"}
    own = {column for name, column in names.items() if name == column}
    source = row[names["source"]] if "source" in names else None
    example = Example(
        prompt=texts.get("prompt", texts.get("messages", "")),
        completion=texts.get("completion", texts.get("text")),
        chosen=texts.get("chosen"),
        rejected=texts.get("rejected"),
        source="" if source is None else str(source),
        columns={column: row.get(column) for column in there if column not in own},
    )
    if shape == "messages" and isinstance(example.prompt, str):
        raise ValueError(f"{names['messages']} is text, not a list of messages")
    for name, text in texts.items():
        if isinstance(text, str) and _WRITTEN_OUT.fullmatch(text):
            raise ValueError(f"{names[name]} is text that writes out a list of messages (CSV has no lists, jsonl has)")
    if shape == "text" and not isinstance(example.completion, str):
        raise ValueError(f"{names['text']} is a list of messages, not text")
    if shape == "prompt-only" and isinstance(example.prompt, str) and not example.prompt.strip():
        raise ValueError(f"{names['prompt']} is empty")
    if shape == "preference":
        example = _with_prompt(example)
    for name in ("completion", "chosen", "rejected"):
        answer = getattr(example, name)
        if isinstance(answer, tuple) and any(message.get("weight") == 0 for message in answer):
            raise ValueError(f"{name} has a message of weight 0, but all of it is learned: write messages instead")
        if isinstance(answer, tuple) and answer[0]["role"] != "assistant":
            raise ValueError(f"{name} begins with a message of the {answer[0]['role']}, not of the assistant")
    return example


def _with_prompt(example: Example) -> Example:
    """Returns the pair with a prompt. The row's own prompt is kept, except text before answers that are messages.

    Without one, the prompt is the messages with which both answers begin. Two texts stay whole, because only a
    tokenizer can cut them (`Encoding.with_prompts`).
    """
    chosen, rejected = example.chosen, example.rejected
    assert chosen is not None and rejected is not None
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("chosen and rejected must be both text or both lists of messages")
    if isinstance(example.prompt, tuple) or isinstance(chosen, str) or isinstance(rejected, str):
        return example
    if chosen[-1]["role"] == "user":
        raise ValueError("chosen ends with a message of the user, not with an answer of the assistant")
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)  # each keeps at least one message
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)) - 1)
    if not common:
        raise ValueError("chosen and rejected have no message in common, and there is no prompt of their kind")
    return replace(example, prompt=chosen[:common], chosen=chosen[common:], rejected=rejected[common:])


def _text(value: Any, column: str) -> Text:
    """Returns plain text, or the messages of a conversation."""
    if isinstance(value, str):
        return _well_formed(value, column)
    if value is None:
        raise ValueError(f"{column} is null")
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{column} is of type {type(value).__name__}, neither text nor a list of messages")
    if not value:
        raise ValueError(f"{column} has no messages")
    return tuple(_message(message, f"message {n} of {column}") for n, message in enumerate(value, start=1))


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is of type {type(message).__name__}, not an object with role and content")
    message = {key: value for key, value in message.items() if value is not None}  # tables fill missing keys with nulls
    if message.get("role") not in _ROLES:
        raise ValueError(f"{place} has the role {message.get('role')!r}, which is none of {', '.join(_ROLES)}")
    refuse_keys(message, MESSAGES, place)
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"{place} has the weight {message['weight']!r}, which is neither 0 (not learned) nor 1")
    if "content" not in message:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return message
        raise ValueError(f"{place} has no content")
    return message | {"content": _content(message["content"], place)}


def _content(content: Any, place: str) -> str | list[dict[str, str]]:
    """Returns a message's text, or its parts if there are several, which each template joins in its own way."""
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"{place} has a part of type {kind!r}, and only text can be read")
        texts = [_well_formed(part["text"], place) for part in content]
        return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
    if not isinstance(content, str):
        raise ValueError(f"the content of {place} is of type {type(content).__name__}, not text")
    return _well_formed(content, place)


def _well_formed(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} holds half of a surrogate pair, which is no character") from error
    return text


def _fingerprint(shape: Shape, examples: Iterable[Example], places: Iterable[str]) -> str:
    digest = hashlib.sha256(shape.encode())
    for example, place in zip(examples, places, strict=True):
        try:
            digest.update(b"\0" + json.dumps(vars(example), sort_keys=True, default=_plain).encode())
        except (TypeError, ValueError, RecursionError) as error:  # of rows in memory: keys of mixed types, or a circle
            raise UserError(f"{place} has values that JSON cannot hold ({error}): take them out of the row") from error
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Converts other values for JSON, never to an address, so that equal rows have equal fingerprints everywhere."""
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, (Decimal, timedelta)):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    convert = next((method for name in ("tolist", "isoformat") if (method := getattr(value, name, None))), None)
    return convert() if callable(convert) else type(value).__name__
