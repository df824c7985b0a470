"""Our side of the comparisons, and the weights that both sides load."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.peers.common import (
    KL_COEF,
    LEARNING_RATE,
    SAMPLES,
    Job,
    Shape,
    given_tokens,
    main,
    product_seconds,
    save_numbers,
    timed,
)
from jrlhf.algorithms.on_policy import on_policy
from jrlhf.config.stages import OptimizerConfig
from jrlhf.data.batches import Batch, key_for, put_rows, row_keys
from jrlhf.meshes import make_mesh
from jrlhf.models import ModelConfig, SamplingConfig, Schedule, export_hf, init_sharded, load_hf
from jrlhf.models.options import ForwardOptions
from jrlhf.models.weights import HeadKind
from jrlhf.ppo import (
    GRPOConfig,
    PPOConfig,
    Rollout,
    SFTBatch,
    TrainState,
    experience_metrics,
    make_sft_step,
)
from jrlhf.roles.actor import Actor
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.critic import Critic, FusedUpdate, Reward
from jrlhf.roles.frozen import Reference
from jrlhf.roles.generating import engine_of
from jrlhf.roles.model import Architecture, Compute, Model, generation_weights
from jrlhf.roles.optimizers import adamw
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock
from jrlhf.run.devices import keep_freed_memory

HEADS: dict[str, HeadKind] = {"actor": "lm", "critic": "scalar", "reward": "scalar"}
COMPUTE = Compute(ForwardOptions(dtype=jnp.dtype(jnp.float32), remat="products"))


def model_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        vocab_size=shape.vocab,
        embed=shape.embed,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        mlp=shape.mlp,
        max_positions=shape.max_positions,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
        qk_norm=True,
    )


def mesh_of(job: Job) -> Mesh:
    """Each device has the whole model and its share of the rows."""
    return make_mesh(job.devices, 1, 1, devices=jax.devices()[: job.devices])


def one_chunk(response: int) -> Schedule:
    """All rows are as long as the limit: there is nothing to look for before."""
    return Schedule(chunk=response)


def load(job: Job, role: str, mesh: Mesh) -> Model:
    description, params = load_hf(job.model(role), mesh, head=HEADS[role])
    return Model(Architecture(description.model), params)


def put_prompts(job: Job, rows: np.ndarray, step: int, mesh: Mesh) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prompts, their lengths and a key for each."""
    tokens, lengths = put_rows((rows, np.full(job.batch, job.prompt, np.int32)), mesh)
    return tokens, lengths, row_keys(key_for(0, "rollout", step), job.batch, mesh)


def make_optimizer(job: Job) -> optax.GradientTransformation:
    """The optimizer of a run: gradients are clipped by their norm."""
    return adamw(OptimizerConfig(learning_rate=LEARNING_RATE, warmup=0, final=1.0), updates=job.steps)


def export(job: Job) -> None:
    """Writes random weights of every role."""
    config, mesh = model_config(job.shape), mesh_of(job)
    for seed, (role, head) in enumerate(HEADS.items()):
        params = init_sharded(config, jax.random.key(seed), mesh, head, zero_head=False)
        export_hf(params, config, job.model(role), pad_id=0)


def heads(job: Job) -> None:
    """Writes a critic and a reward model: the actor with random scalar heads."""
    mesh = mesh_of(job)
    for seed, role in enumerate(("critic", "reward")):
        description, params = load_hf(job.model("actor"), mesh, head="scalar")
        kernel = params["value_head"]["kernel"]
        head = params["value_head"] | {"kernel": 0.02 * jax.random.normal(jax.random.key(seed), kernel.shape)}
        export_hf(params | {"value_head": head}, description.model, job.model(role), pad_id=0)


