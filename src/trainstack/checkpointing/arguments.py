"""`DefaultCheckpointerArguments`, the options of the default checkpointer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainstack._files import expand_path
from trainstack._keywords import SuggestsNames, explain_frozen
from trainstack.errors import ConfigurationError

if TYPE_CHECKING:
    from trainstack.checkpointing.directory import CheckpointInfo


Direction = Literal["min", "max"]

DEFAULT_MONITOR = "val/loss"

# Long, unambiguous names match as substrings; short ones only as whole words, optionally followed by a number.
_NAMES: dict[Direction, str] = {
    "min": ".*(perplexity|error|entropy|distance).*"
    "|(ppl|err|wer|cer|ter|eer|mae|mse|rmse|mape|nll|bpc|bpb|ece|fid)[0-9]*",
    "max": ".*(accuracy|precision|recall|rouge|bleu|ndcg|jaccard).*"
    "|(acc|auc|auroc|auprc|f1|f1score|m?ap|m?iou|dice|mrr|mcc|kappa|r2|chrf|psnr|ssim)[0-9]*",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """A metric, and whether low or high values of it are better. Make one with `Monitor.of`."""

    name: str
    mode: Direction

    @classmethod
    def of(cls, name: str, mode: str) -> Monitor:
        """Make a monitor; `"auto"` derives the direction from the name of the metric.

        Raises:
            ConfigurationError: there is no such mode, or the name does not determine the direction.
        """
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"mode={mode!r}: no such mode. Write 'min', 'max' or 'auto'.")
        direction = _direction_of(name) if mode == "auto" else mode
        if direction is None:
            raise ConfigurationError(
                f"monitor={name!r}: its name does not show whether a low or a high value is good. Write mode='min' or "
                "mode='max' too."
            )
        return cls(name=name, mode="min" if direction == "min" else "max")

    def value_of(self, info: CheckpointInfo) -> float | None:
        """The monitored value of a checkpoint; None if it has none, or if it is inf or nan, which can never be the
        best.
        """
        value = info.metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None

    def rank(self, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """The checkpoints with a value, best first; of equal values the older one first."""
        sign = 1 if self.mode == "min" else -1
        valued = [(sign * value, info.sequence, info) for info in infos if (value := self.value_of(info)) is not None]
        return [info for *_, info in sorted(valued, key=lambda entry: entry[:2])]


def _direction_of(name: str) -> Direction | None:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if {"neg", "negative", "inv", "inverse"} & set(words):
        return None
    if any("loss" in word for word in words):  # first, because "accuracy_loss" is a loss
        return "min"
    found: list[Direction] = [d for d in ("min", "max") if any(re.fullmatch(_NAMES[d], word) for word in words)]
    return found[0] if len(found) == 1 else None


_OTHER_NAMES = {
    **dict.fromkeys(("save_top_k", "save_best", "save_best_only", "n_saved"), "keep_best, a number such as 2"),
    **dict.fromkeys(("save_last", "max_to_keep", "save_total_limit"), "keep_last, a number such as 2"),
    "keep": "keep_last",
    **dict.fromkeys(("dirpath", "dirname", "directory", "output_dir"), "save_dir"),
    **dict.fromkeys(("filename", "filename_prefix", "prefix"), "file_prefix"),
    **dict.fromkeys(("every_n_train_steps", "save_steps", "save_every"), "every_n_steps"),
    **dict.fromkeys(("every_n_epoch", "every_n_val_epochs", "save_freq"), "every_n_epochs"),
    "train_time_interval": "every_n_seconds",
    "monitor_mode": "mode",
    "save_weights_only": "trainer.export(path) after the training",
    "enable_checkpointing": "checkpoint",
    "verbose": "log_level",
}
"""Names of Lightning, Keras, Ignite and transformers: the end of a sentence that begins "Write"."""

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@explain_frozen
@dataclass(frozen=True, kw_only=True)
class DefaultCheckpointerArguments(metaclass=SuggestsNames):
    """When, where and under which names checkpoints are saved, and from where they are loaded. `""` means not set.

    Attributes:
        checkpoint: False saves nothing at all.
        delete_existing_checkpoints: before the first save, delete the checkpoints with this `file_prefix` from
            `save_dir`, and nothing else.
        period: PyMarlin's name of `every_n_epochs`.
        save_dir: the directory of checkpoints; by default `checkpoints` in the current directory at the first use.
        model_state_save_dir: the directory of model exports; by default `save_dir`.
        load_dir: a run begins with the newest checkpoint of this directory if the training does not name a checkpoint
            to resume from, or if it requests True, "auto", "last" or "best" and the run has saved nothing in `save_dir`
            yet.
        load_filename: load this checkpoint from `load_dir`; a plain name, or an absolute path.
        file_prefix: the beginning of the names of checkpoints.
        file_ext: the end of the names, without a dot; empty by default, because checkpoints are directories.
        log_level: the lowest level of the checkpointer's messages to the logger "trainstack"; None for the `log_level`
            of the run, or "INFO" without one.
        async_save: write in the background. Training waits only while the state is copied to host memory, which needs
            the size of a checkpoint in addition.
        sharded: if a layer such as `fsdp` shards the state, each rank writes its part into the checkpoint, and reads
            only the parts that it needs. All ranks need access to `save_dir`. Under other layers it has no effect.
        every_n_steps: also save inside an epoch, each time the global step is a multiple of this number; a float in (0,
            1] is a fraction of all global steps of the run, rounded up.
        every_n_seconds: also save inside an epoch, at the first step that ends this many seconds after the last such
            save.
        every_n_epochs: save at the end of an epoch whose index, counted from 0, is a multiple of this number; None is
            1. The end of the run is always saved.
        keep_last: the number of newest checkpoints of this run to keep; older ones are deleted after a save. None keeps
            all.
        keep_best: the number of best checkpoints to keep in addition. It has no effect if all are kept.
        verify: before an older checkpoint is deleted, read the ones that are kept from the disk, each once in a
            process, and compare the hashes (`"read_back"`); or compare sizes only (`"none"`).
        monitor: the metric that determines the best checkpoint.
        mode: `"min"` if low values of it are good, `"max"` if high ones are; `"auto"` derives that from its name.
        keep_frozen: False omits frozen parameters with their initial values, such as the base of LoRA adapters, from
            checkpoints and from exports at the end of training. The manifest has their names and digests. To resume,
            build the module with the same weights, or name them in `init_weights_from`.
        sign_key: the PEM file of an Ed25519 key that signs each checkpoint and export of the run. The main process
            reads each of them once more for it. Needs `pip install trainstack[sign]`.
        scrub_every_s: compare each stored checkpoint with its hashes again after this many seconds. After a save a
            thread reads the one that is overdue longest, at most 100 MB in a second. A damaged checkpoint causes a
            warning and does not count as kept. None for never.

    Raises:
        ConfigurationError: a value is wrong, or two contradict each other.

    Examples:
        >>> saving = ts.DefaultCheckpointerArguments(
        ...     every_n_steps=4, keep_last=3, keep_best=1, monitor="val/loss"
        ... )
        >>> ts.Trainer(module, replace(args, checkpointer_args=saving)).train()
    """

    ALIASES: ClassVar[dict[str, str]] = _OTHER_NAMES

    checkpoint: bool = True
    delete_existing_checkpoints: bool = False
    period: int = 1
    save_dir: str | None = None
    model_state_save_dir: str | None = None
    load_dir: str | None = None
    load_filename: str | None = None
    file_prefix: str = "checkpoint"
    file_ext: str = ""
    log_level: str | None = None
    async_save: bool = False
    sharded: bool = False
    every_n_steps: int | float | None = None
    every_n_seconds: float | None = None
    every_n_epochs: int | None = None
    keep_last: int | None = 2
    keep_best: int = 1
    verify: Literal["read_back", "none"] = "read_back"
    monitor: str = DEFAULT_MONITOR
    mode: Literal["auto", "min", "max"] = "auto"
    keep_frozen: bool = True
    sign_key: str | None = None
    scrub_every_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint", "delete_existing_checkpoints", "async_save", "sharded", "keep_frozen"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "it is not a bool", "True or False")
        self._check_schedule()
        self._check_retention()
        for name in ("save_dir", "model_state_save_dir", "load_dir", "load_filename", "sign_key"):
            value: Any = getattr(self, name)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise _wrong(name, value, "it is not a path", "a string, or None")
            object.__setattr__(self, name, value and expand_path(name, value))
        self._check_names()
        self._check_load()
        if self.log_level is not None and str(self.log_level).upper() not in _LEVELS:
            raise _wrong("log_level", self.log_level, "no such level", "one of " + ", ".join(_LEVELS))

    @property
    def epochs_between(self) -> int:
        """`every_n_epochs`, or `period` if that is not set."""
        return self.every_n_epochs or self.period

    @property
    def monitored(self) -> Monitor:
        """`monitor` with its direction."""
        return Monitor.of(self.monitor, self.mode)

    def _check_schedule(self) -> None:
        _check_count("period", self.period)
        if self.every_n_epochs is not None:
            _check_count("every_n_epochs", self.every_n_epochs)
            if self.period not in (1, self.every_n_epochs):
                why = f"period={self.period} is another name of it with another value"
                raise _wrong("every_n_epochs", self.every_n_epochs, why, "one of the two")
        steps = self.every_n_steps
        if isinstance(steps, float) and not 0 < steps <= 1:
            raise _wrong("every_n_steps", steps, "a fraction of the run is between 0 and 1", "1, 2, ... or 0.25")
        if steps is not None and not isinstance(steps, float):
            _check_count("every_n_steps", steps)
        for name in ("every_n_seconds", "scrub_every_s"):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and 0 < seconds < math.inf):
                raise _wrong(name, seconds, "it is not a number of seconds above 0", "a number such as 1800")

    def _check_retention(self) -> None:
        if self.keep_last is not None:
            _check_count("keep_last", self.keep_last)
        _check_count("keep_best", self.keep_best, least=0)
        if self.keep_last is None and self.keep_best > 1:
            instead = "keep_last=1 as well to keep the newest and the best only"
            raise _wrong("keep_best", self.keep_best, "without keep_last every checkpoint is kept", instead)
        if self.verify not in ("read_back", "none"):
            raise _wrong("verify", self.verify, "no such way", "'read_back' or 'none'")
        if not isinstance(self.monitor, str) or not self.monitor:
            raise _wrong("monitor", self.monitor, "it is not the name of a metric", "a name such as 'val/loss'")
        Monitor.of(self.monitor, self.mode)

    def _check_names(self) -> None:
        for name in ("file_prefix", "file_ext"):
            value = getattr(self, name)
            if not isinstance(value, str) or has_separator(value) or value.startswith("."):
                why = "it must be text without a path separator and without a leading dot"
                raise _wrong(name, value, why, "a plain name such as 'checkpoint', and set the directory by save_dir")
        if not self.file_prefix:
            raise _wrong("file_prefix", self.file_prefix, "it is empty", "a name such as 'checkpoint'")

    def _check_load(self) -> None:
        if not self.load_filename or os.path.isabs(self.load_filename):
            return
        if has_separator(os.fspath(self.load_filename)) or self.load_filename in (".", ".."):
            instead = "the directory in load_dir and the name in load_filename"
            raise _wrong("load_filename", self.load_filename, "a relative name may not have a path separator", instead)
        if not self.load_dir:
            why, instead = "load_dir, where it should be, is not set", "load_dir too, or an absolute path"
            raise _wrong("load_filename", self.load_filename, why, instead)


def has_separator(name: str) -> bool:
    """Whether `name` contains a path separator or a null byte."""
    return any(mark in name for mark in "/\\\0")


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"it is not a whole number above {least - 1}", f"{least}, {least + 1}, ...")


def _wrong(name: str, value: Any, why: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r}: {why}. Write {instead}.")
