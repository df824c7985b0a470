"""A model in stages on several meshes: every step's gradients equal those of the model on one mesh."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.meshes import AXES, GENERATE, TRAIN, TRAIN_TP, make_mesh, to_devices, to_host
from jrlhf.models import (
    ForwardOptions,
    LoRAConfig,
    init_lora,
    lora_shardings,
    make_logprobs,
    make_scores,
    make_token_sums,
    make_values,
    param_shardings,
)
from jrlhf.models.pipeline import Stages, _last, _stage
from jrlhf.ppo import (
    DPOConfig,
    Experience,
    GRPOConfig,
    GSPOConfig,
    PairBatch,
    PPOConfig,
    PreferenceBatch,
    SFTBatch,
    TrainState,
    make_actor_step,
    make_critic_step,
    make_dpo_step,
    make_preference_step,
    make_sft_step,
)
from jrlhf.ppo.updates import run_on_host
from tests.models.shared import FAMILIES, same_gradient, unstacked

ROWS, LENGTH, PARTS = 32, 7, 4
# Keeps the gradients that it is given, and changes no weight.
RECORDER = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)


def arrays(config) -> dict[str, Any]:
    """Rows of responses that begin at token 3, with all that a loss may read."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, config.vocab_size, (2, ROWS, LENGTH)).astype(np.int32)
    lengths = generator.integers(4, LENGTH + 1, (2, ROWS)).astype(np.int32)
    place = np.arange(LENGTH)[None, :]
    numbers = generator.normal(size=(5, ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens, "lengths": lengths, "mask": (place >= 3) & (place < lengths[0][:, None]), "x": numbers}


def batch_of(kind, config) -> Any:
    """The batch of a step; where the two rows of a pair begin with the same prompt does not matter here."""
    given = arrays(config)
    tokens, lengths, mask, x = (given[name] for name in ("tokens", "lengths", "mask", "x"))
    pairs = tokens[0], lengths[0], tokens[1], lengths[1]
    starts: Any = np.full(ROWS, 3, np.int32)
    match kind:
        case "sft":
            return SFTBatch(tokens[0], mask)
        case "reward":
            return PreferenceBatch(*pairs)
        case "dpo":
            return PairBatch(*pairs, starts, x[0, :, 0], x[1, :, 0])
    old = x[0] * 0.1 - 5  # near the log-probs of random weights: ratios on both sides of the clips
    masked: Any = {
        name: np.where(mask, x[i], 0) for i, name in enumerate(("values", "rewards", "advantages", "returns"), 1)
    }
    single: Any = {"finished": np.ones(ROWS, bool), "version": np.int32(0)}
    if kind == "grpo":  # its KL is in the loss
        single["kl_coef"] = np.float32(0.1)
    return Experience(
        tokens=tokens[0],
        prompt_lengths=starts,
        response_lengths=lengths[0] - 3,
        logprobs=old,
        scores=x[0, :, 0],
        response_mask=mask,
        old_logprobs=old,
        ref_logprobs=old + 0.1 * x[1],
        **single,
        **masked,
    )


def step_of(kind, config, mesh, layout, options, pipeline=None):
    """The step, by functions of this model; with a pipeline the model is its last stage."""
    parts: Any = {"minibatches": 1, "micro_batches": PARTS}
    logprobs = make_logprobs(config, mesh, layout, options)
    match kind:
        case "sft":
            # In stages the loss is fused, and by the whole model it is not.
            sums = None if pipeline is None else make_token_sums(config, mesh, layout, options, entropy_gradient=False)
            return make_sft_step(logprobs, RECORDER, sums_fn=sums, micro_batches=PARTS, pipeline=pipeline)
        case "dpo":
            return make_dpo_step(logprobs, RECORDER, DPOConfig(micro_batches=PARTS), pipeline=pipeline)
        case "reward":
            scores = make_scores(config, mesh, layout, options)
            return make_preference_step(scores, RECORDER, micro_batches=PARTS, pipeline=pipeline)
        case "critic":
            values = make_values(config, mesh, layout, options)
            value_fn = lambda params, tokens, *base: values(params, tokens, *base)[:, :-1]  # noqa: E731
            return make_critic_step(value_fn, RECORDER, PPOConfig(**parts), pipeline=pipeline)
        case "ppo":
            sums = make_token_sums(config, mesh, layout, options)
            return make_actor_step(logprobs, RECORDER, PPOConfig(**parts), sums_fn=sums, pipeline=pipeline)
    algorithm = {"grpo": GRPOConfig, "gspo": GSPOConfig}[kind](**parts)
    return make_actor_step(logprobs, RECORDER, algorithm, pipeline=pipeline)


def placed(tree, mesh):
    """Host arrays on a mesh, rows divided over all of its devices."""
    return jax.tree.map(lambda x: to_devices(x, jax.NamedSharding(mesh, jax.P(AXES) if np.ndim(x) else jax.P())), tree)


def weights_of(reference, kind, config, mesh, layout, lora):
    """(what is trained, the frozen base if there is one)."""
    head = "scalar" if kind in ("critic", "reward") else "lm"
    if lora is None:
        host = reference.random_params(config, head)
        return to_devices(host, param_shardings(config, mesh, layout, head)), ()
    base = to_devices(unstacked(reference.random_params(config)), param_shardings(config, mesh, GENERATE))
    adapter = init_lora(config, lora, jax.random.key(3), head)
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)  # else b = 0, and a has no gradient
    return to_devices(adapter, lora_shardings(config, mesh, lora, head)), (base,)


