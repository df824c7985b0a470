"""Every algorithm as a graph: the calls that it states are the calls that an iteration makes."""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import pytest

from jrlhf.algorithms import calls
from jrlhf.algorithms.factory import RoleFactory, algorithm_of
from jrlhf.algorithms.registry import dataflow_of, graph_of
from jrlhf.algorithms.roles import ROLES
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.config.stages import ALGORITHMS
from jrlhf.meshes import make_mesh
from jrlhf.models import ModelConfig
from jrlhf.roles.graph import trace
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import Pending, RolePlacement, call
from jrlhf.run.clock import Clock
from jrlhf.run.console import Console

EXPECTED = {
    "ppo": [{"actor.generate"}, {"reward.score", "actor.logprobs", "reference.logprobs", "critic.values"}],
    "grpo": [{"actor.generate"}, {"reward.score", "actor.logprobs", "reference.logprobs"}],
    "dapo": [{"pool.draw"}, {"actor.generate"}, {"reward.score"}, {"pool.keep"}, {"pool.batch"}, {"actor.logprobs"}],
    "reinforce_pp": [{"actor.generate"}, {"reward.score", "actor.logprobs", "reference.logprobs"}],
    "remax": [
        {"actor.generate", "actor.generate_greedy"},
        {"reward.score", "reward.score_baseline", "actor.logprobs", "reference.logprobs"},
    ],
    "safe_rlhf": [
        {"actor.generate"},
        {"reward.score", "cost.score", "actor.logprobs", "reference.logprobs", "critic.values", "cost_critic.values"},
        {"constraint.update"},
    ],
}


def config_of(name: str, **algorithm) -> Config:
    settings = {"algorithm": algorithm} if algorithm else {}
    return build(Config, {"stages": ["sft", name], name: settings})


def test_the_first_levels_of_the_graphs():
    for name, expected in EXPECTED.items():
        levels = [{node.name for node in level} for level in graph_of(config_of(name)).levels()]
        assert levels[: len(expected)] == expected and "actor.update" in levels[-1], name


def test_the_policy_is_held_twice_only_where_it_is_a_reference():
    for name in ("dr_grpo", "gspo", "grpo"):
        assert_models_of(config_of(name))
    assert_models_of(config_of("grpo", kl_coef=0.0))


def assert_models_of(config: Config) -> None:
    sizes = ModelConfig(vocab_size=8, embed=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp=4, max_positions=4)
    policy = Model(Architecture(sizes), {"matrix": jnp.ones((2, 2))})
    here = SimpleNamespace(store=lambda model: model)
    initial = InitialModels(config, cast(Any, None), Compute(), Console(enabled=False))
    unused: Any = None
    factory = RoleFactory(config, algorithm_of(config), unused, unused, lambda role: cast(Any, here), unused)
    rewards = SimpleNamespace(free_original=lambda: None, trained=None)
    models, identities = factory.models(initial, policy, cast(Any, rewards), graph_of(config))
    referenced = config.rl.algorithm.needs_reference
    assert models.keys() == {"actor", *(["reference"] if referenced else [])} and models["actor"] is policy
    assert set(identities) == ({"reference"} if referenced else set())


def test_minibatches_are_shuffled_by_the_runs_seed():
    for name in ALGORITHMS:
        config = build(Config, {"stages": [name], "seed": 3})
        assert algorithm_of(config) == replace(algorithm_of(build(Config, {"stages": [name]})), seed=3)


def test_options_change_the_graph():
    without = graph_of(config_of("ppo", kl_coef=0.0))
    assert "reference" not in without.roles
    recorded = graph_of(config_of("grpo", old_logprobs="rollout"))
    assert "actor.logprobs" not in {node.name for node in recorded}
    shared = build(Config, {"stages": ["sft", "ppo"], "compute": {"shared_passes": True}})
    assert {node.name for node in graph_of(shared)} == {
        "actor.generate",
        "reward.score",
        "reference.logprobs",
        "learner.update",
    }
    adapted = build(Config, {"stages": ["grpo"], "lora": {"rank": 4}, "model": {"path": "somewhere"}})
    one_pass = graph_of(adapted)["actor.logprobs_with_base"]
    assert one_pass.outputs == ("old", "ref")


