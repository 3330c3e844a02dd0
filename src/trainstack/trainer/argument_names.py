"""Names of other libraries for arguments, and for attributes and hooks of modules, with their counterparts."""

from __future__ import annotations

_OPTIMIZER = "it where the module makes its optimizer, in get_optimizers_schedulers"
_SCHEDULER = "it where the module makes its scheduler, in get_optimizers_schedulers"
_WARMUP = f"{_SCHEDULER}, or SupervisedModule(scheduler_kwargs={{'warmup': 0.1}}), a number of steps or a fraction"
_LOADER = "it where the module makes its DataLoader, in get_train_dataloader or get_val_dataloaders"
_CALLBACKS = "Trainer(module, args, callbacks=[...]), or get_callbacks(self) in the module"
_STOPPING = (
    "Trainer(module, args, callbacks=[callbacks.EarlyStopping(patience=3)]), or get_callbacks(self) in the module"
)
_KEEP_LAST = "checkpointer_args=DefaultCheckpointerArguments(keep_last=2)"
_KEEP_BEST = 'checkpointer_args=DefaultCheckpointerArguments(monitor="val/loss", keep_best=1)'
_SAVE = "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=10)"
_NO_SAVE = "checkpointer_args=DefaultCheckpointerArguments(checkpoint=False)"
_MICRO_BATCH = "gpu_batch_size_limit, the samples of a micro-batch"
_WRITERS = 'writers, such as writers=["stdout", "csv", "tensorboard"]'
_PRECISION = 'backend="auto-bf16" or "auto-amp", with and without torchrun'
_LAUNCHER = "nothing: the launcher says it in the environment variable LOCAL_RANK"
_DEVICES = "device, and start one process each with torchrun"
_UNUSED = "backend_options={'ddp': {'find_unused_parameters': True}}"
_LOSS = "it where the module computes its loss, in train_step"
_PART = "it as a part of the module that goes to the Trainer"
_DATA = "it as the data set of the loaders that the module returns"
_HUB = "trainer.export(path), and upload the folder"
_PROFILER = "Trainer(module, args, callbacks=[callbacks.Profiler(...)])"
_TEMPLATE = "nothing: the trainer does not need it"

