"""One model: its architecture and its weights."""

from dataclasses import dataclass, replace

from jrlhf.meshes import GENERATE, Layout
from jrlhf.meshes.offload import offload, onload
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.params import Params
from jrlhf.run.checkpoints import fingerprint_of


@dataclass(frozen=True)
class Architecture:
    """What the compiled functions of a model depend on: numbers, no arrays.

    lora: what is trained is an adapter on a frozen base; None: all weights are trained, or none.
    shared: the weights lie as GENERATE stores them, where generation, scoring and an adapter's training all use the
        same buffers. Otherwise they lie as TRAIN stores them.
    """

    config: ModelConfig
    lora: LoRAConfig | None = None
    shared: bool = False

    def layout(self, otherwise: Layout) -> Layout:
        """How a call sees the model: as GENERATE where the weights are shared, else as this call would have it."""
        return GENERATE if self.shared else otherwise


@dataclass(frozen=True)
class Model:
    """Weights with what is needed to compute with them.

    params: all weights, or an adapter.
    base: what the adapter adapts: never trained, donated or moved.
    """

    architecture: Architecture
    params: Params
    base: Params | None = None

    @property
    def config(self) -> ModelConfig:
        return self.architecture.config

    @property
    def frozen(self) -> tuple[Params, ...]:
        """What a compiled function takes after its other arguments."""
        return () if self.base is None else (self.base,)

    def holding(self, params: Params) -> "Model":
        """The same model with other weights of the same kind."""
        return replace(self, params=params)

    def offloaded(self) -> "Model":
        """The same model with its own weights in the host's memory. Those of this one are deleted."""
        return self.holding(offload(self.params))

    def onloaded(self) -> "Model":
        """The same model to compute with: where it sleeps, a copy on its devices."""
        return self.holding(onload(self.params))

    def fingerprint(self) -> str:
        """One word for all weights, the base's included."""
        return fingerprint_of((self.params, *self.frozen))
