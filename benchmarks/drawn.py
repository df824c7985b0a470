"""Memory of programs that are drawn at random, predicted and as compiled.

    python -m benchmarks.drawn fitting 20000:20210
    python -m benchmarks.drawn fresh 70000:70500

A seed is a program: a call of PPO on 8 devices, with a model of one of the supported families, in float32. Programs are
compiled for simulated CPU devices and never run; those of less than 100 MiB are left out. The counts of
`jrlhf.planning.activations` were read from programs of "fitting": seeds 0:141, 20000:20210, 50000:50300 and
60000:60300, and of 141:394 those that do not train. "fresh" ones were drawn only when all counts were final: seeds
70000:70500.

Compiles the seeds that `benchmarks/results/memory-drawn.json` lacks, and predicts all of its programs anew.
"""

import argparse
import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from benchmarks.memory import MIB, Case, Found, compiled, predicted
from benchmarks.records import RESULTS, provenance, write
from jrlhf.models import ModelConfig
from jrlhf.models.remat import REMATS
from jrlhf.planning.activations import Backend

PATH = RESULTS / "memory-drawn.json"
LEAST = 100 * MIB
CPU = Backend("cpu")
# These change what LLVM makes of a program, and no buffer by more than 1e-4.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

MESHES = [(data, fsdp, 8 // data // fsdp) for data in (1, 2, 4, 8) for fsdp in (1, 2, 4, 8) if data * fsdp <= 8]
CALLS = ("actor.update", "critic.update", "actor.logprobs", "critic.values", "actor.generate")


def family(draw: random.Random, layers: int, head_dim: int, embed: int) -> tuple[str, dict[str, Any]]:
    """Returns the name of a family and its switches."""
    windows = tuple(bool((index + 1) % 2) for index in range(layers))
    gemma = {"norm_offset": True, "post_norms": True, "activation": "gelu_tanh", "embed_scale": embed**0.5}
    gemma |= {"window": draw.choice((32, 128, 512)), "local_layers": windows, "query_scale": head_dim**-0.5}
    biases = {"qkv_bias": True, "mlp_bias": True, "output_bias": True}
    families: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"window": draw.choice((32, 128, 512))},
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": True},
        "gemma2": {**gemma, "softcap": 30.0, "attention_softcap": 50.0},
        "gemma3": {**gemma, "qk_norm": True, "local_rope_theta": 10000.0},
        "gpt2": {"norm": "layer", "positions": "learned", "gated_mlp": False, "activation": "gelu_tanh", **biases},
    }
    name = draw.choice(list(families))
    tied = name.startswith("gemma") or name == "gpt2" or draw.random() < 0.4
    return name, {**families[name], "tie_embeddings": tied}


def drawn(seed: int) -> tuple[str, Case]:
    """Returns the family and the program of a seed."""
    draw = random.Random(seed)
    while True:
        call, adapters = draw.choice(CALLS), draw.random() < 0.3
        unrolled = adapters or call == "actor.generate"
        layers, head_dim = draw.randint(2, 3 if unrolled else 12), draw.choice((32, 64, 128))
        embed = 64 * draw.randint(4, 20)
        name, switches = family(draw, layers, head_dim, embed)
        kv_heads = draw.choice((1, 2, 4, 8))
        heads = kv_heads * draw.choice((1, 2, 4))
        if name == "gpt2":
            kv_heads = heads
        data, fsdp, tensor = draw.choice(MESHES)
        mlp = 128 * max(1, round(embed * draw.uniform(1.5, 4.5) / 128))
        prompt, response = 16 * draw.randint(2, 16), 16 * draw.randint(2, 16)
        model = ModelConfig(
            128 * draw.randint(8, 400), embed, layers, heads, kv_heads, head_dim, mlp, max_positions=512, **switches
        )
        minibatches, micro_batches = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4))
        training = call.endswith("update")
        rows = 8 * draw.choice((1, 2, 4, 8, 16, 32)) * (minibatches * micro_batches if training else 1)
        case = Case(call, model, (fsdp, tensor), rows, prompt, response, data=data)
        if training:
            remats = [remat for remat in REMATS if not (adapters and remat == "gather")]
            case = replace(
                case,
                minibatches=minibatches,
                micro_batches=micro_batches,
                remat=draw.choice(remats),
                fused_loss=draw.random() < 0.7,
                tensor_parallel=tensor > 1 and draw.random() < 0.3,
            )
        if adapters:
            case = replace(case, lora=draw.choice((4, 8, 16, 64)), int8=draw.random() < 0.4, tensor_parallel=False)
        weights = layers * embed * (2 * (heads + kv_heads) * head_dim + 3 * mlp) + 2 * embed * model.padded_vocab
        divided = heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0) and not mlp % tensor
        if adapters and name == "gpt2" or not divided or embed % fsdp:
            continue
        if weights < 60e6:
            return name, case


def row(seed: int, measurement: Found) -> dict[str, Any]:
    """A result, as it is written."""
    name, case = drawn(seed)
    kind, prediction = case.call + (" adapter" if case.lora else ""), predicted(case, CPU)
    whole = {part: round(size) for part, size in prediction.record().items()}  # Python 3.12 rounds sums differently
    figures = {"compiled": measurement.record(), "predicted": whole}
    return {
        "seed": seed,
        "family": name,
        "kind": kind,
        **figures,
        "error": round(prediction.total / measurement.total - 1, 4),
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many programs are within 10 and 20 percent, and of each kind within 10."""
    kinds = sorted({result["kind"] for result in results})
    near = {kind: [abs(result["error"]) <= 0.1 for result in results if result["kind"] == kind] for kind in kinds}
    errors = [abs(result["error"]) for result in results]
    return {
        "programs": len(results),
        "within 10 %": sum(error <= 0.1 for error in errors),
        "within 20 %": sum(error <= 0.2 for error in errors),
        "worst": max(errors),
        "kinds": {kind: f"{sum(flags)} of {len(flags)}" for kind, flags in near.items()},
    }


def main(name: str, first: int, last: int) -> None:
    sets: dict[str, Mapping[str, Any]] = json.loads(PATH.read_text())["sets"] if PATH.exists() else {}
    measured = {result["seed"]: Found.of(result["compiled"]) for result in sets.get(name, {}).get("results", ())}
    small = set(sets.get(name, {}).get("small", ()))
    for seed in range(first, last):
        if seed not in measured and seed not in small:
            measurement = compiled(drawn(seed)[1], jax.devices(), CPU)
            if measurement.total < LEAST:
                small.add(seed)
            else:
                measured[seed] = measurement
                print(row(seed, measurement), flush=True)
    for other in {**sets, name: {}}:
        of = measured if other == name else {r["seed"]: Found.of(r["compiled"]) for r in sets[other]["results"]}
        results = [row(seed, of[seed]) for seed in sorted(of)]
        left = sorted(small) if other == name else sets[other]["small"]
        sets[other] = {"summary": summary(results), "small": left, "results": results}
        print(other, sets[other]["summary"])
    write(PATH, {"benchmark": "memory of drawn programs", **provenance("jax", "jaxlib"), "sets": sets})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory of programs that are drawn at random.")
    parser.add_argument("set", choices=("fitting", "fresh"))
    parser.add_argument("seeds", help="FIRST:END")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    jax.config.update("jax_num_cpu_devices", 8)
    main(options.set, *map(int, options.seeds.split(":")))
