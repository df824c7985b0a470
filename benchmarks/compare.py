"""jrlhf against another library, on this machine's CPU: the same weights, prompts, lengths and sampling on both sides.

    python -m benchmarks.compare --peer tunix|trl|trl-grpo|hf
    python -m benchmarks.compare --peer tunix --small    # tiny shapes, to try it out; writes nothing

First an environment is made for the peer, with pinned versions, under ~/.cache/jrlhf/peers (or --venv names one), and
both sides show that they compute the same numbers from the same files. Then processes, one of ours and one of each of
the peer's ways of doing it, take turns: a repeat each, while the others wait. So a repeat of the peer's and the one of
ours beside it are seconds apart, and a machine whose speed drifts is as fast for both; each finds the processor's
caches as the others left them. A pair in which other processes used the machine is dropped. A ratio is the median of a
round's pairs, the peer's time over ours: above 1 we are faster. Every round has processes of its own; one that keeps
too few pairs is void. Writes benchmarks/results/compare-PEER.json, or compare-PEER-CASE.json, with all repeats, also
the dropped ones.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.peers.common import SAMPLES, Job, Shape
from benchmarks.sides import CompareError, Side, environment, take_turns

ROOT = Path(__file__).resolve().parents[1]
SHAPE = Shape(layers=4, embed=256, heads=4, kv_heads=2, head_dim=64, mlp=512, vocab=4096)
SMALL = Shape(layers=2, embed=32, heads=2, kv_heads=1, head_dim=16, mlp=64, vocab=128)
PROMPT, RESPONSE = 16, 64
SETTINGS = "compute.remat=products compute.shared_passes=true rollout.chunk=RESPONSE"  # ours, where not the defaults
LEAST_EQUAL = 0.9  # of greedy responses: two tokens may be almost equally likely
LEAST_KEPT = 0.5  # of the pairs of repeats; with fewer a round is void
TOLERANCE = 1e-4  # between the sides' log-probabilities and values: float32 sums in another order


@dataclass(frozen=True)
class Comparison:
    """One thing that both sides do.

    variants: the peer's ways of doing it, each in a process of its own.
    devices: JAX's, of ours, which share the machine's cores: one where one was the fastest.
    """

    title: str
    case: str
    batch: int
    variants: tuple[str, ...]
    devices: int = 1


@dataclass(frozen=True)
class Peer:
    """Another library: what pip installs, and what it is compared in."""

    requirements: tuple[str, ...]
    comparisons: tuple[Comparison, ...]


TORCH = ("torch==2.13.0", "transformers==5.23.0")
CACHES = ("dynamic", "dynamic compiled", "static compiled")
PEERS = {
    "tunix": Peer(
        ("google-tunix==0.1.7", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8"),
        (
            Comparison("PPO iteration", "ppo", 8, ("reward function", "reward model", "reward function, memory kept")),
            Comparison("GRPO iteration", "grpo", 8, ("reward function", "reward function, memory kept")),
            Comparison("generation", "generate", 8, ("sampler",)),
            Comparison("generation", "generate", 64, ("sampler",)),
        ),
    ),
    "trl": Peer(
        (*TORCH, "trl==1.12.0", "accelerate==1.15.0", "datasets==5.2.0"),
        (Comparison("PPO iteration", "ppo", 8, ("as shipped", "gc.freeze()", "gc.freeze(), memory kept")),),
    ),
    "trl-grpo": Peer(
        (*TORCH, "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"),
        (Comparison("GRPO iteration", "grpo", 8, ("as shipped", "as shipped, memory kept")),),
    ),
    "hf": Peer(
        TORCH,
        (
            Comparison("generation", "generate", 8, CACHES),
            Comparison("generation", "generate", 64, CACHES, devices=2),
        ),
    ),
}


@dataclass(frozen=True)
class Repeats:
    """What one process measured: seconds of each repeat, and CPU seconds that others took of the machine meanwhile.

    peak: the most bytes of memory that the process had, what it needed to start and to compile included.
    """

    seconds: tuple[float, ...]
    others: tuple[float, ...]
    peak: int = 0

    @property
    def quiet(self) -> tuple[bool, ...]:
        """Which of them had the machine to themselves."""
        return tuple(map(is_quiet, self.seconds, self.others))

    @property
    def kept(self) -> tuple[float, ...]:
        """The seconds of those."""
        return tuple(compress(self.seconds, self.quiet))


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of some numbers."""

    least: float
    median: float
    most: float

    @staticmethod
    def of(numbers: Sequence[float]) -> "Spread":
        return Spread(min(numbers), median(numbers), max(numbers))

    def __str__(self) -> str:
        return f"{self.least:.3g} – {self.median:.3g} – {self.most:.3g}"


