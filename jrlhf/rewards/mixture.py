"""The rewards of a run as one: learned models and functions, weighed, each logged by its name."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jrlhf.config.schema import RewardConfig
from jrlhf.data.batches import Batch, pad_rows, put_rows
from jrlhf.data.encode import Ids, encode_answered, tools_of
from jrlhf.data.types import Example, Text
from jrlhf.errors import UserError
from jrlhf.meshes import gathered, to_host, transfer
from jrlhf.meshes.graph import Kind
from jrlhf.models.params import Params
from jrlhf.ppo import Rollout, RunningMoments, ScoreConfig, shape_scores
from jrlhf.ppo.masked import masked_extremes
from jrlhf.ppo.shaping import on_last_token
from jrlhf.rewards.functions import FunctionReward, RewardFailure, reward_function
from jrlhf.rewards.text_model import is_ours, reward_tokenizer
from jrlhf.rewards.types import Sample, Scored, weighted_sum
from jrlhf.roles import compiled
from jrlhf.roles.critic import Reward
from jrlhf.roles.model import Model
from jrlhf.roles.placement import Pending, RolePlacement, call
from jrlhf.roles.sampling import Response, read_responses
from jrlhf.run.clock import Clock, may_deadlock
from jrlhf.run.processes import from_main, is_main
from jrlhf.stages.context import Context

Metrics = dict[str, float | Array]
Scores = Float[Array, "B"] | Float[Array, "B R"]
LEARNT = "reward_model"  # the name of the reward model that the run itself trains


@dataclass(frozen=True)
class TextPart:
    """A reward that reads text: (samples, step) -> scores."""

    weight: float
    score: Callable[[Sequence[Sample], int], Scored]
    identity: str  # one word for what it is: of a model's weights, of a function's file
    on_device: bool = False  # a model on the mesh, rather than a function in its own processes


@dataclass(frozen=True)
class TokenPart:
    """A reward model that reads the actor's tokens as they are."""

    weight: float
    model: Model
    identity: str  # one word for its weights, wherever they lie


class Combined(NamedTuple):
    """What a scoring computes on the devices."""

    shaped: Scores
    moments: RunningMoments  # with these scores in them
    raw: Float[Array, "B"]  # what the rewards gave each row, before it was shaped: verl's critic/score
    learned: dict[str, Array]  # what each reward model says
    extremes: dict[str, Array]  # of the sums
    shaping: dict[str, Array]


