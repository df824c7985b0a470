"""Makes a `Task` from datasets: the data of each stage, and held-out rows."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jrlhf.config.schema import Config, DatasetConfig, DatasetsData, SourceConfig
from jrlhf.data.encode import Encoding
from jrlhf.data.read import Dataset, read_dataset
from jrlhf.data.task import SFTData, Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Pairs, Prompts, Sequences, Source
from jrlhf.errors import UserError
from jrlhf.run.files import digest_of, sha256

KINDS = "sft", "preferences", "prompts"
_LEARN, _HELD = "to learn from", "held out"  # the parts of a split dataset
_Part = tuple[str, str]  # the key of a dataset, and one of these parts


def load_task(config: Config, tokenizer: Tokenizer) -> Task:
    """Reads and encodes the datasets that the config's stages need."""
    data = config.data
    assert isinstance(data, DatasetsData)
    encoding, length = Encoding(tokenizer, data.overlong, data.chat, data.system), data.max_prompt + data.max_response
    datasets = {key: encoding.with_prompts(_read(key, data.datasets.get(key), config)) for key in _used(config, data)}
    splits = keep_apart(datasets, data.heldout_rows)
    prompts = partial(encoding.prompts, max_prompt=data.max_prompt)
    encoders: dict[str, Callable[[Dataset], Any]] = {
        "sft": partial(encoding.sequences, max_length=length),
        "preferences": partial(encoding.pairs, max_length=length),
        "prompts": prompts,
        "heldout": prompts,
    }
    encoded: dict[_Part, Any] = {
        (key, part): encoders[_kind(key)](rows)
        for key, split in splits.items()
        for part, rows in zip((_LEARN, _HELD), split, strict=True)
        if rows.examples
    }
    sft = pairs = None
    if "sft" in datasets:
        texts = encoded["sft", _LEARN]
        heldout_texts = encoded.get(("sft", _HELD), Sequences((), (), ()))
        sft = SFTData(len(texts.ids), lambda rows, step: _rows(texts, rows), heldout_texts)
    if "preferences" in datasets:
        both = encoded["preferences", _LEARN], encoded.get(("preferences", _HELD), Pairs((), (), ()))
        pairs = lambda sampler: both  # noqa: E731
    if isinstance(data.prompts, tuple) and ("prompts[0]", _LEARN) in encoded:
        encoded |= _mixed(encoded, data.prompts)
    words = [f"{key} {dataset.fingerprint}" for key, dataset in datasets.items()]
    examples = [example for rows in encoded.values() for example in rows.examples]
    return Task(
        tokenizer=tokenizer,
        fingerprint=digest_of([tokenizer.to_json(), *tokenizer.templates, *words]),
        description="\n".join(_describe(config, datasets, splits, encoded)),
        sft=sft,
        pairs=pairs,
        prompts=encoded.get(("prompts", _LEARN)),
        heldout=encoded.get(("heldout" if "heldout" in datasets else "prompts", _HELD)),
        chat=any(isinstance(example.prompt, tuple) for example in examples),
        prompt_end=_common_end(examples),
    )


def _kind(key: str) -> str:
    """Returns what a dataset is for: its key, without its number in a list."""
    return key.partition("[")[0]


def _mixed(encoded: Mapping[_Part, Prompts], sources: Sequence[SourceConfig]) -> dict[_Part, Prompts]:
    """Returns the prompts of all sources as those of one dataset: to learn from one source after the other, held out in
    turn, so that the first ones are of every source."""
    keys = [f"prompts[{index}]" for index in range(len(sources))]
    learned, heldout = ([encoded[key, part] for key in keys if (key, part) in encoded] for part in (_LEARN, _HELD))
    shares = tuple(Source(one.called, len(own.ids), one.weight) for one, own in zip(sources, learned, strict=True))
    joined = {("prompts", _LEARN): replace(_joined(learned), sources=shares)}
    return joined | ({("prompts", _HELD): _joined(heldout, in_turn=True)} if heldout else {})


def _joined(parts: Sequence[Prompts], *, in_turn: bool = False) -> Prompts:
    """Returns the prompts of several datasets, one dataset after the other. in_turn: one prompt of each, as long as
    there are others. The parts alone have the numbers of rows that were left out."""
    places = [(place, which) for which, part in enumerate(parts) for place in range(len(part.ids))]
    order = [(parts[which], place) for place, which in (sorted(places) if in_turn else places)]
    ids, texts, examples = (
        tuple(getattr(part, name)[place] for part, place in order) for name in ("ids", "texts", "examples")
    )
    return Prompts(ids, texts, examples=examples)


class DatasetSplit(NamedTuple):
    """Rows for training, and rows for evaluation only."""

    trained: Dataset
    heldout: Dataset


