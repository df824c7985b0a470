"""The Python API: the commands (train, load, plan) as functions that return values.

    from jrlhf.api import load, plan, train

    run = train("quickstart", run_dir="runs")
    print(run.column("critic/score/mean"), run.summary.get("held_out"))
    print(run.actor.generate(["def add(a, b):"], temperature=0.0))

Errors are exceptions of `jrlhf.errors`: UserError for bad input, RunFailure if a run cannot go on, Preempted if it was
asked to stop.
"""

import gc
import inspect
import io
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from jrlhf import plan as planner
from jrlhf.config.load import make_config, plain_value
from jrlhf.config.parse import build, convert
from jrlhf.config.places import local
from jrlhf.data.batches import key_for, pad_rows, program_width, put_rows, whole_batches
from jrlhf.data.encode import Encoding
from jrlhf.data.memory import rows_in_memory
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example
from jrlhf.errors import Preempted, UserError
from jrlhf.export import export_checkpoint
from jrlhf.generate import Generator, asked_of, converse
from jrlhf.generate import load as load_generator
from jrlhf.meshes.transfers import to_host
from jrlhf.plan import Planned, Search
from jrlhf.ppo.fields import Section, count, natural, positive
from jrlhf.report.read import Record, read_run
from jrlhf.rewards.python_code import is_given, python_functions
from jrlhf.roles.compiled import CompiledModel
from jrlhf.run.console import SHOWN
from jrlhf.run.directory import run_path
from jrlhf.run.files import saved_steps
from jrlhf.run.metrics import read_metrics
from jrlhf.stages.watching import Hook, Iteration
from jrlhf.train import main

__all__ = ["Iteration", "Planned", "Policy", "Run", "load", "plan", "train"]


@dataclass(frozen=True)
class _Arguments(Section):
    """The arguments that are numbers or words, which are checked like settings."""

    n: int = count(1)
    seed: int = natural(0, most=2**32 - 1)
    temperature: float = positive(1.0)
    batch: int = count(8, most=2**16)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    step: int | None = None


def _checked(**arguments: Any) -> _Arguments:
    return build(_Arguments, plain_value(arguments))


def _path(path: object) -> Path:
    return local("path", convert(str, plain_value(path), "path"))


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]


T = TypeVar("T")
Source = str | Path | Mapping[str, Any]
Conversation = Sequence[Mapping[str, str]]


def train(
    config: Source,
    *,
    on_iteration: Hook | None = None,
    resume: bool | Literal["auto"] = False,
    accept_rewards: bool = False,
    **settings: Any,
) -> "Run":
    """Runs the stages of a config in this process; returns the run.

    config: a packaged name, a YAML file, or the settings as a nested dict. settings: further ones, which replace those
    of the config: dotted keys, or sections as dicts, of which only the given keys change. docs/configuration.md lists
    all. Reward functions, dataflows, optimizers and hooks may be Python functions, also lambdas: `rewards=[f]`,
    `rewards=[{"name": "short", "function": f, "weight": 0.1}]`, `grpo={"dataflow": f}`. Datasets may be rows in memory,
    a list of dicts or a `datasets.Dataset`: `data={"prompts": rows, "heldout": others}`, or `data=rows` for the prompts
    alone; the settings of their columns stay those of the config. on_iteration: a hook, beside
    those of the setting `hooks`: it is called with an `Iteration` after each step of each stage, and may return "stop",
    which ends the stage. resume: continues the run of this name; "auto": if there is one. accept_rewards: even if its
    reward functions were changed.

    Ctrl-C in a training loop finishes the iteration, saves it, and returns the run; `train(..., resume=True)` continues
    it. Ctrl-C at another time raises KeyboardInterrupt; earlier checkpoints remain. After SIGTERM or SIGHUP, as
    schedulers send them, the iteration is finished and saved, too, and Preempted is raised: the program should end.
    Outside of the main thread Python delivers no signals: such a run ends when it is done. Signal handlers are
    restored, and device memory is freed.

    Raises UserError for bad input, in one sentence, RunFailure if the run cannot go on, and Preempted.

        run = train("quickstart", run_dir="runs", ppo={"iterations": 10}, sft={"steps": 100})
    """
    hook = {"hooks": [] if on_iteration is None else [on_iteration]}
    with rows_in_memory(config, settings) as rows, python_functions(*rows, hook) as named:
        *given, added = named
        wanted = make_config(*given)
        # The config of a run that is resumed names its functions, which may be left out now.
        hooks = dict.fromkeys(spec for spec in (*wanted.hooks, *added["hooks"]) if is_given(spec))
        wanted = replace(wanted, hooks=tuple(hooks))
        try:
            main(wanted, resume=resume, accept_rewards=accept_rewards)
        except Preempted as stop:
            if not stop.by_hand:
                raise
            print(f"{stop}; go on with resume=True", flush=True)
        finally:
            gc.collect()  # arrays in cycles of references
    return Run.open(run_path(wanted))


