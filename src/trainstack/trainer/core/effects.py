"""`Effect`: the effect of a difference between two starts on the numbers of a run, for each argument."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Effect(Enum):
    """Effect of a difference on exactness; the value is its text in tables."""

    SAME_BITS = "same bits"
    DEPENDS = "same bits, unless a schedule, a hook or a callback depends on it"
    NOT_USED = "none: the saved value is used"
    OTHER_BITS = "same samples, other bits"
    OTHER_RUN = "another run"

    @property
    def breaks_exactness(self) -> bool:
        """Whether the run gets other bits than without the difference, or other bits than its arguments describe."""
        return self in (Effect.NOT_USED, Effect.OTHER_BITS, Effect.OTHER_RUN)


SAME, DEPENDS, BITS, RUN = Effect.SAME_BITS, Effect.DEPENDS, Effect.OTHER_BITS, Effect.OTHER_RUN

ARGUMENTS: Mapping[str, Effect | None] = {
    "epochs": DEPENDS,
    "max_steps": DEPENDS,
    "max_time": SAME,
    "train_batch_size": None,
    "per_device_train_batch_size": None,
    "gpu_batch_size_limit": None,
    "fit_micro_batch": None,
    "val_batch_size": DEPENDS,
    "max_train_steps_per_epoch": RUN,
    "max_val_steps_per_epoch": DEPENDS,
    "validate_every": DEPENDS,
    "validate_at_start": SAME,
    "sanity_val_steps": SAME,
    "overfit_batches": RUN,
    "fast_dev_run": None,
    "monitor": DEPENDS,
    "monitor_mode": DEPENDS,
    "clip_grads": RUN,
    "max_grad_norm": RUN,
    "clip_grad_value": RUN,
    "combine_loaders": RUN,
    "data_sharding": RUN,
    "nonfinite": RUN,
    "backend": RUN,
    "backend_options": RUN,
    "device": None,
    "use_gpu": None,
    "seed": RUN,
    "seed_everything": SAME,
    "deterministic": BITS,
    "float32_matmul_precision": BITS,
    "compile": BITS,
    "activation_checkpointing": BITS,
    "channels_last": BITS,
    "fast_paths": SAME,
    "resume": None,
    "resume_mode": None,
    "strict_resume": None,
    "init_weights_from": None,
    "init_weights_strict": None,
    "reset_optimizers_schedulers": None,
    "record": SAME,
    "verify_replay": SAME,
    "on_replay_mismatch": SAME,
    "checkpointer_args": None,
    "output_dir": None,
    "local_dir": None,
    "overwrite": None,
    "private_files": SAME,
    "log_every": DEPENDS,
    "writers": SAME,
    "report": SAME,
    "progress": SAME,
    "default_callbacks": DEPENDS,
    "disable_tqdm": SAME,
    "collect_train_outputs": SAME,
    "handle_signals": SAME,
    "stop_grace_s": SAME,
    "rank_zero_timeout_s": SAME,
    "lease_timeout_s": SAME,
    "on_interrupt": SAME,
    "save_on_exception": SAME,
    "log_level": SAME,
    "stats_args": DEPENDS,
    "writer_args": None,
    "distributed_training_args": None,
    "differential_privacy_args": RUN,
    "amp_backend_native": None,
    "amp_backend_apex": None,
    "amp_level_apex": BITS,
}
"""The effect of each field of `TrainerArguments`. None: the field itself is not compared.

The plan, the device and the backend are compared in place of the fields that determine them. Other fields only control
how a start begins and where it writes.
"""

_OTHERS: Mapping[str, Effect] = {
    "arguments.backend_options.ddp": BITS,
    "arguments.backend_options.fsdp": BITS,
    "environment": BITS,
    "data": RUN,
    "data.micro-batch": BITS,
    "code": RUN,
    "optimizers": RUN,
    "schedulers": RUN,
    "weights": RUN,
}
"""The effect of all other items; the longest prefix of the dotted name counts."""


def is_compared(name: str) -> bool:
    """Whether the item `name` of a description of a start is compared directly."""
    section, _, rest = name.partition(".")
    return section != "arguments" or ARGUMENTS.get(rest.partition(".")[0], Effect.OTHER_RUN) is not None


def effect_of(name: str, one: str | None = None, other: str | None = None) -> Effect:
    """Return the effect of the item `name`, such as "arguments.seed", whose texts in two starts are `one` and `other`.

    An unknown name, such as an argument of another version of the library, has the effect `OTHER_RUN`.
    """
    if name == "arguments.backend" and one is not None and other is not None:
        same_features = one.strip("'").partition("-")[2] == other.strip("'").partition("-")[2]
        return BITS if same_features else RUN
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        found = _OTHERS.get(".".join(parts[:count]))
        if found is not None:
            return found
    section, *rest = parts
    return (ARGUMENTS.get(rest[0]) if section == "arguments" and rest else None) or RUN
