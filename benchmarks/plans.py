"""Predicted against measured seconds of calls, over plans of the quickstart's graph on simulated devices.

    python -m benchmarks.plans [--repeats 20] [--profile FILE]

Measures the hardware (`jrlhf.planning.profile`), which is kept in a file as `python -m jrlhf.plan --profile` keeps it;
predicts each call of each plan from that; runs all calls of all plans in turns, so that what else the machine does
meets all alike; and writes `results/plans-cpu.json` and a chart, beside which stands ReaL's published table.

A plan's seconds are the sum of its calls', which follow each other here. What is compared is the least time, as in the
profile: what else the machine does only adds to it. The spread is that of the least times of the runs' thirds.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks import published
from benchmarks.records import RESULTS, hardware, provenance, write
from jrlhf.algorithms.registry import graph_of
from jrlhf.config.schema import Config
from jrlhf.config.stages import OptimizerConfig
from jrlhf.data.batches import row_sharding
from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.meshes.graph import Kind
from jrlhf.meshes.plan import LayoutName, Placement, Plan, Slice
from jrlhf.models import ModelConfig, SamplingConfig, init_lm, init_scalar, param_shardings
from jrlhf.models.options import ForwardOptions
from jrlhf.models.remat import Remat
from jrlhf.planning.profile import ProfiledCosts, cluster_of, default_path, load, save
from jrlhf.planning.profile import measure as measure_parts
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.ppo import PPOConfig, TrainState
from jrlhf.ppo.types import Experience
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.critic import critic_step
from jrlhf.roles.generating import engine_of
from jrlhf.roles.model import Architecture, Compute, Model, generation_weights
from jrlhf.roles.optimizers import adamw

DEVICES, PROMPT, RESPONSE = 4, 20, 24
THIRDS = 3
MODEL = ModelConfig.tiny(1024)
GRAPH = graph_of(Config(stages=("ppo",)))
CALLS = tuple(call for call in GRAPH if call.kind != "compute")  # those with a model


@dataclass(frozen=True)
class Case:
    """One plan: all calls on all devices, on one mesh. batch: rows of a rollout."""

    mesh: tuple[int, int, int]
    batch: int = 128
    micro_batches: int = 1
    remat: Remat = "full"

    @property
    def name(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return f"{mesh} batch {self.batch} micro {self.micro_batches} {self.remat}"

    @property
    def plan(self) -> Plan:
        data, fsdp, tensor = self.mesh
        layouts: dict[Kind, LayoutName] = {"generate": "generate", "infer": "score", "train": "train"}
        return Plan(
            self.name,
            {
                call.name: Placement(
                    Slice(0, DEVICES),
                    layouts[call.kind],
                    data,
                    fsdp,
                    tensor,
                    micro_batches=self.micro_batches if call.kind == "train" else 1,
                )
                for call in CALLS
            },
        )

    @property
    def workload(self) -> Workload:
        models = {
            "actor": (RoleModel(MODEL, "lm", True),),
            "critic": (RoleModel(MODEL, "scalar", True),),
            "reference": (RoleModel(MODEL, "lm", False),),
            "reward": (RoleModel(MODEL, "scalar", False),),
        }
        return Workload(GRAPH, models, self.batch, PROMPT, RESPONSE, float(PROMPT), float(RESPONSE), remat=self.remat)


CASES = (
    Case((1, 2, 2)),  # the quickstart's
    Case((4, 1, 1)),
    Case((1, 4, 1)),
    Case((2, 2, 1)),
    Case((1, 1, 4)),
    Case((1, 2, 2), batch=64),
    Case((1, 4, 1), batch=32),
    Case((1, 4, 1), micro_batches=4),
    Case((1, 2, 2), micro_batches=8),
    Case((1, 4, 1), remat="products"),
    Case((4, 1, 1), batch=256, micro_batches=2),
)


def calls_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Each call of a plan, as the roles make it, on random rows."""
    mesh = make_mesh(*case.mesh)
    compute, model = Compute(ForwardOptions(dtype=jnp.dtype(jnp.float32), remat=case.remat)), Architecture(MODEL)
    ppo = PPOConfig(micro_batches=case.micro_batches)
    optimizer = adamw(OptimizerConfig(learning_rate=1e-4), updates=1000)
    language = jax.device_put(init_lm(MODEL, jax.random.key(0)), param_shardings(MODEL, mesh, TRAIN))
    scalar = init_scalar(MODEL, jax.random.key(0), zero_head=False)
    scalar = jax.device_put(scalar, param_shardings(MODEL, mesh, TRAIN, "scalar"))
    batch = _batch(mesh, case.batch)
    tokens, lengths = batch.tokens, batch.lengths
    compiled = CompiledModel(model, mesh, compute)
    generate = engine_of(model, mesh, compute, SamplingConfig(RESPONSE), None)
    weights = jax.block_until_ready(_generation_weights(language, mesh))
    by_group = NamedSharding(mesh, GENERATE.batch_spec())
    prompts = jax.device_put((np.asarray(tokens)[:, :PROMPT], np.asarray(batch.prompt_lengths)), by_group)
    keys = jax.device_put(jax.random.split(jax.random.key(1), case.batch), row_sharding(mesh))
    logprobs = compiled.score_logprobs(temperature=1.0, span=RESPONSE)
    values, scores = compiled.score_values(), compiled.score_sequences()
    update_actor = compiled.actor_step(optimizer, ppo, temperature=1.0, responses=RESPONSE)
    update_critic = critic_step(compiled, optimizer, ppo)
    return {
        "actor.generate": lambda: generate(weights, *prompts, keys),
        "reward.score": lambda: scores(scalar, tokens, lengths),
        "actor.logprobs": lambda: logprobs(language, tokens, lengths, batch.prompt_lengths),
        "reference.logprobs": lambda: logprobs(language, tokens, lengths, batch.prompt_lengths),
        "critic.values": lambda: values(scalar, tokens, lengths),
        "critic.update": _updates(update_critic, scalar, optimizer, batch),
        "actor.update": _updates(update_actor, language, optimizer, batch),
    }


