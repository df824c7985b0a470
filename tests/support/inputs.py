"""Malformed inputs, drawn from a seed: a config with overrides and the files that it names.

Each kind starts from an input that runs and changes it in a few places: numbers at the ends of their ranges, values of
other types, shapes, encodings, keys and bytes that do not belong there. What is drawn may also be right.
"""

import copy
import csv
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jrlhf.config.keys import classes_of, kinds_of
from jrlhf.config.schema import Config

KINDS = ("config", "dataset", "tokenizer", "model", "plan", "adapter")
_SHARES = (40, 20, 16, 12, 7, 5)
DEEP = 100_000  # levels


class Raw(str):
    """Text that stands in a file as it is."""


def _nested(levels: int) -> Raw:
    return Raw("[" * levels + "]" * levels)


NUMBERS = [0, -1, 1, 2, 3, 7, 8, 16, 1000, 4097, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 10**9, 10**12, 10**400]
NUMBERS += [48, 64, 256, 2**12, 2**16, 2**20, 2**24, 2**30]
NUMBERS += [0.5, -0.0, 1e-30, 5e-324, 1e30, 1e38, 1e308, -1e30]
NUMBERS += list(map(Raw, ("1e3", "0x10", "1_000", "010", "1e999", ".nan", "-.inf", "NaN", "Infinity", "1" * 5000)))
TEXTS = ["", " ", "a", "null", "~", "true", "10", "a b", "a\nb", "é😀", "\x1b[31m", "\0", "\ud800", "x" * 5000]
TEXTS += ["/", "..", "/dev/null", "/dev/zero", "ftp://host/x", "hf://a/b", "a/b", "a//b", "nobody/nothing", "C:\\x"]
TEXTS += ["{{ x }}", "%s", "@file", "<eos>", "<|im_end|>", "0-7", "auto", "x" * 200 + "/" + "y" * 300]
SHAPES: list[Any] = [None, True, False, [], {}, [[]], [None], [1, -5], ["a", 1], {"a": 1}, {"": None}, [{"a": []}]]
SHAPES += [{"name": "x"}, {"path": 1}, {str(n): n for n in range(200)}, list(range(300))]
RAW = ["*a", "&a 1", "!!python/object/apply:os.getcwd []", "!foo 1", "!!str 1", "! 1", "{", "[", "'", "]", "%", "`"]
RAW += ["\t", "{a: 1, a: 2}", "{[1]: 2}", "? x", "2026-01-01", "|", ">", "-"]


def wild(draw: random.Random) -> Any:
    """Returns a value of any type."""
    values = draw.choices((NUMBERS, TEXTS, SHAPES, [_nested(90), _nested(150), _nested(3000)]), (8, 6, 6, 1))[0]
    return copy.deepcopy(draw.choice(values))


def written(value: Any) -> str:
    """Returns JSON, in which raw texts stand as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Returns bytes with a part lost, doubled, changed or in another encoding."""
    place = draw.randrange(len(content) + 1)
    junk = draw.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"\t", b"}", b'"', b"\\", b"\xef\xbb\xbf", b"\r", b"\x1b[2J"])
    match draw.randrange(8):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + junk + content[place:]
        case 2:
            return content[:place] + bytes(draw.randrange(256) for _ in range(8)) + content[place + 8 :]
        case 3:
            return draw.choice([b"", b"\n", b" ", b"\0" * 100, b"null", b"[]", b"{}", b"3", b'"a"', b"---\n---\n"])
        case 4:
            return content.decode("utf-8", "replace").encode(draw.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case 5:
            return content + content
        case 6:
            return draw.choice([b"[", b'{"a":']) * DEEP
        case _:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(200)))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of every value in a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


