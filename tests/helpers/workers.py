"""What the processes of distributed tests do. Run as `python -m tests.helpers.workers WHAT OPTIONS FOLDER`."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, weights
from tests.helpers.private_runs import closed_on_a_full_disk, private_ranks  # noqa: F401 - found by their names
from tests.helpers.user_callbacks import calls_over_processes, user_callbacks  # noqa: F401 - so too
from trainstack import callbacks
from trainstack.backends import lookout

RANK = int(os.environ.get("RANK", 0))


class Uneven(Classifier):
    """101 samples in float64, with everything recorded that must not depend on the number of processes."""

    def __init__(self, count: int = 101, stop_at: int | None = None, **changes: Any) -> None:
        super().__init__(numbers(count, dtype=torch.float64), dtype=torch.float64, validate=True, **changes)
        self.seen: list[list[float]] = []
        self.outputs: Any = None
        self.stop_at = stop_at

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        while len(self.seen) < global_step:
            self.seen.append([])
        self.seen[global_step - 1] += batch[0][:, 0].tolist()
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        return {"loss": loss, "outputs": outputs, "text": [f"{x:.6f}" for x in batch[0][:, 0].tolist()]}

    def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
        self.outputs = {
            "outputs": outputs["outputs"].tolist(),
            "text": [text for part in outputs["text"] for text in (part if isinstance(part, list) else [part])],
        }


def equality(directory: str, backend: str = "ddp", limit: int = 512, **changes: Any) -> dict[str, Any]:
    module = Uneven(**changes.pop("module", {}))
    saving = ts.DefaultCheckpointerArguments(checkpoint=False)
    if "every_n_steps" in changes:
        saving = ts.DefaultCheckpointerArguments(every_n_steps=changes.pop("every_n_steps"))
    values = {"train_batch_size": 12, "epochs": 2, "log_every": 4, "val_batch_size": 7, **changes}
    trainer = ts.Trainer(
        module, arguments(directory, backend=backend, gpu_batch_size_limit=limit, checkpointer_args=saving, **values)
    )
    stopped = False
    try:
        trainer.train()
    except KeyboardInterrupt:
        stopped = True
    history = {} if stopped else {name: trainer.history.get_metric_values(name) for name in ("train/loss", "val/loss")}
    return {
        "weights": weights(module).tolist(),
        "seen": module.seen,
        "outputs": module.outputs,
        "history": history,
        "steps": trainer.global_steps_finished,
    }


def measured(directory: str, backend: str = "ddp") -> dict[str, Any]:
    """Metrics over 101 samples that do not add up to the same bits in another order or in other batches."""
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    class Rounds:
        """Adds numbers one after the other, and takes in texts."""

        def update(self, preds: torch.Tensor, text: list[str]) -> None:
            for value in preds[:, 0].float():
                self.total = self.total + value
            self.texts += text

        def compute(self) -> Any:
            return {"sum": self.total, "texts": float(sum(i * float(text) for i, text in enumerate(self.texts)))}

        def reset(self) -> None:
            self.total, self.texts = torch.tensor(1e3), []

    class Still(Uneven):
        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            preds = outputs["outputs"].float()
            return {"preds": preds, "target": batch[1], "value": preds.max(1).values, "text": outputs["text"]}

    metrics = {
        "all": torchmetrics.MetricCollection({"accuracy": MulticlassAccuracy(3), "auroc": MulticlassAUROC(3)}),
        "rounds": Rounds(),
        "mean": torchmetrics.MeanMetric(),
    }
    values: dict[str, Any] = {"train_batch_size": 12, "val_batch_size": 7, "epochs": 2}
    trainer = ts.Trainer(Still(lr=0.0), arguments(directory, backend=backend, **values), metrics=metrics)
    trainer.train()
    history = [[r.name, r.value, r.step] for name in sorted(trainer.history.get_metric_names())
               if name.startswith("val/") and name != "val/loss" for r in trainer.history.records(name)]  # fmt: skip
    return {"history": history, "alone": {k: v for k, v in trainer.validate().metrics.items() if k != "val/loss"}}


def hungry(directory: str) -> dict[str, Any]:
    """The second process has memory for two samples a forward pass, the first for more."""
    sizes: list[int] = []

    class Hungry(Uneven):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            sizes.append(len(batch[0]))
            if len(batch[0]) > (2 if RANK else 4):
                raise torch.OutOfMemoryError("no memory for so many")
            return super().train_step(global_step, batch, device)

    module = Hungry()
    trainer = ts.Trainer(module, arguments(directory, backend="ddp", train_batch_size=12, fit_micro_batch=True))
    trainer.train()
    found = ts.find_lr(trainer, start=1e-3, end=1.0, steps=4)
    return {
        "micro_batch": trainer.plan.micro_batch,
        "sizes": sizes,
        "weights": weights(module).tolist(),
        "rates": [found.rates, found.losses],
    }


def saves_on_nodes(directory: str) -> dict[str, Any]:
    """Two processes that take themselves for the first of a machine each, and save into folders of their own."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(RANK)}
    trainer = ts.Trainer(Uneven(), arguments(directory, backend="auto", device=["cpu"], train_batch_size=12))
    trainer.train(max_steps=2)
    world, node = (Path(directory) / str(RANK) / once for once in ("world", "node"))
    trainer.save_checkpoint(path=world)
    trainer.save_checkpoint(path=node, once="node")
    saved = ts.read_checkpoint(node).module_interface_state or {}
    same = all(torch.equal(saved[name], value) for name, value in trainer.module.get_state().items())
    return {"world": world.exists(), "node": node.exists(), "same": same}


