"""`DefaultCheckpointerArguments`, the options of the default checkpointer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
    """A metric, and whether low or high values of it are good. Make one with `Monitor.of`."""

    name: str
    mode: Direction

    @classmethod
    def of(cls, name: str, mode: str) -> Monitor:
        """Make one; `"auto"` reads the direction off the metric's name.

        Raises:
            ConfigurationError: the mode is none, or the name does not tell.
        """
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"mode={mode!r}: no such mode. Write 'min', 'max' or 'auto'.")
        direction = _direction_of(name) if mode == "auto" else mode
        if direction is None:
            raise ConfigurationError(
                f"monitor={name!r}: its name does not tell whether a low or a high value is good. Write mode='min' or "
                "mode='max' as well."
            )
        return cls(name=name, mode="min" if direction == "min" else "max")

    def value_of(self, info: CheckpointInfo) -> float | None:
        """The monitored value of a checkpoint; None if it has none, or one that is inf or nan and so never wins."""
        value = info.metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None

    def rank(self, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those that have a value, the best first; of equal ones the older first."""
        sign = 1 if self.mode == "min" else -1
        valued = [(sign * value, info.sequence, info) for info in infos if (value := self.value_of(info)) is not None]
        return [info for *_, info in sorted(valued, key=lambda entry: entry[:2])]


def _direction_of(name: str) -> Direction | None:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if {"neg", "negative", "inv", "inverse"} & set(words):
        return None
    if any("loss" in word for word in words):  # the loss of an accuracy is a loss
        return "min"
    found: list[Direction] = [d for d in ("min", "max") if any(re.fullmatch(_NAMES[d], word) for word in words)]
    return found[0] if len(found) == 1 else None


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@explain_frozen
@dataclass(frozen=True, kw_only=True)
class DefaultCheckpointerArguments(metaclass=SuggestsNames):
    """When, where and under which names to save, and where to load from. `""` means not set.

    Attributes:
        checkpoint: False saves nothing at all.
        delete_existing_checkpoints: before the first save, delete the checkpoints of this
            `file_prefix` from `save_dir`, and nothing else.
        period: PyMarlin's name of `every_n_epochs`.
        save_dir: where checkpoints go; by default `checkpoints` below the directory that is current
            when it is first needed.
        model_state_save_dir: where model exports go; by default `save_dir`.
        load_dir: where a run begins: with the newest checkpoint from here, when the training does not say what to
            resume, or when it says True, "auto", "last" or "best" and the run has saved nothing in `save_dir` yet.
        load_filename: load this one from `load_dir`; a plain name, or an absolute path.
        file_prefix: what the names of checkpoints begin with.
        file_ext: what they end with, without a dot; by default nothing, as they are directories.
        log_level: the least level of what the checkpointer logs, to the logger "trainstack"; None for the `log_level`
            of the run, or "INFO" without one.
        async_save: write in the background. Training waits only while the state is copied into memory of the host,
            which takes once more the size of a checkpoint.
        sharded: where a layer such as `fsdp` divides the state, let each rank write its own part into the checkpoint,
            and read what it needs of one. All ranks have to see `save_dir`. Under other layers nothing changes.
        every_n_steps: also save inside an epoch, whenever the global step is a multiple of this; a float in (0, 1] is
            a fraction of all global steps of the run, rounded up.
        every_n_seconds: also save inside an epoch, at the first step so many seconds after the last of these saves.
        every_n_epochs: save at the end of an epoch whose index, counted from 0, is a multiple of this; None is 1. The
            end of the run is saved in any case.
        keep_last: delete older checkpoints of this run after a save, but for so many of the newest; None keeps all.
        keep_best: of those, keep so many of the best as well. Means nothing where all are kept.
        verify: before an older checkpoint is deleted, read those from the disk that are kept in its place, each once
            in a process, and compare the hashes (`"read_back"`); or compare sizes only (`"none"`).
        monitor: the metric that says which is the best.
        mode: `"min"` if low values of it are good, `"max"` if high ones are; `"auto"` reads that off its name.
        keep_frozen: False leaves out parameters that are frozen and have the values that the run began with, such as
            the base of LoRA adapters, from checkpoints and from exports at the end of training. The manifest has their
            names and digests. To resume, build the module with the same weights, or name them in `init_weights_from`.
        sign_key: the PEM file of an Ed25519 key that signs each checkpoint and export of the run. The main process
            reads each once more for it. Needs `pip install trainstack[sign]`.
        scrub_every_s: compare each stored checkpoint with its hashes again when that was last done so many seconds
            ago. After a save a thread reads the one that is due for the longest time, at most 100 MB a second. A
            damaged one is a warning, and does not count as kept. None for never.

    Raises:
        ConfigurationError: a value is wrong, or two contradict each other.
    """

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
        """`every_n_epochs`, or what `period` says instead."""
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
                why = f"period={self.period} is another name of it and says something else"
                raise _wrong("every_n_epochs", self.every_n_epochs, why, "one of the two")
        steps = self.every_n_steps
        if isinstance(steps, float) and not 0 < steps <= 1:
            raise _wrong("every_n_steps", steps, "a fraction of the run lies between 0 and 1", "1, 2, ... or 0.25")
        if steps is not None and not isinstance(steps, float):
            _check_count("every_n_steps", steps)
        for name in ("every_n_seconds", "scrub_every_s"):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and 0 < seconds < math.inf):
                raise _wrong(name, seconds, "it is no number of seconds above 0", "a number such as 1800")

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
            why, instead = "load_dir, where it should lie, is not set", "load_dir as well, or an absolute path"
            raise _wrong("load_filename", self.load_filename, why, instead)


def has_separator(name: str) -> bool:
    """Whether `name` is more than the name of one file."""
    return any(mark in name for mark in "/\\\0")


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"it is not a whole number above {least - 1}", f"{least}, {least + 1}, ...")


def _wrong(name: str, value: Any, why: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r}: {why}. Write {instead}.")
