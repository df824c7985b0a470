"""What calls need of a device's memory: predicted by `jrlhf.planning.memory`, and as XLA compiles them.

    python -m benchmarks.memory
    python -m benchmarks.memory --target h200x8
    python -m benchmarks.memory --target v5p-16
    python -m benchmarks.memory --again        # the compiled figures stay, predictions are made anew

Programs are compiled and never run: for 8 simulated CPU devices, or for hardware that is not there (`targets.py`). They
have a head for every token, as is predicted; a run's have one for responses. The shapes are others than those that the
model's counts were read from. Merges into `benchmarks/results/memory.json`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.records import RESULTS, provenance, write
from benchmarks.shapes import adapter_weights, experience, generation_copy, shared_base, train_state, whole_weights
from benchmarks.targets import TARGETS, Target, compiler_environment, devices_of
from jrlhf.algorithms.registry import graph_of
from jrlhf.config.schema import Config
from jrlhf.config.stages import OptimizerConfig
from jrlhf.data.batches import row_sharding
from jrlhf.meshes import TRAIN, make_mesh
from jrlhf.meshes.layout import TRAIN_TP
from jrlhf.meshes.plan import LayoutName, Placement, Slice
from jrlhf.models import LoRAConfig, ModelConfig, SamplingConfig, make_generate
from jrlhf.models.options import ForwardOptions
from jrlhf.models.remat import Remat
from jrlhf.models.weights import HeadKind
from jrlhf.planning.activations import Backend
from jrlhf.planning.memory import call_bytes, state_bytes
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.ppo import PPOConfig
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.critic import critic_step
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.optimizers import adamw

MIB = 2**20
PATH = RESULTS / "memory.json"
V5P_16 = Target("v5p-16", "tpu", "v5p:2x2x2", int(95.74 * 2**30))
MESHES = ((8, 1), (4, 2), (2, 4))
LAYOUTS: dict[str, LayoutName] = {"generate": "generate", "infer": "score", "train": "train"}


@dataclass(frozen=True)
class Case:
    """A call of PPO on 8 devices. call: its name in the graph. mesh: fsdp, tensor. lora: the rank of adapters."""

    call: str
    model: ModelConfig
    mesh: tuple[int, int]
    rows: int
    prompt: int
    response: int
    minibatches: int = 1
    micro_batches: int = 1
    remat: Remat = "full"
    fused_loss: bool = True
    tensor_parallel: bool = False
    dtype: str = "float32"
    data: int = 1
    lora: int | None = None
    int8: bool = False

    @property
    def adapter(self) -> LoRAConfig | None:
        return None if self.lora is None else LoRAConfig(rank=self.lora, alpha=float(self.lora))

    @property
    def workload(self) -> Workload:
        """PPO with both of its trained models of this architecture."""
        heads: dict[str, HeadKind] = {"actor": "lm", "critic": "scalar"}
        models = {
            role: (RoleModel(self.model, head, True, self.adapter, int8=self.int8),) for role, head in heads.items()
        }
        return Workload(
            graph_of(Config(stages=("ppo",))),
            models,
            rows=self.rows,
            prompt=self.prompt,
            response=self.response,
            mean_prompt=self.prompt,
            mean_response=self.response,
            minibatches=self.minibatches,
            dtype=jnp.dtype(self.dtype),
            remat=self.remat,
            fused_loss=self.fused_loss,
        )

    @property
    def placement(self) -> Placement:
        kind = self.workload.graph[self.call].kind
        layout = "generate" if self.lora else "train_tp" if self.tensor_parallel else LAYOUTS[kind]
        fsdp, tensor = self.mesh
        parts = self.micro_batches if kind == "train" else 1
        return Placement(Slice(0, self.data * fsdp * tensor), layout, self.data, fsdp, tensor, micro_batches=parts)


@dataclass(frozen=True)
class Found:
    """Bytes of one device. buffers: arguments and outputs, without what is both. temp: in between."""

    buffers: float
    temp: float

    @property
    def total(self) -> float:
        return self.buffers + self.temp

    def record(self) -> dict[str, float]:
        """The bytes as the file names them."""
        return {"held": self.buffers, "temp": self.temp}

    @staticmethod
    def of(record: Mapping[str, float]) -> "Found":
        """The bytes of a `record`."""
        return Found(record["held"], record["temp"])


def predicted(case: Case, backend: Backend) -> Found:
    """Bytes by the model."""
    workload = case.workload
    call = workload.graph[case.call]
    needs = call_bytes(workload, call, case.placement, backend)
    active = dict(needs.active)
    inputs, copy = active.pop("inputs"), active.pop("generation weights", 0.0)
    stored = state_bytes(workload.models[call.role], workload.itemsize, case.placement)
    base, weights = stored.get("base", 0.0), stored["weights"]
    if base and call.role == "critic" and not case.model.tie_embeddings:  # which reads no unembedding
        base -= case.model.padded_vocab * case.model.embed * workload.itemsize / case.placement.tensor
    states = {"train": weights + stored["optimizer"], "infer": weights, "generate": copy or weights}[call.kind]
    return Found(base + states + inputs, sum(active.values()))


def compiled(case: Case, devices: Sequence[Any], backend: Backend) -> Found:
    """Bytes that XLA says."""
    stats: Any = lowered(case, devices, backend).compile().memory_analysis()
    both = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Found(both, stats.temp_size_in_bytes)


def lowered(case: Case, devices: Sequence[Any], backend: Backend) -> jax.stages.Lowered:
    """The call's program."""
    mesh, model = make_mesh(case.data, *case.mesh, devices=devices[: case.placement.devices.count]), case.model
    lora = case.adapter
    options = ForwardOptions(dtype=jnp.dtype(case.dtype), remat=case.remat, attention=backend.attention)
    layout = TRAIN_TP if case.tensor_parallel else TRAIN
    compute = Compute(options, fused_loss=case.fused_loss, train_layout=layout)

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((case.rows, *shape), dtype, sharding=row_sharding(mesh))

    head = "scalar" if case.call.startswith("critic") else "lm"
    length, optimizer = case.prompt + case.response, OptimizerConfig()
    setting, adam = (Architecture(model, lora, lora is not None), mesh, compute), adamw(optimizer, updates=1)
    algorithm = PPOConfig(minibatches=case.minibatches, micro_batches=case.micro_batches)
    with jax.set_mesh(mesh):
        if lora is None:
            weights, base = whole_weights(model, mesh, head), ()
        else:
            weights, base = (
                adapter_weights(model, mesh, lora, head),
                (shared_base(model, mesh, compute.dtype, case.int8),),
            )
        match case.call:
            case "actor.generate":
                sampling = SamplingConfig(max_new_tokens=case.response, stop_ids=(0,))
                key = jax.eval_shape(lambda: jax.random.key(0)).dtype
                options = {"dtype": compute.dtype, "attention": backend.attention, "lora": lora}
                generate = jax.jit(make_generate(model, mesh, sampling, **options))
                copy = generation_copy(model, mesh, compute.dtype) if lora is None else weights
                return generate.lower(copy, rows(case.prompt), rows(), rows(dtype=key), *base)
            case "actor.logprobs":
                return (
                    CompiledModel(*setting).score_logprobs(temperature=1.0).lower(weights, rows(length), rows(), *base)
                )
            case "critic.values":
                return CompiledModel(*setting).score_values().lower(weights, rows(length), rows(), *base)
            case "actor.update":
                step = CompiledModel(*setting).actor_step(adam, algorithm, temperature=1.0, responses=None)
            case _:
                step = critic_step(CompiledModel(*setting), adam, algorithm)
        return step.lower(train_state(optimizer, weights, mesh), experience(mesh, rows, length), *base)


