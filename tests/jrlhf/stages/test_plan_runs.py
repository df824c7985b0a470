"""Whole runs under plans: what is trained does not depend on where."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from jrlhf.algorithms.factory import RoleFactory
from jrlhf.algorithms.registry import graph_of
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.models.generation.occupancy import LastRows
from jrlhf.planning import auto
from jrlhf.planning.fusion import choices as choosing
from jrlhf.planning.fusion import tiles
from jrlhf.planning.fusion.last_rows import Moves, Rollouts
from jrlhf.planning.plans import read_plan
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import workload_of
from jrlhf.rewards.mixture import TRAINED
from jrlhf.roles.open_rollout import OpenRollout
from jrlhf.run.fingerprints import fingerprint_of
from jrlhf.run.metrics import read_metrics
from jrlhf.run.resume import saved_tile
from jrlhf.stages import rl
from jrlhf.stages.context import Context
from jrlhf.stages.loop import run_stage
from jrlhf.stages.setup import architectures
from jrlhf.train import main
from tests.support.runs import resumed, timeless

pytestmark = [pytest.mark.proof("runs"), pytest.mark.usefixtures("quick_compilation")]

FIRST = {"devices": "0-3", "fsdp": 2, "tensor": 2}
SECOND = {"devices": "4-7", "fsdp": 2, "tensor": 2}
ALL = {"devices": "0-7", "fsdp": 4, "tensor": 2}
LAYOUTS = {"generate": "generate", "infer": "score", "train": "train"}
RATES = {"learning_rate": 1e-3, "warmup": 0}
SECTION = {"iterations": 2, "rollout_batch": 16, "save_every": 1, "actor": RATES}
ONE_UPDATE = {"algorithm": {"epochs": 1, "minibatches": 1}}
ROUNDED = {"rel": 1e-5, "abs": 2e-6}
STEPPED = {"rel": 2e-3, "abs": 2e-4}  # Adam makes a step of a gradient's rounding


def maker(directory: Path, settings: Any, user: Path) -> Any:
    """A function that returns the config of a run in a directory; its rewards are a model of text and a function."""
    judge = {"name": "judge", "model": str(user / "reward"), "batch": 4}
    short = {"name": "short", "function": f"{user / 'rewards.py'}:short"}

    def config(name: str, stage: str, plan: str = "colocate", before: tuple[str, ...] = (), **sections) -> Config:
        critic = {"critic": RATES} if stage in ("ppo", "safe_rlhf") else {}
        mapping = settings(
            stages=[*before, stage], rewards=[judge, short], run_dir=str(directory), name=name, plan=plan, **sections
        )
        section = SECTION | critic | sections.get(stage, {})
        return build(Config, {key: value for key, value in mapping.items() if key != "ppo"} | {stage: section})

    return config


@pytest.fixture
def make(tmp_path, settings, user):
    return maker(tmp_path, settings, user)


@contextmanager
def watching() -> Iterator[list[tuple[int, Any, set[int]]]]:
    """Notes of each iteration: its number, all bits that it starts from, the devices of the critic."""
    begun = []

    def watched(context, name, init, advance, **options):
        def noted(state, step):
            critic = {device.id for leaf in jax.tree.leaves(state.trained["critic"]) for device in leaf.devices()}
            begun.append((step, fingerprint_of(state), critic))
            return advance(state, step)

        return run_stage(context, name, init, noted, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "run_stage", watched)
        yield begun


@pytest.fixture(scope="module")
def colocated(tmp_path_factory, settings, user, quick_compilation):
    """(run directory, what its iterations start from): PPO on all devices, one update an iteration."""
    with watching() as begun:
        make = maker(tmp_path_factory.mktemp("colocated"), settings, user)
        return run(make("colocated", "ppo", ppo=ONE_UPDATE)), begun


def by_hand(path: Path, config: Config, **placed: dict[str, Any]) -> str:
    """A plan's file, with everything on four of the eight devices but for the calls in `placed`."""
    calls = {
        call.name: {"layout": LAYOUTS[call.kind], **placed.get(call.name.replace(".", "_"), FIRST)}
        for call in workload_of(config, graph_of(config), architectures(config)).calls
    }
    path.write_text(yaml.safe_dump({"name": "by hand", "calls": calls}))
    return str(path)


def run(config: Config) -> Path:
    main(config)
    return Path(config.run_dir) / config.name


def assert_close(records: list[dict[str, float]], expected: list[dict[str, float]], **tolerance: Any) -> None:
    for record, other in zip(records, expected, strict=True):
        assert record.keys() == other.keys()
        for name, number in record.items():
            close = number if isinstance(number, str) else pytest.approx(number, **tolerance)
            assert other[name] == close, name


