"""`RunRecorder` collects the data of a report during a run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainstack._files import make_directories
from trainstack._tensor_classes import class_of
from trainstack.checkpointing import DefaultCheckpointer
from trainstack.errors import ConfigurationError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import RunLogger, to_jsonable
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.reporting.report.facts import FILE_NAME, REPORT_NAME, RunFacts, Session, replace_file
from trainstack.trainer.start_description import package_versions
from trainstack.trainer.torch_settings import CompiledModels, device_peak_gib, host_peak_gib
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.writers.files import free_name

_MOST_SAMPLES = 1000


class RunRecorder:
    """Writes `run.json` and `report.html` in `directory`; nothing happens between log points.

    Args:
        directory: of the logs.
        facts: of the run; its sessions are added here.
        device: whose memory is looked at.
        resume_step: as for `RunInfo`.
        compiled: the graphs of `compile`, read at the end.
    """

    def __init__(
        self,
        directory: Path,
        facts: RunFacts,
        device: torch.device,
        resume_step: int | None,
        compiled: CompiledModels | None = None,
    ) -> None:
        self._directory, self._device, self._compiled = directory, device, compiled
        self._samples: list[tuple[int, float, float | None, float | None]] = []
        self._stride, self._log_points = 1, 0
        self._clock = time.perf_counter()
        self._session = Session(began=time.time(), first_step=resume_step or 0)
        make_directories(directory)
        earlier: tuple[Session, ...] = ()
        if resume_step is not None:
            try:
                earlier = RunFacts.read(directory).sessions
            except FileNotFoundError:
                pass  # the run began elsewhere, or without a report
            except ConfigurationError as error:
                file = directory / FILE_NAME
                aside = free_name(file)
                file.rename(aside)
                RunLogger().warning(f"{error} It was renamed to {aside.name}, and a new report begins.")
        self._facts = replace(facts, sessions=(*earlier, self._session))
        self._facts.write(directory)

    def sample(self, step: int) -> None:
        """A log point: note time and memory. The longer a run is, the fewer log points are noted."""
        self._log_points += 1
        if self._log_points % self._stride:
            return
        seconds = round(time.perf_counter() - self._clock, 4)
        self._samples.append((step, seconds, _rounded(host_peak_gib()), _rounded(device_peak_gib(self._device))))
        if len(self._samples) > _MOST_SAMPLES:
            self._samples, self._stride = self._samples[1::2], 2 * self._stride

    def end(
        self, history: RunHistory, step: int, status: str, reason: str | None = None, privacy: str | None = None
    ) -> Path:
        """Write both files; returns where the report is.

        Args:
            history: the metrics. After a failure nothing that waits on the device is read: it may never answer.
            step: global steps that were made.
            status, reason: as for `Session`.
            privacy: the privacy statement in words.
        """
        # The page is drawn once a run; importing its modules here would delay the first step of every run.
        from trainstack.trainer.reporting.report.page import page_of
        from trainstack.trainer.reporting.report.runs import ReportedRun, checkpoints_of

        seconds, samples = round(time.perf_counter() - self._clock, 3), tuple(self._samples)
        ended = replace(self._session, status=status, reason=reason, seconds=seconds, last_step=step, samples=samples)
        compiled = () if self._compiled is None else (("torch.compile", self._compiled.describe()),)
        environment = (*self._facts.environment, *compiled)
        sessions = (*self._facts.sessions[:-1], ended)
        facts = replace(self._facts, sessions=sessions, environment=environment, privacy=privacy)
        facts.write(self._directory)
        run = ReportedRun(
            label=facts.name,
            facts=facts,
            curves=history.all_arrays(read_device=status != "failed"),
            checkpoints=checkpoints_of(facts, self._directory),
        )
        path = self._directory / REPORT_NAME
        replace_file(path, page_of([run]))
        return path


def _rounded(gib: float | None) -> float | None:
    return None if gib is None else round(gib, 4)


_DEEPEST, _MOST_ROWS = 3, 80


def environment_rows(device: torch.device, processes: int) -> tuple[tuple[str, str], ...]:
    """Versions, machine and device. Nothing that names the machine or its user."""
    rows = [*package_versions().items()]
    rows += [("system", f"{platform.system()} {platform.release()}, {platform.machine()}")]
    rows += [("CPU cores", str(os.cpu_count())), ("threads of torch", str(torch.get_num_threads()))]
    if device.type == "cuda":
        rows += [("device", torch.cuda.get_device_name(device)), ("CUDA", str(torch.version.cuda))]
    return (*rows, ("processes", str(processes)))


def model_rows(module: nn.Module) -> tuple[tuple[str, str, int, int], ...]:
    """Name, class, parameters and trained parameters of submodules, three levels deep; shared ones count once each."""
    rows: list[tuple[str, str, int, int]] = []
    for name, part in module.named_modules():
        if name.count(".") < _DEEPEST and len(rows) < _MOST_ROWS:
            sizes = [(0 if nn.parameter.is_lazy(p) else p.numel(), p.requires_grad) for p in part.parameters()]
            trained = sum(size for size, is_trained in sizes if is_trained)
            rows.append((name or "(all)", type(part).__name__, sum(size for size, _ in sizes), trained))
    return tuple(rows)


def optimizer_rows(optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
    """Class and numbers of each optimizer, as it was made."""
    rows = []
    for one in optimizers:
        numbers = {k: v for k, v in one.defaults.items() if isinstance(v, int | float | tuple) and type(v) is not bool}
        words = ", ".join(f"{name} {value}" for name, value in numbers.items()) or "no numbers"
        rows.append(("optimizer", f"{type(one).__name__}: {words}"))
    return rows


def _sample_rows(plan: TrainingPlan) -> list[tuple[str, str]]:
    if plan.is_sampled or plan.samples_per_epoch is None:  # the length of a private data set is not public
        return []
    return [("samples", f"{plan.samples_per_epoch:,} per epoch")]


def begin_recording(
    context: RunContext, plan: TrainingPlan, optimizers: Iterable[Optimizer], resume_step: int | None
) -> RunRecorder:
    """Begin to record a run, on its main process."""
    args, stack, device, folder = context.args, context.stack, context.world.device, None
    if isinstance(context.checkpointer, DefaultCheckpointer) and context.checkpointer.args.checkpoint:
        folder = str(context.checkpointer.save_dir.absolute())
    facts = RunFacts(
        name=class_of(context.module).__name__,
        backend=stack.spec,
        device=str(device),
        private=stack.is_private and not any("loss" in layer.released_metrics for layer in stack.layers()),
        monitor=args.placed_checkpointer_args.monitor,
        arguments=to_jsonable(args.to_dict()),
        plan=(*_sample_rows(plan), *plan.rows(), *optimizer_rows(optimizers)),
        stack=stack.explain(),
        model=model_rows(context.module),
        environment=environment_rows(device, context.world.size),
        checkpoints=folder,
    )
    return RunRecorder(context.directory.log_dir, facts, device, resume_step, context.compiled)
