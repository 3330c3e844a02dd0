"""Checks of `TrainerArguments`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

import torch

from trainstack._files import expand_path, is_address, remote_address
from trainstack.backends import DifferentialPrivacyArguments, DistributedTrainingArguments, parse_spec
from trainstack.backends.spec import LayerRecord, expand_auto, registered_backend
from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.checkpointing.arguments import DEFAULT_MONITOR, Monitor
from trainstack.checkpointing.lease_file import LONGEST_TIMEOUT_S
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.intervals import check_validate_every, is_number_of_steps, seconds_of
from trainstack.trainer.tracking.progress import DISPLAYS, ProgressDisplay
from trainstack.trainer.tracking.writers import check_writers


@dataclass(frozen=True, kw_only=True)
class StatsArguments:
    """PyMarlin's class for `log_steps`: the same as `TrainerArguments.log_every`, which it overrides."""

    log_steps: int = 50


@dataclass(frozen=True, kw_only=True)
class WriterArguments:
    """PyMarlin's class for `tb_log_dir`: the folder of the writers, instead of `TrainerArguments.output_dir`."""

    tb_log_dir: str | None = None

    def __post_init__(self) -> None:
        if self.tb_log_dir:
            object.__setattr__(self, "tb_log_dir", expand_path("writer_args.tb_log_dir", self.tb_log_dir))

    @property
    def log_dir(self) -> str | None:
        """The folder of all writers and the report; None for the folder of the run."""
        return self.tb_log_dir


Unchecked = Any
"""`TrainerArguments` before they are checked: their values may have any type."""

_MEANT = {"true": True, "yes": True, "false": False, "no": False}


def _check_kinds(args: Unchecked) -> None:
    """Check the types of values, so that later checks can use their attributes."""
    if not isinstance(args.backend, str):
        raise ConfigurationError(
            f"backend={args.backend!r}: write a backend string such as 'sp-bf16'. Pass a stack that is built already "
            "to Trainer(..., trainer_backend=...)."
        )
    options = args.backend_options
    if not isinstance(options, Mapping) or not all(isinstance(chosen, Mapping) for chosen in options.values()):
        raise ConfigurationError(
            f"backend_options={options!r}: write a dict of options for each layer, by its token: "
            "{'amp': {'init_scale': 1024.0}}."
        )
    if not isinstance(args.checkpointer_args, DefaultCheckpointerArguments):
        raise ConfigurationError(
            f"checkpointer_args={args.checkpointer_args!r}: write DefaultCheckpointerArguments(...), or pass your own "
            "checkpointer to Trainer(..., checkpointer=...)."
        )
    if args.output_dir is not None and not isinstance(args.output_dir, str | PathLike):
        raise ConfigurationError(
            f"output_dir={args.output_dir!r}: write the path of a folder, or None for a new folder in 'runs'."
        )
    _check_overwrite(args)
    for name, nested in _NESTED_OR_NONE.items():
        if getattr(args, name) is not None and not isinstance(getattr(args, name), nested):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write {nested.__name__}(...) or None.")
    _check_data_sharding(args.data_sharding)
    if args.combine_loaders not in ("min", "max", "cycle", None):
        raise ConfigurationError(f"combine_loaders={args.combine_loaders!r}: write 'min', 'max', 'cycle' or None.")
    _check_device(args.device)
    _check_writers(args.writers)
    expanded_paths(args)
    _check_remote(args)


_NESTED_OR_NONE: dict[str, type] = {
    "stats_args": StatsArguments,
    "writer_args": WriterArguments,
    "distributed_training_args": DistributedTrainingArguments,
    "differential_privacy_args": DifferentialPrivacyArguments,
}


def _check_overwrite(args: Unchecked) -> None:
    for name, values in (("overwrite", (True, False)), ("private_files", (True, False, "auto"))):
        value = getattr(args, name)
        if not any(value is one or (isinstance(one, str) and value == one) for one in values):
            raise ConfigurationError(f"{name}={value!r}: write {' or '.join(map(repr, values))}.")
    if args.overwrite and args.resume is not False:
        raise ConfigurationError(
            f"overwrite=True, resume={args.resume!r}: the first deletes the run in output_dir and the second continues "
            "a run. Write one of them; with both, a start after an interruption would delete the trained weights."
        )


