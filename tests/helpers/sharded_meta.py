"""A module without values that `fsdp` shards and fills, with callbacks that keep shards, for `verify_resume`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import trainstack as ts
from tests.helpers.forgetful import Slow
from tests.helpers.modules import numbers
from trainstack import callbacks


def meta_with_callbacks() -> tuple[ts.ModuleInterface, Sequence[ts.Callback]]:
    """A module on the meta device with Adam, an average of its weights, and a layer that is frozen for an epoch."""
    data = numbers(41)
    with torch.device("meta"):
        module = Slow(data, optimizer=torch.optim.AdamW, lr=0.01, dropout=0.2, scheduler=True)
    return module, [callbacks.EMA(0.9), callbacks.Freezer("net.0", until_epoch=1)]
