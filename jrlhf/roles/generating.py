"""What a model generates with on a mesh."""

from functools import cache

from jax.sharding import Mesh

from jrlhf.data.batches import Batch
from jrlhf.errors import UserError
from jrlhf.models.generation.decoding import Decoder
from jrlhf.models.generation.engine import Engine
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.roles.model import Architecture, Compute


@cache  # all roles of one architecture on one mesh share the program
def engine_of(
    model: Architecture,
    mesh: Mesh,
    compute: Compute,
    sampling: SamplingConfig,
    schedule: Schedule | None,
    samples: int,
) -> Engine:
    """(weights in GENERATE, prompts, lengths, row keys, *base) -> Generation. samples: responses per prompt."""
    options = {"dtype": compute.dtype, "attention": compute.options.attention}
    return Engine(model.config, mesh, sampling, schedule, samples=samples, lora=model.lora, **options)


def check_positions(role: str, model: Architecture, prompts: Batch, sampling: SamplingConfig) -> None:
    """Refuses prompts that have no room for a response. Only those that follow a rollout may have none."""
    width, limit, positions = prompts.arrays[0].shape[1], sampling.max_new_tokens, model.config.max_positions
    if width + limit > positions:
        raise UserError(
            f"{role} generates after prompts of {width} tokens, and with data.max_response={limit} they exceed its "
            f"{positions} positions: lower data.max_response or data.max_prompt, or give prompts.after a shorter text"
        )


def decoder_of(model: Architecture, mesh: Mesh, compute: Compute, sampling: SamplingConfig, samples: int) -> Decoder:
    """Returns what `ContinuousBatch` decodes with. samples: responses per prompt."""
    return Decoder(model.config, mesh, sampling, samples, compute.dtype, compute.options.attention, model.lora)
