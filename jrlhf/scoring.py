"""The rewards of a run as one: learned models and functions, weighed, each logged by its name."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jrlhf import programs
from jrlhf.batches import pad_rows, put_rows
from jrlhf.clock import Clock
from jrlhf.config import RewardConfig
from jrlhf.context import Context
from jrlhf.data.encode import Ids, encode_answered
from jrlhf.data.types import Example, Text
from jrlhf.errors import UserError
from jrlhf.model import Model
from jrlhf.ppo import Rollout, RunningMoments, shape_scores
from jrlhf.rewards.functions import FunctionReward, RewardFailure
from jrlhf.rewards.types import Sample, Scored, weighted_sum
from jrlhf.roles import Reward
from jrlhf.sampling import Response, read_responses
from jrlhf.sources import is_ours, reward_function, reward_tokenizer
from jrlhf.starts import load_reward, load_reward_adapter

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


@dataclass(frozen=True)
class Batch:
    """The prompts of an iteration: on the mesh (tokens, lengths, row keys), and as examples and rendered texts."""

    arrays: tuple[Array, Array, Array]
    examples: Sequence[Example]
    texts: Sequence[str]
    step: int


class Rewards:
    """The weighted sum of a run's rewards, each of them measured by its name.

    learnt: the reward model that this run trained, if it did.
    """

    moments: RunningMoments  # of the scores so far; assigned by whoever runs the iterations, scoring replaces it
    raw: Float[Array, "B"]  # the sums of the last scoring, before they were shaped

    def __init__(
        self,
        context: Context,
        learnt: Model | None,
        token_parts: Mapping[str, TokenPart],
        text_parts: Mapping[str, TextPart],
    ):
        self.clock = Clock(deadline=context.config.deadline)
        self.learnt, self.token_parts, self.text_parts = learnt, token_parts, text_parts
        self._roles = {
            name: Reward(part.model, context.mesh, context.compute, clock=self.clock)
            for name, part in token_parts.items()
        }
        self._tokenizer, self._mesh = context.task.tokenizer, context.mesh
        self._max_response = context.config.data.max_response
        config = context.config.ppo.scores
        self._shape = jax.jit(partial(shape_scores, config=config, max_response=self._max_response))
        self._metrics: dict[str, float | Array] = {}
        self._models = {name: part for name, part in text_parts.items() if part.on_device}
        self._functions = {name: part for name, part in text_parts.items() if not part.on_device}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")

    def begin(self, rollout: Rollout, batch: Batch) -> Callable[[], Float[Array, "B"] | Float[Array, "B R"]]:
        """Begins to score a rollout: reward models of tokens are handed to the device, functions to their processes.

        Returns what waits for the functions, asks reward models of text, and gives what PPO sees of every row: the sum
        of the rewards, normalised, clipped and penalised as the config says. Of every response token, the first at
        index 0, where a reward scores tokens. To be called before another `begin`, from the same thread.
        """
        self._metrics = {}
        total = self._learned(rollout)
        texts = self._thread.submit(self._read, rollout, batch) if self.text_parts else None

        def scores() -> Float[Array, "B"] | Float[Array, "B R"]:
            raw = total if texts is None else self._add_texts(rollout, batch, total, texts)
            assert raw is not None
            self.raw = raw if raw.ndim == 1 else jnp.sum(raw, axis=1)
            shaped, self.moments, shaping = self._shape(raw, rollout.response_lengths, rollout.finished, self.moments)
            self._metrics |= _range(self.raw) | shaping
            return shaped

        return scores

    def close(self) -> None:
        """Waits for functions that are still at work, whose processes may end then."""
        self._thread.shutdown()

    def _learned(self, rollout: Rollout) -> Float[Array, "B"] | None:
        """The weighted sum of the reward models that read tokens."""
        total = None
        for name, role in self._roles.items():
            scores = role.score(rollout)
            self._metrics |= {f"rewards/{name}/{what}": number for what, number in _spread(scores).items()}
            total = _weighed(total, self.token_parts[name].weight, scores)
        return total

    def _read(self, rollout: Rollout, batch: Batch) -> tuple[list[Sample], dict[str, Scored]]:
        """The rollout as text once it is there, and what the functions say of it. Runs in a thread of its own."""
        samples = to_samples(batch.examples, batch.texts, read_responses(self._tokenizer, jax.device_get(rollout)))
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation("reward_functions"):
            scored = _ask(self._functions, samples, batch.step)
        if scored:
            self.clock.beside("reward_functions", time.perf_counter() - started)
        return samples, scored

    def _add_texts(
        self,
        rollout: Rollout,
        batch: Batch,
        total: Float[Array, "B"] | None,
        texts: Future[tuple[list[Sample], dict[str, Scored]]],
    ) -> Float[Array, "B"] | Float[Array, "B R"]:
        samples, parts = self.clock.run("reward_wait", texts.result)
        if self._models:
            # Here and not in the thread: programs must reach all devices in one order.
            parts = parts | self.clock.run("reward", _ask, self._models, samples, batch.step)
        scored = self._summed(samples, parts)
        for name in self.text_parts:
            self._metrics |= parts[name].metrics(name)
        scores = scored.scores.astype(np.float32)
        if scored.token_scores is not None:
            scores = np.zeros((len(samples), self._max_response), np.float32)
            for row, tokens in zip(scores, scored.token_scores, strict=True):
                row[: len(tokens)] = tokens
        scores = put_rows(scores, self._mesh)
        return scores if total is None else _add(scores, total, rollout.response_lengths)

    def score_samples(self, samples: Sequence[Sample], *, step: int = 0) -> tuple[Scored, dict[str, Scored]]:
        """The weighted sum of the rewards that read text, and each by its name."""
        parts = _ask(self.text_parts, samples, step)
        return self._summed(samples, parts), parts

    def _summed(self, samples: Sequence[Sample], parts: Mapping[str, Scored]) -> Scored:
        lengths = [len(sample.response_ids) for sample in samples]
        return weighted_sum([(part.weight, parts[name]) for name, part in self.text_parts.items()], lengths)

    @property
    def identities(self) -> dict[str, str]:
        """One word for each reward: a run that goes on with another one would not be the same run."""
        read = {name: part.model.fingerprint() for name, part in self.token_parts.items()}
        return read | {name: part.identity for name, part in self.text_parts.items()}

    def metrics(self) -> dict[str, float | Array]:
        """What the last scoring measured."""
        return dict(self._metrics)


@contextmanager
def open_rewards(context: Context, policy: Model, learnt: Model | None) -> Iterator[Rewards]:
    """The run's rewards; their processes end with the block.

    policy: whose base a reward's adapter is put on.

    Raises:
        UserError: a model or a function that cannot be used.
    """
    config, task = context.config, context.task
    tokens = {} if learnt is None else {LEARNT: TokenPart(config.reward_model.weight, learnt)}
    texts: dict[str, TextPart] = {}
    with ExitStack() as stack:
        for index, reward in enumerate(config.rewards):
            key = f"rewards[{index}]"
            if reward.adapter is not None:
                model = load_reward_adapter(context, policy, reward.adapter, f"{key}.adapter")
                tokens[reward.name] = TokenPart(reward.weight, model)
            elif reward.model is not None:
                model = TextReward(context, reward, f"{key}.model")
                texts[reward.name] = TextPart(reward.weight, model.score, model.fingerprint(), on_device=True)
            else:
                function = stack.enter_context(
                    reward_function(reward, config.seed, context.run.path / f"reward-{reward.name}.log")
                )
                context.console.line(function.describe())
                if task.prompts is not None:
                    function.check_columns(task.prompts.examples[0].columns)
                texts[reward.name] = TextPart(reward.weight, partial(_call, function), function.fingerprint)
        rewards = Rewards(context, learnt, tokens, texts)
        stack.callback(rewards.close)
        yield rewards


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
    """

    def __init__(self, context: Context, reward: RewardConfig, key: str):
        assert reward.model is not None
        self._context, self._key = context, f"{key}={reward.model}"
        self._model = load_reward(context, reward.model, key)
        self._tokenizer = reward_tokenizer(reward.model, key, self._model.config)
        self._cut = is_ours(reward.model, key)
        self._name, self._on_failure = reward.name, reward.on_failure
        devices = context.mesh.size
        self._batch = -(-reward.batch // devices) * devices
        self._score = programs.score_sequences(self._model.architecture, context.mesh, context.compute)

    def score(self, samples: Sequence[Sample], step: int = 0) -> Scored:
        """The model's score of every sample, read at its last token."""
        sequences = [self._encode(sample) for sample in samples]
        width = _power_of_two(max(map(len, sequences)), self._model.config.max_positions)
        scores = []
        for start in range(0, len(sequences), self._batch):
            chunk = sequences[start : start + self._batch]
            whole = chunk + [chunk[0]] * (self._batch - len(chunk))  # one shape a width
            tokens, lengths = put_rows(pad_rows(whole, width), self._context.mesh)
            scores.append(np.asarray(self._score(self._model.params, tokens, lengths))[: len(chunk)])
        return self._checked(np.concatenate(scores).astype(np.float64), samples)

    def fingerprint(self) -> str:
        """One word for its weights."""
        return self._model.fingerprint()

    def _checked(self, scores: np.ndarray, samples: Sequence[Sample]) -> Scored:
        bad = np.flatnonzero(~np.isfinite(scores))
        if not len(bad):
            return Scored(scores)
        if self._on_failure is None:
            sample = samples[bad[0]]
            raise RewardFailure(
                f"reward {self._name} ({self._key}) gave {scores[bad[0]]} to {sample.response_text[:200]!r}: use "
                "another model, or give on_failure a score to go on with"
            )
        scores[bad] = self._on_failure
        return Scored(scores, failures=Counter({"nan": len(bad)}))

    def _encode(self, sample: Sample) -> Ids:
        try:
            ids = encode_answered(
                self._tokenizer, sample.prompt, sample.completion, finished=sample.finished, cut=self._cut
            )
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


def _power_of_two(length: int, most: int) -> int:
    return min(max(64, 1 << (length - 1).bit_length()), most)


@jax.jit
def _spread(scores: Float[Array, "B"]) -> dict[str, Array]:
    return {"mean": jnp.mean(scores), "std": jnp.std(scores)}


@jax.jit
def _range(scores: Float[Array, "B"]) -> dict[str, Array]:
    """verl's critic/score is what the rewards gave, whatever was made of it."""
    found = {"mean": jnp.mean(scores), "max": jnp.max(scores), "min": jnp.min(scores)}
    return {f"critic/score/{what}": number for what, number in found.items()}


def _weighed(total: Array | None, weight: float, scores: Float[Array, "B"]) -> Array:
    if total is None and weight == 1:
        return scores
    return _scaled(weight, scores) if total is None else _scaled(weight, scores, total)


@jax.jit
def _scaled(weight: float, scores: Array, total: Array | float = 0.0) -> Array:
    return total + weight * scores


@jax.jit
def _add(scores: Array, total: Float[Array, "B"], response_lengths: Int[Array, "B"]) -> Array:
    """`scores` of rows or of response tokens, with those of whole rows, which are the last token's."""
    if scores.ndim == 1:
        return scores + total
    last = jnp.arange(scores.shape[1])[None, :] == response_lengths[:, None] - 1
    return scores + jnp.where(last, total[:, None], 0)
