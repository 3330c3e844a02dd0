"""`Profiler` writes a trace of a few global steps."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import profile

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events import Callback


class Profiler(Callback):
    """Writes a trace of `steps` global steps, `rank<r>_step<s>.json`, for chrome://tracing or Perfetto.

    Steps count from the start of `train()`. The step before the first one is traced too and discarded, as torch advises
    for warm-up. The rest of the training runs without a profiler.

    Args:
        first_step: first step of the trace; 3 or more.
        steps: number of steps.
        path: folder for the traces; None for `profile` in `trainer.log_dir`.
        all_processes: whether to trace all processes, not only the main one.
        with_stack: whether to record the Python stack of each operation.
        with_memory: whether to record the memory that operations allocate and free.

    Raises:
        ConfigurationError: a number is out of range.

    Examples:
        >>> profiler = ts.callbacks.Profiler(first_step=3, steps=2, path="profile")
        >>> ts.Trainer(module, args, callbacks=[profiler]).train()
    """

    writes_files = True

    def __init__(
        self,
        *,
        first_step: int = 10,
        steps: int = 3,
        path: str | os.PathLike[str] | None = None,
        all_processes: bool = False,
        with_stack: bool = False,
        with_memory: bool = False,
    ) -> None:
        # 3: the profiler starts at the end of a step, and the step before the first one is its warm-up.
        for name, number, least in (("first_step", first_step, 3), ("steps", steps, 1)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigurationError(f"{name}={number!r}: write a whole number, {least} or more.")
        self._first, self._steps, self._path, self._all = first_step, steps, path, all_processes
        self._with_stack, self._with_memory = with_stack, with_memory
        self._profile: profile | None = None
        self._done = 0

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        self._done = 0

    def on_train_step_end(self, trainer: AbstractTrainer, step: int) -> None:
        self._done += 1
        if self._profile is not None:
            self._profile.step()
            if self._done == self._first + self._steps - 1:
                self.on_train_end()
        elif self._done == self._first - 2:
            self._start(trainer)

    def on_train_end(self) -> None:
        """End the trace, also if training ends before it is complete."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _start(self, trainer: AbstractTrainer) -> None:
        if not (self._all or trainer.is_main_process):
            return
        folder = trainer.log_dir / "profile" if self._path is None else Path(self._path)

        def write(done: profile) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(folder / f"rank{trainer.world.rank}_step{trainer.state.global_step}.json"))

        self._profile = profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=write,
            with_stack=self._with_stack,
            profile_memory=self._with_memory,
        )
        self._profile.start()