def changed(draw: random.Random, tree: Any, value: Callable[[random.Random], Any] = wild) -> Any:
    """Changes a tree of JSON in one to three places; returns it."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return value(draw)
        holder, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(["x", "", "name", f"{key}s", str(key)[:-1]])] = value(draw)
            case 2 if isinstance(holder, list):
                holder.insert(key, value(draw))
            case _:
                holder[key] = value(draw)
    return tree


# ---- configs


def keys(cls: Any = Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the type of every setting, those of sections included."""
    for name, kind in kinds_of(cls).items():
        yield f"{path}{name}", kind
        for section in classes_of(kind):
            yield from keys(section, f"{path}{name}.")


KEYS = list(keys())


def fitting(draw: random.Random, kind: Any) -> Any:
    """Returns a value of a type, often at an end of its range."""
    options = [option for option in (kind, *get_args(kind)) if option is not type(None)]
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        return draw.choice(choices)
    if bool in options:
        return draw.random() < 0.5
    if int in options or float in options:
        return draw.choice(NUMBERS)
    return draw.choice(TEXTS) if str in options else wild(draw)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        inner = tree.get(section)
        tree[section] = inner if isinstance(inner, dict) else {}
        tree = tree[section]
    tree[name] = value


@dataclass
class Case:
    """A drawn input in a directory of its own."""

    seed: int
    kind: str
    place: Path
    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    content: bytes | None = None  # of the config's file, where it is not the config as it is

    @property
    def arguments(self) -> list[str]:
        """The arguments of a command that runs in the directory."""
        return ["--config", "config.yaml", *self.overrides]

    def write(self) -> None:
        text = written(self.config).encode("utf-8", "surrogatepass")
        (self.place / "config.yaml").write_bytes(text if self.content is None else self.content)


def _config(draw: random.Random, case: Case) -> None:
    near = [key for key in KEYS if key[0].partition(".")[0] in case.config]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key, kind = draw.choice(near if draw.random() < 0.7 else KEYS)
        value = fitting(draw, kind) if draw.random() < 0.7 else wild(draw)
        match draw.randrange(10):
            case 0:
                key += draw.choice(["x", ".y", "", " ", "_"])
            case 1:
                key = draw.choice([key.replace(".", "", 1), key.rpartition(".")[2], "x." + key])
            case 2:
                value = Raw(draw.choice(RAW))
            case 3:
                case.config = changed(draw, case.config)
                continue
        if draw.random() < 0.3 and isinstance(value, str | int | float):
            text = str(value) if draw.random() < 0.8 else draw.choice(RAW)
            case.overrides.append(draw.choice(["", "", "", "--"]) + f"{key}={text}")
        elif isinstance(case.config, dict):
            put(case.config, key, value)
    if draw.random() < 0.1:
        stages = ["sft", "reward_model", "dpo", "ppo", "grpo", "remax", "safe_rlhf", "x"]
        put(case.config, "stages", [draw.choice(stages) for _ in range(draw.randrange(4))])
    if draw.random() < 0.1:
        case.content = damaged(draw, written(case.config).encode("utf-8", "surrogatepass"))


# ---- files


