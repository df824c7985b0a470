"""The speed-up of scoring rows while other rows of the rollout decode, on other devices or on those that become free.

    python -m benchmarks.interstage

writes `results/interstage.json`. PPO on four simulated devices, two of which decode; the others have the calls of
actor, reference and critic, and a process has the reward function. Lengths are lognormal with sigma 1. Chunks of decode
steps, calls and the function take the time of calibrated sleeps, since two cores have no parallel speed to show: the
figures say what the program overlaps, not how fast a model is. Both runs score the same tiles; the baseline begins with
the first one when all rows are drawn. `predicted` is what `simulate` says of the same lengths and sleeps.

`moves` are two runs in which all devices decode, and two of them have the calls: rows stay, or the last ones move as
`rollout.last_groups=auto` chooses. `predicted` is what the planner's own simulator says.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.records import hardware, output_path, provenance, write
from jrlhf.config import load_config
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import Schedule
from jrlhf.models.generation.continuous import ContinuousBatch, RowProgress, Weights
from jrlhf.models.generation.occupancy import EMPTY, LastRows
from jrlhf.planning.fusion import choices
from jrlhf.planning.fusion.last_rows import Rollouts, Scoring, decode, finish
from jrlhf.roles import open_rollout
from jrlhf.roles.actor import Actor
from jrlhf.roles.open_rollout import OpenRollout
from jrlhf.roles.role import TrainedRole
from jrlhf.train import main as train

ROWS, TILE, LIMIT, CHUNK = 32, 4, 64, 4
MEDIAN = 10  # tokens of a response
STEP, CALL, FUNCTION = 0.1, 0.1, 0.2  # seconds of a decode step; of a call on a tile; of the function on a tile
DEVICES, SCORING = Slice(0, 4), Slice(2, 2)  # that decode, and that score, where the last rows move
CALLS = 3  # on the device that scores: the old log-probabilities, those of the reference, and the values
ITERATIONS, FIRST = 6, 2  # of a run, and those in which programs are compiled, of the move in the second one
SETTINGS = (
    "device.simulated=4 mesh.data=4 mesh.fsdp=1 compute.remat=full stages=[sft,ppo] "
    "model.embed=16 model.layers=2 model.heads=2 model.kv_heads=1 model.head_dim=8 model.mlp=32 model.max_positions=80 "
    f"data.digits=1 data.problems=60 data.heldout_rows=8 data.max_prompt=4 data.max_response={LIMIT} "
    f"sampling.min_new_tokens={LIMIT} sft.steps=2 sft.batch=8 sft.warmup=1 evaluation.prompts=4 "
    f"rollout.chunk={CHUNK} rollout.buckets=1 rollout.lengths=1 compute.score_rows={TILE} ppo.iterations={ITERATIONS} "
    f"ppo.save_every=100 ppo.rollout_batch={ROWS} ppo.actor.warmup=0 ppo.critic.warmup=0"
).split()


def lengths_of(iteration: int) -> np.ndarray:
    """The tokens of each row's response, in whole chunks."""
    drawn = MEDIAN * np.random.default_rng(iteration).lognormal(0, 1, ROWS)
    return np.clip(np.ceil(drawn / CHUNK) * CHUNK, CHUNK, LIMIT).astype(int)


def simulate(lengths: np.ndarray, *, while_decoding: bool) -> float:
    """Seconds from the first decode step to the last score, where a device scores one tile after the other."""
    drawn = float(lengths.max()) * STEP
    tiles = np.max(np.reshape(lengths, (-1, TILE)), axis=1) * STEP
    ends = {CALL * CALLS: 0.0, FUNCTION: 0.0}  # by the seconds of a tile: when the device, and the process, are free
    for ready in sorted(tiles) if while_decoding else np.full_like(tiles, drawn):
        ends = {seconds: max(end, ready) + seconds for seconds, end in ends.items()}
    return max(drawn, *ends.values())


ROLLOUTS = Rollouts(
    Schedule(chunk=CHUNK, buckets=1, lengths=1),
    prompts=ROWS,
    samples=1,
    width=4,
    limit=LIMIT,
    devices=DEVICES,
    tensor=1,
    tile=TILE,
    scoring=[Scoring(SCORING, CALL)] * CALLS,
    step=lambda slots, positions: STEP,
    prefill=lambda prompts: 0.0,
    move=lambda groups, positions: 0.0,
)


def plan_file(directory: Path) -> Path:
    """A plan in which all devices decode and train, and some score."""
    slices = {"actor.generate": DEVICES, "actor.update": DEVICES, "critic.update": DEVICES}
    slices |= dict.fromkeys(("actor.logprobs", "reference.logprobs", "critic.values"), SCORING)
    layouts = {"generate": "generate", "update": "train"}
    placed = {
        name: Placement(own, layouts.get(name.partition(".")[2], "score"), data=own.count)  # type: ignore[arg-type]
        for name, own in slices.items()
    }
    file = directory / "plan.yaml"
    file.write_text(Plan("by hand", placed).to_yaml())
    return file


def function(completions: Sequence[str]) -> list[float]:
    """The number of different characters, after some time."""
    time.sleep(FUNCTION * len(completions) / TILE)
    return [float(len({*completion})) for completion in completions]


