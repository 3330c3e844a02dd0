"""Helpers that the tests of checkpoints share."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.encoding import StateEncoder


def make_checkpoint(mark: int = 0, step: int | None = None) -> Checkpoint:
    """A small checkpoint with `mark` in each of its states."""
    weight = torch.full((3, 2), float(mark))
    return Checkpoint(
        module_interface_state=OrderedDict({"encoder.weight": weight, "encoder.bias": torch.ones(2) * mark}),
        trainer_state={"optimizers": [{"state": {0: {"exp_avg": weight + 1}}}], "mark": mark},
        trainer_backend_state={"sp": {"count": mark}},
        rng_state={
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        },
        history_state={"loss": [0.5, float("inf")]},
        callback_states={"early_stopping": {"best": 1.5}},
        plan={"train_batch_size": 8},
        global_step=step,
        metadata={"note": "ä"},
    )


def mark_of(checkpoint: Checkpoint) -> int:
    """The mark of a whole checkpoint: its states must agree on it."""
    assert checkpoint.module_interface_state is not None
    assert checkpoint.trainer_state is not None
    mark = checkpoint.trainer_state["mark"]
    assert torch.equal(checkpoint.module_interface_state["encoder.weight"], torch.full((3, 2), float(mark)))
    return int(mark)


def through_json(value: Any, root: str = "state") -> Any:
    """`value`, encoded, written as JSON, read and decoded."""
    encoder = StateEncoder()
    text = json.dumps(encoder.encode(value, root), allow_nan=False)
    return StateDecoder(encoder.pop_tensors()).decode(json.loads(text))


def same(a: Any, b: Any) -> bool:
    """Equality of trees that also compares types, the order of keys, the sign of zero, and nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Alter one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
