"""`ddp`: one process a device; gradients are summed over all processes."""

from __future__ import annotations

import atexit
import difflib
import inspect
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from trainstack.backends.base import AbstractTrainerBackendDecorator, Slot, TrainerBackend
from trainstack.backends.processes.communicator import GroupCommunicator
from trainstack.backends.processes.environment import (
    DistributedTrainingArguments,
    ProcessInfo,
    detect_process_info,
    launch_help,
    process_info_of_group,
)
from trainstack.backends.processes.gathering import gather_outputs
from trainstack.backends.processes.rendezvous import rendezvous_store
from trainstack.backends.processes.world import DeviceChoice, World, pick_device
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError, annotate
from trainstack.stage import Stage


class Empty:
    """A micro-batch of no samples. `EMPTY` is the only one."""

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY = Empty()
"""What a process without samples of a step trains on."""


def used_by(loss: Tensor, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of `parameters` that `loss` was computed from."""
    waiting, seen, found = [get_gradient_edge(loss).node], set[Any](), set[int]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            waiting += [before for before, _ in node.next_functions if before is not None]
    return [p for p in parameters if id(p) in found]


def zero_loss(parameters: Iterable[nn.Parameter]) -> Tensor:
    """A loss of 0 whose gradient is 0 for every parameter that is trained."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.stack([(p * 0).sum() for p in trained]).sum()


_SET_HERE = {"module", "process_group", "device_ids", "output_device"}

_UNUSED = (
    "some parameters took no part in the loss of a step. If that is meant, write "
    "backend_options={'ddp': {'find_unused_parameters': True}}; else freeze them with requires_grad_(False)."
)

_STATIC = "backend_options={'ddp': {'static_graph': True}}"
_NOT_STATIC = "Leave static_graph out"


@register_layer("ddp", slot=Slot.PROCESS)
class DDP(AbstractTrainerBackendDecorator):
    """Joins the processes that a launcher started and wraps the module in `DistributedDataParallel`.

    A process group that exists already is adopted and never destroyed; the processes then work together in groups of
    their own beside it, which have `timeout_s` and which a failure may break.
    Gradients are summed with the weights of the loop, so that the result is that of one process on the whole batch; a
    process without samples takes part with zeros.

    Args:
        inner: the layer inside this one.
        place: an explicit place in the world; by default the launcher's environment tells.
        gather_frequency: send at most so many rows at once when outputs are gathered.
        timeout_s: seconds after which a collective that not everybody joins fails.
        environ: where to look for the launcher's variables.
        **options: passed on to `DistributedDataParallel`, e.g. `find_unused_parameters`, `bucket_cap_mb`.
    """

    summary: ClassVar[str] = "joins the launcher's processes and sums gradients over them, once a global step"
    collectives: ClassVar[str] = (
        "one all-reduce a gradient bucket each global step; none for logs, metrics or decisions "
        "(a batch_weight of the module's own: one small exchange more); buffers are broadcast as a step begins, and "
        "before an evaluation"
    )
    joins_processes: ClassVar[bool] = True
    configured_by: ClassVar[Mapping[type, str]] = {DistributedTrainingArguments: "place"}

    def __init__(
        self,
        inner: TrainerBackend,
        *,
        place: DistributedTrainingArguments | None = None,
        gather_frequency: int | None = None,
        timeout_s: float = 1800.0,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inner)
        _check_options(options)
        self._explicit, self._environ = place, os.environ if environ is None else environ
        self._gather_frequency = gather_frequency or (place.gather_frequency if place is not None else None)
        self._timeout = timedelta(seconds=timeout_s if place is None else place.timeout_s)
        self._options = options
        self._owns_group = False
        self._group: dist.ProcessGroup | None = None  # sums gradients
        self._made: list[dist.ProcessGroup] = []
        self._world: World | None = None
        self._without_samples = False  # in the forward pass that was last

    def open(self, device: DeviceChoice = "auto") -> World:
        place = None if dist.is_initialized() else detect_process_info(self._environ, self._explicit)
        if place is None and not dist.is_initialized():
            raise ConfigurationError(launch_help(self.spec))
        here = place or process_info_of_group()
        inner = self.inner.open(pick_device(device, here.local_rank, here.local_size))  # may refuse the device
        mine = inner.device
        if mine.type != "cpu":
            torch.accelerator.set_device_index(mine.index or 0)
        if place is not None:
            self._join(place, mine)
        # Beside an adopted group, make our own: they have our time-out, and may be broken when a process fails.
        # The communicator needs a group that carries CPU tensors, which is the one for gradients if that does.
        self._group = cast(dist.ProcessGroup, dist.group.WORLD) if self._owns_group else self._new_group(None)
        talking = self._group if dist.get_backend(self._group) == "gloo" else self._new_group("gloo")
        # torch 2.13.0: an adopted process group has no public way to its store.
        self._world = replace(
            inner,
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=here.local_rank,
            comm=GroupCommunicator(talking, dist.distributed_c10d._get_default_store(), [self._group]),
        )
        return self._world

    def _new_group(self, backend: str | None) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        self._made.append(made)
        return made

    def _join(self, place: ProcessInfo, device: torch.device) -> None:
        dist.init_process_group(
            backend=(self._explicit and self._explicit.backend) or dist.get_default_backend_for_device(device.type),
            store=rendezvous_store(place, self._timeout.total_seconds(), self._environ),
            rank=place.rank,
            world_size=place.size,
            timeout=self._timeout,
        )
        self._owns_group = True
        atexit.unregister(_let_threads_finish)
        atexit.register(_let_threads_finish)

    def prepare(self, work: Workload) -> Workload:
        work = self.inner.prepare(work)
        if work.gradients_reduced_by is not None:
            return work
        if isinstance(work.module, DistributedDataParallel):
            raise ConfigurationError(
                "the module is wrapped in DistributedDataParallel already. Give the Trainer your own module: "
                "the 'ddp' layer wraps it."
            )
        if not any(p.requires_grad for p in work.parameters):
            return replace(work, gradients_reduced_by=self.name)
        entry, sparse = _Entry(work.model), []
        for name, buffer in entry.named_buffers():
            if buffer.layout is not torch.strided:  # torch 2.13.0: the wrapper broadcasts dense tensors only
                sparse.append(name)
                broadcast_in_place(work.world, buffer)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(entry, sparse)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(entry, process_group=self._group, **self._options)
        return replace(work, model=wrapped, gradients_reduced_by=self.name)

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(work.model, DistributedDataParallel):
            return self.inner.accumulate(work, last)
        if work.model.static_graph:
            raise ConfigurationError(
                f"{_STATIC} for steps of several micro-batches, in which torch does not support it. {_NOT_STATIC}, or "
                "make gpu_batch_size_limit and the number of processes so large that each has one micro-batch a step."
            )
        return _nested(work.model.no_sync(), self.inner.accumulate(work, last))

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        if stage is not Stage.TRAIN and isinstance(work.model, DistributedDataParallel):
            work = replace(work, model=work.model.module.module)
        self._without_samples = batch is EMPTY
        try:
            return self.inner.forward(work, stage, batch, step)
        except RuntimeError as error:
            if "find_unused_parameters" in str(error):
                annotate(error, _UNUSED)
            raise

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        """DistributedDataParallel averages; weights that sum to one over all processes need the sum."""
        if weight == 0 and not self._without_samples:
            loss = _zero_loss_like(loss, work)
        self.inner.backward(work, loss, weight * work.world.size)

    def begin_evaluation(self, work: Workload) -> None:
        """Give every process the main process's buffers, which are the ones that are saved.

        In training the wrapper does that as each step begins, unless its options say otherwise. What the step has made
        of them since, such as running statistics, is of each process's own samples.
        """
        self.inner.begin_evaluation(work)
        if work.world.size > 1 and getattr(work.model, "broadcast_buffers", True):
            for buffer in work.module.buffers():
                broadcast_in_place(work.world, buffer)

    def gather(self, outputs: Any) -> Any:
        assert self._world is not None
        return gather_outputs(self._world.comm, self.inner.gather(outputs), self._gather_frequency)

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            if dist.is_initialized():
                for group in self._made:
                    dist.destroy_process_group(group)
                if self._owns_group:
                    dist.destroy_process_group()
            self._group, self._made, self._owns_group = None, [], False


def broadcast_in_place(world: World, tensor: Tensor) -> None:
    """Give `tensor` the values of the main process, also where it is sparse."""
    if tensor.layout is torch.strided:
        whole = tensor.data.to(world.device).contiguous()
        world.comm.broadcast_(whole)
        tensor.data.copy_(whole)
    elif world.size > 1:
        with torch.no_grad():  # `tensor.data` of a sparse tensor has its own indices and values
            tensor.copy_(world.comm.broadcast_object(tensor.detach().cpu()))


def _zero_loss_like(loss: Tensor, work: Workload) -> Tensor:
    """A loss of 0 in place of `loss`, which may be nan, with the gradients that the wrapper waits for."""
    if getattr(work.model, "static_graph", False):
        raise ConfigurationError(
            f"{_STATIC} for a micro-batch that counts nothing (batch_weight returned 0): it has no backward pass, so "
            f"steps are not alike. {_NOT_STATIC}."
        )
    searched = getattr(work.model, "find_unused_parameters", False)  # it waits for parameters in use alone
    return zero_loss(used_by(loss, work.parameters) if searched else work.parameters)


def _check_options(options: Mapping[str, Any]) -> None:
    known = sorted(set(inspect.signature(DistributedDataParallel).parameters) - _SET_HERE)
    for name in options:
        if name in _SET_HERE:
            raise ConfigurationError(f"backend_options={{'ddp': {{{name!r}: ...}}}}: the layer sets that itself.")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigurationError(
                f"layer 'ddp' and DistributedDataParallel have no option {name!r}. "
                + (f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}.")
            )


def _let_threads_finish() -> None:
    """gloo's thread may be the last to hold a gradient that was summed, and Python aborts a process in which a thread
    asks for its lock while it exits: give the lock away once before."""
    time.sleep(0.05)


class _Entry(nn.Module):
    """What DistributedDataParallel wraps: the module, or nothing at all for a process without samples."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, batch: Any, **rest: Any) -> Any:
        if batch is EMPTY:
            return zero_loss(self.module.parameters())
        return self.module(batch=batch, **rest)


@contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
