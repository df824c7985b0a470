"""Where the parts of each role's model are stored while a call runs: on the devices, in host memory, or nowhere."""

from collections.abc import Mapping
from itertools import pairwise, product
from typing import Literal

from jrlhf.config.schema import Config, SleepConfig
from jrlhf.meshes import Call, Graph
from jrlhf.meshes.graph import LEARNED, LEARNER

TRAINED = ("actor", "critic", "cost_critic")

Part = Literal["weights", "optimizer", "generation"]
Place = Literal["device", "pinned_host", "dropped"]
Away = Mapping[tuple[str, str], Mapping[str, Place]]
"""(role, name of a call of any role) -> part of the role's state -> where that part is while the call runs."""


def residency(config: Config, role: str, call: Call, following: Call | None = None) -> dict[Part, Place]:
    """Returns where each part of a role's model is while a call of the algorithm runs.

    role: a role with weights; a learner's weights are those of the actor and the critic.
    following: the next call with a model. With `sleep.ahead`, what it needs may be on the devices already.

    The parts are "weights", a trained role's "optimizer", and the actor's "generation": the copy of the weights that it
    generates with, and the KV cache. Offloaded weights are brought to the devices while that copy is made and freed
    when it is done. With LoRA there is no copy; "weights" are then the adapter's, for the base is never offloaded.
    """
    sleep = config.offloading
    ahead = [following] if sleep.ahead and following is not None and following.role != call.role else []
    users = [user for user in (call, *ahead) if user.role == role or (user.role == LEARNER and role in LEARNED)]
    generates_with_copy = role == "actor" and config.lora is None
    needed = any(user is following or user.kind != "generate" or not generates_with_copy for user in users)
    places: dict[Part, Place] = {"weights": "pinned_host" if weights_sleep(role, sleep) and not needed else "device"}
    if role in TRAINED:
        trained = any(user.kind == "train" for user in users)
        places["optimizer"] = "device" if trained or sleep.optimizer == "device" else "pinned_host"
    if role == "actor":
        places["generation"] = "device" if call.role == role and call.kind == "generate" else "dropped"
    return places


def weights_sleep(role: str, sleep: SleepConfig) -> bool:
    """Returns whether a role's weights are offloaded to host memory between its calls."""
    section = {"cost_critic": "critic", "cost": "reward"}.get(role, role)
    return getattr(sleep, section) == "host"


def away_parts(config: Config, graph: Graph, roles: Mapping[str, object]) -> Away:
    """Returns where the states of `roles` are during every call of a graph. Only RL algorithms offload anything."""
    if graph.name != config.algorithm:
        return {}
    calls = [call for call in graph if call.kind != "compute"]
    following = dict(pairwise(calls))
    return {
        (role, call.name): {
            part: place
            for part, place in residency(config, role, call, following.get(call)).items()
            if part != "generation"
        }
        for role, call in product(roles, calls)
    }
