"""`DirectoryOwner` ensures that only one run writes into its directories."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainstack._files import real_path
from trainstack.checkpointing import DefaultCheckpointer, Lease
from trainstack.trainer.arguments import WITHOUT_FILES
from trainstack.trainer.context import RunContext
from trainstack.trainer.tracking.writers import LoggingWriter, StdoutWriter


class DirectoryOwner:
    """Acquires and releases the lease of a run's directories.

    Args:
        context: the context of the trainer. Its `lease` is set on the main process.
        run_on_rank_zero: calls a function on the main process, and reports its failure to the others.

    Attributes:
        held: whether the lease is held; the same on all processes.
        is_interrupted: called while the main process waits for the end of another lease.
    """

    held: bool

    def __init__(self, context: RunContext, run_on_rank_zero: Callable[[Callable[[], None], str], Any]) -> None:
        self._context, self._run_on_rank_zero = context, run_on_rank_zero
        self.held = False
        self.is_interrupted: Callable[[], bool] = lambda: False

    def take(self) -> None:
        """Acquire the lease, if the run writes any file. All processes call this together.

        Raises:
            LeaseError: another process owns one of them.
        """
        if self.held or not self._is_needed:
            return
        self._run_on_rank_zero(self.acquire, "taking the directory of the run")
        self.held = True

    def release(self) -> None:
        """Release the lease. Each process calls this separately."""
        self.held = False
        lease, self._context.lease = self._context.lease, None
        mirror = self._context.directory.mirror
        if isinstance(self._context.checkpointer, DefaultCheckpointer):
            self._context.checkpointer.lease = None
        try:
            if mirror is not None:
                mirror.close()
        finally:
            if lease is not None:
                lease.release()

    def close(self) -> None:
        """`release`, for `contextlib.closing`."""
        self.release()

    @contextmanager
    def held_for_writing(self) -> Iterator[None]:
        """A block in which the lease is held. Outside of `train()` it is released after the block."""
        if self.held:
            yield
            return
        self.take()
        try:
            yield
        finally:
            self.release()

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when another process has acquired the lease."""
        mirror = self._context.directory.mirror
        if self._context.lease is not None:
            self._context.lease.watch(wake)
        if mirror is not None:
            mirror.watch(wake)

    def check(self) -> None:
        """On the main process, raise if another process has acquired the lease."""
        mirror = self._context.directory.mirror
        if self._context.lease is not None:
            self._context.lease.check()
        if mirror is not None:
            mirror.check()

    @property
    def _is_needed(self) -> bool:
        return not self._context.args.fast_dev_run and writes_files(self._context)

    def acquire(self) -> None:
        """`take` on the main process only. The others must call `take` afterwards."""
        context, args = self._context, self._context.args
        if context.lease is not None or not self._is_needed:
            return
        directories = _directories(context)
        if args.output_dir is not None:
            _warn_of_array_task(args.output_dir, os.environ, context.log.warning)
        mirror = context.directory.mirror
        if mirror is not None:  # before the local folder, which the mirror may replace
            mirror.take(args.lease_timeout_s, self.is_interrupted)
        try:
            context.directory.protect(args)
            lease = Lease.acquire(
                directories, timeout_s=args.lease_timeout_s, say=context.log.warning, is_interrupted=self.is_interrupted
            )
        except BaseException:
            if mirror is not None:
                mirror.close()
            raise
        if mirror is not None and context.directory.is_claimed:
            mirror.start()
        context.lease = lease
        if isinstance(context.checkpointer, DefaultCheckpointer):
            context.checkpointer.lease = lease


def writes_files(context: RunContext) -> bool:
    """Whether a training writes files into the folder of its run."""
    args, checkpointer = context.args, context.checkpointer
    saves = isinstance(checkpointer, DefaultCheckpointer) and checkpointer.args.checkpoint
    writers = [one for one in args.writers if not isinstance(one, StdoutWriter | LoggingWriter)]
    logs = args.wants_report or any(one not in WITHOUT_FILES for one in writers)
    by_callback = any(getattr(callback, "writes_files", False) for callback in context.events.callbacks.values())
    return saves or logs or by_callback or args.record == "full" or context.stack.is_private


def _directories(context: RunContext) -> list[Path]:
    """`output_dir`, a separate folder of logs, and last the folder of checkpoints.

    The folder of checkpoints has a lease even inside `output_dir`, because another run may use it as its `save_dir`.
    Paths are not resolved, so that a link that changes during the training is detected.
    """
    output_dir, checkpointer = context.output_dir, context.checkpointer
    found = [output_dir]
    if context.directory.logs_elsewhere:
        found.append(context.directory.log_dir)
    if isinstance(checkpointer, DefaultCheckpointer) and checkpointer.args.checkpoint:
        found.append(checkpointer.save_dir)
    return list({real_path(one): one for one in reversed(found)}.values())[::-1]


def _warn_of_array_task(
    output_dir: str | os.PathLike[str], environ: Mapping[str, str], warn: Callable[[str], None]
) -> None:
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    path = os.path.abspath(output_dir)
    if task and not re.search(rf"(?<![0-9]){re.escape(task)}(?![0-9])", path):
        warn(
            f"this is task {task} of a job array, and output_dir={os.fspath(output_dir)!r} does not depend on it, so "
            "all tasks share one directory. A second task at the same time is refused, and a later one resumes from "
            "the checkpoints of the first. Write "
            "output_dir=f\"runs/{os.environ['SLURM_ARRAY_TASK_ID']}\"."
        )
