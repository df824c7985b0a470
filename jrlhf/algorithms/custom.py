"""Custom dataflows: `dataflow` in a stage's section names a user's function that replaces the shipped dataflow.

Its parameters are some of those of the shipped dataflow. `estimator.custom_experience` computes custom advantages.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from jrlhf.algorithms.custom_checks import PAIRS, check_arguments, check_calls, key_of
from jrlhf.algorithms.roles import known_facts, roles_of
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.graph import Graph
from jrlhf.rewards.user_code import UserCode, explain, load, resolve
from jrlhf.roles.graph import Value, trace

# Calls that take a function, which is compiled -> the place of this argument.
FUNCTIONS = {"actor.update": 1, "estimator.custom_experience": 0, "estimator.where": 0}


def custom_dataflow(config: Config, shipped: Callable) -> UserCode:
    """Loads the function that the config names. Its parameters must be among those of the shipped dataflow."""
    key, spec = key_of(config), config.rl.dataflow
    assert spec is not None
    code = load(resolve(spec, key), key)
    served = [*inspect.signature(shipped).parameters, *config.roles.frozen]
    for name, parameter in inspect.signature(code.function).parameters.items():
        if name not in served or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"{key} has the parameter {parameter}, and stage {config.algorithm} gives {', '.join(served)}: name "
                "only those, or set roles.NAME.path for a frozen policy of this name"
            )
    return code


def custom_graph(config: Config, dataflow: Callable, shipped: Callable) -> Graph:
    """Traces a user's dataflow, and checks that it makes the calls on which the stage relies."""
    given: dict[str, list[tuple]] = defaultdict(list)  # call -> its arguments, each time
    teachers = [f"{name}.top_logprobs" for name in ("reference", *config.roles.frozen)]
    names = *FUNCTIONS, PAIRS, "estimator.mix", *teachers
    watched = {name: partial(_note, given[name]) for name in names}
    traced = partial(trace, _returning_a_pair(dataflow), roles_of(config), known_facts(config), name=config.algorithm)
    try:
        graph = traced(watched=watched)
        again = {name: list[tuple]() for name in FUNCTIONS}
        traced(watched={name: partial(_note, again[name]) for name in FUNCTIONS})
    except Exception as error:
        if isinstance(error, AttributeError) and error.obj is None and not config.rl.algorithm.needs_reference:
            raise UserError(
                f"{key_of(config)}: with {config.algorithm}.algorithm.kl_coef=0 there is no reference: name its model "
                f"in roles.NAME.path, and call NAME.{error.name}"
            ) from error
        raise UserError(
            f"{key_of(config)} cannot be traced ({explain(error)}): let it only make calls of its roles and hand on "
            "what they return, and give what computes with arrays to estimator.custom_experience"
        ) from error
    check_calls(config, graph, shipped)
    check_arguments(config, graph, given)
    for name, place in FUNCTIONS.items():
        if any(before[place] is not after[place] for before, after in zip(given[name], again[name], strict=True)):
            raise UserError(
                f"{key_of(config)} gives {name} a new function in each iteration, which would compile again each "
                "time: define it outside of the dataflow"
            )
    return graph


def _note(seen: list[tuple], *arguments: Any) -> None:
    seen.append(arguments)


def _returning_a_pair(dataflow: Callable) -> Callable:
    @functools.wraps(dataflow)
    def checked(**arguments):
        returned = dataflow(**arguments)
        if not (isinstance(returned, tuple) and [type(value) for value in returned] == [Value, Value]):
            raise TypeError("it must return the experience, or the rollout, and the metrics of the updates")
        if returned[0].name.startswith("pairs"):
            raise TypeError("it must return the experience of which the pairs are, and the metrics of the updates")

    return checked
