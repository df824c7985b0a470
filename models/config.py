"""The numbers that define a decoder."""

from dataclasses import dataclass, fields

VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU: Llama, Qwen2, Qwen3.

    vocab_size: token ids run below it. The tables have `padded_vocab` rows; the further ones are never drawn or scored.
    embed, layers, heads, kv_heads, head_dim, mlp: the sizes D, L, N, K, H and F. D need not be N * H.
    max_positions: the longest sequence, prompt and response together.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square in every RMSNorm.
    qk_norm: an RMSNorm over each query's and key's head dimension, before the rotation (Qwen3).
    qkv_bias: biases on the query, key and value projections (Qwen2).
    tie_embeddings: one table embeds tokens and scores them.
    softcap: bounds the final logits to softcap * tanh(logits / softcap).
    initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: a number out of its range.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"model {field.name}={value!r} must be a positive integer")
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model {name}={getattr(self, name)!r} must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(f"model kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"model head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"model softcap={self.softcap!r} must be positive, or null for none")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and unembedding tables: a multiple of 128, so that they divide over devices."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def tiny(cls, vocab_size: int, max_positions: int = 64) -> "ModelConfig":
        """4 layers of 128: about a million parameters at a vocabulary of 1024, trained in minutes on a laptop."""
        return cls(
            vocab_size, embed=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=384, max_positions=max_positions
        )

    @classmethod
    def llama3_8b(cls) -> "ModelConfig":
        """meta-llama/Meta-Llama-3-8B."""
        return cls(
            vocab_size=128256,
            embed=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14336,
            max_positions=8192,
            rope_theta=500000.0,
            norm_eps=1e-5,
            tie_embeddings=False,
        )

    @classmethod
    def qwen2_5_0_5b(cls) -> "ModelConfig":
        """Qwen/Qwen2.5-0.5B."""
        return cls(
            vocab_size=151936,
            embed=896,
            layers=24,
            heads=14,
            kv_heads=2,
            head_dim=64,
            mlp=4864,
            max_positions=32768,
            rope_theta=1000000.0,
            qkv_bias=True,
        )

    @classmethod
    def qwen3_0_6b(cls) -> "ModelConfig":
        """Qwen/Qwen3-0.6B."""
        return cls(
            vocab_size=151936,
            embed=1024,
            layers=28,
            heads=16,
            kv_heads=8,
            head_dim=128,
            mlp=3072,
            max_positions=40960,
            rope_theta=1000000.0,
            qk_norm=True,
        )

    @classmethod
    def qwen3_8b(cls) -> "ModelConfig":
        """Qwen/Qwen3-8B."""
        return cls(
            vocab_size=151936,
            embed=4096,
            layers=36,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=12288,
            max_positions=40960,
            rope_theta=1000000.0,
            qk_norm=True,
            tie_embeddings=False,
        )
