"""Hugging Face transformers' side of the comparisons. Runs in the peer's environment."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, CompileConfig, TrainerCallback

from benchmarks.peers.common import (
    LEARNING_RATE,
    Job,
    Repetitions,
    given_tokens,
    main,
    product_seconds,
    save_numbers,
    timed,
)

PACKAGES = ("torch", "transformers")


def load(job: Job, role: str) -> Any:
    if role == "actor":
        return AutoModelForCausalLM.from_pretrained(job.model(role), dtype=torch.float32).eval()
    model = AutoModelForSequenceClassification.from_pretrained(job.model(role), dtype=torch.float32, num_labels=1)
    return model.eval()


@torch.inference_mode()
def check(job: Job) -> None:
    """The numbers by which the sides are known to compute the same."""
    actor, critic = load(job, "actor"), load(job, "critic")
    tokens = torch.from_numpy(given_tokens(job)).long()
    logprobs = torch.log_softmax(actor(tokens).logits[:, :-1], dim=-1)
    logprobs = torch.gather(logprobs, -1, tokens[:, 1:, None])[..., 0]
    values = critic.score(critic.model(tokens).last_hidden_state)[:, :-1, 0]
    prompts = tokens[:, : job.prompt]
    greedy = actor.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=job.response
    )
    save_numbers(job, "peer", logprobs=logprobs.numpy(), values=values.numpy(), greedy=greedy[:, job.prompt :].numpy())


def generator(job: Job) -> Callable[[np.ndarray], torch.Tensor]:
    """The variant "dynamic", "static" (of the cache) or one of them " compiled": prompts [B, P] -> tokens [B, P+R]."""
    model = load(job, "actor")
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": job.response}
    cache, _, compiled = job.variant.partition(" ")
    if cache == "static":
        options["cache_implementation"] = "static"
    if compiled and cache == "static":
        # Without this private flag `generate` compiles on accelerators only.
        options["compile_config"] = everywhere = CompileConfig(mode="default")
        everywhere._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue]
    elif compiled:
        model.forward = torch.compile(model.forward, dynamic=True)

    def generate(rows: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(rows).long()
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return generate


def generate(job: Job) -> dict[str, Any]:
    """Seconds of a generation."""
    torch.manual_seed(0)
    draw = generator(job)

    def step(rows: np.ndarray) -> None:
        assert draw(rows).shape[1] == job.prompt + job.response

    return timed(job, step)


def train(job: Job) -> dict[str, Any]:
    """Seconds of a step of AdamW on whole rows [B, P+R], with gradients clipped by their norm."""
    model = load(job, "actor").train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)

    def step(rows: np.ndarray) -> None:
        ids = torch.from_numpy(given_tokens(job)).long()
        ids[:, : job.prompt] = torch.from_numpy(rows)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert np.isfinite(loss.item())

    return timed(job, step)


def product(job: Job) -> dict[str, Any]:
    """Seconds of a product of the size of the mlp's."""
    return {"product": product_seconds(job, torch.from_numpy, torch.matmul)}


class Steps(TrainerCallback):
    """For a trainer: measures from the end of a step to that of the next."""

    def __init__(self, job: Job) -> None:
        self.repetitions = Repetitions(job)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.repetitions.next()


if __name__ == "__main__":
    main({"check": check, "generate": generate, "train": train, "product": product}, PACKAGES)
