"""`RunFiles` finds the files of runs in the folders of a run, and deletes those of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

from trainstack._files import atomic_write, is_inside, read_small
from trainstack._yaml import parse_yaml, write_yaml
from trainstack.checkpointing import AbstractCheckpointer, CheckpointInfo, DefaultCheckpointer
from trainstack.checkpointing.directory import read_entry
from trainstack.checkpointing.filesystem import remove_file, remove_tree
from trainstack.errors import ConfigurationError
from trainstack.step_log.format import FOLDER as STEP_LOGS
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.plain_arguments import PlainInputs, is_plain
from trainstack.trainer.run_record import FILE_NAME, RunRecord, read_record
from trainstack.trainer.tracking.resume_log import FILE_NAME as RESUMES
from trainstack.trainer.tracking.writers.tensorboard import event_files

RUN_JSON = "run.json"
CONFIG = "config.yaml"
_WITHOUT_MODULE = "# The arguments of the module are not in this file: --module.NAME VALUE.\n"
_CONFIG_BEGINS = "# Written by trainstack: the arguments of the newest start of this run.\n"

LOG_FILES = (
    "metrics.csv",
    "metrics.jsonl",
    RUN_JSON,
    "report.html",
    "privacy_statement.txt",
    "privacy_statement.json",
    "metrics.prom",
    *(f"{name}-run.json" for name in ("aim", "clearml", "comet", "dvclive", "mlflow", "trackio", "wandb")),
)
"""Files of writers and the report in the folder of the logs. A privacy ledger is never deleted."""


class RunFiles:
    """The files of runs in the folders of one run.

    Inside the folder of the run every file of a run counts. Elsewhere several runs may save, so only checkpoints and
    exports with the id of a run belong to that run. A separate folder of logs holds the logs and the record of one run.

    Args:
        folder: folder of the run.
        log_dir: folder of writers and the report.
        checkpointer: checkpointer of the run.
    """

    def __init__(self, folder: Path, log_dir: Path, checkpointer: AbstractCheckpointer) -> None:
        self._folder, self._log_dir = folder, log_dir
        self._checkpointer = checkpointer if isinstance(checkpointer, DefaultCheckpointer) else None

    @property
    def logs_elsewhere(self) -> bool:
        """Whether logs are written outside of the folder of the run."""
        return not is_inside(self._log_dir, self._folder)

    def write_record(self, record: RunRecord) -> None:
        """Write `record` into the folder of the run, and before that into a separate folder of logs."""
        if self.logs_elsewhere:
            record.write(self._log_dir)
        record.write(self._folder)

    def write_config(self, args: TrainerArguments, given: Mapping[str, Any], set_in_code: Sequence[str]) -> None:
        """Write the arguments as a file for `trainstack train --config`, unless a user's file has this name.

        Values that can only be set in code are omitted, and a comment lists them.

        Args:
            args: the arguments.
            given: further keys: the target and the parameters of the module.
            set_in_code: names of arguments of the trainer that were set in code.
        """
        path = self._folder / CONFIG
        if path.exists() and not self._has_own_config():
            return
        plain, left_out = dict(given), list(set_in_code)
        for name, value in args.to_dict().items():
            if _is_readable(type(args), name, value):
                plain[name] = value
            else:
                left_out.append(name)
        comment = f"# Set in code, and omitted here: {', '.join(left_out)}.\n" if left_out else ""
        start, module = ("", "") if "target" in given else (" FILE.py:MODULE", _WITHOUT_MODULE)
        how = f"# Start the run again: trainstack train{start} --config {CONFIG} --output_dir NEW_FOLDER\n{module}"
        atomic_write(path, (_CONFIG_BEGINS + how + comment + write_yaml(plain)).encode())

    def _has_own_config(self) -> bool:
        try:
            return read_small(self._folder / CONFIG).startswith(_CONFIG_BEGINS.encode())
        except OSError:
            return False

    def find(self, *, with_checkpoints: bool = True) -> list[Path]:
        """Return files of an earlier run in the folder of the run, its checkpoints and exports last."""
        logs = [] if self.logs_elsewhere else self._find_logs()
        found = [path for path in [self._folder / FILE_NAME] if path.is_file()] + logs + self._find_step_logs()
        if with_checkpoints and self._checkpointer is not None and self._checkpointer.args.checkpoint:
            found += self._checkpointer.written_by_runs(self._folder)
        return found

    def find_log_of_others(self, run_id: str | None) -> Path | None:
        """Return a log in a folder outside that of the run, if it does not belong to the run `run_id`."""
        if not self.logs_elsewhere:
            return None
        record = read_record(self._log_dir)
        if record is not None and run_id and record.run_id == run_id:
            return None
        return next(iter(self._find_logs()), None)

    def delete(self, run_id: str | None) -> None:
        """Delete the files of the run `run_id`; the record last, so that an interrupted deletion is detected."""
        if self._checkpointer is not None:
            self._checkpointer.delete_run(self._folder, run_id)
        logs = [*event_files(self._log_dir / "tensorboard"), *(self._log_dir / name for name in LOG_FILES)]
        for path in [*logs, self._folder / RESUMES]:
            if path.is_file():
                remove_file(path)
        for path in self._find_step_logs():
            remove_file(path)
        if self._has_own_config():
            remove_file(self._folder / CONFIG)
        best = read_entry(self._folder / "best")  # written by the callback BestCheckpoint
        if isinstance(best, CheckpointInfo) and run_id is not None and best.run_id == run_id:
            remove_tree(best.path)
        for folder in dict.fromkeys((self._log_dir, self._folder)):
            if (folder / FILE_NAME).is_file():
                remove_file(folder / FILE_NAME)

    def copy_logs(self, target: Path) -> None:
        """Copy the files of writers and the report into the folder `target`."""
        for path in [*self._find_logs(), self._log_dir / RUN_JSON]:
            if path.is_file():
                copy = target / path.relative_to(self._log_dir)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copyfile(path, copy)

    def _find_step_logs(self) -> list[Path]:
        """Return the step logs of all ranks, including those that a later start has renamed."""
        return sorted(path for path in (self._folder / STEP_LOGS).glob("rank-*.*") if path.is_file())

    def _find_logs(self) -> list[Path]:
        names = [name for name in LOG_FILES if name != RUN_JSON]  # a start that failed early also writes it
        logs = [self._log_dir / name for name in names]
        return [path for path in logs if path.is_file()] + event_files(self._log_dir / "tensorboard")


def _is_simple(value: Any) -> bool:
    """Whether YAML certainly has one text for `value`. A fast check, because writing and reading one takes 0.2 ms."""
    if isinstance(value, dict):
        return all(_is_simple(item) for item in (*value, *value.values()))
    is_text = isinstance(value, str) and value.isascii() and value.isprintable()
    # 2**53: larger integers lose digits as floats. bool is a subclass of int.
    return is_text or value is None or (isinstance(value, int) and abs(value) < 2**53)


def _is_readable(cls: type, name: str, value: Any) -> bool:
    """Whether a file may set the argument `name` to `value`, and its text is read as `value` again."""
    if not is_plain(value):
        return False
    try:
        read: Any = {name: value} if _is_simple(value) else parse_yaml(write_yaml({name: value}), CONFIG)
        PlainInputs(cls).add_mapping(read, CONFIG)
    except ConfigurationError:
        return False
    return repr(read[name]) == repr(value)  # compared as text, because nan is not equal to nan