def _dataset(draw: random.Random, case: Case, user: Path) -> None:
    rows: Any = [json.loads(line) for line in (user / "qa.jsonl").read_text().splitlines()[:12]]
    columns = draw.choice([{"prompt": "question", "completion": "answer"}, {}])
    shape = draw.randrange(4)
    if shape == 0:
        turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
        rows, columns = [{"messages": [dict(turn) for turn in turns], "tools": None} for _ in range(4)], {}
    elif shape == 1:
        rows, columns = [{"text": row["question"]} for row in rows], {}
    if draw.random() < 0.9:
        rows = changed(draw, rows)
    ending = draw.choice([".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".ndjson", ".txt", ""])
    path = case.place / f"rows{ending}"
    if ending == ".csv":
        _write_csv(path, rows)
    elif ending == ".parquet":
        _write_parquet(path, rows)
    else:
        text = written(rows) if ending == ".json" or not isinstance(rows, list) else "\n".join(map(written, rows))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.3:
        path.write_bytes(damaged(draw, path.read_bytes()))
    match draw.randrange(40):
        case 0:
            path.unlink()
            path.mkdir()
        case 1:
            path.unlink()
            os.mkfifo(path)
        case 2:
            path.unlink()
            path.symlink_to(path)
        case 3:
            os.truncate(path, 2**42)  # holes, which take no space
        case 4:
            path.chmod(0)
        case 5:
            columns = changed(draw, dict(columns) or {"prompt": "question"})
    case.config["data"]["sft"] = {"path": path.name, "columns": columns}
    if draw.random() < 0.3:
        put(case.config, "data.overlong", draw.choice(["filter", "truncate_left"]))
    if draw.random() < 0.3:
        put(case.config, "data.chat", draw.random() < 0.5)


def _write_csv(path: Path, rows: Any) -> None:
    with open(path, "w", newline="", errors="surrogatepass") as file:
        writer = csv.writer(file)
        table = [row if isinstance(row, dict) else {"": row} for row in (rows if isinstance(rows, list) else [rows])]
        columns = list(dict.fromkeys(column for row in table for column in row))
        writer.writerow(columns)
        writer.writerows([row.get(column, "") for column in columns] for row in table)


def _write_parquet(path: Path, rows: Any) -> None:
    try:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(json.loads(written(rows)))
        parquet.write_table(table, path)
    except Exception:  # a table cannot hold these rows, or the package is not installed
        path.write_bytes(b"PAR1" + written(rows).encode("utf-8", "surrogatepass") + b"PAR1")


TEMPLATES = [
    "{{ '\\ud800' }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ 'x'.ljust(10 ** 11) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ range(99999) | list * 9999 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception() }}",
    "{{ raise_exception(3) }}",
    "{{ strftime_now('%' * 99) }}",
    "{{ strftime_now(3) }}",
    "{{ messages[9].content }}",
    "{{ none.x.y }}",
    "{{ 1 / 0 }}",
    "{% include 'x' %}",
    "{% generation %}",
    "{% if %}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ '\\0' }}{{ '\x1b[2J' }}{{ messages[0].content }}",
    "",
    " ",
    "{# #}",
]
_SLOW = range(1, 13)  # templates that end by a limit of time or memory


TOKENS = [{"500": "<tool>"}, {"500": {"content": "<tool>"}}, {"-1": {"content": "a"}}, {"x": {}}]


def _value_of_a_tokenizer(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(TOKENS)) if draw.random() < 0.3 else wild(draw)


def _tokenizer(draw: random.Random, case: Case, user: Path) -> None:
    directory = _links(case, user / "actor")
    name = draw.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "tokenizer_config.json"] + _OTHERS)
    path = directory / name
    content = path.read_text() if path.exists() else '{"eos_token": "<|im_end|>"}'
    path.unlink(missing_ok=True)
    if name == "chat_template.jinja" or draw.random() < 0.2:
        index = draw.randrange(len(TEMPLATES))
        if index in _SLOW and draw.random() < 0.8:  # each takes seconds
            index = 0
        (directory / "chat_template.jinja").write_text(TEMPLATES[index], errors="surrogatepass")
        if name != "chat_template.jinja":
            path.write_text(content)
        return
    if draw.random() < 0.25:
        path.write_bytes(damaged(draw, content.encode()))
        return
    tree = json.loads(content)
    special = {
        "tokenizer_config.json": ("added_tokens_decoder", "chat_template", "eos_token", "pad_token", "bos_token"),
        "generation_config.json": ("eos_token_id",),
        "config.json": ("eos_token_id", "text_config"),
    }
    if name in special and draw.random() < 0.6:
        tree[draw.choice(special[name])] = _value_of_a_tokenizer(draw)
    else:
        tree = changed(draw, tree, _value_of_a_tokenizer)
    path.write_bytes(written(tree).encode("utf-8", "surrogatepass"))
    if draw.random() < 0.02:
        path.unlink()
        os.mkfifo(path)


_OTHERS = ["special_tokens_map.json", "generation_config.json", "config.json", "chat_template.jinja"]
_OTHERS += ["chat_template.json"]


