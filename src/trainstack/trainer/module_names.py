"""Attributes and hooks of other libraries' modules, with their counterparts in a `ModuleInterface`."""

from __future__ import annotations

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
