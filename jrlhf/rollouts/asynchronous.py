"""`AsynchronousRollouts`: gives the iterations of an asynchronous run batches whose responses were drawn ahead."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jrlhf.config.schema import Config
from jrlhf.data.batches import Batch
from jrlhf.data.order import Solved
from jrlhf.models.generation.continuous import ContinuousBatch, ToHosts, Weights
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.lora import base_on
from jrlhf.ppo.types import TrainState
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.actor import Actor
from jrlhf.roles.derived import copied
from jrlhf.roles.generating import decoder_of
from jrlhf.roles.open_rollout import DrawnAhead
from jrlhf.roles.optimizers import learning_rates, updates_of
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.identity import Identity, adapter_identity, drawing_identity, trained_identity
from jrlhf.rollouts.processes.places import asked_places
from jrlhf.rollouts.processes.worker import describe
from jrlhf.rollouts.processes.workers import ProcessWorkers
from jrlhf.rollouts.prompts import PromptStream
from jrlhf.rollouts.recompute import Recompute
from jrlhf.rollouts.schedule import Rules, fresh
from jrlhf.rollouts.slices import SliceWorkers, Workers
from jrlhf.rollouts.state import Collected, FleetState
from jrlhf.run.directory import run_path
from jrlhf.run.files import Closing
from jrlhf.run.processes import several, to_all_hosts, to_main

ROLLOUTS_TIMES = "perf/rollouts_wait_seconds", "perf/decode_step_seconds"  # metrics

MUCH = 0.1  # of the tokens of a batch


def masks_much(config: Config, batch: Collected) -> str | None:
    """Returns a warning if much of a batch has weight 0 because it is older than the bound."""
    assert config.asynchronous is not None
    staleness, drawn = config.asynchronous.staleness, batch.rows
    sampled = np.arange(drawn.tokens.shape[1]) < drawn.lengths[:, None]
    older = 1 - float(fresh(drawn.versions, batch.version, staleness)[sampled].mean())
    if older <= MUCH:
        return None
    return (
        f"{config.algorithm}.asynchronous.staleness={staleness} gives weight 0 to {older:.0%} of the tokens of a batch "
        "because they are older: raise staleness or lower rollout.slots, and with the virtual clock see that "
        "update_steps is the measured ratio"
    )


class AsynchronousRollouts(Closing):
    """Connects a `Fleet` with prompts and with reward functions, which score each group as soon as it is complete.

    Rollouts run on the devices of `actor.generate`, or in processes that have the same mesh on their own devices.

    take: (mesh, number of a batch) -> its prompts. rewards: the roles that score the rollouts.
    tell: called with a sentence for each process that is lost, for alarms that only warn, and for the first batch of
    which much is masked.
    """

    def __init__(
        self,
        config: Config,
        actor: Actor,
        sampling: SamplingConfig,
        take: Callable[[Mesh, int], Batch],
        rewards: Sequence[Rewards],
        tell: Callable[[str], None],
    ):
        options = config.asynchronous
        assert options is not None
        self._mesh, self._trainer = actor.placement["generate"].mesh, actor.placement["update"].mesh
        self._clock, self._wall, self._placeholder = actor.clock, options.clock == "wall", None
        self._tell: Callable[[str], None] | None = tell  # None: it was called with the sentence of `masks_much`
        self._masks_much = partial(masks_much, config)
        self._rewards = rewards
        self._base: Identity = {}  # identity of the frozen weights under an adapter; empty: not computed yet
        self._read = dict[int, dict[str, Any]]()  # number of a group -> name of a reader -> its result
        self._rollouts = dict[int, DrawnAhead]()  # number of a batch that the actor has not asked for yet
        groups = config.rl.rollout_batch // config.samples
        read = partial(to_all_hosts, seconds=self._clock.deadline)
        self._stream = PromptStream(partial(take, self._mesh), self._mesh, groups, config.samples, read)
        # Under the run's mesh: this process may have no device of `self._mesh`.
        rates = learning_rates(config.rl.optimizer_of("actor"), updates=config.rl.updates)
        with jax.set_mesh(self._mesh):
            lanes = _lanes(config, actor, sampling, tell, read)
            self._fleet = Fleet(
                lanes,
                self._mesh,
                Rules(groups, options.staleness, options.update_steps, options.on_new_weights, options.reward_steps),
                self._stream.prompt,
                self._hand_out,
                samples=config.samples,
                limit=sampling.max_new_tokens,
                recompute=_recompute(config, actor, sampling, lanes, tell, read),
                rates=rates,
                clock=options.clock,
                on_chunk=self._clock.add_chunk,
                read=read,
            )

    @property
    def ahead(self) -> Self:
        return self

    def close(self) -> None:
        """Ends the fleet's processes."""
        self._fleet.close()

    def state(self) -> FleetState | None:
        """Returns the state after an iteration, as `Fleet.state`. With the wall clock a placeholder: see `saved`."""
        return self._placeholder if self._wall else self._state()

    def saved(self, state: Any) -> Any:
        """Returns what a checkpoint saves of a run's state. With the wall clock it gets the fleet's present state."""
        return replace(state, fleet=self._state()) if self._wall and self._fleet.started else state

    def _state(self) -> FleetState:
        with jax.set_mesh(self._mesh):
            return self._fleet.state()

    def fresh(self, actor: Actor, trained: TrainState) -> FleetState:
        """The state before anything is drawn, with the actor's weights. trained: the state of which they are."""
        published = self._published(actor, trained)
        with jax.set_mesh(self._mesh):
            return self._fleet.fresh(*published)

    def start(self, state: FleetState | None, actor: Actor, trained: TrainState) -> None:
        """Starts the fleet from a state, with the actor's weights. Later calls do nothing: the fleet has its state."""
        if not self._fleet.started:
            assert state is not None
            published = self._published(actor, trained)
            with jax.set_mesh(self._mesh):
                self._fleet.start(state, *published)
            if self._wall:
                self._placeholder = FleetState(None, state.started, state.times, rounding=state.rounding)
                for leaf in jax.tree.leaves(state.times):  # deleted, so that nobody saves the outdated state
                    leaf.delete()

    def collect(self, number: int, solved: Solved | None = None) -> Batch:
        """Returns the next batch. solved: always None, because asynchronous runs leave out no prompts."""
        with jax.set_mesh(self._mesh):
            collected = self._clock.run("gen", self._fleet.collect)
            if self._tell and (sentence := self._masks_much(collected)):
                self._tell(sentence)
                self._tell = None
            read = [self._read.pop(int(number)) for number in collected.numbers]
            batch, rollout = self._stream.batch(collected, number)
            self._rollouts[number] = DrawnAhead(rollout, {name: [own[name] for own in read] for name in read[0]})
            return batch

    def draw(self, actor: Actor, method: str, prompts: Batch) -> DrawnAhead:
        """Returns the rollout of a batch, which the reward functions have read group by group."""
        return self._rollouts.pop(prompts.step)

    def publish(self, actor: Actor, trained: TrainState, grad_norm: Array | float) -> None:
        """Publishes the actor's new weights to the fleet.

        trained: the state that a checkpoint saves. grad_norm: mean norm of the gradients of its update.
        """
        if several():  # a copy from other processes makes the rollouts' devices wait for the update
            with jax.set_mesh(self._mesh):
                self._clock.run("gen", self._fleet.draw_ahead, actor.model.params)
        published = self._published(actor, trained)
        with jax.set_mesh(self._mesh):
            self._clock.run("gen", self._fleet.publish, *published, grad_norm)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of an iteration after its `state`, which compares what replaced weights drew.

        With several processes each knows the times of its own devices only.
        """
        metrics = self._fleet.metrics()
        everyone = to_main(metrics, seconds=self._clock.deadline) if several() else []
        for mesh, names in (self._trainer, ["perf/trainer_wait_seconds"]), (self._mesh, ROLLOUTS_TIMES):
            own = everyone[min(device.process_index for device in mesh.devices.flat)] if everyone else metrics
            metrics |= {name: own[name] for name in names if name in own}
        return metrics

    def _hand_out(self, group: Collected) -> None:
        """Starts the reward functions on a complete group."""
        results = self._read[int(group.numbers[0])] = dict[str, Any]()
        if readers := [rewards for rewards in self._rewards if rewards.text_parts]:
            batch, rows, tile = self._stream.tile(group)
            results |= {rewards.kind: rewards.read(batch, rows, tile) for rewards in readers}

    def _published(self, actor: Actor, trained: TrainState) -> tuple[Weights, Identity, Array]:
        """Returns the weights for decoding programs, the identity that they must have, and the number of updates.

        The weights are those of the actor, the identity is that of the state that a checkpoint saves: each would show
        that the other one is outdated.
        """
        model = actor.model
        with jax.set_mesh(model.mesh):
            if model.base is None:
                expected = trained_identity(trained.params, dtype=actor.compute.dtype)
            else:
                self._base = self._base or drawing_identity(base_on(model.base, model.mesh))
                expected = copied(self._base) | adapter_identity(trained.params)  # states may be freed
            updates = jax.jit(jnp.copy)(updates_of(trained.opt_state))
        weights, adapter = actor.drawing_weights()
        with jax.set_mesh(self._mesh):
            return (weights, copied(adapter)), expected, updates


def _lanes(
    config: Config, actor: Actor, sampling: SamplingConfig, tell: Callable[[str], None], read: ToHosts
) -> list[Workers]:
    """Returns the workers of each lane: on this process's devices or, by the wall clock, one process per lane."""
    options, mesh, count = config.asynchronous, actor.placement["generate"].mesh, config.logical_workers
    assert options is not None
    decoder = decoder_of(actor.architecture, mesh, actor.compute, sampling, config.samples)
    slots, width = (config.rollout.slots or config.rl.rollout_batch) // count, config.data.max_prompt
    batch = ContinuousBatch.of_size(decoder, mesh, config.rollout, slots, width, read)
    if config.fleet is None:
        return [SliceWorkers([copy(batch) for _ in range(count)])]  # with the same programs
    numbers = {"samples": config.samples, "slots": slots, "width": width}
    setup = describe(mesh, actor.architecture, actor.compute, sampling, config.rollout, **numbers)
    asked = partial(asked_places, config, setup["platform"], mesh.size)
    workers = partial(ProcessWorkers, batch, setup, config.fleet, run_path(config), tell)
    if options.clock == "virtual":
        return [workers(count, asked)]
    places = asked()  # whose number stays
    shares = np.array_split(range(count), len(places))
    return [workers(len(share), lambda place=place: [place]) for share, place in zip(shares, places, strict=True)]


def _recompute(
    config: Config,
    actor: Actor,
    sampling: SamplingConfig,
    lanes: Sequence[Workers],
    tell: Callable[[str], None],
    read: ToHosts,
) -> Recompute:
    """Returns what compares log-probabilities, on the mesh of the rollouts."""
    options = config.asynchronous
    assert options is not None
    return Recompute(
        actor.architecture.config,
        actor.placement["generate"].mesh,
        replace(actor.compute.forward(actor.architecture), temperature=sampling.temperature),
        sampling=sampling,
        workers=max(len(lane.rooms) for lane in lanes),
        length=config.data.max_prompt + sampling.max_new_tokens,
        keeps=options.on_new_weights == "keep_cache",
        compares=options.logprob_check != "off",
        warn=tell if options.logprob_check == "warn" else None,
        read=read,
    )
