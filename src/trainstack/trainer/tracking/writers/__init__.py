"""Writers of metric records, on the main process only."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.writers.base import RunInfo, Writer
from trainstack.trainer.tracking.writers.console import LoggingWriter, StdoutWriter
from trainstack.trainer.tracking.writers.files import CsvWriter, JsonLinesWriter, read_history
from trainstack.trainer.tracking.writers.group import WriterGroup
from trainstack.trainer.tracking.writers.tensorboard import TensorBoardWriter
from trainstack.trainer.tracking.writers.trackers import MlflowWriter, TrackioWriter, WandbWriter


def build_writers(names_or_writers: Sequence[str | Writer], log_dir: Path) -> list[Writer]:
    """Make the writers that are named, and keep those that are given; none of them is opened.

    Names: `"stdout"` (summaries), `"logging"` (the logger "trainstack.metrics"), `"csv"` (`log_dir/metrics.csv`),
    `"jsonl"` (`log_dir/metrics.jsonl`), `"tensorboard"` (`log_dir/tensorboard`), and `"wandb"`, `"mlflow"`,
    `"trackio"`, `"comet"`, `"clearml"`, `"aim"`, `"dvclive"` and `"prometheus"` with their own defaults.

    Raises:
        ConfigurationError: a name is unknown or comes twice, or an entry is neither a name nor a writer.
        MissingExtraError: one is named whose package is not installed; the message names the extra.
    """
    check_writers(names_or_writers)
    log_dir = Path(log_dir)
    return [one if isinstance(one, Writer) else _MAKERS[one](log_dir) for one in names_or_writers]


def _make(file: str, name: str) -> Writer:
    writer: Writer = getattr(import_module(f"{__name__}.{file}"), name)()  # most runs use none of these
    return writer


_MAKERS: dict[str, Callable[[Path], Writer]] = {
    "stdout": lambda _: StdoutWriter(),
    "logging": lambda _: LoggingWriter(),
    "csv": lambda log_dir: CsvWriter(log_dir / "metrics.csv"),
    "jsonl": lambda log_dir: JsonLinesWriter(log_dir / "metrics.jsonl"),
    "tensorboard": lambda log_dir: TensorBoardWriter(log_dir / "tensorboard"),
    "wandb": lambda _: WandbWriter(),
    "mlflow": lambda _: MlflowWriter(),
    "trackio": lambda _: TrackioWriter(),
    "comet": lambda _: _make("more_trackers", "CometWriter"),
    "clearml": lambda _: _make("more_trackers", "ClearmlWriter"),
    "aim": lambda _: _make("more_trackers", "AimWriter"),
    "dvclive": lambda _: _make("more_trackers", "DvcliveWriter"),
    "prometheus": lambda _: _make("prometheus", "PrometheusWriter"),
}


def register_writer(name: str, make: Callable[[Path], Writer]) -> None:
    """Let `name` in `TrainerArguments.writers`, and so in a config file, mean the writer that `make` returns.

    Args:
        name: for the list of writers.
        make: called at the start of each run with the folder for its logs.

    Raises:
        ConfigurationError: the name is taken or empty, or `make` is not a function.

    Examples:
        >>> class Last(ts.Writer):
        ...     def write(self, records):
        ...         self.record = records[-1]
        >>> ts.register_writer("last", lambda folder: Last())
        >>> ts.Trainer(module, replace(args, writers=["last"])).train()
        >>> ts.unregister_writer("last")
    """
    if not isinstance(name, str) or not name or name in _MAKERS:
        raise ConfigurationError(f"the name of a writer {name!r} is taken or empty. Write another name.")
    if not callable(make):
        raise ConfigurationError(f"make={make!r} is not a function of the log folder that returns a Writer. Write one.")
    _MAKERS[name] = make


_OWN = frozenset(_MAKERS)


def unregister_writer(name: str) -> None:
    """Take back `register_writer`.

    Args:
        name: the name that `register_writer` got.

    Raises:
        ConfigurationError: no such writer was registered.
    """
    if name in _OWN or name not in _MAKERS:
        raise ConfigurationError(f"no writer {name!r} was registered, so none can be taken back. Write its name.")
    del _MAKERS[name]


def check_writers(names_or_writers: Sequence[str | Writer]) -> None:
    """Refuse writers that `build_writers` cannot make, before any package is imported for it.

    Raises:
        ConfigurationError: a name is unknown or comes twice, or an entry is neither a name nor a writer.
    """
    if isinstance(names_or_writers, str):
        raise ConfigurationError(
            f"the writers were given as one string, {names_or_writers!r}; write [{names_or_writers!r}]."
        )
    for entry in names_or_writers:
        if list(names_or_writers).count(entry) > 1:
            raise ConfigurationError(f"the writer {entry!r} is given twice; write it once.")
        if not isinstance(entry, Writer):
            _check_name(entry)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{name!r} is a {type(name).__name__}, not a writer. Give an instance of Writer or one of "
            f"{', '.join(map(repr, _MAKERS))}."
        )
    if name in _MAKERS:
        return
    if name == "aml":
        raise ConfigurationError(
            "the writer 'aml' (Azure ML) is not offered. Write 'mlflow', with MLFLOW_TRACKING_URI set to that of the "
            "Azure ML workspace, or remove it."
        )
    close = difflib.get_close_matches(name.lower(), _MAKERS, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise ConfigurationError(f"no writer is called {name!r}. {hint}Known: {', '.join(map(repr, _MAKERS))}.")


__all__ = [
    "CsvWriter",
    "JsonLinesWriter",
    "LoggingWriter",
    "MlflowWriter",
    "RunInfo",
    "StdoutWriter",
    "TensorBoardWriter",
    "TrackioWriter",
    "WandbWriter",
    "Writer",
    "WriterGroup",
    "build_writers",
    "check_writers",
    "read_history",
    "register_writer",
    "unregister_writer",
]