class Rewards:
    """The weighted sum of a run's rewards, each of them measured by its name; or of its costs.

    learnt: the reward model that this run trained, if it did, where it was trained until `settle`.
    where: its calls run, and its models live; by default on the run's mesh.
    kind: names metrics: `rewards/NAME/mean` or `costs/NAME/mean`.
    """

    moments: RunningMoments  # of the scores so far; assigned by whoever runs the iterations, scoring replaces it
    raw: Float[Array, "B"]  # the sums of the last scoring, before they were shaped

    def __init__(
        self,
        context: Context,
        learnt: Model | None,
        token_parts: Mapping[str, TokenPart],
        text_parts: Mapping[str, TextPart],
        *,
        shaping: ScoreConfig,
        clock: Clock,
        kind: Literal["rewards", "costs"] = "rewards",
        where: RolePlacement | None = None,
    ):
        assert token_parts or text_parts, "nothing would score"
        self.clock, self._kind = clock, kind
        self.placement = RolePlacement.of(context.mesh) if where is None else where
        self.learnt, self.token_parts, self.text_parts = learnt, token_parts, text_parts
        self._roles = {
            name: Reward(part.model, self.placement, context.compute, clock=self.clock)
            for name, part in token_parts.items()
        }
        self._tokenizer = context.task.tokenizer
        self._max_response, self._deadline = context.config.data.max_response, context.config.deadline
        weights = {name: part.weight for name, part in token_parts.items()}
        shape = partial(shape_scores, config=shaping, max_response=self._max_response)
        self._combine = jax.jit(partial(combine, shape, kind, weights))
        self._metrics: Metrics = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")

    @property
    def _models(self) -> dict[str, TextPart]:
        return {name: part for name, part in self.text_parts.items() if part.on_device}

    @property
    def _functions(self) -> dict[str, TextPart]:
        return {name: part for name, part in self.text_parts.items() if not part.on_device}

    def settle(self) -> None:
        """Nothing is to be made of the learnt model any more: from now on it is only where its calls run."""
        if self.learnt is not None and self.learnt is not (kept := self.token_parts[LEARNT].model):
            for leaf in jax.tree.leaves(self.learnt.params):
                leaf.delete()
            self.learnt = kept

    def start(self, moments: RunningMoments) -> None:
        """An iteration begins: what was measured is forgotten."""
        self.moments, self._metrics = moments, {}

    @call("infer", "scores")
    def score(self, rollout: Rollout, prompts: Batch) -> Pending:
        """Begins to score a rollout: reward models of tokens are handed to the device, functions to their processes.

        Its result waits for the functions, asks reward models of text, and is what the algorithm sees of every row: the
        sum of the rewards, normalised, clipped and penalised as the config says. Of every response token, the first at
        index 0, where a reward scores tokens. All calls are to be made from the same thread.
        """
        begun = self._begin("score", rollout, prompts)

        def scores() -> Scores:
            combined, texts = begun()
            self.moments, self.raw = combined.moments, combined.raw
            said = _named("critic/score", combined.extremes) | combined.shaping
            said = said if self._kind == "rewards" else _named("cost", combined.extremes)
            self._note(texts | combined.learned | said)
            return combined.shaped

        return Pending(scores)

    @call("infer", "baselines")
    def score_baseline(self, rollout: Rollout, prompts: Batch) -> Pending:
        """As `score`, of responses that nothing learns from: the baseline of others to the same prompts."""
        begun = self._begin("score_baseline", rollout, prompts)

        def scores() -> Scores:
            combined, texts = begun()
            failures = {name: number for name, number in texts.items() if "/failures" in name}
            self._note(failures | _named("critic/baseline", combined.extremes))
            return combined.shaped

        return Pending(scores)

    def prefetch(self, kind: Kind) -> None:
        """Begins to bring the reward models of tokens that sleep."""
        for role in self._roles.values():
            role.prefetch(kind)

    def restate(self, raw: Float[Array, "B"]) -> None:
        """The batch is made of several scorings: these are its sums, before they were shaped.

        Each reward's own mean stays that of the last scoring.
        """
        self.raw = raw
        self._note(_named("critic/score", _extremes(raw)))

    def close(self) -> None:
        """Waits for functions that are still at work, whose processes may end then."""
        self._thread.shutdown()

    def _begin(self, method: str, rollout: Rollout, prompts: Batch) -> Callable[[], tuple[Combined, Metrics]]:
        """Begins to score; returns what gives the scores, and what the rewards that read text say of them."""
        learned = {name: role.score(rollout, method) for name, role in self._roles.items()}
        mesh, read = self.placement[method].mesh, None
        if self.text_parts:
            # Gathered here and not in the thread: programs must reach all devices in one order.
            read = self._thread.submit(self._read, gathered(rollout), prompts)

        def combined() -> tuple[Combined, Metrics]:
            texts, said = (None, {}) if read is None else self._of_texts(read, prompts, mesh)
            moments = transfer(self.moments, mesh)
            return self._combine(learned, texts, rollout.response_lengths, rollout.finished, moments), said

        return combined

    def _note(self, measured: Mapping[str, float | Array]) -> None:
        """Adds what a scoring measured. Failures are counted over all scorings of an iteration."""
        for name, number in measured.items():
            counted = "/failures" in name and name in self._metrics
            self._metrics[name] = self._metrics[name] + number if counted else number

    def _read(self, rollout: Rollout, batch: Batch) -> tuple[list[Sample], dict[str, Scored]]:
        """The rollout as text once it is there, and what the functions say of it. Runs in a thread of its own."""
        samples = to_samples(batch.examples, batch.texts, read_responses(self._tokenizer, jax.device_get(rollout)))
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation("reward_functions"):
            scored = _ask(self._functions, samples, batch.step) if is_main() else {}
        if scored:
            self.clock.beside(f"{self._kind.removesuffix('s')}_functions", time.perf_counter() - started)
        return samples, scored

    def _of_texts(
        self, read: Future[tuple[list[Sample], dict[str, Scored]]], batch: Batch, mesh: Mesh
    ) -> tuple[Scores, Metrics]:
        """The weighted sum of the rewards that read text, once they are there, and what each of them says."""
        parts = self.clock.run("reward_wait", from_main, lambda: read.result()[1], seconds=self._deadline)
        samples, _ = read.result()
        if self._models:
            parts = parts | self.clock.run("reward", _ask, self._models, samples, batch.step)
        scored = self._summed(samples, parts)
        measured: Metrics = {}
        for name in self.text_parts:
            measured |= parts[name].metrics(name, self._kind)
        scores = scored.scores.astype(np.float32)
        if scored.token_scores is not None:
            scores = np.zeros((len(samples), self._max_response), np.float32)
            for row, tokens in zip(scores, scored.token_scores, strict=True):
                row[: len(tokens)] = tokens
        return put_rows(scores, mesh), measured

    def score_samples(self, samples: Sequence[Sample], *, step: int = 0) -> tuple[Scored, dict[str, Scored]]:
        """The weighted sum of the rewards that read text, and each by its name."""
        said = from_main(lambda: _ask(self._functions, samples, step))
        said |= _ask(self._models, samples, step)
        parts = {name: said[name] for name in self.text_parts}
        return self._summed(samples, parts), parts

    def _summed(self, samples: Sequence[Sample], parts: Mapping[str, Scored]) -> Scored:
        lengths = [len(sample.response_ids) for sample in samples]
        return weighted_sum([(part.weight, parts[name]) for name, part in self.text_parts.items()], lengths)

    @property
    def identities(self) -> dict[str, str]:
        """One word for each reward: a run that goes on with another one would not be the same run."""
        return {name: part.identity for parts in (self.token_parts, self.text_parts) for name, part in parts.items()}

    def metrics(self) -> Metrics:
        """What was measured since the iteration began."""
        return dict(self._metrics)


