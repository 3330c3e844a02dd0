"""Runs whose ranks have different settings."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, weights
from tests.helpers.workers import RANK
from trainstack import callbacks
from trainstack.trainer.run.agreement import share_initial_values

Setup = dict[str, Any]
"""The changes of a case: "args", "module", "callbacks", "make" (of optimizers), "edit" (of the module)."""


class Same(Classifier):
    """A classifier with a buffer, whose optimizers a function makes."""

    make: Any = None

    def __init__(self, dataset: Any = None, **made: Any) -> None:
        super().__init__(dataset, **made)
        self.register_buffer("counts", torch.zeros(3))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        if self.make is not None:
            return self.make(self)
        return super().get_optimizers_schedulers(estimated_global_steps_per_epoch, epochs)


class OfDict(Same):
    """Takes the tensors out of samples that are dicts."""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        def collate(samples: Any) -> Any:
            return torch.stack([one["x"] for one in samples]), torch.stack([one["y"] for one in samples])

        return DataLoader(self.dataset, batch_size=batch_size, sampler=sampler(self.dataset), collate_fn=collate)


def sgd(module: nn.Module, **options: Any) -> Any:
    return [torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})], []


def adam(module: nn.Module, kind: Any = torch.optim.Adam, **options: Any) -> Any:
    return [kind(module.parameters(), **options)], []


def held(module: Any, names: str) -> Any:
    chosen = [p for name, p in module.named_parameters() if names in name]
    return [torch.optim.SGD(chosen, lr=0.1)], []


def two(module: Any, swapped: bool) -> Any:
    made = [
        torch.optim.SGD(module.net[0].parameters(), lr=0.1),
        torch.optim.Adam(module.net[3].parameters(), lr=0.1),
    ]
    return made[::-1] if swapped else made, []


def groups(module: Any, swapped: bool) -> Any:
    made = [{"params": [p], "lr": 0.1} for p in module.parameters()]
    return [torch.optim.SGD(made[::-1] if swapped else made)], []


def scheduled(module: Any, make: Callable[[Any], Any]) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [make(optimizer)]


def touched(module: Any, change: bool) -> Any:
    with torch.no_grad():
        module.net[3].weight[1, 2] += 1e-3 * change
    return sgd(module)


class Reordered(TensorDataset):
    pass


def one_sample(index: int, other: bool) -> TensorDataset:
    data = numbers(41)
    data.tensors[0][index] += 0.5 * other
    return data


class Arrays(Dataset[Any]):
    """Samples as numpy arrays of a dtype."""

    def __init__(self, dtype: Any) -> None:
        self.base, self.dtype = numbers(41), dtype

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.base[index]
        return inputs.numpy().astype(self.dtype), label


class OwnNoise(Dataset[Any]):
    """Augmentation from its own generator, which the operating system seeds."""

    def __init__(self) -> None:
        self.base, self.rng, self.fetched = numbers(41), np.random.default_rng(), 0

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        inputs, label = self.base[index]
        return inputs + float(self.rng.normal()), label


class Coin(OwnNoise):
    """A flip or not, from its own generator, with the results in `tosses`."""

    def __init__(self, tosses: str) -> None:
        super().__init__()
        self.tosses = tosses

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.base[index]
        flip = self.tosses[self.fetched % len(self.tosses)] == "1"
        self.fetched += 1
        return inputs.flip(0) if flip else inputs, label


class Counted(Dataset[Any]):
    """Samples that depend on the rank, from a data set that keeps a count."""

    def __init__(self, base: Any) -> None:
        self.base, self.fetched = base, 0

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        return self.base[index]


class Named(Dataset[Any]):
    """Samples with the paths of one host, in each of the ways of naming a file; `shift` changes a number."""

    def __init__(self, host: str, shift: float = 0.0) -> None:
        self.base, self.host, self.shift = numbers(41), host, shift

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.base[index]
        path = f"/{self.host}/{index}"
        names = [path, Path(path), path.encode(), np.str_(path), np.array([path]), np.array([path], dtype=object)]
        return {"x": inputs, "y": label, "names": names, "many": [path] * 99, "n": {"at": [1.5 + self.shift, 2]}}


class Talks(LambdaLR):
    """A scheduler with attributes for the main process."""

    def __init__(self, optimizer: Any, lr_lambda: Any) -> None:
        self.verbose, self.log_every = RANK == 0, 1 + RANK
        super().__init__(optimizer, lr_lambda)


def tie(module: Any, tied: bool) -> None:
    module.extra = nn.Linear(6, 8)
    with torch.no_grad():
        module.extra.weight.copy_(module.net[0].weight)
        module.extra.bias.zero_()
    if tied:
        module.extra.weight = module.net[0].weight


def edit(**attributes: Any) -> Setup:
    def change(module: Any) -> None:
        for name, value in attributes.items():
            setattr(module, name, value)

    return {"edit": change}


def with_hook(present: bool) -> Setup:
    class Hooked(Same):
        def on_end_train_epoch(self, global_step: int, *outputs: Any) -> None:
            pass

    Hooked.__qualname__ = "Same"
    return {"class": Hooked if present else Same}


def cases(other: bool) -> dict[str, Setup | Callable[[], Setup]]:
    """The settings of a rank, by case; `other` is the rank that differs."""
    data = numbers(41)
    swapped = TensorDataset(*(tensor.flip(0) for tensor in data.tensors)) if other else data
    return {
        # settings that must agree
        "seed": {"args": {"seed": 1 + other}},
        "learning rate": {"make": lambda m: sgd(m, lr=0.02 if other else 0.01)},
        "optimizer class": {"make": lambda m: adam(m, torch.optim.AdamW if other else torch.optim.Adam)},
        "betas": {"make": lambda m: adam(m, betas=(0.8 if other else 0.9, 0.999))},
        "decay": {"make": lambda m: sgd(m, weight_decay=0.1 * other)},
        "held": {"make": lambda m: held(m, "weight" if other else "")},
        "clipping": {"args": {"max_grad_norm": 1.0 + other}},
        "length": {"data": numbers(40 + other)},
        "first sample": {"data": one_sample(0, other)},
        "middle sample": {"data": one_sample(20, other)},
        "last sample": {"data": one_sample(40, other)},
        "epochs": {"args": {"epochs": 1 + other}},
        "batch": {"args": {"train_batch_size": 8 + 4 * other}},
        "one weight": {"make": lambda m: touched(m, other)},
        # further settings that must agree
        "order of the data": {"data": swapped},
        "numpy dtype": {"data": Arrays(np.float32 if other else np.float64)},
        "class of the data": {"data": Reordered(*data.tensors) if other else data},
        "lambda": {"make": lambda m: scheduled(m, lambda o: LambdaLR(o, lambda s: 0.8**s if other else 0.9**s))},
        "scheduler": {"make": lambda m: scheduled(m, lambda o: StepLR(o, 3) if other else CosineAnnealingLR(o, 9))},
        "inner scheduler": {
            "make": lambda m: scheduled(
                m, lambda o: SequentialLR(o, [StepLR(o, 3 + other), StepLR(o, 5)], milestones=[2])
            )
        },
        "scheduler missing": {"make": lambda m: sgd(m) if other else scheduled(m, lambda o: StepLR(o, 3))},
        "callback": {"callbacks": [callbacks.EMA(0.9)] if other else []},
        "callback setting": {"callbacks": [callbacks.EMA(0.8 if other else 0.9)]},
        "dropout": {"made": {"dropout": 0.1 * other}},
        "dtype": {"made": {"dtype": torch.float64 if other else torch.float32}},
        "requires_grad": {"edit": lambda m: m.net[0].weight.requires_grad_(not other)},
        "mode": {"edit": lambda m: m.net[2].train(not other)},
        "compile": {"args": {"compile": {"mode": "default"} if other else True}},
        "tf32": {"precision": "high" if other else "highest"},
        "version": {"version": "0.0.1"} if other else {},
        "swapped optimizers": {"make": lambda m: two(m, other)},
        "swapped groups": {"make": lambda m: groups(m, other)},
        "tied": {"edit": lambda m: tie(m, other)},
        "buffer missing": {"edit": lambda m: other and m._buffers.pop("counts")},
        "buffer shape": {"edit": lambda m: m.register_buffer("counts", torch.zeros(3 + other))},
        "hook": with_hook(other),
        "nested arguments": {"args": {"checkpointer_args": ts.DefaultCheckpointerArguments(keep_last=2 + other)}},
        "options": {"args": {"backend_options": {"ddp": {"bucket_cap_mb": 25 + other}}}},
        "log_every": {"args": {"log_every": 5 + other}},
        "validate_every": {"args": {"validate_every": (lambda t: other) if other else None}},
        "max_time": {"args": {"max_time": 3600.0 if other else None}},
        "resume": {"args": {"resume": "auto" if other else False}},
        "weight in a hook": {"late": "on_train_begin" if other else ""},
        "weight as an epoch begins": {"late": "on_train_epoch_begin" if other else ""},
        "lr in a hook": {"late_lr": other},
        # values that may differ
        "nothing": {},
        "folder": {"args": {"output_dir": f"/nowhere/{RANK}"} if other else {}},
        "checkpoints": {
            "args": {"checkpointer_args": ts.DefaultCheckpointerArguments(checkpoint=False, save_dir=f"rank{RANK}")}
        },
        "displays": {"args": {"progress": "plain", "writers": ["stdout"], "log_level": "ERROR"} if other else {}},
        "fast paths": {"environment": {"TRAINSTACK_FAST_PATHS": str(int(other))}},
        "fast_paths": {"args": {"fast_paths": other}},
        "initial weights": {"made": {"seed": 1 + other}},
        "random samples": {"data": Noisy()},
        "time that is left": {"args": {"max_time": 3600.0 + RANK}},
        "attributes of schedulers": {
            "make": lambda m: scheduled(
                m, lambda o: SequentialLR(o, [Talks(o, lambda s: 1.0), StepLR(o, 5)], milestones=[2])
            )
        },
        "attributes of a scheduler": {"make": lambda m: scheduled(m, lambda o: Talks(o, lambda s: 1.0))},
        "own generator": {"data": OwnNoise()},
        "own coin": {"data": Coin("111111000" if other else "000000111")},  # three samples, alike in two fetches
        "count and other data": {"data": Counted(swapped)},
        "paths in samples": {"class": OfDict, "data": Named(f"host{RANK}")},
        "number in a sample": {"class": OfDict, "data": Named(f"host{RANK}", shift=float(other))},
        "module attribute": edit(lr=0.1, note=f"rank {RANK}"),
        "sparse buffer": {"edit": lambda m: m.register_buffer("eye", (torch.eye(3) * (1 + other)).to_sparse())},
    }


def differs(directory: str, case: str, other: int = 1, save: bool = False) -> dict[str, Any]:
    """Train with other settings on rank `other`; the error, if there was one, and the state of the run."""
    setup: Any = cases(other == RANK)[case]
    kind = setup.get("class", Same)
    random.seed(0)
    module = kind(setup.get("data"), **setup.get("made", {}))
    module.make = setup.get("make")
    setup.get("edit", lambda module: None)(module)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setup.get("precision", precision))
    saving = {"checkpointer_args": ts.DefaultCheckpointerArguments()} if save else {}
    logged = Logged()
    version = mock.patch.object(ts, "__version__", setup.get("version", ts.__version__))
    with mock.patch.dict(os.environ, setup.get("environment", {})), version, logged:
        try:
            args = {"backend": "ddp", "train_batch_size": 12, "epochs": 1, **saving, **setup.get("args", {})}
            trainer = ts.Trainer(module, arguments(directory, **args), callbacks=setup.get("callbacks"))
            _subscribe(trainer, module, setup)
            error = None
            try:
                trainer.train()
            except ts.TrainstackError as raised:
                error = f"{type(raised).__name__}: {raised}"
        finally:
            torch.set_float32_matmul_precision(precision)
    fetched = getattr(module.dataset, "fetched", 0)
    return {
        "error": error,
        "steps": trainer.state.global_step,
        "weights": weights(module).tolist(),
        "logged": logged.lines,
        "fetched": fetched,
    }


def _subscribe(trainer: ts.Trainer, module: Any, setup: Setup) -> None:
    def change(trainer: ts.Trainer) -> None:
        with torch.no_grad():
            module.net[0].bias[3] += 1.0

    if setup.get("late"):
        trainer.on(ts.Event(setup["late"].removeprefix("on_")))(change)
    if setup.get("late_lr"):

        @trainer.on(ts.Event.READY)
        def faster(trainer: ts.Trainer) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.7


class Logged(logging.Handler):
    """The warnings of the library in a block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Logged:
        logging.getLogger("trainstack").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("trainstack").removeHandler(self)


