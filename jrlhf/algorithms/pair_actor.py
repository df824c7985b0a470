"""The policy that learns from preference pairs, and its reference. They generate nothing."""

import jax
import optax
from jaxtyping import Array, Float

from jrlhf.ppo.config.algorithms import DPOConfig
from jrlhf.ppo.supervised import PairBatch, make_dpo_step, with_reference
from jrlhf.roles.model import Model
from jrlhf.roles.placement import call
from jrlhf.roles.role import Role, Site, TrainedRole
from jrlhf.run.clock import timed


class PairActor(TrainedRole):
    """The policy of DPO."""

    def __init__(self, model: Model, site: Site, *, optimizer: optax.GradientTransformation, algorithm: DPOConfig):
        super().__init__(model, site, optimizer)
        self._logprobs = self.compiled("logprobs").score_logprobs(temperature=1.0)
        update = self.compiled("update")
        self._update = make_dpo_step(update.train_logprobs(), optimizer, algorithm, pipeline=update.runs)

    def logprobs(self, pairs: PairBatch) -> Float[Array, "2*B T"]:
        """Log-probs of the pairs' tokens under the present weights, for evaluation."""
        return self._logprobs(self.state.params, pairs.tokens, pairs.lengths, *self._model.frozen)[0]

    @call("train", "metrics")
    def update(self, pairs: PairBatch, ref: Float[Array, "2*B T"]) -> dict[str, Array]:
        """Trains on one batch of pairs, given the reference's log-probs of their tokens."""
        return self._train("update_actor", self._update, add_reference(pairs, ref))


class PairReference(Role):
    """The frozen reference policy of DPO."""

    def __init__(self, model: Model, site: Site):
        super().__init__(model, site)
        self._logprobs = self.compiled("logprobs").score_logprobs(temperature=1.0)

    @call("infer", "ref")
    @timed("ref")
    def logprobs(self, pairs: PairBatch) -> Float[Array, "2*B T"]:
        """Log-probs of the pairs' tokens."""
        return self._infer("logprobs", self._logprobs, pairs.tokens, pairs.lengths)[0]


add_reference = jax.jit(with_reference)
