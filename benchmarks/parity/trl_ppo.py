# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""TRL's PPO in the parity ledger, whose last release has no PPO. Runs in the peer's environment."""

import contextlib
import gc
import io
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.parity import common
from benchmarks.parity.common import CHARACTERS, PAD, PROMPT, Job, Trained, Watch, main
from benchmarks.parity.trl_settings import SETTINGS


class RightAnswers(torch.nn.Module):
    """A reward model in the trainer's form, which knows the answers: its hidden states are the tokens."""

    base_model_prefix = "tokens"

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.tokens = _Tokens()
        self._watch = watch

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden[..., 0].long().tolist()
        questions = ["".join(CHARACTERS[token - 2] for token in row[:PROMPT]) for row in rows]
        scores = self._watch.score(questions, [row[PROMPT:] for row in rows])
        return torch.tensor(scores)[:, None, None].expand(-1, hidden.shape[1], 1)


class _Tokens(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        assert PAD == 0  # what the trainer writes where a row is padded
        return SimpleNamespace(hidden_states=[input_ids[..., None].float()])


def settings(directory: str, seed: int) -> PPOConfig:
    return PPOConfig(
        output_dir=directory,
        seed=seed,
        **SETTINGS,
        local_rollout_forward_batch_size=common.ROWS,
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=common.RESPONSE,
        stop_token="eos",
        kl_coef=common.PPO_KL_COEF,
        kl_estimator="k1",
        whiten_rewards=False,
        gamma=1.0,
        lam=common.GAE_LAMBDA,
        cliprange=common.CLIP,
        cliprange_value=common.VALUE_CLIP,
        vf_coef=1.0,
        total_episodes=common.ROWS * common.STEPS,
        num_sample_generations=0,
        eval_strategy="no",
    )


def critic(directory: Path | str) -> torch.nn.Module:
    """The model of a directory with a head that outputs 0, which has a bias as ours has."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, num_labels=1)
    model.score = torch.nn.Linear(model.config.hidden_size, 1)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    return model


def keep_order(trainer: PPOTrainer, rows: int) -> None:
    """Lets a trainer take its data in their order, `rows` a step, and spares it what it does for nothing."""
    trainer.dataloader = DataLoader(  # its own loader shuffles
        trainer.train_dataset, batch_size=rows, collate_fn=trainer.data_collator, drop_last=True
    )
    gc.freeze()  # the trainer collects twice a step; what the imports made is then left alone


def train(job: Job, seed: int) -> Trained:
    torch.manual_seed(seed)
    watch = Watch()
    policy = AutoModelForCausalLM.from_pretrained(job.base, dtype=torch.float32)
    rows = [{"input_ids": common.encode(question)} for step in job.prompts(seed) for question in step]
    with tempfile.TemporaryDirectory() as directory:
        trainer = PPOTrainer(
            args=settings(directory, seed),
            processing_class=AutoTokenizer.from_pretrained(job.base, padding_side="left"),
            model=policy,
            ref_model=AutoModelForCausalLM.from_pretrained(job.base, dtype=torch.float32),
            reward_model=RightAnswers(watch),
            value_model=critic(job.base),
            train_dataset=Dataset.from_list(rows),
        )
        keep_order(trainer, common.ROWS)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every step
            trainer.train()
        policy.save_pretrained(job.model(seed))
    return watch.result(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(train, ("torch", "transformers", "trl", "accelerate"))
