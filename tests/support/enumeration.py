"""Every response of a small problem at once, in NumPy: optima, fixed points and expected gradients without sampling.

Independent of the code under test: it shares no line with it and knows the algorithms by their formulas only. A policy
is a table of logits [C, K, V]: C prompts, K nodes (the prefixes of a response), V tokens. S responses, L their limit.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations_with_replacement, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Prompts with all their responses. Token 0 ends a response where `ends`, and fills what follows in any case."""

    prompts: int
    vocab: int
    limit: int  # of response tokens
    ends: bool  # False: every response has `limit` tokens
    reference: Floats  # [C, K, V] logits
    rewards: Floats  # [C, S]
    costs: Floats  # [C, S]

    @classmethod
    def random(cls, *, prompts: int, vocab: int, limit: int, ends: bool, seed: int) -> "Problem":
        """Rewards and costs uniform in [0, 1], the reference's logits standard normal."""
        rng = np.random.default_rng(seed)
        shape = cls(prompts, vocab, limit, ends, *(np.zeros(0),) * 3)
        rewards = rng.uniform(size=(prompts, len(shape.responses)))
        costs = rng.uniform(size=rewards.shape)
        reference = rng.normal(size=(prompts, shape.nodes, vocab))
        return cls(prompts, vocab, limit, ends, reference, rewards, costs)

    @property
    def nodes(self) -> int:
        return sum(self.vocab**t for t in range(self.limit))

    @cached_property
    def responses(self) -> NDArray[np.int64]:
        """[S, L]"""
        every = product(range(self.vocab), repeat=self.limit)
        return np.array([r for r in every if not self.ends or not any(r[r.index(0) :] if 0 in r else ())])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[S], the end counted."""
        return np.array([list(r).index(0) + 1 if self.ends and 0 in r else self.limit for r in self.responses])

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        return np.arange(self.limit) < self.lengths[:, None]

    @cached_property
    def at(self) -> NDArray[np.int64]:
        """[S, L]: the node in which each token is chosen."""
        nodes = np.zeros_like(self.responses)
        for s, response in enumerate(self.responses):
            first, code = 0, 0
            for t, token in enumerate(response):
                nodes[s, t] = first + code
                first, code = first + self.vocab**t, code * self.vocab + token
        return nodes

    def logprobs(self, logits: Floats) -> Floats:
        """[C, S, L]: of each token; 0 after the end."""
        table = _log_softmax(logits)[:, self.at, self.responses]
        return np.where(self.mask, table, 0)

    def probabilities(self, logits: Floats) -> Floats:
        """[C, S]"""
        return np.exp(self.logprobs(logits).sum(-1))

    @cached_property
    def choices(self) -> Floats:
        """[S, L, K, V]: 1 where the response's token t is v, chosen in node k."""
        return np.eye(self.nodes)[self.at][..., None] * np.eye(self.vocab)[self.responses][..., None, :]

    def slopes(self, logits: Floats) -> Floats:
        """[C, S, L, K, V]: the derivative of each token's log-probability by the prompt's logits."""
        policy = np.exp(_log_softmax(logits))[:, self.at]
        slopes = self.choices - np.eye(self.nodes)[self.at][None, ..., None] * policy[..., None, :]
        return np.where(self.mask[None, :, :, None, None], slopes, 0)

    def optimum(self, beta: float, rewards: Floats | None = None) -> Floats:
        """[C, S]: argmax of E[r] - beta KL(pi, ref) is ref exp(r / beta), normalised."""
        tilted = self.probabilities(self.reference) * np.exp((self.rewards if rewards is None else rewards) / beta)
        return tilted / tilted.sum(1, keepdims=True)

    def logits(self, probabilities: Floats) -> Floats:
        """The table whose responses have these probabilities [C, S]: each token's is its share of its node's mass."""
        mass = np.zeros((self.prompts, self.nodes, self.vocab))
        for s, t in zip(*np.nonzero(self.mask), strict=True):
            mass[:, self.at[s, t], self.responses[s, t]] += probabilities[:, s]
        return np.log(np.maximum(mass, 1e-300)) - np.log(np.maximum(mass.sum(-1, keepdims=True), 1e-300))


def total_variation(p: Floats, q: Floats) -> float:
    """Half the L1 distance of the responses' distributions, of the prompt where it is largest."""
    return float(np.max(np.abs(p - q).sum(-1)) / 2)


