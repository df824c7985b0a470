# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""TRL's GRPO on the real model. Runs in the peer's environment."""

import os

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.real.common import Job, Trained, Watch, check_ids, conversation, main
from benchmarks.real.trl_settings import shared


def settings(job: Job) -> GRPOConfig:
    numbers = job.settings
    return GRPOConfig(
        **shared(job),
        num_generations=numbers["samples"],
        num_iterations=1,
        max_completion_length=numbers["response"],
        top_k=0,
        top_p=1.0,
        shuffle_dataset=False,
        beta=numbers["kl_coef"],
        epsilon=numbers["clip"],
        epsilon_high=numbers["clip"],
        loss_type="grpo",
        importance_sampling_level="token",
        scale_rewards="group",
        mask_truncated_completions=False,
        max_grad_norm=numbers["max_grad_norm"],
        max_steps=numbers["iterations"],
        logging_steps=10**6,
    )


def train(job: Job) -> Trained:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(job.seed)
    watch, system = Watch(job), job.settings["system"]
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    check_ids(tokenizer, job)

    def correct(prompts: list, completions: list, **_: object) -> list[float]:
        rows = watch.rows()
        assert [messages[-1]["content"] for messages in prompts] == [row["prompt"] for row in rows]
        return watch.score(completions, rows)

    asked = [{"prompt": conversation(row["prompt"], system)} for step in job.steps for row in step]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=correct,
        args=settings(job),
        train_dataset=Dataset.from_list(asked),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.save_pretrained(job.trained)
    tokenizer.save_pretrained(job.trained)
    return watch.result()


if __name__ == "__main__":
    main(train, ("torch", "transformers", "trl", "accelerate"))
