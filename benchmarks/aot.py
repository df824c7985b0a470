"""The programs of an iteration of PPO or of an algorithm without a critic, compiled for hardware that is not there.

    python -m benchmarks.aot --target h200x8
    python -m benchmarks.aot --target v5p-512 --config llama3-70b-ppo --part train,reshard
    python -m benchmarks.aot --target h200x1 --config gsm8k-ppo ppo.rollout_batch=64

XLA itself compiles, for a described topology: TPUs by libtpu, NVIDIA GPUs by JAX's CUDA plugin, neither of which needs
a device. Both are installed on first use, at the versions that the running JAX asks for, into a cache directory of
their own. Every program is compiled in a process of its own, which a compiler may abort and a deadline may end.

For each: bytes of a device that it reads, makes, reuses and needs in between; the most that the device holds while it
runs, with the weights and optimizer states of all roles beside it, and whether that fits; its collectives with their
bytes, as often as they run where the compiler knows how often; and what one trip of its largest loop launches. Merges
them into `benchmarks/results/aot-TARGET.json`. A GPU's memory is all of it: JAX takes three quarters, unless
XLA_PYTHON_CLIENT_MEM_FRACTION tells it otherwise.

The mesh is the config's where it has as many devices as the target; else `tensor` stays as far as it divides them,
`fsdp` takes the rest, and there are as many micro-batches as every device has rows for.

For GPUs, attention is XLA's, also when decoding, for cuDNN cannot be compiled without one: `scores` is what one layer's
take in float32, of which `temp` holds a few, and would hold none with an attention that does not store them. For TPUs
it is the config's, or the default. Register spills and speed are not known.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from benchmarks import records
from benchmarks.hlo import Traffic, collective_traffic, loops
from benchmarks.records import RESULTS, joined, provenance, write
from benchmarks.shapes import (
    Shapes,
    adapter_weights,
    device_bytes,
    experience,
    generation_copy,
    shared_base,
    train_state,
    whole_weights,
)
from benchmarks.targets import (
    GB,
    TARGETS,
    Target,
    compiler_environment,
    devices_of,
)
from jrlhf.algorithms.registry import stage_graph
from jrlhf.config import Config, load_config
from jrlhf.config.check import mesh_sizes, validate
from jrlhf.config.schema import MeshConfig
from jrlhf.data.batches import row_sharding
from jrlhf.errors import UserError
from jrlhf.meshes import AXES, GENERATE, make_mesh
from jrlhf.models import LoRAConfig, ModelConfig, SamplingConfig, make_generate, param_shardings
from jrlhf.planning.fit import memory_of
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.critic import critic_step
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.optimizers import adamw
from jrlhf.roles.pretrained import adapter_of
from jrlhf.stages.setup import architectures, compute_of
from tests.support.reshard import lower_reshard


@dataclass(frozen=True)
class Setup:
    """A config on a target's mesh."""

    config: Config
    mesh: Mesh
    models: dict[str, ModelConfig]

    @property
    def compute(self) -> Compute:
        section = self.config.compute
        cuda = self.mesh.devices.flat[0].platform in ("cuda", "gpu")
        return compute_of(replace(section, attention="xla") if cuda else section)

    @property
    def lora(self) -> LoRAConfig | None:
        return None if self.config.lora is None else adapter_of(self.config.lora, self.models["actor"])

    @property
    def actor(self) -> tuple[CompiledModel, Shapes, tuple[Shapes, ...]]:
        """The actor's functions, its own weights, and the base under them where these are an adapter."""
        model, lora = self.models["actor"], self.lora
        functions = CompiledModel(Architecture(model, lora, shared=lora is not None), self.mesh, self.compute)
        if self.config.lora is None or lora is None:
            return functions, whole_weights(model, self.mesh), ()
        base = shared_base(model, self.mesh, self.compute.dtype, self.config.lora.base == "int8")
        return functions, adapter_weights(model, self.mesh, lora), (base,)

    @property
    def sampling(self) -> SamplingConfig:
        """A run's settings, but for stop tokens, which come with a tokenizer: which they are does not matter here."""
        drawing = self.config.sampling.drawing
        return SamplingConfig(max_new_tokens=self.config.data.max_response, **drawing, stop_ids=(0,))

    def rows(self, *shape: int, dtype: Any = jnp.int32) -> Shapes:
        """An array with a rollout's rows."""
        shape = (self.config.rl.rollout_batch, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(self.mesh))

    @property
    def length(self) -> int:
        return self.config.data.max_prompt + self.config.data.max_response

    @property
    def experience(self) -> Shapes:
        batch, kl_coef = experience(self.mesh, self.rows, self.length), None
        if "critic" in self.models:
            return batch
        if self.config.rl.algorithm.kl_in == "loss":
            kl_coef = jax.ShapeDtypeStruct((), jnp.float32, sharding=batch.version.sharding)
        return replace(batch, values=None, rewards=None, returns=None, kl_coef=kl_coef)


