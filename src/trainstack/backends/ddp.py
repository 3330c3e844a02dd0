"""`ddp`: one process for each device; gradients are summed over all processes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainstack.backends.base import Slot, TrainerBackend
from trainstack.backends.fast_paths import has_usual_zero_grad
from trainstack.backends.joining import JoinsProcesses
from trainstack.backends.losses import loss_item
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.processes.collectives import TrainingPass, no_training_pass, training_pass
from trainstack.backends.processes.environment import DistributedTrainingArguments
from trainstack.backends.processes.packing import broadcast_coalesced
from trainstack.backends.processes.reducer import CommHook, GradientReducer
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError, annotate
from trainstack.stage import Stage

_SET_HERE = {"module", "process_group", "device_ids", "output_device"}

_UNUSED = (
    "some parameters took no part in the loss of a step. If this is intended, write "
    "backend_options={'ddp': {'find_unused_parameters': True}}; otherwise freeze them with requires_grad_(False) in a "
    "hook, before the forward pass."
)

_UNUSED_SPARSE = (
    "a layer with sparse=True took no part in the loss of a step, which DistributedDataParallel does not support. "
    "Write sparse=False, or let each step use the layer."
)

_STATIC = "backend_options={'ddp': {'static_graph': True}}"
_NOT_STATIC = "Remove static_graph"


@register_layer("ddp", slot=Slot.PROCESS)
class DDP(JoinsProcesses):
    """Joins the processes that a launcher started and wraps the module in `DistributedDataParallel`.

    The loop's weights scale the gradients before their sum, so the result equals that of one process on the whole
    batch. A rank without samples runs a borrowed micro-batch, whose gradients are replaced by zeros. If parameters are
    frozen, unfrozen or added during training, the layer wraps the module again, so that their gradients are reduced.

    Args:
        inner: the layer inside this one.
        comm_hook: a communication hook of `torch.distributed.algorithms`, or a pair of its state and the hook.
        place: see `JoinsProcesses`, as for the next six.
        gather_frequency: see `JoinsProcesses`.
        timeout_s: see `JoinsProcesses`.
        allow_pickle: see `JoinsProcesses`.
        rendezvous_timeout_s: see `JoinsProcesses`.
        run_id: see `JoinsProcesses`.
        environ: see `JoinsProcesses`.
        **options: keyword arguments for `DistributedDataParallel`, e.g. `find_unused_parameters`, `bucket_cap_mb`.
            `gradient_as_bucket_view` is True by default, so that gradients need no second copy, unless an optimizer
            has its own `zero_grad`.
    """

    summary: ClassVar[str] = "joins the launcher's processes and sums gradients over them, once a global step"
    collectives: ClassVar[str] = (
        "one all-reduce a gradient bucket each global step; none for logs, metrics or decisions "
        "(a batch_weight of the module's own: one small exchange more); buffers are broadcast as a step begins, and "
        "before an evaluation"
    )
    prepares_again: ClassVar[bool] = True

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
        super().__init__(
            inner,
            place=place,
            gather_frequency=gather_frequency,
            timeout_s=timeout_s,
            allow_pickle=allow_pickle,
            rendezvous_timeout_s=rendezvous_timeout_s,
            run_id=run_id,
            environ=environ,
        )
        _check_options(options)
        self._options = options
        self._comm_hook = (None, comm_hook) if callable(comm_hook) else comm_hook
        if comm_hook is not None or options.get("static_graph"):
            self.refuses_updates = self.refuses_closures = "comm_hook and static_graph are for one update a step"
        if comm_hook is not None:
            self.refuses_replay = "a comm_hook may keep state between steps, such as the error of its compression"

    def prepare(self, work: Workload) -> Workload:
        work = self.inner.prepare(work)
        if work.gradients_reduced_by is not None:
            return work
        if isinstance(work.module, DistributedDataParallel):
            raise ConfigurationError(
                "the module is already wrapped in DistributedDataParallel. Pass the unwrapped module to the Trainer: "
                "the 'ddp' layer wraps it."
            )
        # A custom `zero_grad` may detach gradients in place, which torch refuses for views.
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
                f"{_STATIC} for steps of several micro-batches, which torch does not support. {_NOT_STATIC}, or "
                "increase gpu_batch_size_limit or the number of processes until each has one micro-batch a step."
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
        """Multiply by the world size: DistributedDataParallel averages, and weights that sum to one need the sum."""
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
        """The reducer of `work`; None if another layer sums the gradients."""
        return work.model if isinstance(work.model, GradientReducer) else None

    def begin_evaluation(self, work: Workload) -> None:
        """Broadcast the buffers of the main process, which are the ones that a checkpoint saves.

        In training the wrapper broadcasts them at the beginning of each step, unless its options say otherwise. Changes
        since then, such as running statistics, depend on the samples of each process.
        """
        self.inner.begin_evaluation(work)
        model = self._reducer(work)
        if model is not None:
            self._refresh(work, model)
        if work.world.size > 1 and (model is None or model.shares_buffers):
            buffers = list(work.module.buffers())
            if buffers:  # if this process evaluates alone, the others are in collectives of gradients
                work.world.comm.check_place("beginning an evaluation")
            broadcast_coalesced(work.world, buffers)


def _check_static(outputs: Any) -> None:
    """Refuse outputs in which torch does not find the loss, because it would never sum the gradients.

    The wrapper searches tensors with the private `torch.utils._pytree` (checked on torch 2.13.0).
    """
    loss, pytree = loss_item(outputs), getattr(torch.utils, "_pytree", None)
    if (
        pytree is not None
        and isinstance(loss, Tensor)
        and not any(leaf is loss for leaf in pytree.tree_leaves(outputs))
    ):
        raise ConfigurationError(
            f"{_STATIC} for a train_step that returns a {type(outputs).__name__}, in which torch finds no tensor, so "
            f"that gradients are not summed. {_NOT_STATIC}, or return a tensor, a tuple, a list or a dict."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    known = sorted(set(inspect.signature(DistributedDataParallel).parameters) - _SET_HERE)
    for name in options:
        if name in _SET_HERE:
            raise ConfigurationError(f"backend_options={{'ddp': {{{name!r}: ...}}}}: the layer sets this option.")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigurationError(
                f"layer 'ddp' and DistributedDataParallel have no option {name!r}. "
                + (f"Did you mean {close[0]!r}?" if close else f"The options are {', '.join(known)}.")
            )
