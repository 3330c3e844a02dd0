"""A run whose checkpoints are all kept, and runs resumed from each of them; prints hashes of everything."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments


def main(what: str, directory: Path, backend: str, workers: int, every: int = 1) -> None:
    """Print the hash of an "unbroken" run, or those of runs "resumed" from each `every`-th checkpoint."""
    checkpoints = directory / "checkpoints"
    if what == "unbroken":
        seed(1)
        print(json.dumps({"unbroken": run(directory, backend, workers, every_n_steps=1)}))
        return
    results = {}
    saved = [info for info in ts.list_checkpoints(checkpoints) if info.kind == "checkpoint"]
    for position, info in enumerate(saved[::every]):
        seed(100 + position)
        results[info.name] = run(directory / "again" / info.name, backend, workers, resume=str(info.path))
    print(json.dumps(results))


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def run(directory: Path, backend: str, workers: int, *, every_n_steps: int | None = None, **changes: Any) -> str:
    module = Classifier(
        Noisy(37),
        seed=random.randrange(1000) if changes else 0,
        dropout=0.3,
        optimizer=torch.optim.AdamW,
        lr=0.01,
        scheduler=True,
        validate=True,
        num_workers=workers,
    )
    saving = ts.DefaultCheckpointerArguments(
        checkpoint=every_n_steps is not None, every_n_steps=every_n_steps, keep_last=None
    )
    made = {"epochs": 4, "backend": backend, "gpu_batch_size_limit": 4, "log_every": 3, "checkpointer_args": saving}
    trainer = ts.Trainer(module, arguments(directory, **made, **changes))
    trainer.train()
    assert trainer.global_steps_finished == 20
    drawn = [random.random(), float(np.random.rand()), torch.rand(3).tolist()]
    state = [trainer.get_state(), trainer.trainer_backend.get_state(), trainer.history.get_state(), drawn]
    return hashlib.sha256(repr([exact(module.state_dict()), exact(state)]).encode()).hexdigest()


def exact(value: Any) -> Any:
    """Every tensor as its bytes, so that equal hashes mean equal bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.numpy().tobytes().hex())
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
