"""`ModelConfig`: the sizes and switches that define a decoder."""

from dataclasses import dataclass
from typing import Any, Literal

from jrlhf.models.config.checks import check_decoder
from jrlhf.models.config.rope import RopeScaling

VOCAB_MULTIPLE = 128
MOST_LAYERS = 10_000  # limits the memory that a wrong config can take: several tuples have an entry per layer

Activation = Literal["silu", "gelu_tanh"]
NormKind = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]


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
    activation: the mlp's nonlinearity: x * sigmoid(x), or GELU in its tanh approximation (Gemma, GPT-2).
    gated_mlp: True for down(activation(gate x) * up x), False for down(activation(up x)) (GPT-2).
    norm: RMSNorm, or LayerNorm with scale and bias (GPT-2).
    norm_offset: every RMSNorm multiplies by 1 + scale, and scales begin at 0 (Gemma).
    post_norms: a norm after attention and one after the mlp too, before each is added to the residual stream (Gemma).
    positions: rotary, or a learned table of max_positions rows that is added to the embeddings (GPT-2).
    rope_scaling: scaling of the rotary frequencies of global layers.
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
        check_decoder(self)

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