def check(job: Job) -> None:
    """The numbers by which the sides are known to compute the same."""
    mesh, tokens = mesh_of(job), given_tokens(job)
    with jax.set_mesh(mesh):
        actor, critic = load(job, "actor", mesh), load(job, "critic", mesh)
        placed, ends = put_rows((tokens, np.full(job.batch, tokens.shape[1], np.int32)), mesh)
        logprobs, _ = CompiledModel(actor.architecture, mesh, COMPUTE).score_logprobs(temperature=1.0)(
            actor.params, placed, ends
        )
        values, _ = CompiledModel(critic.architecture, mesh, COMPUTE).score_values()(critic.params, placed, ends)
        draw = generator(actor, mesh, SamplingConfig(job.response, temperature=0))
        greedy = draw(*put_prompts(job, tokens[:, : job.prompt], 0, mesh))[:, job.prompt :]
    save_numbers(job, "ours", logprobs=logprobs[:, 1:], values=values[:, 1:], greedy=greedy)


def generator(model: Model, mesh: Mesh, sampling: SamplingConfig):
    """(prompts, lengths, keys) -> tokens [B, P+R] on the host; the weights are moved to where it wants them once."""
    weights = generation_weights(model, mesh, COMPUTE)
    schedule = one_chunk(sampling.max_new_tokens)
    run = engine_of(model.architecture, mesh, COMPUTE, sampling, schedule)
    return lambda *arguments: np.asarray(run(weights, *arguments).tokens)


def generate(job: Job) -> dict[str, Any]:
    """Seconds of a generation."""
    mesh = mesh_of(job)
    with jax.set_mesh(mesh):
        draw, count = generator(load(job, "actor", mesh), mesh, SamplingConfig(job.response)), iter(range(job.steps))

        def step(rows: np.ndarray) -> None:
            assert draw(*put_prompts(job, rows, next(count), mesh)).shape[1] == job.prompt + job.response

        return timed(job, step)


def train(job: Job) -> dict[str, Any]:
    """Seconds of a step of AdamW on whole rows [B, P+R], its metrics fetched."""
    mesh = mesh_of(job)
    with jax.set_mesh(mesh):
        model, optimizer = load(job, "actor", mesh), make_optimizer(job)
        compiled = CompiledModel(model.architecture, mesh, COMPUTE)
        step_fn = make_sft_step(
            compiled.train_logprobs(), optimizer, sums_fn=compiled.train_sums(entropy_gradient=False)
        )
        state = jax.jit(partial(TrainState.create, optimizer=optimizer))(model.params)
        del model

        def step(rows: np.ndarray) -> None:
            nonlocal state
            tokens = np.concatenate([rows, given_tokens(job)[:, job.prompt :]], axis=1)
            learned = np.broadcast_to(np.arange(tokens.shape[1]) > 0, tokens.shape)
            state, metrics = step_fn(state, SFTBatch(*put_rows((tokens, learned), mesh)))
            assert np.isfinite(metrics["sft/loss"])

        return timed(job, step)


def product(job: Job) -> dict[str, Any]:
    """Seconds of a product of the size of the mlp's."""
    multiply = jax.jit(jnp.matmul)
    return {"product": product_seconds(job, jax.device_put, lambda x, y: multiply(x, y).block_until_ready())}


