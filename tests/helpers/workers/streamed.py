"""Runs whose tensors are counted while they are saved and loaded, for `run_world`."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments
from tests.helpers.workers import RANK
from trainstack.checkpointing import filesystem, tensorfile
from trainstack.trainer.core import shards
from trainstack.trainer.resume import loading

ROWS = 150
TENSOR = 4 * ROWS * 128
"""Bytes of each weight: more than `DEFERRED_BYTES`."""
DATA = TensorDataset(*(torch.randn(6, n, generator=torch.Generator().manual_seed(n)) for n in (128, 1)))


class Wide(nn.Module):
    """Four weights of `TENSOR` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, ROWS, bias=False) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return sum(layer(inputs).mean(1, keepdim=True) for layer in self.layers)  # type: ignore[return-value]


class Alive:
    """Counts the bytes of tensors that are alive, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = self.count = 0

    def add(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        self.now, self.count = self.now + size, self.count + 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._drop, size)
        return tensor

    def _drop(self, size: int) -> None:
        self.now -= size


@contextmanager
def counted() -> Iterator[tuple[Alive, Alive]]:
    """Count the bytes read from files, and the bytes gathered from ranks."""
    read, gathered = Alive(), Alive()
    before = tensorfile._StoredTensor._read, shards.gather_to_main

    def gather(tensor: Any, world: Any) -> Tensor | None:
        whole = before[1](tensor, world)
        return whole if whole is None else gathered.add(whole)

    tensorfile._StoredTensor._read = lambda *given: read.add(before[0](*given))
    shards.gather_to_main = gather
    try:
        yield read, gathered
    finally:
        tensorfile._StoredTensor._read, shards.gather_to_main = before


def trainer_of(directory: str, backend: str, max_steps: int, **changes: Any) -> ts.Trainer:
    """A run with AdamW and an average of the weights; equal on all backends but for rounding."""
    torch.manual_seed(0)
    module = ts.SupervisedModule(Wide(), nn.MSELoss(), "adamw", DATA, optimizer_kwargs={"lr": 0.01})
    saving = ts.DefaultCheckpointerArguments(async_save=changes.pop("async_save", False))
    callbacks = [ts.callbacks.EMA(0.9, use_at_end=False), *changes.pop("callbacks", ())]
    made = arguments(
        directory,
        backend=backend,
        epochs=8,
        max_steps=max_steps,
        train_batch_size=6,
        resume="auto",
        checkpointer_args=saving,
        **changes,
    )
    return ts.Trainer(module, made, callbacks=callbacks)


def digests(trainer: ts.Trainer) -> list[float]:
    """Sums of all weights, moments and averages, as bits."""
    found = [*trainer.module.parameters()]
    found += [v for entry in trainer.optimizers[0].state.values() for k, v in entry.items() if k != "step"]
    found += trainer.events.callbacks["EMA"]._averages  # type: ignore[attr-defined]
    with torch.no_grad():
        whole = [shards.gather_whole(one) if shards.is_sharded(one) else one for one in found]
    return [float(one.detach().double().sum()) for one in whole]


def bytes_held(directory: str, backend: str, async_save: bool = False) -> dict[str, Any]:
    """Train a step, then resume and train another; the most bytes of loading and saving in addition to the state."""
    first = trainer_of(directory, backend, 1, async_save=async_save)
    with counted() as (_, gathered):
        first.train()
    saved, trained = gathered.most, digests(first)
    first.close()
    del first
    again = trainer_of(directory, backend, 2, async_save=async_save)
    with counted() as (read, _):
        step = again.state.global_step if again.plan else 0
        loaded = digests(again)
    again.train()
    again.close()
    return {
        "save": saved,
        "load": read.most - read.now,
        "read": read.count,
        "step": step,
        "same": trained == loaded,
    }


def started(directory: str, backend: str, how: str) -> dict[str, Any]:
    """Begin with the weights of a file, or load an export; the most bytes that this held in addition to the module."""
    first = trainer_of(directory, backend, 1)
    first.train()
    expected = digests(first)[:4]
    first.export(f"{directory}/export")
    first.close()
    start = {"init_weights_from": f"{directory}/export/model.safetensors"} if how == "file" else {}
    second = trainer_of(f"{directory}-2", backend, 2, **start)
    held, empty = Alive(), torch.empty

    def counted_empty(*given: Any, **named: Any) -> Tensor:
        made = empty(*given, **named)
        return held.add(made) if made.nbytes >= TENSOR // 4 else made

    torch.empty = counted_empty
    try:
        second.load_export(f"{directory}/export") if how == "export" else second.plan
    finally:
        torch.empty = empty
    found = {"most": held.most, "same": digests(second)[:4] == expected}
    second.close()
    return found


def without_files(directory: str, backend: str, blind: list[int]) -> dict[str, Any]:
    """Train, and resume with some ranks that do not see the files."""
    first = trainer_of(directory, backend, 2)
    first.train()
    trained = digests(first)
    first.close()
    opened, spools = loading.Source.open, list[bool]()
    init = loading._Spool.__init__

    def watch(spool: Any, file: Any, *, writes: bool) -> None:
        spools.append(writes)
        init(spool, file, writes=writes)

    loading.Source.open = lambda source, reopen: None if RANK in blind else opened(source, reopen)  # type: ignore[method-assign]
    loading._Spool.__init__ = watch  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as temporary:
        tempfile.tempdir = temporary
        try:
            again = trainer_of(directory, backend, 3)
            step = again.state.global_step if again.plan else 0
            loaded = digests(again)
            left = os.listdir(temporary)
            again.train()
            again.close()
        finally:
            tempfile.tempdir = None
            loading.Source.open, loading._Spool.__init__ = opened, init  # type: ignore[method-assign]
    return {"same": trained == loaded, "step": step, "left": left, "writes": spools}


def damaged_later(directory: str, backend: str, rank: int) -> dict[str, Any]:
    """Resume, while a file is damaged on one rank after it was verified."""
    first = trainer_of(directory, backend, 2)
    first.train()
    first.close()
    read = tensorfile._StoredTensor._read

    def other_bytes(place: Any, first: int, end: int) -> Tensor:
        if rank == RANK and ".exp_avg_sq" in place.name:
            chunks = dict.fromkeys(place.entry.chunks, "0" * 32)
            place = tensorfile.replace(place, entry=tensorfile.replace(place.entry, chunks=chunks))
        return read(place, first, end)

    tensorfile._StoredTensor._read = other_bytes  # type: ignore[method-assign]
    again = trainer_of(directory, backend, 3)
    try:
        again.train()
        error = "none"
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    finally:
        tensorfile._StoredTensor._read = read  # type: ignore[method-assign]
    return {"error": error, "step": again.state.global_step, "newest": newest(directory)}


def newest(directory: str) -> str:
    """The name of the checkpoint written last."""
    return max(path.name for path in (Path(directory) / "checkpoints").glob("checkpoint-0*"))


def killed(directory: str, backend: str, rank: int, when: str) -> dict[str, Any]:
    """Kill a rank when it has read or gathered two tensors."""
    count = 0

    def strike(*_: Any) -> None:
        nonlocal count
        count += 1
        if rank == RANK and count == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if when == "load":
        read = tensorfile._StoredTensor._read
        tensorfile._StoredTensor._read = lambda *given: (strike(), read(*given))[1]  # type: ignore[method-assign]
    else:
        gather = shards.gather_to_main
        shards.gather_to_main = lambda *given: (strike(), gather(*given))[1]
    trainer = trainer_of(directory, backend, 4, backend_options={backend: {"timeout_s": 10.0}})
    try:
        trainer.train()
        return {"error": "none"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def finished(directory: str, backend: str, max_steps: int) -> dict[str, Any]:
    """Continue the training to `max_steps`."""
    trainer = trainer_of(directory, backend, max_steps)
    began = trainer.state.global_step if trainer.plan else 0
    trainer.train()
    found = digests(trainer)
    trainer.close()
    return {"began": began, "digests": found}


def slow(directory: str, what: str, seconds: float, timeout_s: float) -> dict[str, Any]:
    """Save or load under `fsdp` with files that take longer than a collective may."""
    first = trainer_of(directory, "fsdp", 1)
    first.train()
    first.close()
    options = {"fsdp": {"timeout_s": timeout_s}}
    sync, read, waited = filesystem.sync_file, tensorfile._StoredTensor._read, [False]

    def slowly(*_: Any) -> None:
        if not waited[0]:
            waited[0] = True
            time.sleep(seconds)

    if what == "load" and RANK == 1:
        tensorfile._StoredTensor._read = lambda *given: (slowly(), read(*given))[1]  # type: ignore[method-assign]
    if what == "save" and RANK == 0:
        filesystem.sync_file = lambda handle: (slowly(), sync(handle))[1]
    try:
        again = trainer_of(directory, "fsdp", 2, backend_options=options)
        again.train()
        step = again.state.global_step
        again.close()
    finally:
        filesystem.sync_file, tensorfile._StoredTensor._read = sync, read  # type: ignore[method-assign]
    return {"step": step, "waited": waited[0]}


def gathers_to_main() -> dict[str, Any]:
    """The short and long values that each rank gets, and the error of a value that cannot be sent."""
    trainer = trainer_of("unused", "ddp", 1)
    _ = trainer.world
    comm = trainer.world.comm
    found: list[Any] = [comm.gather_to_main(value) for value in (RANK, [RANK] * 5000, {"t": RANK * "x"})]
    large = comm.gather_to_main(torch.full((40_000,), float(RANK)))
    try:
        comm.gather_to_main(object() if RANK == 1 else 0)
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    trainer.close()
    return {
        "values": [found[0], [one[0] for one in found[1]], found[2]],
        "large": [float(t[7]) for t in large],
        "error": error,
    }
