"""A task made of datasets: what each stage learns from, and what is kept apart to measure."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from jrlhf.config.schema import Config, DatasetConfig, DatasetsData
from jrlhf.config.stages import ALGORITHMS
from jrlhf.data.encode import PreferencePairs, Prompts, Sequences, encode_preferences, encode_prompts, encode_sft
from jrlhf.data.read import Columns, Dataset, read_dataset
from jrlhf.data.task import Pairs, SFTData, Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example
from jrlhf.errors import UserError

Encoded = TypeVar("Encoded", Prompts, Sequences, PreferencePairs)

# Which stages learn from which data.
STAGES = {"sft": ("sft",), "preferences": ("reward_model", "dpo"), "prompts": ALGORITHMS}


def load_task(config: Config, tokenizer: Tokenizer) -> Task:
    """Reads and encodes what the config's stages need.

    Raises:
        UserError: a dataset that is not there, cannot be read, or does not fit.
    """
    data = config.data
    assert isinstance(data, DatasetsData)
    used = [key for key, stages in STAGES.items() if set(stages) & set(config.stages)]
    if config.algorithm is not None and config.rl.algorithm.ptx_coef > 0:
        used = list(dict.fromkeys(["sft", *used]))
    used += ["heldout"] if data.heldout is not None and config.algorithm is not None else []
    datasets = {key: _read(key, getattr(data, key)) for key in used}
    lines = [f"data.{key}: {dataset.describe()}" for key, dataset in datasets.items()]
    splits, met = keep_apart(datasets, data.heldout_rows), list[Example]()

    def encoded(key: str, part: str, dataset: Dataset, encode: Callable[..., Encoded], **limits: int) -> Encoded | None:
        if not dataset.examples:
            return None
        found = encode(dataset, tokenizer, overlong=data.overlong, chat=data.chat, system=data.system, **limits)
        met.extend(found.examples)
        lines.append(f"data.{key}, {part}: {found.describe()}")
        return found

    def parts(key: str, encode: Callable[..., Encoded], **limits: int) -> tuple[Encoded | None, Encoded | None]:
        first = encoded(key, "to learn from", splits[key].learnt, encode, **limits)
        return first, encoded(key, "held out", splits[key].measured, encode, **limits)

    length = data.max_prompt + data.max_response
    sft = pairs = prompts = heldout = None
    if "sft" in datasets:
        texts, measured = parts("sft", encode_sft, max_length=length)
        assert texts is not None
        sft = SFTData(len(texts.ids), lambda rows, step: _rows(texts, rows), measured or _rows(texts, ()))
    if "preferences" in datasets:
        compared, measured = parts("preferences", encode_preferences, max_length=length)
        assert compared is not None
        both = _pairs(compared), Pairs((), (), ()) if measured is None else _pairs(measured)
        pairs = lambda sampler: both  # noqa: E731
    if "prompts" in datasets:
        prompts, heldout = parts("prompts", encode_prompts, max_prompt=data.max_prompt)
    if "heldout" in datasets:
        _, heldout = parts("heldout", encode_prompts, max_prompt=data.max_prompt)
    return Task(
        tokenizer=tokenizer,
        fingerprint=_fingerprint(tokenizer, datasets),
        description="\n".join(lines),
        sft=sft,
        pairs=pairs,
        prompts=prompts,
        heldout=heldout,
        chat=any(isinstance(example.prompt, tuple) for example in met),
    )


@dataclass(frozen=True)
class Split:
    """Rows to learn from, and rows to measure with."""

    learnt: Dataset
    measured: Dataset


def keep_apart(datasets: Mapping[str, Dataset], count: int) -> dict[str, Split]:
    """Each dataset in two: no row to learn from, in any of them, has a prompt that is held out in one of them.

    Prompts are held out in an order that is a hash of their text, so in the same one whatever a run's seed and dataset,
    until they are `count` rows of the dataset. Of a dataset "heldout" all rows are held out, and its place is taken
    from "prompts".

    Raises:
        UserError: nothing would be left to learn from.
    """
    prompts = {key: [prompt_text(example) for example in dataset.examples] for key, dataset in datasets.items()}
    chosen: dict[str, list[int]] = {}
    for key, texts in prompts.items():
        wanted = len(texts) if key == "heldout" else 0 if key == "prompts" and "heldout" in prompts else count
        chosen[key] = sorted(range(len(texts)), key=lambda row, texts=texts: (_hash(texts[row]), row))[:wanted]
    held = {prompts[key][row] for key, rows in chosen.items() for row in rows}
    splits = {}
    for key, dataset in datasets.items():
        learnt = [row for row, text in enumerate(prompts[key]) if text not in held]
        if not learnt and key != "heldout":
            raise UserError(
                f"data.heldout_rows={count} leaves nothing of {dataset.source} to learn from: it has "
                f"{len(dataset.examples)} rows and {len(set(prompts[key]))} prompts, lower it"
            )
        splits[key] = Split(dataset.take(learnt), dataset.take(chosen[key]))
    return splits


def prompt_text(example: Example) -> str:
    """What was asked: a plain prompt, or what the user said in a conversation."""
    if isinstance(example.prompt, str):
        return example.prompt or str(example.completion)
    return "\n".join(str(message.get("content")) for message in example.prompt if message.get("role") == "user")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read(key: str, wanted: DatasetConfig | None) -> Dataset:
    if wanted is None or wanted.path is None:
        stage = " or ".join(STAGES[key]) if key == "preferences" else STAGES[key][0]
        raise UserError(f"stage {stage} learns from data.{key}.path, which is not given: name a file or a dataset")
    return read_dataset(wanted.path, columns=Columns(**vars(wanted.columns)), split=wanted.split)


def _pairs(encoded: PreferencePairs) -> Pairs:
    return Pairs(encoded.chosen, encoded.rejected, encoded.prompt_lengths)


def _rows(texts: Sequences, rows: Iterable[int]) -> Sequences:
    chosen = list(rows)

    def pick(column):
        return tuple(column[row] for row in chosen)

    return Sequences(pick(texts.ids), pick(texts.learn), pick(texts.prompt_lengths), ())


def _fingerprint(tokenizer: Tokenizer, datasets: Mapping[str, Dataset]) -> str:
    words = [
        tokenizer.to_json(),
        str(tokenizer.chat_template),
        *(f"{key} {dataset.fingerprint}" for key, dataset in datasets.items()),
    ]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
