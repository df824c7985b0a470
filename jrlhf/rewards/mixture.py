"""`Rewards`: the role that scores rollouts by a weighted sum of reward models and functions, with metrics of each."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from jrlhf.data.batches import Batch, put_rows, read_responses
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Response
from jrlhf.errors import RewardFailure, UserError
from jrlhf.meshes.graph import Kind as CallKind
from jrlhf.meshes.transfers import gathered, transfer
from jrlhf.ppo.config.score import ScoreConfig
from jrlhf.ppo.shaping import RunningMoments, shape_scores
from jrlhf.ppo.types import Rollout
from jrlhf.rewards.combine import Combined, combine, named
from jrlhf.rewards.types import Kind, Sample, Scored, joined, to_samples, weighted_sum
from jrlhf.roles.critic import Reward
from jrlhf.roles.model import Compute, Model
from jrlhf.roles.open_rollout import DrawnAhead, OpenRollout
from jrlhf.roles.placement import Pending, RolePlacement, call, ready
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock
from jrlhf.run.processes import from_main, is_main

Metrics = dict[str, float | Array]
_TELLING = 8  # samples; of fewer, such as the last ones of an evaluation, most may fail by chance
_COUNT = re.compile("/failures|/(skipped|abstained)$")  # in the names of metrics that are counts
TRAINED = "reward_model"  # the name of the reward model that the run itself trains


class TextModel(Protocol):
    """A reward model that reads text, on the mesh (`TextReward`)."""

    def begin(self, samples: Sequence[Sample]) -> Any:
        """Starts to score a tile of rows on the devices."""
        ...

    def finish(self, parts: Sequence[Any]) -> Scored:
        """Waits for the tiles that have begun, and returns the scores of all their rows."""
        ...


@dataclass(frozen=True)
class TextPart:
    """A reward that reads text: (samples, step) -> scores. A function also takes `first` (`FunctionReward.score`).

    calls: the number of calls of a function that may run at the same time.
    """

    weight: float
    score: Callable[..., Scored]
    identity: str  # identifies the model's weights or the function's code
    model: TextModel | None = None  # a model on the mesh; None: a function in its own processes
    calls: int = 1


@dataclass(frozen=True)
class TokenPart:
    """A reward model that reads the actor's tokens as they are."""

    weight: float
    model: Model
    identity: str  # identifies its weights, wherever they are stored
    on_failure: float | None  # replaces a score that is not finite; None: the run ends


Asked = tuple[list[Sample], dict[str, Scored]]  # rows as text, and the functions' scores by name
Answers = Future[Asked] | Pending[Asked]
Drawn = Rollout | OpenRollout | DrawnAhead
Tiles = Pending[list[dict[str, Any]]]  # by name, for each tile of rows: models that read text


