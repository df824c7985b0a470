"""Batches of slots of a small model, and faults that weights do not show, made below the code that reports."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import ForwardOptions, ModelConfig, SamplingConfig, Schedule, param_shardings
from jrlhf.models.generation.continuous import ContinuousBatch, Prompt
from jrlhf.models.generation.decoding import Decoder
from jrlhf.models.lora import LoRAConfig, init_lora, lora_shardings
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.identity import drawing_identity
from jrlhf.rollouts.recompute import Compared, Recompute
from jrlhf.rollouts.schedule import Rules
from jrlhf.rollouts.slices import SliceWorkers
from jrlhf.rollouts.state import Collected, FleetState
from tests.jrlhf.rollouts.test_identity import FAULTS as WEIGHTS
from tests.models.conftest import random_params
from tests.models.shared import unstacked

CONFIG = ModelConfig(
    vocab_size=50,
    embed=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=16,
    max_positions=24,
    tie_embeddings=False,
    softcap=8.0,
    window=5,
    local_layers=(True, False, True),
)
S, P, R, WORKERS = 2, 4, 12, 2
SAMPLING = SamplingConfig(R, temperature=0.8, top_k=20, top_p=0.9, min_new_tokens=4, stop_ids=(0, 12, 24, 36))
FLOAT, BFLOAT = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


class Setting:
    """Batches of slots that share programs, what compares, and versions of the weights.

    lora: all versions are adapters on one base. peak: times as large is the unembedding. update: size of an update.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        dtype: Any,
        mode: Any,
        lora: LoRAConfig | None = None,
        *,
        config: ModelConfig = CONFIG,
        peak: float = 1.0,
        update: float = 0.03,
    ):
        self.mesh, self.mode, self.dtype = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), mode, dtype
        self._lora, self._config = lora, config
        first = self.batch()
        self.batches = [first, copy.copy(first)]
        options = ForwardOptions(dtype=dtype, temperature=SAMPLING.temperature, lora=lora)
        numbers: dict[str, Any] = {"sampling": SAMPLING, "workers": WORKERS, "length": P + R}
        self.recompute = Recompute(config, self.mesh, options, keeps=mode == "keep_cache", **numbers)
        self.shardings = param_shardings(CONFIG, self.mesh, GENERATE), {}
        base = random_params(config)
        weights: Any = unstacked({**base, "unembedding": peak * base["unembedding"]}), {}
        if lora is not None:
            self.shardings = self.shardings[0], lora_shardings(CONFIG, self.mesh, lora)
            weights = weights[0], init_lora(CONFIG, lora, jax.random.key(0))

        @partial(jax.jit, out_shardings=self.shardings)
        def updated(weights, version):
            def leaf(x):
                return x + update * jnp.sin(7 * x + version + jnp.arange(x.size, dtype=FLOAT).reshape(x.shape))

            base, adapter = weights
            base = jax.tree.map(leaf, base) if lora is None else base
            return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, base), jax.tree.map(leaf, adapter)

        weights = jax.device_put(weights, self.shardings)
        self.version = cache(lambda version: updated(weights, version))

    def batch(self, config=None, sampling=SAMPLING, dtype=None) -> ContinuousBatch:
        with jax.set_mesh(self.mesh):
            decoder = Decoder(config or self._config, self.mesh, sampling, S, dtype or self.dtype, None, self._lora)
            return ContinuousBatch.of_size(decoder, self.mesh, Schedule(chunk=2), 8, P)

    def published(self, version: int) -> Any:
        return self.version(version), drawing_identity(*self.version(version))

    def fleet(self, state: Any = None, wrap: Callable[[list[Any]], list[Any]] = list, *, compares: bool = True) -> Any:
        """A fleet that draws with version 0, or goes on from a state. wrap: the batches -> batches with faults."""
        self.recompute.compares = compares
        self.recompute._all, self.recompute._pools = Compared(), {}
        with jax.set_mesh(self.mesh):
            for batch in self.batches:
                batch.state = batch.fresh()
            workers = SliceWorkers(wrap(self.batches))
            options = {"samples": S, "limit": R, "recompute": self.recompute}
            fleet = Fleet([workers], self.mesh, Rules(3, 1, 5, self.mode), prompt, lambda group: None, **options)
            first = self.published(0 if state is None else int(state.times.published))
            fleet.start(fleet.fresh(*first) if state is None else state, *first)
        return fleet

    def iterate(self, fleet: Any, version: int) -> tuple[Collected, FleetState]:
        """What an iteration does: its batch, and the state that is saved."""
        with jax.set_mesh(self.mesh):
            batch = fleet.collect()
            fleet.publish(*self.published(version))
            return batch, fleet.state()


