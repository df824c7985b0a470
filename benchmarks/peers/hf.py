"""Hugging Face transformers' side of the comparisons. Runs in the peer's environment."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, CompileConfig, TrainerCallback

from benchmarks.peers.common import Job, Repetitions, given_tokens, main, save_numbers, timed

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


class Steps(TrainerCallback):
    """For a trainer: measures from the end of a step to that of the next."""

    def __init__(self, job: Job) -> None:
        self.repetitions = Repetitions(job)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.repetitions.next()


if __name__ == "__main__":
    main({"check": check, "generate": generate}, PACKAGES)