@dataclass(frozen=True)
class Program:
    """A function of an iteration, lowered: one program, or the several that run one after the other.

    resident: bytes of a device's arguments that are there whether it runs or not, as weights or optimizer states.
    """

    lowered: Sequence[Lowered]
    resident: int


def switch(setup: Setup) -> Program:
    """The actor's weights from TRAIN to GENERATE, in groups."""
    actor = setup.models["actor"]
    weights = whole_weights(actor, setup.mesh)
    lowered = lower_reshard(weights, param_shardings(actor, setup.mesh, GENERATE), dtype=setup.compute.dtype)
    return Program(lowered, max(device_bytes(stage.in_avals) for stage in lowered))


def generate(setup: Setup) -> Program:
    """A rollout: prefill and decode loop."""
    actor = setup.models["actor"]
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    compute = setup.compute
    _, weights, base = setup.actor
    if not base:
        weights = generation_copy(actor, setup.mesh, compute.dtype)
    options = {"dtype": compute.dtype, "attention": compute.options.attention, "lora": setup.lora}
    function = jax.jit(make_generate(actor, setup.mesh, setup.sampling, **options))
    prompts = setup.rows(setup.config.data.max_prompt), setup.rows(), setup.rows(dtype=key)
    return Program([function.lower(weights, *prompts, *base)], device_bytes((weights, base)) if base else 0)


def score_logprobs(setup: Setup) -> Program:
    """Old log-probabilities, by the actor that is trained; the reference's program differs in its arguments' dtype.

    Where the reference is the base under the actor's adapter, it is one program for both.
    """
    functions, weights, base = setup.actor
    make = functions.score_logprobs_with_base if setup.config.reference_is_base else functions.score_logprobs
    function = make(temperature=setup.config.sampling.temperature, span=setup.sampling.max_new_tokens)
    lowered = function.lower(weights, setup.rows(setup.length), *[setup.rows()] * 2, *base)
    return Program([lowered], device_bytes((weights, base)))


def score_values(setup: Setup) -> Program:
    """The critic's values."""
    critic = setup.models["critic"]
    function = CompiledModel(Architecture(critic), setup.mesh, setup.compute).score_values()
    weights = whole_weights(critic, setup.mesh, "scalar")
    return Program([function.lower(weights, setup.rows(setup.length), setup.rows())], device_bytes(weights))


def train_actor(setup: Setup) -> Program:
    """All the actor's updates on a rollout."""
    (functions, weights, base), section = setup.actor, setup.config.rl
    optimizer = adamw(section.actor, updates=1)
    settings = {"temperature": setup.config.sampling.temperature, "responses": setup.sampling.max_new_tokens}
    function = functions.actor_step(optimizer, section.algorithm, **settings)
    state = train_state(section.actor, weights, setup.mesh)
    return Program([function.lower(state, setup.experience, *base)], device_bytes((state, base)))


def train_critic(setup: Setup) -> Program:
    """All the critic's updates on a rollout."""
    critic, section = setup.models["critic"], setup.config.sections["ppo"]
    optimizer = adamw(section.critic, updates=1)
    function = critic_step(CompiledModel(Architecture(critic), setup.mesh, setup.compute), optimizer, section.algorithm)
    state = train_state(section.critic, whole_weights(critic, setup.mesh, "scalar"), setup.mesh)
    return Program([function.lower(state, setup.experience)], device_bytes(state))


# In the order of an iteration. A part is all whose names begin with it.
PROGRAMS: dict[str, Callable[[Setup], Program]] = {
    "reshard": switch,
    "generate": generate,
    "score_logprobs": score_logprobs,
    "score_values": score_values,
    "train_critic": train_critic,
    "train_actor": train_actor,
}
OF_CRITICS = "score_values", "train_critic"


