"""Model FLOP utilisation: the share of the devices' peak that the calls of an iteration use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jrlhf.meshes.graph import Graph
from jrlhf.meshes.hardware import Peak, peak_of
from jrlhf.models.flops import Lengths, forward_operations, generation_seconds, training_operations
from jrlhf.models.modules import has_int8
from jrlhf.ppo.config.algorithms import GRPOConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.roles.model import Compute, Model
from jrlhf.roles.placement import RolePlacement

# Call of the graph -> the metric `perf/mfu/...`, the name under which the clock times it, and the roles that compute.
CALLS = {
    "actor.update": ("actor", "update_actor", ("actor",)),
    "critic.update": ("critic", "update_critic", ("critic",)),
    "cost_critic.update": ("cost_critic", "update_cost_critic", ("cost_critic",)),
    "learner.update": ("update", "update", ("actor", "critic")),
    "actor.logprobs": ("actor_infer", "old_log_prob", ("actor",)),
    "actor.logprobs_with_base": ("actor_infer", "old_log_prob", ("actor", "reference")),
    "reference.logprobs": ("ref", "ref", ("reference",)),
}


@dataclass(frozen=True)
class Utilisation:
    """Compares the operations of an iteration with the peak of the devices.

    models: by role. meshes: by call of the iteration's graph. peak: the peak of one device.
    """

    models: Mapping[str, Model]
    meshes: Mapping[str, Mesh]
    algorithm: PolicyConfig
    dtype: Any
    peak: Peak

    def metrics(
        self,
        seconds: Mapping[str, float],
        prompts: Lengths,
        responses: Lengths,
        *,
        learned: Bool[np.ndarray, "B"],
        texts: Bool[np.ndarray, "B T"] | None,
        rounds: int,
        stopped_updates: float,
    ) -> dict[str, float]:
        """Model FLOP utilisation of training and scoring, and generation against its roofline (docs/metrics.md).

        A utilisation is the number of operations that real tokens need (`models/flops.py`: no padding, no head for
        prompts, nothing recomputed), over the number that the devices of the call could have done in its seconds, which
        include its compilation in the first iterations. There is no roofline where the seconds also include other
        responses: ReMax's greedy ones, DAPO's further rounds, those of other policies and after continued prompts.

        seconds: `timing_s/*`. prompts, responses: number of tokens of each row.
        learned: mask of rows with tokens to learn from. With a token budget updates compute only these.
        texts: mask of the tokens that the actor imitates in addition; None: it imitates none.
        rounds: number of generation rounds. stopped_updates: updates that were left out because the KL was too large.
        """
        lengths, epochs = prompts + responses, self.algorithm.epochs
        if self.algorithm.micro_batch_tokens is None:
            learned = np.ones_like(lengths, bool)
        # The first stopped update was computed, though not applied.
        left_out = max(stopped_updates - 1, 0) / (epochs * self.algorithm.minibatches)

        def trained(role: str) -> float:
            model = self.models[role].architecture
            if role != "actor":
                return epochs * training_operations(model.config, lengths[learned], "scalar", model.lora)
            total = training_operations(model.config, lengths[learned], "lm", model.lora, responses[learned])
            if texts is not None:
                ends = np.where(texts, np.arange(1, texts.shape[1] + 1), 0).max(axis=1)
                total += training_operations(model.config, ends, "lm", model.lora, texts.sum(axis=1))
            return epochs * (1 - left_out) * total

        def scored(role: str) -> float:
            model = self.models[role].architecture
            return forward_operations(model.config, lengths, "lm", model.lora, responses)

        metrics, peak = {}, self.peak.operations(self.dtype)
        for call in self.meshes.keys() & CALLS.keys():
            if f"{call}_2" in self.meshes:  # timed together
                continue
            name, timed, roles = CALLS[call]
            count = trained if call.endswith(".update") else scored
            operations = sum(count(role) for role in roles if role in self.models)
            metrics[f"perf/mfu/{name}"] = operations / peak / self.meshes[call].size / seconds[f"timing_s/{timed}"]
        drawing = [call for call in self.meshes if call.partition(".")[2].startswith("generate")]
        if rounds == 1 and drawing == ["actor.generate"]:
            actor, mesh, itemsize = self.models["actor"], self.meshes["actor.generate"], self.dtype.itemsize
            least = generation_seconds(
                actor.config,
                prompts,
                responses,
                bandwidth=self.peak.bandwidth * mesh.size,
                operations=peak * mesh.size,
                itemsize=itemsize,
                layer_itemsize=1 if actor.base is not None and has_int8(actor.base) else itemsize,
                copies=mesh.shape["data"] * mesh.shape["fsdp"],
                samples=self.algorithm.samples if isinstance(self.algorithm, GRPOConfig) else 1,
            )
            metrics["perf/roofline/gen"] = least / seconds["timing_s/gen"]
        return metrics


def utilisation_of(
    graph: Graph,
    models: Mapping[str, Model],
    algorithm: PolicyConfig,
    placement_of: Callable[[str], RolePlacement],
    compute: Compute,
) -> Utilisation | None:
    """Returns the utilisation of the calls of a graph; None where the peak of the devices is not known, and where an
    update reads only some of the rows (pairs).

    placement_of: role -> its placement.
    """
    meshes = {call.name: placement_of(call.role)[call.name.partition(".")[2]].stored.mesh for call in graph}
    if placement_of("actor")["update"].joint is not None:  # timed as one call, like a fused update
        meshes["learner.update"] = meshes.pop("actor.update")
        del meshes["critic.update"]
    peak = peak_of(next(iter(meshes.values())).devices.flat[0])
    if peak is None or "estimator.pairs_of_group" in meshes:
        return None
    return Utilisation(models, meshes, algorithm, compute.dtype, peak)
