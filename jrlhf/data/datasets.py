"""Makes a `Task` from datasets: the data of each stage, and held-out rows."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from jrlhf.config.schema import Config, DatasetConfig, DatasetsData
from jrlhf.config.stages import ALGORITHMS
from jrlhf.data.encode import Encoding, Pairs, Prompts, Sequences
from jrlhf.data.read import Dataset, fingerprint, read_dataset
from jrlhf.data.task import SFTData, Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example
from jrlhf.errors import UserError
from jrlhf.run.files import sha256

Encoded = TypeVar("Encoded", Prompts, Sequences, Pairs)
# Data -> the stages that learn from it.
STAGES = {"sft": ("sft",), "preferences": ("reward_model", "dpo"), "prompts": ALGORITHMS}


def load_task(config: Config, tokenizer: Tokenizer) -> Task:
    """Reads and encodes the datasets that the config's stages need."""
    data = config.data
    assert isinstance(data, DatasetsData)
    used = [key for key, stages in STAGES.items() if set(stages) & set(config.stages)]
    if config.algorithm is not None and config.rl.algorithm.ptx_coef > 0:
        used = list(dict.fromkeys(["sft", *used]))
    used += ["heldout"] if data.heldout is not None and config.algorithm is not None else []
    datasets = {key: _read(key, getattr(data, key)) for key in used}
    lines = [f"data.{key}: {dataset.describe()}" for key, dataset in datasets.items()]
    splits, examples = keep_apart(datasets, data.heldout_rows), list[Example]()
    for key, (learned, measured) in splits.items():
        if key != "heldout" and (lost := len(datasets[key].examples) - len(learned.examples) - len(measured.examples)):
            lines.append(f"data.{key}: {lost} more rows left out, whose prompts are held out")
    encoding = Encoding(tokenizer, data.overlong, data.chat, data.system)

    def parts(key: str, encode: Callable[..., Encoded], limit: int) -> list[Encoded | None]:
        encoded: list[Encoded | None] = [None, None]
        for index, part in enumerate(("to learn from", "held out")):
            if splits[key][index].examples:
                encoded[index] = rows = encode(splits[key][index], limit)
                examples.extend(rows.examples)
                lines.append(f"data.{key}, {part}: {rows.describe()}")
        return encoded

    length = data.max_prompt + data.max_response
    sft = pairs = prompts = heldout = None
    if "sft" in datasets:
        texts, measured = parts("sft", encoding.sequences, length)
        assert texts is not None
        sft = SFTData(len(texts.ids), lambda rows, step: _rows(texts, rows), measured or _rows(texts, ()))
    if "preferences" in datasets:
        trained, measured = parts("preferences", encoding.pairs, length)
        assert trained is not None
        both = trained, measured or Pairs((), (), ())
        pairs = lambda sampler: both  # noqa: E731
    if "prompts" in datasets:
        prompts, heldout = parts("prompts", encoding.prompts, data.max_prompt)
        wanted = config.rl.rollout_batch // config.samples
        if prompts is not None and (count := len(prompts.examples)) < wanted:
            lines.append(
                f"data.prompts: {config.algorithm}.rollout_batch={config.rl.rollout_batch} takes {wanted} prompts an "
                f"iteration and there are {count}, so prompts repeat within an iteration"
            )
    if "heldout" in datasets:
        _, heldout = parts("heldout", encoding.prompts, data.max_prompt)
    words = [f"{key} {dataset.fingerprint}" for key, dataset in datasets.items()]
    if any(not row.prompt and row.chosen for dataset in datasets.values() for row in dataset.examples):
        words.append("pairs without a prompt are held out one by one")  # older versions held them out together
    return Task(
        tokenizer=tokenizer,
        fingerprint=fingerprint([tokenizer.to_json(), str(tokenizer.chat_template), *words]),
        description="\n".join(lines),
        sft=sft,
        pairs=pairs,
        prompts=prompts,
        heldout=heldout,
        chat=any(isinstance(example.prompt, tuple) for example in examples),
        prompt_end=_common_end(examples),
    )


class Split(NamedTuple):
    """Rows for training, and rows for evaluation only."""

    trained: Dataset
    heldout: Dataset


def keep_apart(datasets: Mapping[str, Dataset], count: int) -> dict[str, Split]:
    """Splits each dataset so that no training row in any of them has a prompt that is held out in any of them.

    Prompts are held out in the order of a hash of their text, which does not depend on a run's seed and dataset, until
    they have `count` rows of the dataset. Of a dataset "heldout" all rows are held out, and then none of "prompts".
    """
    prompts = {key: [prompt_text(example) for example in dataset.examples] for key, dataset in datasets.items()}
    chosen: dict[str, list[int]] = {}
    for key, texts in prompts.items():
        wanted = len(texts) if key == "heldout" else 0 if key == "prompts" and "heldout" in prompts else count
        chosen[key] = sorted(range(len(texts)), key=lambda row, texts=texts: (sha256(texts[row]), row))[:wanted]
    heldout = {prompts[key][row] for key, rows in chosen.items() for row in rows}
    splits = {}
    for key, dataset in datasets.items():
        trained = [row for row, text in enumerate(prompts[key]) if text not in heldout]
        if not trained and key != "heldout":
            if {*prompts[key]} <= {*prompts.get("heldout", ())}:
                raise UserError(f"data.heldout has every prompt of {dataset.source}: name other rows to hold out")
            raise UserError(
                f"data.heldout_rows={count} leaves nothing of {dataset.source} to learn from: it has "
                f"{len(dataset.examples)} rows and {len(set(prompts[key]))} prompts, lower it"
            )
        splits[key] = Split(dataset.take(trained), dataset.take(chosen[key]))
    return splits


def prompt_text(example: Example) -> str:
    """Returns the question: a plain prompt, or the user's messages of a conversation; or else the text or answer."""
    if isinstance(example.prompt, str):
        return example.prompt or str(example.completion or example.chosen)
    return "\n".join(str(message.get("content")) for message in example.prompt if message.get("role") == "user")


def _common_end(examples: Iterable[Example]) -> str:
    """Returns the white space with which all prompts end; empty if they end differently, or for conversations."""
    prompts = [example.prompt if isinstance(example.prompt, str) else "" for example in examples]
    ends = {prompt[len(prompt.rstrip()) :] for prompt in prompts}
    return ends.pop() if len(ends) == 1 else ""


def _read(key: str, section: DatasetConfig | None) -> Dataset:
    if section is None or section.path is None:
        stage = " or ".join(STAGES[key]) if key == "preferences" else STAGES[key][0]
        raise UserError(f"stage {stage} learns from data.{key}.path, which is not given: name a file or a dataset")
    try:
        return read_dataset(section.path, columns=section.columns, split=section.split)
    except UserError as error:
        raise UserError(f"data.{key}: {error}") from error


def _rows(texts: Sequences, rows: Iterable[int]) -> Sequences:
    rows, columns = list(rows), (texts.ids, texts.learn, texts.prompt_lengths)
    return Sequences(*(tuple(column[row] for row in rows) for column in columns))  # pyright: ignore