def _check_remote(args: Unchecked) -> None:
    """Check the combinations of arguments with addresses such as `s3://bucket/run`."""
    if not is_address(args.output_dir):
        if args.local_dir is not None:
            raise ConfigurationError(
                f"local_dir={args.local_dir!r} is the local copy of a run whose output_dir is an address such as "
                "'s3://bucket/run'. Write only output_dir for a local run."
            )
        if is_address(args.resume) and args.output_dir is None:
            raise ConfigurationError(
                f"resume={args.resume!r} without output_dir: write output_dir='s3://...', resume='auto' to continue "
                "the run at that address, or the output_dir of a new run that begins with its state."
            )
        return
    theirs, writers = args.checkpointer_args, args.writer_args
    elsewhere = {name: getattr(theirs, name) for name in ("save_dir", "model_state_save_dir")}
    elsewhere["tb_log_dir"] = writers.tb_log_dir if writers else None
    for name, value in elsewhere.items():
        if value:
            raise ConfigurationError(
                f"{name}={value!r} with output_dir={args.output_dir!r}: files outside of the folder of the run are not "
                "uploaded. Remove it."
            )
    if theirs.delete_existing_checkpoints:
        raise ConfigurationError(
            f"delete_existing_checkpoints=True with output_dir={args.output_dir!r}: write overwrite=True, which "
            "deletes the whole run there."
        )


_STAGES = ("train", "val", "test", "predict")
_SHARDINGS = ("auto", "trainer", "loader")


def _check_data_sharding(given: Any) -> None:
    by_stage = given if isinstance(given, Mapping) else {"train": given}
    if not set(by_stage) <= set(_STAGES) or not all(
        isinstance(value, str) and value in _SHARDINGS for value in by_stage.values()
    ):
        raise ConfigurationError(
            f"data_sharding={given!r}: write 'auto', 'trainer' or 'loader', or a dict with one of these for each "
            "stage: {'train': 'loader', 'val': 'trainer'}. The stages are train, val, test and predict."
        )


def _check_device(device: Any) -> None:
    """Check that a device may exist on some machine; the start of the run checks this one."""
    several = isinstance(device, list | tuple) and bool(device)
    for one in device if several else [device]:
        why = _why_no_device(one, least=0 if several else -1)
        if why is not None:
            raise ConfigurationError(
                f"device={device!r}: {why}write 'auto', 'cpu', 'cuda:0', the number of an accelerator, -1 for all of "
                "them, or a list with one for each process."
            )


def _why_no_device(one: Any, least: int) -> str | None:
    """Return the beginning of a sentence on an invalid device; None if `one` may be a device."""
    if isinstance(one, int) and not isinstance(one, bool):
        return None if one >= least else ""
    if not isinstance(one, str | torch.device) or one == "":
        return ""
    try:
        meta = one != "auto" and torch.device(one).type == "meta"
    except RuntimeError:
        if isinstance(one, str) and (number := one.removeprefix("gpu").removeprefix(":")).isdigit() | (one == "gpu"):
            return f"torch calls it 'cuda{':' + number if number else ''}'; "
        return "torch has no such device; "
    return "its tensors have no values; " if meta else None


def expanded_paths(args: Unchecked) -> dict[str, Any]:
    """Return the arguments that are paths, with `~` replaced by the home folder.

    Raises:
        ConfigurationError: a path is the address of a store that cannot be used.
    """
    given = {name: getattr(args, name) for name in ("output_dir", "resume", "init_weights_from", "local_dir")}
    return {
        name: remote_address(name, value) if is_address(value) and name != "local_dir" else expand_path(name, value)
        for name, value in given.items()
        if isinstance(value, str | PathLike) and not (name == "resume" and value in RESUME_WORDS)
    }


RESUME_WORDS = ("auto", "last", "best")
"""Values of `resume` in place of a path."""


def resolve_backend(args: Unchecked) -> str:
    """Return `args.backend`, with "auto" replaced by the process layer of this process."""
    if registered_backend(args.backend) is not None:
        return str(args.backend)
    return expand_auto(args.backend, joins=args.distributed_training_args is not None)


