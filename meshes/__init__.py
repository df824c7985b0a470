"""Meshes, layouts and the moves between them."""

from jrlhf.meshes.cost import ReshardCost, reshard_cost, tree_reshard_cost
from jrlhf.meshes.graph import Call, Graph
from jrlhf.meshes.hlo import collective_traffic, collectives, loops
from jrlhf.meshes.host import gathered, to_devices, to_host
from jrlhf.meshes.layout import GENERATE, SCORE, TRAIN, TRAIN_TP, Layout, ShardingRules, gather
from jrlhf.meshes.live import live_bytes
from jrlhf.meshes.mesh import AXES, make_mesh
from jrlhf.meshes.reshard import lower_reshard, reshard
from jrlhf.meshes.transfer import lies_elsewhere, transfer

__all__ = [
    "AXES",
    "Call",
    "GENERATE",
    "Graph",
    "SCORE",
    "TRAIN",
    "TRAIN_TP",
    "Layout",
    "ReshardCost",
    "ShardingRules",
    "collective_traffic",
    "collectives",
    "gather",
    "lies_elsewhere",
    "gathered",
    "live_bytes",
    "loops",
    "lower_reshard",
    "make_mesh",
    "reshard",
    "reshard_cost",
    "transfer",
    "to_devices",
    "to_host",
    "tree_reshard_cost",
]
