# pyright: reportMissingImports=false
"""TRL's side of the comparisons. Runs in the peer's environment."""

import contextlib
import gc
import io
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peers.common import KL_COEF, LEARNING_RATE, Job, main, prompts
from benchmarks.peers.hf import PACKAGES, Steps, check, load


def tokenizer(job: Job) -> PreTrainedTokenizerFast:
    """One word an id: the trainer asks for a tokenizer, though it is given ids."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{index}": index for index in range(3, job.shape.vocab)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def ppo(job: Job) -> dict[str, Any]:
    """Seconds of a step of PPO with four models.

    The variant "gc.freeze()" takes what the imports made out of the garbage collector's sight: the trainer collects
    twice a step, which otherwise is much of its time.
    """
    policy, steps = load(job, "actor"), Steps(job)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    with tempfile.TemporaryDirectory() as directory:
        options = PPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,  # both are on by default, on a CPU too
            gradient_checkpointing=False,
            per_device_train_batch_size=job.batch,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=1,
            response_length=job.response,
            temperature=1.0,
            kl_coef=KL_COEF,
            learning_rate=LEARNING_RATE,
            total_episodes=job.batch * (job.steps + 1),
            num_sample_generations=0,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = prompts(job).reshape(-1, job.prompt).tolist()
        trainer = PPOTrainer(
            args=options,
            processing_class=tokenizer(job),
            model=policy,
            ref_model=load(job, "actor"),
            reward_model=load(job, "reward"),
            value_model=load(job, "critic"),
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
            callbacks=[steps],
        )
        if job.variant == "gc.freeze()":
            gc.freeze()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every step
            trainer.train()
    assert not all(torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True))
    return steps.repetitions.result()


if __name__ == "__main__":
    main({"check": check, "ppo": ppo}, (*PACKAGES, "trl", "accelerate"))