class Noted:
    """Stands for a role: notes the calls that are made, and answers with as many values as the real one."""

    def __init__(self, name: str, calls: list[str], *, is_base: bool = False):
        self._name, self._calls, self._is_base, self._rounds = name, calls, is_base, 0

    def wants_more(self) -> bool:
        self._rounds += 1
        return self._rounds <= 3

    def recomputes(self) -> bool:
        return True

    def is_base_of(self, actor) -> bool:
        return self._is_base

    def __getattr__(self, method):
        def make(*_, **__):
            self._calls.append(f"{self._name}.{method}")
            if self._name == "learner":
                return object(), {}
            if method == "update":
                return {}
            pairs = ("values", "safe_experience", "batch", "logprobs_with_base")
            return (object(), object()) if method in pairs else object()

        return make


ADAPTED = {"lora": {"rank": 4}, "model": {"path": "somewhere"}}  # on the base that is the reference
SHARED = [name for name in ALGORITHMS if name not in ("dapo", "remax", "safe_rlhf")]


def test_an_iteration_makes_the_calls_of_its_graph():
    for name in ALGORITHMS:
        for besides in ({}, ADAPTED, *([{"compute": {"shared_passes": True}}] if name in SHARED else [])):
            assert_calls(name, besides)


def assert_calls(name: str, besides: dict) -> None:
    stages = [name] if besides is ADAPTED else ["sft", name]
    config: Config = build(Config, {"stages": stages, **besides})
    calls: list[str] = []
    graph, dataflow = graph_of(config), dataflow_of(config)
    arguments = {}
    for parameter in inspect.signature(dataflow).parameters:
        there = parameter in ROLES and (parameter != "reference" or config.rl.algorithm.needs_reference)
        arguments[parameter] = Noted(parameter, calls, is_base=besides is ADAPTED) if there else None
    dataflow(**arguments)
    stated = [node.name for node in graph]
    assert list(dict.fromkeys(calls)) == stated, (name, besides)
    assert ("learner.update" in stated) == ("compute" in besides)
    one_pass = besides is ADAPTED and config.rl.algorithm.needs_reference
    assert ("actor.logprobs_with_base" in stated) == one_pass
    rounds = {"pool.draw", "actor.generate", "reward.score", "pool.keep"} if name == "dapo" else set()
    assert all(calls.count(node) == (3 if node in rounds else 1) for node in stated)


class Thing:
    placement, clock = RolePlacement.of(make_mesh(8)), Clock()

    @call("infer", "{role}_number")
    def double(self, number):
        return 2 * number

    @call("infer", "later")
    def later(self, number):
        return Pending(lambda: number)


def test_pending_values_are_waited_for_where_they_are_read():
    thing = Thing()
    assert thing.double(thing.later(3)) == 6
    asked = []
    pending = Pending(lambda: asked.append(0) or 5)
    assert thing.double(pending) + thing.double(number=pending) == 20
    assert len(asked) == 1
    broken = Pending(lambda: asked.append(0) or {}["cause"])
    for _ in range(2):
        with pytest.raises(KeyError, match="cause"):
            thing.double(broken)
    assert len(asked) == 2


def test_an_algorithm_that_looks_at_values_cannot_be_traced():
    def looks(thing, number):
        if thing.double(number):
            return thing.later(number)

    with pytest.raises(TypeError, match="thing_number has no value while"):
        trace(looks, {"thing": Thing})


def test_values_of_one_name_are_told_apart():
    def twice(thing, number):
        return thing.double(thing.double(number))

    graph = trace(twice, {"thing": Thing})
    first, second = graph
    assert (first.name, second.name) == ("thing.double", "thing.double_2")
    assert second.inputs == first.outputs == ("thing_number",)
    assert second.outputs == ("thing_number_2",)


PROTOCOLS = {
    "actor": calls.ActorCalls,
    "reference": calls.ReferenceCalls,
    "critic": calls.CriticCalls,
    "cost_critic": calls.CriticCalls,
    "reward": calls.RewardCalls,
    "cost": calls.RewardCalls,
    "estimator": calls.EstimatorCalls,
    "learner": calls.LearnerCalls,
    "pool": calls.PoolCalls,
    "constraint": calls.ConstraintCalls,
}


def test_each_role_has_the_calls_of_its_protocol():
    """A dataflow's parameters are protocols, with which no type checker compares the roles that a run gives it."""
    assert PROTOCOLS.keys() == ROLES.keys()
    for role, protocol in PROTOCOLS.items():
        own = [name for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"]
        assert own
        for name in own:
            here, there = (inspect.signature(getattr(kind, name)).parameters for kind in (ROLES[role], protocol))
            assert [*here] == [*there], (role, name)
            assert [x.default for x in here.values()] == [x.default for x in there.values()], (role, name)
            assert [x.kind for x in here.values()] == [x.kind for x in there.values()], (role, name)