def plateau(directory: str) -> dict[str, Any]:
    """A plateau schedule over a metric that each process has measured differently."""

    class Watched(Uneven):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made, factor=0.5, patience=0, threshold=0.0)
            return made, ts.SchedulerConfig(schedule, monitor="score")

        def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
            self.log("score", global_step * (1.0 - RANK))

    args = arguments(directory, backend="ddp", per_device_train_batch_size=6, train_batch_size=1, epochs=3)
    trainer = ts.Trainer(Watched(), args)
    trainer.train()
    state = trainer.get_state()
    return {
        "rate": state["optimizers"][0]["param_groups"][0]["lr"],
        "best": state["schedulers"][0]["best"],
        "batch": [trainer.plan.global_batch, trainer.pergpu_global_batch_size, trainer.train_step_batch_size],
    }


def few(count: int) -> dict[str, Any]:
    """So few samples that some processes have none."""

    class Mean(Classifier):
        def __init__(self) -> None:
            values = torch.arange(count, dtype=torch.float64)
            super().__init__(torch.utils.data.TensorDataset(values), dtype=torch.float64, validate=True)
            self.collected: list[float] = []

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return (sum(p.sum() for p in self.parameters()) * 0 + batch[0]).mean()

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return batch[0].mean(), batch[0]

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            self.collected = outputs[1].tolist() if outputs else []

    module = Mean()
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", train_batch_size=12, val_batch_size=3))
    trainer.train()
    return {
        "loss": trainer.history.get_latest_metric("train/loss_epoch"),
        "metric": trainer.history.get_latest_metric("val/loss"),
        "collected": module.collected,
    }


def picky(backend: str = "ddp", limit: int = 512, **options: Any) -> Any:
    """Trains on a few of the samples, of which a process may have none; a part of the module is never used."""

    class Picky(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(24, dtype=torch.float64), dtype=torch.float64)
            self.unused = torch.nn.Linear(2, 2).double()

        def get_optimizers_schedulers(self, *given: Any) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.5), None

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            chosen = batch[0][:, 0] > 0
            return torch.nn.functional.cross_entropy(self.net(batch[0][chosen]), batch[1][chosen])  # nan for none

        def batch_weight(self, batch: Any) -> float:
            return float((batch[0][:, 0] > 0).sum())

    torch.manual_seed(0)
    made: dict[str, Any] = {"backend_options": {"ddp": options} if options else {}, "clip_grads": False}
    module = Picky()
    trainer = ts.Trainer(
        module, arguments("unused", backend=backend, train_batch_size=4, **made, epochs=2, gpu_batch_size_limit=limit)
    )
    try:
        trainer.train()
    except ts.TrainstackError as error:
        return str(error)
    return weights(module).tolist()


def ways_to_reduce() -> list[list[float]]:
    """The weights after runs with several options of `DistributedDataParallel`, without and with accumulation."""
    view, static = {"gradient_as_bucket_view": True}, {"static_graph": True}
    found = []
    for options, limit in (({}, 512), (static, 512), (view, 512), ({}, 2), (view, 2)):
        module, made = Uneven(), {"backend_options": {"ddp": options}, "gpu_batch_size_limit": limit}
        ts.Trainer(module, arguments("unused", backend="ddp", train_batch_size=12, **made)).train()
        found.append(weights(module).tolist())
    return found


