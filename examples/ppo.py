"""PPO with four models on a mesh of devices, on one page.

A small decoder, the actor, learns sums such as 3+4=7, as in InstructGPT (Ouyang et al. 2022, arXiv:2203.02155):

    1. It imitates texts in which every second answer is wrong. A frozen copy is the reference.
    2. A reward model learns from pairs of texts which of two answers is right. Then it is frozen, too.
    3. PPO trains the actor against the reward model, and a critic that starts from it. No answer is checked any more.

    python examples/ppo.py        # on the devices that JAX finds
    python examples/ppo.py 8      # on eight devices that the CPU simulates

`grpo.py` is simpler: it has no critic and no reward model. Names: B rows; T tokens, prompt and response together.
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
from jrlhf.models import (
    ModelConfig,
    SamplingConfig,
    init_sharded,
    make_generate,
    make_logprobs,
    make_scores,
    make_values,
    param_shardings,
    scalar_from,
)


def make_iteration(model, mesh, sampling, config, actor_optimizer, critic_optimizer):
    """Makes iteration(state, reference, reward, prompts, lengths, keys) -> (state, experience, metrics)."""
    generate = jax.jit(make_generate(model, mesh, sampling))
    logprobs = make_logprobs(model, mesh, TRAIN)  # [B, T]: of token t given those before it
    values = make_values(model, mesh, TRAIN)  # [B, T + 1]: before each token, and after the last one
    scores = make_scores(model, mesh, TRAIN)  # [B]: of whole texts
    update = ppo.make_ppo_step(logprobs, values, actor_optimizer, critic_optimizer, config)

    @jax.jit
    def judge(state, reference, reward, rollout):
        score = scores(reward, rollout.tokens, rollout.lengths)
        old, ref = (logprobs(params, rollout.tokens)[0] for params in (state.actor.params, reference))
        value = values(state.critic.params, rollout.tokens)
        # The reward of a token is minus its KL penalty; the last one also gets the score. GAE makes advantages of that.
        experience = ppo.make_experience(rollout, score, old, ref, value, config=config, kl_coef=state.kl.coef)
        return experience, ppo.experience_metrics(experience)

    def iteration(state, reference, reward, prompts, lengths, keys):
        weights = reshard(state.actor.params, param_shardings(model, mesh, GENERATE))  # the switch, see grpo.py
        rollout = ppo.Rollout.of(generate(weights, prompts, lengths, keys), version=state.actor.step)
        del weights  # the update needs the memory
        experience, metrics = judge(state, reference, reward, rollout)
        state, updated = update(state, experience)  # all three; frees the arrays of the old state
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


def imitation(rng, rows):
    """Draws texts and the mask of their answers, of which every second one is wrong."""
    _, right, wrong = sums(rng, rows)
    tokens = encode(np.where(rng.random(rows) < 0.5, right, wrong), LENGTH)
    return tokens, (np.arange(LENGTH) >= PROMPT) & (np.roll(tokens, 1, axis=1) != CHARS.index("."))


def pairs(rng, rows):
    """Draws pairs: the preferred texts, their lengths, the rejected texts, their lengths."""
    _, right, wrong = sums(rng, rows)
    right_lengths, wrong_lengths = (np.array([len(text) for text in texts]) for texts in (right, wrong))
    return encode(right, LENGTH), right_lengths, encode(wrong, LENGTH), wrong_lengths


def main(steps=400, iterations=60, rows=512, devices=None):
    devices = devices or jax.devices()
    mesh = make_mesh(fsdp=-1, tensor=2 if len(devices) > 1 else 1, devices=devices)
    model = ModelConfig(len(CHARS), embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=192, max_positions=LENGTH)
    sampling = SamplingConfig(max_new_tokens=LENGTH - PROMPT, stop_ids=(CHARS.index("."),), token_limit=len(CHARS))
    rng, by_rows, right = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec(AXES)), []

    with jax.set_mesh(mesh):
        optimizer = optax.adam(3e-3)
        actor = ppo.TrainState.create(init_sharded(model, jax.random.key(0), mesh), optimizer)
        imitate = ppo.make_sft_step(make_logprobs(model, mesh, TRAIN), optimizer)
        for _ in range(steps):
            actor, metrics = imitate(actor, ppo.SFTBatch(*jax.device_put(imitation(rng, 128), by_rows)))
        print(f"imitation on {mesh.size} device(s): {metrics['sft/loss']:.2f} nats a token")

        optimizer = optax.adam(1e-3)
        reward = ppo.TrainState.create(scalar_from(actor.params), optimizer)  # the actor's layers with a scalar head
        prefer = ppo.make_preference_step(make_scores(model, mesh, TRAIN), optimizer)
        for _ in range(steps):
            reward, metrics = prefer(reward, ppo.PreferenceBatch(*jax.device_put(pairs(rng, 128), by_rows)))
        print(f"reward model: {metrics['reward_model/accuracy']:.1%} of the last 128 pairs in the right order")

        # Copies, because an update frees the weights that it replaces.
        reference, critic = jax.tree.map(jnp.copy, actor.params), scalar_from(reward.params)
        # With a small KL coefficient the actor soon finds wrong answers that the reward model overrates.
        config, optimizer = ppo.PPOConfig(kl_coef=0.5, minibatches=2), optax.adam(1e-3)
        actor, critic = (ppo.TrainState.create(params, optimizer) for params in (actor.params, critic))
        state = ppo.PPOState.create(actor, critic, kl_coef=config.kl_coef)
        iteration = make_iteration(model, mesh, sampling, config, optimizer, optimizer)
        lengths = np.full(rows, PROMPT, np.int32)
        for number in range(1, iterations + 1):
            start = time.perf_counter()
            prompts, texts, _ = sums(rng, rows)
            keys = jax.random.split(jax.random.key(number), rows)  # of each row its own
            tokens = encode(prompts, PROMPT)
            state, experience, metrics = iteration(state, reference, reward.params, tokens, lengths, keys)
            drawn, metrics = decode(experience), jax.device_get(metrics)
            right.append(np.mean(np.array(drawn) == texts))
            seconds = time.perf_counter() - start
            if number == 1 or number % 10 == 0:
                words = f"score {metrics['critic/score/mean']:.2f}  KL {metrics['objective/kl']:.2f}  {seconds:.2f} s"
                print(f"{number:3}  {right[-1]:.1%} right  {words}  {' '.join(drawn[:4])}")
    print(f"right answers: {right[0]:.1%} before PPO, {right[-1]:.1%} after {iterations} iterations")
    return right


if __name__ == "__main__":
    if len(sys.argv) > 1:
        simulate_devices(int(sys.argv[1]))
    main()
