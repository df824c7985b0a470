"""The stage of the reward model: a scalar head on the policy's decoder, trained on ranked pairs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np

from jrlhf.algorithms.optimizers import make_optimizer
from jrlhf.algorithms.registry import optimizer_identity
from jrlhf.data.order import Order
from jrlhf.data.types import Ids, Pairs
from jrlhf.errors import RunFailure
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.ppo.supervised import PreferenceBatch, make_preference_step
from jrlhf.ppo.types import TrainState
from jrlhf.roles.derived import scalar_model, stored
from jrlhf.roles.model import Model
from jrlhf.roles.role import fresh_state
from jrlhf.run.clock import calling
from jrlhf.stages.context import Context
from jrlhf.stages.loop import run_stage
from jrlhf.stages.preferences import accuracies, collect_pairs, put_pairs

UPDATE, SCORE = "reward_model.update", "reward_model.score"  # held-out pairs are scored, and at the end all
NORMALISED_BY = 32_768  # maximum number of answers to normalise by; of a larger dataset every n-th answer is scored


def train_reward_model(context: Context, policy: Model) -> Model:
    """Runs the stage, or its remaining steps, and returns the reward model. `policy` is not changed.

    At the end its scores are shifted and scaled to mean 0 and deviation 1 over the training pairs, so that the effect
    of PPO's KL coefficient does not depend on the scale of the reward model.
    """
    config = context.config.reward_model
    start = scalar_model(policy)
    optimizer = make_optimizer(config, "reward_model", updates=config.steps)
    placement = context.placements["reward_model"]
    compiled = placement["update"].compiled(start.architecture, context.compute)
    parts = {"micro_batches": config.micro_batches, "micro_batch_tokens": config.micro_batch_tokens}
    step_fn = make_preference_step(compiled.train_scores(), optimizer, **parts, pipeline=compiled.runs)
    score = partial(context.sampler.scores, placement=placement["score"])

    @cache
    def pairs() -> tuple[Pairs, Pairs]:
        return collect_pairs(context, policy)

    def advance(state: TrainState, step: int):
        train, heldout = pairs()
        order = Order(len(train), config.batch, context.config.seed)
        batch = PreferenceBatch(*put_pairs(context, train, order.draw(step), compiled.mesh)[:4])
        with jax.set_mesh(compiled.mesh), calling(UPDATE):
            state, metrics = step_fn(state, batch, *start.frozen)
        metrics = to_host(metrics) | order.begun(step)
        if len(heldout) and config.evaluates(step):
            with calling(SCORE):
                metrics = metrics | _accuracy(partial(score, start.holding(state.params)), heldout)
        return state, metrics

    def finish(state: TrainState) -> TrainState:
        train, _ = pairs()
        sequences = [*train.chosen, *train.rejected]
        sequences = sequences[:: -(-len(sequences) // NORMALISED_BY)]
        with calling(SCORE):
            every = score(start.holding(state.params), sequences)
        if not np.isfinite(every).all():
            end = f"reward_model ends at step {int(to_host(state.step))}"
            raise RunFailure(f"{end} with scores that are not finite: lower its learning rate")
        return replace(state, params=normalised(state.params, every.mean(), every.std()))

    init = partial(fresh_state, start.params, optimizer)
    meta = {"policy": policy.fingerprint(), **optimizer_identity(context.config, "reward_model")}
    state = run_stage(context, "reward_model", init, advance, meta=meta, announced=(UPDATE, SCORE), finish=finish)
    return stored(start.holding(state.params), context.config.offloading.reward)


def normalised(params, mean: float, deviation: float):
    """Rescales the head of a scalar model, whose outputs have this mean and deviation, to mean 0 and deviation 1."""
    kernel, bias = params["value_head"]["kernel"], params["value_head"]["bias"]
    scale = np.float32(1.0 / max(float(deviation), 1e-6))
    # Computed on the host: the head is one small vector, and late iterations should compile nothing.
    head = {
        "kernel": to_devices(to_host(kernel) * scale, kernel.sharding),
        "bias": to_devices((to_host(bias) - np.float32(mean)) * scale, bias.sharding),
    }
    return params | {"value_head": head}


def _accuracy(score: Callable[[Sequence[Ids]], np.ndarray], pairs: Pairs) -> dict[str, float]:
    """The share of pairs that are scored in the annotator's order: of its clear pairs, and of all pairs."""
    chosen, rejected = score(pairs.chosen), score(pairs.rejected)
    return {f"reward_model/{name}": value for name, value in accuracies(chosen > rejected, pairs.clear).items()}