@contextmanager
def open_rewards(context: Context, policy: Model, learnt: Model | None) -> Iterator[Rewards]:
    """The run's rewards; their processes end with the block.

    policy: whose base a reward's adapter is put on.

    Raises:
        UserError: a model or a function that cannot be used.
    """
    config, where = context.config, context.placement("reward")
    tokens: dict[str, TokenPart] = {}
    if learnt is not None:
        kept = where.store(learnt, donate=False)
        tokens[LEARNT] = TokenPart(config.reward_model.weight, kept, learnt.fingerprint())
    clock = Clock(deadline=config.deadline)
    with _opened(context, policy, "rewards", config.rewards, where) as (more, texts):
        rewards = Rewards(context, learnt, tokens | more, texts, shaping=config.rl.scores, clock=clock, where=where)
        try:
            yield rewards
        finally:
            rewards.close()


@contextmanager
def open_costs(context: Context, policy: Model, clock: Clock) -> Iterator[Rewards | None]:
    """The run's costs likewise, unshaped; None where it has none."""
    if not context.config.costs:
        yield None
        return
    where = context.placement("cost")
    with _opened(context, policy, "costs", context.config.costs, where) as (tokens, texts):
        costs = Rewards(context, None, tokens, texts, shaping=ScoreConfig(), clock=clock, kind="costs", where=where)
        try:
            yield costs
        finally:
            costs.close()


