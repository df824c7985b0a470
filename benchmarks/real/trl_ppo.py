# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""TRL's PPO on the real model, whose last release has no PPO. Runs in the peer's environment."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.parity.trl_ppo import critic, keep_order
from benchmarks.real.common import Job, Trained, Watch, check_ids, main
from benchmarks.real.trl_settings import shared

PAD = "<|endoftext|>"  # the model's own pad is its end, which the trainer would take out of every response


class RightAnswers(torch.nn.Module):
    """A reward model in the trainer's form, which knows the answers: its hidden states are the tokens."""

    base_model_prefix = "tokens"

    def __init__(self, watch: Watch, tokenizer: Any) -> None:
        super().__init__()
        self.tokens = _Tokens()
        self._watch, self._tokenizer = watch, tokenizer

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._watch.rows()
        start = max(len(row["ids"]) for row in rows)  # the trainer pads shorter prompts on the left
        responses = [ids[start:] for ids in hidden[..., 0].long().tolist()]
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = self._watch.score(texts, rows)
        return torch.tensor(scores)[:, None, None].expand(-1, hidden.shape[1], 1)


class _Tokens(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        assert int(input_ids.max()) < 2**24  # float32 has these numbers
        return SimpleNamespace(hidden_states=[input_ids[..., None].float()])


def settings(job: Job) -> PPOConfig:
    numbers = job.settings
    return PPOConfig(
        **shared(job),
        local_rollout_forward_batch_size=numbers["rows"],
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=numbers["response"],
        stop_token="eos",
        kl_coef=numbers["kl_coef"],
        kl_estimator="k1",
        whiten_rewards=False,
        gamma=1.0,
        lam=numbers["gae_lambda"],
        cliprange=numbers["clip"],
        cliprange_value=numbers["value_clip"],
        vf_coef=1.0,
        total_episodes=numbers["rows"] * numbers["iterations"],
        num_sample_generations=0,
        eval_strategy="no",
    )


def train(job: Job) -> Trained:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(job.seed)
    watch = Watch(job)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    check_ids(tokenizer, job)
    tokenizer.pad_token = PAD
    policy = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    trainer = PPOTrainer(
        args=settings(job),
        processing_class=tokenizer,
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_model=RightAnswers(watch, tokenizer),
        value_model=critic(job.model),
        train_dataset=Dataset.from_list([{"input_ids": row["ids"]} for step in job.steps for row in step]),
    )
    keep_order(trainer, job.settings["rows"])
    trainer.train()
    policy.save_pretrained(job.trained)
    AutoTokenizer.from_pretrained(job.model).save_pretrained(job.trained)
    return watch.result()


if __name__ == "__main__":
    main(train, ("torch", "transformers", "trl", "accelerate"))
