"""Calls of the writers of the main process in a training over several processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.workers import RANK


def logged_over_processes(directory: str) -> list[tuple[Any, ...]]:
    """All processes log and ask for a file to be uploaded; the last one raises in the sixth step."""
    calls: list[tuple[Any, ...]] = []

    class Keeps(ts.Writer):
        def write(self, records: Sequence[ts.Record]) -> None: ...

        def log_text(self, name: str, text: str, step: int) -> None:
            calls.append((name, text, step))

        def log_artifact(self, name: str, path: Path, kind: str) -> None:
            calls.append((name, kind))

        def end(self, status: str, reason: str | None) -> None:
            calls.append((status,))

    class Logs(Classifier):
        def on_end_train_epoch(self, global_step: int) -> None:
            self.log_text("epoch", f"rank {RANK}")

        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1 and global_step == 6:
                raise RuntimeError("crash")

    made = arguments(directory, backend="ddp", epochs=2, writers=[Keeps()])
    trainer = ts.Trainer(Logs(numbers(32)), made)
    trainer.on(ts.Event.EPOCH_END)(lambda trainer: trainer.log_artifact(__file__, "worker"))
    try:
        trainer.train()
    except (RuntimeError, ts.PeerError):
        calls.append(("raised",))
    return calls
