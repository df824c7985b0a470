"""The dataflow and the title of each stage, read from the algorithms' files; and the graphs of dataflows."""

import pkgutil
from collections.abc import Callable
from importlib import import_module

import jrlhf.algorithms
from jrlhf.algorithms.custom import custom_dataflow, custom_graph
from jrlhf.algorithms.on_policy import on_policy
from jrlhf.algorithms.roles import ROLES, known_facts
from jrlhf.config.schema import Config
from jrlhf.meshes import Graph
from jrlhf.roles.actor import Reference
from jrlhf.roles.graph import trace
from jrlhf.roles.pair_actor import PairActor

DATAFLOWS: dict[str, Callable] = {}  # stage -> dataflow
TITLES: dict[str, str] = {}  # stage -> its name in texts for people

# Every file with `TITLES` is an algorithm. Its dataflow has the file's name and serves all stages in `TITLES`.
for _file in pkgutil.iter_modules(jrlhf.algorithms.__path__):
    if _file.name not in ("custom", "dynamic_sampling", "on_policy", "registry", "roles"):
        _module = import_module(f"{jrlhf.algorithms.__name__}.{_file.name}")
        TITLES |= _module.TITLES
        DATAFLOWS |= dict.fromkeys(_module.TITLES, getattr(_module, _file.name))


def dataflow_of(config: Config) -> Callable:
    """The dataflow of the config's stage of reinforcement learning: a user's own, or a shipped one."""
    assert config.algorithm is not None
    if config.rl.dataflow is not None:
        return custom_dataflow(config, DATAFLOWS[config.algorithm]).function
    return on_policy if config.compute.shared_passes else DATAFLOWS[config.algorithm]


def dataflow_identity(config: Config) -> str | None:
    """A digest of the file of a user's own dataflow. A run cannot go on with another one."""
    if config.algorithm is None or config.rl.dataflow is None:
        return None
    return (custom_dataflow(config, DATAFLOWS[config.algorithm]).sha256 or "")[:16]


def graph_of(config: Config) -> Graph:
    """The calls of the dataflow of the config's stage of reinforcement learning, by tracing it."""
    assert config.algorithm is not None
    if config.rl.dataflow is not None:
        return custom_graph(config, dataflow_of(config), DATAFLOWS[config.algorithm])
    return trace(dataflow_of(config), ROLES, known_facts(config), name=config.algorithm)


def dpo_graph() -> Graph:
    """The calls of a step of DPO."""
    return trace(DATAFLOWS["dpo"], {"actor": PairActor, "reference": Reference})
