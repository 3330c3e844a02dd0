"""`ddp`: one process a device; gradients are summed over all processes."""

from __future__ import annotations

import atexit
import difflib
import inspect
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from trainstack.backends.base import AbstractTrainerBackendDecorator, Slot, TrainerBackend
from trainstack.backends.fast_paths import has_usual_zero_grad
from trainstack.backends.losses import loss_item
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.processes.collectives import TrainingPass, no_training_pass, training_pass
from trainstack.backends.processes.communicator import GroupCommunicator
from trainstack.backends.processes.environment import (
    DistributedTrainingArguments,
    ProcessInfo,
    detect_process_info,
    is_on_one_host,
    launch_help,
    process_info_of_group,
)
from trainstack.backends.processes.gathering import gather_outputs
from trainstack.backends.processes.network import choose_interface, use_interface
from trainstack.backends.processes.opening import (
    RENDEZVOUS_S,
    Opening,
    bound_device,
    group_seconds,
    log_hosts,
    reachable_address,
)
from trainstack.backends.processes.packing import broadcast_coalesced
from trainstack.backends.processes.reducer import CommHook, GradientReducer
from trainstack.backends.processes.world import DeviceChoice, World, pick_device
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError, annotate
from trainstack.ranks import own_part
from trainstack.stage import Stage

if TYPE_CHECKING:
    from trainstack.backends.processes.rendezvous import Rendezvous

_SET_HERE = {"module", "process_group", "device_ids", "output_device"}

_UNUSED = (
    "some parameters took no part in the loss of a step. If that is meant, write "
    "backend_options={'ddp': {'find_unused_parameters': True}}; else freeze them with requires_grad_(False) in a hook, "
    "before the forward pass."
)

_UNUSED_SPARSE = (
    "a layer with sparse=True took no part in the loss of a step, which DistributedDataParallel does not support. "
    "Write sparse=False, or let each step use the layer."
)

_STATIC = "backend_options={'ddp': {'static_graph': True}}"
_NOT_STATIC = "Leave static_graph out"