Round = Mapping[str, Repeats]  # of our process, and of each of the peer's, by variant
OURS = "jrlhf"


def is_quiet(seconds: float, others: float) -> bool:
    """Whether others took so little of the machine that the time counts: clock ticks and the system's own work."""
    return others <= 0.03 + 0.03 * seconds


def pairs(round_: Round, variant: str) -> list[float]:
    """The peer's time over ours, of the repeats beside each other that both had the machine to themselves."""
    ours, theirs = round_[OURS], round_[variant]
    both_quiet = map(all, zip(ours.quiet, theirs.quiet, strict=True))
    return list(compress((b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)), both_quiet))


def valid(rounds: Sequence[Round]) -> list[Round]:
    """Those in which enough pairs are kept, whatever the variant."""

    def enough(round_: Round) -> bool:
        least = LEAST_KEPT * len(round_[OURS].seconds)
        return all(len(pairs(round_, variant)) >= least for variant in round_ if variant != OURS)

    return [round_ for round_ in rounds if enough(round_)]


def ratios(rounds: Sequence[Round], variant: str) -> list[float]:
    """The median of the pairs of each round that is not void."""
    return [median(pairs(round_, variant)) for round_ in valid(rounds)]


def fastest(rounds: Sequence[Round], variants: Sequence[str]) -> str:
    return min(variants, key=lambda variant: median(ratios(rounds, variant)))


def weights_of(shape: Shape) -> tuple[int, int]:
    """Weights that every token is multiplied with: of all layers, and of the unembedding."""
    attention = 2 * shape.embed * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * (attention + 3 * shape.embed * shape.mlp), shape.embed * shape.vocab


def operations(case: str, shape: Shape, batch: int, prompt: int, response: int) -> float:
    """Floating-point operations that the mathematics of a case needs in products with weights.

    2 a weight and token forward, 4 more backward. Generation: all tokens but the last through the layers, response
    tokens through the unembedding. PPO: then actor and reference, with unembedding for responses, and critic and
    reward, without, read all tokens; actor and critic are trained in the same passes, there being a single update.
    GRPO: the samples of a prompt share its prefill; then the actor is trained and the reference reads all tokens.
    A training step: all tokens, forward and backward.
    Attention's own products, a few percent more at these lengths, and whatever an implementation computes twice are
    not counted.
    """
    layers, head = weights_of(shape)
    tokens = batch * (prompt + response)
    if case == "train":
        return 3 * 2 * (layers + head) * tokens
    generation = 2 * layers * (tokens - batch) + 2 * head * batch * response
    if case == "generate":
        return generation
    policy, scalar = 2 * (layers * tokens + head * batch * response), 2 * layers * tokens
    if case == "grpo":
        return generation - 2 * layers * batch * prompt // SAMPLES + (3 + 1) * policy
    return generation + (3 + 1) * policy + (3 + 1) * scalar