def _links(case: Case, source: Path, name: str = "model", key: str = "model.path") -> Path:
    """Makes a directory of links to the files of another one, and sets it in the config."""
    directory = case.place / name
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    put(case.config, key, name)
    return directory


def _model(draw: random.Random, case: Case, user: Path) -> None:
    directory = _links(case, user / "actor")
    _spoil(draw, directory, draw.choice(["config.json"] * 4 + ["generation_config.json", "model.safetensors"]))


def _adapter(draw: random.Random, case: Case, user: Path) -> None:
    directory = _links(case, user / "adapter", "adapter", "lora.path")
    _spoil(draw, directory, draw.choice(["adapter_config.json"] * 3 + ["adapter_model.safetensors"]))


def _spoil(draw: random.Random, directory: Path, name: str) -> None:
    """Changes a file of JSON, or the header or bytes of a file of tensors; or removes it."""
    path = directory / name
    content = path.read_bytes()
    path.unlink()
    if name.endswith(".safetensors") and draw.random() < 0.7:
        length = int.from_bytes(content[:8], "little")
        header = written(changed(draw, json.loads(content[8 : 8 + length]))).encode("utf-8", "surrogatepass")
        size = draw.choice([len(header)] * 5 + [0, 2**63, 2**64 - 1, length])
        content = size.to_bytes(8, "little") + header + content[8 + length :]
    elif name.endswith(".json") and draw.random() < 0.8:
        content = written(changed(draw, json.loads(content))).encode("utf-8", "surrogatepass")
    else:
        content = damaged(draw, content)
    if draw.random() < 0.95:
        path.write_bytes(content)
    elif draw.random() < 0.5:
        os.mkfifo(path)


def _plan(draw: random.Random, case: Case) -> None:
    sizes = {"layout": "train", "fsdp": "4", "tensor": "2"}
    calls: dict[str, Any] = {name: {"devices": "0-7", **sizes} for name in ("actor.update", "critic.update")}
    calls |= {name: {"devices": "0-7", **sizes, "layout": "score"} for name in _INFERRED}
    calls["actor.generate"] = {"devices": "0-7", **sizes, "layout": "generate"}
    tree = changed(draw, {"name": "mine", "calls": calls})
    content = written(tree).encode("utf-8", "surrogatepass")
    (case.place / "plan.yaml").write_bytes(damaged(draw, content) if draw.random() < 0.2 else content)
    if draw.random() < 0.1:
        (case.place / "plan.yaml").write_text(draw.choice(RAW))
    case.config["plan"] = "plan.yaml"


_INFERRED = ("actor.logprobs", "reference.logprobs", "critic.values")


def case_of(seed: int, place: Path, user: Path, bases: dict[str, Callable[[], dict[str, Any]]]) -> Case:
    """Draws an input and writes it into the empty directory `place`.

    user: the directory of the fixture, with an `adapter` in addition. bases: configs that run, by name: "sft", "ppo"
    and "arithmetic".
    """
    draw = random.Random(f"input {seed}")
    kind = draw.choices(KINDS, _SHARES)[0]
    base = {"plan": "ppo", "config": draw.choice(["sft", "ppo", "arithmetic", "arithmetic"])}.get(kind, "sft")
    case = Case(seed, kind, place, bases[base]())
    if kind in ("config", "plan"):
        {"config": _config, "plan": _plan}[kind](draw, case)
    else:
        {"dataset": _dataset, "tokenizer": _tokenizer, "model": _model, "adapter": _adapter}[kind](draw, case, user)
    case.write()
    return case


def listing(place: Path) -> list[tuple[str, int, int]]:
    """Returns the names, kinds and times of all that is below a directory."""
    entries = [place, *sorted(place.rglob("*"))]
    return [(str(entry), entry.lstat().st_mode, entry.lstat().st_mtime_ns) for entry in entries]


def leaves() -> set[str]:
    """Returns the names of all settings and sections."""
    return {name for key, _ in KEYS for name in key.split(".")}
