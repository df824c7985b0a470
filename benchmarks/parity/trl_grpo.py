# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""TRL's GRPO in the parity ledger. Runs in the peer's environment."""

import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.parity import common
from benchmarks.parity.common import Job, Trained, Watch, main
from benchmarks.parity.trl_settings import SETTINGS


def settings(directory: str, seed: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        seed=seed,
        **SETTINGS,
        num_generations=common.SAMPLES,
        num_iterations=1,
        max_completion_length=common.RESPONSE,
        top_k=0,
        top_p=1.0,
        shuffle_dataset=False,
        beta=common.KL_COEF,
        epsilon=common.CLIP,
        epsilon_high=common.CLIP,
        loss_type="grpo",
        importance_sampling_level="token",
        scale_rewards="group",
        mask_truncated_completions=False,
        max_grad_norm=common.GRPO_GRAD_NORM,
        max_steps=common.STEPS,
        logging_steps=10**6,
    )


def train(job: Job, seed: int) -> Trained:
    torch.manual_seed(seed)
    watch, asked = Watch(), [question for step in job.prompts(seed) for question in step]
    order = iter(job.prompts(seed))

    def correct(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        assert prompts == [question for question in next(order) for _ in range(common.SAMPLES)]
        return watch.score(prompts, completion_ids)

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.base, dtype=torch.float32),
            reward_funcs=correct,
            args=settings(directory, seed),
            train_dataset=Dataset.from_list([{"prompt": question} for question in asked]),
            processing_class=AutoTokenizer.from_pretrained(job.base, padding_side="left"),
        )
        assert trainer.ref_model is not None
        trainer.train()
        trainer.model.save_pretrained(job.model(seed))
    return watch.result(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(train, ("torch", "transformers", "trl", "accelerate"))