def _check_resume(value: Any) -> None:
    """Check `resume`, and reject strings such as "true", which would be the name of a folder."""
    meant = _MEANT.get(value.lower()) if isinstance(value, str) else None
    if meant is not None:
        raise ConfigurationError(
            f"resume={value!r} would be the path of a checkpoint. Write resume={meant}, not in quotes."
        )
    if not isinstance(value, bool | str | PathLike) or value == "":
        raise ConfigurationError(
            f"resume={value!r}: write True, False, 'auto', 'best', 'last', or the path of a checkpoint."
        )


def _check_writers(writers: Any) -> None:
    if isinstance(writers, str):
        raise ConfigurationError(f"writers={writers!r}: write a list: writers=[{writers!r}].")
    if not isinstance(writers, Sequence):
        raise ConfigurationError(
            f"writers={writers!r}: write a list of names and Writer objects, such as ['stdout', 'csv'], or [] for none."
        )
    for writer in writers:
        if isinstance(writer, type):
            raise ConfigurationError(
                f"writers=[{writer.__name__}] has the class itself. Write an object: {writer.__name__}(...)."
            )
    try:
        check_writers(writers)
    except ConfigurationError as error:
        raise ConfigurationError(f"writers: {error}") from None


_AT_LEAST_ONE_OR_NONE = ("per_device_train_batch_size", "gpu_batch_size_limit", "val_batch_size")
_INSTEAD_OF_NOTHING = {
    "max_train_steps_per_epoch": "To validate and train nothing, call trainer.validate().",
    "max_val_steps_per_epoch": "For no validation, write validate_every=0.",
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "deterministic": (True, False, "warn"),
    "float32_matmul_precision": ("highest", "high", "medium", None),
    "nonfinite": ("raise", "skip"),
    "record": ("steps", "full", "off"),
    "on_replay_mismatch": ("stop", "warn", "record"),
    "monitor_mode": ("auto", "min", "max"),
    "on_interrupt": ("raise", "return"),
    "resume_mode": ("full", "weights_and_optimizer", "weights"),
    "report": ("auto", True, False),
    "collect_train_outputs": ("auto", True, False),
    "amp_level_apex": ("O0", "O1", "O2", "O3"),
}
_DISPLAYS = (*DISPLAYS, None)


def check_arguments(args: Unchecked) -> None:
    """Check every field and the combinations of fields.

    Raises:
        ConfigurationError: an argument is invalid; it names the first one.
    """
    _check_kinds(args)
    _check_numbers(args)
    _check_choices(args)
    _check_backend(args)
    _check_monitor(args)


_OTHERWISE = {
    "max_grad_norm": "clip_grads=False for no clipping",
    "clip_grad_value": "None for no clipping",
    "rank_zero_timeout_s": "float('inf') for no limit",
    "lease_timeout_s": "omit it for 60 s",
}


def _check_numbers(args: Unchecked) -> None:
    _whole_number("epochs", args.epochs, 0)
    _whole_number("seed", args.seed, 0, most=2**63 - 1)  # the range of torch.manual_seed
    _whole_number("sanity_val_steps", args.sanity_val_steps, -1)
    _whole_number("overfit_batches", args.overfit_batches, -1)
    if not isinstance(args.fast_dev_run, bool):
        _whole_number("fast_dev_run", args.fast_dev_run, 1)
    _whole_number("train_batch_size", args.train_batch_size, 1)
    for name in _AT_LEAST_ONE_OR_NONE:
        if getattr(args, name) is not None:
            _whole_number(name, getattr(args, name), 1)
    _check_limits(args)
    if args.per_device_train_batch_size is not None and args.train_batch_size != 1:
        raise ConfigurationError(
            f"train_batch_size={args.train_batch_size} and "
            f"per_device_train_batch_size={args.per_device_train_batch_size}: the first counts a step's samples on all "
            "processes together, the second on each. Remove one of them."
        )
    _steps("log_every", args.log_every)
    if args.max_steps is not None:
        _steps("max_steps", args.max_steps)
    if args.max_time is not None:
        seconds_of("max_time", args.max_time)
    check_validate_every(args.validate_every)
    _check_share(args.verify_replay)
    if args.stats_args is not None:
        _whole_number("stats_args.log_steps", args.stats_args.log_steps, 1)
    for name in ("max_grad_norm", "clip_grad_value", "stop_grace_s", "rank_zero_timeout_s", "lease_timeout_s"):
        value = getattr(args, name)
        if value is None and name in ("clip_grad_value", "stop_grace_s"):
            continue
        most = LONGEST_TIMEOUT_S if name == "lease_timeout_s" else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limits = "above 0" if most == math.inf else f"above 0, at most {most:g}"
            raise ConfigurationError(f"{name}={value!r}: write a number {limits}, or {_OTHERWISE.get(name, 'None')}.")
    if args.clip_grad_value is not None and args.clip_grads and args.max_grad_norm != 1.0:
        raise ConfigurationError(
            f"clip_grad_value={args.clip_grad_value} and max_grad_norm={args.max_grad_norm}: gradients are clipped "
            "once, by value or by norm. Remove one of them."
        )