def keep_apart(datasets: Mapping[str, Dataset], count: int) -> dict[str, DatasetSplit]:
    """Splits each dataset so that no training row in any of them has a prompt that is held out in any of them.

    Prompts are held out in the order of a hash of their text, which does not depend on a run's seed and dataset, until
    they have `count` rows of the dataset. Of a dataset "heldout" all rows are held out, and then none of "prompts".
    """
    prompts = {key: [prompt_text(example) for example in dataset.examples] for key, dataset in datasets.items()}
    chosen: dict[str, list[int]] = {}
    for key, texts in prompts.items():
        wanted = len(texts) if key == "heldout" else 0 if _kind(key) == "prompts" and "heldout" in prompts else count
        chosen[key] = sorted(range(len(texts)), key=lambda row, texts=texts: (sha256(texts[row]), row))[:wanted]
    heldout = {prompts[key][row] for key, rows in chosen.items() for row in rows}
    splits = {}
    for key, dataset in datasets.items():
        trained = [row for row, text in enumerate(prompts[key]) if text not in heldout]
        if not trained and key != "heldout":
            if {*prompts[key]} <= {*prompts.get("heldout", ())}:
                raise UserError(f"data.heldout has every prompt of {dataset.source}: name other rows to hold out")
            several = len(set(prompts[key])) > 1
            remedy = "lower it" if several else "set it to 0, name rows of their own in data.heldout, or add prompts"
            raise UserError(
                f"data.heldout_rows={count} leaves nothing of {dataset.source} to learn from: it has "
                f"{len(dataset.examples)} rows and {len(set(prompts[key]))} prompts, {remedy}"
            )
        splits[key] = DatasetSplit(dataset.take(trained), dataset.take(chosen[key]))
    return splits


def prompt_text(example: Example) -> str:
    """Returns what identifies a row's prompt: its text, or all messages before the last answer, with their roles and
    the tools that are offered; of a row without a prompt, its text or answer.

    A lone message of the user is the same prompt as its text.
    """
    if isinstance(example.prompt, str):
        return example.prompt or str(example.completion or example.chosen)
    turns = example.prompt[: -1 if example.prompt[-1]["role"] == "assistant" else None] or example.prompt
    tools, only = example.columns.get("tools"), turns[0].get("content")
    if len(turns) == 1 and turns[0]["role"] == "user" and isinstance(only, str) and not tools:
        return only
    return json.dumps([turns, tools], sort_keys=True, default=str)


def data_of(stage: str) -> str:
    """Returns the key of the data that a stage learns from."""
    return {"sft": "sft", "reward_model": "preferences", "dpo": "preferences"}.get(stage, "prompts")


def _used(config: Config, data: DatasetsData) -> list[str]:
    """Returns the keys of the datasets that the config's stages need."""
    learns = config.algorithm is not None
    imitates = learns and config.rl.algorithm.ptx_coef > 0
    wanted = {*map(data_of, config.stages), *(["sft"] if imitates else [])}
    kinds = [key for key in KINDS if key in wanted]
    listed = [key for key in data.datasets if "[" in key]
    used = [key for kind in kinds for key in (listed if kind == "prompts" and listed else [kind])]
    return [*used, "heldout"] if learns and data.heldout is not None else used


def _describe(
    config: Config, datasets: Mapping[str, Dataset], splits: Mapping[str, DatasetSplit], encoded: Mapping[tuple, Any]
) -> Iterator[str]:
    """Yields lines for the log: the datasets, the rows left out, the encoded rows, and whether prompts repeat."""
    for key, dataset in datasets.items():
        yield f"data.{key}: {dataset.describe()}"
    for key, (learned, measured) in splits.items():
        if key != "heldout" and (lost := len(datasets[key].examples) - len(learned.examples) - len(measured.examples)):
            yield f"data.{key}: {lost} more rows left out, whose prompts are held out"
    for key in datasets:
        for part in (_LEARN, _HELD):
            if (key, part) in encoded:
                yield f"data.{key}, {part}: {encoded[key, part].describe()}"
    if ("prompts", _LEARN) in encoded:
        prompts, wanted = encoded["prompts", _LEARN], config.rl.rollout_batch // config.samples
        count, all_weights = len(prompts.ids), sum(source.weight for source in prompts.sources)
        for source in prompts.sources:
            yield f"data.prompts: {source.name} gives {source.weight / all_weights:.1%} of the prompts"
        if count < wanted:
            yield (
                f"data.prompts: {config.algorithm}.rollout_batch={config.rl.rollout_batch} takes {wanted} prompts "
                f"an iteration and there are {count}, so prompts repeat within an iteration"
            )


def _common_end(examples: Iterable[Example]) -> str:
    """Returns the white space with which all prompts end; empty if they end differently, or for conversations."""
    prompts = [example.prompt if isinstance(example.prompt, str) else "" for example in examples]
    ends = {prompt[len(prompt.rstrip()) :] for prompt in prompts}
    return ends.pop() if len(ends) == 1 else ""


def _read(key: str, section: DatasetConfig | None, config: Config) -> Dataset:
    if section is None or section.path is None:
        stage = next((stage for stage in config.stages if data_of(stage) == key), key)
        raise UserError(f"stage {stage} learns from data.{key}.path, which is not given: name a file or a dataset")
    try:
        dataset = read_dataset(section.path, columns=section.columns, split=section.split)
    except UserError as error:
        raise UserError(f"data.{key}: {error}") from error
    return dataset.named(section.called) if isinstance(section, SourceConfig) else dataset


def _rows(texts: Sequences, rows: Iterable[int]) -> Sequences:
    rows, columns = list(rows), (texts.ids, texts.learn, texts.prompt_lengths)
    return Sequences(*(tuple(column[row] for row in rows) for column in columns))  # pyright: ignore
