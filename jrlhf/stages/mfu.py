"""How much of what the devices can do an iteration's calls make use of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool

from jrlhf.meshes.hardware import Peak, peak_of
from jrlhf.models.flops import Lengths, forward_operations, generation_seconds, training_operations
from jrlhf.models.modules import has_int8
from jrlhf.ppo import GRPOConfig, PolicyConfig, ReMaxConfig
from jrlhf.roles.compiled import Compute
from jrlhf.roles.model import Architecture, Model
from jrlhf.roles.placement import RolePlacement

CALLS = {
    "actor": ("actor", "update"),
    "critic": ("critic", "update"),
    "cost_critic": ("cost_critic", "update"),
    "update": ("learner", "update"),
    "actor_infer": ("actor", "logprobs"),
    "ref": ("reference", "logprobs"),
    "gen": ("actor", "generate"),
}  # what is measured -> role and method


@dataclass(frozen=True)
class Utilisation:
    """What an iteration computes, against what its devices could. Roles that the algorithm does not have are None.

    peak: of a device; None where it is not known, and then nothing is measured. devices: that each of `CALLS` has.
    copies: of the generation weights. layer_itemsize: bytes of a number in their layers. samples: of each prompt.
    """

    actor: Architecture
    critic: Architecture | None
    cost_critic: Architecture | None
    reference: Architecture | None
    algorithm: PolicyConfig
    dtype: Any
    peak: Peak | None
    devices: Mapping[str, int]
    copies: int
    layer_itemsize: int
    samples: int

    def metrics(
        self,
        metrics: Mapping[str, float],
        prompts: Lengths,
        responses: Lengths,
        *,
        learned: Bool[np.ndarray, "B"] | None = None,
        texts: Bool[np.ndarray, "B T"] | None = None,
    ) -> dict[str, float]:
        """Model FLOP utilisation of training and scoring under verl's names, and generation against its roofline.

            perf/mfu/actor, perf/mfu/critic     training: forward and backward of every epoch that was computed
            perf/mfu/cost_critic                likewise, of the cost's
            perf/mfu/update                     actor and critic, where they share the passes that make the experience
            perf/mfu/actor_infer, perf/mfu/ref  log-probabilities of the rollout; both in the first if one pass
            perf/roofline/gen                   the least seconds that generation could take, over those that it took;
                                                left out where these were of responses besides: ReMax's greedy ones,
                                                DAPO's further rounds

        A utilisation is the operations that real tokens need (`models/flops.py`: no padding, no head for prompts,
        nothing recomputed), over what the devices of the call could have done in its seconds, which include its
        compilation in the first iterations. A call that was not timed has none.

        metrics: the iteration's metrics, with `timing_s/*`. prompts, responses: tokens of each row.
        learned: rows with tokens to learn from; None: all. Under a token budget an update computes no others.
        texts: tokens that the actor imitates besides.
        """
        if self.peak is None:
            return {}
        lengths, peak = prompts + responses, self.peak.operations(self.dtype)  # of a device
        updates = self.algorithm.epochs * self.algorithm.minibatches
        # The update that stopped the others was computed itself, and not applied.
        computed = self.algorithm.epochs * (1 - max(metrics.get("actor/stopped_updates", 0.0) - 1, 0) / updates)
        actor, critic, reference = self.actor, self.critic, self.reference
        policy = forward_operations(actor.config, lengths, "lm", actor.lora, responses)
        base = 0.0
        if reference is not None:
            base = forward_operations(reference.config, lengths, "lm", reference.lora, responses)
        if learned is None or self.algorithm.micro_batch_tokens is None:
            learned = np.ones_like(lengths, bool)
        trained = training_operations(actor.config, lengths[learned], "lm", actor.lora, responses[learned])
        if texts is not None:
            ends = np.where(texts, np.arange(1, texts.shape[1] + 1), 0).max(axis=1)
            trained += training_operations(actor.config, ends, "lm", actor.lora, texts.sum(axis=1))
        values, cost_values = (
            0.0 if model is None else training_operations(model.config, lengths[learned], "scalar", model.lora)
            for model in (critic, self.cost_critic)
        )
        # The reference is the actor's base.
        one_pass = "timing_s/ref" not in metrics and "timing_s/old_log_prob" in metrics
        operations = {
            "actor": ("update_actor", computed * trained),
            "critic": ("update_critic", self.algorithm.epochs * values),
            "cost_critic": ("update_cost_critic", self.algorithm.epochs * cost_values),
            "update": ("update", trained + values),
            "actor_infer": ("old_log_prob", policy + base if one_pass else policy),
            "ref": ("ref", base),
        }
        least = {
            f"perf/mfu/{name}": (call, work / peak / self.devices[name]) for name, (call, work) in operations.items()
        }
        if not isinstance(self.algorithm, ReMaxConfig) and metrics.get("dapo/rounds", 1) == 1:
            least["perf/roofline/gen"] = "gen", self._generation(self.peak.memory, peak, prompts, responses)
        seconds = {name: (metrics.get(f"timing_s/{call}", 0.0), best) for name, (call, best) in least.items()}
        return {name: best / taken for name, (taken, best) in seconds.items() if taken > 0}

    def _generation(self, memory: float, operations: float, prompts: Lengths, responses: Lengths) -> float:
        return generation_seconds(
            self.actor.config,
            prompts,
            responses,
            memory=memory * self.devices["gen"],
            operations=operations * self.devices["gen"],
            itemsize=self.dtype.itemsize,
            layer_itemsize=self.layer_itemsize,
            copies=self.copies,
            samples=self.samples,
        )


def utilisation_of(
    actor: Model,
    models: Mapping[str, Model],
    algorithm: PolicyConfig,
    placement_of: Callable[[str], RolePlacement],
    compute: Compute,
) -> Utilisation:
    """Returns the utilisation of an actor, and of the critics and the reference that may be in `models`.

    placement_of: role -> its placement.
    """
    meshes = {name: placement_of(role)[method].mesh for name, (role, method) in CALLS.items()}
    generating = meshes["gen"]
    others = ("critic", "cost_critic", "reference")
    return Utilisation(
        actor=actor.architecture,
        **{name: models[name].architecture if name in models else None for name in others},
        algorithm=algorithm,
        dtype=compute.dtype,
        peak=peak_of(generating.devices.flat[0]),
        devices={name: mesh.size for name, mesh in meshes.items()},
        copies=generating.shape["data"] * generating.shape["fsdp"],
        layer_itemsize=1 if actor.base is not None and has_int8(actor.base) else compute.dtype.itemsize,
        samples=algorithm.samples if isinstance(algorithm, GRPOConfig) else 1,
    )
