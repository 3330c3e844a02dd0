"""`TrainerArguments`, all options of a run."""

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


def limit_for_dev_run(args: TrainerArguments) -> TrainerArguments:
    """`args` for as many steps, and validation batches a loader, as `fast_dev_run` says; unchanged without it.

    `TRAINSTACK_FAST_DEV_RUN` in the environment says it for arguments that do not. They are an epoch, unless the data
    have fewer: then it takes more than one, and the last may be cut short.
    Nothing is resumed, saved, exported or written, except that a private run keeps its ledger, in a folder of its own.
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
        max_train_steps_per_epoch=steps,  # so that the epoch ends, and what is called there is tried out
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
    """Hyperparameters of a run. Checked when made; never changed afterwards.

    Args:
        epochs: passes over the training data.
        max_steps: global steps of the run, instead of `epochs`; a float in (0, 1] is a fraction of those of `epochs`.
            The run may end within an epoch, with a validation if it validates after epochs.
        max_time: stop each call of `train()` in good order after so long, as `request_stop` does: seconds, or
            "HH:MM:SS", or "D:HH:MM:SS".
        train_batch_size: the GLOBAL batch: samples a global step over all processes.
        per_device_train_batch_size: samples a global step on each process, instead of `train_batch_size`: the global
            batch then grows with the number of processes.
        gpu_batch_size_limit: samples that fit into one forward pass. A process with a larger batch accumulates the
            gradients of as few micro-batches as fit. None: one forward pass a step.
        fit_micro_batch: try out a step before training, and halve the micro-batch until it fits into memory.
        val_batch_size: samples a validation batch, on each process; None for as many as a micro-batch.
        max_train_steps_per_epoch: cap on global steps an epoch; a float in (0, 1] is a fraction of its steps, rounded
            up.
        max_val_steps_per_epoch: cap on batches a validation loader, on each process; a float in (0, 1] is a fraction of
            the batches of each loader, over all processes, rounded up. Tests and predictions take all.
        validate_every: when to validate in training. None: after each epoch. A positive number counts global steps, a
            float in (0, 1] is a fraction of the run's, a negative number counts epochs, 0 is never; or `Every(...)`,
            also of a time, or a function of the trainer, asked after each step on the main process, that returns True
            when it is time.
        validate_at_start: validate before the first global step too, and record the results at step 0; not on a resume.
        sanity_val_steps: batches of each validation loader to try out before training; -1 for all.
        overfit_batches: train and validate on the samples of so many global batches alone; -1 for all, 0 for off.
        fast_dev_run: train so many steps (True: one), validate as many batches, and write nothing.
        monitor: the metric that tells how good the weights are; `checkpointer_args.monitor` by default.
        monitor_mode: `"min"` if low values of that metric are good, `"max"` if high ones are, `"auto"` to read it off
            its name.
        clip_grads: limit the joint L2 norm of the gradients to `max_grad_norm`, once a global step.
        max_grad_norm: see `clip_grads`.
        clip_grad_value: clamp each element of the gradients to this magnitude instead.
        combine_loaders: what ends an epoch where `get_train_dataloader` returns a dict of loaders: `"min"`, the
            shortest; `"max"`, the longest, and the others give None once they have ended; `"cycle"`, the longest, and
            the others begin anew. None where all are equally long.
        data_sharding: who splits the batches of a loader with an order of its own among the processes. `"trainer"`:
            each process reads the same batches, and the library gives it every n-th. `"loader"`: the batches of each
            process are its own. `"auto"`: as `"trainer"`, but data that is known to be split is refused. A dict gives a
            value for each stage: `{"train": "loader", "val": "trainer"}`; the others are `"test"` and `"predict"`.
        nonfinite: what to do about a loss or gradient that is inf or nan: `"raise"` at the next log point, or
            `"skip"` such steps and count them (this reads the device in every step).
        backend: the backend string, such as `"sp-bf16"` or `"auto-bf16"`. `"auto"` is `"ddp"` in a process that a
            launcher has started, and `"sp"` elsewhere.
        backend_options: keyword arguments for the stack's layers, by token: `{"amp": {"init_scale": 1024.0}}`.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:1"`, ..., or the number of an accelerator; several of these, one for
            each process of a machine; or -1 for all accelerators, one for each.
        use_gpu: False is the same as `device="cpu"`.
        seed: of the data order and of the samples' own random numbers. The process's global generators are left to
            you: `seed_everything(seed)` before you build the module, or the argument `seed_everything`.
        seed_everything: call `seed_everything(seed)` when the trainer is made, so that a second run in the same process
            draws the same random numbers. A module that is built before has drawn its initial weights already.
        verify_replay: run so many of the global steps twice, as a share from 0 to 1: forward and backward passes
            again from the same state, before the optimizer moves. The bits of losses and gradients are compared, so
            that errors of the hardware and nondeterministic operations are found. The run keeps its bits. It costs
            about twice this share of a step's time.
        on_replay_mismatch: what to do where they differ: `"stop"` raises `ReplayMismatchError`, `"warn"` logs a
            warning, `"record"` does neither. The last two record the number of differences as
            `"train/replay_mismatches"`.
        deterministic: let torch refuse operations that may give other bits each time, or `"warn"` of them, while the
            trainer works.
        float32_matmul_precision: how precisely products of float32 matrices are computed while the trainer works:
            `"highest"`, `"high"` (TF32 on GPUs that have it) or `"medium"`, as in
            `torch.set_float32_matmul_precision`. None keeps what is set in the process.
        compile: compile the module's models with `torch.compile`, in place; `"units"` compiles their repeated blocks
            one at a time; a dict for its options, to which `"units": True` may be added.
        activation_checkpointing: let the repeated blocks of the module keep their inputs alone, and compute their
            activations again in the backward pass: less memory, a third more computation, the same bits.
        channels_last: store convolution weights in channels-last memory format.
        fast_paths: skip the overhead of public torch calls where the result has the same bits. False makes public calls
            only, to see whether a difference comes from there. `TRAINSTACK_FAST_PATHS`, 0 or 1, wins over it.
        resume: True or `"last"` continues from the newest checkpoint and fails if there is none; `"auto"` starts afresh
            then; `"best"` continues from the best by `checkpointer_args.monitor`; a path names the checkpoint. With
            `output_dir=None`, `"auto"` continues the newest unfinished run of the same script and module class, and
            the others the newest one that has a checkpoint.
        resume_mode: what is taken from the checkpoint. `"full"`: everything, the run goes on exactly.
            `"weights_and_optimizer"`: module, optimizers, schedulers and layers; counters, order, random numbers and
            history start anew. `"weights"`: the module alone.
        strict_resume: refuse a resume where something has changed that breaks exactness: arguments, versions, hardware,
            data or code. The error names each item, and how to keep it.
        init_weights_from: a checkpoint (or a file `last` or `best`), an export, a folder of `save_pretrained`, a
            `.safetensors` file or its index, or the id of a model in the cache of `huggingface_hub`. The module starts
            from these weights as far as they fit; `trainer.warm_start_report` says how far. Not used when a checkpoint
            is resumed, unless that was written with `keep_frozen=False`.
        init_weights_strict: refuse `init_weights_from` unless everything fits.
        reset_optimizers_schedulers: on resume, take the weights but make optimizers and schedulers anew.
        checkpointer_args: of the default checkpointer.
        output_dir: where checkpoints and logs go. None: each run gets a new folder in `runs`, which the plan shows and
            `trainer.output_dir` names. A folder that holds another run is refused. At an address such as
            `s3://bucket/run` (extra `remote`, or `gcs`), the run works in a local copy, and a thread uploads it.
        local_dir: of a run with an address, where its local copy lies; by default in the cache of the user.
        overwrite: delete the run that `output_dir` holds, and begin anew. Other files there stay.
        private_files: create files that only their owner may read (mode 0600, folders 0700): checkpoints, logs,
            exports, ledgers. `"auto"`: for backends with a privacy layer.
        log_every: global steps between two log points; a float in (0, 1] is a fraction of the run's.
        writers: `"stdout"`, `"csv"`, `"jsonl"`, `"tensorboard"`, `"wandb"`, `"mlflow"`, `"trackio"`, or `Writer`
            objects.
        report: write `report.html` and `run.json` beside the logs: what the run was and did, on one page; `"auto"`
            writes them where any writer but `"stdout"` is given.
        record: what is recorded of each global step in `step_log` of the folder of the run, if the run writes any
            file: `"steps"`, its loss, gradient norm, and digests of its samples and learning rates, at log points also
            of its batch and the random states. `"full"` records at each step also digests of each gradient, weight and
            optimizer state, which reads the device in every step. `"off"` records nothing.
        progress: `"auto"`, `"rich"`, `"plain"`, `"notebook"`, `"none"` or a `ProgressDisplay` of your own.
        default_callbacks: add `callbacks.default_callbacks()` to those that the trainer is given.
        disable_tqdm: True is the same as `progress="none"`.
        collect_train_outputs: keep what `train_step` returns for `on_end_train_epoch`; `"auto"` keeps it if that
            hook takes outputs.
        handle_signals: SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C save and stop `train()` in good order.
        stop_grace_s: seconds from the signal until a scheduler kills the process; a save that takes more than half of
            them is warned about. By default what TORCH_ELASTIC_SHUTDOWN_TIMEOUT says, or 30.
        lease_timeout_s: seconds without a heartbeat after which another process may take over the directories of
            this run; at most 86400, a day. A run that died on the same host is replaced at once.
        rank_zero_timeout_s: seconds that the other ranks wait while rank 0 reads or writes files: a checkpoint, an
            export, an upload. The time limit of collectives (`timeout_s` of `ddp`) does not count this time.
        on_interrupt: what `train()` does after Ctrl-C has stopped it and everything is saved: `"raise"` a
            KeyboardInterrupt, or `"return"`, with one process; `trainer.stop_reason` is then "Ctrl-C".
        save_on_exception: write what there is after an exception, for a look at it; never resumed from by itself. A
            tuple of exception types saves after these alone.
        log_level: the least level of what the run logs to the logger "trainstack", the default checkpointer included.
            The plan and the line of each epoch are the writer `"stdout"`'s.
        stats_args: PyMarlin's spelling of `log_every`.
        writer_args: PyMarlin's spelling of `output_dir`.
        distributed_training_args: for backends that join processes.
        differential_privacy_args: for backends with a privacy layer.
        amp_backend_native: PyMarlin's flag for `amp`; must agree with `backend`.
        amp_backend_apex: PyMarlin's flag for `amp-apex`; must agree with `backend`.
        amp_level_apex: PyMarlin's name for the `opt_level` of `amp-apex`.

    Raises:
        ConfigurationError: a value is out of range, or two contradict each other.
    """

    ALIASES: ClassVar = ALIASES

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
    rank_zero_timeout_s: float = 12 * 3600.0
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
        for name, nested in _NESTED.items():  # of parsers that leave nested mappings as they are
            if isinstance(given := getattr(self, name), Mapping):
                object.__setattr__(self, name, _build(nested, given, name))
        check_arguments(self)
        object.__setattr__(self, "writers", tuple(self.writers))
        for name, path in expanded_paths(self).items():
            object.__setattr__(self, name, path)

    def global_batch_size(self, world_size: int) -> int:
        """Samples a global step over `world_size` processes."""
        each = self.per_device_train_batch_size
        return self.train_batch_size if each is None else each * world_size

    def data_sharding_of(self, stage: Stage) -> str:
        """What `data_sharding` says about the loaders of `stage`."""
        given = self.data_sharding
        return given if isinstance(given, str) else given.get(stage.name.lower(), "auto")

    @property
    def log_interval(self) -> int | float:
        """Global steps between two log points, or a fraction of the run's."""
        return self.stats_args.log_steps if self.stats_args else self.log_every

    @property
    def wants_report(self) -> bool:
        """What `report` says; by itself where any writer but `"stdout"` writes."""
        return any(writer != "stdout" for writer in self.writers) if self.report == "auto" else self.report

    @property
    def chosen_device(self) -> DeviceChoice:
        """`device`, or the CPU if `use_gpu` is False."""
        return self.device if self.use_gpu else "cpu"

    @property
    def clipping(self) -> Clipping:
        """How gradients are limited."""
        if self.clip_grad_value is not None:
            return Clipping(kind="value", limit=self.clip_grad_value)
        return Clipping(kind="norm", limit=self.max_grad_norm) if self.clip_grads else Clipping()

    @property
    def resolved_backend(self) -> str:
        """`backend`, with the process layer of this process for `"auto"`."""
        return resolve_backend(self)

    @property
    def layer_options(self) -> dict[str, dict[str, Any]]:
        """`backend_options`, with what other arguments say about a layer."""
        options = {layer: dict(chosen) for layer, chosen in self.backend_options.items()}
        known = registered_backend(self.backend) is not None  # which may hold any of them
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
        """`checkpointer_args`, with `monitor` and its mode."""
        chosen: dict[str, Any] = {}
        if self.monitor is not None:
            chosen |= {"monitor": self.monitor, "mode": self.monitor_mode}
        elif self.monitor_mode != "auto":
            chosen["mode"] = self.monitor_mode
        return dataclasses.replace(self.checkpointer_args, **chosen)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainerArguments:
        """Make arguments of plain values; nested arguments may be dicts.

        Raises:
            ConfigurationError: a key is unknown (with the one that was perhaps meant), or a value is wrong.
        """
        made: TrainerArguments = _build(cls, values, "TrainerArguments")
        return made

    def to_dict(self) -> dict[str, Any]:
        """All arguments as plain values; `from_dict` takes them back."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def to_json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a file that `from_yaml` reads, for editors and form generators.

        Objects, such as writers, have no plain value and are set in code alone.
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
        """Read arguments from a YAML file of the form that `to_dict` gives. What it holds is data, and runs no code.

        `path` may be an address, such as `s3://bucket/run/config.yaml`.

        Raises:
            ConfigurationError: the file is missing or long, is no YAML mapping in UTF-8, has anchors, tags or nested
                values that are too deep, or holds a wrong key or value. Options that can run code are refused:
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
    """YAML reads `1e-3` as a string; where a float is expected, it is one."""
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
