"""`TrainerArguments`: all options of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from trainstack._files import is_address
from trainstack._keywords import SuggestsNames, check_known_fields, explain_frozen
from trainstack.backends import Clipping, DifferentialPrivacyArguments, DistributedTrainingArguments, parse_spec
from trainstack.backends.processes.world import DeviceChoice
from trainstack.backends.spec import known_layers, registered_backend
from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer.argument_checks import (
    StatsArguments,
    WriterArguments,
    check_arguments,
    expanded_paths,
    resolve_backend,
)
from trainstack.trainer.argument_names import ALIASES
from trainstack.trainer.core.intervals import Every, ValidateEvery
from trainstack.trainer.tracking.progress import ProgressDisplay

WITHOUT_FILES = ("stdout", "logging")
"""Names of writers that write no files."""


def limit_for_dev_run(args: TrainerArguments) -> TrainerArguments:
    """Limit `args` to the number of steps, and of validation batches a loader, in `fast_dev_run`; else no change.

    The environment variable `TRAINSTACK_FAST_DEV_RUN` sets the number for arguments without it. The steps are one
    epoch. If the data have fewer steps, the run takes several epochs, of which the last may be cut short. Nothing is
    resumed, saved, exported or written, except that a private run keeps its ledger, in a separate folder.
    """
    asked = os.environ.get("TRAINSTACK_FAST_DEV_RUN", "")
    if not args.fast_dev_run and asked not in ("", "0"):
        if not asked.isdigit():
            raise ConfigurationError(
                f"TRAINSTACK_FAST_DEV_RUN={asked!r}: write a number of global steps, or 0 for off."
            )
        args = replace(args, fast_dev_run=int(asked))
    if not args.fast_dev_run:
        return args
    steps = int(args.fast_dev_run)
    never = args.validate_every == 0 and type(args.validate_every) is int
    return replace(
        args,
        epochs=1,
        max_steps=steps,
        max_train_steps_per_epoch=steps,  # so that the epoch ends and its end hooks run
        max_val_steps_per_epoch=steps,
        validate_every=0 if never else None,
        sanity_val_steps=0,
        log_every=1,
        stats_args=None,
        writers=["stdout"] if "stdout" in args.writers else [],
        report=False,
        resume=False,
        save_on_exception=False,
        checkpointer_args=replace(args.checkpointer_args, checkpoint=False),
        overwrite=False,
        output_dir=None
        if args.output_dir is None or is_address(args.output_dir)
        else Path(args.output_dir) / "fast_dev_run",
        local_dir=None,
    )


@explain_frozen
@dataclass(frozen=True, kw_only=True)
class TrainerArguments(metaclass=SuggestsNames):
    """Hyperparameters of a run. They are checked when made, and immutable.

    Args:
        epochs: passes over the training data.
        max_steps: global steps of the run, instead of `epochs`; a float in (0, 1] is a fraction of those of `epochs`.
            The run may end within an epoch, with a validation if it validates after epochs.
        max_time: time after which each call of `train()` stops as after `request_stop`: seconds, "HH:MM:SS" or
            "D:HH:MM:SS".
        train_batch_size: the GLOBAL batch: samples a global step over all processes.
        per_device_train_batch_size: samples a global step on each process, instead of `train_batch_size`; the global
            batch then grows with the number of processes.
        gpu_batch_size_limit: samples that fit into one forward pass. A process with a larger batch accumulates the
            gradients of as few micro-batches as possible. None: one forward pass a step.
        fit_micro_batch: try a step before training, and halve the micro-batch until it fits into memory.
        val_batch_size: samples a validation batch on each process; None for the size of a micro-batch.
        max_train_steps_per_epoch: limit on global steps an epoch; a float in (0, 1] is a fraction of its steps, rounded
            up.
        max_val_steps_per_epoch: limit on batches a validation loader on each process; a float in (0, 1] is a fraction
            of the batches of each loader over all processes, rounded up. It does not limit tests and predictions.
        validate_every: interval between validations during training. None: after each epoch. A positive number counts
            global steps, a float in (0, 1] is a fraction of the run, a negative number counts epochs, 0 is never. Or
            `Every(...)`, also for a time. Or a function of the trainer that returns True if a validation is due; it is
            called after each step on the main process.
        validate_at_start: whether to validate also before the first global step, and record the results at step 0. A
            resumed run does not.
        sanity_val_steps: batches of each validation loader to run before training, as a test; -1 for all.
        overfit_batches: train and validate only on the samples of this number of global batches; -1 for all, 0 for off.
        fast_dev_run: number of steps to train as a test (True: one), with as many validation batches; writes nothing.
        monitor: name of the metric that selects the best weights; `checkpointer_args.monitor` by default.
        monitor_mode: `"min"` if low values of this metric are good, `"max"` if high values are, `"auto"` to derive it
            from the name.
        clip_grads: clip the L2 norm of all gradients together to `max_grad_norm`, once a global step.
        max_grad_norm: largest norm, see `clip_grads`.
        clip_grad_value: clip each element of the gradients to this absolute value, instead of the norm.
        combine_loaders: end of an epoch if `get_train_dataloader` returns a dict of loaders. `"min"`: with the
            shortest. `"max"`: with the longest; the others give None after their end. `"cycle"`: with the longest; the
            others start again. None: all must have the same length.
        data_sharding: division of the batches of a loader with a custom order among processes. `"trainer"`: each
            process reads the same batches and uses every n-th. `"loader"`: the loader gives each process its own
            batches. `"auto"`: as `"trainer"`, with an error for data that is known to be divided. A dict has a value
            for each stage: `{"train": "loader", "val": "trainer"}`; the others are `"test"` and `"predict"`.
        nonfinite: reaction to a loss or gradient that is inf or nan: `"raise"` an error at the next log point, or
            `"skip"` such steps and count them (this reads the device in every step).
        backend: the backend string, such as `"sp-bf16"` or `"auto-bf16"`. `"auto"` is `"ddp"` in a process that a
            launcher has started, otherwise `"sp"`.
        backend_options: keyword arguments of the layers, by token: `{"amp": {"init_scale": 1024.0}}`.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:1"`, ..., or the number of an accelerator. A list has one of these
            for each process of a machine; -1 is the list of all accelerators.
        use_gpu: False is the same as `device="cpu"`.
        seed: seed of the data order and of the samples' random numbers. The trainer does not seed the global
            generators of the process: call `seed_everything(seed)` before you build the module, or use the argument
            `seed_everything`.
        seed_everything: call `seed_everything(seed)` when the trainer is made, so that a second run in the same process
            draws the same random numbers. It does not affect the initial weights of a module that exists already.
        verify_replay: fraction of the global steps to run twice, from 0 to 1. Forward and backward passes are repeated
            from the same state before the optimizer step, and the bits of losses and gradients are compared. This finds
            hardware errors and nondeterministic operations. The results of the run do not change. The cost is about
            twice this fraction of a step's time.
        on_replay_mismatch: reaction to a difference: `"stop"` raises `ReplayMismatchError`, `"warn"` logs a warning,
            `"record"` does neither. The last two record the number of differences as `"train/replay_mismatches"`.
        deterministic: make torch raise an error for nondeterministic operations, or `"warn"` about them, during calls
            of the trainer.
        float32_matmul_precision: precision of float32 matrix products during calls of the trainer: `"highest"`,
            `"high"` (TF32 on GPUs that support it) or `"medium"`, as in `torch.set_float32_matmul_precision`. None
            keeps the setting of the process.
        compile: compile the module's models with `torch.compile`, in place. `"units"` compiles their repeated blocks
            separately. A dict has options of `torch.compile`, and may contain `"units": True`.
        activation_checkpointing: save only the inputs of the repeated blocks of the module, and recompute their
            activations in the backward pass: less memory, a third more computation, the same bits.
        channels_last: store convolution weights in channels-last memory format.
        fast_paths: skip the overhead of public torch calls if the result has the same bits. False uses only public
            calls, to find out whether a difference comes from a fast path. The environment variable
            `TRAINSTACK_FAST_PATHS`, 0 or 1, overrides it.
        resume: True or `"last"` continues from the newest checkpoint, and fails if there is none. `"auto"` does the
            same, but starts a new run if there is none. `"best"` continues from the best checkpoint by
            `checkpointer_args.monitor`. A path selects a checkpoint. With `output_dir=None`, `"auto"` continues the
            newest unfinished run of the same script and module class, and the others the newest run that has a
            checkpoint.
        resume_mode: parts of the checkpoint to load. `"full"`: everything; the run continues exactly.
            `"weights_and_optimizer"`: module, optimizers, schedulers and layers, with new counters, order, random
            numbers and history. `"weights"`: only the module.
        strict_resume: raise an error if a change breaks the exactness of a resume: in arguments, versions, hardware,
            data or code. The error names each change, and how to avoid it.
        init_weights_from: initial weights: a checkpoint (or a file `last` or `best`), an export, a folder of
            `save_pretrained`, a `.safetensors` file or its index, or the id of a model in the cache of
            `huggingface_hub`. Tensors that match are loaded; `trainer.warm_start_report` lists them. Ignored when a
            checkpoint is resumed, unless it was written with `keep_frozen=False`.
        init_weights_strict: raise an error unless all tensors of `init_weights_from` match.
        reset_optimizers_schedulers: on resume, load the weights but create new optimizers and schedulers.
        checkpointer_args: arguments of the default checkpointer.
        output_dir: folder of checkpoints and logs. None: each run gets a new folder in `runs`, which the plan shows and
            `trainer.output_dir` returns. A folder with another run is an error. With an address such as
            `s3://bucket/run` (extra `remote`, or `gcs`), the run uses a local copy, which a thread uploads.
        local_dir: folder of the local copy of a run with an address; by default in the user's cache.
        overwrite: delete the run in `output_dir`, and start a new one. Other files there are kept.
        private_files: create files that only their owner can read (mode 0600, folders 0700): checkpoints, logs,
            exports, ledgers. `"auto"`: for backends with a privacy layer.
        log_every: global steps between two log points; a float in (0, 1] is a fraction of the run.
        writers: `"stdout"`, `"logging"`, `"csv"`, `"jsonl"`, `"tensorboard"`, `"wandb"`, `"mlflow"`, `"trackio"`, or
            `Writer` objects.
        report: write `report.html` and `run.json` next to the logs, a page with settings and results of the run;
            `"auto"` writes them if there is a writer other than `"stdout"` and `"logging"`.
        record: values of each global step to record in `step_log` in the folder of the run, if the run writes files.
            `"steps"`: loss, gradient norm, and digests of samples and learning rates; at log points also digests of the
            batch and the random states. `"full"`: also digests of each gradient, weight and optimizer state, which
            reads the device in every step. `"off"`: nothing.
        progress: `"auto"`, `"rich"`, `"plain"`, `"notebook"`, `"none"` or a custom `ProgressDisplay`.
        default_callbacks: add `callbacks.default_callbacks()` to the trainer's callbacks.
        disable_tqdm: True is the same as `progress="none"`.
        collect_train_outputs: keep the outputs of `train_step` for `on_end_train_epoch`; `"auto"` keeps them if this
            hook takes outputs.
        handle_signals: save and stop `train()` on SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C.
        stop_grace_s: seconds between the signal and the kill by a scheduler; a save that takes more than half of them
            gives a warning. The default is the value of TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30.
        lease_timeout_s: seconds without a heartbeat after which another process may take over the directories of this
            run; at most 86400, a day. A run that died on the same host is replaced immediately.
        rank_zero_timeout_s: seconds that the other ranks wait while rank 0 reads or writes files: a checkpoint, an
            export, an upload. The time limit of collectives (`timeout_s` of `ddp`) does not count this time.
        on_interrupt: behaviour of `train()` after Ctrl-C has stopped it and everything is saved: `"raise"` a
            KeyboardInterrupt, or `"return"`, with one process; `trainer.stop_reason` is then "Ctrl-C".
        save_on_exception: save the state after an exception, for inspection; a run resumes from it only if you give its
            path. A tuple of exception types saves only after these.
        log_level: lowest level of the messages to the logger "trainstack", including those of the default checkpointer.
            The plan and the line of each epoch come from the writer `"stdout"`.
        stats_args: PyMarlin's form of `log_every`.
        writer_args: PyMarlin's form of `output_dir`.
        distributed_training_args: arguments of backends with several processes.
        differential_privacy_args: arguments of backends with a privacy layer.
        amp_backend_native: PyMarlin's flag for `amp`; must agree with `backend`.
        amp_backend_apex: PyMarlin's flag for `amp-apex`; must agree with `backend`.
        amp_level_apex: PyMarlin's name for the `opt_level` of `amp-apex`.

    Raises:
        ConfigurationError: a value is out of range, or two contradict each other.

    Examples:
        >>> args = ts.TrainerArguments(
        ...     epochs=3, train_batch_size=64, backend="auto-bf16", resume="auto"
        ... )
        >>> replace(args, epochs=5).epochs
        5
        >>> ts.TrainerArguments(batch_size=64)
        Traceback (most recent call last):
        trainstack.errors.ConfigurationError: ...Write train_batch_size...
    """

    ALIASES: ClassVar[dict[str, str]] = ALIASES

    epochs: int = 1
    max_steps: int | float | None = None
    max_time: float | str | None = None
    train_batch_size: int = 1
    per_device_train_batch_size: int | None = None
    gpu_batch_size_limit: int | None = None
    fit_micro_batch: bool = False
    val_batch_size: int | None = 1
    max_train_steps_per_epoch: int | float | None = None
    max_val_steps_per_epoch: int | float | None = None
    validate_every: ValidateEvery | None = None
    validate_at_start: bool = False
    sanity_val_steps: int = 0
    overfit_batches: int = 0
    fast_dev_run: bool | int = False
    monitor: str | None = None
    monitor_mode: Literal["auto", "min", "max"] = "auto"
    clip_grads: bool = True
    max_grad_norm: float = 1.0
    clip_grad_value: float | None = None
    combine_loaders: Literal["min", "max", "cycle"] | None = None
    data_sharding: str | Mapping[str, str] = "auto"
    nonfinite: Literal["raise", "skip"] = "raise"
    backend: str = "auto"
    backend_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: str | torch.device | int | Sequence[str | torch.device | int] = "auto"
    use_gpu: bool = True
    seed: int = 0
    seed_everything: bool = False
    verify_replay: float = 0.0
    on_replay_mismatch: Literal["stop", "warn", "record"] = "stop"
    deterministic: bool | Literal["warn"] = False
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    compile: bool | Literal["units"] | Mapping[str, Any] = False
    activation_checkpointing: bool = False
    channels_last: bool = False
    fast_paths: bool = True
    resume: bool | str | PathLike[str] = False
    resume_mode: Literal["full", "weights_and_optimizer", "weights"] = "full"
    strict_resume: bool = False
    init_weights_from: str | PathLike[str] | None = None
    init_weights_strict: bool = False
    reset_optimizers_schedulers: bool = False
    checkpointer_args: DefaultCheckpointerArguments = field(default_factory=DefaultCheckpointerArguments)
    output_dir: str | PathLike[str] | None = None
    local_dir: str | PathLike[str] | None = None
    overwrite: bool = False
    private_files: bool | Literal["auto"] = "auto"
    log_every: int | float = 50
    writers: Sequence[Any] = ("stdout", "csv")
    report: bool | Literal["auto"] = "auto"
    record: Literal["steps", "full", "off"] = "steps"
    progress: Literal["auto", "rich", "plain", "notebook", "none"] | ProgressDisplay | None = "auto"
    default_callbacks: bool = False
    disable_tqdm: bool = False
    collect_train_outputs: bool | Literal["auto"] = "auto"
    handle_signals: bool = True
    stop_grace_s: float | None = None
    rank_zero_timeout_s: float = 12 * 3600.0  # 12 h: the upload of a large checkpoint may take hours
    lease_timeout_s: float = 60.0
    on_interrupt: Literal["raise", "return"] = "raise"
    save_on_exception: bool | tuple[type[BaseException], ...] = False
    log_level: str = "INFO"
    stats_args: StatsArguments | None = None
    writer_args: WriterArguments | None = None
    distributed_training_args: DistributedTrainingArguments | None = None
    differential_privacy_args: DifferentialPrivacyArguments | None = None
    amp_backend_native: bool = False
    amp_backend_apex: bool = False
    amp_level_apex: str = "O1"

    def __post_init__(self) -> None:
        for name, nested in _NESTED.items():  # some parsers do not convert nested mappings
            if isinstance(given := getattr(self, name), Mapping):
                object.__setattr__(self, name, _build(nested, given, name))
        check_arguments(self)
        object.__setattr__(self, "writers", tuple(self.writers))
        for name, path in expanded_paths(self).items():
            object.__setattr__(self, name, path)

    def global_batch_size(self, world_size: int) -> int:
        """Return the samples a global step over `world_size` processes."""
        each = self.per_device_train_batch_size
        return self.train_batch_size if each is None else each * world_size

    def data_sharding_of(self, stage: Stage) -> str:
        """Return the value of `data_sharding` for the loaders of `stage`."""
        given = self.data_sharding
        return given if isinstance(given, str) else given.get(stage.name.lower(), "auto")

    @property
    def log_interval(self) -> int | float:
        """Global steps between two log points, or a float as a fraction of the run."""
        return self.stats_args.log_steps if self.stats_args else self.log_every

    @property
    def wants_report(self) -> bool:
        """The value of `report`; with `"auto"`, whether there is a writer other than those of `WITHOUT_FILES`."""
        return any(one not in WITHOUT_FILES for one in self.writers) if self.report == "auto" else self.report

    @property
    def chosen_device(self) -> DeviceChoice:
        """`device`, or the CPU if `use_gpu` is False."""
        return self.device if self.use_gpu else "cpu"

    @property
    def clipping(self) -> Clipping:
        """The method and limit of gradient clipping."""
        if self.clip_grad_value is not None:
            return Clipping(kind="value", limit=self.clip_grad_value)
        return Clipping(kind="norm", limit=self.max_grad_norm) if self.clip_grads else Clipping()

    @property
    def resolved_backend(self) -> str:
        """`backend`, with `"auto"` replaced by the process layer of this process."""
        return resolve_backend(self)

    @property
    def layer_options(self) -> dict[str, dict[str, Any]]:
        """`backend_options`, with the other arguments of layers added."""
        options = {layer: dict(chosen) for layer, chosen in self.backend_options.items()}
        known = registered_backend(self.backend) is not None  # a registered backend may contain any of the layers
        for record in known_layers().values() if known else parse_spec(self.resolved_backend):
            for given in (self.distributed_training_args, self.differential_privacy_args):
                configured_by = record.layer.configured_by.items()
                parameter = next((name for kind, name in configured_by if isinstance(given, kind)), None)
                if parameter is not None:
                    options.setdefault(record.token.replace("-", "_"), {}).setdefault(parameter, given)
        if self.amp_level_apex != "O1":
            options.setdefault("amp_apex", {})["opt_level"] = self.amp_level_apex
        return options

    @property
    def placed_checkpointer_args(self) -> DefaultCheckpointerArguments:
        """`checkpointer_args`, with `monitor` and `monitor_mode`."""
        chosen: dict[str, Any] = {}
        if self.monitor is not None:
            chosen |= {"monitor": self.monitor, "mode": self.monitor_mode}
        elif self.monitor_mode != "auto":
            chosen["mode"] = self.monitor_mode
        return dataclasses.replace(self.checkpointer_args, **chosen)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainerArguments:
        """Make arguments from plain values; nested arguments may be dicts.

        Raises:
            ConfigurationError: a key is unknown (the message suggests the right one), or a value is invalid.
        """
        made: TrainerArguments = _build(cls, values, "TrainerArguments")
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments as plain values, for `from_dict`."""
        values = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if self.monitor is not None:  # a second place for it could contradict a later change
            of_saving = values["checkpointer_args"].items()
            values["checkpointer_args"] = {name: one for name, one in of_saving if name not in ("monitor", "mode")}
        return values

    @classmethod
    def to_json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of a file for `from_yaml`, for editors and form generators.

        Objects, such as writers, have no plain value and can only be set in code.
        """
        from trainstack.trainer.argument_schemas import json_schema

        return json_schema(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from trainstack.trainer.argument_schemas import pydantic_schema

        return pydantic_schema(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        return cls.to_json_schema()

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> TrainerArguments:
        """Read arguments from a YAML file in the form of `to_dict`. The content is only data: no code runs.

        Args:
            path: path of the file, or an address such as `s3://bucket/run/config.yaml`.

        Raises:
            ConfigurationError: the file is missing or too long, is not a YAML mapping in UTF-8, has anchors, tags or
                too many nested levels, or has an invalid key or value. Options that can run code are not allowed:
                `allow_pickle`, and `options` of `compile`.
        """
        from trainstack.trainer.plain_arguments import PlainInputs, read_config

        inputs = PlainInputs(cls)
        inputs.add_mapping(read_config(path), str(path))
        made: TrainerArguments = inputs.arguments()
        return made


_NESTED: dict[str, type] = {
    "distributed_training_args": DistributedTrainingArguments,
    "differential_privacy_args": DifferentialPrivacyArguments,
    "checkpointer_args": DefaultCheckpointerArguments,
    "stats_args": StatsArguments,
    "validate_every": Every,
    "writer_args": WriterArguments,
}


def _build(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    check_known_fields(cls, values, where)
    known = {f.name: f for f in dataclasses.fields(cls)}
    built = {
        key: _build(_NESTED[key], value, key)
        if key in _NESTED and isinstance(value, Mapping)
        else _number(value, known[key])
        for key, value in values.items()
    }
    return cls(**built)


def _number(value: Any, of: dataclasses.Field[Any]) -> Any:
    """Convert a string such as "1e-3", which YAML does not read as a number, if the field is a float."""
    if isinstance(value, str) and "float" in str(of.type):
        with suppress(ValueError):
            return float(value)
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, PathLike | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return value.__name__
    return value
