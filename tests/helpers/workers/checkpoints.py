"""Runs over several processes that stop, save and resume."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, weights
from tests.helpers.workers import RANK
from tests.helpers.workers.training import Uneven


def noisy(directory: str, **changes: Any) -> list[float]:
    """Dropout and augmentation, to be resumed exactly under the same number of processes."""
    stop_at = changes.pop("stop_at", None)
    module = Classifier(Noisy(37), dropout=0.3, optimizer=torch.optim.AdamW, lr=0.01, scheduler=True, validate=True)
    if stop_at is not None:
        step = module.train_step

        def train_step(global_step: int, batch: Any, device: Any) -> Any:
            if global_step == stop_at:
                raise KeyboardInterrupt
            return step(global_step, batch, device)

        module.train_step = train_step  # type: ignore[method-assign]
    torch.manual_seed(RANK + changes.pop("seed", 0))
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    try:
        ts.Trainer(module, arguments(directory, epochs=3, checkpointer_args=saving, **changes)).train()
    except KeyboardInterrupt:
        return []
    return weights(module).tolist()


def streams(directory: str, stop_at: int | None = None, **changes: Any) -> dict[str, Any]:
    """A loader that keeps its own place, and weights from elsewhere."""
    from tests.trainer.data.test_loader_state import EVERY_STEP, Reads, Stream

    Stream.reads = 0
    module = Reads(lambda data, sampler, size: Stream(data, size), stop_at=stop_at)
    made: dict[str, Any] = {"checkpointer_args": EVERY_STEP, "resume": "auto", "gpu_batch_size_limit": 2, **changes}
    torch.manual_seed(RANK)
    trainer = ts.Trainer(module, arguments(directory, backend="ddp", epochs=2, **made))
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    report = trainer.warm_start_report
    return {
        "seen": module.seen,
        "weights": weights(module).tolist(),
        "reads": Stream.reads,
        "taken": list(report.loaded) if report else [],
    }


def killed_once(directory: str, node_dies: bool = False, backend: str = "ddp") -> dict[str, Any]:
    """In the sixth step of the first round rank 1 is killed, or a whole node; the launcher starts the group again."""

    class Dies(Uneven):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and global_step == 6 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and not node_dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if global_step == 6 and os.environ.get("TRAINSTACK_TEST_DIES"):
                os.kill(os.getppid(), signal.SIGKILL)  # the agent, and with it the whole node
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(global_step, batch, device)

    module, saving = Dies(), ts.DefaultCheckpointerArguments(every_n_steps=1)
    made: dict[str, Any] = {"train_batch_size": 12, "epochs": 2, "log_every": 4, "val_batch_size": 7}
    trainer = ts.Trainer(module, arguments(directory, backend=backend, checkpointer_args=saving, resume="auto", **made))
    trainer.train()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return {
        "weights": weights(module).tolist(),
        "steps": trainer.global_steps_finished,
        "restarts": restarts,
        "size": trainer.world.size,
    }


def saves_on_nodes(directory: str) -> dict[str, Any]:
    """Two processes that are each the first of a machine, and save into separate folders."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(RANK)}
    trainer = ts.Trainer(Uneven(), arguments(directory, backend="auto", device=["cpu"], train_batch_size=12))
    trainer.train(max_steps=2)
    world, node = (Path(directory) / str(RANK) / once for once in ("world", "node"))
    trainer.save_checkpoint(path=world)
    trainer.save_checkpoint(path=node, once="node")
    saved = ts.read_checkpoint(node).module_interface_state or {}
    same = all(torch.equal(saved[name], value) for name, value in trainer.module.get_state().items())
    return {"world": world.exists(), "node": node.exists(), "same": same}


def begun(directory: str, place: str, stops: list[int]) -> dict[str, Any]:
    """Begin hooks of epochs advance state; all ranks have the same state, and other parts of each batch."""
    from tests.helpers.beginnings import begun as train_over

    module = train_over(directory, place, "advance", set(stops), backend="ddp")
    kept = {name: repr(value) for name, value in module.keeps.state().items()}
    return {"samples": module.samples, "weights": weights(module).tolist(), "kept": kept}
