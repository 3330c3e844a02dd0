"""Validation does not change the training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tools.conformance.adapter import Adapter, Verdict
from tools.conformance.case import case, passed, wrong
from tools.conformance.task import Net, Samples, make_task, weights


@case("validation on against off")
def validation_unseen(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """2 shuffled epochs with dropout end with the same bits, whether or not there is validation after each of them."""
    ends = []
    for validation in (None, Samples(8)):
        task = make_task(
            folder / str(validation is None),
            data=Samples(12),
            epochs=2,
            shuffle=True,
            dropout=0.3,
            validation=validation,
        )
        adapter.train(task)
        ends.append(weights(task.model))
    apart = float((ends[0] - ends[1]).abs().max())
    return passed() if torch.equal(*ends) else wrong(f"with validation, the final weights differ (by {apart:.1e})")


@case("mode restored after validation")
def mode_restored(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """2 epochs of 2 steps with validation: the model trains in training mode, and a submodule that was put into eval
    mode before training, such as a frozen one, stays in it."""
    modes: list[tuple[bool, bool]] = []

    def spy(net: Net, x: Tensor) -> None:
        modes.append((net.training, net.still.training))

    task = make_task(folder, data=Samples(8), epochs=2, validation=Samples(8))
    task.model.spy = spy
    task.model.still.eval()
    adapter.train(task)
    if any(not whole for whole, _ in modes):
        return wrong("trains in eval mode after validation")
    first = next((number for number, (_, still) in enumerate(modes, start=1) if still), None)
    return passed() if first is None else wrong(f"the part in eval mode is in training mode from pass {first} of 4 on")