@dataclass(frozen=True)
class Run:
    """A run's directory, finished or not. Properties are read from its files when they are accessed.

    path: the directory, which docs/running.md describes.

        run = Run.open("runs/quickstart")
        run.plot("critic/score/mean", "objective/kl")
    """

    path: Path

    @staticmethod
    def open(path: str | Path) -> "Run":
        """Returns the run in a directory. Raises UserError if there is none."""
        run = Run(_path(path))
        run.record  # noqa: B018
        return run

    @property
    def record(self) -> Record:
        """The contents of the directory, as the report reads them."""
        return read_run(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per iteration or step, of all stages, in order; docs/metrics.md explains the names."""
        return read_metrics(self.path)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return list(dict.fromkeys(name for row in self.metrics for name in row if name not in ("stage", "step")))

    def column(self, name: str, stage: str | None = None) -> Float[np.ndarray, "rows"]:
        """A metric of every row that has it, in order; not finite values become NaN. stage: None: all stages."""
        return self._curve(name, stage)[1]

    def _curve(self, name: str, stage: str | None) -> tuple[np.ndarray, np.ndarray]:
        name = convert(str, plain_value(name), "name")
        rows = [row for row in self.metrics if name in row and stage in (None, row["stage"])]
        if not rows:
            place = f"{self.path}" if stage is None else f"stage {stage} of {self.path}"
            near = [metric for metric, word, _ in SHOWN if word == name and metric in self.names]  # as the console says
            near = near or [other for other in self.names if name in other.split("/")]
            near = near or get_close_matches(name, self.names)
            hint = f"did you mean {' or '.join(near[:3])}" if near else f"it has {', '.join(self.names) or 'none yet'}"
            raise UserError(f"{place} has no metric {name}: {hint}")
        values = [np.nan if row[name] is None else row[name] for row in rows]
        return np.array([row["step"] for row in rows]), np.array(values, np.float64)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Texts that were sampled during the run, and answers to held-out prompts at its end."""
        return self.record.samples

    @property
    def summary(self) -> dict[str, Any]:
        """The final results of the run; empty if it was interrupted."""
        return self.record.summary

    def plot(self, *names: str, stage: str | None = None) -> Figure:
        """Draws metrics over the steps, one above the other; by default score and KL of the algorithm, or the losses.

        In a notebook the figure shows itself; `savefig(path)` writes it.
        """
        if not names:
            present = self.names
            names = tuple(name for name in ("critic/score/mean", "objective/kl") if name in present)
            names = names or tuple(name for name in present if name.endswith("loss"))
        figure = _Picture(figsize=(7, 1 + 1.8 * len(names)), layout="constrained")
        for name, axes in zip(names, np.ravel(figure.subplots(max(len(names), 1), 1)), strict=False):
            axes.plot(*self._curve(name, stage), marker="." if len(self.metrics) < 50 else None)
            axes.set(ylabel=name, xlabel="step" if name == names[-1] else "")
            axes.locator_params(axis="x", integer=True)
            axes.grid(alpha=0.3)
        return figure

    @property
    def actor(self) -> "Policy":
        """The trained policy, loaded; for an unfinished run, from its newest checkpoint."""
        steps, saved = self.summary.get("steps", {}), (self.path / "checkpoints").glob("*")
        newest = {stage.name: numbers[-1] for stage in saved if (numbers := saved_steps(stage))}
        # A run that continues for more steps still has the model of its last end.
        if (self.path / "model" / "config.json").is_file() and newest.items() <= steps.items():
            return load(self.path)
        with tempfile.TemporaryDirectory() as folder:
            export_checkpoint(self.path, out=Path(folder))
            return Policy(load_generator(folder, {}, asked_of(str(self.path))), str(self.path))

    def export(self, path: str | Path, step: int | None = None) -> Path:
        """Writes the policy in Hugging Face form to PATH/model, an adapter also to PATH/adapter; returns PATH/model.

        step: step of an existing checkpoint; None: the newest.
        """
        out = _path(path)
        export_checkpoint(self.path, _checked(step=step).step, out)
        return out / "model"


class _Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


@dataclass(frozen=True)
class Policy:
    """A loaded language model that answers and scores texts, on all devices of this process.

    name: the path or name from which it was loaded. Prompts have the form of its training: they become conversations
    if its tokenizer has a chat template and it was not trained on plain text.
    """

    generator: Generator
    name: str

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self.generator.tokenizer

    def generate(
        self, prompts: str | Conversation | Sequence[str | Conversation], *, n: int = 1, seed: int = 0, **sampling: Any
    ) -> list[str]:
        """Returns `n` answers to each prompt, those of one prompt next to each other.

        prompts: texts or conversations, [{"role": "user", "content": ...}, ...]; or one of them. sampling: fields of
        `SamplingConfig`: temperature (0: always the most likely token), top_k, top_p, min_p, max_new_tokens, ...; by
        default those of the model's run, else of its generation_config.json, else temperature 1 and 256 tokens. An
        answer ends at `stop`, a text or several, by default those of the run; `keep_stop=True` leaves it in the answer.
        A text depends only on the seed and the prompt's index.

            load("runs/quickstart").generate(["def add(a, b):"], temperature=0.0, max_new_tokens=16)
        """
        asked, listed = _checked(n=n, seed=seed), self._prompts(prompts)
        if not listed:
            return []
        examples = [
            self.generator.asked.example(prompt) if isinstance(prompt, str) else Example(prompt=tuple(prompt))
            for prompt in listed
        ]
        generator = self.generator.drawing(sampling)
        with jax.set_mesh(generator.mesh):
            answers = generator.answer(generator.encode(examples, asked.n), key_for(asked.seed, "generate"))
            return [answer.text for answer in answers]

    def _prompts(self, given: Any) -> list[Any]:
        """Returns texts and conversations as a list; refuses anything else."""
        listed = _listed(given)
        if listed and isinstance(listed[0], Mapping):
            listed = [listed]
        for prompt in [one for one in listed if not isinstance(one, str)]:
            turns = list(prompt) if isinstance(prompt, list | tuple) else []
            if not turns or not all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in turns):
                form = '[{"role": "user", "content": ...}]'
                raise UserError(f"prompt {prompt!r} is no text, and no conversation {form}")
            if self.tokenizer.chat_template is None:
                raise UserError(f"{self.name} has no chat template: give it texts instead of conversations")
        return listed

    def logprobs(
        self, texts: str | Conversation | Sequence[str | Conversation], *, temperature: float = 1.0
    ) -> list[Float[np.ndarray, "T-1"]]:
        """Returns for each text of T tokens the log-probabilities of its tokens after the first, float32 [T - 1].

        Entry t is log p(token t + 1 | tokens 0 to t), of the softmax at the temperature. Texts are used unchanged,
        without a chat template; T includes the token that begins every text, if there is one. A conversation has the
        tokens that `generate` continues: they end with its last turn if that is the assistant's.

            [ours] = load("runs/quickstart").logprobs("def add(a, b):")
        """
        listed, generator = self._prompts(texts), self.generator
        temperature = _checked(temperature=temperature).temperature
        encoding = Encoding(self.tokenizer, chat=True, system=generator.asked.system)
        conversations = [Example(prompt=tuple(text)) for text in listed if not isinstance(text, str)]
        encoded = iter(encoding.prompts(conversations, sys.maxsize).ids if conversations else ())
        rows = [self.tokenizer.encode_prompt(text) if isinstance(text, str) else next(encoded) for text in listed]
        longest, most = max(map(len, rows), default=0), generator.model.config.max_positions
        if longest > most:
            raise UserError(f"a text has {longest} tokens, and the model {most} positions: shorten it")
        model, width = generator.model, program_width(longest, most)
        score = CompiledModel(*generator.place).score_logprobs(temperature=temperature)

        def scored() -> Iterator[np.ndarray]:
            for batch, whole in whole_batches(len(rows), generator.batch):
                tokens, lengths = put_rows(pad_rows([rows[row] for row in batch], width), generator.mesh)
                yield from to_host(score(model.params, tokens, lengths, *model.frozen)[0])[:whole]

        with jax.set_mesh(generator.mesh):
            return [values[1 : len(row)] for values, row in zip(scored(), rows, strict=True)]

    def chat(self, seed: int = 0, **sampling: Any) -> None:
        """Chats: reads lines from the keyboard and prints the answers while they are generated, until an empty line."""
        generator = replace(self.generator.drawing(sampling), batch=self.generator.mesh.size)
        with jax.set_mesh(generator.mesh):
            converse(generator, self.name, _checked(seed=seed).seed)

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"


