"""A loop with Accelerate, as "Quicktour", "Gradient accumulation" and "Checkpointing" of its documentation write it.

`with accelerator.accumulate(model)`; for a loss over tokens the loop of "Gradient accumulation on training samples of
variable size"; a schedule over the steps of the loader as it is before `prepare`; `save_state`, `load_state` and
`skip_first_batches`, the newest folder found as in the example `checkpointing.py`; `use_seedable_sampler=True`;
`gather_for_metrics`. Decisions of such a loop, such as modes, are the user's and are not tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from tools.conformance.adapter import Adapter
from tools.conformance.task import Stream, Task, mean_loss


class Peer(Adapter):
    """Accelerate."""

    distribution: ClassVar[str] = "accelerate"
    not_offered: ClassVar[dict[str, str]] = {
        "validation_unseen": "the user writes the loop and its validation",
        "mode_restored": "the user writes the loop with model.train() and model.eval()",
        "nonfinite_step": "the user writes the loop and its reaction to a loss of nan",
    }
    notes: ClassVar[dict[str, str]] = {
        "resume_dropout": "with use_stateful_dataloader=True, too",
        "resume_augmentation": "its loader is one batch ahead of the step that is saved",
        "short_window": "accelerator.accumulate divides by its number of steps; the loop for token weights does not",
        "uneven_windows": "accelerator.accumulate counts micro-batches alike; the loop for token weights does not",
        "killed": "the newest folder is found as in its example",
        "torn": "the newest folder is found as in its example",
    }

    def train(self, task: Task) -> None:
        if task.fp16:
            self.lacks("float16 with a loss scaler needs a GPU")
        if task.seed is not None:
            set_seed(task.seed)
        accelerator = self._accelerator(task)
        optimizer = task.optimizer(task.model.parameters())
        loader = DataLoader(task.data, batch_size=task.batch, shuffle=task.shuffle)
        schedule = task.schedule(optimizer, task.epochs * len(loader) // task.accumulate)
        model, optimizer, loader, schedule = accelerator.prepare(task.model, optimizer, loader, schedule)
        step = self._resumed(accelerator, task)
        steps_an_epoch = -(-len(loader) // task.accumulate)
        for epoch in range(step // steps_an_epoch, task.epochs):
            model.train()
            loader.set_epoch(epoch)
            done = step - epoch * steps_an_epoch
            batches = accelerator.skip_first_batches(loader, done * task.accumulate) if done else loader
            run = self._by_items if task.items else self._accumulated
            for _ in run(accelerator, task, model, optimizer, schedule, batches):
                step += 1
                if task.save:
                    accelerator.save_state(str(task.folder / f"step_{step}"))
            if task.validation is not None:
                self._mean(accelerator, task, model)

    def evaluate(self, task: Task) -> float:
        accelerator = self._accelerator(task)
        return self._mean(accelerator, task, accelerator.prepare(task.model))

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("step_*"), key=os.path.getctime)

    def _accelerator(self, task: Task) -> Accelerator:
        config = DataLoaderConfiguration(use_seedable_sampler=True)
        return Accelerator(cpu=True, gradient_accumulation_steps=task.accumulate, dataloader_config=config)

    def _resumed(self, accelerator: Accelerator, task: Task) -> int:
        """The step after which the run continues."""
        if task.resume is None:
            return 0
        path = self.checkpoints(task.folder)[-1] if task.resume == "newest" else task.resume
        accelerator.load_state(str(path))
        return int(path.name.removeprefix("step_"))

    def _accumulated(
        self, accelerator: Accelerator, task: Task, model: Any, optimizer: Any, schedule: Any, batches: Iterable[Any]
    ) -> Any:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield

    def _by_items(
        self, accelerator: Accelerator, task: Task, model: Any, optimizer: Any, schedule: Any, batches: Iterable[Any]
    ) -> Any:
        """Fetch the batches of a window first, and count their items."""
        assert task.items is not None
        fetched = list(batches)
        for start in range(0, len(fetched), task.accumulate):
            window = fetched[start : start + task.accumulate]
            items = sum(map(task.items, window))
            for batch in window:
                outputs = model(x=batch["x"])["outputs"]
                # accelerator.backward divides by the number of accumulation steps.
                accelerator.backward(mean_loss(outputs, batch["labels"], items) * task.accumulate)
            optimizer.step()
            optimizer.zero_grad()
            yield

    @torch.no_grad()
    def _mean(self, accelerator: Accelerator, task: Task, model: Any) -> float:
        if isinstance(task.validation, Stream):
            task.validation.shared = True
        loader = accelerator.prepare(DataLoader(task.validation, batch_size=task.batch))
        model.eval()
        gathered = [accelerator.gather_for_metrics(model(**batch)["score"]) for batch in loader]
        return float(torch.cat(gathered).mean())
