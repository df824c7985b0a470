"""The call graph of each stage: one iteration of an RL algorithm, or one step of another stage."""

from jrlhf.algorithms.registry import dpo_graph, graph_of
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Call, Graph

SFT = Graph("sft", ("texts",), (Call("sft.update", "actor", "train", ("texts",), ("metrics",)),))
REWARD_MODEL = Graph(
    "reward_model",
    ("pairs",),
    (
        Call("reward_model.update", "reward", "train", ("pairs",), ("metrics",)),
        Call("policy", "actor", "compute", (), ("policy",)),  # the policy stays on the devices meanwhile
    ),
)


def stage_graph(config: Config, stage: str) -> Graph:
    """Returns the calls of one iteration or step of a stage of the config. The graph has the stage's name."""
    if stage == config.algorithm:
        return graph_of(config)
    if stage == "dpo":
        return dpo_graph()
    return {"sft": SFT, "reward_model": REWARD_MODEL}[stage]


def planned_graph(config: Config) -> Graph:
    """Returns the graph that `jrlhf.plan` makes a plan for: of the RL algorithm, or else of DPO.

    Raises:
        UserError: the config has neither of them.
    """
    stage = config.algorithm or ("dpo" if "dpo" in config.stages else None)
    if stage is None:
        raise UserError(
            f"stages=[{', '.join(config.stages)}] have no calls to plan: add an algorithm of reinforcement "
            "learning, or dpo"
        )
    return stage_graph(config, stage)