def assert_same_bits(path: Path, other: Path) -> None:
    assert timeless(path) == timeless(other)
    names = "model/model.safetensors", "samples.jsonl"
    assert all((path / name).read_bytes() == (other / name).read_bytes() for name in names)


STAGES: dict[str, dict[str, Any]] = {
    "ppo": {"ppo": {"algorithm": {"minibatches": 2}}},
    "dapo": {"dapo": {"algorithm": {"samples": 2, "max_rounds": 2}}},
    "grpo": {"grpo": {"algorithm": {"samples": 2}}},
    "rloo": {"rloo": {"algorithm": {"samples": 2}}},
    "safe_rlhf": {"costs": [{"name": "words", "function": "word_count"}]},
}


@pytest.mark.parametrize("stage", ["ppo", "safe_rlhf"])
def test_a_split_run_is_the_run_of_half_the_devices(stage, make, tmp_path):
    half = run(
        make("half", stage, by_hand(tmp_path / "half.yaml", make("half", stage, **STAGES[stage])), **STAGES[stage])
    )
    split = run(make("split", stage, "split", **STAGES[stage]))
    assert_same_bits(half, split)
    plan = read_plan(split / "plan.yaml")
    assert plan.name == "split" and {str(placement.devices) for placement in plan.placements.values()} == {"0-3", "4-7"}
    records = read_metrics(split)
    assert [record["perf/compilations"] for record in records][1:] == [0]
    assert all("timing_s/transfer" in record for record in records)
    assert not any("timing_s/transfer" in record for record in read_metrics(half))


EARLY = {  # stage -> plan, number of calls of models whose devices do not decode
    "ppo": ("split", 3),  # the critic's and those of both reward models; actor and reference share devices
    "dapo": ("split", 1),  # log-probabilities need the batch that is kept
    **dict.fromkeys(("grpo", "rloo", "remax"), ("disaggregated", 3)),
    "safe_rlhf": ("disaggregated", 5),
}


@pytest.mark.parametrize("stage", EARLY)
def test_rows_that_are_scored_while_others_decode_have_the_bits_of_a_later_time(stage, make, monkeypatch):
    hand_out, early, models = OpenRollout._hand_out, [], []
    plan, count = EARLY[stage]
    before = ("reward_model",) if stage == "ppo" else ()
    slots = {"chunk": 4, "slots": 8}  # half of the rows of each group of devices wait until the others are done
    settings = STAGES.get(stage, {}) | {"compute": {"score_rows": 4}, "rollout": slots, "before": before}

    def counted(self: OpenRollout, *arguments: Any) -> None:
        hand_out(self, *arguments)
        early.append([len(reader.results) for reader in self._readers])
        models.append(sum(bool(reader.devices and reader.results) for reader in self._readers))

    monkeypatch.setattr(OpenRollout, "_hand_out", counted)
    while_others_decode = run(make("early", stage, plan, **settings))
    # By functions, too, whose calls have no devices.
    assert max(map(sum, early)) >= 2 * (count + 1) and max(models) == count
    monkeypatch.setattr(OpenRollout, "_hand_out", lambda *_: None)
    assert_same_bits(while_others_decode, run(make("late", stage, plan, **settings)))


