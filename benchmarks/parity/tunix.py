# pyright: reportMissingImports=false
"""Tunix's GRPO and PPO in the parity ledger, each in two ways. Runs in the peer's environment.

"tunix" is the release as it is, but that every step draws with a key of its own: with the default every step of a run
has the same one. The release cuts the end token off a response, which is then never trained. "tunix-ends" puts it back.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.parity import common
from benchmarks.parity.common import EOS, PAD, Job, Trained, Watch, main

NEVER = 10**6  # a token that is never drawn
# A pad token that is never drawn, but has a row of the table, the last one: Tunix leaves a drawn pad token out of its
# losses. In a replay it learns from all tokens, as ours does.
UNUSED = -1


class Words:
    """A tokenizer of the task's characters. No token is put before a prompt."""

    def __init__(self, eos: int, pad: int) -> None:
        self._eos, self._pad = eos, pad

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return common.encode(text)

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return " ".join(map(str, ids))  # of the reward function, which reads ids

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return self._eos

    def pad_id(self) -> int:
        return self._pad


def load(job: Job, mesh: Mesh) -> Qwen3:
    return create_model_from_safe_tensors(str(job.base), model_config(job), mesh)


def critic(job: Job, mesh: Mesh) -> Qwen3:
    """The base with a head that outputs 0, which has a bias as ours has."""
    model = load(job, mesh)
    model.config = dataclasses.replace(model.config, use_tied_embedding=False)
    zeros = nnx.initializers.zeros_init()
    model.lm_head = nnx.Linear(model.config.embed_dim, 1, kernel_init=zeros, bias_init=zeros, rngs=nnx.Rngs(0))
    return model


def model_config(job: Job) -> ModelConfig:
    file = json.loads((job.base / "config.json").read_text())
    assert file["model_type"] == "qwen3" and file["rope_theta"] == 1_000_000  # the one that Tunix computes with
    return ModelConfig(
        num_layers=file["num_hidden_layers"],
        vocab_size=file["vocab_size"],
        embed_dim=file["hidden_size"],
        hidden_dim=file["intermediate_size"],
        num_heads=file["num_attention_heads"],
        head_dim=file["head_dim"],
        num_kv_heads=file["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=file["rms_norm_eps"],
        use_tied_embedding=file["tie_word_embeddings"],
    )


def save(model: Qwen3, job: Job, path: Path) -> None:
    """Writes the model's weights under the names, and in the order, of the file that it was read from."""
    shutil.copytree(job.base, path, dirs_exist_ok=True)
    tensors = load_file(job.base / "model.safetensors")
    table = model.embedder.input_embedding[...]
    tensors["model.embed_tokens.weight"] = np.asarray(table)
    tensors["model.norm.weight"] = np.asarray(model.final_norm.w[...])
    for number, layer in enumerate(model.layers):
        name = f"model.layers.{number}."
        own: dict[str, Any] = {"input_layernorm": layer.input_layernorm.w}
        own |= {"post_attention_layernorm": layer.post_attention_layernorm.w}
        own |= {f"self_attn.{norm}": getattr(layer.attn, norm).w for norm in ("q_norm", "k_norm")}
        own |= {f"self_attn.{part}_proj": getattr(layer.attn, f"{part}_proj").w for part in "qkvo"}
        own |= {f"mlp.{part}_proj": getattr(layer.mlp, f"{part}_proj").kernel for part in ("gate", "up", "down")}
        for part, weight in own.items():
            values, shape = np.asarray(weight[...]), tensors[f"{name}{part}.weight"].shape
            values = values.reshape(shape[::-1]).T if values.ndim > 1 else values
            tensors[f"{name}{part}.weight"] = np.ascontiguousarray(values)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def grpo_config(bound: float | None) -> GRPOConfig:
    """bound: the largest KL of a token; beyond it, its gradient is 0."""
    return GRPOConfig(
        num_generations=common.SAMPLES,
        num_iterations=1,
        beta=common.KL_COEF,
        kl_loss_mode="low_var_kl",
        kl_clamp_value=bound,
        epsilon=common.CLIP,
        loss_agg_mode="sequence-mean-token-mean",
    )


def ppo_config() -> PPOConfig:
    return PPOConfig(
        num_iterations=1,
        gamma=1.0,
        gae_lambda=common.GAE_LAMBDA,
        beta=common.PPO_KL_COEF,
        kl_method="kl",
        epsilon=common.CLIP,
        clip_range_value=common.VALUE_CLIP,
    )


def train(job: Job, seed: int) -> Trained:
    mesh, watch, ends = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")), Watch(), "ends" in job.side
    eos = NEVER if ends else EOS
    rollout = RolloutConfig(
        max_tokens_to_generate=common.RESPONSE,
        max_prompt_length=common.PROMPT,
        kv_cache_size=16,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[eos],
    )
    ppo = job.algorithm == "ppo"
    adam = partial(optax.adam, common.LEARNING_RATE, b1=common.B1, b2=common.B2, eps=common.ADAM_EPS)
    training = RLTrainingConfig(
        actor_optimizer=adam() if ppo else optax.chain(optax.clip_by_global_norm(common.GRPO_GRAD_NORM), adam()),
        critic_optimizer=adam() if ppo else None,
        eval_every_n_steps=10**6,
        max_steps=common.STEPS,
    )
    cluster = RLCluster(
        actor=load(job, mesh),
        reference=load(job, mesh),
        critic=critic(job, mesh) if ppo else None,
        tokenizer=Words(eos, UNUSED if job.replay else PAD),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(Role, mesh),
            rollout_engine="vanilla",
            training_config=training,
            rollout_config=rollout,
        ),
    )
    with tempfile.TemporaryDirectory() as directory:
        save(cluster.actor_trainer.model, job, Path(directory))
        saved, base = (load_file(Path(path) / "model.safetensors") for path in (directory, job.base))
    assert all(np.array_equal(saved[name], base[name]) for name in base)  # that `save` reverses loading
    generate, keys = cluster.generate, iter(jax.random.split(jax.random.key(seed), common.STEPS))
    given = iter(Path(job.replay).read_text().splitlines()) if job.replay else None
    responses: list[list[int]] = []

    def draw(*args: Any, **kwargs: Any) -> Any:
        cluster.cluster_config.rollout_config.seed = next(keys)
        output = generate(*args, **kwargs)
        drawn = [row.tolist() for row in output.tokens] if given is None else json.loads(next(given))
        responses[:] = map(common.own_tokens, drawn)
        tokens = [np.asarray(row, np.int32) for row in responses]
        return dataclasses.replace(output, tokens=tokens) if ends else output

    def correct(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        # Without an end a row that is shorter than the limit had one, which is counted.
        rows = [row if ends or len(row) == common.RESPONSE else [*row, EOS] for row in responses]
        return watch.score([str(prompt) for prompt in prompts], rows)

    cluster.generate = draw
    if ppo:
        learner = PPOLearner(cluster, ppo_config(), reward_fns=correct)
    else:
        config = grpo_config(10.0 if job.replay else None)  # ours has the bound of verl; Tunix by default none
        learner = GRPOLearner(cluster, algo_config=config, reward_fns=correct)
    with mesh:
        learner.train([{"prompts": np.array(step)} for step in job.prompts(seed)])
    save(nnx.merge(*nnx.split(cluster.actor_trainer.model)), job, job.model(seed))
    return watch.result(seed)


if __name__ == "__main__":
    main(train, ("google-tunix", "jax", "flax", "optax"))