def statistics(directory: str, shared: bool) -> dict[str, Any]:
    """The running means that samples were evaluated with, in a run and in one whose first validation is broken off."""

    class Normed(Classifier):
        def __init__(self, breaks: bool = False) -> None:
            super().__init__(numbers(16), validate=True)
            self.norm, self.breaks = torch.nn.BatchNorm1d(6), breaks
            self.used: list[list[float]] = []

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.net(self.norm(batch[0])), batch[1])

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if self.breaks:
                raise KeyboardInterrupt
            return {"means": self.norm.running_mean.expand(len(batch[0]), -1).clone()}

        def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
            self.used = outputs["means"].tolist()

        predict_step = val_step

    switch = "forward_sync_buffers"  # which torch once called otherwise
    if switch not in inspect.signature(DistributedDataParallel).parameters:
        switch = "broadcast_buffers"
    options = {} if shared else {switch: False}

    def run(name: str, breaks: bool = False, **changes: Any) -> tuple[ts.Trainer, Normed]:
        saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
        made: dict[str, Any] = {"backend": "ddp", "val_batch_size": 2, "backend_options": {"ddp": options}}
        args = arguments(f"{directory}/{name}", checkpointer_args=saving, **made, **changes)
        trainer = ts.Trainer(module := Normed(breaks), args)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        return trainer, module

    trainer, module = run("whole")
    run("cut", breaks=True)
    newest = ts.list_checkpoints(f"{directory}/whole/checkpoints")[-1].path
    return {
        "used": module.used,
        "resumed": run("cut", resume=True)[1].used,
        "predicted": trainer.predict(DataLoader(module.dataset, 2))["means"].tolist(),
        "saved": ts.read_model(newest)["norm.running_mean"].tolist(),
    }


def driven(shares: list[list[int]], accumulation: int = 1) -> dict[str, Any]:
    """`train_dl` with a loader of each process's own over its share of 12 samples: batches of so many."""
    data = numbers(12, dtype=torch.float64)
    module, stack = Classifier(data, dtype=torch.float64), ts.build_trainer_backend("ddp")
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    changes: dict[str, Any] = {"device": "cpu", "clip_grads": False, "gradient_accumulation": accumulation}
    stack.init(ts.TrainerBackendArguments(model=module, optimizers=optimizers, **changes))
    begin = sum(sum(share) for share in shares[:RANK])
    mine = [tensor[begin : begin + sum(shares[RANK])].split(shares[RANK]) for tensor in data.tensors]
    outputs = stack.train_dl(list(zip(*mine, strict=True)), ts.CallbackInterface())
    stack.close()
    return {
        "weights": weights(module).tolist(),
        "steps": stack.get_global_steps_completed(),
        "losses": len(outputs[0]) if outputs else 0,
    }


def tokens() -> list[float]:
    """A loss over tokens; the processes' batches hold very different numbers of them, one none at all."""
    from tests.trainer.test_weighting import Tokens

    module = Tokens()
    ts.Trainer(module, arguments("unused", backend="ddp", train_batch_size=6, clip_grads=False)).train()
    return weights(module).tolist()


