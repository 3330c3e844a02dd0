"""Training processes that are started, observed and killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from trainstack.errors import LaunchError
from trainstack.trainer import ModuleInterface, Trainer, TrainerArguments, seed_everything
from trainstack.trainer.core.untracked import fingerprints_of_run, untracked_state
from trainstack.verifying.changes import break_restore, limit_workers
from trainstack.verifying.until import Until, replay_until

POLL_INTERVAL_S = 0.002
_FACTS = "facts.json"
_PROGRESS = struct.Struct("qqq")
SAVE_POLL_S = 0.0005
"""The time between two checks for a save: a save of a small module takes some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Settings that may differ between the processes of a run without changing its bits.

    Attributes:
        hash_seed: PYTHONHASHSEED, which determines the order of sets of strings.
        threads: of torch; None does not change them.
        workers: the largest number of worker processes of a training loader; None for the module's number.
        async_save: whether checkpoints are written in the background.
    """

    hash_seed: int = 0
    threads: int | None = None
    workers: int | None = None
    async_save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a training.

    Attributes:
        began_from: the global step from which it began.
        step: the last finished global step.
        steps_per_epoch: 0 if unknown.
    """

    began_from: int = 0
    step: int = 0
    steps_per_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment of a kill: `lag` seconds after the end of `step`, or after the next save begins, if there is a
    checkpoint."""

    step: int
    lag: float
    while_saving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that an ended training has written.

    Attributes:
        untracked: attributes of its module and callbacks that it changed, and did not save.
        workers: of its training loader in the module; 0 if their number cannot be changed.
        broken: the parameter that was not restored, if that was requested.
    """

    untracked: tuple[str, ...] = ()
    workers: int = 0
    broken: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The part of one process in one attempt.

    Attributes:
        call: pickled `(module_factory, (args,))`; the factory returns a module, or a module and its callbacks.
        folder: of the attempt, for its files.
        rank, nproc: the rank of this process and the number of processes.
        port: of the rendezvous of several processes; None for a single process.
        surroundings: of this process.
        breaks: whether one parameter keeps its value of `__init__` when the state is restored.
        until: the end of a replay; None to train to the end of the training.
        caller: the public function, for messages.
    """

    call: bytes
    folder: Path
    rank: int
    nproc: int
    port: int | None
    surroundings: Surroundings = Surroundings()
    breaks: bool = False
    until: Until | None = None
    caller: str = "verify_resume"

    @property
    def output(self) -> Path:
        """The file with the output of all processes."""
        return self.folder / "output.txt"

    @property
    def done(self) -> Path:
        """A file that exists after this process has trained to the end; its exit code has no meaning after that."""
        return self.folder / f"done-{self.rank}"


def read_progress(folder: Path) -> Progress | None:
    """The progress of the training; None before it begins."""
    try:
        data = (folder / "progress").read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _PROGRESS.size:
        return None
    first, step, length = _PROGRESS.unpack(data)
    return Progress(began_from=first, step=step, steps_per_epoch=length)


def read_facts(folder: Path) -> Facts:
    """The facts that the training of this folder wrote at its end."""
    facts = json.loads((folder / _FACTS).read_text())
    return Facts(untracked=tuple(facts["untracked"]), workers=facts["workers"], broken=facts["broken"])


def work(job: Job) -> None:
    """Train to the end, or to the end of a replay, unless killed."""
    set_up_process(job)
    factory, (args,) = pickle.loads(job.call)
    seed_everything(args.seed)
    made = factory()
    module, callbacks = made if isinstance(made, tuple) else (made, ())
    asked = limit_workers(module, job.surroundings.workers)
    if job.until is None:
        _train_to_the_end(job, module, args, callbacks, asked)
    else:
        replay_until(job.until, module, args, callbacks, lambda trainer: _progress_of(trainer, job))
    job.done.touch()


def set_up_process(job: Job) -> None:
    """Set process group, output, rank and threads of this process as `job` requires."""
    os.setsid()  # so that all processes that this one starts can be killed with it
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if job.port is not None:
        os.environ.update(  # as torchrun sets them
            RANK=str(job.rank),
            LOCAL_RANK=str(job.rank),
            WORLD_SIZE=str(job.nproc),
            LOCAL_WORLD_SIZE=str(job.nproc),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job.port),
        )
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // job.nproc))
    if job.surroundings.threads is not None:
        torch.set_num_threads(job.surroundings.threads)
    os.environ["PYTHONHASHSEED"] = str(job.surroundings.hash_seed)  # that of processes that this one starts


def _train_to_the_end(job: Job, module: ModuleInterface, args: TrainerArguments, callbacks: Any, asked: Any) -> None:
    broken = break_restore(module) if job.breaks else []
    trainer = Trainer(module, args, callbacks=callbacks)
    _ = trainer.plan  # prepares the trainer, so that only the training is observed
    marks = partial(fingerprints_of_run, trainer.module, trainer.events.callbacks, trainer.trainer_backend.is_private)
    before = marks()
    with _progress_of(trainer, job):
        trainer.train()
    if job.rank == 0:
        states = [trainer.module.get_state(), *(one.get_state() for one in trainer.events.callbacks.values())]
        names = untracked_state(marks(), before, states)
        facts = {"untracked": names, "workers": max(asked, default=0), "broken": (broken or [""])[0]}
        (job.folder / _FACTS).write_text(json.dumps(facts))
    trainer.close()


def _progress_of(trainer: Trainer, job: Job) -> AbstractContextManager[None]:
    return _record_progress(trainer, job.folder) if job.rank == 0 else nullcontext()


@contextmanager
def _record_progress(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Write the progress of `trainer` to a file, so that it can be read after a kill."""
    file = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
    first, length, over = trainer.global_steps_finished, trainer.plan.steps_per_epoch or 0, threading.Event()

    def write() -> None:
        os.pwrite(file, _PROGRESS.pack(first, trainer.global_steps_finished, length), 0)

    def tell() -> None:
        while True:
            write()
            if over.wait(POLL_INTERVAL_S):
                return

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        write()


