"""`follow(make_module, run)` replays a run while another process trains it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainstack.checkpointing import CheckpointInfo, lease_file, list_checkpoints, verify_checkpoint
from trainstack.errors import CheckpointDamagedError, CheckpointError, ConfigurationError
from trainstack.replaying.recorded import RecordedRun, has_steps, step_of
from trainstack.replaying.replays import print_report
from trainstack.replaying.report import ReplayReport
from trainstack.replaying.task import ReplayTask
from trainstack.trainer import Callback, ModuleInterface, TrainerArguments


def follow(
    make_module: Callable[[], ModuleInterface | tuple[ModuleInterface, Sequence[Callback]]],
    run: str | os.PathLike[str],
    *,
    args: TrainerArguments | None = None,
    interval_s: float = 5.0,
    say: Callable[[ReplayReport], None] = print_report,
    **options: Any,
) -> ReplayReport | None:
    """Replay the steps between successive checkpoints of a running training as they appear, until it ends.

    The newest checkpoint is copied to a temporary folder before its use, because the run deletes old ones. So no step
    is omitted, and slow replays end later than the run.

    Args:
        make_module: see `replay`.
        run: the folder of a run that a process of this or another machine trains, or that has ended.
        args: see `replay`.
        interval_s: seconds between two checks of the folder.
        say: called with each report; by default it prints them.
        **options: `nproc`, `workers`, `tolerance`, `timeout_s` of `replay`.

    Returns:
        The first report with a difference or damage, or else the last one; None if the run has ended without a step.

    Raises:
        ConfigurationError, LaunchError: see `replay`.
    """
    if not interval_s > 0:
        raise ConfigurationError(f"interval_s={interval_s!r}: write a number of seconds above 0.")
    held = Path(tempfile.mkdtemp(prefix="trainstack-follow-"))
    try:
        return _Follower(Path(run), held, lambda: ReplayTask.of(make_module, Path(run), args, **options), say).run(
            interval_s
        )
    finally:
        shutil.rmtree(held, ignore_errors=True)


class _Follower:
    """Replays of one run, each from where the last one ended."""

    def __init__(
        self, folder: Path, held: Path, read: Callable[[], ReplayTask], say: Callable[[ReplayReport], None]
    ) -> None:
        self._folder, self._held, self._read, self._say = folder, held, read, say
        self._position = 0
        self._life = _Life(folder)

    def run(self, interval_s: float) -> ReplayReport | None:
        """Replay until the run ends or differs."""
        last: ReplayReport | None = None
        while True:
            has_ended = self._life.has_ended()  # before the log is read, so that its last steps are not missed
            report = self._replay_new_steps(has_ended)
            if report is not None:
                self._say(report)
                last = report
                if not report.same:
                    return last
            elif has_ended:
                return last
            else:
                time.sleep(interval_s)

    def _replay_new_steps(self, has_ended: bool) -> ReplayReport | None:
        """Replay up to the newest checkpoint, or to the last step of a run that has ended; None without new steps."""
        if not has_ended and not has_steps(self._folder):
            return None  # the first steps are not written yet
        task = self._read()
        whole = task.recorded.span
        newest = self._hold_newest(task.recorded)
        end = whole.last if has_ended else 0 if newest is None else min(newest.global_step or 0, whole.last)
        first = max(self._position + 1, whole.first)
        if end < first:
            return None
        held = list_checkpoints(self._held)
        task = dataclasses.replace(
            task, recorded=dataclasses.replace(task.recorded, checkpoints=tuple(sorted(held, key=step_of)))
        )
        report = task.replay(task.span(first, end), lambda _: None)
        self._position = end
        for info in held:
            if step_of(info) < end and info is not held[-1]:
                shutil.rmtree(info.path, ignore_errors=True)
        return report

    def _hold_newest(self, recorded: RecordedRun) -> CheckpointInfo | None:
        """Copy the newest checkpoint; None if there is none, or if the run has deleted it."""
        for info in reversed(recorded.checkpoints):
            copy = self._held / info.name
            if copy.is_dir() or self._copy(info.path, copy):
                return info
        return None

    @staticmethod
    def _copy(path: Path, copy: Path) -> bool:
        """Copy `path`. False if it was deleted during the copy. A damaged checkpoint is copied unchanged."""
        try:
            shutil.copytree(path, copy)
            verify_checkpoint(copy)
        except (OSError, shutil.Error, CheckpointError):
            try:
                verify_checkpoint(path)
            except CheckpointDamagedError:
                return copy.is_dir()  # the replay reports the damage
            except (OSError, CheckpointError):
                pass
            shutil.rmtree(copy, ignore_errors=True)
            return False
        return True


class _Life:
    """Whether a process still trains a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._beat: tuple[int, int] | None = None
        self._seen_at = time.monotonic()

    def has_ended(self) -> bool:
        """Whether the lease of the folder was released, or its owner has ended or been silent for too long."""
        try:
            seen = lease_file.look(self._folder)
        except OSError:
            return False
        if seen is None or seen.record is None or seen.is_free:
            return True
        beat = (seen.counter, seen.record.beat)
        if beat != self._beat:
            self._beat, self._seen_at = beat, time.monotonic()
        return time.monotonic() - self._seen_at > seen.record.timeout_s