def _updates(step: Callable, params: Any, optimizer: Any, batch: Experience) -> Callable[[], Any]:
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    with jax.set_mesh(mesh):
        states = [TrainState.create(jax.tree.map(jnp.copy, params), optimizer)]

    def update() -> Any:
        with jax.set_mesh(mesh):
            states[0], metrics = step(states[0], batch)
        return states[0].step, metrics

    return update


def _generation_weights(params: Any, mesh: Mesh) -> Any:
    return generation_weights(Model(Architecture(MODEL), params), mesh, Compute())


def _batch(mesh: Mesh, rows: int) -> Experience:
    rng, length = np.random.default_rng(0), PROMPT + RESPONSE
    mask = np.broadcast_to(np.arange(length) >= PROMPT, (rows, length))
    noise = rng.standard_normal((rows, length)).astype(np.float32) * mask
    fields = {
        "tokens": rng.integers(1, MODEL.vocab_size, (rows, length)).astype(np.int32),
        "prompt_lengths": np.full(rows, PROMPT, np.int32),
        "response_lengths": np.full(rows, RESPONSE, np.int32),
        "logprobs": -np.abs(noise),
        "finished": np.ones(rows, bool),
        "scores": noise[:, -1],
        "response_mask": mask,
        **dict.fromkeys(("old_logprobs", "ref_logprobs"), -np.abs(noise)),
        **dict.fromkeys(("values", "rewards", "advantages", "returns"), noise),
    }
    version = jax.device_put(np.int32(0), NamedSharding(mesh, jax.P()))
    return Experience(**jax.device_put(fields, row_sharding(mesh)), version=version)


# ---- predicted and measured