def test_devices_that_the_last_rows_leave_score_with_the_bits_of_a_later_time(make, tmp_path, monkeypatch):
    """Generation on all four groups of devices; the last rows move to one, and a scoring call has two of the others."""
    sampling: Any = Context.sampling.fget  # type: ignore[attr-defined]
    hand_out, early = OpenRollout._hand_out, []
    monkeypatch.setattr(
        Context, "sampling", property(lambda self: replace(sampling(self), stop_ids=tuple(range(0, 300, 4))))
    )
    rollout = {"chunk": 1, "buckets": 1, "last_groups": 1}
    settings = {"compute": {"score_rows": 4}, "rollout": rollout, "ppo": {"iterations": 3}}
    placed = {"actor_generate": ALL, "reference_logprobs": SECOND, "critic_values": SECOND}
    plan = by_hand(tmp_path / "plan.yaml", make("plan", "ppo", **settings), **placed)

    def counted(self: OpenRollout, done: Any, read: Any, mesh: Any) -> None:
        hand_out(self, done, read, mesh)
        early.append((mesh.size, sum(len(reader.results) for reader in self._readers if reader.devices)))

    monkeypatch.setattr(OpenRollout, "_hand_out", counted)
    while_others_decode = run(make("early", "ppo", plan, **settings))
    assert {size for size, results in early} == {2, 8} and all(results == 0 for size, results in early if size == 8)
    assert max(results for _, results in early) > 0
    # The run chooses. Where scoring on the devices that the last rows leave is slow and a move is free, the last rows
    # move in every rollout but the first. A resume does the same.
    costly = {"step": lambda *_: 1.0, "prefill": lambda _: 0.0, "move": lambda *_: 0.0}
    of_prices, before, choices = choosing.rollouts_of, Moves.before, list[LastRows | None]()

    def rollouts_of(*arguments: Any) -> dict[str, Rollouts]:
        return {
            name: replace(one, scoring=[replace(x, seconds=3.0 * (x.devices.start > 0)) for x in one.scoring], **costly)
            for name, one in of_prices(*arguments).items()
        }

    def chosen(self: Moves, call: str, **options: float) -> LastRows | None:
        choices.append(before(self, call, **options))
        return choices[-1]

    monkeypatch.setattr(
        choosing, "prices_here", lambda _, workload, *__: CostModel(workload, Cluster(HARDWARE["h100"], 8))
    )
    monkeypatch.setattr(choosing, "rollouts_of", rollouts_of)
    monkeypatch.setattr(Moves, "before", chosen)
    early.clear()
    config = make("chosen", "ppo", plan, **settings | {"rollout": rollout | {"last_groups": "auto"}})
    assert_same_bits(while_others_decode, run(config))
    assert choices[0] is None and None not in choices[1:] and {size for size, _ in early} > {8}
    resumed(config, 3)
    assert_same_bits(while_others_decode, Path(config.run_dir) / config.name)
    assert len(choices) == 4 and choices[3] is None
    monkeypatch.setattr(OpenRollout, "_hand_out", lambda *_: None)
    assert_same_bits(while_others_decode, run(make("late", "ppo", plan, **settings)))


def test_a_run_that_chooses_its_tiles_is_resumed_with_them(make, monkeypatch):
    """Only calls on the second half cost much, which do not decode: tiles gain. The resume asks for no prices."""
    of_prices = tiles.rollouts_of

    def rollouts_of(*arguments: Any) -> dict[str, Rollouts]:
        return {
            name: replace(one, scoring=[replace(call, seconds=one.tile * call.devices.start) for call in one.scoring])
            for name, one in of_prices(*arguments).items()
        }

    monkeypatch.setattr(
        choosing, "prices_here", lambda _, workload, *__: CostModel(workload, Cluster(HARDWARE["h100"], 8))
    )
    monkeypatch.setattr(tiles, "rollouts_of", rollouts_of)
    settings = {"rollout": {"chunk": 4}}
    config = make("chosen", "ppo", "split", compute={"score_rows": "auto"}, **settings)
    chosen = run(config)
    tile = saved_tile(chosen / "config.yaml")
    assert tile in (4, 8)
    set_by_hand = run(make("set", "ppo", "split", compute={"score_rows": tile}, **settings))
    assert_same_bits(chosen, set_by_hand)
    monkeypatch.setattr(choosing, "prices_here", None)
    resumed(config, 2)
    assert_same_bits(chosen, set_by_hand)
    assert saved_tile(chosen / "config.yaml") == tile


def test_a_run_in_stages_is_the_colocated_one_and_resumes_without_them(make, colocated, tmp_path):
    """Actor and critic are trained in two stages on all devices; its first update is that of one stage up to
    rounding. Checkpoints do not know of stages."""
    staged = {"fsdp": 2, "pipeline": 2, "micro_batches": 2}
    file = tmp_path / "stages.yaml"
    placed = {f"{role}_update": {"devices": "0-7", "tensor": 2, **staged} for role in ("actor", "critic")}
    plan = by_hand(file, make("staged", "ppo"), actor_generate=ALL, **placed)
    path = run(make("staged", "ppo", plan, ppo=ONE_UPDATE))
    records, expected = timeless(path), timeless(colocated[0])
    assert_close(records[:1], expected[:1], **ROUNDED)
    assert_close(records[1:], expected[1:], **STEPPED)
    assert [record["perf/compilations"] for record in read_metrics(path)][1:] == [0]
    resumed(make("staged", "ppo", ppo=ONE_UPDATE), 2)
    assert_close(timeless(path), expected, **STEPPED)


