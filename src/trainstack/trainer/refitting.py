"""Halving the micro-batch where memory runs out in the middle of training, and making the step again."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainstack.errors import ConfigurationError
from trainstack.trainer.loop import Buffers, Passes, train_windows
from trainstack.trainer.seeding import capture_rng, restore_rng
from trainstack.trainer.sources import Window

if TYPE_CHECKING:
    from trainstack.trainer.run import Run

_SAID_BY_ALLOCATORS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryRanOut(Exception):
    """Memory ran out in a step whose passes have been taken back."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocator's: torch has a class for accelerators, and sentences for the rest."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_ALLOCATORS)


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def guard_steps(run: Run) -> None:
    """From now on, take back steps of `run` in which memory runs out.

    Raises:
        ConfigurationError: a layer of the stack cannot take back a pass that has failed.
    """
    for layer in run.stack.layers():
        if not layer.leaves_no_trace:
            raise ConfigurationError(
                f"fit_micro_batch='always' with backend={run.stack.spec!r}: the layer {layer.name!r} cannot take "
                "back a step that runs out of memory in its middle. Write fit_micro_batch=True, which tries out a step "
                "before training."
            )
    run.loop.guard = StepGuard(run).around


class StepGuard:
    """Remembers before each step what its passes may change, and puts it back where memory runs out in them.

    Attributes:
        run: whose steps these are.
        rng: the random state before the step under way.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rng: Mapping[str, Any] = {}
        self._buffers = Buffers(run.module)
        self._mark = self._collected = 0
        self._versions: list[int] = []

    def around(self, run_micro_batches: Passes) -> Passes:
        """`run_micro_batches`, raising `MemoryRanOut` where a smaller micro-batch may help."""

        def guarded(window: Window) -> list[Tensor]:
            self._keep()
            try:
                return run_micro_batches(window)
            except Exception as error:
                can_help = self.run.data.plan.micro_batch > 1 and self._versions == self._current_versions()
                if not can_help or not ran_out_of_memory(error):
                    raise
            self._put_back()  # here nothing holds the passes any more
            raise MemoryRanOut

        return guarded

    def _current_versions(self) -> list[int]:
        # torch 2.13.0: counts writes in place
        return [parameter._version for parameter in self.run.loop.work.parameters]

    def _keep(self) -> None:
        self.rng, self._versions = capture_rng(self.run.world.device), self._current_versions()
        self._buffers.keep()
        self._mark = self.run.history.mark()
        collector = self.run.loop.epoch_outputs
        self._collected = 0 if collector is None else collector.count

    def _put_back(self) -> None:
        free_memory(self.run.world.device)
        restore_rng(self.rng, self.run.world.device)
        self._buffers.put_back()
        self.run.history.take_back(self._mark)
        if self.run.loop.epoch_outputs is not None:
            self.run.loop.epoch_outputs.take_back(self._collected)


def train_refitting(run: Run, windows: Iterator[Window]) -> None:
    """Train on `windows`; on what is left of the epoch in smaller micro-batches where memory runs out."""
    while True:
        try:
            return train_windows(run.loop, islice(windows, run.steps_left()))
        except MemoryRanOut:
            pass
        windows = _halved(run)


def _halved(run: Run) -> Iterator[Window]:
    """Halve the micro-batch of `run`, and ask for what is left of the epoch once more.

    The module is asked for its loader under the random state that the epoch began with, as on a resume.
    """
    first, device, now = run.data.plan.micro_batch, run.world.device, capture_rng(run.world.device)
    run.args = replace(run.args, gpu_batch_size_limit=first // 2)
    restore_rng(run.epoch_rng or now, device)
    run.data.plan_anew(run.args)
    plan = run.module.plan = run.data.plan
    windows = run.data.windows(run.state)
    restore_rng(now, device)
    run.log.warning(
        f"memory ran out in global step {run.state.current_step}, which is made again: from here on each step is split "
        f"into {plan.accumulation} micro-batches of {plan.micro_batch} instead of {first}, with the same result. To "
        f"begin so, write gpu_batch_size_limit={plan.micro_batch}."
    )
    return windows
