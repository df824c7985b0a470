"""`python -m jrlhf.generate --model RUN-or-DIR`: answers to a prompt, to a file of prompts, or a conversation."""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrlhf.config.keys import kinds_of
from jrlhf.config.load import load_config, plain_value
from jrlhf.config.parse import build, convert
from jrlhf.config.peers import SAMPLING
from jrlhf.config.places import expanded, is_address, local
from jrlhf.config.schema import ColumnsConfig, DatasetsData, DeviceConfig, SamplingSection
from jrlhf.data.batches import (
    key_for,
    pad_rows,
    program_width,
    put_rows,
    read_responses,
    row_keys,
    to_response,
    whole_batches,
)
from jrlhf.data.encode import Encoding, answer_gap
from jrlhf.data.read import Dataset, read_dataset
from jrlhf.data.stops import shown, with_stop
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Prompts, Response, without_gap
from jrlhf.errors import UserError, exit_code_of_printing, parse_options, user_errors
from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.mesh import make_mesh
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.config.divisors import divisors, indivisible
from jrlhf.models.generation.continuous import ContinuousBatch, Prompt
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.hf.adapters import load_adapter
from jrlhf.models.hf.config import HFConfig
from jrlhf.models.options import ForwardOptions
from jrlhf.roles.generating import decoder_of, engine_of
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.pretrained import describe, load_weights, locate, own_tokenizer
from jrlhf.run.contents import CONFIG, ENVIRONMENT, read_prompting
from jrlhf.run.devices import select
from jrlhf.run.files import check_writable, write_atomic
from jrlhf.run.text import clean, clean_lines
from jrlhf.storage.models import fetch_run

TOKENS = 256  # default maximum tokens of an answer
STREAMED = 8  # number of tokens of an answer that a conversation shows at a time
_MOST = 2**16  # answers to a prompt
_STOP = "stop", "keep_stop"  # settings of sampling that need a tokenizer


