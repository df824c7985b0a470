"""Device meshes, sharding layouts and the transfers between them."""

from jrlhf.meshes.cost import ReshardCost, reshard_cost, tree_reshard_cost
from jrlhf.meshes.graph import Call, Graph
from jrlhf.meshes.layout import GENERATE, SCORE, TRAIN, TRAIN_TP, Layout, ShardingRules, gather
from jrlhf.meshes.mesh import AXES, make_mesh, simulate_devices
from jrlhf.meshes.reshard import reshard
from jrlhf.meshes.transfer import gathered, lies_elsewhere, to_devices, to_host, transfer

__all__ = [
    "AXES",
    "Call",
    "GENERATE",
    "Graph",
    "Layout",
    "ReshardCost",
    "SCORE",
    "ShardingRules",
    "TRAIN",
    "TRAIN_TP",
    "gather",
    "gathered",
    "lies_elsewhere",
    "make_mesh",
    "reshard",
    "reshard_cost",
    "simulate_devices",
    "to_devices",
    "to_host",
    "transfer",
    "tree_reshard_cost",
]