def test_a_run_that_scores_in_stages_is_the_run_without(make, tmp_path):
    """Stages of a half of the devices and of all, with reward models of tokens and of text. The same rows are drawn, so
    the first update is the same up to rounding."""
    settings = {"ppo": ONE_UPDATE, "before": ("reward_model",)}
    half = {"layout": "score", "devices": "4-7", "tensor": 2, "pipeline": 2, "micro_batches": 4}
    whole = {"layout": "train_tp", "devices": "0-7", "fsdp": 2, "tensor": 2, "pipeline": 2, "micro_batches": 2}
    update = {"devices": "0-7", "fsdp": 2, "tensor": 2, "pipeline": 2, "micro_batches": 2}
    placed = {"actor_logprobs": whole, "reference_logprobs": half, "reward_score": half, "actor_update": update}
    placed |= {"critic_values": half | {"layout": "train_tp"}}
    plan = by_hand(tmp_path / "stages.yaml", make("staged", "ppo", **settings), **placed)
    path, colocated = run(make("staged", "ppo", plan, **settings)), run(make("colocated", "ppo", **settings))
    records, expected = timeless(path), timeless(colocated)
    assert_close(records[:-1], expected[:-1], **ROUNDED)
    assert_close(records[-1:], expected[-1:], **STEPPED)
    assert [record["perf/compilations"] for record in read_metrics(path)][-1] == 0
    whole_run = (path / "model" / "model.safetensors").read_bytes()
    resumed(make("staged", "ppo", plan, **settings), 2)
    assert timeless(path) == records and (path / "model" / "model.safetensors").read_bytes() == whole_run


def test_adapters_in_stages_train_as_on_one_mesh_and_resume_there(make, tmp_path):
    """Actor and critic adapt one base, which is the reference, too; killed after an iteration, in and out of stages."""
    section = {"ppo": {"algorithm": {"epochs": 1, "minibatches": 1}}, "lora": {"rank": 2}}
    placed = {
        name: ALL | {"layout": "generate"} for name in ("actor_logprobs_with_base", "actor_generate", "critic_values")
    }
    staged = {"devices": "0-7", "fsdp": 2, "tensor": 2, "pipeline": 2, "micro_batches": 2, "layout": "generate"}
    placed |= {"actor_update": staged, "critic_update": staged | {"schedule": "zb-h1"}}
    placed |= dict.fromkeys(("actor_logprobs_with_base", "critic_values"), staged)
    plan = by_hand(tmp_path / "stages.yaml", make("staged", "ppo", **section), **placed)
    colocated, path = run(make("colocated", "ppo", **section)), run(make("staged", "ppo", plan, **section))
    records, expected = timeless(path), timeless(colocated)
    assert_close(records[:1], expected[:1], **ROUNDED)
    assert_close(records[1:], expected[1:], **STEPPED)
    assert [record["perf/compilations"] for record in read_metrics(path)][1:] == [0]
    whole = (path / "model" / "model.safetensors").read_bytes()
    resumed(make("staged", "ppo", plan, **section), 2)
    assert timeless(path) == records and (path / "model" / "model.safetensors").read_bytes() == whole
    resumed(make("staged", "ppo", **section), 2)
    assert_close(timeless(path), expected, **STEPPED)


def test_the_reward_model_of_adapters_is_exported_from_its_slice(make):
    """It is trained on all devices, and moves to those of its calls; the base that it is merged into does not."""
    before = {"before": ("reward_model",), "lora": {"rank": 2}}
    paths = [run(make(plan, "ppo", plan, **before)) for plan in ("colocate", "disaggregated")]
    first, second = ((path / "reward_model" / "model.safetensors").read_bytes() for path in paths)
    assert first == second


def test_a_run_with_fused_updates_is_the_one_in_stages(make, tmp_path):
    """With sleeping models of other roles, two minibatches, and between both updates that of a third model."""
    given = STAGES["safe_rlhf"] | {"safe_rlhf": {"algorithm": {"epochs": 1, "minibatches": 2}}}
    given |= {"sleep": {"reference": "host"}}
    ends = []
    for schedule in ("1f1b", "fused"):
        placed = {"devices": "0-3", "fsdp": 2, "pipeline": 2, "micro_batches": 2, "schedule": schedule}
        plan = by_hand(
            tmp_path / f"{schedule}.yaml", make("x", "safe_rlhf", **given), actor_update=placed, critic_update=placed
        )
        ends.append(run(make(schedule, "safe_rlhf", plan, **given)))
    serial, fused = (timeless(path) for path in ends)
    assert_close(fused[:1], serial[:1], **ROUNDED)
    assert_close(fused[1:], serial[1:], **STEPPED)
    assert all("timing_s/update" in record for record in read_metrics(ends[1]))
    assert [record["perf/compilations"] for record in read_metrics(ends[1])][1:] == [0]
    assert "<b>updates, group 0</b> fused: " in (ends[1] / "report.html").read_text()
    resumed(make("fused", "safe_rlhf", **given), 2)
    assert_close(timeless(ends[1]), fused, **ROUNDED)


