"""What TRL's GRPO and PPO in the parity ledger set alike."""

from typing import Any

from benchmarks.parity import common

SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,  # it and checkpointing are on by default
    "gradient_checkpointing": False,
    "per_device_train_batch_size": common.ROWS,
    "gradient_accumulation_steps": 1,
    "temperature": 1.0,
    "learning_rate": common.LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "optim": "adamw_torch",
    "adam_beta1": common.B1,
    "adam_beta2": common.B2,
    "adam_epsilon": common.ADAM_EPS,
    "weight_decay": 0.0,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
