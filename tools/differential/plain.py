"""The plain loop: a hand-written training with torch.

Of the library it only uses definitions: the permutation of the samples, the seeds of samples, and the random state for
loaders with their own order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SequentialSampler, Subset

from tools.differential.case import Case
from tools.differential.datasets import SCALE
from tools.differential.optimizers import Scheduled
from tools.differential.task import Gap, Task
from trainstack.trainer.core.order import DataOrder, mix
from trainstack.trainer.core.random_state import IsolatedIterator, LoaderGenerators, seed_sample


class Log:
    """Values by name, with their steps and epochs."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, list[Any]]] = {}

    def add(self, name: str, value: float | Tensor, step: int, epoch: int) -> None:
        """Record a value."""
        column = self.columns.setdefault(name, {"value": [], "step": [], "epoch": []})
        for key, item in (("value", float(value)), ("step", step), ("epoch", epoch)):
            column[key].append(item)

    def at(self, step: int) -> dict[str, float]:
        """The newest value of each name whose newest value is of `step`."""
        return {name: c["value"][-1] for name, c in sorted(self.columns.items()) if c["step"][-1] == step}

    def of_epoch(self, name: str, epoch: int) -> float | None:
        """The newest value of `name` if it is of `epoch`."""
        column = self.columns.get(name)
        return column["value"][-1] if column is not None and column["epoch"][-1] == epoch else None


@contextmanager
def own_random_numbers(seed: int | None = None) -> Iterator[None]:
    """A block that restores all generators at its end; with a `seed`, it begins with this seed."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        if seed is not None:
            torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        yield
    finally:
        torch.set_rng_state(before[0]), np.random.set_state(before[1]), random.setstate(before[2])


def settle_modes(module: nn.Module) -> None:
    """Set the trained parts to training mode.

    A part in eval mode stays in it if all its parameters are frozen, or if it is a single layer in a trained part.
    """
    module.training = True
    for part in module.children():
        parameters, in_eval = list(part.parameters()), not any(one.training for one in part.modules())
        frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
        if in_eval and (frozen or not list(part.children())):
            continue
        if in_eval:
            part.train()
        settle_modes(part)


class Buffers:
    """A copy of the buffers of a network: objects and values."""

    def __init__(self, network: nn.Module) -> None:
        self.kept = [
            (
                part,
                {name: (buffer, None if buffer is None else buffer.clone()) for name, buffer in part._buffers.items()},
            )
            for part in network.modules()
        ]

    def restore(self) -> None:
        """Restore the objects and their values."""
        with torch.no_grad():
            for part, buffers in self.kept:
                part._buffers = {name: buffer for name, (buffer, _) in buffers.items()}
                for buffer, value in buffers.values():
                    if buffer is not None:
                        buffer.copy_(value)


def joined(items: list[Any]) -> Any:
    """Outputs of several steps, joined along dimension 0."""
    first = items[0]
    if isinstance(first, Tensor):
        return torch.cat([item.reshape(1) if not item.dim() else item for item in items])
    if isinstance(first, dict):
        return {key: joined([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return [joined(list(column)) for column in zip(*items, strict=True)]
    return items


def as_arguments(outputs: list[Any]) -> tuple[Any, ...]:
    """Joined outputs as the arguments of a hook."""
    if not outputs:
        return ()
    together = joined(outputs)
    return tuple(together) if isinstance(outputs[0], tuple | list) else (together,)


def copied(outputs: Any) -> Any:
    """Outputs with copies of their tensors; other objects are kept."""
    if isinstance(outputs, Tensor):
        return outputs.detach().clone()
    if isinstance(outputs, dict):
        return {key: copied(item) for key, item in outputs.items()}
    if isinstance(outputs, tuple | list):
        return type(outputs)(copied(item) for item in outputs)
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return replace(outputs, **{one.name: copied(getattr(outputs, one.name)) for one in fields(outputs)})
    return outputs


def loss_in(outputs: Any) -> Tensor:
    """The loss in the outputs of a step."""
    if isinstance(outputs, dict):
        loss = outputs["loss"]
    elif isinstance(outputs, tuple | list):
        loss = outputs[0]
    else:
        loss = getattr(outputs, "loss", outputs)
    assert isinstance(loss, Tensor)
    return loss


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of parameters that have one."""
    return [p.grad for p in parameters if p.grad is not None]


