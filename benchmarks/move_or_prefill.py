"""Predicts the move of the last rows to other devices: with their caches, or by a prefill of their tokens there.

    python -m benchmarks.move_or_prefill          # writes benchmarks/results/move_or_prefill.json; a second

Eight rows of a length arrive on a device. The links are those of an H100's data sheet, PCIe of two generations, and
Ethernet ports that eight devices share. `slowest_link` is the rate in bytes per second below which the prefill is
faster; collectives reach three quarters of it, as in all predictions of the planner.
"""

from dataclasses import replace

from benchmarks.records import output_path, provenance, write
from jrlhf.algorithms.registry import graph_of
from jrlhf.config import load_config
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import ModelConfig
from jrlhf.models.flops import cache_bytes
from jrlhf.planning import moves
from jrlhf.planning.auto import prices_of
from jrlhf.planning.workload import workload_of

ROWS, LENGTHS = 8, (512, 2048, 8192, 32768)
H100 = HARDWARE["h100"]
LINKS = {"NVLink": H100.link, "NDR port": H100.network, "PCIe 5": 64e9, "PCIe 4": 32e9, "100GbE / 8": 12.5e9 / 8}
# The last has one key head per query head, and so large caches for its size.
MODELS = {
    "Qwen2.5-0.5B": ModelConfig(151936, 896, 24, heads=14, kv_heads=2, head_dim=64, mlp=4864, max_positions=32768),
    "Llama-3.1-8B": ModelConfig(128256, 4096, 32, heads=32, kv_heads=8, head_dim=128, mlp=14336, max_positions=32768),
    "Llama-2-7B": ModelConfig(32000, 4096, 32, heads=32, kv_heads=32, head_dim=128, mlp=11008, max_positions=32768),
}


def predicted(model: ModelConfig, length: int) -> tuple[float, float]:
    """Returns (seconds of a prefill of the rows, bytes of their caches), in bfloat16 on an H100."""
    config = load_config("arithmetic-grpo", ["compute.dtype=bfloat16"])
    graph = graph_of(config)
    workload = replace(workload_of(config, graph, {"actor": model, "reference": model}), prompt=length)
    divided = prices_of(config, workload, Cluster(H100, 1)).divided(
        graph["actor.generate"], Placement(Slice(0, 1), "generate")
    )
    return sum(divided.prefill(ROWS).values()), ROWS * length * cache_bytes(model, workload.itemsize)


def move(size: float, link: float) -> float:
    """Returns the seconds in which `size` bytes arrive on a device."""
    source, target = (Placement(Slice(start, 1), "generate") for start in (0, 1))
    return moves.transfer_seconds(size, source, target, Cluster(replace(H100, link=link), 2))


def slowest_link(prefill: float, size: float) -> float:
    """Returns the rate in bytes per second at which `size` bytes arrive as fast as a prefill of these seconds ends."""
    return size / (H100.collective * (prefill - H100.latency))


def main() -> None:
    path, results = output_path(__doc__, "move_or_prefill"), []
    for name, model in MODELS.items():
        for length in LENGTHS:
            prefill, size = predicted(model, length)
            results.append(
                {"model": name, "length": length, "bytes": round(size), "prefill": round(prefill, 5)}
                | {"move": {link: round(move(size, rate), 5) for link, rate in LINKS.items()}}
                | {"slowest_link": round(slowest_link(prefill, size))}
            )
            print(results[-1])
    write(path, {**provenance(), "hardware": "predicted for h100", "rows": ROWS, "results": results})


if __name__ == "__main__":
    main()
