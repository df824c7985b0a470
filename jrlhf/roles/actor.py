"""`Actor`: the policy in training."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self

import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jrlhf.data.batches import Batch, other_keys
from jrlhf.meshes.transfers import transfer
from jrlhf.models.generation.chunks import Watch
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.params import Params
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.experience import bare_experience
from jrlhf.ppo.types import Experience, Rollout, SFTBatch, Targets, TrainState
from jrlhf.roles.generating import check_positions, engine_of
from jrlhf.roles.model import Model, generation_weights
from jrlhf.roles.placement import Pending, call
from jrlhf.roles.role import Site, TrainedRole, responses
from jrlhf.run.clock import timed
from jrlhf.run.processes import to_all_hosts

# (bound actor, method, prompts) -> their rollout, which may be `Pending`
Draw = Callable[["Actor", str, Batch], Any]


class Actor(TrainedRole):
    """The policy: trained in the layout TRAIN, generating in the layout GENERATE.

    Generation needs a copy of the weights, which is freed after the rollout. An adapter needs none: it shares its base.
    """

    texts: SFTBatch | None = None  # the batch that the next update imitates in addition, with ptx_coef
    _draw: Draw  # set by `bind`
    asked: list[Batch]  # the prompts of its rollouts in the iteration
    _open: list[Pending[Rollout]]  # rollouts of the iteration that were not drawn when they were asked for

    def __init__(
        self,
        model: Model,
        site: Site,
        *,
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
        optimizer: optax.GradientTransformation,
        algorithm: PolicyConfig,
    ):
        super().__init__(model, site, optimizer)
        self._algorithm, self._to_all_hosts = algorithm, partial(to_all_hosts, seconds=self.clock.deadline)
        temperature, span = sampling.temperature, sampling.max_new_tokens
        greedy = replace(sampling, temperature=0.0, top_k=None, top_p=None, min_p=None)
        self._sampling, self._schedule = {"generate": sampling, "generate_greedy": greedy}, schedule
        self._scoring: dict[str, Any] = {"temperature": temperature, "span": span}
        step = partial(self.compiled("update").actor_step, optimizer, algorithm)
        self._updates = cache(partial(step, temperature, span))  # by loss

        @cache
        def pair_updates(loss: Any, count: int) -> Any:
            from jrlhf.roles.pair_step import pair_step

            return pair_step(self.compiled("update"), optimizer, algorithm, loss, temperature=temperature, count=count)

        self._pair_updates = pair_updates

    def bind(self, state: TrainState, texts: SFTBatch | None = None, draw: Draw | None = None) -> Self:
        """See `TrainedRole`. draw: where its rollouts come from; None: `sample` draws each one when it is asked for."""
        bound = super().bind(state)
        bound.texts, bound._draw, bound._open = texts, draw or Actor.sample, []
        bound.asked = []
        return bound

    @call("generate", "rollout")
    def generate(self, prompts: Batch) -> Rollout:
        """Samples responses to every prompt; those of one prompt are neighbours."""
        return self._rollout("generate", prompts)

    @call("generate", "greedy")
    def generate_greedy(self, prompts: Batch) -> Rollout:
        """The most likely response to every prompt, token by token."""
        return self._rollout("generate_greedy", prompts)

    def _rollout(self, method: str, prompts: Batch) -> Any:
        self.asked.append(prompts)
        if (name := self.placement.call_of(method)) != method:  # draws other responses than the first call
            tokens, lengths, keys = prompts.arrays
            prompts = replace(prompts, arrays=(tokens, lengths, other_keys(keys, name)))
        rollout = self._draw(self, method, prompts)
        if isinstance(rollout, Pending) and rollout.waits:
            self._open.append(rollout)
        return rollout

    def sample(self, method: str, prompts: Batch, watch: Watch | None = None, **options: Any) -> Rollout:
        """Draws a rollout on the devices of a call, with the present weights. The others are options of `Engine`."""
        weights = self._switch(method)
        return self.clock.run("gen", self._sample, method, weights, prompts, watch=watch or self.clock.watch, **options)

    def _sample(self, method: str, weights: Params, prompts: Batch, **options: Any) -> Rollout:
        check_positions("actor", self.architecture, prompts, self._sampling[method])
        mesh = self.placement[method].mesh
        version, arrays = transfer((self.state.step, prompts.arrays), mesh)
        # The settings of the run, not those of the call's placement: a `Sampler` on this mesh shares the program.
        own = self._sampling[method], self._schedule, prompts.samples
        engine = engine_of(self.architecture, mesh, self.compute, *own)
        return Rollout.of(engine(weights, *arrays, *self._frozen(method), read=self._to_all_hosts, **options), version)

    def drawing_weights(self) -> tuple[Params, Params]:
        """Returns (weights, adapter) for decoding programs; {}: no adapter. An update may free the adapter."""
        weights, base = self._switch("generate"), self._frozen("generate")
        return (base[0], weights) if base else (weights, {})

    def _switch(self, method: str) -> Params:
        return self.clock.run("reshard", self._copy, self.state.params, self.placement[method].mesh)

    def _copy(self, stored: Params, mesh: Mesh) -> Params:
        """Returns the weights in the layout GENERATE. Frees the onloaded copy of offloaded weights on the way."""
        params = self.offloader.onload(stored)
        return generation_weights(self._model.holding(params), mesh, self.compute, donate=params is not stored)

    def recomputes(self) -> bool:
        """True if the ratio's denominator is computed by `logprobs`, and not taken from the rollout."""
        return self._algorithm.old_logprobs == "recompute"

    @call("infer", "old", rows="each")
    @timed("old_log_prob")
    def logprobs(self, rollout: Rollout) -> Float[Array, "B T"]:
        """Log-probs of response tokens under the present weights; undefined at other positions."""
        function = self.compiled("logprobs").score_logprobs(**self._scoring)
        return self._infer("logprobs", function, *responses(rollout))[0]

    @call("infer", "old", "ref", rows="each")
    @timed("old_log_prob")
    def logprobs_with_base(self, rollout: Rollout) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """An adapter's `logprobs`, and those of the base under it, in one pass."""
        function = self.compiled("logprobs_with_base").score_logprobs_with_base(**self._scoring)
        params = self.offloader.onload(self.state.params)
        logprobs, _, base = function(params, *responses(rollout), *self._frozen("logprobs_with_base"))
        return logprobs, base

    @call("train", "actor_metrics")
    def update(self, data: Any, loss: Any = None, targets: Targets | None = None) -> dict[str, Array]:
        """Trains on one batch of experience; or of a rollout, if a loss is given that needs no more; or of pairs.

        loss: replaces the algorithm's policy loss, as in `make_actor_step`, or is that of pairs, as in
            `make_pair_step`; pass the same object in every iteration, else the update compiles again.
        targets: what the loss compares with.
        """
        if not isinstance(data, Rollout):
            return self._train("update_actor", self._pair_updates(loss, data.chosen.shape[0]), data)
        texts = () if self.texts is None else (self.texts,)
        experience = data if isinstance(data, Experience) else bare_experience(data, config=self._algorithm)
        experience = experience if targets is None else replace(experience, targets=targets)
        return self._train("update_actor", self._updates(loss), experience, *texts)

    def _train(self, *arguments: Any) -> dict[str, Any]:
        """Draws rollouts that are still open with the weights before the update."""
        for rollout in self._open:
            rollout.result()
        self._open.clear()
        return super()._train(*arguments)