@dataclass(frozen=True)
class Generator:
    """A loaded model that answers prompts."""

    model: Model
    tokenizer: Tokenizer
    mesh: Mesh
    compute: Compute
    sampling: SamplingConfig
    batch: int
    asked: "Asked"
    source: str  # of the sampling settings, for users

    def drawing(self, changes: Mapping[str, Any]) -> "Generator":
        """Returns a generator that draws with these changes of its sampling, or that stops at other texts."""
        source = f"as asked, else {self.source}" if changes.keys() - {"max_new_tokens"} else self.source
        others = {name: value for name, value in changes.items() if name not in _STOP}
        changed = replace(self, sampling=with_sampling(self.sampling, others), source=source)
        return changed.stopping({name: changes[name] for name in _STOP if name in changes})

    def stopping(self, changes: Mapping[str, Any]) -> "Generator":
        """Returns a generator whose answers end at `stop`, a text or several, and keep it if `keep_stop` is true."""
        if not changes:
            return self
        own = self.tokenizer.stop
        stop, keep = changes.get("stop", own.texts if own else ()), changes.get("keep_stop", own.keep if own else False)
        texts = [stop] if isinstance(stop, str) else stop
        if keep and not texts:
            raise UserError("keep_stop leaves stop in the answer, and there is none: give it, or leave keep_stop out")
        with user_errors():
            section = build(SamplingSection, plain_value({"stop": texts, "keep_stop": keep}))
        tokenizer = with_stop(self.tokenizer, section.stop, keep=section.keep_stop)
        sampling = replace(self.sampling, stops=tokenizer.stop and tokenizer.stop.table)
        return replace(self, tokenizer=tokenizer, sampling=sampling)

    @property
    def drawn(self) -> str:
        """How answers are drawn, for users."""
        own = self.sampling
        values = {"temperature": f"{own.temperature:g}", "top_k": own.top_k, "top_p": own.top_p, "min_p": own.min_p}
        values |= {"stop": self.tokenizer.stop and list(self.tokenizer.stop.texts)}
        words = ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
        return f"in up to {own.max_new_tokens} tokens, at {words} ({self.source})"

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a prompt."""
        return self.model.config.max_positions - self.sampling.max_new_tokens

    @property
    def place(self) -> tuple[Architecture, Mesh, Compute]:
        """What its programs are compiled for."""
        return self.model.architecture, self.mesh, self.compute

    @property
    def chat(self) -> bool:
        """Whether prompts become conversations."""
        return self.tokenizer.chat_template is not None and self.asked.chat

    @cached_property
    def gap(self) -> str:
        """White space before an answer that is no part of it."""
        return answer_gap(self.tokenizer) if self.chat else ""

    def encode(self, data: Dataset | Sequence[Example], n: int = 1) -> Prompts:
        """The prompts as token ids, `n` times each."""
        if self.longest <= 0:
            positions, new = self.model.config.max_positions, self.sampling.max_new_tokens
            no_room = f"max_new_tokens={new} leaves no room for a prompt"
            raise UserError(f"{no_room}: the model has {positions} positions, choose fewer new tokens")
        encoding = Encoding(self.tokenizer, chat=self.chat, system=self.asked.system)
        prompts = encoding.prompts(data, sys.maxsize)
        places = data.places if isinstance(data, Dataset) else [f"prompt {row}" for row in range(1, len(data) + 1)]
        for place, ids in zip(places, prompts.ids, strict=True):
            if len(ids) > self.longest:
                room = f"with max_new_tokens={self.sampling.max_new_tokens} the model takes {self.longest}"
                raise UserError(f"{place} has {len(ids)} tokens, and {room}: shorten it, or lower max_new_tokens")
        order = [row for row in range(len(prompts.ids)) for _ in range(n)]
        ids, texts = tuple(prompts.ids[row] for row in order), tuple(prompts.texts[row] for row in order)
        return Prompts(ids, texts, examples=[prompts.examples[row] for row in order])

    def answer(self, prompts: Prompts, key: jax.Array) -> Iterator[Response]:
        """One response to each prompt, in order.

        A text depends on the key and the prompt's index, but not on the batch size, except for rounding in bfloat16.
        """
        width = program_width(max(len(ids) for ids in prompts.ids), self.longest)
        # One chunk, because no answer waits for others.
        run = engine_of(*self.place, self.sampling, Schedule(chunk=self.sampling.max_new_tokens), 1)
        for rows, count in whole_batches(len(prompts.ids), self.batch):
            tokens, lengths = put_rows(pad_rows([prompts.ids[row] for row in rows], width), self.mesh)
            keys = row_keys(key, self.batch, self.mesh, first=rows[0])
            generation = run(self.model.params, tokens, lengths, keys, *self.model.frozen)
            for response in read_responses(self.tokenizer, jax.device_get(generation), slice(count)):
                yield replace(response, text=without_gap(response.text, self.gap))

    def stream(self, ids: Sequence[int], key: jax.Array) -> Iterator[str]:
        """Yields the text of one response as it grows. The last text equals the result of `answer` for the prompt."""
        width = program_width(len(ids), self.longest)
        seeds = np.asarray(jax.random.key_data(row_keys(key, self.batch, self.mesh)))
        decoder = decoder_of(*self.place, self.sampling, 1)
        slots = ContinuousBatch.of_size(decoder, self.mesh, Schedule(chunk=STREAMED), self.batch, width)
        base = self.model.frozen
        weights = (base[0], self.model.params) if base else (self.model.params, {})
        slots.admit(weights, [Prompt(0, pad_rows([ids], width)[0][0], len(ids), seeds[:1])])
        while len(slots.rows):
            at = int(np.flatnonzero(slots.state.owner == 0)[0])
            (row,) = slots.decode(weights)
            if row.response is not None:
                text = to_response(self.tokenizer, ids, row.response[0].tolist(), row.response[2]).text
            else:
                tokens = jax.device_get(slots.state.slots.tokens)[at, : row.end].tolist()
                text = shown(self.tokenizer.stop, self.tokenizer.continuation(ids, tokens))
            yield without_gap(text, self.gap)


@dataclass(frozen=True)
class Asked:
    """The form of prompts for a model: the form of its training.

    chat: prompts are conversations if the tokenizer has a chat template. end: end of plain prompts, lacking when typed.
    sampling: how the run samples the model: fields of `SamplingConfig`. stop: the run's `stop` and `keep_stop`, if any.
    """

    data: DatasetsData
    chat: bool = True
    end: str = ""
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Mapping[str, Any] = field(default_factory=dict)

    def example(self, line: str) -> Example:
        """Converts a typed line to a prompt in the form of the training."""
        return Example(prompt=line if line.endswith(self.end) else line + self.end)


def asked_of(path: str) -> Asked:
    """Returns the form of prompts for the model of a run, also for its model/; the defaults if `path` is neither."""
    directory = fetch_run(path, "model") if is_address(path) else expanded(path, "model")
    if not directory.exists():
        directory = locate(path, "model")
    if directory.resolve().name == "model" and (directory.resolve().parent / ENVIRONMENT).is_file():
        directory = directory.resolve().parent
    prompting, saved = read_prompting(directory), directory / CONFIG
    config = load_config(str(saved)) if saved.is_file() else None
    data = DatasetsData(max_response=TOKENS) if config is None else config.data
    sampling = {} if config is None else {"max_new_tokens": data.max_response, **config.drawing}
    if isinstance(data, DatasetsData):
        asked = Asked(data, system=data.system, sampling=sampling)
    else:
        asked = Asked(DatasetsData(max_response=data.max_response), chat=False, sampling=sampling)
    if config is not None and config.sampling.stop:
        asked = replace(asked, stop={name: getattr(config.sampling, name) for name in _STOP})
    return replace(asked, chat=prompting.get("chat", asked.chat), end=prompting.get("prompt_end", asked.end))


def load(
    path: str,
    sampling: Mapping[str, Any],
    asked: Asked | None = None,
    *,
    adapter: str | None = None,
    batch: int = 8,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto",
) -> Generator:
    """Loads a run, a model directory, the address of one of them in an object store, or a hub name.

    sampling: fields of `SamplingConfig` that replace those of the run or else of the model's generation_config.json;
    the tokenizer adds the tokens that stop a response. adapter: a PEFT directory.
    dtype: auto is bfloat16 on an accelerator, float32 on a CPU. asked: None: as recorded in the run, if it is one.
    """
    asked = asked_of(path) if asked is None else asked
    folder = None if adapter is None else expanded(adapter, "adapter")
    own = {name: value for name, value in sampling.items() if name not in _STOP}
    with_sampling(SamplingConfig(max_new_tokens=TOKENS), own)  # before the model, which takes longer
    devices = select(DeviceConfig(platform=platform))
    described = describe(path, "model")
    own, source = _own_sampling(described, asked)
    config = described.model
    tokenizer = own_tokenizer(path, "model", asked.data, config.vocab_size)
    if dtype == "auto":
        dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    compute, tensor = Compute(ForwardOptions(dtype=jnp.dtype(dtype))), _tensor_parallelism(config, len(devices))
    mesh = make_mesh(len(devices) // tensor, 1, tensor, devices=devices)
    with jax.set_mesh(mesh):
        _, params = load_weights(path, "model", mesh, layout=GENERATE, dtype=compute.dtype)
        model = Model(Architecture(config, shared=True), params)
        if folder is not None:
            with user_errors(f"adapter={adapter}"):
                lora, weights = load_adapter(folder, config, mesh)
            model = Model(Architecture(config, lora, shared=True), weights, params)
    limit = tokenizer.vocab_size if tokenizer.vocab_size < config.vocab_size else None
    options = replace(own, stop_ids=tokenizer.eos_ids, token_limit=limit)
    rows = -(-batch // mesh.size) * mesh.size
    generator = Generator(model, tokenizer, mesh, compute, options, rows, asked, source)
    return generator.stopping(asked.stop).drawing(sampling)


def _own_sampling(described: HFConfig, asked: Asked) -> tuple[SamplingConfig, str]:
    """Returns the sampling settings of a model for which a user asks nothing else, and their source."""
    positions = described.model.max_positions
    if "temperature" in asked.sampling:
        return SamplingConfig(**asked.sampling), "the run's sampling"
    settings, file = described.sampling, "generation_config.json"
    source = file if settings.keys() & {"temperature", "top_k", "top_p", "min_p"} else "the default"
    try:
        own = with_sampling(SamplingConfig(TOKENS), {**settings, **asked.sampling})
    except UserError as error:
        raise UserError(f"{file} of the model: {error}") from error
    if own.max_new_tokens >= positions:  # no room for a prompt
        own = with_sampling(own, {"max_new_tokens": max(positions // 2, 1)})
    return own, source


def with_sampling(sampling: SamplingConfig, changes: Mapping[str, Any]) -> SamplingConfig:
    kinds = kinds_of(SamplingConfig)
    for name in [name for name in changes if name not in kinds]:
        names = ", ".join([*(kind for kind in kinds if kind != "stops"), *_STOP])
        remedy = f"write {SAMPLING[name]}" if name in SAMPLING else f"choose among n, seed, {names}"
        raise UserError(f"{name} is no setting of sampling: {remedy}")
    with user_errors():
        values = {name: convert(kinds[name], value, name) for name, value in changes.items()}
        if "min_new_tokens" not in values:  # a shorter answer than the run's shortest
            longest = values.get("max_new_tokens", sampling.max_new_tokens)
            values["min_new_tokens"] = min(sampling.min_new_tokens, longest)
        return replace(sampling, **values)


def _tensor_parallelism(config: ModelConfig, devices: int) -> int:
    """Returns the largest `tensor` size that the model allows. The remaining factor of devices divides the rows."""
    return max(tensor for tensor in divisors(devices) if not any(indivisible(config, 1, tensor)))


def cli(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jrlhf.generate", description="Answers prompts. Without --prompt or --file: a conversation."
    )
    parser.add_argument("--model", required=True, help="a run's directory, a Hugging Face directory, or a hub name")
    parser.add_argument("--adapter", help="a PEFT directory, put on the model")
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--file", help="a dataset with prompts: jsonl, csv, parquet")
    parser.add_argument("--column", help="the column of --file that holds the prompts, if it is not `prompt`")
    parser.add_argument(
        "--out",
        help="a jsonl file for the rows of --file and their answers, replaced if it exists; else they are printed",
    )
    parser.add_argument("--raw", action="store_true", help="prompts are plain text even if there is a chat template")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("-n", type=int, default=1, help="answers to each prompt; default: 1")
    own = "default: that of the model's run, else of its generation_config.json, else"
    longest = f"{own} {TOKENS}, at most half of the positions"
    parser.add_argument("--max-new-tokens", type=int, help=longest)
    parser.add_argument("--temperature", type=float, help=f"0: always the most likely token; {own} 1")
    parser.add_argument("--top-k", type=int, help=f"draw from the k most likely tokens; {own} from all")
    parser.add_argument("--top-p", type=float, help=f"draw from those of this probability together; {own} from all")
    parser.add_argument("--min-p", type=float, help=f"draw from those of this share of the largest; {own} from all")
    stop = "a text that ends an answer; may be given several times; default: those of the model's run"
    parser.add_argument("--stop", action="append", help=stop)
    parser.add_argument("--keep-stop", action="store_true", default=None, help="leave the text of --stop in the answer")
    parser.add_argument("--seed", type=int, default=0, help="default: 0; the same seed gives the same answers")
    parser.add_argument("--batch", type=int, default=8, help="prompts at a time; default: 8")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--platform", choices=("auto", "cpu", "gpu", "tpu"), default="auto")
    return exit_code_of_printing(partial(_run, parse_options(parser, arguments)))


def _run(options: argparse.Namespace) -> None:
    interactive = not options.prompt and options.file is None
    _check(options, interactive)
    asked = asked_of(options.model)
    system = asked.system if options.system is None and not options.raw else options.system
    asked = replace(asked, system=system, chat=asked.chat and not options.raw)
    data = examples = tuple(asked.example(text) for text in options.prompt or ())
    if options.file is not None:
        dataset = read_dataset(options.file, columns=ColumnsConfig(prompt=options.column))
        examples, places = (*examples, *dataset.examples), (*["--prompt"] * len(examples), *dataset.places)
        data = replace(dataset, examples=examples, places=places)
    names = "max_new_tokens", "temperature", "top_k", "top_p", "min_p", *_STOP
    sampling = {name: value for name in names if (value := getattr(options, name)) is not None}
    batch = 1 if interactive else min(options.batch, len(examples) * options.n)
    hardware = {"dtype": options.dtype, "platform": options.platform}
    generator = load(options.model, sampling, asked, adapter=options.adapter, batch=batch, **hardware)
    with jax.set_mesh(generator.mesh):
        if interactive:
            converse(generator, options.model, options.seed, terminal=sys.stdin.isatty())
            return
        prompts = generator.encode(data, options.n)
        print(f"{options.model} answers {generator.drawn}, with --seed {options.seed}", file=sys.stderr)
        answers = generator.answer(prompts, key_for(options.seed, "generate"))
        if options.out is not None:
            _write_answers(prompts, answers, options.out)
            return
        for example, text, response in zip(prompts.examples, prompts.texts, answers, strict=True):
            prompt = example.prompt if isinstance(example.prompt, str) else text
            print(f"> {clean(prompt).strip()}\n{clean_lines(response.text)}\n", flush=True)


def _check(options: argparse.Namespace, interactive: bool) -> None:
    if options.out is not None and options.file is None:
        raise UserError("--out holds the answers to --file: give a file of prompts, or leave it out")
    if options.column is not None and options.file is None:
        raise UserError("--column holds the prompts of --file: give a file of prompts, or leave it out")
    if options.n < 1 or options.batch < 1:
        raise UserError(f"-n {options.n} and --batch {options.batch} must be at least 1")
    if options.n > _MOST:
        raise UserError(f"-n {options.n} must be at most {_MOST}: for more answers, ask again with another --seed")
    if not -(2**63) <= options.seed < 2**63:
        raise UserError(f"--seed {options.seed} must be a number of at most 64 bits, such as 0")
    if options.out is not None:
        check_writable(f"--out {options.out}", local("--out", options.out))
    if interactive and options.n > 1:
        raise UserError(f"-n {options.n} answers need a --prompt or a --file: in a conversation each turn has one")


def _write_answers(prompts: Prompts, answers: Iterator[Response], out: str) -> None:
    rows = []
    for example, response in zip(prompts.examples, answers, strict=True):
        answer = {"prompt": example.prompt, "completion": response.text, "finished": response.finished}
        rows.append(answer | dict(example.columns) | answer)  # the answer's keys come first, and its values count
        if sys.stderr.isatty():
            print(f"\r{len(rows)} of {len(prompts.ids)}", end="", file=sys.stderr, flush=True)
    path = local("--out", out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
    print(f"{len(rows)} answers in {out}")


def converse(generator: Generator, name: str, seed: int = 0, *, terminal: bool = True) -> None:
    """Answers each line: with a chat template to the whole conversation, else to that line alone.

    terminal: whether a user types the lines; then instructions are printed, and an empty line ends the conversation.
    Otherwise a line that cannot be answered, such as one that is too long, is a UserError at the end.
    """
    system = generator.asked.system
    if terminal:
        alone = "" if generator.chat else "each line by itself, "
        print(f"{name} answers {alone}{generator.drawn}; an empty line ends this")
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    failed: list[str] = []  # numbers of piped lines
    for turn in itertools.count():
        try:
            line = input("you> " if terminal else "").strip()
        except EOFError:
            break
        if not line:
            if terminal:
                return
            continue
        messages.append({"role": "user", "content": line})
        example = Example(prompt=tuple(messages)) if generator.chat else generator.asked.example(line)
        try:
            (ids,) = generator.encode([example]).ids
        except UserError as error:  # such as a line that is too long
            if terminal:
                print(f"error: {error}")
            else:
                print(f"error: line {turn + 1}: {error}", file=sys.stderr)
                failed.append(str(turn + 1))
            messages.pop()
            continue
        text, shown = "", 0
        for text in generator.stream(ids, key_for(seed, "generate", turn)):
            whole = clean_lines(text.rstrip("\ufffd"))  # the last tokens of a character may be missing
            print(whole[shown:], end="", flush=True)
            shown = max(shown, len(whole))
        print(clean_lines(text)[shown:], flush=True)
        messages.append({"role": "assistant", "content": text})
    if failed:
        raise UserError(f"no answer to line {', '.join(failed)}: the errors stand above")


if __name__ == "__main__":
    sys.exit(cli())