def prompt(number: int) -> Prompt:
    rng = np.random.default_rng(number)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(number), S)))
    return Prompt(number, rng.integers(0, CONFIG.vocab_size, P).astype(np.int32), int(rng.integers(1, P + 1)), keys)


setting = cache(Setting)


class Faulty:
    """A batch of slots whose work goes wrong from a version on; what is fingerprinted is right."""

    def __init__(self, setting: Setting, batch: Any, onset: int):
        self.setting, self._batch, self._onset, self._weights, self._version = setting, batch, onset, [], -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    @property
    def state(self) -> Any:
        return self._batch.state

    @state.setter
    def state(self, state: Any) -> None:
        self._batch.state = state

    @property
    def wrong(self) -> bool:
        return self._version >= self._onset

    def note(self, weights: Any) -> None:
        if not self._weights or self._weights[-1] is not weights:
            self._version += 1
            self._weights = [*self._weights, weights][-2:]

    def used(self, weights: Any) -> Any:
        return weights

    def filled(self, weights: Any) -> Any:
        return self.used(weights)

    def admit(self, weights: Any, prompts: Any) -> None:
        self.note(weights)
        self._batch.admit(self.filled(weights), prompts)

    def prefill_again(self, weights: Any, prompt_of: Any) -> None:
        self.note(weights)
        self._batch.prefill_again(self.filled(weights), prompt_of)

    def decode(self, weights: Any) -> Any:
        self.note(weights)
        if self.wrong:
            self.before()
        progress = self._batch.decode(self.used(weights))
        return [replace(row, response=self.report(row.response)) for row in progress] if self.wrong else progress

    def before(self) -> None:
        pass

    def report(self, response: Any) -> Any:
        return response


def fault(**methods: Callable) -> Callable[..., Any]:
    return type("Fault", (Faulty,), methods)


def with_weights(change: Callable[[Any, Any], Any]) -> Callable:
    """The programs read other weights than those that are fingerprinted: (version 0, the version) -> what they read."""

    def used(self, weights):
        if not self.wrong:
            return weights
        old, new = jax.tree.map(np.asarray, (self.setting.version(0)[0], weights[0]))
        return jax.device_put(change(old, new), self.setting.shardings[0]), weights[1]

    return fault(used=used)


def other_rows(x):
    """The rows in another order; jax 0.12 rolls no axis that is divided over devices."""
    return jax.device_put(np.roll(np.asarray(x), 2, axis=0), x.sharding)


def with_caches(change: Callable) -> Callable:
    """Before each chunk the caches are changed."""

    def before(self):
        slots = self._batch.state.slots
        slots.caches[:] = [change(number, cache) for number, cache in enumerate(slots.caches)]

    return fault(before=before)


def reporting(change: Callable) -> Callable:
    """Rows that are done are reported otherwise: (tokens, log-probabilities) -> both."""

    def report(self, response):
        return response and (*change(*response[:2]), response[2])

    return fault(report=report)


def with_adapter(change: Callable[[Any, Any], Any]) -> Callable:
    """The same for an adapter."""

    def used(self, weights):
        old = self.setting.version(0)[1]
        return (weights[0], jax.tree.map(change, old, weights[1])) if self.wrong else weights

    return fault(used=used)


def running_with(**options: Any) -> Callable:
    """The programs are those of another setting."""

    return lambda setting, batch, onset: setting.batch(**options)


def late(self, weights):
    """The first chunk of a version is still drawn by the version before."""
    self.chunks = self.__dict__.get("chunks", {})
    version = self._version
    self.chunks[version] = self.chunks.get(version, 0) + 1
    return self._weights[0] if self.wrong and self.chunks[version] == 1 else weights


def old(self, weights):
    """The version before is used."""
    return self._weights[0] if self.wrong else weights


def none(self, weights, prompt_of):
    """Caches are not computed again."""
    self.note(weights)


