"""What an iteration asks for, as numbers: all that memory and time are computed from, beside a placement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrlhf.meshes import Call, Graph
from jrlhf.meshes.graph import Kind
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.params import HeadKind
from jrlhf.models.remat import Remat


@dataclass(frozen=True)
class RoleModel:
    """One role's model.

    trained: has an optimizer's state, and float32 weights; a frozen model's matrices are in the compute dtype.
    lora: it is an adapter on a base that all such roles share.
    is_base: it is that base itself, without an adapter.
    int8: the base's layers are stored as int8.
    wide: it is frozen, but its weights are float32 as they were trained: a reward model that the run learnt.
    """

    config: ModelConfig
    head: HeadKind
    trained: bool
    lora: LoRAConfig | None = None
    is_base: bool = False
    int8: bool = False
    wide: bool = False

    @property
    def shared(self) -> bool:
        """Whether the weights that it computes with are the shared base's."""
        return self.lora is not None or self.is_base


@dataclass(frozen=True)
class Workload:
    """An iteration of an algorithm.

    graph: its calls. models: of the roles that have calls with a model; a role may have several (the learner trains
        actor and critic in one program; a weighted sum of reward models scores with each).
    rows: responses of an iteration; rows_key: the setting that says how many, for messages. samples: of them for each
        prompt.
    prompt, response: tokens that arrays are as wide as. mean_prompt, mean_response: what rows have on average.
    epochs, minibatches: of an update. slots: rows that decode at a time, None for all. chunk: steps of one program that
        decodes, None for all. prefill: as in `models.schedule`.
    dtype: of compute. remat: as in `models.remat`. fused_loss: as in `programs.Compute`.
    spanned: the kinds of calls whose policies have a head for responses only, and not for prompts.
    """

    graph: Graph
    models: Mapping[str, tuple[RoleModel, ...]]
    rows: int
    prompt: int
    response: int
    mean_prompt: float
    mean_response: float
    samples: int = 1
    epochs: int = 1
    minibatches: int = 1
    slots: int | None = None
    chunk: int | None = None
    prefill: int | None = None
    dtype: Any = jnp.dtype(jnp.float32)
    remat: Remat = "full"
    fused_loss: bool = True
    spanned: tuple[Kind, ...] = ("infer", "train")
    rows_key: str = "rows"

    @property
    def length(self) -> int:
        """T: the width of every batch of tokens."""
        return self.prompt + self.response

    def rows_of(self, call: Call) -> int:
        """That a call computes: each twice where an adapter and its bare base are scored in one pass."""
        return self.rows * (2 if call.name.endswith(".logprobs_with_base") else 1)