def load(
    path: str | Path | Run,
    *,
    adapter: str | Path | None = None,
    batch: int = 8,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> Policy:
    """Loads the policy of a run that has ended, of a Hugging Face directory, or of a hub name, onto all devices.

    adapter: a PEFT directory, put on the model. batch: rows at a time. dtype: auto is bfloat16 on an accelerator and
    float32 on a CPU.

        policy = load("runs/quickstart")
    """
    name, asked = str(path.path if isinstance(path, Run) else path), _checked(batch=batch, dtype=dtype)
    adapter = None if adapter is None else str(adapter)
    return Policy(load_generator(name, {}, adapter=adapter, batch=asked.batch, dtype=asked.dtype), name)


def _with_search(function: T) -> T:
    """Writes the fields of `Search` into a function's signature, for `help`."""
    target: Any = function
    own, names = inspect.signature(target), [item for item in fields(Search) if item.name != "cluster"]
    *first, settings = own.parameters.values()
    more = [Parameter(item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type) for item in names]
    target.__signature__ = own.replace(parameters=[*first, *more, settings])
    return function


@_with_search
def plan(config: Source, cluster: str | None = None, **settings: Any) -> Planned:
    """Searches for the fastest plan of a config on a described cluster; returns it with its predicted time and memory.

    config, settings: as in `train`, but `plan` and `seed` belong to the search. cluster: "16xh100", "v5p-512"; None:
    the present devices, which are measured first. plan: a file, "colocate", "split" or "standalone", which is predicted
    without a search. mean_response: tokens; None: the maximum. sigma: deviation of log response lengths, of runs that
    are asynchronous or have score_rows; None: 0. processes: of the run; None: one per host. seconds, proposals: end of
    the search; with proposals the result depends only on the seed. hypothetical: also plans that no run can use.
    overlap: let iterations overlap, which runs do not, because they read metrics.

        planned = plan("llama3-8b-ppo", "8xh200", proposals=100)
        print(planned)  # a table of the calls, and a timeline
    """
    wanted = {item.name: settings.pop(item.name) for item in fields(Search) if item.name in settings}
    search = build(Search, plain_value({"cluster": cluster, **wanted}))
    with rows_in_memory(config, settings) as rows, python_functions(*rows) as named:
        return planner.make_plan(make_config(*named), search, say=partial(print, flush=True))