def measure(cases: tuple[Case, ...], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every call of every case, in turns."""
    calls = {}
    for case in cases:
        started = time.perf_counter()
        calls[case.name] = calls_of(case)
        for call in calls[case.name].values():
            jax.block_until_ready(call())
        print(f"compiled {case.name} in {time.perf_counter() - started:.1f} s", flush=True)
    taken = {name: {call: [] for call in case_calls} for name, case_calls in calls.items()}
    for _ in range(repeats):
        for name, case_calls in calls.items():
            for call, run in case_calls.items():
                started = time.perf_counter()
                jax.block_until_ready(run())
                taken[name][call].append(time.perf_counter() - started)
    return taken


def predict(case: Case, measured_by: Any) -> dict[str, Mapping[str, float]]:
    """Each call's parts."""
    costs, local = ProfiledCosts(measured_by, case.workload), cluster_of(measured_by, memory=4e9)
    return {call.name: CostModel(case.workload, local, costs=costs).parts(call, case.plan[call.name]) for call in CALLS}


def summary(calls: Sequence[list[float]]) -> dict[str, float]:
    """Statistics of calls that follow each other, each given by its times."""
    thirds = [sum(least) for least in zip(*(map(min, np.array_split(times, THIRDS)) for times in calls), strict=True)]
    return {
        "median": float(sum(map(np.median, calls))),
        "least": float(sum(map(min, calls))),
        "spread": float(max(thirds) - min(thirds)),
    }


def compare(cases: tuple[Case, ...], taken: dict[str, dict[str, list[float]]], measured_by: Any) -> dict[str, Any]:
    """The record of a comparison."""
    plans, errors = [], []
    for case in cases:
        predicted, calls = predict(case, measured_by), {}
        for call, parts in predicted.items():
            measured = summary([taken[case.name][call]])
            seconds = sum(parts.values())
            error = seconds / measured["least"] - 1
            errors.append(abs(error))
            calls[call] = {**measured, "predicted": seconds, "error": error, "parts": dict(parts)}
        whole = summary(list(taken[case.name].values()))
        seconds = sum(call["predicted"] for call in calls.values())
        plans.append({"plan": case.name, **whole, "predicted": seconds, "calls": calls})
    pairs = [
        (a, b) for a, b in combinations(plans, 2) if abs(a["least"] - b["least"]) > 3 * max(a["spread"], b["spread"])
    ]
    wrong = [
        f"{a['plan']} | {b['plan']}" for a, b in pairs if (a["least"] < b["least"]) != (a["predicted"] < b["predicted"])
    ]
    return {
        "mean_error": float(np.mean(errors)),
        "largest_error": float(max(errors)),
        "plan_error": float(np.mean([abs(plan["predicted"] / plan["least"] - 1) for plan in plans])),
        "pairs": {"all": len(plans) * (len(plans) - 1) // 2, "apart": len(pairs), "wrong": wrong},
        "plans": plans,
    }


def published_rows() -> list[dict[str, Any]]:
    """ReaL's table, measured and predicted."""
    rows = []
    for name, table in (("searched", published.SEARCHED), ("heuristic", published.HEURISTIC)):
        for graphs, cluster in ((True, published.cluster()), (False, published.cluster(graphs=False))):
            for row in table:
                seconds = row.seconds if graphs else row.without_graphs
                if seconds is not None:
                    call, work = published.GRAPH[row.call], published.workload()
                    predicted = CostModel(work, cluster).seconds(call, row.placement)
                    rows.append({"plan": name, "call": row.call, "measured": seconds, "predicted": predicted})
    return rows


def chart(record: Mapping[str, Any], path: Path) -> None:
    """Predicted over measured, of each call of each plan here, and of ReaL's table."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "plans", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    here = [
        (GRAPH[name].kind, call["least"], call["predicted"])
        for plan in record["plans"]
        for name, call in plan["calls"].items()
    ]
    there = [(published.GRAPH[row["call"]].kind, row["measured"], row["predicted"]) for row in record["published"]]
    titles = (
        f"{len(record['plans'])} plans of the quickstart, {DEVICES} simulated devices",
        "ReaL's table: 7B + 7B on 16 H100",
    )
    for axes, points, title in zip(panels, (here, there), titles, strict=True):
        for kind, colour in {"generate": "#1b6ca8", "infer": "#c8553d", "train": "#3a7d44"}.items():
            pairs = [pair for named, *pair in points if named == kind]
            axes.scatter(*zip(*pairs, strict=True), s=18, color=colour, label=kind, alpha=0.8)
        seconds = [number for _, *pair in points for number in pair]
        ends = np.array([0.7 * min(seconds), 1.4 * max(seconds)])
        axes.plot(ends, ends, color="0.4", linewidth=1)
        axes.fill_between(ends, 0.8 * ends, 1.2 * ends, color="0.85", zorder=0, label="within 20 %")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
        axes.set(xlabel="measured, s a call", ylabel="predicted, s a call", aspect="equal")
    panels[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of the plans")
    parser.add_argument("--profile", type=Path, help="file of the profile; it is measured where it is not there")
    parser.add_argument("--out", type=Path, default=RESULTS / "plans-cpu.json")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    devices, cases = jax.devices(), CASES[: options.cases]
    path = options.profile or default_path(devices)
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    profile = load(path)
    largest = Case((1, 2, 2), batch=max(case.batch for case in CASES))
    for remat in sorted({largest.remat, *(case.remat for case in CASES)}):
        work = replace(largest.workload, remat=remat)
        profile = measure_parts(work, devices, profile=profile, repeats=options.repeats, say=print)
    assert profile is not None
    save(profile, path)
    profiled = time.perf_counter() - started
    print(f"profiled in {profiled:.0f} s: {path}")
    record = {
        "benchmark": "plans",
        "hardware": hardware(devices[0]),
        **provenance("jax", "flax"),
        "devices": DEVICES,
        "repeats": options.repeats,
        "load_average": [load_before, os.getloadavg()[0]],
        "profile_seconds": profiled,
        **compare(cases, measure(cases, options.repeats), profile),
        "published": published_rows(),
    }
    write(options.out, record)
    chart(record, options.out.with_suffix(".svg"))
    for plan in record["plans"]:
        print(f"{plan['plan']:36s} {plan['least'] * 1e3:8.1f} ms  predicted {plan['predicted'] * 1e3:8.1f}")
        for name, call in plan["calls"].items():
            print(f"    {name:20s} {call['least'] * 1e3:8.1f}  {call['predicted'] * 1e3:8.1f}  {call['error']:+.0%}")
    apart, wrong = record["pairs"]["apart"], len(record["pairs"]["wrong"])
    print(f"mean error a call {record['mean_error']:.0%}, a plan {record['plan_error']:.0%}")
    print(f"of {apart} pairs apart {wrong} in the wrong order; {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
