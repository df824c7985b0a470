"""GRPO of a language model on a mesh of devices, on one page.

A small decoder learns sums such as 3+4=7. First it imitates texts in which every second answer is wrong. Then it
learns by GRPO (Shao et al. 2024, arXiv:2402.03300) from a reward alone: is the answer right?

    python examples/grpo.py       # on the devices that JAX finds
    python examples/grpo.py 8     # on eight devices that the CPU simulates

An iteration computes what one of `python -m jrlhf.train` does, up to rounding; that adds data, plans and checkpoints.
Names: B rows, several for each prompt; T tokens, prompt and response together.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jrlhf import ppo
from jrlhf.meshes import AXES, GENERATE, TRAIN, make_mesh, reshard, simulate_devices
from jrlhf.models import ModelConfig, SamplingConfig, init_sharded, make_generate, make_logprobs, param_shardings


def make_iteration(model, mesh, sampling, config, optimizer, reward):
    """Makes iteration(state, reference, prompts, lengths, keys, texts) -> (state, experience, metrics)."""
    generate = jax.jit(make_generate(model, mesh, sampling, samples=config.samples))
    logprobs = jax.jit(make_logprobs(model, mesh, TRAIN))
    update = ppo.make_actor_step(logprobs, optimizer, config)

    @jax.jit
    def judge(actor, reference, rollout, scores):
        old, ref = (logprobs(params, rollout.tokens)[0] for params in (actor, reference))  # [B, T] each
        experience = ppo.make_group_experience(rollout, scores, old, ref, config=config, kl_coef=config.kl_coef)
        return experience, ppo.experience_metrics(experience, config.samples)

    def iteration(state, reference, prompts, lengths, keys, texts):
        # The switch of layouts. In TRAIN, fsdp and tensor divide the weights, and each layer is gathered where it is
        # used. In GENERATE only tensor divides them: one all-gather over fsdp now, and none in the decode steps.
        weights = reshard(state.params, param_shardings(model, mesh, GENERATE))
        rollout = ppo.Rollout.of(generate(weights, prompts, lengths, keys), version=state.step)
        del weights  # the update needs the memory
        scores = reward(rollout, texts)  # [B], on the host
        experience, metrics = judge(state.params, reference, rollout, scores)
        state, updated = update(state, experience)  # frees the arrays of the old state
        return state, experience, metrics | updated

    return iteration


CHARS = "0123456789+=."  # a token is a character; the dot ends a text
PROMPT, LENGTH = len("9+9="), len("9+9=18.")


def sums(rng, rows):
    """Draws prompts such as 3+4=, the same texts completed by the right answer, and by a wrong one."""
    a, b = rng.integers(0, 10, (2, rows))
    wrong = (a + b + rng.integers(1, 19, rows)) % 19
    prompts = [f"{x}+{y}=" for x, y in zip(a, b, strict=True)]
    return prompts, *([f"{p}{n}." for p, n in zip(prompts, answers, strict=True)] for answers in (a + b, wrong))


def encode(texts, length):
    return np.array([[CHARS.index(char) for char in text.ljust(length, ".")] for text in texts], np.int32)


def decode(rollout):
    tokens, lengths = jax.device_get((rollout.tokens, rollout.lengths))
    return ["".join(CHARS[token] for token in row[:length]) for row, length in zip(tokens, lengths, strict=True)]


def right(rollout, texts):
    """The reward [B]: 1 where a row is the right text. The rows of one prompt are neighbours."""
    rows = np.array(decode(rollout))
    return (rows == np.repeat(texts, len(rows) // len(texts))).astype(np.float32)


def main(steps=400, iterations=60, prompts=64, devices=None):
    devices = devices or jax.devices()
    mesh = make_mesh(fsdp=-1, tensor=2 if len(devices) > 1 else 1, devices=devices)
    model = ModelConfig(len(CHARS), embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=192, max_positions=LENGTH)
    sampling = SamplingConfig(max_new_tokens=LENGTH - PROMPT, stop_ids=(CHARS.index("."),), token_limit=len(CHARS))
    rng, by_rows, scores = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec(AXES)), []

    with jax.set_mesh(mesh):
        optimizer = optax.adam(3e-3)
        state = ppo.TrainState.create(init_sharded(model, jax.random.key(0), mesh), optimizer)
        imitate = ppo.make_sft_step(make_logprobs(model, mesh, TRAIN), optimizer)
        for _ in range(steps):
            _, texts, wrong = sums(rng, 128)
            tokens = encode(np.where(rng.random(128) < 0.5, texts, wrong), LENGTH)
            answers = (np.arange(LENGTH) >= PROMPT) & (np.roll(tokens, 1, axis=1) != CHARS.index("."))
            state, metrics = imitate(state, ppo.SFTBatch(*jax.device_put((tokens, answers), by_rows)))
        print(f"imitation on {mesh.size} device(s): {metrics['sft/loss']:.2f} nats a token")

        config, optimizer = ppo.GRPOConfig(samples=8, kl_coef=0.01, minibatches=2), optax.adam(5e-4)
        iteration = make_iteration(model, mesh, sampling, config, optimizer, right)
        reference = jax.tree.map(jnp.copy, state.params)  # a copy, because an update frees the weights that it replaces
        state, lengths = ppo.TrainState.create(state.params, optimizer), np.full(prompts, PROMPT, np.int32)
        for number in range(1, iterations + 1):
            start = time.perf_counter()
            questions, texts, _ = sums(rng, prompts)
            keys = jax.random.split(jax.random.key(number), prompts * config.samples)  # of each row its own
            tokens = encode(questions, PROMPT)
            state, experience, metrics = iteration(state, reference, tokens, lengths, keys, texts)
            scores.append(float(metrics["critic/score/mean"]))
            seconds = time.perf_counter() - start
            if number == 1 or number % 10 == 0:
                shown = " ".join(decode(experience)[:: config.samples][:4])
                print(f"{number:3}  {scores[-1]:.1%} right  KL {metrics['objective/kl']:.2f}  {seconds:.2f} s  {shown}")
    print(f"right answers: {scores[0]:.1%} before GRPO, {scores[-1]:.1%} after {iterations} iterations")
    return scores


if __name__ == "__main__":
    if len(sys.argv) > 1:
        simulate_devices(int(sys.argv[1]))
    main()