def fitted(config: Config, devices: int) -> Config:
    """The config on so many devices: its mesh where that has as many, else as this module's docstring says.

    Raises:
        UserError: its critic is an adapter, it has no stage of reinforcement learning, or fits no mesh.
    """
    if config.algorithm is None:
        raise UserError(f"config {config.name} has no stage of reinforcement learning: name another")
    if config.lora is not None and config.rl.algorithm.has_critic:
        raise UserError(f"config {config.name} trains adapters of a critic, which are not compiled here: name another")
    try:
        mesh_sizes(config.mesh, devices)
        return config
    except UserError:
        tensor = math.gcd(max(config.mesh.tensor, 1), devices)
    ppo, algorithm = config.rl, config.rl.algorithm
    parts = ppo.rollout_batch // (devices * algorithm.minibatches)  # rows of a device in a minibatch
    micro_batches = max((n for n in range(1, algorithm.micro_batches + 1) if parts % n == 0), default=1)
    algorithm = replace(algorithm, micro_batches=micro_batches)
    mesh = MeshConfig(data=1, fsdp=devices // tensor, tensor=tensor)
    return replace(config, mesh=mesh, sections={**config.sections, config.algorithm: replace(ppo, algorithm=algorithm)})


def setup_on(config: Config, devices: Sequence[Any]) -> Setup:
    """Raises UserError where the config does not fit the devices."""
    models = architectures(config)
    validate(config, len(devices), models)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    return Setup(config, make_mesh(data, fsdp, tensor, devices=devices), models)


# ---- compiling, and what a compiled program says


def held(setup: Setup) -> float:
    """Bytes of a device's weights and optimizer states of all roles, between calls."""
    roles = memory_of(setup.config, stage_graph(setup.config, setup.config.stages[-1]), setup.mesh, setup.models).roles
    return sum(parts.get(part, 0) for parts in roles.values() for part in ("weights", "optimizer"))


def attention_scores(name: str, setup: Setup) -> int:
    """Bytes of one layer's float32 attention scores on a device: [rows, heads, T, T]."""
    sizes, algorithm = setup.mesh.shape, setup.config.rl.algorithm
    model = setup.models["critic" if name in OF_CRITICS else "actor"]
    rows, heads, length = setup.config.rl.rollout_batch // setup.mesh.size, model.heads, setup.length
    if name == "reshard":
        return 0
    if name == "generate":
        rows, heads, length = rows * sizes["tensor"], heads // sizes["tensor"], setup.config.data.max_prompt
    if name.startswith("train"):
        rows //= algorithm.minibatches * algorithm.micro_batches
    return 4 * rows * heads * length**2


def measured(name: str, setup: Setup, memory: int) -> dict[str, Any]:
    """Compiles a program of the iteration; what it takes of a device."""
    with jax.set_mesh(setup.mesh):
        program = PROGRAMS[name](setup)
    start = time.perf_counter()
    compiled = [(stage.compile(), count) for stage, count in distinct(program.lowered)]
    seconds = time.perf_counter() - start
    stats: list[tuple[Any, int]] = [(executable.memory_analysis(), count) for executable, count in compiled]
    arguments = max(stat.argument_size_in_bytes for stat, _ in stats)  # one after the other, what they make stays
    outputs = sum(stat.output_size_in_bytes * count for stat, count in stats)
    alias = sum(stat.alias_size_in_bytes * count for stat, count in stats)
    temp = max(stat.temp_size_in_bytes for stat, _ in stats)
    peak = held(setup) - program.resident + arguments + outputs - alias + temp
    traffic: dict[str, Traffic] = {}
    for executable, count in compiled:
        for kind, met in collective_traffic(executable).items():
            traffic[kind] = sum([met] * count, traffic.get(kind, Traffic()))
    largest = loops(compiled[0][0])[:1]
    return {
        "program": name,
        "programs": sum(count for _, count in compiled),
        "arguments": arguments,
        "outputs": outputs,
        "alias": alias,
        "temp": temp,
        "scores": attention_scores(name, setup) if setup.compute.options.attention == "xla" else 0,
        "peak": peak,
        "fits": peak <= memory,
        "collectives": {kind: asdict(met) for kind, met in sorted(traffic.items())},
        "largest_loop": asdict(largest[0]) if largest else None,
        "compile_seconds": round(seconds, 1),
    }


def distinct(lowered: Sequence[Lowered]) -> list[tuple[Lowered, int]]:
    """One of each kind, and how many are alike: groups of layers that differ in nothing but their indices."""
    kinds: dict[Any, list[Lowered]] = {}
    for stage in lowered:
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves((stage.in_avals, stage.out_info))]
        kinds.setdefault(str(shapes), []).append(stage)
    return [(alike[0], len(alike)) for alike in kinds.values()]