class Trial:
    """A running training in new processes, all of which are killed at once.

    Attributes:
        began_from: the global step from which it began.
    """

    began_from: int

    def __init__(self, jobs: list[Job], context: Any, deadline: float) -> None:
        self._jobs, self._deadline = jobs, deadline
        self._processes = [context.Process(target=work, args=(job,)) for job in jobs]
        self.began_from = 0

    def begin(self) -> None:
        """Start the processes, and wait until they train.

        Raises:
            LaunchError: one of them failed, or they were too slow.
        """
        for process in self._processes:
            process.start()
        while (progress := read_progress(self._jobs[0].folder)) is None:
            self.is_over(POLL_INTERVAL_S)
            self._check_deadline()
        self.began_from = progress.began_from

    def is_over(self, within_s: float | None = None) -> bool:
        """Wait until all processes have trained to the end, by default up to the deadline. Returns whether they have.

        Raises:
            LaunchError: one of them failed, or they did not end in time.
        """
        until = self._deadline if within_s is None else time.monotonic() + within_s
        while running := [process for process in self._processes if process.is_alive()]:
            left = until - time.monotonic()
            if left <= 0:
                break
            connection.wait([process.sentinel for process in running], left)
        for job, process in zip(self._jobs, self._processes, strict=True):
            if not process.is_alive() and not job.done.exists():
                self._fail(f"ended with exit code {process.exitcode}")
        if within_s is None and running:
            self._check_deadline()
        return not running

    def ends_before(self, moment: Moment, has_saved: Callable[[], bool], saves: Callable[[], bool]) -> bool:
        """Whether the training ends before `moment`.

        Args:
            moment: the moment to kill it.
            has_saved: whether there is a checkpoint to resume from.
            saves: whether a checkpoint is partially written.

        Raises:
            LaunchError: see `is_over`.
        """
        while self.progress.step < moment.step or not has_saved():
            if self.is_over(POLL_INTERVAL_S):
                return True
            self._check_deadline()
        while moment.while_saving and not saves():
            if self.is_over(SAVE_POLL_S):
                return True
            self._check_deadline()
        return self.is_over(moment.lag)

    def kill(self) -> int:
        """Send SIGKILL to all running processes. Returns the last finished step."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # for a process that has not made its group yet
        for process in self._processes:
            if process.pid is not None:
                process.join()
        return self.progress.step

    @property
    def progress(self) -> Progress:
        """The progress of the training."""
        return read_progress(self._jobs[0].folder) or Progress()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            self._fail("did not end in time; write a longer timeout_s, or fewer steps,")

    def _fail(self, how: str) -> None:
        self.kill()
        job = self._jobs[0]
        said = job.output.read_text(errors="replace").strip() if job.output.exists() else ""
        said = said[-3000:] or "(nothing)"
        raise LaunchError(
            f"{job.caller}: the process of {job.folder.name} {how} and said:\n{said}\n"
            f"All of it is in {job.folder.parent}"
        )


@contextmanager
def start_trial(
    call: bytes,
    folder: Path,
    nproc: int | None,
    context: Any,
    timeout_s: float,
    surroundings: Surroundings = Surroundings(),
    **options: Any,
) -> Iterator[Trial]:
    """A training in `nproc` processes that join, or in a single one. No process is left at the end.

    `options` are further attributes of `Job`: `breaks`, `until`, `caller`.
    """
    folder.mkdir(parents=True)
    port, size = None, nproc or 1
    if nproc is not None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])  # free until another process uses it
    common: dict[str, Any] = {"call": call, "folder": folder, "nproc": size, "port": port}
    common |= {"surroundings": surroundings, **options}
    jobs = [Job(rank=rank, **common) for rank in range(size)]
    made = Trial(jobs, context, time.monotonic() + timeout_s)
    try:
        with _hash_seed(surroundings.hash_seed):
            made.begin()
        yield made
    finally:
        made.kill()


@contextmanager
def _hash_seed(seed: int) -> Iterator[None]:
    """A block in which a new Python process gets this hash seed."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before
