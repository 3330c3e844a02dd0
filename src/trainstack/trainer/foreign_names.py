"""What other libraries call the arguments of a training, and what to write for them."""

from __future__ import annotations

FOREIGN_NAMES = {
    "accelerator": 'device="cpu" or "cuda"',
    "accumulate_grad_batches": "gpu_batch_size_limit, the samples of a micro-batch",
    "batch_size": "train_batch_size, the samples of a global step, and val_batch_size",
    "bf16": 'backend="sp-bf16"',
    "devices": "device, and start one process each with torchrun",
    "eval_batch_size": "val_batch_size",
    "fp16": 'backend="sp-amp"',
    "gradient_accumulation_steps": "gpu_batch_size_limit, the samples of a micro-batch",
    "gradient_clip_val": "max_grad_norm, or clip_grads=False",
    "learning_rate": "it where the module makes its optimizer, in get_optimizers_schedulers",
    "logging_steps": "log_every",
    "lr": "it where the module makes its optimizer, in get_optimizers_schedulers",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_eval_batch_size": "val_batch_size",
    "precision": 'backend="sp-bf16" or "sp-amp"',
    "resume_from_checkpoint": "resume",
    "strategy": 'backend="ddp"',
    "val_check_interval": "validate_every",
}