ALIASES: dict[str, str] = {
    # data and batches
    "batch_size": "train_batch_size, the samples of a global step, and val_batch_size",
    "eval_batch_size": "val_batch_size",
    "per_device_eval_batch_size": "val_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "val_batch_size",
    "validation_batch_size": "val_batch_size",
    "accumulate_grad_batches": _MICRO_BATCH,
    "accumulation_steps": _MICRO_BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "auto_find_batch_size": "fit_micro_batch=True",
    "auto_scale_batch_size": "fit_micro_batch=True",
    **dict.fromkeys(
        (
            "num_workers",
            "shuffle",
            "pin_memory",
            "drop_last",
            "collate_fn",
            "sampler",
            "data_collator",
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "iterator_train",
            "iterator_valid",
            "class_weight",
            "sample_weight",
        ),
        _LOADER,
    ),
    **dict.fromkeys(
        (
            "dataset",
            "train_dataset",
            "val_dataset",
            "eval_dataset",
            "datamodule",
            "train_dataloader",
            "train_dataloaders",
            "val_dataloader",
            "val_dataloaders",
            "data",
            "x",
            "y",
            "validation_data",
            "validation_split",
            "train_split",
        ),
        _DATA,
    ),
    "group_by_length": "sampler=LengthGroupedSampler(...) where the module makes its DataLoader",
    "remove_unused_columns": "SupervisedModule(remove_unused_columns=True)",
    "label_names": "SupervisedModule(target_keys=[...])",
    "data_seed": "seed",
    "random_state": "seed",
    "random_seed": "seed",
    "full_determinism": "deterministic=True, seed_everything=True",
    # length and rhythm
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "nb_epoch", "total_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_iters", "total_steps", "num_train_steps", "max_train_steps"), "max_steps"),
    **dict.fromkeys(
        ("limit_train_batches", "steps_per_epoch", "epoch_length", "max_batches"), "max_train_steps_per_epoch"
    ),
    **dict.fromkeys(("limit_val_batches", "validation_steps", "max_eval_batches"), "max_val_steps_per_epoch"),
    "num_sanity_val_steps": "sanity_val_steps",
    "val_check_interval": "validate_every, where a float is a fraction of the whole run, not of an epoch",
    **dict.fromkeys(
        ("eval_steps", "eval_every", "eval_interval", "evaluate_every", "eval_frequency"),
        "validate_every=100 for every 100 global steps",
    ),
    **dict.fromkeys(
        ("check_val_every_n_epoch", "validation_freq"), "validate_every=-2 for a validation after every second epoch"
    ),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "do_eval"),
        "validate_every: None for each epoch, 100 for every 100 global steps, 0 for never",
    ),
    "eval_on_start": "validate_at_start=True",
    "resume_from_checkpoint": "resume",
    "ckpt_path": "resume",
    "warm_start": "resume",
    "initial_epoch": 'resume="auto", which continues at the epoch of the checkpoint',
    # optimizer and scheduler
    **dict.fromkeys(
        (
            "learning_rate",
            "lr",
            "weight_decay",
            "momentum",
            "betas",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "optim",
            "optim_args",
            "optimizer",
            "optimizers",
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_scheduler_kwargs", "scheduler"), _SCHEDULER),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "warmup_epochs", "num_warmup_steps"), _WARMUP),
    "gradient_clip_val": "max_grad_norm, or clip_grads=False",
    "grad_clip": "max_grad_norm, or clip_grads=False",
    "clip_grad_norm": "max_grad_norm, or clip_grads=False",
    "gradient_clip_algorithm": "max_grad_norm for clipping by norm, clip_grad_value for clipping by value",
    **dict.fromkeys(
        ("loss", "loss_fn", "criterion", "label_smoothing", "label_smoothing_factor", "loss_weights", "compute_loss"),
        _LOSS,
    ),
    "compute_metrics": "SupervisedModule(compute_metrics=...), or Trainer(metrics=...)",
    "metrics": "Trainer(module, args, metrics={...})",
    "task": "the metrics by name, in the module or in Trainer(metrics=...); docs/recipes/ has modules for tasks",
    "model": _PART,
    "module": _PART,
    # checkpoints and files
    **dict.fromkeys(
        ("default_root_dir", "logdir", "log_dir", "logging_dir", "save_dir", "dirpath", "out_dir", "root_dir"),
        "output_dir",
    ),
    "overwrite_output_dir": "overwrite",
    **dict.fromkeys(("keep_last", "save_total_limit", "max_to_keep", "keep_checkpoint_max"), _KEEP_LAST),
    **dict.fromkeys(("keep_best", "save_top_k", "load_best_model_at_end", "save_best", "save_best_only"), _KEEP_BEST),
    **dict.fromkeys(
        ("save_every", "save_steps", "save_interval", "save_strategy", "every_n_steps", "every_n_train_steps"), _SAVE
    ),
    **dict.fromkeys(("checkpoint", "enable_checkpointing", "save_checkpoints"), _NO_SAVE),
    **dict.fromkeys(("metric_for_best_model", "monitor_metric"), "monitor"),
    **dict.fromkeys(("greater_is_better", "mode"), 'monitor_mode="max" or "min"'),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token"), _HUB),
    # callbacks, logs and screen
    **dict.fromkeys(("callbacks", "callback"), _CALLBACKS),
    **dict.fromkeys(("patience", "early_stopping", "early_stopping_patience", "early_stop"), _STOPPING),
    **dict.fromkeys(("profiler", "profile"), _PROFILER),
    **dict.fromkeys(("logging_steps", "log_every_n_steps", "log_steps", "log_interval", "print_every"), "log_every"),
    **dict.fromkeys(("logger", "loggers", "report_to", "log_with"), _WRITERS),
    **dict.fromkeys(
        ("verbose", "enable_progress_bar", "progress_bar", "show_progress"), 'progress="none", "plain" or "rich"'
    ),
    "enable_model_summary": _TEMPLATE,
    # machine and numerics
    **dict.fromkeys(("accelerator", "gpus", "use_cuda", "cuda", "no_cuda", "use_cpu"), 'device="cpu" or "cuda"'),
    **dict.fromkeys(("devices", "num_gpus", "n_gpu", "world_size", "num_processes", "num_nodes", "nnodes"), _DEVICES),
    "strategy": 'backend="ddp"',
    "distributed": 'backend="ddp"',
    "fsdp": 'backend="fsdp"',
    "deepspeed": 'backend="fsdp"',
    "fsdp_config": "backend_options={'fsdp': {...}}",
    **dict.fromkeys(("precision", "mixed_precision", "amp_mode", "use_amp", "amp"), _PRECISION),
    "fp16": 'backend="auto-amp", with and without torchrun',
    "bf16": 'backend="auto-bf16", with and without torchrun',
    "tf32": 'float32_matmul_precision="high"',
    **dict.fromkeys(("torch_compile", "jit_compile"), "compile=True"),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), "activation_checkpointing=True"),
    **dict.fromkeys(("detect_anomaly", "terminate_on_nan"), 'nonfinite="raise"'),
    "sync_batchnorm": "Trainer(module, args, callbacks=[callbacks.SyncBatchNorm()])",
    **dict.fromkeys(("ddp_find_unused_parameters", "find_unused_parameters"), _UNUSED),
    "ddp_backend": "distributed_training_args=DistributedTrainingArguments(...)",
    "local_rank": _LAUNCHER,
    # files of PyMarlin have a section for each object
    "tr": "its values at the top of the file, without the section 'tr'",
    "ckpt": "its values below checkpointer_args",
    "wrt": "its values below writer_args",
    "stat": "its values below stats_args",
}
"""Names of Lightning, transformers, Keras, skorch, Ignite and PyMarlin: the end of a sentence that begins "Write"."""