def gradients(reference, kind, config, home, layout, options, groups=(), schedule: Any = "1f1b"):
    """Metrics and gradients of one step, by the model on `home`, or in stages on `groups`."""
    params, frozen = weights_of(reference, kind, config, home, layout, options.lora)
    if groups:
        stages = Stages(config, groups, layout, options, schedule)
        rows_mesh, last = stages.meshes[-1], stages.part(stages.last)
        step = step_of(kind, last, rows_mesh, layout, options, partial(run_on_host, gradients_of=stages.gradients))
    else:
        rows_mesh, step = home, step_of(kind, config, home, layout, options)
    with jax.set_mesh(home):
        state = jax.jit(lambda params: TrainState.create(params, RECORDER))(params)
    with jax.set_mesh(rows_mesh):
        after, metrics = step(state, placed(batch_of(kind, config), rows_mesh), *frozen)
    return to_host((metrics, after.opt_state))


def same_gradients(actual, expected) -> None:
    """Compares leaf by leaf. Some leaves are zero up to rounding: a key's bias adds the same to all scores of a query,
    and the head's bias does to both scores of a pair."""
    nothing = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def same(path, actual, expected) -> None:
        if np.abs(expected).max() < nothing:
            assert np.abs(actual).max() < nothing, path
        else:
            same_gradient(path, actual, expected)

    jax.tree.map_with_path(same, actual, expected)


LORA = LoRAConfig(2, 4.0)
# kind, family, schedule, layout, remat, LoRA, sizes of the whole mesh and of each group
CASES: dict[str, Any] = {
    "ppo": ("ppo", "gemma", "1f1b", TRAIN, "full", None, (1, 2, 2), (1, 1, 2)),
    "grpo": ("grpo", "llama", "gpipe", TRAIN_TP, "products", None, (1, 4, 2), (1, 2, 2)),
    "critic": ("critic", "gpt2", "zb-h1", TRAIN, "gather", None, (2, 2, 2), (2, 1, 2)),
    "dpo": ("dpo", "gemma", "interleaved", TRAIN, "attention", None, (1, 2, 1), (1, 1, 1)),
    "sft": ("sft", "gpt2", "1f1b", TRAIN_TP, "offload", None, (1, 4, 1), (1, 2, 1)),
    "reward": ("reward", "llama", "zb-h1", TRAIN, "full", None, (1, 4, 2), (1, 2, 2)),
    "lora": ("gspo", "gemma", "1f1b", GENERATE, "full", LORA, (1, 4, 2), (1, 2, 2)),
    "lora critic": ("critic", "llama", "zb-h1", GENERATE, "products", LORA, (1, 2, 2), (1, 1, 2)),
    "lora dpo": ("dpo", "gemma", "interleaved", GENERATE, "attention", LORA, (1, 2, 1), (1, 1, 1)),
    "lora sft": ("sft", "llama", "gpipe", GENERATE, "full", LORA, (2, 2, 1), (2, 1, 1)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [x if x == "critic" else pytest.param(x, marks=pytest.mark.proof("families")) for x in CASES]
)
def test_gradients_of_stages_are_those_of_the_whole_model(reference, case):
    """Three layers are cut into stages of 1 and 2, and five into four stages."""
    kind, family, schedule, layout, remat, lora, whole, part = CASES[case]
    config, devices = FAMILIES[family], jax.devices()
    if schedule == "interleaved":
        config = replace(config, layers=5, local_layers=(True, False, True, True, False))
    count = int(np.prod(part))
    groups = tuple(make_mesh(*part, devices=devices[start : start + count]) for start in (0, count))
    home, options = make_mesh(*whole, devices=devices[: 2 * count]), ForwardOptions(remat=remat, lora=lora)
    expected = gradients(reference, kind, config, home, layout, options)
    actual = gradients(reference, kind, config, home, layout, options, groups, schedule)
    assert actual[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        np.testing.assert_allclose(actual[0][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    same_gradients(actual[1], expected[1])


def test_stages_share_the_memory_of_a_base(reference):
    """Each stage has its layers of the base where they are, and the first one the embeddings."""
    config, devices = FAMILIES["llama"], jax.devices()[:4]
    home, groups = (
        make_mesh(1, 2, 2, devices=devices),
        tuple(make_mesh(1, 1, 2, devices=devices[n : n + 2]) for n in (0, 2)),
    )
    base = jax.device_put(unstacked(reference.random_params(config)), param_shardings(config, home, GENERATE))
    stages = Stages(config, groups, GENERATE, ForwardOptions(lora=LORA))
    parts = [stages.cut(base, stage, head=True) for stage in (0, 1)]
    assert [part.keys() - {"layers"} for part in parts] == [{"embedding"}, {"final_norm", "unembedding"}]
    assert [len(part["layers"]) for part in parts] == [1, 2]

    def places(tree):
        return {
            shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
        }

    assert all(places(part) < places(base) for part in parts)
    with jax.set_mesh(groups[0]):
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(parts[0])} == {groups[0]}


def test_many_trainings_of_one_process_keep_a_limited_number_of_functions():
    assert all(functions.cache_info().maxsize for functions in (_stage, _last))


def test_a_stage_without_a_layer_is_refused():
    meshes = tuple(make_mesh(devices=[device]) for device in jax.devices()[:4])
    with pytest.raises(ValueError, match="3 layers do not fill 4 stages"):
        Stages(FAMILIES["llama"], meshes, TRAIN)
