# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""TRL's side of the comparison of GRPO, which its newest release has. Runs in the peer's environment."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.common import KL_COEF, LEARNING_RATE, SAMPLES, Job, main, prompts
from benchmarks.peers.hf import PACKAGES, Steps, check, load


def tokenizer(job: Job) -> PreTrainedTokenizerFast:
    """One word an id."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{index}": index for index in range(3, job.shape.vocab)}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=split, padding_side="left", **special)


def grpo(job: Job) -> dict[str, Any]:
    """Seconds of a step of GRPO with actor and reference: half as many prompts as rows."""
    policy, steps, words = load(job, "actor"), Steps(job), tokenizer(job)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    with tempfile.TemporaryDirectory() as directory:
        policy.save_pretrained(directory + "/model")  # the reference is read from the policy's path
        words.save_pretrained(directory + "/model")
        policy = type(policy).from_pretrained(directory + "/model", dtype=torch.float32)
        options = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,  # both are on by default, on a CPU too
            gradient_checkpointing=False,
            per_device_train_batch_size=job.batch,
            gradient_accumulation_steps=1,
            num_generations=SAMPLES,
            num_iterations=1,
            max_completion_length=job.response,
            temperature=1.0,
            generation_kwargs={"min_new_tokens": job.response},
            beta=KL_COEF,
            learning_rate=LEARNING_RATE,
            max_steps=job.steps + 1,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = prompts(job)[:, : job.batch // SAMPLES].reshape(-1, job.prompt)
        texts = [
            {"prompt": " ".join(f"w{index}" for index in row)} for row in [*rows.tolist(), *rows[: job.batch].tolist()]
        ]
        lengths: list[int] = []

        def first_token(completion_ids, **_) -> list[float]:
            lengths.extend(map(len, completion_ids))
            return [float(ids[0] % 7) for ids in completion_ids]

        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=first_token,
            args=options,
            train_dataset=Dataset.from_list(texts),
            processing_class=words,
            callbacks=[steps],
        )
        assert trainer.ref_model is not None
        trainer.train()
    assert set(lengths) == {job.response}
    assert not all(torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True))
    return steps.repetitions.result()


if __name__ == "__main__":
    main({"check": check, "grpo": grpo}, (*PACKAGES, "trl", "accelerate"))