class PlainLoop:
    """The training of a case.

    Attributes:
        log: the records.
        schedulers: those of the run.
    """

    def __init__(self, case: Case, task: Task) -> None:
        self.case, self.task, self.log = case, task, Log()
        self.step = self.epoch = self.steps_in_epoch = self.skipped = self.batches = 0
        self.current_step = 0
        self.window: list[tuple[float, float]] = []
        self.of_epoch: list[tuple[float, float]] = []
        self.norm: Tensor | None = None
        self.rates: list[float] = []
        self.hooks = dict(case.hooks)
        self.filters = {one.event: [one, 0] for one in case.subscribers}
        self.gap = Gap()
        task.log = lambda name, value: self.log.add(name, value, self.current_step, self.epoch)

    def run(self) -> None:
        """Train."""
        task = self.task
        task.begin()
        self.optimizers, wanted = task.make_optimizers()
        made: dict[int, Any] = {}
        for position, one in sorted(enumerate(wanted), key=lambda pair: pair[1].factory):  # factories are called last
            made[position] = one.make(self.optimizers[one.optimizer])
        self.schedulers = [made[position] for position in range(len(wanted))]
        self.scheduled: list[tuple[Scheduled, Any]] = list(zip(wanted, self.schedulers, strict=True))
        self.waited = [0] * len(wanted)
        self._plan()
        settle_modes(task.network)
        modes = [(part, part.training) for part in task.network.modules()]
        while not self._is_over():
            for part, training in modes:
                part.training = training
            self._train_epoch()
        self._event("train_end", "finished")
        self._hook("on_end_train", self.step)

    # --- number of steps

    def _plan(self) -> None:
        case, task = self.case, self.task
        cap = case.arguments.get("max_train_steps_per_epoch")
        if case.ordered:
            length: int | None = len(list(self._order().local_batches(0)))
        else:
            try:
                length = -(-len(task.data.loader(RandomSampler, case.micro_batch)) // case.accumulation)
            except TypeError:
                length = None
        self.cap = cap
        self.epoch_length = length if length is None or cap is None else min(length, cap)
        whole = None if self.epoch_length is None else self.epoch_length * case.epochs
        self.max_steps = case.max_steps
        if isinstance(case.max_steps, float):
            assert whole is not None
            self.max_steps = max(1, math.ceil(Fraction(str(case.max_steps)) * whole))
        self.total = whole if self.max_steps is None else self.max_steps
        self.log_every = case.log_every
        if isinstance(case.log_every, float):
            self.log_every = max(1, math.ceil(Fraction(str(case.log_every)) * self.total))  # type: ignore[operator]

    def _order(self) -> DataOrder:
        """The order of the samples, or of the positions in several loaders."""
        case, data = self.case, self.task.data
        grouped, several = case.data == "length groups", case.data == "several loaders"
        return DataOrder(
            length=self._positions() if several else len(data.dataset),
            global_batch=case.batch,
            micro_batch=case.micro_batch,
            seed=case.arguments.get("seed", 0),
            shuffle=(case.shuffle or grouped) and not several,
            drop_last=case.drop_last,
            lengths=torch.tensor(data.lengths) if grouped else None,
        )

    def _positions(self) -> int:
        """The number of positions in an epoch of two loaders; the second has two samples for each."""
        counts = len(self.task.data.dataset), len(self.task.data.second) // 2
        return min(counts) if self.case.arguments["combine_loaders"] == "min" else max(counts)

    def _ends_within_epoch(self) -> bool:
        if self.max_steps is None or self.step < self.max_steps or not self.steps_in_epoch:
            return False
        length = self.cap if self.epoch_length is None else self.epoch_length
        return length is None or self.steps_in_epoch < length

    def _is_over(self) -> bool:
        if self.max_steps is None:
            return self.epoch >= self.case.epochs
        return self.step >= self.max_steps

    # --- user code

    def _hook(self, name: str, *given: Any) -> None:
        if name in self.hooks:
            self.task.reach(name, *given)

    def _event(self, name: str, *given: Any) -> None:
        if name not in self.filters:
            return
        entry = self.filters[name]
        entry[1] += 1
        one, count = entry
        if (one.every is None or count % one.every == 0) and (one.once is None or count == one.once):
            self.task.reach(name, *given)

    def _takes_outputs(self, hook: str) -> bool:
        return self.hooks.get(hook, "none") != "none"

    # --- data

    def _step_batches(self) -> Iterator[tuple[Iterator[Any], int, float | None]]:
        """For each step of the epoch its micro-batches, which are fetched lazily, their largest number, and their total
        weight; None if it is unknown.

        It is known if the weight of a batch is its number of samples and the library orders the data.
        """
        case, task = self.case, self.task
        generators = LoaderGenerators(case.arguments.get("seed", 0), self.epoch)
        with generators:
            loader = task.data.loader(RandomSampler, case.micro_batch)
        if case.workers:
            loader.dataset.scale = SCALE
        if case.ordered:
            for share in self._order().local_batches(self.epoch):
                fetched = (self._fetch(loader, rows.tolist()) for rows in share.micro_batches)
                yield fetched, len(share.micro_batches), None if case.weights else float(share.samples)
            return
        batches = IsolatedIterator(generators, lambda: iter(loader))
        while True:
            first = list(islice(batches, 1))
            if not first:
                return
            number = case.accumulation
            yield self._first_and_more(first[0], islice(batches, number - 1)), number, None

    @staticmethod
    def _first_and_more(first: Any, more: Iterable[Any]) -> Iterator[Any]:
        yield first
        yield from more

    def _fetch(self, loader: Any, rows: list[int]) -> Any:
        """The batch of `rows`; each sample has its own random numbers."""
        if isinstance(loader, dict):
            return self._fetch_several(loader, rows)
        seed, dataset = self.case.arguments.get("seed", 0), loader.dataset
        inner = dataset.dataset if isinstance(dataset, Subset) else dataset
        with own_random_numbers():
            if hasattr(inner, "__getitems__"):
                seed_sample(seed, self.epoch, rows[0])
                samples = dataset.__getitems__(rows)
            else:
                samples = []
                for row in rows:
                    seed_sample(seed, self.epoch, row)
                    samples.append(dataset[row])
            return loader.collate_fn(samples)

    def _fetch_several(self, loaders: dict[str, Any], positions: list[int]) -> Any:
        """A batch of each loader. A loader without further whole global batches has None, or begins again."""
        case, seed = self.case, self.case.arguments.get("seed", 0)
        mode, samples = case.arguments["combine_loaders"], dict[str, list[Any]]()
        with own_random_numbers():
            for position in positions:
                seed_sample(seed, self.epoch, position)
                for place, (name, loader) in enumerate(loaders.items()):
                    length, each = len(loader.dataset), place + 1
                    whole = length // each
                    ends = whole if whole >= self._positions() else whole - whole % case.batch
                    if mode == "max" and position >= ends:
                        continue
                    for row in range(each * position, each * (position + 1)):
                        again, at = divmod(row, length)
                        own = mix(seed, place) if place else seed
                        order = DataOrder(
                            length=length,
                            global_batch=each * case.batch,
                            micro_batch=1,
                            seed=mix(own, again) if again else own,
                            shuffle=case.shuffle or place == 1,
                        )
                        index = int(order.permutation(self.epoch)[at])
                        samples.setdefault(name, []).append(loader.dataset[index])
            return {name: loaders[name].collate_fn(samples[name]) if name in samples else None for name in loaders}

    def _weigh(self, batch: Any) -> float:
        if self.case.weights:
            return float(self.task.batch_weight(batch))
        if isinstance(batch, dict) and "first" in batch:  # by positions
            return float(len(batch["second"][1]) / 2 if batch["first"] is None else len(batch["first"][1]))
        return float(len(batch["y"] if isinstance(batch, dict) else batch[1]))

    # --- training

    def _train_epoch(self) -> None:
        epoch = self.epoch
        self._event("epoch_begin", epoch)
        self._hook("on_begin_train_epoch", self.step, epoch)
        self._event("train_epoch_begin", epoch)
        keep = self._takes_outputs("on_end_train_epoch") and self.case.arguments.get("collect_train_outputs", True)
        outputs: list[Any] | None = [] if keep else None
        self.of_epoch = []
        steps = self._step_batches()
        while not self._has_ended():
            one = next(steps, None)
            if one is None:
                break
            self._train_step(*one, outputs)
        if self._ends_within_epoch():
            return
        self._record_mean("train/loss_epoch", self.of_epoch)
        self._record_skipped()
        self._hook("on_end_train_epoch", self.step, *as_arguments(outputs or []))
        self._event("train_epoch_end", epoch)
        every = 1 if self.case.validate_every is None else -self.case.validate_every
        if every > 0 and (epoch + 1) % every == 0:
            self._validate()
        self._step_schedulers("epoch")
        self._event("epoch_end", epoch)
        self.epoch += 1
        self.steps_in_epoch = 0

    def _has_ended(self) -> bool:
        if self.cap is not None and self.steps_in_epoch >= self.cap:
            return True
        return self.max_steps is not None and self.step >= self.max_steps

    def _train_step(
        self, batches: Iterator[Any], passes: int, total: float | None, epoch_outputs: list[Any] | None
    ) -> None:
        task = self.task
        number = self.current_step = self.step + 1
        buffers = Buffers(task.network)
        step_outputs: list[Any] = []
        losses: list[float] = []
        counts: list[float] = []
        estimate: float | None = None  # of the items of the step, if they are known only after its last micro-batch
        for batch in batches:
            counts.append(self._weigh(batch))
            if total is None and counts[-1] > (estimate or 0.0):
                if estimate:
                    self._scale_gradients(estimate / (counts[-1] * passes))
                estimate = counts[-1] * passes
            weight = counts[-1] / (total or estimate or 1.0)
            outputs = self._forward_backward(number, batch, weight)
            loss = loss_in(outputs)
            losses.append(float(loss.detach()))
            step_outputs.append(copied(outputs))
            if epoch_outputs is not None:
                epoch_outputs.append(copied(outputs))
            self._hook("on_end_backward", number, loss)
            self._event("after_backward", loss)
        items = sum(counts)
        if estimate is not None and items > 0:
            self._scale_gradients(estimate / items)
        moved = self._update(losses, counts)
        if not moved:
            self.skipped += 1
            buffers.restore()
        if moved:
            loss_of_step = sum(loss * (count / items) for loss, count in zip(losses, counts, strict=True) if count)
            self.window.append((loss_of_step * items, items))
            self.of_epoch.append((loss_of_step * items, items))
            self._step_schedulers("step")
        self.step, self.steps_in_epoch, self.batches = number, self.steps_in_epoch + 1, self.batches + len(counts)
        self._hook(
            "on_end_train_step",
            number,
            *(as_arguments(step_outputs) if self._takes_outputs("on_end_train_step") else ()),
        )
        self._event("train_step_end", number)
        self._log_and_validate()

    def _forward_backward(self, number: int, batch: Any, weight: float) -> Any:
        self._event("train_batch_begin", batch)
        if self.case.module_hooks:
            self.task.trace.add("module interface", "TRAIN", number)
        outputs = self.task.train_step(number, batch)
        if weight:
            self._event("before_backward", outputs)
            loss = loss_in(outputs)
            loss.backward(gradient=torch.full((), weight, dtype=loss.dtype))
        return outputs

    def _held(self) -> list[nn.Parameter]:
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    def _scale_gradients(self, factor: float) -> None:
        for gradient in gradients(dict.fromkeys([*self.task.network.parameters(), *self._held()])):
            gradient.mul_(factor)

    def _update(self, losses: list[float], counts: list[float]) -> bool:
        """Clip, step and zero; returns whether the optimizers stepped."""
        case, held = self.case, self._held()
        there = gradients(held)
        kind, limit = case.clipping
        due = (self.step + 1) % self.log_every == 0 or self.step + 1 == self.max_steps
        norm = torch.nn.utils.get_total_norm(there) if there and (kind != "none" or due or case.skip) else None
        bad = any(count and not math.isfinite(loss) for loss, count in zip(losses, counts, strict=True))
        bad = bad or (norm is not None and not math.isfinite(float(norm)))
        moved = sum(counts) > 0 and not (case.skip and bad)
        if moved:
            self.norm = norm
            if kind == "norm":
                torch.nn.utils.clip_grad_norm_(held, limit)
            elif kind == "value" and there:  # torch refuses an empty list
                torch.nn.utils.clip_grad_value_(held, limit)
            self._event("before_optimizer_step", self.optimizers)
        self.rates = [float(group["lr"]) for one in self.optimizers for group in one.param_groups]
        if moved:
            for optimizer in self.optimizers:
                optimizer.step()
            self._event("after_optimizer_step", self.optimizers)
        self._event("before_zero_grad", self.optimizers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.task.network.zero_grad()
        self._event("after_zero_grad", self.optimizers)
        return moved

    def _step_schedulers(self, interval: str) -> None:
        for position, (one, scheduler) in enumerate(self.scheduled):
            if one.interval != interval:
                continue
            value = self.log.of_epoch(one.monitor, self.epoch) if one.monitor else None
            if one.monitor and value is None:
                continue
            self.waited[position] += 1
            if self.waited[position] == one.frequency:
                self.waited[position] = 0
                scheduler.step(*([value] if one.monitor else []))

    # --- recording

    def _record(self, name: str, value: float | Tensor) -> None:
        self.log.add(name, value, self.step, self.epoch)

    def _record_mean(self, name: str, parts: list[tuple[float, float]]) -> None:
        if parts:
            self._record(name, math.fsum(part for part, _ in parts) / sum(items for _, items in parts))

    def _record_skipped(self) -> None:
        if self.skipped:
            self._record("train/skipped_steps", self.skipped)

    def _log_and_validate(self) -> None:
        step, every = self.step, self.case.validate_every
        if step % self.log_every == 0 or step == self.max_steps:
            self._record_mean("train/loss", self.window)
            self.window = []
            if self.norm is not None:
                self._record("train/grad_norm", self.norm)
            for position, rate in enumerate(self.rates):
                self._record("lr" if len(self.rates) == 1 else f"lr/{position}", rate)
            self._record_skipped()
            self._event("log", step)
        interval = Fraction(0)
        if isinstance(every, float):
            interval = Fraction(str(every)) * self.total  # type: ignore[operator]
        elif every is not None and every > 0:
            interval = Fraction(every)
        due = interval > 0 and step // interval * interval > step - 1
        counts_epochs = every is None or every < 0
        if due or (counts_epochs and step == self.max_steps and self._ends_within_epoch()):
            self._validate()

    # --- validation

    def _validate(self) -> None:
        case, task = self.case, self.task
        if not case.val:
            return
        with own_random_numbers(seed=0):
            loaders = task.val_loaders(SequentialSampler, 2)
            self._event("validation_begin")
            for key, loader in (loaders if isinstance(loaders, dict) else {"default": loaders}).items():
                modes = [(part, part.training) for part in task.network.modules()]
                task.network.eval()
                outputs = self._evaluate(key, loader)
                self._hook(
                    "on_end_val_epoch",
                    self.step,
                    *(as_arguments(outputs) if self._takes_outputs("on_end_val_epoch") else ()),
                    key,
                )
                for part, training in modes:
                    part.training = training
            self._event("validation_end", self.log.at(self.step))

    def _evaluate(self, key: str, loader: Any) -> list[Any]:
        case, task, outputs = self.case, self.task, list[Any]()
        parts, weights = list[float](), list[float]()
        self.gap.reset()
        with torch.no_grad():
            for batch in islice(iter(loader), case.arguments.get("max_val_steps_per_epoch")):
                if case.module_hooks:
                    task.trace.add("module interface", "VAL", self.step)
                returned = task.val_step(self.step, batch)
                outputs.append(copied(returned))
                self.gap.update(*task.metric_inputs(returned, batch))
                value = float(loss_in(returned))
                weights.append(self._weigh(batch))
                if weights[-1]:
                    parts.append(value * weights[-1])
        place = "val" if key == "default" else f"val/{key}"
        if math.fsum(weights):
            self._record(f"{place}/loss", math.fsum(parts) / math.fsum(weights))
        if case.metrics:
            for name, value in self.gap.compute().items():
                self._record(f"{place}/gap/{name}", value)
        return outputs

    @property
    def counters(self) -> dict[str, int]:
        """The counters of the training."""
        return {
            "global_step": self.step,
            "epoch": self.epoch,
            "skipped_steps": self.skipped,
            "batches": self.batches,
            "steps_in_epoch": self.steps_in_epoch,
        }
