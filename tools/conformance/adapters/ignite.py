"""Ignite's `create_supervised_trainer` and `create_supervised_evaluator`, as its documentation puts them together.

`gradient_accumulation_steps`; `Checkpoint` with `DiskSaver` over model, optimizer, schedule and trainer, and
`Checkpoint.load_objects`; `deterministic=True` and two workers where a run is to be resumed exactly; `LRScheduler` on
ITERATION_STARTED; `TerminateOnNan`; the metric `Average`; `idist.auto_model` and `idist.auto_dataloader` with
`set_epoch`. A stream of data shares itself out, as its documentation leaves that to the user.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, LRScheduler, TerminateOnNan
from ignite.metrics import Average
from ignite.utils import manual_seed

from tools.conformance.adapter import Adapter
from tools.conformance.task import Stream, Task

logging.disable(logging.WARNING)

_LOADING = "with torch.load(weights_only=False): its load_objects refuses the state of its deterministic trainer"


def _prepare(batch: Any, device: Any, non_blocking: bool) -> tuple[Any, Any]:
    return batch, batch["labels"]


class Peer(Adapter):
    """Ignite."""

    distribution: ClassVar[str] = "pytorch-ignite"
    notes: ClassVar[dict[str, str]] = {
        "mode_restored": "it calls model.train() in every step",
        "resume_dropout": _LOADING,
        "resume_augmentation": _LOADING,
        "nonfinite_step": "TerminateOnNan looks after the step",
    }

    def train(self, task: Task) -> None:
        if task.fp16:
            self.lacks("its float16 step is for GPUs: it enters autocast('cuda')")
        if task.items is not None:
            self.lacks("no weights of micro-batches")
        if task.resume == "newest":
            self.lacks("the user chooses the checkpoint to continue from")
        if task.processes > 1:
            idist.initialize("gloo")
        if task.seed is not None:
            manual_seed(task.seed)
        model = idist.auto_model(task.model) if task.processes > 1 else task.model
        optimizer = task.optimizer(model.parameters())
        loader = self._loader(task.data, task, task.shuffle)
        trainer = create_supervised_trainer(
            model,
            optimizer,
            lambda returned, labels: returned["loss"],
            prepare_batch=_prepare,
            model_fn=lambda net, batch: net(**batch),
            deterministic=task.exact,
            gradient_accumulation_steps=task.accumulate,
        )
        objects = {"model": task.model, "optimizer": optimizer, "trainer": trainer}
        schedule = task.schedule(optimizer, task.epochs * len(loader))
        if schedule is not None:
            objects["schedule"] = LRScheduler(schedule)
            trainer.add_event_handler(Events.ITERATION_STARTED, objects["schedule"])
        self._attach(trainer, task, loader, objects)
        if task.resume is not None:
            # Its loading refuses the random states of numpy that a deterministic trainer has saved.
            saved = torch.load(str(task.resume), weights_only=False) if task.exact else str(task.resume)
            Checkpoint.load_objects(objects, checkpoint=saved)
        trainer.run(loader, max_epochs=task.epochs)

    def evaluate(self, task: Task) -> float:
        if task.processes > 1:
            idist.initialize("gloo")
        return self._mean(task)

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("checkpoint_*.pt"), key=lambda path: int(path.stem.removeprefix("checkpoint_")))

    def _attach(self, trainer: Engine, task: Task, loader: Any, objects: Any) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        if task.processes > 1 and task.shuffle:
            trainer.add_event_handler(Events.EPOCH_STARTED, lambda e: loader.sampler.set_epoch(e.state.epoch))
        if task.save:
            saver = DiskSaver(str(task.folder), create_dir=True, require_empty=False)
            saving = Checkpoint(objects, saver, n_saved=None, global_step_transform=lambda e, _: e.state.iteration)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=task.accumulate), saving)
        if task.validation is not None:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: self._mean(task))

    def _mean(self, task: Task) -> float:
        evaluator = create_supervised_evaluator(
            task.model, prepare_batch=_prepare, model_fn=lambda net, batch: net(**batch)
        )
        Average(output_transform=lambda output: output[0]["score"][:, None]).attach(evaluator, "score")
        with torch.no_grad():
            return float(evaluator.run(self._loader(task.validation, task, shuffle=False)).metrics["score"])

    def _loader(self, data: Any, task: Task, shuffle: bool) -> Any:
        options: dict[str, Any] = {} if isinstance(data, Stream) else {"shuffle": shuffle}
        if task.exact:
            options["num_workers"] = 2
        return idist.auto_dataloader(data, batch_size=task.batch * task.processes, **options)