def in_process_of_its_own(name: str, target: Target, arguments: Sequence[str], deadline: float) -> dict[str, Any]:
    """`measured` by another process, or in one sentence what became of it."""
    command = [sys.executable, "-m", "benchmarks.aot", "--target", target.name, "--compile", name, *arguments]
    try:
        done = subprocess.run(
            command, env=compiler_environment(target), capture_output=True, text=True, timeout=deadline
        )
    except subprocess.TimeoutExpired:
        return {"program": name, "fits": None, "error": f"not compiled within {deadline:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    errors = [line for line in done.stderr.splitlines() if "rror" in line or "RESOURCE_EXHAUSTED" in line]
    reason = errors[-1] if errors else f"exit code {done.returncode}"
    fits = False if "RESOURCE_EXHAUSTED" in reason else None  # TPU programs that are too large do not compile
    return {"program": name, "fits": fits, "error": reason[:300]}


# ---- output


SIZES = {
    "arguments": "reads",
    "outputs": "makes",
    "alias": "reuses",
    "temp": "temp",
    "scores": "scores",
    "peak": "peak",
}


def table(results: Iterable[dict[str, Any]]) -> str:
    """One line a program; sizes in GB of 1e9 bytes."""
    head = " ".join(f"{name:>8}" for name in SIZES.values())
    lines = [f"{'GB':15} {head}  fits  compiled  collectives"]
    for result in results:
        if "error" in result:
            lines.append(f"{result['program']:15} {result['error']}")
            continue
        sizes = " ".join(f"{result[kind] / GB:8.2f}" for kind in SIZES)
        verdict = "yes" if result["fits"] else "NO"
        met = [f"{kind} {one['count']}x {one['bytes'] / GB:.2f}" for kind, one in result["collectives"].items()]
        seconds = f"{result['compile_seconds']:.0f} s"
        lines.append(f"{result['program']:15} {sizes}  {verdict:4}  {seconds:>8}  {', '.join(met) or 'none'}")
    return "\n".join(lines)


def merge(path: Path, record: dict[str, Any], key: dict[str, Any], results: Iterable[dict[str, Any]]) -> None:
    """Puts the results into the file, each in the place of an earlier one of its config and program."""
    merged = joined(path, [key | result for result in results], ("config", "program"))
    write(path, {**record, "results": sorted(merged, key=lambda result: result["config"])})


def main(options: argparse.Namespace) -> None:
    target = TARGETS[options.target]
    chosen = [name for name in PROGRAMS if any(name.startswith(part) for part in options.part.split(","))]
    given = ["--config", options.config, *options.overrides]
    config = fitted(load_config(options.config, options.overrides), target.devices)
    if not config.rl.algorithm.has_critic:
        chosen = [name for name in chosen if name not in OF_CRITICS]
    if config.lora is not None:
        chosen = [name for name in chosen if name != "reshard"]  # an adapter generates where it trains
    if not chosen:
        raise UserError(f"--part {options.part} names no program of it: known are {', '.join(PROGRAMS)}")
    sizes = dict(zip(AXES, mesh_sizes(config.mesh, target.devices), strict=True))
    described = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    attention = "xla" if target.platform == "cuda" else config.compute.attention or "default"
    print(f"{config.name} on {target.name}: {described}, {target.memory / GB:.1f} GB a device; attention: {attention}")
    path = RESULTS / f"aot-{target.name}.json"
    hardware = {"target": asdict(target), "compiled_on": records.hardware()}
    key = {"config": " ".join([options.config, *options.overrides]), "mesh": sizes, **provenance("jax", "jaxlib")}
    key |= {"micro_batches": config.rl.algorithm.micro_batches, "attention": attention}
    results = []
    for name in chosen:
        results.append(in_process_of_its_own(name, target, given, options.deadline))
        merge(path, {"benchmark": "aot", **hardware}, key, results[-1:])  # the next may take long
        print(table(results[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(results)}\nwrote {path}")


def compile_one(options: argparse.Namespace) -> None:
    """In the process of its own: prints one line of JSON."""
    target = TARGETS[options.target]
    devices = devices_of(target)
    config = fitted(load_config(options.config, options.overrides), len(devices))
    print(json.dumps(measured(options.compile, setup_on(config, devices), target.memory)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The programs of an iteration, compiled for absent hardware.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the config's")
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--config", default="llama3-8b-ppo", help="a shipped config or a YAML file")
    parser.add_argument("--part", default=",".join(PROGRAMS), help="reshard, generate, score, train, or names of these")
    parser.add_argument("--deadline", type=float, default=1800, help="seconds for one program")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    try:
        compile_one(options) if options.compile else main(options)
    except UserError as error:
        raise SystemExit(f"benchmarks.aot: {error}") from error
