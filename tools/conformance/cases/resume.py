"""A run that is resumed from the checkpoint of any step ends with the bits of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.conformance.adapter import Adapter, Verdict
from tools.conformance.case import case, passed, wrong
from tools.conformance.task import Samples, make_task, weights


@case("resume at every step, with dropout")
def resume_dropout(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """2 epochs of 3 shuffled steps, dropout: resumed from each checkpoint, the same script ends with the same bits."""
    return _resumed_everywhere(adapter, folder, data=Samples(12), dropout=0.3)


@case("resume at every step, with random augmentation")
def resume_augmentation(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """The same with noise from torch, numpy and random in the data set instead of dropout."""
    return _resumed_everywhere(adapter, folder, data=Samples(12, noisy=True))


def _resumed_everywhere(adapter: Adapter, folder: Path, **values: Any) -> Verdict:
    made = {"epochs": 2, "shuffle": True, "save": True, "exact": True, **values}
    whole = make_task(folder / "whole", **made)
    adapter.train(whole)
    saved = adapter.checkpoints(folder / "whole")
    if len(saved) < 6:
        return wrong(f"{len(saved)} checkpoints of 6 steps")
    differ = []
    for step, checkpoint in enumerate(saved[:5], start=1):
        again = make_task(folder / f"from-{step}", **{**made, "resume": checkpoint, "save": False})
        adapter.train(again)
        if not torch.equal(weights(again.model), weights(whole.model)):
            differ.append((step, len(again.rates)))
    if not differ:
        return passed()
    steps = [
        f"{step}" + (f" ({taken} steps instead of {6 - step})" if taken != 6 - step else "") for step, taken in differ
    ]
    return wrong(f"other weights when resumed from step {', '.join(steps)}")
