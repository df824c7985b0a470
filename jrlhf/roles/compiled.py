"""`CompiledModel`: makes the compiled functions that score with a model on a mesh, or train it.

If the model is an adapter, each function takes the base as one more argument at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from optax import GradientTransformation

from jrlhf.meshes.by_length import ByLength, map_by_length
from jrlhf.meshes.layout import Layout
from jrlhf.meshes.rows import map_parts
from jrlhf.models.forward import make_logprobs, make_logprobs_with_base, make_token_sums
from jrlhf.models.scalars import make_scores, make_values
from jrlhf.models.top_tokens import make_top_logprobs
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.steps import make_actor_step
from jrlhf.ppo.token_losses import TokenLoss
from jrlhf.ppo.updates import Pipeline
from jrlhf.roles.model import Architecture, Compute

Function = Callable[..., Any]  # the method that makes a function documents its arguments and results

# Decorates methods whose functions score: all roles of one architecture on one mesh share the program.
_shared = cache


@dataclass(frozen=True)
class CompiledModel:
    """The functions of one architecture on one mesh.

    Those that score are jitted. The results of `train_*` are to be differentiated inside a jitted step.
    `span`, `temperature`: as in `make_logprobs`.
    """

    architecture: Architecture
    mesh: Mesh
    compute: Compute

    @property
    def runs(self) -> Pipeline | None:
        """The pipeline that runs updates, where they are more than one program."""
        return None

    def train_logprobs(self, *, temperature: float = 1.0, span: int | None = None) -> Function:
        """(params, tokens) -> (logprobs, entropy). With `span` (params, tokens, starts)."""
        return self._make(make_logprobs, self.compute.train_layout, temperature=temperature, span=span)

    def train_sums(self, **options: Any) -> Function | None:
        """(params, tokens, data, terms) -> (loss, metrics), as of `make_token_sums`; None unless losses are fused."""
        return self._make(make_token_sums, self.compute.train_layout, **options) if self.compute.fused_loss else None

    def train_all_values(self) -> Function:
        """(params, tokens) -> values [B, T + 1], V before each token and after the last one."""
        return self._make(make_values, self.compute.train_layout)

    def train_scores(self) -> Function:
        """(params, tokens, lengths) -> scores [B]."""
        return self._make(make_scores, self.compute.train_layout)

    def actor_step(
        self,
        optimizer: GradientTransformation,
        algorithm: PolicyConfig,
        temperature: float,
        responses: int | None,
        loss: TokenLoss | None = None,
    ) -> Function:
        """(state, experience) -> (state, metrics), jitted: the actor's updates. responses: maximum response length."""
        # Texts that are imitated in addition are trained on from their first token.
        span = None if algorithm.ptx_coef else responses
        reads_entropy = loss is not None or algorithm.entropy_coef != 0
        options = {"temperature": temperature, "span": span, "entropy_gradient": reads_entropy}
        sums = self.train_sums(**options)

        def of_responses(params, tokens, data, *others, **ids):
            assert sums is not None
            return sums(params, tokens, data, *others, starts=jnp.argmax(data.computed, axis=1), **ids)

        sums_fn = sums if span is None or sums is None else of_responses
        logprobs = self.train_logprobs(temperature=temperature)
        return make_actor_step(logprobs, optimizer, algorithm, sums_fn=sums_fn, pipeline=self.runs, loss=loss)

    @_shared
    def score_logprobs(self, *, temperature: float, span: int | None = None) -> Function:
        """(params, tokens, lengths) -> (logprobs, entropy). With `span` (params, tokens, lengths, starts).

        Beyond a row's length they are undefined.
        """
        logprobs = self._make(make_logprobs, self.compute.score_layout, temperature=temperature, span=span)
        return self._scoring(logprobs, arrays=0 if span is None else 1)

    @_shared
    def score_top_logprobs(self, *, k: int, limit: int | None, temperature: float, span: int) -> Function:
        """(params, tokens, lengths, starts) -> (ids, logprobs) [B, T, k], of the most likely tokens in each place.

        limit: as in `make_top_logprobs`.
        """
        options = {"k": k, "limit": limit, "temperature": temperature, "span": span}
        return self._scoring(self._make(make_top_logprobs, self.compute.score_layout, **options), arrays=1)

    @_shared
    def score_logprobs_with_base(self, *, temperature: float, span: int) -> Function:
        """(adapter, tokens, lengths, starts, base) -> (logprobs, entropy, logprobs of the bare base), in one pass."""
        model = self.architecture
        assert model.lora is not None
        options = replace(self.compute.forward(model), temperature=temperature, span=span)
        return self._scoring(make_logprobs_with_base(model.config, self.mesh, model.lora, options), arrays=1)

    @_shared
    def score_values(self) -> Function:
        """(params, tokens, lengths) -> (V before each token [B, T], V after each row's last token [B])."""
        values = self._make(make_values, self.compute.score_layout)

        def split(params, tokens, lengths, *base):
            states = values(params, tokens, *base)  # [B, T + 1]: of the states before each token and after the last
            return states[:, :-1], jax.vmap(lambda row, length: row[length])(states, lengths)

        return self._scoring(split, reads_lengths=True)

    @_shared
    def score_sequences(self) -> Function:
        """(params, tokens, lengths) -> scores [B]."""
        scores = self._make(make_scores, self.compute.score_layout, pad_id=self.architecture.pad_id)
        return self._scoring(scores, reads_lengths=True)

    def _make(self, make: Function, layout: Layout, **keywords: Any) -> Function:
        model = self.architecture
        return make(model.config, self.mesh, model.layout(layout), self.compute.forward(model), **keywords)

    def _scoring(self, function: Function, *, arrays: int = 0, reads_lengths: bool = False) -> Function:
        """(params, tokens, lengths, *arrays, *base) -> what `function(params, tokens, *arrays, *base)` returns, jitted.

        To save memory it computes `score_tokens` tokens at a time if that is set, else the rows in `score_parts` parts.
        arrays: number of further arrays with one entry for each row. reads_lengths: the lengths are one of them.
        """
        compute = self.compute

        def score(params, tokens, lengths, *others):
            rows, base = (tokens, *([lengths] if reads_lengths else []), *others[:arrays]), others[arrays:]

            def of_rows(rows: Any) -> Any:
                return function(params, *rows, *base)

            if compute.score_tokens is not None:
                return map_by_length(of_rows, rows, ByLength(lengths, compute.score_tokens))
            return of_rows(rows) if compute.score_parts == 1 else map_parts(of_rows, rows, compute.score_parts)

        return jax.jit(score)
