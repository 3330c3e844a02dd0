"""Faults of `ddp` that the battery has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from trainstack.backends.ddp import DDP
from trainstack.backends.processes.reducer import GradientReducer
from trainstack.backends.single_process import SingleProcess
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.reporting.loss_meter import WeightedMean
from trainstack.trainer.run import loop

Replace = Callable[[Any, str, Callable[..., Any]], None]


def averages_gradients(replace: Replace, rank: int) -> None:
    """Each rank has the same weight, for any number of samples."""
    backward = SingleProcess.backward
    replace(SingleProcess, "backward", lambda self, work, loss, weight: backward(self, work, loss, float(weight > 0)))


def counts_borrowed_batches(replace: Replace, rank: int) -> None:
    """A borrowed micro-batch has a weight above 0."""
    backward = DDP.backward
    replace(DDP, "backward", lambda self, work, loss, weight: backward(self, work, loss, weight or 0.01))


def gives_unused_parameters_zeros(replace: Replace, rank: int) -> None:
    """A parameter that no micro-batch used gets a gradient of 0, so that optimizers move it."""
    clip = DDP.clip

    def filled(self: DDP, work: Any) -> Any:
        for p in work.parameters:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        return clip(self, work)

    replace(DDP, "clip", filled)


def skips_hooks_of_borrowed_batches(replace: Replace, rank: int) -> None:
    """The hook after a backward pass is not called on a rank without samples."""
    bind = loop.bind_borrowed_pass

    def without_hooks(one: Any) -> Any:
        with patch.object(type(one), "bind_end_backward", lambda self: None):
            return bind(one)

    replace(loop, "bind_borrowed_pass", without_hooks)


def skips_steps_on_one_rank(replace: Replace, rank: int) -> None:
    """Ranks above 0 skip every fifth step of their optimizers."""
    step, calls = SingleProcess.step, 0

    def skipping(self: SingleProcess, work: Any) -> bool:
        nonlocal calls
        calls += 1
        return True if rank and calls % 5 == 0 else step(self, work)

    replace(SingleProcess, "step", skipping)


def keeps_outputs_of_borrowed_batches(replace: Replace, rank: int) -> None:
    """A hook gets the outputs of a borrowed micro-batch."""
    replace(OutputCollector, "collect_structure", OutputCollector.collect)


def loses_losses_of_other_ranks(replace: Replace, rank: int) -> None:
    """The logged loss is that of rank 0."""
    sync = WeightedMean.sync
    replace(WeightedMean, "sync", lambda self, everyone: sync(self, everyone[:1]))


def wraps_once(replace: Replace, rank: int) -> None:
    """The gradients of parameters that are unfrozen later are not summed."""
    refresh = GradientReducer.refresh

    def once(self: GradientReducer, parameters: Any) -> None:
        if not self._wrapper:
            refresh(self, parameters)

    replace(GradientReducer, "refresh", once)


def gathers_in_another_order(replace: Replace, rank: int) -> None:
    """Outputs of a validation do not have the order of the dataset."""
    gather = DDP.gather

    def reversed_(self: DDP, outputs: Any) -> Any:
        found = gather(self, outputs)
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, item in list(items):
            if isinstance(item, torch.Tensor):
                found[key] = item.flip(0)
        return found

    replace(DDP, "gather", reversed_)


BREAKS: dict[str, tuple[Callable[[Replace, int], None], str]] = {
    "averages_gradients": (averages_gradients, "a step in which ranks have different numbers of passes"),
    "counts_borrowed_batches": (counts_borrowed_batches, "a step in which ranks have different numbers of passes"),
    "gives_unused_parameters_zeros": (gives_unused_parameters_zeros, "parameters that not every step uses"),
    "skips_hooks_of_borrowed_batches": (
        skips_hooks_of_borrowed_batches,
        "a step in which ranks have different numbers of passes",
    ),
    "skips_steps_on_one_rank": (skips_steps_on_one_rank, ""),
    "keeps_outputs_of_borrowed_batches": (
        keeps_outputs_of_borrowed_batches,
        "outputs of an epoch",
    ),
    "loses_losses_of_other_ranks": (loses_losses_of_other_ranks, ""),
    "wraps_once": (wraps_once, "parameters that are changed by hand"),
    "gathers_in_another_order": (gathers_in_another_order, "outputs of a validation"),
}
"""Faults by name, each with the class of trainings that shows it; empty for all trainings."""


@contextmanager
def broken(name: str, rank: int) -> Iterator[None]:
    """A block in which the library has the fault `name`; none with an empty name."""
    with ExitStack() as stack:
        if name:
            BREAKS[name][0](lambda *given: stack.enter_context(patch.object(*given)), rank)
        yield