READ = (
    "one layer is late",
    "only the first layers arrive",
    "only the layers arrive",
    "all but the layers arrives",
    "two layers are swapped",
    "the layers are reversed",
    "a layer comes twice",
    "a square matrix is transposed",
    "two matrices of one shape are exchanged",
    "two heads are exchanged",
    "rows are shifted by one",
    "a matrix is zero",
    "a sign is lost",
    "norm scales are ones",
    "matrices were rounded to float8 on the way",
    "the embedding serves as unembedding",
)
CHANGED = {
    **{name: with_weights(WEIGHTS[name]) for name in READ},
    "the programs keep version 0": with_weights(lambda first, new: first),
    "matrices were rounded to bfloat16": with_weights(
        lambda first, new: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.ndim > 1 else x, new)
    ),
    "new weights are read one chunk late": fault(used=late),
    "prompts are read by older weights": fault(filled=old),
}
CACHES = {
    "caches of other rows": with_caches(lambda n, c: c.map(lambda x, axis: other_rows(x))),
    "caches are empty": with_caches(lambda n, c: c.map(lambda x, axis: jnp.zeros_like(x))),
    "caches are shifted by a position": with_caches(lambda n, c: c.map(lambda x, axis: jnp.roll(x, 1, axis))),
    "caches are rounded to float8": with_caches(
        lambda n, c: c.map(lambda x, axis: x.astype(jnp.float8_e4m3fn).astype(x.dtype))
    ),
    "one layer's cache is empty": with_caches(lambda n, c: c.map(lambda x, axis: x * (n != 1))),
    "heads of caches are exchanged": with_caches(lambda n, c: c.map(lambda x, axis: x[:, ::-1])),
}
REPORTS = {
    "log-probabilities are shifted": reporting(lambda tokens, logprobs: (tokens, np.roll(logprobs, 1))),
    "log-probabilities are reversed": reporting(lambda tokens, logprobs: (tokens, logprobs[::-1])),
    "log-probabilities are 0": reporting(lambda tokens, logprobs: (tokens, 0 * logprobs)),
    "log-probabilities are NaN": reporting(lambda tokens, logprobs: (tokens, logprobs + np.nan)),
    "log-probabilities are in float8": reporting(
        lambda tokens, logprobs: (tokens, np.asarray(jnp.asarray(logprobs, jnp.float8_e4m3fn), np.float32))
    ),
    "other tokens are reported": reporting(lambda tokens, logprobs: ((tokens + 1) % CONFIG.vocab_size, logprobs)),
}
PROGRAMS = {
    "programs compute in bfloat16": running_with(dtype=jnp.dtype(jnp.bfloat16)),
    "the window is ignored": running_with(config=replace(CONFIG, window=None, local_layers=())),
    "all layers are local": running_with(config=replace(CONFIG, local_layers=(True, True, True))),
    "the softcap is ignored": running_with(config=replace(CONFIG, softcap=None)),
    "the rotation has another base": running_with(config=replace(CONFIG, rope_theta=5e3)),
    "norms have another epsilon": running_with(config=replace(CONFIG, norm_eps=1e-2)),
    "the temperature is ignored": running_with(sampling=replace(SAMPLING, temperature=1.0)),
    "scores have another scale": running_with(config=replace(CONFIG, query_scale=0.3)),
}


def one_key(self, weights, prompts):
    """All samples of a prompt are drawn with the key of the first one."""
    self.note(weights)
    self._batch.admit(weights, [replace(own, keys=np.repeat(own.keys[:1], S, axis=0)) for own in prompts])


# The log-probabilities of the tokens are right.
DRAWS = {
    "one key draws all samples": fault(admit=one_key),
    "top-p is lost": running_with(sampling=replace(SAMPLING, top_p=None)),
    "top-k is another": running_with(sampling=replace(SAMPLING, top_k=4)),
    "stop ids are lost": running_with(sampling=replace(SAMPLING, stop_ids=())),
    "stop ids come too early": running_with(sampling=replace(SAMPLING, min_new_tokens=0)),
}

# With "prefill_again": onset 1, since version 0 finds no row that is half drawn.
AGAIN = {
    "old caches are declared as new": fault(prefill_again=none),
    "caches are computed again with the old weights": fault(filled=old),
    "caches are computed again for other rows": fault(
        prefill_again=lambda self, weights, prompt_of: Faulty.prefill_again(
            self, weights, lambda number: replace(prompt_of(number), tokens=prompt_of(number).tokens[::-1])
        )
    ),
}


ADAPTERS = {
    "the adapter is not applied": with_adapter(lambda old, new: 0 * new),
    "the adapter is an older one": with_adapter(lambda old, new: old),
    "the adapter is applied twice": with_adapter(lambda old, new: 2**0.5 * new),
    "the adapter is on another base": fault(
        used=lambda self, weights: (
            jax.tree.map(lambda x: 1.1 * x, weights[0]) if self.wrong else weights[0],
            weights[1],
        )
    ),
}