@register_layer("ddp", slot=Slot.PROCESS)
class DDP(AbstractTrainerBackendDecorator):
    """Joins the processes that a launcher started and wraps the module in `DistributedDataParallel`.

    A process group that exists already is adopted and never destroyed; the processes then work together in groups of
    their own beside it, which have `timeout_s` and which a failure may break.
    Gradients are summed with the weights of the loop, so that the result is that of one process on the whole batch. A
    rank without samples runs a borrowed micro-batch, whose gradients are replaced by zeros. Parameters that are frozen,
    unfrozen or added during training are reduced from then on: the module is wrapped again.

    Args:
        inner: the layer inside this one.
        place: an explicit place in the world; by default the launcher's environment tells.
        gather_frequency: send at most so many rows at once when outputs are gathered.
        timeout_s: seconds after which a collective that not everybody joins fails.
        allow_pickle: see `DistributedTrainingArguments.allow_pickle`.
        rendezvous_timeout_s: seconds in which all processes have to come to `open`, and again to make their groups;
            by default 600, or `timeout_s` where that is shorter.
        run_id: a name that all processes of a run share; one with another name is refused.
        environ: where to look for the launcher's variables.
        comm_hook: a communication hook of `torch.distributed.algorithms`, or a pair of its state and the hook.
        **options: passed on to `DistributedDataParallel`, e.g. `find_unused_parameters`, `bucket_cap_mb`. By default
            `gradient_as_bucket_view` is True, so that gradients need no second copy, unless an optimizer has its own
            `zero_grad`.
    """

    summary: ClassVar[str] = "joins the launcher's processes and sums gradients over them, once a global step"
    collectives: ClassVar[str] = (
        "one all-reduce a gradient bucket each global step; none for logs, metrics or decisions "
        "(a batch_weight of the module's own: one small exchange more); buffers are broadcast as a step begins, and "
        "before an evaluation"
    )
    joins_processes: ClassVar[bool] = True
    prepares_again: ClassVar[bool] = True
    configured_by: ClassVar[Mapping[type, str]] = {DistributedTrainingArguments: "place"}

    def __init__(
        self,
        inner: TrainerBackend,
        *,
        place: DistributedTrainingArguments | None = None,
        gather_frequency: int | None = None,
        timeout_s: float = 1800.0,
        allow_pickle: bool = False,
        rendezvous_timeout_s: float | None = None,
        run_id: str | None = None,
        environ: Mapping[str, str] | None = None,
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inner)
        _check_options(options)
        self._explicit, self._environ = place, os.environ if environ is None else environ
        self._gather_frequency = gather_frequency or (place.gather_frequency if place is not None else None)
        self._comm_hook = (None, comm_hook) if callable(comm_hook) else comm_hook
        if comm_hook is not None or options.get("static_graph"):
            self.refuses_updates = self.refuses_closures = "comm_hook and static_graph are for one update a step"
        self._allow_pickle = allow_pickle if place is None else place.allow_pickle
        self._timeout_s = timeout_s if place is None else place.timeout_s
        clock = rendezvous_timeout_s if place is None else place.rendezvous_timeout_s
        self._rendezvous_s = min(RENDEZVOUS_S, self._timeout_s) if clock is None else clock
        self._run_id = run_id if place is None else place.run_id
        self._interface: str | None = None  # on which gloo was made to listen
        self._options = options
        self._owns_group = False
        self._group: dist.ProcessGroup | None = None  # sums gradients
        self._made: list[dist.ProcessGroup] = []
        self._world: World | None = None

    def open(self, device: DeviceChoice = "auto") -> World:
        place = None if dist.is_initialized() else detect_process_info(self._environ, self._explicit)
        if place is None and not dist.is_initialized():
            raise ConfigurationError(launch_help(self.spec))
        found = None
        if place is None:
            opening = Opening(own_part("open"), dist.get_rank(), dist.get_world_size(), self._rendezvous_s)
        else:
            from trainstack.backends.processes.rendezvous import rendezvous

            found = rendezvous(place, self._rendezvous_s, self._environ, self._run_id)
            opening = Opening(found.words, place.rank, place.size, self._rendezvous_s)
        try:
            return self._open(opening, place, found, device)
        except BaseException as error:  # the others wait for this rank, in C++
            opening.fail(error)
            self._take_interface_back()
            raise

    def _open(
        self, opening: Opening, place: ProcessInfo | None, found: Rendezvous | None, device: DeviceChoice
    ) -> World:
        here = place or process_info_of_group(self._rendezvous_s)
        # The layer inside selects the device. It may refuse it.
        inner = self.inner.open(pick_device(device, here.local_rank, here.local_size))
        if found is not None:
            self._choose_interface(found, here)

        def join() -> GroupCommunicator:
            if inner.device.type != "cpu":
                torch.accelerator.set_device_index(inner.device.index or 0)  # it holds for one thread
            if found is not None:
                self._join(here, found.store, inner.device)
            return self._communicator()

        comm = opening.run(join)
        if found is not None:
            atexit.unregister(_let_threads_finish)
            atexit.register(_let_threads_finish)
        self._world = replace(
            inner, rank=dist.get_rank(), size=dist.get_world_size(), local_rank=here.local_rank, comm=comm
        )
        return self._world

    def _choose_interface(self, found: Rendezvous, here: ProcessInfo) -> None:
        """Have gloo listen at an address that all ranks can reach, and at no other."""
        hosts = [member.host for member in found.members]
        if here.rank == 0:
            log_hosts(found.members)
        address = reachable_address(found.members, here.rank)
        one_host = len(set(hosts)) == 1 and is_on_one_host(here, self._environ)
        self._interface = choose_interface(hosts, one_host, address, os.environ)
        if self._interface is not None:
            use_interface(self._interface)

    def _communicator(self) -> GroupCommunicator:
        # Beside an adopted group, make our own: they have our time-out, and may be broken when a process fails.
        # The communicator has a group for itself: its exchanges must never meet the collectives of gradients.
        self._group = cast(dist.ProcessGroup, dist.group.WORLD) if self._owns_group else self._new_group(None)
        talking = self._new_group("gloo")
        # torch 2.13.0: an adopted process group has no public way to its store.
        store = dist.distributed_c10d._get_default_store()
        return GroupCommunicator(talking, store, [self._group], self._timeout_s, allow_pickle=self._allow_pickle)

    def _new_group(self, backend: str | None) -> dist.ProcessGroup:
        seconds = group_seconds(self._timeout_s, backend or dist.get_backend())
        made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
        self._made.append(made)
        return made

    def _join(self, place: ProcessInfo, store: Store, device: torch.device) -> None:
        backend = (self._explicit and self._explicit.backend) or dist.get_default_backend_for_device(device.type)
        dist.init_process_group(
            backend=backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=group_seconds(self._timeout_s, backend)),
            device_id=bound_device(device, backend),
        )
        self._owns_group = True

    def prepare(self, work: Workload) -> Workload:
        work = self.inner.prepare(work)
        if work.gradients_reduced_by is not None:
            return work
        if isinstance(work.module, DistributedDataParallel):
            raise ConfigurationError(
                "the module is wrapped in DistributedDataParallel already. Give the Trainer your own module: "
                "the 'ddp' layer wraps it."
            )
        # A `zero_grad` of an optimizer's own may detach gradients in place, which torch refuses for views.
        views = all(map(has_usual_zero_grad, work.optimizers))
        model = GradientReducer(
            work.model,
            comm=work.world.comm,
            group=self._group,
            broadcast=lambda tensors: broadcast_coalesced(work.world, tensors),
            comm_hook=self._comm_hook,
            options={"gradient_as_bucket_view": views, **self._options},
        )
        model.refresh(work.parameters)
        return replace(work, model=model, gradients_reduced_by=self.name)

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        model = self._reducer(work)
        if model is None:
            return self.inner.accumulate(work, last)
        model.syncs = last
        if model.is_static and not last:
            raise ConfigurationError(
                f"{_STATIC} for steps of several micro-batches, in which torch does not support it. {_NOT_STATIC}, or "
                "make gpu_batch_size_limit and the number of processes so large that each has one micro-batch a step."
            )
        return TrainingPass(self._group, self.inner.accumulate(work, last))

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        model = self._reducer(work)
        if stage is not Stage.TRAIN:
            work = work if model is None else replace(work, model=model.entry.module)
            with no_training_pass():
                return self.inner.forward(work, stage, batch, step)
        if (current := training_pass()) is not None:
            current.borrowed = isinstance(batch, Borrowed)
            current.counts = not current.borrowed
        try:
            if model is not None:
                self._refresh(work, model)
                work = replace(work, model=model.entry) if work.defers_sum else work
            outputs = self.inner.forward(work, stage, batch, step)
        except RuntimeError as error:
            if "find_unused_parameters" in str(error):
                annotate(error, _UNUSED)
            raise
        if model is not None and model.is_static and not work.defers_sum:
            _check_static(outputs)
        return outputs

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        """DistributedDataParallel averages; weights that sum to one over all ranks need the sum."""
        model = self._reducer(work)

        def backward(loss: Tensor) -> None:
            self.inner.backward(work, loss, weight * work.world.size)

        if (current := training_pass()) is not None:
            current.counts = weight > 0
        if model is None:
            backward(loss)
            return
        if work.defers_sum:
            model.run_deferred(work.parameters, lambda: self.inner.backward(work, loss, weight), counts=weight > 0)
            return
        work.params.refresh()
        try:
            model.run_backward(work.parameters, backward, loss, counts=weight > 0, uneven=work.uneven)
        except RuntimeError as error:
            if "Expected sparse gradient to be defined" in str(error):
                annotate(error, _UNUSED_SPARSE)
            raise

    def sum_gradients(self, work: Workload) -> None:
        self.inner.sum_gradients(work)
        model = self._reducer(work)
        if model is not None:
            work.params.refresh()
            model.sum_gradients(work.parameters)

    @staticmethod
    def _refresh(work: Workload, model: GradientReducer) -> None:
        work.params.refresh()
        if not (work.defers_sum and model.knows(work.parameters)):
            model.refresh(work.parameters)

    def _reducer(self, work: Workload) -> GradientReducer | None:
        """The reducer of `work`; None where another layer sums the gradients."""
        return work.model if isinstance(work.model, GradientReducer) else None

    def begin_evaluation(self, work: Workload) -> None:
        """Give every process the main process's buffers, which are the ones that are saved.

        In training the wrapper does that as each step begins, unless its options say otherwise. What the step has made
        of them since, such as running statistics, is of each process's own samples.
        """
        self.inner.begin_evaluation(work)
        model = self._reducer(work)
        if model is not None:
            self._refresh(work, model)
        if work.world.size > 1 and (model is None or model.shares_buffers):
            buffers = list(work.module.buffers())
            if buffers:  # where a process evaluates alone, the others are in collectives of gradients
                work.world.comm.check_place("beginning an evaluation")
            broadcast_coalesced(work.world, buffers)

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
            self._take_interface_back()

    def _take_interface_back(self) -> None:
        if self._interface is not None:
            use_interface(None)
            self._interface = None


def _check_static(outputs: Any) -> None:
    """Refuse outputs in which torch does not find the loss: it would never sum the gradients.

    torch 2.13.0: the wrapper looks for tensors with `torch.utils._pytree`.
    """
    loss, pytree = loss_item(outputs), getattr(torch.utils, "_pytree", None)
    if (
        pytree is not None
        and isinstance(loss, Tensor)
        and not any(leaf is loss for leaf in pytree.tree_leaves(outputs))
    ):
        raise ConfigurationError(
            f"{_STATIC} for a train_step that returns a {type(outputs).__name__}, in which torch finds no tensor, so "
            f"that gradients are not summed. {_NOT_STATIC}, or return the loss, a tuple, a list or a dict."
        )


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
