"""`Reporter` passes measurements to history, writers and progress at log points."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainstack._files import atomic_write, make_directories
from trainstack.backends import Workload
from trainstack.backends.base import Window
from trainstack.checkpointing.arguments import Monitor
from trainstack.checkpointing.verification import pointer_of, rule_in
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import to_jsonable
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.reporting.clipping_check import ClippingCheck
from trainstack.trainer.reporting.loss_meter import LossMeter, learning_rates
from trainstack.trainer.reporting.setup_rows import setup_rows
from trainstack.trainer.run_directory import shortest
from trainstack.trainer.schedulers.stepping import Schedules
from trainstack.trainer.tracking.epoch_lines import EpochLine
from trainstack.trainer.tracking.history import Record, RunHistory
from trainstack.trainer.tracking.progress import NoProgress, ProgressDisplay, build_progress, format_plan_table
from trainstack.trainer.tracking.provenance import Provenance
from trainstack.trainer.tracking.writers import RunInfo, WriterGroup, build_writers

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import PrivacyStatement
    from trainstack.trainer.reporting.report.recorder import RunRecorder

_MANY_STEPS = 1000
"""Global steps an epoch, from which on one sample an update is worth a warning."""
_FIRST_COLUMNS = ("train/loss_epoch", "val/loss")


class _BestSoFar:
    """The best value of the monitored metric, val/loss by default, and its epoch."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.value, self.epoch = math.nan, -1
        self._seen = 0

    @property
    def words(self) -> str | None:
        """For people; None before there is a value."""
        return None if self.epoch < 0 else f"{self.monitor.name} {self.value:.4g} in epoch {self.epoch + 1}"

    def column(self, history: RunHistory, epoch: int) -> str | None:
        """The column of the epoch's line whose value is the best so far; None where it is not."""
        name = self.monitor.name
        self.update(history)
        is_best = self.epoch == epoch and history.get_latest_metric(name) == self.value
        return name.removesuffix("_epoch") if is_best else None

    def update(self, history: RunHistory) -> None:
        """Compare the values recorded since the last call."""
        name = self.monitor.name
        if name not in history.get_metric_names():
            return
        new = history.records(name, self._seen)
        self._seen += len(new)
        for record in new:
            better = record.value < self.value if self.monitor.mode == "min" else record.value > self.value
            if math.isfinite(record.value) and (better or self.epoch < 0):
                self.value, self.epoch = record.value, record.epoch