@dataclass(frozen=True)
class Estimator:
    """An algorithm's expected update, by its formulas.

    sum_s p(s) sum_t w(s, t) [advantage(s) - slope of the KL term] grad log pi(token t of s)
    """

    beta: float
    kl: Literal["reward", "k2", "k3"]
    samples: int | None = None  # of a group; None: an exact baseline
    baseline: Literal["mean", "leave-one-out"] = "mean"
    divide_by_std: bool = False
    weights: Literal["sequence", "length"] = "sequence"  # a response's tokens weigh 1, or 1 / its length

    def gradient(self, problem: Problem, logits: Floats, rewards: Floats | None = None) -> Floats:
        """[C, K, V], summed over a prompt's responses."""
        p, slopes = problem.probabilities(logits), problem.slopes(logits)
        d = problem.logprobs(logits) - problem.logprobs(problem.reference)
        outcome = problem.rewards if rewards is None else rewards
        if self.kl == "reward":
            outcome = outcome - self.beta * d.sum(-1)
        advantages = self.advantages(p, outcome)
        weights = problem.mask / problem.lengths[:, None] if self.weights == "length" else problem.mask
        penalty = np.zeros_like(d)
        if self.kl == "k2":
            penalty = d
        if self.kl == "k3":
            ratio = np.exp(np.minimum(-d, 20))
            penalty = np.where(ratio + d - 1 < 10, 1 - ratio, 0)  # k3 is at most 10
        coefficients = p[..., None] * weights * (advantages[..., None] - self.beta * penalty)
        return np.einsum("cst,cstkv->ckv", coefficients, slopes)

    def advantages(self, p: Floats, outcome: Floats) -> Floats:
        """[C, S]: a response's advantage, averaged over the other responses of its group."""
        if self.samples is None:
            return outcome - (p * outcome).sum(1, keepdims=True)
        others, orders = _others(p.shape[1], self.samples)
        own = np.arange(p.shape[1])[:, None, None]
        shape = (p.shape[1], *others.shape)
        groups = np.concatenate(
            [np.broadcast_to(own, (*shape[:2], 1)), np.broadcast_to(others, shape)], -1
        )  # [S, G, n]
        advantages = self.group(outcome[:, groups])[..., 0]
        return np.einsum("cg,csg->cs", orders * p[:, others].prod(-1), advantages)

    def group(self, outcomes: Floats) -> Floats:
        """[..., n] -> [..., n]: advantages in a group."""
        n = outcomes.shape[-1]
        mean = outcomes.mean(-1, keepdims=True)
        centred = outcomes - mean if self.baseline == "mean" else (outcomes - mean) * n / (n - 1)
        return centred / (outcomes.std(-1, ddof=1, keepdims=True) + 1e-6) if self.divide_by_std else centred

    def fixed_point(self, problem: Problem) -> Floats:
        """[C, S]: the policy where the expected update is zero, reached from the reference.

        By mirror ascent: the update of an action's logit divided by the action's probability. There may be other zeros
        (a policy that is sure of one response has no gradient either), which no training comes to.
        """
        logits = _log_softmax(problem.reference)
        reached = np.unique(problem.at[problem.mask])
        for _ in range(20_000):
            mass = np.einsum("cs,st,stkv->ckv", problem.probabilities(logits), problem.mask, problem.choices)
            gradient = self.gradient(problem, logits)[:, reached]
            direction = gradient / mass[:, reached] / self.beta
            if np.max(np.abs(direction)) < 1e-9:
                return problem.probabilities(logits)
            logits[:, reached] += np.clip(0.2 * direction, -0.2, 0.2)
            logits = _log_softmax(logits)
        raise AssertionError(f"no fixed point: the direction is {np.max(np.abs(direction))} still")


def numerical_gradient(f: Callable[[Floats], float], x: Floats, step: float = 1e-5) -> Floats:
    """Central differences of f at x."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        unit = np.zeros_like(x)
        unit[index] = step
        gradient[index] = (f(x + unit) - f(x - unit)) / (2 * step)
    return gradient


def objective(problem: Problem, logits: Floats, beta: float) -> float:
    """The sum over prompts of E[r] - beta KL(pi, ref)."""
    p, q = problem.probabilities(logits), problem.probabilities(problem.reference)
    return float(np.sum(p * (problem.rewards - beta * np.log(p / q))))


@cache
def _others(responses: int, samples: int) -> tuple[NDArray[np.int64], Floats]:
    """[G, n - 1] unordered groups of the other responses, and [G] in how many orders each may come."""
    groups = list(combinations_with_replacement(range(responses), samples - 1))
    repeats = [math.prod(map(math.factorial, Counter(group).values())) for group in groups]
    return np.array(groups, np.int64).reshape(len(groups), -1), math.factorial(samples - 1) / np.array(repeats)


def _log_softmax(x: Floats) -> Floats:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
