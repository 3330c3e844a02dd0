"""A run over processes that can be stopped. A launcher runs `-m tests.helpers.stop_run FOLDER OPTIONS`.

Each process leaves `<FOLDER>/<rank>.json` at each kind of end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments
from tests.helpers.resume_run import exact


def rank() -> int:
    """The rank of this process; it is unknown when a process of `launch` imports this file."""
    return int(os.environ["RANK"])


class Told(Classifier):
    """Processes of different speeds; those in `ranks` get SIGTERM in the step or validation batch `at`."""

    def __init__(self, folder: Path, at: Any, ranks: list[int], pace: float) -> None:
        super().__init__(Noisy(61), dropout=0.3, optimizer=torch.optim.AdamW, lr=0.01, scheduler=True, validate=True)
        self.folder, self.at, self.ranks, self.pace = folder, at, ranks, pace
        self.batches = 0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        time.sleep(self.pace * (1 + rank()))
        if global_step == 3:
            (self.folder / f"{rank()}.started").touch()
        if self.at == global_step and rank() in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.batches += 1
        if self.at == f"val{self.batches}" and rank() in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.pace)
        return super().val_step(global_step, batch, device)


def main(folder: Path, at: Any = None, ranks: tuple[int, ...] = (), pace: float = 0.0, epochs: int = 2) -> None:
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(rank() + 10 * restarts)
    module = Told(folder, None if restarts else at, list(ranks), pace)
    saving = ts.DefaultCheckpointerArguments(file_prefix="told")
    made: dict[str, Any] = {"backend": "ddp", "epochs": epochs, "resume": "auto", "val_batch_size": 1}
    trainer = ts.Trainer(module, arguments(folder, train_batch_size=4, checkpointer_args=saving, **made))
    left: dict[str, Any] = {"restarts": restarts}
    try:
        trainer.train()
    except BaseException as error:
        left["ended"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        left |= {"step": trainer.global_steps_finished, "reason": trainer.stop_reason, "batches": module.batches}
        state = exact([module.state_dict(), trainer.get_state(), trainer.history.get_state(), torch.rand(2).tolist()])
        left["hash"] = hashlib.sha256(repr(state).encode()).hexdigest()
        new = folder / f"{rank()}.new"
        new.write_text(json.dumps(left))
        new.replace(folder / f"{rank()}.json")
        time.sleep(0.05)  # gloo may abort a process that exits at once


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