_HYPERPARAMETERS = "Set self.hyperparameters in __init__"

NOT_ON_MODULE = {
    "device": "Steps get it as an argument: train_step(self, global_step, batch, device)",
    "trainer": "Hooks of a Callback get it as an argument; a module has self.plan, self.log and self.micro_batch",
    "global_step": "Steps and hooks get it as an argument: train_step(self, global_step, batch, device)",
    "current_epoch": "on_begin_train_epoch(self, global_step, epoch) gets it; keep it under another name",
    "global_rank": "Write trainstack.print_once or trainstack.rank_zero_only, or use trainer.world.rank in a Callback",
    "hparams": _HYPERPARAMETERS,
    "load_from_checkpoint": "Make the module, and call trainstack.warm_start(module, path, strict=True)",
    "log_dict": "Call self.log(name, value) for each item",
    "lr_schedulers": "Keep the schedulers in attributes in get_optimizers_schedulers",
    "manual_backward": "The trainer calls backward() on the returned loss; train_step may also yield several losses",
    "optimizers": "Keep the optimizers in attributes in get_optimizers_schedulers",
    "print": "Write trainstack.print_once(...), or trainer.print(...) in a Callback",
    "save_hyperparameters": _HYPERPARAMETERS,
}
"""Attributes that modules of Lightning have; each value is a sentence without its full stop."""

_EPOCH_BEGIN = "on_begin_train_epoch(self, global_step, epoch)"
_EPOCH_END = "on_end_train_epoch(self, global_step)"
_VAL_END = "on_end_val_epoch(self, global_step, *outputs, key)"

OTHER_HOOKS = {
    "configure_callbacks": "get_callbacks(self)",
    "on_fit_start": "on_ready",
    "on_fit_end": "on_end_train(self, global_step)",
    "on_train_start": "on_train_begin",
    "on_train_batch_start": "on_train_batch_begin",
    "on_train_epoch_start": _EPOCH_BEGIN,
    "on_validation_start": "on_validation_begin",
    "on_validation_epoch_start": "on_validation_begin",
    "on_validation_epoch_end": _VAL_END,
    "on_validation_batch_start": "on_validation_batch_begin",
    "on_epoch_start": _EPOCH_BEGIN,
    "training_epoch_end": _EPOCH_END,
    "validation_epoch_end": _VAL_END,
}
"""Hooks of Lightning that a module of this library does not have."""
