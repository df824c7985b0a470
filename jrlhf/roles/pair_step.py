"""`pair_step`: the update of an actor that learns from pairs of responses."""

import optax

from jrlhf.errors import UserError
from jrlhf.ppo.config.algorithms import DPOConfig, GRPOConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.supervised import PairLoss, make_pair_step
from jrlhf.roles.compiled import CompiledModel, Function


def pair_step(
    model: CompiledModel,
    optimizer: optax.GradientTransformation,
    algorithm: PolicyConfig,
    loss: DPOConfig | PairLoss,
    *,
    temperature: float,
    count: int,
) -> Function:
    """(state, pairs) -> (state, metrics), jitted: one update on `count` pairs, one of each group of rollouts.

    temperature: that of the rollouts, which divides the logits of both responses, as in the reference's log-probs.
    Raises UserError if the pairs do not divide over the devices.
    """
    assert isinstance(algorithm, GRPOConfig), "checked when the dataflow was traced"
    devices = model.mesh.size
    if count % devices:
        raise UserError(
            f"the update of actor divides rows over {devices} devices, and there are {count} pairs, one of each group: "
            f"make rollout_batch a multiple of {devices * algorithm.samples}"
        )
    division = {"micro_batches": 1, "micro_batch_tokens": algorithm.micro_batch_tokens}
    if algorithm.micro_batch_tokens is None:
        # As few rows at a time as in an update on all rows of the rollout; a pair has two.
        least, most = 2 * algorithm.micro_batches / algorithm.samples, count // devices
        parts = (parts for parts in range(1, most + 1) if most % parts == 0 and parts >= min(least, most))
        division["micro_batches"] = next(parts)
    logprobs = model.train_logprobs(temperature=temperature)
    return make_pair_step(logprobs, optimizer, loss, pipeline=model.runs, **division)