def _check_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigurationError(
            f"verify_replay={share!r}: write the fraction of the global steps to run twice, such as 0.01; 1.0 for all, "
            "0.0 for none."
        )


def _check_limits(args: Unchecked) -> None:
    for name, instead in _INSTEAD_OF_NOTHING.items():
        value = getattr(args, name)
        if value is not None and not is_number_of_steps(value):
            raise ConfigurationError(
                f"{name}={value!r}: write a whole number, 1 or more, a float above 0 and up to 1.0 for a fraction of "
                f"an epoch, or None for all. {instead}"
            )


def _whole_number(name: str, value: Any, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        raise ConfigurationError(f"{name}={value!r}: write a whole number, {limits}.")


def _steps(name: str, value: Any) -> None:
    if not is_number_of_steps(value):
        raise ConfigurationError(
            f"{name}={value!r}: write a whole number of global steps, 1 or more, or a float above 0 and up to 1.0 for "
            "a fraction of the run."
        )


def _check_saves(saves: Any) -> None:
    kinds = saves if isinstance(saves, tuple) else (saves,)
    if not isinstance(saves, bool) and not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
        raise ConfigurationError(
            f"save_on_exception={saves!r}: write True, False, or a tuple of exception types, such as (RuntimeError,)."
        )


def _check_progress(progress: Any) -> None:
    if isinstance(progress, ProgressDisplay) or progress in _DISPLAYS:
        return
    if progress in ("raw", "tqdm"):
        meant = "'plain' for lines of text" if progress == "raw" else "'rich' for a bar"
        raise ConfigurationError(f"progress={progress!r}: write {meant}.")
    raise ConfigurationError(
        f"progress={progress!r}: write one of {', '.join(map(repr, _DISPLAYS))}, or an object of a class derived from "
        "ProgressDisplay."
    )


def _check_choices(args: Unchecked) -> None:
    if args.fit_micro_batch == "always":
        raise ConfigurationError(
            "fit_micro_batch='always': a training step that runs out of memory cannot be repeated with a smaller "
            "micro-batch. Write fit_micro_batch=True to try out a step before training, or set gpu_batch_size_limit to "
            "the number of samples that always fit."
        )
    for name in (one.name for one in fields(args) if one.type == "bool"):  # annotations are strings
        if not isinstance(getattr(args, name), bool):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write True or False.")
    for name, choices in _CHOICES.items():
        if not any(getattr(args, name) is choice or getattr(args, name) == choice for choice in choices):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write one of {', '.join(map(repr, choices))}.")
    _check_saves(args.save_on_exception)
    _check_resume(args.resume)
    if args.init_weights_from is not None and not isinstance(args.init_weights_from, str | PathLike):
        raise ConfigurationError(
            f"init_weights_from={args.init_weights_from!r}: write the path of a checkpoint, an export, a "
            "folder of save_pretrained or a .safetensors file, the id of a model in huggingface_hub's cache, or None."
        )
    if args.resume_mode == "weights_and_optimizer" and args.reset_optimizers_schedulers:
        raise ConfigurationError(
            "resume_mode='weights_and_optimizer' and reset_optimizers_schedulers=True contradict each other. Write "
            "resume_mode='weights' to load only the weights."
        )
    _check_progress(args.progress)
    plain = isinstance(args.compile, bool) or args.compile == "units"
    options = None if plain else set(inspect.signature(torch.compile).parameters) - {"model"}
    if options is not None and not (isinstance(args.compile, Mapping) and options | {"units"} >= set(args.compile)):
        raise ConfigurationError(
            f"compile={args.compile!r}: write True, False, 'units' or a dict with 'units': True and options of "
            f"torch.compile, which are {', '.join(sorted(options))}."
        )
    if not isinstance(args.log_level, str | int) or not isinstance(logging.getLevelName(args.log_level), int):
        raise ConfigurationError(f"log_level={args.log_level!r}: write 'DEBUG', 'INFO', 'WARNING' or 'ERROR'.")


def _check_monitor(args: Unchecked) -> None:
    theirs = args.checkpointer_args
    if args.monitor is None:
        if args.monitor_mode not in ("auto", theirs.mode) and theirs.mode != "auto":
            raise ConfigurationError(
                f"monitor_mode={args.monitor_mode!r} and checkpointer_args.mode={theirs.mode!r} contradict each other. "
                "Remove one of them."
            )
        return
    if not isinstance(args.monitor, str) or not args.monitor:
        raise ConfigurationError(f"monitor={args.monitor!r}: write the name of a metric, such as 'val/loss'.")
    try:
        Monitor.of(args.monitor, args.monitor_mode)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("mode=", "monitor_mode=")) from None
    if (theirs.monitor, theirs.mode) not in ((DEFAULT_MONITOR, "auto"), (args.monitor, args.monitor_mode)):
        raise ConfigurationError(
            f"monitor={args.monitor!r} and checkpointer_args.monitor={theirs.monitor!r} contradict each other. "
            "Remove one of them."
        )


