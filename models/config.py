"""The numbers and switches that define a decoder."""

import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

VOCAB_MULTIPLE = 128
MOST_LAYERS = 10_000  # a config may say anything, and each layer has an entry in what is made of it

Activation = Literal["silu", "gelu_tanh"]
NormKind = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
_CHOICES = {"activation": ("silu", "gelu_tanh"), "norm": ("rms", "layer"), "positions": ("rotary", "learned")}


@dataclass(frozen=True)
class RopeScaling:
    """Settings that lower rotary frequencies: positions beyond those of pretraining then have angles that it has seen.

    kind: "linear" divides every frequency by `factor`. "llama3" divides by it those whose wavelength exceeds
        original_max_positions / low_freq_factor, leaves those whose wavelength is below original_max_positions /
        high_freq_factor, and changes smoothly between the two (Llama 3.1). For linear scaling the other numbers are
        None.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope_scaling kind={self.kind!r}: known are linear, llama3")
        if not positive(self.factor):
            raise ValueError(f"rope_scaling factor={self.factor!r} must be positive")
        bands = {
            name: getattr(self, name) for name in ("low_freq_factor", "high_freq_factor", "original_max_positions")
        }
        for name, value in bands.items():
            if self.kind == "linear" and value is not None:
                raise ValueError(f"rope_scaling {name}={value!r} must be null: linear scaling has no bands")
            if self.kind == "llama3" and (value is None or not positive(value)):
                raise ValueError(f"rope_scaling {name}={value!r} must be positive: llama3 scaling needs it")
        original = self.original_max_positions
        if original is not None and not is_count(original):
            raise ValueError(f"rope_scaling original_max_positions={original!r} must be a positive integer")
        if self.low_freq_factor is not None and self.high_freq_factor is not None:
            if not self.low_freq_factor < self.high_freq_factor:
                raise ValueError(
                    f"rope_scaling low_freq_factor={self.low_freq_factor!r} must be below "
                    f"high_freq_factor={self.high_freq_factor!r}"
                )


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3, GPT-2.

    The defaults of the switches are Llama's: RMSNorm, rotary positions, SwiGLU, no biases, attention over all earlier
    positions.

    vocab_size: token ids are below it. The tables have `padded_vocab` rows; the others are never drawn or scored.
    embed, layers, heads, kv_heads, head_dim, mlp: the sizes D, L, N, K, H and F. D need not be N * H.
    max_positions: the longest sequence, prompt and response together.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square in every RMSNorm, to the variance in every LayerNorm.
    qk_norm: an RMSNorm over each query's and key's head dimension, before the rotation (Qwen3, Gemma 3).
    qkv_bias: biases on the query, key and value projections (Qwen2, GPT-2).
    tie_embeddings: one table embeds tokens and scores them.
    softcap: bounds the final logits to softcap * tanh(logits / softcap).
    initializer_range: standard deviation of the initial weights.
    output_bias, mlp_bias: biases on attention's output projection, on the mlp's projections (GPT-2).
    activation: of the mlp: x * sigmoid(x), or GELU in its tanh approximation (Gemma, GPT-2).
    gated_mlp: down(activation(gate x) * up x); without, down(activation(up x)) (GPT-2).
    norm: RMSNorm, or LayerNorm with scale and bias (GPT-2).
    norm_offset: every RMSNorm multiplies by 1 + scale, and scales begin at 0 (Gemma).
    post_norms: a norm after attention and one after the mlp too, before each is added to the residual stream (Gemma).
    positions: rotary, or a learned table of max_positions rows that is added to the embeddings (GPT-2).
    rope_scaling: of the rotary frequencies of global layers.
    window: local layers see this many positions, their own and the ones before it. None: every layer is global.
    local_layers: which layers are local, one flag a layer; empty: all of them, where `window` is set.
    local_rope_theta: base of local layers' rotary frequencies, which are not scaled (Gemma 3). None: as global layers.
    query_scale: attention scores are multiplied by it. None: 1 / sqrt(H).
    attention_softcap: bounds attention scores as `softcap` does logits (Gemma 2).
    embed_scale: embeddings are multiplied by it, rounded to the compute dtype (Gemma: sqrt(D)).
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_positions: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tie_embeddings: bool = True
    softcap: float | None = None
    initializer_range: float = 0.02
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    norm: NormKind = "rms"
    norm_offset: bool = False
    post_norms: bool = False
    positions: Positions = "rotary"
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    local_rope_theta: float | None = None
    query_scale: float | None = None
    attention_softcap: float | None = None
    embed_scale: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and not is_count(value):
                raise ValueError(f"model {field.name}={value!r} must be a positive integer")
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if not positive(getattr(self, name)):
                raise ValueError(f"model {name}={getattr(self, name)!r} must be positive")
        for name in ("softcap", "attention_softcap", "local_rope_theta", "query_scale", "embed_scale"):
            value = getattr(self, name)
            if value is not None and not positive(value):
                raise ValueError(f"model {name}={value!r} must be positive, or null for none")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"model {name}={getattr(self, name)!r}: known are {', '.join(choices)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"model head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.norm == "layer" and self.norm_offset:
            raise ValueError("model norm_offset=True needs norm='rms': a LayerNorm multiplies by its scale alone")
        self._check_local_layers()

    def _check_local_layers(self) -> None:
        if self.window is not None and not is_count(self.window):
            raise ValueError(f"model window={self.window!r} must be a positive integer, or null for none")
        if not isinstance(self.local_layers, tuple) or not all(isinstance(flag, bool) for flag in self.local_layers):
            raise ValueError(f"model local_layers={self.local_layers!r} must be a tuple of booleans")
        if self.local_layers and len(self.local_layers) != self.layers:
            raise ValueError(
                f"model local_layers has {len(self.local_layers)} flags for layers={self.layers}: it needs one a layer"
            )
        if self.window is None and (self.local_layers or self.local_rope_theta is not None):
            raise ValueError("model local_layers and local_rope_theta need a window: without one no layer is local")
        if self.positions == "learned" and (self.rope_scaling is not None or self.local_rope_theta is not None):
            raise ValueError("model rope_scaling and local_rope_theta need positions='rotary'")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and unembedding tables: a multiple of 128, so that they divide over devices."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def locality(self) -> tuple[bool, ...]:
        """One flag a layer: True for a local layer."""
        return self.local_layers or (self.window is not None,) * self.layers

    @property
    def scores(self) -> dict[str, Any]:
        """The keywords of `attention` and `cached_attention` that this model sets."""
        return {"scale": self.query_scale, "softcap": self.attention_softcap, "window": self.window}

    @classmethod
    def tiny(cls, vocab_size: int) -> "ModelConfig":
        """4 layers of 128: about a million parameters at a vocabulary of 1024, trained in minutes on a laptop."""
        return cls(vocab_size, embed=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=384, max_positions=64)


def positive(value: float) -> bool:
    """True if a number is positive, and finite as a float."""
    return 0 < value <= sys.float_info.max


def is_count(value: object) -> bool:
    """True for a positive integer, but not for True."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
