"""The data of the algorithms: frozen dataclasses registered as pytrees.

Shapes: B batch, T time = prompt + response. Rows are right-padded with no gap between prompt and response.

Time: `logprobs[:, t]` is log pi(tokens[:, t] | tokens[:, :t]) and `values[:, t]` is V *before* token t: both belong to
the action at t, in the state before it. Index 0 has neither and is never a response.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

PyTree = Any
Scores = Float[Array, "B"] | Float[Array, "B T"]  # one score per sequence, or one per token
Logprobs = Float[Array, "B T"]
Coefficient = float | Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """Prompts with the responses that the behaviour policy sampled: B rows of T tokens, right-padded, without a gap.

    prompt_lengths, response_lengths: numbers of tokens, at least 1 and at least 0, together at most T, which is not
    checked under `jax.jit`; a response includes its end-of-sequence token. logprobs: those of the behaviour policy when
    it drew the token; read at response tokens only. finished: False if the length limit cut the response.
    version: version of the weights. versions: of the weights per token; None: `version` everywhere.
    """

    tokens: Int[Array, "B T"]
    prompt_lengths: Int[Array, "B"]
    response_lengths: Int[Array, "B"]
    logprobs: Float[Array, "B T"]
    finished: Bool[Array, "B"]
    version: Int[Array, ""]
    versions: Int[Array, "B T"] | None = field(default=None, kw_only=True)

    @staticmethod
    def of(generation: Any, version: Int[Array, ""] | int = 0) -> "Rollout":
        """The rollout of what a sampler returned: an object with all fields but the versions, such as a `Generation`.

        version: of the weights that drew it, such as `state.step`. It is copied, because a step frees its state.
        """
        drawn = {item.name: getattr(generation, item.name) for item in fields(Rollout) if "version" not in item.name}
        return Rollout(**drawn, version=jnp.array(version))

    @property
    def lengths(self) -> Int[Array, "B"]:
        """The number of tokens of each row, prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    def ages(self, version: Int[Array, ""]) -> Int[Array, "B T"]:
        """The number of updates between the weights that drew a token and the weights `version`."""
        drawn = self.version if self.versions is None else self.versions
        return version - drawn + 0 * self.tokens  # eager zeros_like needs a shard in every process


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Targets:
    """K tokens for each position, with the log-probabilities that a teacher gives them there: `[:, t]` of token t."""

    ids: Int[Array, "B T K"]
    logprobs: Float[Array, "B T K"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experience(Rollout):
    """A rollout with everything that an update needs. The `[B, T]` arrays added here are zero outside `response_mask`.

    A field is None where an algorithm does not have it: values and returns without a critic, ref_logprobs without a
    reference, importance without a correction, kl_coef where the KL is not in the loss, advantages where the loss needs
    none.
    """

    scores: Float[Array, "B"]  # shaped score of each sequence
    response_mask: Bool[Array, "B T"]  # tokens to learn from; an excluded row has none (see `experience.py`)
    old_logprobs: Float[Array, "B T"]  # under the actor before its update: the denominator of the ratio
    ref_logprobs: Float[Array, "B T"] | None  # under the frozen reference
    values: Float[Array, "B T"] | None  # by the critic before its update
    rewards: Float[Array, "B T"]  # score at the last response token, minus each token's KL penalty if it is a reward
    advantages: Float[Array, "B T"] | None  # whitened with `config.whiten_advantages`
    returns: Float[Array, "B T"] | None  # the critic's targets: unwhitened advantages + values
    importance: Float[Array, "B T"] | None = None  # weights of the policy loss: see `off_policy.importance_weights`
    kl_coef: Float[Array, ""] | None = None  # beta of the KL in the loss
    targets: Targets | None = None  # of a loss that compares with a teacher; read at response tokens only

    @property
    def valid(self) -> Bool[Array, "B"]:
        """The rows with a finite score. Another row counts nowhere: not in the loss, nor in any statistic."""
        return jnp.isfinite(self.scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Weights, the optimizer's state, and the number of step function calls so far."""

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""]

    @classmethod
    def create(cls, params: PyTree, optimizer: optax.GradientTransformation) -> Self:
        """A fresh state. Every leaf is on the mesh of `params`, scalars replicated.

        (A scalar left on one device changes its sharding in the first step, so the second one would recompile.)
        Raises TypeError for a leaf of `params` that cannot be trained, such as a module's function or random key.
        """
        if not callable(getattr(optimizer, "init", None)):
            raise TypeError(f"optimizer is of class {type(optimizer).__name__}, but must be a GradientTransformation")
        for path, leaf in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                raise TypeError(
                    f"params{jax.tree_util.keystr(path)} is no array of floats: take the weights alone, by "
                    "nnx.split(module, nnx.Param, ...) or eqx.partition(module, eqx.is_inexact_array)"
                )
        return cls(params, *on_mesh_of(params, (optimizer.init(params), jnp.zeros((), jnp.int32))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KLState:
    """State of the KL controller, saved with the run."""

    coef: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SFTBatch:
    """Text to imitate."""

    tokens: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]  # tokens to learn; index 0 has no log-probability and never counts


def check_class(name: str, value: Any, *classes: type) -> None:
    """Raises TypeError if a value is of none of these classes."""
    if not isinstance(value, classes):
        wanted = " or ".join(one.__name__ for one in classes)
        raise TypeError(f"{name} is of class {type(value).__name__}, but must be of class {wanted}")


def check_shapes(*shapes: tuple[int, ...], **arrays: Any) -> None:
    """Raises TypeError or ValueError, with its name, for an array of none of these shapes. None is no array."""
    wanted = " or ".join(map(str, shapes))
    for name, x in arrays.items():
        if x is not None and not hasattr(x, "shape"):
            raise TypeError(f"{name} is of class {type(x).__name__}, but must be an array of shape {wanted}")
        if x is not None and x.shape not in shapes:
            raise ValueError(f"{name} has shape {x.shape}, but the rows ask for {wanted}")


def before_tokens(tokens: Int[Array, "B T"], values: Any) -> Any:
    """Returns the values before each token [B, T], where `values` may have a last one after the last token [B, T+1]."""
    rows, time = tokens.shape
    return values[:, :-1] if getattr(values, "shape", None) == (rows, time + 1) else values


def on_mesh_of(params: PyTree, tree: PyTree) -> PyTree:
    """Replicates the leaves of `tree` that are on no mesh over the mesh of `params`, if that has one."""

    def sharding(x: Any) -> Any:
        return None if isinstance(x, Tracer) else getattr(x, "sharding", None)

    meshes = [s.mesh for s in map(sharding, jax.tree.leaves(params)) if isinstance(s, NamedSharding)]
    if not meshes:
        return tree
    replicated = NamedSharding(meshes[0], P())
    return jax.tree.map(lambda x: x if isinstance(sharding(x), NamedSharding) else jax.device_put(x, replicated), tree)
