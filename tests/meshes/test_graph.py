"""Graphs of calls: what is refused, and the order that dependencies leave."""

import pytest

from jrlhf.meshes import Call, Graph


def call(name: str, inputs: str, outputs: str) -> Call:
    return Call(name, name.split(".")[0], "infer", tuple(inputs.split()), tuple(outputs.split()))


def test_levels_are_the_calls_that_may_overlap():
    calls = (
        call("update", "experience", "metrics"),
        call("generate", "prompts", "rollout"),
        call("score", "rollout", "scores"),
        call("values", "rollout", "values"),
        call("advantages", "scores values", "experience"),
    )
    graph = Graph("ppo", ("prompts",), calls)
    names = [{one.name for one in level} for level in graph.levels()]
    assert names == [{"generate"}, {"score", "values"}, {"advantages"}, {"update"}]
    assert {one.name for one in graph.before(graph["advantages"])} == {"score", "values"}
    assert graph.roles == ("update", "generate", "score", "values", "advantages")


def test_refused():
    for calls, complaint in [
        ((call("a", "x", "y"), call("a", "x", "z")), "two calls are named a"),
        ((call("a", "x", "y"), call("b", "x", "y")), "y is produced more than once"),
        ((call("a", "x", "x"),), "x is produced more than once"),
        ((call("a", "w", "y"),), "a reads w, which nothing produces"),
        ((call("a", "z", "y"), call("b", "y", "z")), "wait for each other"),
        ((call("a", "y", "y"),), "wait for each other"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            Graph("g", ("x",), calls)
