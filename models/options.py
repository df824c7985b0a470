"""`ForwardOptions`: how a model computes over whole sequences."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrlhf.kernels.logprob.implementations import Implementation
from jrlhf.models.config.checks import positive
from jrlhf.models.flash import AttentionImplementation
from jrlhf.models.lora import LoRAConfig
from jrlhf.models.remat import Remat, policy


@dataclass(frozen=True)
class ForwardOptions:
    """Settings with which a model computes over whole sequences. One object serves all functions of a model.

    remat: the values of each layer that the backward pass keeps; it recomputes the others. See `remat.py`.
    dtype: dtype of weights and activations in compute. Norms, rotary angles and all from the logits on are float32.
    attention: None for cuDNN on a GPU and splash on a TPU where they support dtype and shapes, else XLA.
    lora: the adapter that is trained, on a frozen base in the layout GENERATE. None: there is no adapter.

    Only for token log-probabilities, unused by scalar heads:
    temperature: divides the logits.
    implementation: implementation of the log-probability op; None for the platform's default.
    span: the largest number of tokens of a row that are predicted, from its start on; None: all but the first.

    Raises ValueError for numbers out of range.
    """

    temperature: float = 1.0
    implementation: Implementation | None = None
    remat: Remat = "full"
    dtype: Any = jnp.float32
    attention: AttentionImplementation | None = None
    lora: LoRAConfig | None = None
    span: int | None = None

    def __post_init__(self) -> None:
        policy(self.remat)
        if self.span is not None and self.span < 1:
            raise ValueError(f"span={self.span} must be a positive number of tokens, or None")
        if not positive(self.temperature):
            raise ValueError(f"temperature={self.temperature} must be positive and finite")