def buffers_of_rank_zero() -> dict[str, Any]:
    """Evaluation with a buffer that is not contiguous and differs by rank."""

    class Strided(Same):
        def __init__(self) -> None:
            super().__init__(numbers(8), validate=True)
            self.register_buffer("m", torch.zeros(3, 2).t())
            self.seen: list[Any] = []

        def on_end_train_step(self, global_step: int) -> None:
            self.m.copy_(torch.arange(6.0).reshape(2, 3) + 10 * RANK)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.seen.append(self.m.tolist())
            return super().val_step(global_step, batch, device)

    module = Strided()
    ts.Trainer(module, arguments("unused", backend="ddp", max_steps=1)).train()
    return {"seen": module.seen, "strides": list(module.m.stride())}


def shared_values() -> dict[str, Any]:
    """Many parameters with other values on each rank."""
    module = nn.ParameterList(nn.Parameter(torch.full((i % 5,), 1.0 + RANK)) for i in range(200))
    module.register_buffer("view", torch.full((4, 6), float(RANK)).t())
    stack = ts.build_trainer_backend("ddp")
    world, log = stack.open("cpu"), mock.Mock()
    kind, context = type(world.comm), SimpleNamespace(module=module, world=world, log=log)
    with mock.patch.object(kind, "broadcast_", autospec=True, side_effect=kind.broadcast_) as sent:
        count = share_initial_values(cast(Any, context))
    stack.close()
    equal = all(bool((one == 1).all()) for one in module) and not module.view.any()
    return {"differing": count, "sent": sent.call_count, "equal": equal}


