"""The training of a case with a `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainstack as ts
from tools.differential.case import Case
from tools.differential.task import Gap, Planned, Task
from trainstack.trainer.events import Event

MOST_STARTS = 3
"""The largest number of calls of `train()`."""


class TaskModule(ts.ModuleInterface):
    """The module of a case; `module_class` adds hooks."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.network, self.task = task.network, task
        if task.case.metrics:
            self.metrics = {"gap": Gap()}

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizers, wanted = self.task.make_optimizers()
        configs = []
        for one in wanted:
            scheduler = one.make if one.factory else one.make(optimizers[one.optimizer])
            options = (
                {"monitor": one.monitor} if one.monitor else {"interval": one.interval, "frequency": one.frequency}
            )
            bare = options == {"interval": "step", "frequency": 1}
            configs.append(scheduler if bare else ts.SchedulerConfig(scheduler, **options))
        return optimizers, configs

    def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
        return self.task.data.loader(sampler, batch_size)

    def get_val_dataloaders(self, sampler: type, batch_size: int) -> Any:
        return self.task.val_loaders(sampler, batch_size)

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return self.task.train_step(global_step, batch)

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return self.task.val_step(global_step, batch)

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        return self.task.metric_inputs(outputs, batch)


def _hook(name: str, form: str) -> Any:
    """The hook `name` with a signature without outputs, with `*outputs`, or with two named outputs."""
    if name not in ("on_end_train_step", "on_end_train_epoch", "on_end_val_epoch"):
        return lambda self, *given: self.task.reach(name, *given)
    if name == "on_end_val_epoch":
        forms: dict[str, Any] = {
            "none": lambda self, global_step, key="default": self.task.reach(name, global_step, key),
            "star": lambda self, global_step, *outputs, key: self.task.reach(name, global_step, *outputs, key),
            "named": lambda self, global_step, losses, outputs, key="default": self.task.reach(
                name, global_step, losses, outputs, key
            ),
        }
    else:
        forms = {
            "none": lambda self, global_step: self.task.reach(name, global_step),
            "star": lambda self, global_step, *outputs: self.task.reach(name, global_step, *outputs),
            "named": lambda self, global_step, losses, outputs: self.task.reach(name, global_step, losses, outputs),
        }
    return forms[form]


def _subscriber(event: str) -> Any:
    return lambda self, trainer, *given: self.task.reach(event, *given)


def module_class(case: Case) -> type[TaskModule]:
    """A class with only the hooks of the case, because the presence of a hook changes the loop."""
    methods = {name: _hook(name, form) for name, form in case.hooks}
    methods |= {f"on_{one.event}": _subscriber(one.event) for one in case.subscribers if one.form == "module"}
    if case.weights:
        methods["batch_weight"] = lambda self, batch: self.task.batch_weight(batch)
    return type("Drawn", (TaskModule,), methods)


def arguments(case: Case, folder: Path) -> ts.TrainerArguments:
    """The arguments of the case."""
    kind, limit = case.clipping
    clipping: dict[str, Any] = {"clip_grads": kind == "norm"}
    if kind != "none":
        clipping["max_grad_norm" if kind == "norm" else "clip_grad_value"] = limit
    return ts.TrainerArguments(
        epochs=case.epochs,
        max_steps=case.max_steps,
        train_batch_size=case.batch,
        gpu_batch_size_limit=case.limit,  # type: ignore[arg-type]
        val_batch_size=2,
        validate_every=case.validate_every,
        nonfinite="skip" if case.skip else "raise",
        log_every=case.log_every,
        backend=case.rank_backend if case.ranks else "sp",
        backend_options={case.rank_backend: dict(case.options)} if case.options else {},
        device="cpu",
        output_dir=folder,
        checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False, log_level="CRITICAL"),
        writers=[],
        progress="none",
        handle_signals=False,
        log_level="CRITICAL",
        **clipping,
        **case.arguments,
    )


class LibraryRun:
    """The training of a case.

    Attributes:
        trainer: the trainer.
        starts: the number of calls of `train()`.
    """

    def __init__(self, case: Case, task: Task, folder: Path) -> None:
        self.case, self.task, self.starts = case, task, 0
        task.trace.muted, task.raises = True, case.raises is not None
        module = module_class(case)(task)
        methods = {f"on_{one.event}": _subscriber(one.event) for one in case.subscribers if one.form == "callback"}
        callback = type("Drawn", (ts.Callback,), {**methods, "task": task, "expects_all_events": False})
        self.trainer = ts.Trainer(module, arguments(case, folder), callbacks=[callback])
        for one in case.subscribers:
            if one.form == "function":
                self._subscribe(one.event, one.every, one.once)
        self.trainer.on(Event.TRAIN_BEGIN, priority=1000)(lambda trainer: task.begin())
        task.log = module.log
        task.validate = lambda: self.trainer.validate(log=False)
        if case.reduction:
            module.loss_reduction = case.reduction
        if case.module_hooks:
            module.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def _subscribe(self, event: str, every: int | None, once: int | None) -> None:
        reach = self.task.reach
        self.trainer.on(Event(event), every=every, once=once)(lambda trainer, *given: reach(event, *given))

    def _on_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.task.trace.add("module interface", kwargs["stage"].name, kwargs["global_step"])

    def run(self) -> None:
        """Train, and train again after an error of the case."""
        if self.case.find_lr:
            ts.find_lr(self.trainer, steps=3)
        while True:
            self.starts += 1
            self.task.trace.muted = True  # until the begin of the training
            try:
                self.trainer.train()
                return
            except Planned:
                if self.starts == MOST_STARTS or self.case.ranks:  # the other ranks have failed, too
                    raise

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers of the run."""
        return tuple(self.trainer.schedulers)

    @property
    def history(self) -> dict[str, Any]:
        """The recorded values by name."""
        return self.trainer.history.to_dict()

    @property
    def counters(self) -> dict[str, int]:
        """The counters of the training."""
        names = ("global_step", "epoch", "skipped_steps", "batches", "steps_in_epoch")
        return {name: getattr(self.trainer.state, name) for name in names}
