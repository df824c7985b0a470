"""What TRL's GRPO and PPO on the real model set alike."""

from typing import Any

from benchmarks.real.common import Job


def shared(job: Job) -> dict[str, Any]:
    return {
        "output_dir": job.folder,
        "seed": job.seed,
        "use_cpu": True,
        "bf16": False,  # it and checkpointing are on by default
        "gradient_checkpointing": False,
        "per_device_train_batch_size": job.settings["rows"],
        "gradient_accumulation_steps": 1,
        "temperature": 1.0,
        "learning_rate": job.settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "adamw_torch",
        "adam_beta1": job.settings["b1"],
        "adam_beta2": job.settings["b2"],
        "adam_epsilon": job.settings["eps"],
        "weight_decay": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