class Gan(Same):
    """The module steps the discriminator itself; the trainer has the optimizer of the generator.

    The real loss uses the discriminator too, so that the reducer finds its gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.netD = nn.Linear(6, 1)
        with torch.no_grad():
            self.netD.weight.fill_(0.1), self.netD.bias.zero_()
        self.optimizer_d = torch.optim.SGD(self.netD.parameters(), lr=0.1)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1)], []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        self.optimizer_d.zero_grad()
        self.netD(batch[0].detach()).square().mean().backward()
        self.optimizer_d.step()
        for parameter in self.netD.parameters():
            parameter.grad = None
        return super().train_step(global_step, batch, device) + 0.1 * self.netD(batch[0]).mean()


def gan(directory: str, save: bool) -> dict[str, Any]:
    """Train `Gan`, with or without checkpoints; the error and the warnings."""
    saving = ts.DefaultCheckpointerArguments(checkpoint=save)
    args = arguments(directory, backend="ddp", checkpointer_args=saving, epochs=2)
    with Logged() as logged:
        try:
            ts.Trainer(Gan(), args).train()
        except ts.TrainstackError as raised:
            return {"error": f"{type(raised).__name__}: {raised}", "logged": logged.lines}
    return {"error": None, "logged": logged.lines}


def changed_weights(directory: str, how: str) -> dict[str, Any]:
    """Rank 1 changes weights in the last hook before a save."""

    class Changes(Same):
        def __init__(self) -> None:
            super().__init__(numbers(24))
            self.quarter = nn.Parameter(torch.linspace(0, 1, 6).to(torch.bfloat16), requires_grad=False)

        def on_end_train_step(self, global_step: int) -> None:
            weight = self.net[0].weight
            with torch.no_grad():
                if RANK == 1 and how == "cancelling":
                    weight[0, 0] += 0.5
                    weight[0, 1] -= 0.5
                elif RANK == 1 and how == "swapped":
                    weight[0] = weight[0].flip(0)
                elif RANK == 1 and how == "sign of zero":
                    self.quarter[0] = -self.quarter[0]
                elif RANK == 1 and how == "frozen":
                    self.quarter[2] += 0.25

    saving = ts.DefaultCheckpointerArguments()
    try:
        ts.Trainer(Changes(), arguments(directory, backend="ddp", max_steps=1, checkpointer_args=saving)).train()
    except ts.TrainstackError as raised:
        return {"error": f"{type(raised).__name__}: {raised}"}
    return {"error": None}


def nonfinite(directory: str, clip: bool = True) -> dict[str, Any]:
    """Rank 1 has a loss of nan in the second micro-batch of the second step."""

    class Nan(Same):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
            loss = super().train_step(global_step, batch, device)
            here = RANK == 1 and global_step == 2 and self.micro_batch.number == 1
            return loss * float("nan") if here else loss

    args = arguments(
        directory, backend="ddp", train_batch_size=8, gpu_batch_size_limit=2, clip_grads=clip, log_every=3, max_steps=4
    )
    module = Nan(numbers(41))
    trainer = ts.Trainer(module, args)
    try:
        trainer.train()
    except ts.NonFiniteError as raised:
        return {"error": str(raised), "samples": trainer._ready().data.indices_of(0, 8, 1)}
    return {"error": None, "samples": None}