class Reporter:
    """Feeds the writers and the progress display of one run from its `RunHistory`.

    Args:
        context: of the run; only the main process writes anything.
    """

    history: RunHistory

    def __init__(self, context: RunContext) -> None:
        self._context, args, self._is_main = context, context.args, context.world.is_main
        self.history, self._log, self._log_dir = context.history, context.log, context.directory.log_dir
        writers = build_writers(args.writers, self._log_dir) if self._is_main else []
        self._writers = WriterGroup(writers, self._log.warning, self._check_lease)
        self._kind = "none" if args.disable_tqdm or not self._is_main else args.progress
        self.progress: ProgressDisplay = NoProgress()
        self._last_loss: float | None = None
        self._began = self._epoch_began = 0.0
        self._first_step = 0
        self._best = _BestSoFar(args.placed_checkpointer_args.monitored)
        self._recorder: RunRecorder | None = None
        self._has_ended = False
        self._clipping: ClippingCheck | None = None

    def open(self, data: TrainingData, work: Workload, schedules: Schedules, resume_step: int | None) -> None:
        """Open the writers, begin the report, and show the plan.

        Args:
            data: of the run, with its plan.
            work: the model and its optimizers.
            schedules: of the optimizers.
            resume_step: the global step after which the run is resumed; None for a fresh one.
        """
        context, stack, plan = self._context, self._context.stack, data.plan
        self._clipping = ClippingCheck(work.clipping) if resume_step is None and self._is_main else None
        self._began, self._first_step = time.perf_counter(), resume_step or 0
        self.progress = build_progress(self._kind)
        self._writers.open(
            RunInfo(
                resume_step=resume_step,
                records=tuple if resume_step is None else self._recorded,
                log_dir=self._log_dir,
                config=self._config(plan),
            )
        )
        context.sync_logs, context.sink.write = self._writers.sync, self._write_media
        if self._is_main and context.args.wants_report:
            from trainstack.trainer.reporting.report.recorder import begin_recording  # runs without a report skip it

            try:
                self._recorder = begin_recording(context, plan, work.optimizers, resume_step)
            except Exception as error:  # the training is more important than its report
                self._log.warning(f"there will be no run report: {type(error).__name__}: {error}")
        rows = setup_rows(context, data, work, schedules)
        directory = context.directory
        if directory.is_claimed:
            uploaded = "" if directory.mirror is None else f", uploaded to {directory.shown}"
            rows.append(("output", shortest(self._log_dir) + uploaded))
        if plan.global_batch == 1 and (plan.steps_per_epoch or 0) > _MANY_STEPS:
            self._log.warning(
                f"train_batch_size=1: each update uses one sample, which makes {plan.steps_per_epoch} global steps an "
                "epoch. Write train_batch_size=32 for 32 samples an update."
            )
        if resume_step is not None:
            rows.append(("resumed", f"after global step {resume_step}"))
        self._writers.text(format_plan_table(rows))
        if stack.is_private:  # until the end, the statement on the disk has the epsilon of all planned steps
            left = max(0, (plan.total_steps or 0) - context.state.global_step)
            stack.announce_steps(left, self._write_statement if self._is_main else None)

    def _config(self, plan: TrainingPlan) -> dict[str, Any]:
        """The configuration that trackers show next to the metrics."""
        context = self._context
        config = {"backend": context.stack.spec, "arguments": context.args.to_dict(), "plan": plan.to_dict()}
        own = getattr(context.module, "hyperparameters", None)
        config |= {"module": dict(own)} if isinstance(own, Mapping) and own else {}
        plain: dict[str, Any] = to_jsonable(config)
        return plain

    def _write_media(self, kind: str, name: str, make: Callable[[], Any], step: int) -> None:
        """Write an image, a text or a table; see `LogSink.write`."""
        if self._is_main:
            self._writers.log_media(kind, name, make(), step)

    def log_artifact(self, path: Path, name: str) -> None:
        """Let the writers upload the file or folder `path`."""
        self._writers.log_media("log_artifact", name, path, "file")

    def _recorded(self) -> Iterable[Record]:
        """The records that the writers of this run have received before."""
        history = self.history
        return islice(history.all_records(), self._context.directory.earlier_records, history.flushed_count)

    def _check_lease(self) -> None:
        if self._context.lease is not None:
            self._context.lease.check()

    def start_epoch(self, state: RunState, plan: TrainingPlan) -> None:
        """An epoch begins, or continues after a resume."""
        self._epoch_began = time.perf_counter()
        self.history.current_epoch = state.epoch
        self.progress.show_run(state.global_step, plan.total_steps)
        self.progress.start_epoch(state.epoch + 1, plan.epochs, plan.steps_per_epoch, state.steps_in_epoch)

    def poll(self, state: RunState) -> None:
        """Let the display paint; it shows the loss of the last log point and reads nothing."""
        self.progress.poll(state.steps_in_epoch, lambda: self._last_loss)

    def measure(self, state: RunState, meter: LossMeter, optimizers: Iterable[Optimizer]) -> None:
        """Read the values measured since the last log point, and record them."""
        self._flush(meter)
        self.history.current_step = state.global_step
        loss = meter.interval.pop()
        if loss is not None:
            self._last_loss = loss
            self.history.update_metric("train/loss", loss)
        self._last_loss = self._record_released("interval", "").get("loss", self._last_loss)
        if meter.last_norm is not None:  # in a private run that of the noisy gradient
            self.history.update_metric("train/grad_norm", meter.last_norm, provenance=Provenance.COVERED)
        (step, rates), meter.rates = meter.rates or (None, []), None
        if step != state.global_step:
            rates = learning_rates(optimizers)
        for position, rate in enumerate(rates):
            name = "lr" if len(rates) == 1 else f"lr/{position}"
            self.history.update_metric(name, rate, provenance=Provenance.PUBLIC)
        self._record_skips(state)
        if self._recorder is not None:
            self._recorder.sample(state.global_step)

    def end_training_epoch(self, state: RunState, meter: LossMeter) -> None:
        """The training part of an epoch is over."""
        self._flush(meter)
        self.history.current_step = state.global_step
        loss = meter.epoch.pop()
        if loss is not None:
            self.history.update_metric("train/loss_epoch", loss)
        self._record_released("epoch", "_epoch")
        self._record_skips(state)

    def _record_released(self, window: Window, suffix: str) -> Mapping[str, float]:
        """Record the means that layers have released with noise for a window that ends here, and return them."""
        released = self._context.stack.pop_released(window)
        for name, value in released.items():
            self.history.update_metric(f"train/{name}{suffix}", value, provenance=Provenance.COVERED)
        return released

    def _flush(self, meter: LossMeter) -> None:
        check = self._clipping
        meter.on_norms = None if check is None else check.add
        meter.flush()
        message = None if check is None else check.end_window()
        if message is not None:
            self._log.warning(message)
        if check is not None and check.is_over:
            self._clipping = meter.on_norms = None

    def _record_skips(self, state: RunState) -> None:
        if state.skipped_steps:
            self.history.update_metric("train/skipped_steps", state.skipped_steps, provenance=Provenance.PUBLIC)

    def end_epoch(self, state: RunState, plan: TrainingPlan) -> None:
        """Write new records, and one line about the epoch that `state` has just finished."""
        epoch = state.last_epoch
        self.write()
        names = self.history.get_metric_names()
        left_out = {name.removesuffix("_epoch") for name in names if name.endswith("_epoch")}
        left_out |= {"train/loss", "train/grad_norm", "lr"}
        shown = sorted(names - left_out, key=lambda name: (name not in _FIRST_COLUMNS, name))
        latest = (self.history.latest_record(name) for name in shown)
        values = {record.name.removesuffix("_epoch"): record.value for record in latest if record.epoch == epoch}
        self.progress.show_epoch(epoch, values)
        self.progress.end_epoch()
        line = EpochLine(
            epoch=f"{epoch + 1}/{plan.epochs}",
            step=state.global_step,
            values=values,
            seconds=time.perf_counter() - self._epoch_began,
            best=self._best.column(self.history, epoch),
            elsewhere="metrics.csv" if "csv" in self._context.args.writers else "trainer.history",
        )
        self._writers.text(line)

    def end_validation(self, state: RunState) -> None:
        """A validation within an epoch is over: write new records, and one line about it."""
        self.write()
        measured = self.history.values_at(state.global_step).items()
        shown = [f"{name}={value:.4g}" for name, value in measured if name.startswith("val/")]
        if shown:
            self._writers.text(" ".join([f"step={state.global_step}", *shown]))

    def write(self) -> None:
        """Pass the new records of the history to the writers."""
        self._writers.write(self.history.flush())

    def text(self, line: str | None) -> None:
        """Write one line; nothing for None."""
        if line is not None:
            self._writers.text(line)

    def end_private_run(self, exhausted_reason: str | None) -> None:
        """Print the guarantee of a private run, and save it next to the logs; nothing for other runs."""
        stack = self._context.stack
        if not stack.is_private:
            return
        statement = stack.privacy_statement()
        if exhausted_reason is not None:
            self.text(exhausted_reason)
        self.text(statement.text)
        if self._is_main:
            self._write_statement(statement)

    def _write_statement(self, statement: PrivacyStatement) -> None:
        self._check_lease()
        make_directories(self._log_dir)
        for suffix, text in (("txt", statement.text), ("json", statement.to_json())):
            atomic_write(self._log_dir / f"privacy_statement.{suffix}", f"{text}\n".encode(), durable=True)

    def end(self, status: str, reason: str | None = None, export: str | None = None) -> None:
        """Write the report of a run that has ended, and tell the writers; a report that fails is a warning.

        Args:
            status: "finished", "stopped", "interrupted" or "failed".
            reason: the reason why it has not finished.
            export: the folder of the exported model; None if there is none.
        """
        self._has_ended = True
        compiled = self._context.compiled
        trained = self._context.state.global_step > self._first_step and status in ("finished", "stopped")
        if compiled is not None and compiled.is_in_vain and trained:
            self._log.warning(
                "compile: no graph was compiled. Only calls of the module's parts are compiled, such as "
                "self.model(inputs); other methods of a part, and calls of its submodules, run as they are."
            )
        report = self._write_report(status, reason)
        self.text(format_plan_table(self._last_rows(status, export, report)) or None)
        if self._is_main and status != "interrupted":  # then time is short, and the run is to be resumed
            self._writers.log_checkpoint(self._find_checkpoint, _local(export))
        self._writers.end(status, reason)

    def _find_checkpoint(self, wanted: str) -> Path | None:
        """The last or the best checkpoint of the run, as the checkpointer knows it."""
        info = getattr(self._context.checkpointer, wanted, lambda: None)()
        if info is None:
            self._log.warning(f"artifacts={wanted!r}: there is no such checkpoint, so none is uploaded.")
        return None if info is None else _local(info.path)

    def _last_rows(self, status: str, export: str | None, report: Path | None) -> list[tuple[str, str]]:
        """The results of the run, their places, and how to use them; of an interrupted run only the report."""
        context, steps = self._context, self._context.state.global_step
        rows: list[tuple[str, str]] = []
        if status in ("finished", "stopped"):
            self._best.update(self.history)
            if status == "finished" and steps > self._first_step:
                rows.append(("finished", f"global step {steps} after {time.perf_counter() - self._began:.1f} s"))
            best = self._best_checkpoint() if self._is_main else None
            if self._best.words:
                rows.append(("best", self._best.words if best is None else f"{self._best.words}: {best}"))
            rows += [("weights", shortest(export))] if export else []
            rows += [("load", f'trainstack.read_model("{best or shortest(export or "")}")')] if best or export else []
            if context.checkpointer.is_due(0, force=True) and not context.stack.is_private:
                more = "epochs" if context.args.max_steps is None else "max_steps"
                rows.append(("resume", f"TrainerArguments(resume=True, {more}=...)"))
        return rows if report is None else [*rows, ("report", shortest(report))]

    def _best_checkpoint(self) -> str | None:
        """The file `best` of the checkpoints; None if its checkpoint is that of the last step or has another value."""
        info = getattr(self._context.checkpointer, "best", lambda: None)()
        if info is None or info.global_step == self._context.state.global_step:
            return None
        kept = self._best.monitor.value_of(info) == self._best.value
        pointer = pointer_of("best", info.path.parent, self._context.args.placed_checkpointer_args.file_prefix)
        return shortest(pointer) if kept and rule_in(pointer) is not None else None

    def _write_report(self, status: str, reason: str | None) -> Path | None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        try:
            self._check_lease()
            privacy = self._context.stack.privacy_statement().text
            return Path(recorder.end(self.history, self._context.state.global_step, status, reason, privacy))
        except Exception as error:  # the training is more important than its report
            self._log.warning(f"the run report could not be written: {type(error).__name__}: {error}")
            return None

    def fail(self, error: BaseException) -> None:
        """The run ends by `error`; of a private run only its type is shown, for the message may hold values."""
        message = "" if self._context.stack.is_private else " ".join(str(error).split())
        reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
        self.end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", reason)

    def close(self) -> None:
        """Leave the terminal and the files in order."""
        self._context.sync_logs, self._context.sink.write = lambda: None, None
        if self._context.stack.is_private:
            self._context.stack.announce_steps(0, None)  # a later step charges more than the file says only by `open`
        self.progress.close()
        if not self._has_ended:
            self._writers.end("failed", None)
        self._writers.close()


def _local(path: str | Path | None) -> Path | None:
    """`path`, if it is a folder of this machine; exports and checkpoints may lie in a remote store."""
    return Path(path) if path is not None and Path(path).is_dir() else None