# ---- the grid


WIDE = ModelConfig(12288, embed=320, layers=6, heads=10, kv_heads=2, head_dim=32, mlp=1024, max_positions=4096)
DEEP = ModelConfig(
    6016, 384, layers=10, heads=8, kv_heads=8, head_dim=48, mlp=1536, max_positions=4096, tie_embeddings=False
)
LEXICAL = ModelConfig(
    24576, 256, layers=4, heads=4, kv_heads=4, head_dim=64, mlp=1024, max_positions=4096, tie_embeddings=False
)
QWEN_4B = ModelConfig(
    151936, 2560, layers=36, heads=32, kv_heads=8, head_dim=128, mlp=9728, max_positions=4096, qk_norm=True
)
LLAMA_13B = ModelConfig(
    32000, 5120, layers=40, heads=40, kv_heads=40, head_dim=128, mlp=13824, max_positions=4096, tie_embeddings=False
)


def cpu_cases() -> Iterator[Case]:
    """Float32: every call on every mesh, and the ways to train."""
    calls = ("actor.update", "critic.update", "actor.logprobs", "critic.values", "actor.generate")
    for (model, rows, prompt, response), mesh in product(
        ((WIDE, 64, 96, 96), (DEEP, 32, 48, 80), (LEXICAL, 64, 64, 192)), MESHES
    ):
        if model.heads % mesh[1] == 0 and (model.kv_heads % mesh[1] == 0 or mesh[1] % model.kv_heads == 0):
            for call in calls:
                yield Case(call, model, mesh, rows, prompt, response)
    update = Case("actor.update", WIDE, (4, 2), 64, 96, 96)
    for remat in ("offload", "attention", "products", "gather"):
        yield replace(update, remat=remat)
    for parts in (2, 4):
        yield replace(update, micro_batches=parts)
        yield replace(update, model=DEEP, call="critic.update", micro_batches=parts)
    yield replace(update, fused_loss=False)
    yield replace(update, tensor_parallel=True)
    yield replace(update, minibatches=4)