def test_a_plan_with_pipelines_that_a_search_proposes_runs(tmp_path):
    """For devices whose links are so slow that no two of them should share a layer. PPO's updates are fused."""
    sizes = {"embed": 16, "layers": 8, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 512, "max_positions": 32}
    sums = {"source": "arithmetic", "digits": 1, "problems": 60, "heldout_rows": 8, "max_prompt": 4, "max_response": 8}
    mapping = {
        **{"stages": ["sft", "ppo"], "device": {"platform": "cpu", "simulated": 8}, "mesh": {"fsdp": 8}},
        **{"model": sizes, "data": sums, "sft": {"steps": 2, "batch": 8, "warmup": 1}, "evaluation": {"prompts": 8}},
        **{"rewards": [{"name": "right", "function": "exact_match"}], "run_dir": str(tmp_path), "name": "searched"},
        "ppo": {**SECTION, "rollout_batch": 32, "algorithm": {"epochs": 8, "minibatches": 2}},
    }
    config = build(Config, mapping)
    slow = {"node": 1, "network": 1e7, "latency": 0, "launch": 0, "bfloat16": 1e9, "float32": 1e9}
    cluster = Cluster(replace(HARDWARE["h200"], **slow), 8)
    result = auto.Setting(config, graph_of(config), architectures(config), cluster).search(proposals=250)
    assert result.best.plan.fused and result.best.plan["actor.update"].pipeline == 8
    (tmp_path / "plan.yaml").write_text(result.best.plan.to_yaml())
    path = run(build(Config, {**mapping, "plan": str(tmp_path / "plan.yaml")}))
    assert read_plan(path / "plan.yaml").placements == result.best.plan.placements
    records = [record for record in read_metrics(path) if record["stage"] == "ppo"]
    assert len(records) == 2 and all(record["timing_s/update"] > 0 for record in records)


def test_a_run_under_a_searched_plan_is_the_colocated_one(make, colocated, tmp_path):
    """For devices whose messages take so long to start that few should share a call: slices of several sizes."""
    config = make("searched", "ppo", ppo=ONE_UPDATE)
    slow = {"network": 1e12, "latency": 1e-3, "launch": 0, "bfloat16": 1e12, "float32": 1e12}
    setting = auto.Setting(
        config, graph_of(config), architectures(config), Cluster(replace(HARDWARE["h200"], **slow), 8)
    )
    plan = setting.search(proposals=300).best.plan
    assert len({placement.devices for placement in plan.placements.values()}) > 1
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    path = run(make("searched", "ppo", str(tmp_path / "plan.yaml"), ppo=ONE_UPDATE))
    assert read_plan(path / "plan.yaml").placements == plan.placements
    records, expected = timeless(path), timeless(colocated[0])
    assert_close(records[:1], expected[:1], **ROUNDED)
    assert_close(records[1:], expected[1:], **STEPPED)


def test_a_run_goes_on_under_another_plan_from_the_same_bits(make, colocated, tmp_path):
    path, ((_, fresh, _), (_, saved, devices)) = colocated
    shutil.copytree(path, tmp_path / "moved")
    with watching() as begun:
        resumed(make("moved", "ppo", "split", ppo=ONE_UPDATE), 2)
    assert fresh != saved and devices == set(range(8)) and begun == [(1, saved, {4, 5, 6, 7})]
    assert_close(timeless(tmp_path / "moved"), timeless(path), **STEPPED)
    assert read_plan(tmp_path / "moved" / "plan.yaml").name == "split"


def test_a_split_run_asleep_is_the_one_awake_and_keeps_its_own_reward_model_once(make, monkeypatch):
    starts = RoleFactory.models
    places = []

    def watched(factory, initial, policy, rewards, graph):
        trained = rewards.trained
        result = starts(factory, initial, policy, rewards, graph)
        assert rewards.trained is rewards.token_parts[TRAINED].model
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trained.params))
        places.append({device.id for leaf in jax.tree.leaves(rewards.trained.params) for device in leaf.devices()})
        return result

    monkeypatch.setattr(RoleFactory, "models", watched)
    asleep = dict.fromkeys(("optimizer", "actor", "critic", "reference", "reward"), "host") | {"ahead": True}
    awake = run(make("awake", "ppo", "split", before=("reward_model",)))
    resting = run(make("asleep", "ppo", "split", before=("reward_model",), sleep=asleep))
    assert places == [{4, 5, 6, 7}] * 2
    assert_same_bits(awake, resting)
    models = [(path / "reward_model" / "model.safetensors").read_bytes() for path in (awake, resting)]
    assert models[0] == models[1]