def ppo(job: Job) -> dict[str, Any]:
    """Seconds of an iteration of PPO with four models, its metrics fetched."""
    mesh = mesh_of(job)
    with jax.set_mesh(mesh):
        config, optimizer, clock = PPOConfig(kl_coef=KL_COEF), make_optimizer(job), Clock()
        models, site = {role: load(job, role, mesh) for role in HEADS}, Site(RolePlacement.of(mesh), COMPUTE, clock)
        sampling = SamplingConfig(job.response)
        actor = Actor(
            models["actor"],
            site,
            sampling=sampling,
            schedule=one_chunk(job.response),
            optimizer=optimizer,
            algorithm=config,
        )
        critic = Critic(models["critic"], site, optimizer=optimizer, algorithm=config)
        scored = {"temperature": sampling.temperature, "responses": job.response}
        reference = Reference(load(job, "actor", mesh), site, sampling=sampling)
        reward = Reward(models["reward"], site)
        states = {"actor": actor.create(models["actor"].params), "critic": critic.create(models["critic"].params)}
        rewards: Any = SimpleNamespace(score=lambda rollout, batch: reward.score(rollout))
        learner = FusedUpdate(actor, critic, site, algorithm=config, **scored)
        measure, count = jax.jit(experience_metrics), iter(range(job.steps))

        def step(rows: np.ndarray) -> None:
            number = next(count)
            batch = Batch(put_prompts(job, rows, number, mesh), [], [], number)
            update, policy = learner.bind(states), actor.bind(states["actor"])
            experience, metrics = on_policy(policy, update, reference, rewards, batch, KL_COEF)
            states.update(update.states)
            metrics = jax.device_get(metrics | measure(experience))
            assert metrics["response_length/mean"] == job.response
            assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 0

        before = jax.device_get([state.params for state in states.values()])
        measured = timed(job, step)
        assert_trained(before, [state.params for state in states.values()])
        return measured


def grpo(job: Job) -> dict[str, Any]:
    """Seconds of an iteration of GRPO with actor and reference, its metrics fetched: half as many prompts as rows."""
    mesh = mesh_of(job)
    with jax.set_mesh(mesh):
        config, optimizer, clock = GRPOConfig(samples=SAMPLES, kl_coef=KL_COEF), make_optimizer(job), Clock()
        model, sampling = load(job, "actor", mesh), SamplingConfig(job.response)
        site = Site(RolePlacement.of(mesh), COMPUTE, clock)
        actor = Actor(
            model,
            site,
            sampling=sampling,
            schedule=one_chunk(job.response),
            optimizer=optimizer,
            algorithm=config,
        )
        scored = {"temperature": sampling.temperature, "responses": job.response}
        reference = Reference(load(job, "actor", mesh), site, sampling=sampling)
        states = {"actor": actor.create(model.params)}
        learner = FusedUpdate(actor, None, site, algorithm=config, **scored)
        scores: Any = SimpleNamespace(score=lambda rollout, _: first_token_scores(rollout))
        measure, count = jax.jit(partial(experience_metrics, samples=SAMPLES)), iter(range(job.steps))
        phases: list[dict[str, float]] = []

        def step(rows: np.ndarray) -> None:
            clock.start()
            number, prompts = next(count), job.batch // SAMPLES
            arrays = put_rows((rows[:prompts], np.full(prompts, job.prompt, np.int32)), mesh)
            keys = row_keys(key_for(0, "rollout", number), job.batch, mesh)
            batch = Batch((*arrays, keys), [], [], number)
            update, policy = learner.bind(states), actor.bind(states["actor"])
            experience, metrics = on_policy(policy, update, reference, scores, batch, KL_COEF)
            states.update(update.states)
            metrics = jax.device_get(metrics | measure(experience))
            assert metrics["response_length/mean"] == job.response and metrics["actor/skipped_updates"] == 0
            phases.append(clock.take())

        before = jax.device_get(states["actor"].params)
        measured = timed(job, step)
        assert_trained(before, states["actor"].params)
        medians = {name: float(np.median([phase[name] for phase in phases[job.warmup :]])) for name in phases[-1]}
        return {**measured, "phases": medians}


def assert_trained(before: Any, after: Any) -> None:
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, before, after)))


@jax.jit
def first_token_scores(rollout: Rollout) -> jax.Array:
    """A reward that costs nothing and differs within groups."""
    first = jnp.take_along_axis(rollout.tokens, rollout.prompt_lengths[:, None], axis=1)[:, 0]
    return (first % 7).astype(jnp.float32)


if __name__ == "__main__":
    keep_freed_memory()  # as `jrlhf.train` does on CPUs
    cases = {"export": export, "heads": heads, "check": check, "generate": generate, "ppo": ppo, "grpo": grpo}
    main(cases | {"train": train, "product": product}, ("jax", "flax", "optax"))
