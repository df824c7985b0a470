"""What every stage of a run shares."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.config import Config, mesh_sizes, validate
from jrlhf.console import Console
from jrlhf.devices import idle_accelerator, select
from jrlhf.errors import UserError
from jrlhf.files import write_atomic
from jrlhf.meshes import make_mesh
from jrlhf.models import ModelConfig, SamplingConfig
from jrlhf.preemption import PreemptionGuard
from jrlhf.programs import Compute
from jrlhf.runs import Run, open_run
from jrlhf.task import Task, load_task


@dataclass(frozen=True)
class Context:
    """A run's settings and services. Nothing in it changes while the run goes on."""

    config: Config
    mesh: Mesh
    model: ModelConfig
    compute: Compute
    task: Task
    run: Run
    console: Console
    preemption: PreemptionGuard

    @property
    def length(self) -> int:
        """T: the width of every batch of tokens."""
        return self.config.data.max_prompt + self.config.data.max_response

    @property
    def sampling(self) -> SamplingConfig:
        """How responses are drawn: in rollouts, and wherever else a policy is looked at."""
        ppo = self.config.ppo
        return SamplingConfig(
            max_new_tokens=self.config.data.max_response,
            temperature=ppo.temperature,
            top_k=ppo.top_k,
            top_p=ppo.top_p,
            min_new_tokens=ppo.min_new_tokens,
            stop_ids=(self.task.tokenizer.eos_id,),
        )


@contextmanager
def open_context(config: Config, *, resume: bool) -> Iterator[Context]:
    """Checks the config against the devices, opens the run's directory, and reads the data.

    Raises:
        UserError: bad input; nothing has been written.
    """
    mesh = select_mesh(config)
    console = Console()
    if config.device.platform == "auto" and (warning := idle_accelerator()):
        console.warn(warning)
    with console.status("reading the corpus"):
        task = load_task(config.data, config.model.vocab_size)
    console.line(task.describe())
    devices = f"# {mesh.size} {mesh.devices.flat[0].device_kind} device(s), mesh {dict(mesh.shape)}"
    with open_run(config, resume=resume, notes=[devices]) as run, PreemptionGuard() as preemption:
        write_atomic(run.path / "tokenizer.json", task.tokenizer.to_json())
        yield Context(
            config=config,
            mesh=mesh,
            model=model_config(config),
            compute=Compute(jnp.dtype(config.compute.dtype), config.compute.remat, config.compute.logprob),
            task=task,
            run=run,
            console=console,
            preemption=preemption,
        )


def select_mesh(config: Config) -> Mesh:
    """The mesh that the config asks for, on the devices that it asks for.

    Raises:
        UserError: the config does not fit the devices.
    """
    devices = select(config.device)
    validate(config, len(devices))
    _check_kernel(config, devices[0].platform)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    return make_mesh(data, fsdp, tensor, devices=devices)


def _check_kernel(config: Config, platform: str) -> None:
    kernel = config.compute.logprob
    needed = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}.get(str(kernel), platform)
    if platform != needed:
        raise UserError(f"compute.logprob={kernel} runs on a {needed} only, and this is a {platform}: set it to null")
    if kernel == "pallas_gpu" and (config.compute.dtype != "bfloat16" or config.model.embed % 64):
        raise UserError(
            f"compute.logprob=pallas_gpu needs compute.dtype=bfloat16 and model.embed a multiple of 64 (they are "
            f"{config.compute.dtype} and {config.model.embed}): set it to null"
        )


def model_config(config: Config) -> ModelConfig:
    """The architecture that every role has."""
    model = config.model
    return ModelConfig(
        vocab_size=model.vocab_size,
        embed=model.embed,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        mlp=model.mlp,
        max_positions=model.max_positions,
        rope_theta=model.rope_theta,
        qk_norm=model.qk_norm,
        tie_embeddings=model.tie_embeddings,
    )