@contextmanager
def _opened(
    context: Context, policy: Model, section: str, wanted: Sequence[RewardConfig], where: RolePlacement
) -> Iterator[tuple[dict[str, TokenPart], dict[str, TextPart]]]:
    """The parts of a section of the config."""
    config = context.config
    tokens: dict[str, TokenPart] = {}
    texts: dict[str, TextPart] = {}
    with ExitStack() as stack:
        for index, reward in enumerate(wanted):
            key = f"{section}[{index}]"
            if reward.adapter is not None:
                model = context.initial.reward_adapter(policy, reward.adapter, f"{key}.adapter")
                tokens[reward.name] = TokenPart(reward.weight, where.store(model), model.fingerprint())
            elif reward.model is not None:
                model = TextReward(context, reward, f"{key}.model", where)
                texts[reward.name] = TextPart(reward.weight, model.score, model.identity, on_device=True)
            else:
                kind = "reward" if section == "rewards" else "cost"
                log = context.run.path / f"{kind}-{reward.name}.log"
                function = reward_function(reward, config.seed, log, kind=kind)
                identity = from_main(partial(_begin, context, stack, function))
                texts[reward.name] = TextPart(reward.weight, partial(_call, function), identity)
        yield tokens, texts


def _begin(context: Context, stack: ExitStack, function: FunctionReward) -> str:
    """Starts a function's processes, which end with the stack; one word for what it is."""
    stack.enter_context(function)
    context.console.line(function.describe())
    if context.task.prompts is not None:
        function.check_columns(context.task.prompts.examples[0].columns)
    return function.fingerprint


def to_samples(examples: Sequence[Example], texts: Sequence[str], responses: Sequence[Response]) -> list[Sample]:
    """Responses with all that a reward may want to know of their prompts."""
    return [
        Sample(
            prompt=example.prompt,
            prompt_text=text,
            completion=_completion(example.prompt, response.text),
            response_text=response.text,
            response_ids=response.ids,
            finished=response.finished,
            source=example.source,
            columns=example.columns,
        )
        for example, text, response in zip(examples, texts, responses, strict=True)
    ]