def differences(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of log-probabilities and of values, and the part of greedy responses that are equal.

    A greedy response may part from the other's where two tokens are almost equally likely.
    """
    largest = {name: float(np.max(np.abs(ours[name] - theirs[name]))) for name in ("logprobs", "values")}
    return largest | {"greedy_equal": float(np.mean(np.all(ours["greedy"] == theirs["greedy"], axis=1)))}


def show_same(ours: Side, theirs: Side, job: Job) -> dict[str, float]:
    """Lets both sides compute the same numbers.

    Raises:
        CompareError: they differ by more than float32 does.
    """
    for side in (ours, theirs):
        side.run(job)
    deviations = differences(*(np.load(Path(job.directory) / f"{name}.npz") for name in ("ours", "peer")))
    print(
        f"same weights: log-probabilities differ by at most {deviations['logprobs']:.1e}, "
        f"values by {deviations['values']:.1e}, "
        f"{deviations['greedy_equal']:.0%} of greedy responses are equal"
    )
    if not max(deviations["logprobs"], deviations["values"]) <= TOLERANCE or deviations["greedy_equal"] < LEAST_EQUAL:
        raise CompareError(
            f"the sides do not compute the same: {deviations}; differences must be below {TOLERANCE}, and "
            f"{LEAST_EQUAL:.0%} of greedy responses equal"
        )
    return deviations


def alternate(
    ours: Side, theirs: Side, job: Job, variants: Sequence[str], rounds: int, keep_all: bool, versions: dict[str, Any]
) -> list[Round]:
    """Rounds of one process of ours and one of each variant. keep_all: as if nobody else had used the machine."""
    jobs = [(OURS, (ours, job)), *((variant, (theirs, replace(job, variant=variant))) for variant in variants)]
    measured = []
    for number in range(rounds):
        results = take_turns(dict(reversed(jobs) if number % 2 else jobs))  # no side always comes first
        versions |= {"ours": results[OURS]["versions"], "peer": results[variants[0]]["versions"]}
        round_: dict[str, Repeats] = {}
        for name, result in results.items():
            seconds, others = tuple(result["seconds"]), tuple(result["others"])
            round_[name] = Repeats(seconds, (0.0,) * len(others) if keep_all else others, result["peak_bytes"])
            quiet_seconds = round_[name].kept
            middle = f"median {median(quiet_seconds):.4f} s" if quiet_seconds else "none kept"
            print(
                f"  round {number + 1}, {name}: {middle}, {len(quiet_seconds)} of {len(others)} repeats kept",
                flush=True,
            )
        measured.append(round_)
    return measured


def summary(comparison: Comparison, job: Job, rounds: Sequence[Round]) -> dict[str, Any]:
    """Ratios and rates of the rounds that are not void, printed and as the file has them."""
    valid_rounds = valid(rounds)
    record: dict[str, Any] = {
        **asdict(comparison),
        "settings": SETTINGS,
        "prompt": job.prompt,
        "response": job.response,
        "operations": operations(comparison.case, job.shape, job.batch, job.prompt, job.response),
        "rounds": [{name: asdict(repeats) for name, repeats in round_.items()} for round_ in rounds],
        "void_rounds": len(rounds) - len(valid_rounds),
    }
    if len(valid_rounds) < len(rounds):
        print(f"  {len(rounds) - len(valid_rounds)} of {len(rounds)} rounds are void: other processes used the machine")
    if not valid_rounds:
        return record
    work = record["operations"]
    seconds = Spread.of([duration for round_ in valid_rounds for duration in round_[OURS].kept])
    best = fastest(rounds, comparison.variants)
    spreads = {variant: Spread.of(ratios(rounds, variant)) for variant in comparison.variants}
    print(f"  jrlhf: {work / 1e9:.3g} GFLOP, at {work / seconds.median / 1e9:.3g} GFLOP/s")
    for variant, spread in spreads.items():
        mark = "  <- its fastest" if variant == best and len(spreads) > 1 else ""
        print(f"  ratio to {variant}: {spread} over {len(valid_rounds)} rounds{mark}")
    return record | {
        "operations_a_second": work / seconds.median,
        "ratios": {variant: asdict(spread) for variant, spread in spreads.items()},
        "fastest": best,
    }


def compare(name: str, python: Path, *, small: bool, case: str | None, rounds: int, repeats: int) -> dict[str, Any]:
    """All comparisons with one peer, or those of one case, as the file has them.

    Raises:
        CompareError: a process failed, or the sides do not compute the same.
    """
    shape, response = (SMALL, 8) if small else (SHAPE, RESPONSE)
    versions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        # A peer sees `benchmarks` and nothing else of the checkout: our `kernels` is also a package's name.
        (Path(directory) / "benchmarks").symlink_to(ROOT / "benchmarks")
        ours = Side(Path(sys.executable), "ours", ROOT)
        theirs = Side(python, name.replace("-", "_"), Path(directory))
        job = Job("export", directory, shape, 8, PROMPT, response, repeats=repeats)
        ours.run(job)
        comparisons = [comparison for comparison in PEERS[name].comparisons if case in (None, comparison.case)]
        same = show_same(
            ours, theirs, replace(job, case="check", devices=max(comparison.devices for comparison in comparisons))
        )
        results = []
        for comparison in comparisons:
            task = replace(job, case=comparison.case, batch=comparison.batch, devices=comparison.devices)
            print(f"{comparison.title}, {comparison.batch} rows of {task.prompt} + {task.response} tokens", flush=True)
            measured = alternate(ours, theirs, task, comparison.variants, rounds, small, versions)
            results.append(summary(comparison, task, measured))
    return {"shape": asdict(shape), "versions": versions, "same": same, "results": results}


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="jrlhf against another library.")
    parser.add_argument("--peer", choices=tuple(PEERS), required=True)
    parser.add_argument("--venv", type=Path, help="the peer's environment; without it one is made")
    parser.add_argument("--case", choices=("ppo", "grpo", "generate"), help="only these comparisons")
    parser.add_argument("--small", action="store_true", help="tiny shapes, every repeat kept; writes nothing")
    parser.add_argument("--rounds", type=positive, default=3, help="of new processes")
    parser.add_argument("--repeats", type=positive, default=12, help="of each process, after it has warmed up")
    options = parser.parse_args(arguments)
    if options.venv is not None and not (options.venv / "bin" / "python").is_file():
        parser.error(f"--venv {options.venv}: there is no bin/python in it")
    cases = sorted({comparison.case for comparison in PEERS[options.peer].comparisons})
    if options.case not in (None, *cases):
        parser.error(f"--case {options.case}: with {options.peer} only {' and '.join(cases)} can be compared")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 done, 1 a comparison failed or found no quiet machine."""
    options = parse(arguments)
    try:
        python = (
            environment(options.peer, PEERS[options.peer].requirements)
            if options.venv is None
            else (options.venv.absolute() / "bin" / "python")
        )
        counts = {"rounds": options.rounds, "repeats": options.repeats}
        outcome = compare(options.peer, python, small=options.small, case=options.case, **counts)
    except CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.small:
        print("tiny shapes, and no repeat was dropped: that it runs is all that this says")
        return 0
    unmeasured = [result for result in outcome["results"] if "ratios" not in result]
    if unmeasured:
        print("error: other processes used the machine in every round; nothing is written", file=sys.stderr)
        return 1
    several = len({comparison.case for comparison in PEERS[options.peer].comparisons}) > 1
    name = f"{options.peer}-{options.case}" if options.case is not None and several else options.peer
    write_record(options.peer, name, outcome)
    return 0


def write_record(peer: str, name: str, outcome: dict[str, Any]) -> None:
    import jax  # not before: the processes have the machine to themselves

    from benchmarks.records import RESULTS, hardware, provenance, write

    jax.config.update("jax_platforms", "cpu")
    path = RESULTS / f"compare-{name}.json"
    given = provenance()
    versions = outcome.pop("versions") | {"python": given.pop("versions")}
    record = {"benchmark": "compare", "peer": peer, "hardware": hardware(jax.devices()[0])}
    write(path, record | given | {"versions": versions} | outcome)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