def accelerator_cases() -> Iterator[Case]:
    """Bfloat16: models of 4 and 13 billion parameters."""
    for model, rows, length in ((QWEN_4B, 128, 512), (LLAMA_13B, 64, 1024)):
        sizes = {"rows": rows, "prompt": length, "response": length, "dtype": "bfloat16"}
        for mesh in MESHES:
            for call in ("actor.update", "critic.update"):
                yield Case(call, model, mesh, minibatches=2, micro_batches=4, **sizes)
            yield Case("actor.logprobs", model, mesh, **sizes)
        yield Case("actor.update", model, (8, 1), **sizes)
        yield Case("critic.values", model, (8, 1), **sizes)
        yield Case("actor.generate", replace(model, layers=4), (4, 2), **sizes)


def asked(case: Case) -> dict[str, Any]:
    """A case, as it is written: what adapters and replicas add only where there are some."""
    sizes = {name: getattr(case.model, name) for name in ("embed", "layers", "heads", "kv_heads", "mlp", "vocab_size")}
    new = {"data": 1, "lora": None, "int8": False}
    rest = {name: value for name, value in asdict(case).items() if name not in new or value != new[name]}
    return {**rest, "mesh": list(case.mesh), "model": sizes}


def row(case: Case, prediction: Found, measurement: Found) -> dict[str, Any]:
    """A result, as it is written."""
    result = {
        **asked(case),
        "predicted": prediction.record(),
        "compiled": measurement.record(),
    }
    errors = {
        "total_error": prediction.total / measurement.total - 1,
        "temp_error": prediction.temp / measurement.temp - 1,
    }
    return {
        **result,
        **{name: round(error, 4) for name, error in errors.items()},
        "within": within(prediction, measurement),
    }


def within(prediction: Found, measurement: Found) -> bool:
    """Total within 10 %, and temp alone within 15 % where it is at least half of it."""
    temp = abs(prediction.temp / measurement.temp - 1) <= 0.15 or measurement.temp < measurement.total / 2
    return abs(prediction.total / measurement.total - 1) <= 0.1 and temp


def measure(target: str, *, again: bool = False) -> None:
    """Compiles all cases of a target, prints a line each and writes them. again: takes the file's compiled figures."""
    targets = {**TARGETS, V5P_16.name: V5P_16}
    if target == "cpu":
        backend, devices, cases = Backend("cpu"), jax.devices(), cpu_cases()
    else:
        platform = "gpu" if targets[target].platform == "cuda" else "tpu"
        # cuDNN's attention cannot be compiled without a GPU.
        backend, devices = Backend(platform, "xla" if platform == "gpu" else None), devices_of(targets[target])
        cases = accelerator_cases()
    results: list[dict[str, Any]] = []
    records = json.loads(PATH.read_text())["targets"][target]["results"] if again else []
    for number, case in enumerate(cases):
        prediction = predicted(case, backend)
        measurement = Found.of(records[number]["compiled"]) if again else compiled(case, devices, backend)
        assert not again or {**records[number], **asked(case)} == records[number], (
            f"{case} is not in {PATH}: compile it"
        )
        results.append(row(case, prediction, measurement))
        sizes = f"{measurement.total / MIB:9.1f} MiB, temp {measurement.temp / MIB:9.1f}"
        errors = f"{results[-1]['total_error']:+7.1%} {results[-1]['temp_error']:+7.1%}"
        verdict = "" if results[-1]["within"] else "  OUT"
        named = f"{case.call:15} D={case.model.embed:<5} {case.mesh} x{case.micro_batches} {case.remat}"
        print(f"{named:50} {sizes}  predicted {errors}{verdict}", flush=True)
        merge(target, results)  # the next may take long
    share = sum(result["within"] for result in results) / len(results)
    print(f"{share:.0%} of {len(results)} within 10 % in total, and 15 % in temp where it is half; wrote {PATH}")


def merge(target: str, results: Sequence[dict[str, Any]]) -> None:
    """Puts a target's results into the file, in the place of earlier ones."""
    old = json.loads(PATH.read_text())["targets"] if PATH.exists() else {}
    share = round(sum(result["within"] for result in results) / len(results), 4)
    new = {**provenance("jax", "jaxlib"), "within": share, "results": results}
    write(PATH, {"benchmark": "memory", "targets": {**old, target: new}})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Predicted memory against that of compiled programs.")
    parser.add_argument("--target", choices=["cpu", *TARGETS, V5P_16.name], default="cpu")
    parser.add_argument("--again", action="store_true", help="of a CPU: compile nothing, predict anew")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
        measure("cpu", again=options.again)
    elif options.compile:
        measure(options.target)
    else:
        import subprocess
        import sys

        target = TARGETS.get(options.target, V5P_16)
        command = [sys.executable, "-m", "benchmarks.memory", "--target", options.target, "--compile"]
        raise SystemExit(subprocess.run(command, env=compiler_environment(target)).returncode)