class Sleeps:
    """Replaces what an accelerator computes by sleeps. seconds: of each iteration. lasts: the move of each."""

    def __init__(self):
        self.seconds: list[float] = []
        self.lasts: list[LastRows | None] = []
        self._device = ThreadPoolExecutor(1)
        self._begun: float | None = None
        self._lengths: np.ndarray | None = None  # of the rollout that is drawn
        self._chunk_ends = 0.0

    def patches(self, *, while_decoding: bool) -> Iterator[Any]:
        """Patches of the parts of a run that take time."""
        sample, decode_chunk, update = Actor._sample, ContinuousBatch.decode, TrainedRole._train
        by_rows, join = OpenRollout.by_rows, open_rollout._join

        def sampled(actor: Actor, *arguments: Any, **options: Any) -> Any:
            self._lengths = lengths_of(len(self.seconds))
            self.lasts.append(options["last"])
            rollout = sample(actor, *arguments, **options)
            self._lengths = None
            return rollout

        def decoded(batch: ContinuousBatch, weights: Weights) -> list[RowProgress]:
            if (wanted := self._lengths) is None:  # an evaluation
                return decode_chunk(batch, weights)
            if self._begun is None:
                self._begun = self._chunk_ends = time.monotonic()
            read, owner = batch.read, batch.state.owner

            def paced(tree: Any, *mask: Any) -> Any:
                arrays = read(tree, *mask)
                if mask:
                    return arrays
                self._chunk_ends = _sleep_until(self._chunk_ends + CHUNK * STEP)
                prompts, lengths, _ = arrays
                return prompts, lengths, (owner != EMPTY) & (lengths >= wanted[owner])

            with mock.patch.object(batch, "read", paced):
                return decode_chunk(batch, weights)

        def on_device(rollout: OpenRollout, read: Callable, *arguments: Any, **options: Any) -> Any:
            def slow(tile: Any) -> Future[Any]:
                result = read(tile)
                return self._device.submit(lambda: (time.sleep(CALL), result)[1])

            return by_rows(rollout, slow, *arguments, **options)

        def joined(tiles: Sequence[Future[Any]], *arguments: Any) -> Any:
            return join([tile.result() for tile in tiles], *arguments)

        def updated(role: TrainedRole, *arguments: Any) -> Any:
            if self._begun is not None:
                self.seconds.append(time.monotonic() - self._begun)
                self._begun = None
            return update(role, *arguments)

        yield mock.patch.object(Actor, "_sample", sampled)
        yield mock.patch.object(ContinuousBatch, "decode", decoded)
        yield mock.patch.object(OpenRollout, "by_rows", on_device)
        yield mock.patch.object(open_rollout, "_join", joined)
        yield mock.patch.object(TrainedRole, "_train", updated)
        yield mock.patch.object(choices, "prices_here", lambda *_: None)
        yield mock.patch.object(choices, "rollouts_of", lambda *_: {"actor.generate": ROLLOUTS})
        if not while_decoding:
            yield mock.patch.object(OpenRollout, "_hand_out", lambda *_: None)


def _sleep_until(end: float) -> float:
    time.sleep(max(0.0, end - time.monotonic()))
    return max(end, time.monotonic())


def measured(directory: str, *settings: str, while_decoding: bool = True) -> tuple[list[float], list[LastRows | None]]:
    """Returns, for each iteration of a run after the first ones, the seconds from the first decode step to the first
    update, and where its last rows moved."""
    rewards = "rewards=[{name: slow, function: benchmarks.interstage:function}]"
    overrides = [f"run_dir={directory}", f"name={len(list(Path(directory).iterdir()))}", rewards, *settings]
    text = Path("configs/arithmetic-grpo.yaml").read_text().partition("\ngrpo:")[0]
    file = Path(directory) / "base.yaml"
    file.write_text(text)
    sleeps = Sleeps()
    with ExitStack() as stack:
        for patch in sleeps.patches(while_decoding=while_decoding):
            stack.enter_context(patch)
        train(load_config(str(file), [*SETTINGS, *overrides]))
    return sleeps.seconds[FIRST:], sleeps.lasts[FIRST:]


def run_of(seconds: Sequence[float], predicted: Sequence[float], baseline: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measured and predicted seconds of a run, and its speed-up over the first one of `baseline`, if there is one."""
    own = {"seconds": [*seconds], "predicted": [*predicted], "mean": float(np.mean(seconds))}
    first = baseline[0]["mean"] if baseline else own["mean"]
    return own | {"predicted_mean": float(np.mean(predicted)), "speed_up": first / own["mean"]}


def main() -> None:
    output = output_path(__doc__, "interstage")
    rows, moves = [], []
    iterations = range(FIRST, ITERATIONS)
    with tempfile.TemporaryDirectory() as directory:
        for while_decoding in (False, True):
            seconds, _ = measured(directory, "plan=disaggregated", while_decoding=while_decoding)
            predicted = [simulate(lengths_of(number), while_decoding=while_decoding) for number in iterations]
            rows.append({"while_decoding": while_decoding} | run_of(seconds, predicted, rows))
            print(rows[-1], flush=True)
        for move in (False, True):
            groups = "auto" if move else "null"
            settings = f"plan={plan_file(Path(directory))}", f"rollout.last_groups={groups}"
            seconds, lasts = measured(directory, *settings)
            decoded = [decode(ROLLOUTS, lengths_of(number)) for number in iterations]
            predicted = [finish(ROLLOUTS, chunks, last) for chunks, last in zip(decoded, lasts, strict=True)]
            to = [None if last is None else [last.groups, last.rows] for last in lasts]
            moves.append({"groups_and_rows": to} | run_of(seconds, predicted, moves))
            print(moves[-1], flush=True)
    sizes = {"rows": ROWS, "tile": TILE, "limit": LIMIT, "chunk": CHUNK, "median": MEDIAN}
    sizes |= {"step": STEP, "calls": CALLS, "call": CALL, "function": FUNCTION}
    packages, machine = provenance("jax", "numpy"), hardware(jax.devices()[0])
    write(output, {**packages, "hardware": machine, "sleeps": sizes, "runs": rows, "moves": moves})


if __name__ == "__main__":
    main()
