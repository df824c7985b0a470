"""Finds the dataflow of a stage, and traces it to the graph of its calls."""

from collections.abc import Callable
from importlib import import_module

from jrlhf.algorithms.custom import custom_dataflow, custom_graph
from jrlhf.algorithms.on_policy import on_policy
from jrlhf.algorithms.pair_actor import PairActor, PairReference
from jrlhf.algorithms.roles import known_facts, roles_of
from jrlhf.config.schema import Config
from jrlhf.config.stages import FILES, OWN, optimizers_of
from jrlhf.errors import UserError
from jrlhf.meshes.graph import Call, Graph
from jrlhf.rewards.user_code import UserCode
from jrlhf.roles.graph import trace
from jrlhf.run.processes import from_main

SFT = Graph("sft", ("texts",), (Call("sft.update", "actor", "train", ("texts",), ("metrics",)),))
REWARD_MODEL = Graph(
    "reward_model",
    ("pairs",),
    (
        Call("reward_model.update", "reward", "train", ("pairs",), ("metrics",)),
        Call("policy", "actor", "compute", (), ("policy",)),  # the policy stays on the devices meanwhile
    ),
)


def shipped_dataflow(stage: str) -> Callable:
    """The function in the algorithm's file that has the file's name. It gives a stage of one's own its roles."""
    file = FILES.get(stage, FILES[OWN])
    return getattr(import_module(f"jrlhf.algorithms.{file}"), file)


def dataflow_of(config: Config) -> Callable:
    """The dataflow of the config's stage of reinforcement learning: a user's own, or a shipped one."""
    assert config.algorithm is not None
    if config.rl.dataflow is not None:
        return custom_dataflow(config, shipped_dataflow(config.algorithm)).function
    return on_policy if config.compute.shared_passes else shipped_dataflow(config.algorithm)


def dataflow_identity(config: Config) -> dict[str, str]:
    """Returns inputs that a resume must have, too: the code of a custom dataflow, the number of logical workers."""
    if config.algorithm is None:
        return {}
    several = config.asynchronous is not None and config.logical_workers > 1
    words = {"asynchronous.logical_workers": str(config.logical_workers)} if several else {}
    if config.rl.dataflow is None:
        return words
    code = custom_dataflow(config, shipped_dataflow(config.algorithm))
    return _code_words(code, "dataflow", f"{config.algorithm}.dataflow={config.rl.dataflow}") | words


def optimizer_identity(config: Config, stage: str) -> dict[str, str]:
    """Returns inputs that a resume of a stage must have, too: the code of optimizers of the user's own."""
    words: dict[str, str] = {}
    for key, section in optimizers_of(stage, config.sections[stage]).items():
        if section.optimizer != "adamw":
            from jrlhf.algorithms.own_optimizers import own_code

            if (code := own_code(section, key)) is not None:
                words |= _code_words(code, f"{key}.optimizer", f"{key}.optimizer={section.optimizer}")
    return words


def _code_words(code: UserCode, name: str, called: str) -> dict[str, str]:
    """Returns words that identify a user's code, which must be the same in all processes. called: for messages."""
    modules = {f"{name} module {module}": digest[:16] for module, digest in code.modules.items()}
    own = {name: (code.sha256 or "")[:16], **modules}
    if from_main(lambda: own) != own:
        raise UserError(
            f"{called} is not the same function in all processes: start them with one program and its files"
        )
    return own


def graph_of(config: Config) -> Graph:
    """Traces the dataflow of the config's stage of reinforcement learning to the graph of its calls."""
    assert config.algorithm is not None
    if config.rl.dataflow is not None:
        return custom_graph(config, dataflow_of(config), shipped_dataflow(config.algorithm))
    return trace(dataflow_of(config), roles_of(config), known_facts(config), name=config.algorithm)


def stage_graph(config: Config, stage: str) -> Graph:
    """The calls of one iteration or step of a stage of the config. The graph has the stage's name."""
    if stage == config.algorithm:
        return graph_of(config)
    if stage == "dpo":
        return trace(shipped_dataflow("dpo"), {"actor": PairActor, "reference": PairReference})
    return {"sft": SFT, "reward_model": REWARD_MODEL}[stage]


def planned_graph(config: Config) -> Graph:
    """The graph that `jrlhf.plan` makes a plan for: of the RL algorithm, or else of DPO."""
    stage = config.algorithm or ("dpo" if "dpo" in config.stages else None)
    if stage is None:
        raise UserError(
            f"stages=[{', '.join(config.stages)}] have no calls to plan: add an algorithm of reinforcement "
            "learning, or dpo"
        )
    return stage_graph(config, stage)