class Rewards:
    """The role that scores rollouts: the weighted sum of a run's rewards, or of its costs. One thread makes all calls.
    A run whose dataflow never calls `score` may have none.

    Functions run in other threads while the devices compute; models that read text run afterwards, or on each tile of
    an open rollout. `start` begins an iteration; at its end `moments`, `raw`, `parts` and `metrics()` are its results.

    placement: where its calls run, and where its models are stored.
    kind: names the metrics: `rewards/NAME/mean` or `costs/NAME/mean`.
    trained: the reward model that this run trained; it is stored where it was trained until `free_original`.
    samples: number of responses to a prompt, if `shaping` normalises the scores of each reward over them.
    gap: returns the white space that begins each answer in a conversation (`answer_gap`).
    counts: as in `combine`.
    warn: tells users of a reward that fails on most samples of a batch, once.
    """

    moments: RunningMoments  # running mean and variance of all scores so far
    raw: dict[int, Array]  # number of each batch scored in the iteration -> its rows' sums before they were shaped
    _begun: list[Pending]  # scores of the iteration that may not be read yet
    parts: dict[int, dict[str, Any]]  # number of each batch -> each reward's scores of its rows, NaN if it judges none

    def __init__(
        self,
        token_parts: Mapping[str, TokenPart],
        text_parts: Mapping[str, TextPart],
        *,
        placement: RolePlacement,
        compute: Compute,
        clock: Clock,
        tokenizer: Tokenizer,
        gap: Callable[[], str],
        max_response: int,
        shaping: ScoreConfig,
        kind: Kind,
        trained: Model | None,
        samples: int,
        counts: Callable[[Array], Array],
        warn: Callable[[str], None],
    ):
        self.token_parts, self.text_parts, self.trained = token_parts, text_parts, trained
        self.placement, self.clock = placement, clock
        self.kind: Kind = kind
        self._tokenizer, self._gap, self._max_response = tokenizer, gap, max_response
        site = Site(placement, compute, clock)
        self._models = {name: part.model for name, part in text_parts.items() if part.model is not None}
        self._roles = {name: Reward(part.model, site) for name, part in token_parts.items()}
        parts = token_parts.items()
        weights = {name: part.weight for name, part in (*parts, *text_parts.items())}
        self._group = samples if shaping.combine == "normalise_then_sum" else None  # None: texts are summed on the host
        on_failure = {name: math.nan if part.on_failure is None else part.on_failure for name, part in parts}
        shape = partial(shape_scores, config=shaping, max_response=max_response)
        fixed = {"samples": self._group, "counts": counts}
        self._combine = jax.jit(partial(combine, shape, kind, weights, on_failure, **fixed))
        self._metrics: Metrics = {}
        self._warn, self._broken = warn, set[str]()  # names of rewards of which users were told
        calls = max((part.calls for part in text_parts.values()), default=1)
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="rewards")

    @property
    def identities(self) -> dict[str, str]:
        """The identity of each reward, by name; a resumed run must have the same ones."""
        return {name: part.identity for name, part in {**self.token_parts, **self.text_parts}.items()}

    def free_original(self) -> None:
        """Frees the trained reward model where it was trained. Call it once models that start from it are built."""
        if self.trained is not None and self.trained is not (stored := self.token_parts[TRAINED].model):
            for leaf in jax.tree.leaves(self.trained.params):
                leaf.delete()
            self.trained = stored

    def close(self) -> None:
        """Waits for the calls at work, and drops those that wait for them; then functions' processes may end."""
        self._threads.shutdown(cancel_futures=True)

    def start(self, moments: RunningMoments) -> None:
        """Begins an iteration: forgets the scores and metrics of the one before."""
        self.moments, self.raw, self.parts, self._metrics, self._begun = moments, {}, {}, {}, []

    @call("infer", "scores", rows="open")
    def score(self, rollout: Rollout, prompts: Batch) -> Pending:
        """Starts to score a rollout: starts token reward models on the devices, and functions in their processes.

        Reading the result waits for all rewards, and then `raw` has these rows. It gives the sum of the rewards [B],
        normalised, clipped and penalised as configured; [B, R], with the first response token first, if a reward scores
        tokens.
        """
        self._begun.append(scores := self._begin("score", rollout, prompts))
        return scores

    def finish(self) -> None:
        """Waits for scores that nobody has read."""
        for scores in self._begun:
            scores.result()
        self._begun.clear()

    @call("infer", "baselines", rows="open")
    def score_baseline(self, rollout: Rollout, prompts: Batch) -> Pending:
        """Scores responses that nothing learns from: the baseline of other responses to the same prompts."""
        return self._begin("score_baseline", rollout, prompts)

    def prefetch(self, kind: CallKind) -> None:
        """Starts to copy offloaded token reward models to the devices."""
        for role in self._roles.values():
            role.prefetch(kind)

    def metrics(self) -> Metrics:
        """Returns the metrics since the iteration began."""
        return dict(self._metrics)

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Raises RewardFailure if the metrics count failures of a token reward model without `on_failure`."""
        for name, part in self.token_parts.items():
            if part.on_failure is None and (failures := metrics.get(f"{self.kind}s/{name}/failures")):
                called = f"{self.kind} {name!r}"
                raise RewardFailure(
                    f"{called} gave {failures:.0f} responses a score that is not finite: use another adapter, or set "
                    f"on_failure of {called} to a score for such responses"
                )

    def score_texts(self, samples: Sequence[Sample], step: int = 0, first: int = 0) -> tuple[Scored, dict[str, Scored]]:
        """Scores samples outside of iterations: returns the weighted sum of the text rewards, and each one's scores.

        first: the number of samples of this step that were scored before.
        """
        ask = partial(self._ask, samples, step, on_device=False, first=first)
        scored = _from_main(lambda: self._threads.submit(ask).result())
        return self._summed(samples, scored | self._ask(samples, step, on_device=True))

    def samples(self, examples: Sequence[Example], texts: Sequence[str], responses: Sequence[Response]) -> list[Sample]:
        """Returns responses of the actor as samples to score."""
        plain = all(isinstance(example.prompt, str) for example in examples)
        return to_samples(examples, texts, responses, "" if plain else self._gap())

    def read(self, batch: Batch, rows: slice, tile: Rollout) -> Future[Asked]:
        """Starts the functions on some rows of a batch. tile: these rows, which `jax.device_get` can fetch."""
        return self._threads.submit(self._read, batch, rows, tile)

    def _begin(self, method: str, rollout: Drawn, prompts: Batch) -> Pending:
        mesh = self.placement[method].mesh
        whole = rollout if isinstance(rollout, Pending) else Pending(lambda: rollout)
        learned = {name: whole.by_rows(partial(role.score, method=method), mesh) for name, role in self._roles.items()}
        answers, models = self._begin_texts(rollout, prompts) if self.text_parts else (None, None)

        def scores() -> Array:
            with jax.set_mesh(mesh):
                drawn, parts = whole.result(), {name: ready(scores) for name, scores in learned.items()}
                texts, metrics, own = None, {}, {}
                if answers is not None:
                    texts, metrics, own = self._finish(answers, models, prompts.step)
                    texts = put_rows(texts, mesh)
                drawn, moments = self.placement.transfers.bring(drawn, mesh, self.clock), transfer(self.moments, mesh)
                combined = self._combine(parts, texts, drawn.response_lengths, drawn.finished, moments)
                self._note(method, prompts.step, combined, metrics)
                if method == "score":
                    self.parts[prompts.step] = combined.parts | own
                return combined.shaped

        return Pending(scores)

    def _begin_texts(self, rollout: Drawn, batch: Batch) -> tuple[Answers, Tiles | None]:
        """Starts the functions, and the models if the rollout is open. Those of a rollout drawn ahead have begun."""
        if isinstance(rollout, Rollout):
            # Gathered here and not in a thread: all devices must get their programs in the same order.
            return self.read(batch, slice(0, None), gathered(rollout)), None
        if isinstance(rollout, DrawnAhead):
            return Pending(lambda: joined_answers(rollout.results[self.kind])), None
        parts, devices = rollout.each(partial(self.read, batch)), self.placement["score"].mesh.devices.flat
        models = rollout.each(partial(self._begin_models, batch), devices=devices) if self._models else None
        return Pending(lambda: joined_answers(parts.result())), models

    def _begin_models(self, batch: Batch, rows: slice, tile: Rollout) -> dict[str, Any]:
        samples = self._samples(batch, rows, tile)
        return {name: self.clock.run("reward", model.begin, samples) for name, model in self._models.items()}

    def _read(self, batch: Batch, rows: slice, drawn: Rollout) -> Asked:
        """Waits for rows of a batch; returns them as text, and the functions' scores. Runs in a thread."""
        return self._ask_functions(self._samples(batch, rows, jax.device_get(drawn)), batch.step, first=rows.start)

    def _samples(self, batch: Batch, rows: slice, drawn: Rollout) -> list[Sample]:
        return self.samples(batch.examples[rows], batch.texts[rows], read_responses(self._tokenizer, drawn))

    def _ask_functions(self, samples: list[Sample], step: int, **place: int) -> Asked:
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation("reward_functions"):
            scored = self._ask(samples, step, on_device=False, **place) if is_main() else {}
        if scored:
            self.clock.add_parallel(f"{self.kind}_functions", time.perf_counter() - started)
        return samples, scored

    def _finish(self, answers: Answers, models: Tiles | None, step: int) -> tuple[Any, Metrics, dict[str, Any]]:
        """Waits for the functions and for models that have begun, or runs all models; returns their sum, or the scores
        of each if those are combined on the devices; metrics; and the scores of each."""
        deadline = self.clock.deadline  # holds also for processes that wait for the scores of process 0
        scored = self.clock.run("reward_wait", _from_main, lambda: answers.result()[1], seconds=deadline)
        samples, _ = answers.result()
        if models is not None:
            tiles = models.result()
            scored |= {name: model.finish([tile[name] for tile in tiles]) for name, model in self._models.items()}
        elif self._models:
            scored = scored | self.clock.run("reward", self._ask, samples, step, on_device=True)
        total, parts = self._summed(samples, scored)
        own = {name: part.scores for name, part in parts.items()}
        metrics: Metrics = {key: x for name, part in parts.items() for key, x in part.metrics(name, self.kind).items()}
        with np.errstate(over="ignore"):  # an infinite sum is counted, and its row is not learned from
            if self._group is not None:
                for name, part in parts.items():
                    if part.token_scores is not None:
                        raise UserError(
                            f"{self.kind} {name!r} scores single tokens, and scores.combine="
                            "normalise_then_sum compares whole responses: set it to sum"
                        )
                return {name: scores.astype(np.float32) for name, scores in own.items()}, metrics, own
            if total.token_scores is None:
                return total.scores.astype(np.float32), metrics, own
            scores = np.zeros((len(samples), self._max_response), np.float32)
            for row, tokens in zip(scores, total.token_scores, strict=True):
                row[: len(tokens)] = tokens
            return scores, metrics, own

    def _ask(self, samples: Sequence[Sample], step: int, *, on_device: bool, **place: int) -> dict[str, Scored]:
        parts = {name: part for name, part in self.text_parts.items() if (part.model is not None) == on_device}
        scored = {name: part.score(samples, step, **place) for name, part in parts.items()}
        return {name: own if parts[name].weight else own.only_measured for name, own in scored.items()}

    def _summed(self, samples: Sequence[Sample], scored: Mapping[str, Scored]) -> tuple[Scored, dict[str, Scored]]:
        """Returns the weighted sum, and the scores of the parts in the order of the config."""
        for name, part in scored.items():
            failed, kinds = sum(part.failures.values()), ", ".join(part.failures)
            if 2 * failed > len(samples) >= _TELLING and name not in self._broken:
                self._broken.add(name)
                last = f"; the last: {part.last_failure}" if part.last_failure else ""
                self._warn(
                    f"the {self.kind} {name} failed on {failed} of {len(samples)} samples ({kinds}{last}), which get "
                    "its on_failure: unless that is meant, stop the run and mend it"
                )
        weighted = [(part.weight, scored[name]) for name, part in self.text_parts.items()]
        total = weighted_sum(weighted, [len(sample.response.ids) for sample in samples])
        return total, {name: scored[name] for name in self.text_parts}

    def _note(self, method: str, step: int, combined: Combined, texts: Metrics) -> None:
        """Adds the results of a scoring to the iteration's. Counts are those over all of its scorings."""
        metrics = texts | combined.learned
        if method == "score_baseline":
            metrics = {name: number for name, number in metrics.items() if _COUNT.search(name)}
            metrics |= named("critic/baseline", combined.extremes)
        else:
            self.moments, self.raw[step] = combined.moments, combined.raw
            metrics |= named("cost" if self.kind == "cost" else "critic/score", combined.extremes)
            if self.kind == "reward":  # costs are not shaped
                metrics |= combined.shaping
        for name, number in metrics.items():
            counted = _COUNT.search(name) and name in self._metrics
            self._metrics[name] = self._metrics[name] + number if counted else number


def joined_answers(parts: Sequence[Answers]) -> Asked:
    """Waits for the answers about parts of a batch, and joins them to those about the whole batch."""
    answers = [part.result() for part in parts]
    samples = [sample for own, _ in answers for sample in own]
    lengths = [len(sample.response.ids) for sample in samples]
    return samples, {name: joined([scored[name] for _, scored in answers], lengths) for name in answers[0][1]}


def _from_main(ask: Callable[[], dict[str, Scored]], **options) -> dict[str, Scored]:
    """Gets the functions' scores in process 0, and returns them in every process."""
    scored = from_main(lambda: {name: vars(scores) for name, scores in ask().items()}, **options)
    return {name: Scored(**values) for name, values in scored.items()}