class TextReward:
    """A frozen reward model with a tokenizer of its own: text is tokenised anew for it, as `encode_answered` says.

    A score that is not finite is a failure, as a function's is.

    identity: one word for its weights.
    """

    def __init__(self, context: Context, reward: RewardConfig, key: str, where: RolePlacement | None = None):
        assert reward.model is not None
        places = RolePlacement.of(context.mesh) if where is None else where
        model = context.initial.reward(reward.model, key)
        self._key, self.identity, self._model = f"{key}={reward.model}", model.fingerprint(), places.store(model)
        self._tokenizer = reward_tokenizer(reward.model, key, self._model.config)
        self._cut = is_ours(reward.model, key)
        kind = key.partition("s[")[0]  # rewards[0].model, costs[0].model
        self._called, self._on_failure = f"{kind} {reward.name}", reward.on_failure
        _, self._mesh, compute = places.home.resolve(self._model.architecture, context.compute)
        divisor = self._mesh.size * places.home.parts
        self._batch = -(-reward.batch // divisor) * divisor
        usual = context.config.data.max_prompt + context.config.data.max_response
        self._widths = _widths(usual, self._model.config.max_positions)
        self._warm = False
        self._score = compiled.score_sequences(self._model.architecture, self._mesh, compute)

    def score(self, samples: Sequence[Sample], step: int = 0) -> Scored:
        """The model's score of every sample, read at its last token."""
        sequences = [self._encode(sample) for sample in samples]
        params = self._model.onloaded().params
        if not self._warm:  # compiles what later texts may need, too
            for each in self._widths:
                self._scores(params, [sequences[0][:1]], each)
            self._warm = True
        longest = _power_of_two(max(map(len, sequences)), self._model.config.max_positions)
        width = max(longest, self._widths[0])
        starts = range(0, len(sequences), self._batch)
        scores = [self._scores(params, sequences[start : start + self._batch], width) for start in starts]
        return self._checked(np.concatenate(to_host(scores))[: len(samples)].astype(np.float64), samples)

    def _scores(self, params: Params, sequences: Sequence[Ids], width: int) -> Float[Array, "batch"]:
        """Those of a batch, and more behind it where it is not full: one shape a width."""
        whole = [*sequences, *[sequences[0]] * (self._batch - len(sequences))]
        with jax.set_mesh(self._mesh):
            scores = self._score(params, *put_rows(pad_rows(whole, width), self._mesh))
        return jax.block_until_ready(scores) if may_deadlock() else scores

    def _checked(self, scores: np.ndarray, samples: Sequence[Sample]) -> Scored:
        bad = np.flatnonzero(~np.isfinite(scores))
        if not len(bad):
            return Scored(scores)
        if self._on_failure is None:
            sample = samples[bad[0]]
            raise RewardFailure(
                f"{self._called} ({self._key}) gave {scores[bad[0]]} to {sample.response_text[:200]!r}: use "
                "another model, or give on_failure a score to go on with"
            )
        scores[bad] = self._on_failure
        return Scored(scores, failures=Counter({"nan": len(bad)}))

    def _encode(self, sample: Sample) -> Ids:
        try:
            how = {"tools": tools_of(sample.columns), "finished": sample.finished, "cut": self._cut}
            ids = encode_answered(self._tokenizer, sample.prompt, sample.completion, **how)
        except UserError as error:
            raise UserError(f"{self._key}: {error}") from error
        if len(ids) > self._model.config.max_positions:
            raise UserError(
                f"{self._key} reads {self._model.config.max_positions} tokens at most, and a prompt with its answer "
                f"has {len(ids)} for it: lower data.max_prompt or data.max_response"
            )
        return ids


def _ask(parts: Mapping[str, TextPart], samples: Sequence[Sample], step: int) -> dict[str, Scored]:
    return {name: part.score(samples, step) for name, part in parts.items()}


def _call(function: FunctionReward, samples: Sequence[Sample], step: int) -> Scored:
    return function.score(samples, step=step)


def _completion(prompt: Text, response: str) -> Text:
    return response if isinstance(prompt, str) else ({"role": "assistant", "content": response},)


def _widths(usual: int, most: int) -> tuple[int, ...]:
    """To so many tokens texts are padded that are no longer than is usual. (Another tokenizer may make one longer.)"""
    return tuple(sorted({_power_of_two(length, most) for length in (usual // 4, usual // 2, usual)}))


def _power_of_two(length: int, most: int) -> int:
    return min(max(64, 1 << (length - 1).bit_length()), most)


def combine(
    shape: Callable[..., tuple[Scores, RunningMoments, dict[str, Array]]],
    kind: str,
    weights: Mapping[str, float],
    learned: Mapping[str, Float[Array, "B"]],
    texts: Scores | None,
    response_lengths: Int[Array, "B"],
    finished: Bool[Array, "B"],
    moments: RunningMoments,
) -> Combined:
    """What reward models say of rows, weighed and added to what is said of the texts, and shaped."""
    rows = sum((weights[name] * scores for name, scores in learned.items()), jnp.zeros_like(finished, jnp.float32))
    if texts is None:
        scores = rows
    elif texts.ndim == 1:
        scores = texts + rows
    else:
        scores = texts + on_last_token(rows, response_lengths, texts.shape[1])
    raw = scores if scores.ndim == 1 else jnp.sum(scores, axis=1)
    shaped, moments, shaping = shape(scores, response_lengths, finished, moments)
    measured = {}
    for name, each in learned.items():
        measured |= _named(f"{kind}/{name}", {"mean": jnp.mean(each), "std": jnp.std(each)})
    return Combined(shaped, moments, raw, measured, _extremes(raw), shaping)


@jax.jit
def _extremes(scores: Float[Array, "B"]) -> dict[str, Array]:
    """Of the finite ones; and how many others there are."""
    finite = jnp.isfinite(scores)
    return masked_extremes(scores, finite) | {"nonfinite": jnp.sum(~finite, dtype=jnp.float32)}


def _named(name: str, numbers: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{name}/{what}": number for what, number in numbers.items()}