def all_reduces(accumulation: int) -> dict[str, int]:
    """How many all-reduces and other collectives a run needs."""
    counts: dict[str, int] = {}
    for name in ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier", "broadcast_object_list"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            counts[_name] = counts.get(_name, 0) + 1
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    reduced = 0

    class Counted(Classifier):
        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations and wants its own
                nonlocal reduced
                reduced += 1
                return default_hooks.allreduce_hook(state, bucket)

            trainer._ready().loop.work.model.register_comm_hook(None, hook)

    module = Counted(numbers(8 * 40))
    made: dict[str, Any] = {"log_every": 100, "gpu_batch_size_limit": 4 // accumulation}
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", **made))
    before = dict(counts)
    trainer.train()
    spent = {name: counts[name] - before.get(name, 0) for name in counts}
    return {"buckets": reduced, "steps": trainer.global_steps_finished, **spent}


def failure(directory: str, how: str, culprit: int = 1) -> Any:
    """One rank fails in some way, in the third step."""

    class Fails(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if culprit == RANK and global_step == 3:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raise":
                    raise ZeroDivisionError("rank one divides by zero")
            return super().train_step(global_step, batch, device)

        def on_end_train_step(self, global_step: int) -> None:
            if culprit == RANK and global_step == 3 and how == "hook":
                raise LookupError("rank one looks in vain")

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            if culprit == RANK and how == "validation":
                raise LookupError("rank one looks in vain")

    trainer = ts.Trainer(Fails(numbers(64), validate=True), arguments(directory, backend="ddp"))
    start = time.monotonic()
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {"error": None}


def caught() -> Any:
    """All processes raise the same and catch it; then they train for longer than a lookout waits."""
    lookout.PAUSE_S = lookout.GRACE_S = 0.1

    class Slow(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            time.sleep(0.2)
            return super().train_step(global_step, batch, device)

    trainer, said = ts.Trainer(Slow(numbers(32)), arguments("unused", backend="ddp")), ""
    try:
        trainer.test()
    except ts.ModuleContractError as error:
        said = str(error)
    trainer.train()
    return {"said": said, "steps": trainer.global_steps_finished}


def failure_behind(culprit: int) -> Any:
    """One rank fails at the end of what all do together; the other is through with it, and waits in what comes next."""
    lookout.PAUSE_S = lookout.GRACE_S = 0.1
    comm = ts.build_trainer_backend("ddp").open("cpu").comm
    try:
        with comm.together(lambda: "first"):
            comm.gather(None)
            if culprit == RANK:
                time.sleep(0.5)
                raise ZeroDivisionError("divides by zero")
        with comm.together(lambda: "second"):
            comm.gather(None)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def background_failure(directory: str) -> Any:
    """The disk of rank 0 fails under a checkpoint that is written in the background; nothing else asks for it."""
    from trainstack.checkpointing import filesystem

    in_step_4 = threading.Event()

    def fail(handle: Any) -> None:
        in_step_4.wait(20)
        raise OSError("the disk is gone")

    class Waits(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 0 and global_step == 4:
                in_step_4.set()
                deadline = time.monotonic() + 20
                while trainer._ready().loop.attend_at and time.monotonic() < deadline:
                    time.sleep(0.001)
            return super().train_step(global_step, batch, device)

    filesystem.sync_file = fail
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3, async_save=True)
    trainer = ts.Trainer(Waits(numbers(400)), arguments(directory, backend="ddp", checkpointer_args=saving))
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "steps": trainer.global_steps_finished}
    return {"error": None}


def adopted_failure(how: str) -> Any:
    """In a group that exists already, rank 1 fails and stays alive, as a notebook does; then all train anew in it."""
    dist.init_process_group("gloo")

    class Fails(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and global_step == 3 and how == "train_step":
                raise ZeroDivisionError("rank one divides by zero")
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and how == "validate":
                raise ZeroDivisionError("rank one divides by zero")
            return super().val_step(global_step, batch, device)

        def get_optimizers_schedulers(self, *given: Any) -> Any:
            if RANK == 1 and how == "get_optimizers":
                raise ZeroDivisionError("rank one divides by zero")
            return super().get_optimizers_schedulers(*given)

    trainer, said = ts.Trainer(Fails(validate=True), arguments("unused", backend="ddp")), "nothing"
    start = time.monotonic()
    try:
        trainer.validate() if how == "validate" else trainer.train()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    dist.barrier()  # the group is as it was; who failed has waited here for the others
    trainer.close()
    module = Classifier(validate=True)
    again = ts.Trainer(module, arguments("unused", backend="ddp"))
    again.train()
    again.close()
    return {"said": said, "seconds": seconds, "weights": weights(module).tolist(), "group": dist.is_initialized()}


def in_sequence(directory: str) -> list[list[float]]:
    """The weights of five runs in one process, of which all but the last two leave the group."""
    found = []
    for number in range(5):
        module = Classifier(numbers(16))
        trainer = ts.Trainer(module, arguments(directory, backend="ddp"))
        trainer.train()
        found.append(weights(module).tolist())
        if number < 3:
            trainer.close()
    return found


def late(how: str, seconds: float = 60.0) -> Any:
    """Rank 1 does not come to a collective in time, one way or another."""

    class Late(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and global_step == 3 and how == "train_step":
                time.sleep(seconds)
            if RANK == 1 and global_step == 3 and how == "killed":
                time.sleep(1.5)  # within which it is looked after once
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(global_step, batch, device)

        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1 and global_step == 3 and how == "collective":
                trainer.gather(torch.zeros(1))

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            if RANK == 1 and how == "on_end_val_epoch":
                time.sleep(seconds)

    options = {"ddp": {"timeout_s": 3.0}}
    trainer = ts.Trainer(Late(validate=True), arguments("unused", backend="ddp", backend_options=options))
    start = time.monotonic()
    try:
        if how != "main alone" or RANK == 0:
            trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {"error": None}


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


_DTYPES = (torch.float32, torch.float32, torch.float64)


def own_sampler() -> list[str]:
    """What is said of loaders that share the data out by themselves, in training and in evaluation."""
    data = numbers(8)

    class Groups(BatchSampler):
        num_replicas = 2

    def loader(kind: str, size: int) -> Any:
        if kind == "sampler":
            return DataLoader(data, size, sampler=DistributedSampler(data))
        if kind == "batches":
            return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), size, drop_last=False))
        return DataLoader(data, batch_sampler=Groups(range(RANK, 8, 2), size, drop_last=False))

    class Shares(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return loader(kind, batch_size) if how == "train" else super().get_train_dataloader(sampler, batch_size)

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return loader(kind, batch_size)

        predict_step = Classifier.val_step

    refused = []
    for kind in ("sampler", "batches", "groups"):
        for how in ("train", "validate", "predict"):
            trainer = ts.Trainer(Shares(data), arguments("unused", backend="ddp"))
            try:
                trainer.predict(loader(kind, 4)) if how == "predict" else getattr(trainer, how)()
            except ts.ModuleContractError as error:
                refused.append(str(error))
    return refused


def own_order(count: int) -> list[str]:
    """What is said of a validation loader that gives a sample twice."""

    class Padded(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return DataLoader(numbers(count), batch_size, sampler=[*range(count), 0])

    trainer = ts.Trainer(Padded(numbers(8)), arguments("unused", backend="ddp"))
    with capture("trainstack") as said:
        trainer.validate()
        trainer.validate()
    return said


@contextlib.contextmanager
def capture(logger: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)


def gathered() -> Any:
    """What `gather` makes of uneven and nested things."""
    stack = ts.build_trainer_backend("ddp", ddp={"gather_frequency": 2})
    world = stack.open("cpu")
    mine = torch.arange(world.rank * 3, dtype=torch.float64).reshape(-1, 3)
    joined = stack.gather(
        {
            "rows": mine + 10 * world.rank,
            "flags": mine[:, 0] > 0,
            "scalar": torch.tensor(world.rank),
            "text": [world.rank],
        }
    )
    nothing = stack.gather([] if world.rank != 1 else [torch.ones(2), ["a"]])
    pair = stack.gather(Pair(torch.tensor([world.rank], dtype=torch.uint16), torch.ones(1, 0)))
    refused = []
    for odd in (torch.ones(2, 3 + world.rank % 2), {"b": mine} if world.rank else {"a": mine}, mine.to(_DTYPES[RANK])):
        try:
            stack.gather(odd)
        except ts.ModuleContractError as error:
            refused.append(str(error))
    stack.close()
    joined |= {"pair": [pair.first.tolist(), list(pair.second.shape)], "refused": refused}
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in joined.items()} | {
        "nothing": [nothing[0].tolist(), nothing[1]]
    }


def diverged(directory: str) -> Any:
    """A hook changes the weights of one process."""

    class Drifts(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1:
                with torch.no_grad():
                    self.net[0].weight += 1.0

    saving = ts.DefaultCheckpointerArguments()
    trainer = ts.Trainer(Drifts(numbers(16)), arguments(directory, backend="ddp", checkpointer_args=saving))
    try:
        trainer.train()
    except ts.PeerError as error:
        return {"error": str(error)}
    return {"error": None}


def together() -> Any:
    """`trainer.gather` and `trainer.print`."""
    import io

    trainer = ts.Trainer(Classifier(), arguments("unused", backend="ddp"))
    joined = trainer.gather({"rows": torch.full((trainer.world.rank + 1,), float(trainer.world.rank))})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer.print("said", 1)
        trainer.print("node", once="node")
    return {"rows": joined["rows"].tolist(), "printed": out.getvalue()}


def apex(wheel: str, level: str, backend: str) -> dict[str, Any]:
    """apex's own code, under the shim; the gradient of the third step overflows on one process."""
    from tests.helpers import apex_shim

    apex_shim.install(Path(wheel))

    class Overflows(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            outputs = self.net(batch[0])
            if global_step == 3 and RANK == 0 and level != "O0":  # which has no scaler to see it
                outputs.register_hook(lambda gradient: gradient * float("inf"))
            return torch.nn.functional.cross_entropy(outputs.float(), batch[1])

    module = Overflows(numbers(64), optimizer=torch.optim.SGD, scheduler=True)
    options = {"amp_apex": {"max_loss_scale": 2.0**15}}
    made: dict[str, Any] = {"backend": backend, "amp_level_apex": level, "backend_options": options}
    trainer = ts.Trainer(module, arguments("unused", gpu_batch_size_limit=2, **made))
    trainer.train()
    return {"weights": weights(module).tolist(), "skipped": trainer.state.skipped_steps}


def killed_once(directory: str, node_dies: bool = False) -> dict[str, Any]:
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
    trainer = ts.Trainer(module, arguments(directory, backend="ddp", checkpointer_args=saving, resume="auto", **made))
    trainer.train()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return {
        "weights": weights(module).tolist(),
        "steps": trainer.global_steps_finished,
        "restarts": restarts,
        "size": trainer.world.size,
    }


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
    from tests.trainer.test_loader_state import EVERY_STEP, Reads, Stream

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


def audited(**changes: Any) -> dict[str, Any]:
    """A privacy audit by all processes, of two small runs of each probe."""
    from trainstack.backends.dp.audit import audit

    private = ts.DifferentialPrivacyArguments(delta=1e-6, noise_multiplier=2.0, **changes)
    report = audit(private, "ddp-dp", train_batch_size=50, dataset_size=200, epochs=1)
    return {"report": report.to_dict(), "text": report.text}


def with_callbacks(directory: str, backend: str = "ddp", stop_at: int | None = None) -> dict[str, Any]:
    """Early stopping, averages, best weights and a frozen layer; `stop_at` that step the last process stops."""

    class Scored(Classifier):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            self.log("score", [5.0, 3.0, 4.0, 3.0, 9.0, 9.0][self.trained_epochs])

        @property
        def trained_epochs(self) -> int:
            return trainer.state.epoch

    module, ema = Scored(numbers(33), validate=True), callbacks.EMA(0.8)
    stopping = callbacks.EarlyStopping("score", mode="min", patience=2)
    best = callbacks.BestCheckpoint("score", mode="min")
    freezer = callbacks.Freezer("net.0", until_epoch=2)
    saving = ts.DefaultCheckpointerArguments()
    args = arguments(
        directory,
        backend=backend,
        train_batch_size=12,
        gpu_batch_size_limit=4,
        epochs=6,
        resume="auto",
        checkpointer_args=saving,
    )
    trainer = ts.Trainer(module, args, callbacks=[ema, stopping, best, freezer])
    frozen, first = set[bool](), Classifier(numbers(33)).net[0].weight.detach()

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def look(trainer: ts.Trainer, step: int) -> None:
        frozen.add(torch.equal(first, module.net[0].weight) == (trainer.state.epoch < 2))
        if step == stop_at and trainer.world.size - 1 == RANK:
            raise ts.StopTraining("interrupted")

    trainer.train()
    averages = torch.cat([average.flatten() for average in ema.get_state()["averages"].values()])
    return {
        "weights": weights(module).tolist(),
        "averages": averages.tolist(),
        "frozen": frozen == {True},
        "steps": trainer.global_steps_finished,
        "reason": trainer.stop_reason,
    }


def callbacks_cut(directory: str) -> list[dict[str, Any]]:
    """A run that nothing stops, and one that the last process stops in the middle and that is resumed."""
    unbroken = with_callbacks(f"{directory}/unbroken")
    with_callbacks(f"{directory}/cut", stop_at=5)
    return [unbroken, with_callbacks(f"{directory}/cut")]


def main() -> None:
    faulthandler.enable()
    what, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    result = globals()[what](**options)
    aside = folder / f"{RANK}.tmp"
    aside.write_text(json.dumps(result))
    os.replace(aside, folder / f"{RANK}.json")
    sys.stderr.flush()
    if dist.is_initialized() and not (isinstance(result, dict) and result.get("error")):
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