def _check_backend(args: Unchecked) -> None:
    if registered_backend(args.backend) is not None:
        return
    records = parse_spec(resolve_backend(args))
    tokens = {record.token for record in records}
    unknown = sorted(set(args.backend_options) - {token.replace("-", "_") for token in tokens})
    if unknown:
        raise ConfigurationError(
            f"backend_options={{{unknown[0]!r}: ...}} with backend={args.backend!r}, whose layers are "
            f"{', '.join(repr(record.token.replace('-', '_')) for record in records)}. Name the layer in backend, or "
            "remove its options."
        )
    if args.amp_backend_native and args.amp_backend_apex:
        raise ConfigurationError("amp_backend_native and amp_backend_apex are both True: choose one of them.")
    for flag, token in (("amp_backend_native", "amp"), ("amp_backend_apex", "amp-apex")):
        if getattr(args, flag) and token not in tokens:
            raise ConfigurationError(
                f"{flag}=True with backend={args.backend!r}: only the backend string selects the precision. Write "
                f"backend='{args.backend.split('-')[0]}-{token}' and remove {flag}."
            )
    if args.amp_level_apex != "O1" and "amp-apex" not in tokens:
        raise ConfigurationError(
            f"amp_level_apex={args.amp_level_apex!r} with backend={args.backend!r}, which has no apex layer. Remove it."
        )
    chosen = args.backend_options.get("amp_apex", {}).get("opt_level", args.amp_level_apex)
    if args.amp_level_apex not in ("O1", chosen):
        raise ConfigurationError(
            f"amp_level_apex={args.amp_level_apex!r} and backend_options={{'amp_apex': {{'opt_level': {chosen!r}}}}} "
            "contradict each other. Remove one of them."
        )
    _check_layer_arguments(args, records)


def _check_layer_arguments(args: Unchecked, records: Sequence[LayerRecord]) -> None:
    """Check that arguments of a layer and the layer are given together."""
    private = [r for r in records if DifferentialPrivacyArguments in r.layer.configured_by]
    if args.differential_privacy_args is not None and not private:
        raise ConfigurationError(
            f"differential_privacy_args with backend={args.backend!r}, which has no privacy layer: the run would not "
            "be private. Write backend='sp-dp', or remove them."
        )
    if args.differential_privacy_args is None and not all(
        r.layer.configured_by[DifferentialPrivacyArguments] in args.backend_options.get(r.token.replace("-", "_"), {})
        for r in private
    ):
        raise ConfigurationError(
            f"backend={args.backend!r} without differential_privacy_args: the privacy budget of the run is unknown. "
            "Write differential_privacy_args=DifferentialPrivacyArguments(delta=1e-6, target_epsilon=3.0), with a "
            "delta well below one over the number of records."
        )
    theirs = args.distributed_training_args
    several = theirs is not None and (theirs.world_size > 1 or theirs.allow_pickle)
    if several and not any(DistributedTrainingArguments in r.layer.configured_by for r in records):
        raise ConfigurationError(
            f"distributed_training_args with backend={args.backend!r}, which runs one process. Remove them."
        )
