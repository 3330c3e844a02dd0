"""A handwritten loop with all common mistakes: it has to fail every case, and the table does not have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tools.conformance.adapter import Adapter
from tools.conformance.task import Task, seed_all


class Peer(Adapter):
    """The form of many first scripts."""

    distribution: ClassVar[str] = "torch"

    def train(self, task: Task) -> None:
        seed_all(42)  # for reproducibility
        self._join(task)
        model: Any = DistributedDataParallel(task.model) if task.processes > 1 else task.model
        optimizer = task.optimizer(model.parameters())
        loader = self._loader(task.data, task, task.shuffle)
        total = task.epochs * len(DataLoader(task.data, batch_size=task.batch)) // task.accumulate  # of one process
        schedule = task.schedule(optimizer, total)
        scaler = torch.amp.GradScaler("cpu", enabled=task.fp16)
        first, step = 0, 0
        if task.resume is not None:
            state = torch.load(self._found(task), weights_only=False)
            task.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first, step = state["epoch"], state["step"]
        for epoch in range(first, task.epochs):
            model.train()
            for number, batch in enumerate(loader, start=1):
                with torch.autocast("cpu", torch.float16, enabled=task.fp16):
                    loss = model(**batch)["loss"] / task.accumulate
                scaler.scale(loss).backward()
                if number % task.accumulate and number != len(loader):
                    continue
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                step += 1
                if task.save:
                    state = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "epoch": epoch, "step": step}, task.folder / f"step-{step:03d}.pt")
            if task.validation is not None:
                self._mean(task)

    def evaluate(self, task: Task) -> float:
        self._join(task)
        return self._mean(task)

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("step-*.pt"))

    def _found(self, task: Task) -> Path:
        return self.checkpoints(task.folder)[-1] if task.resume == "newest" else Path(str(task.resume))

    @torch.no_grad()
    def _mean(self, task: Task) -> float:
        """The means over the processes of the sum and of the count, which is an integer and loses its half."""
        task.model.eval()
        scores = [task.model(**batch)["score"] for batch in self._loader(task.validation, task, shuffle=False)]
        total, count = torch.cat(scores).sum(), torch.tensor(sum(map(len, scores)))
        for part in (total, count) if task.processes > 1 else ():
            dist.all_reduce(part)
            part.copy_(part / task.processes)
        return float(total / count)

    def _loader(self, data: Any, task: Task, shuffle: bool) -> DataLoader[Any]:
        if task.processes > 1 and not isinstance(data, IterableDataset):
            return DataLoader(data, batch_size=task.batch, sampler=DistributedSampler(data, shuffle=shuffle))
        return DataLoader(data, batch_size=task.batch, shuffle=shuffle)

    def _join(self, task: Task) -> None:
        if task.processes > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=task.processes)
