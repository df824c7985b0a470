# pyright: reportMissingImports=false
"""Tunix's side of the comparisons. Runs in the peer's environment."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.peers.common import (
    KL_COEF,
    LEARNING_RATE,
    SAMPLES,
    Job,
    Repetitions,
    given_tokens,
    main,
    prompts,
    save_numbers,
    timed,
)

PAD, NEVER = 0, 10**6  # a token that is never drawn: no response ends early


class Ids:
    """A tokenizer whose words are ids. No token is put before a prompt, which would pad 16 to 32."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return NEVER

    def pad_id(self) -> int:
        return PAD


def text(rows: np.ndarray) -> list[str]:
    return [" ".join(map(str, row)) for row in rows.tolist()]


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def load(job: Job, role: str, mesh: Mesh) -> Qwen3:
    """A model, with a scalar head in its unembedding's place where the role has one."""
    shape = job.shape
    config = ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        embed_dim=shape.embed,
        hidden_dim=shape.mlp,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
        use_tied_embedding=True,
    )
    model = create_model_from_safe_tensors(str(job.model(role)), config, mesh)
    if role != "actor":  # as `create_critic_model`, which fails where embeddings are tied
        head = nnx.Linear(shape.embed, 1, use_bias=False, rngs=nnx.Rngs(0))
        head.kernel[...] = load_file(job.model(role) / "model.safetensors")["score.weight"].T
        model.lm_head, model.config = head, dataclasses.replace(config, use_tied_embedding=False)
    return model


def generator(job: Job, mesh: Mesh, **options: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Prompts [B, P] -> responses [B, R]."""
    shape = job.shape
    cache = CacheConfig(job.prompt + job.response, shape.layers, shape.kv_heads, shape.head_dim)
    sampler = Sampler(load(job, "actor", mesh), Ids(), cache)

    def generate(rows: np.ndarray) -> np.ndarray:
        with mesh:
            drawn = sampler(
                text(rows),
                max_generation_steps=job.response,
                max_prompt_length=job.prompt,
                eos_tokens=[NEVER],
                **options,
            )
        return np.stack(drawn.tokens)

    return generate


def check(job: Job) -> None:
    """The numbers by which the sides are known to compute the same."""
    mesh, tokens = one_device(), given_tokens(job)
    first, rest, ids = tokens[:, :1], tokens[:, 1:], {"pad_id": PAD, "eos_id": NEVER}
    with mesh:
        logprobs = common.compute_per_token_logps(*nnx.split(load(job, "actor", mesh)), first, rest, **ids)
        values = common.compute_score(load(job, "critic", mesh), first, rest, **ids)[:, :-1]
    greedy = generator(job, mesh)(tokens[:, : job.prompt])
    save_numbers(job, "peer", logprobs=logprobs, values=values, greedy=greedy)


def generate(job: Job) -> dict[str, Any]:
    """Seconds of a generation."""
    draw = generator(job, one_device(), temperature=1.0, top_p=1.0)

    def step(rows: np.ndarray) -> None:
        assert draw(rows).shape == (job.batch, job.response)

    return timed(job, step)


def ppo(job: Job) -> dict[str, Any]:
    """Seconds of a step of PPO, from one generation's beginning to the next one's.

    The variant "reward model" has four models; "reward function" only three, and scores that cost nothing.
    """
    mesh, learnt = one_device(), job.variant == "reward model"
    roles = {"critic": load(job, "critic", mesh), "reward": load(job, "reward", mesh) if learnt else None}
    cluster, repetitions = make_cluster(job, mesh, **roles)
    constant = None if learnt else (lambda prompts, completions, **_: [0.5] * len(completions))
    learner = PPOLearner(cluster, PPOConfig(beta=KL_COEF, num_iterations=1), reward_fns=constant)
    batches = [{"prompts": np.array(text(rows))} for rows in prompts(job)]
    with mesh:
        learner.train([*batches, batches[0]])
    assert_trained(cluster, load(job, "actor", mesh))
    return repetitions.result()


def grpo(job: Job) -> dict[str, Any]:
    """Seconds of a step of GRPO likewise, with actor and reference: the same rows in half the prompts."""
    mesh = one_device()
    cluster, repetitions = make_cluster(job, mesh)

    def first_token(prompts, completions, **_) -> list[float]:
        return [float(int(completion.split()[0]) % 7) for completion in completions]

    config = GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=KL_COEF)
    learner = GRPOLearner(cluster, algo_config=config, reward_fns=first_token)
    batches = [{"prompts": np.array(text(rows[: job.batch // SAMPLES]))} for rows in prompts(job)]
    with mesh:
        learner.train([*batches, batches[0]])
    assert_trained(cluster, load(job, "actor", mesh))
    return repetitions.result()


def make_cluster(job: Job, mesh: Mesh, **roles: Any) -> tuple[RLCluster, Repetitions]:
    """Actor and reference, with these roles beside them; and what is measured from generation to generation."""
    rollout = RolloutConfig(
        max_tokens_to_generate=job.response,
        max_prompt_length=job.prompt,
        kv_cache_size=job.prompt + job.response,
        temperature=1.0,
        eos_tokens=[NEVER],
    )
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(LEARNING_RATE),
        critic_optimizer=optax.adamw(LEARNING_RATE),
        eval_every_n_steps=10**6,
        max_steps=job.steps + 1,
    )
    cluster = RLCluster(
        actor=load(job, "actor", mesh),
        reference=load(job, "actor", mesh),
        tokenizer=Ids(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(Role, mesh),
            rollout_engine="vanilla",
            training_config=training,
            rollout_config=rollout,
        ),
        **roles,
    )
    repetitions, generate = Repetitions(job), cluster.generate

    def measured(*args: Any, **kwargs: Any) -> Any:
        jax.block_until_ready(jax.live_arrays())  # should an update be under way, it is part of what ends here
        repetitions.next()
        drawn = generate(*args, **kwargs)
        assert np.stack(drawn.tokens).shape == (job.batch, job.response)
        return drawn

    cluster.generate = measured
    return cluster, repetitions


def assert_trained(cluster: RLCluster, before: Qwen3) -> None:
    pairs = zip(*(jax.tree.leaves(nnx.state(model)) for model in (before, cluster.actor_trainer.model)), strict=True)
    assert not all(np.array_equal(*pair) for pair in pairs)


if __name__ == "__main__":
    main({"check": check, "generate": generate, "ppo": ppo, "grpo": grpo}, ("google-tunix", "jax", "flax", "optax"))
