"""`fsdp`: parameters, gradients and optimizer states are sharded over the processes, by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstack.backends.base import Slot, TrainerBackend
from trainstack.backends.joining import JoinsProcesses
from trainstack.backends.model_units import Unit, find_units
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.processes.collectives import TrainingPass, no_training_pass, training_pass
from trainstack.backends.processes.environment import DistributedTrainingArguments
from trainstack.backends.processes.packing import broadcast_coalesced
from trainstack.backends.processes.world import DeviceChoice, World
from trainstack.backends.sharding.optimizers import check_optimizers, explained
from trainstack.backends.spec import register_layer
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage

if TYPE_CHECKING:  # torch.distributed.fsdp takes half a second to import
    from torch.distributed.fsdp import FSDPModule

    from trainstack.backends.sharding.gradients import ShardedGradients


@register_layer("fsdp", slot=Slot.PROCESS)
class FSDP(JoinsProcesses):
    """Joins the processes that a launcher started and shards the module over them with `fully_shard`.

    Each process keeps a part of each parameter, of its gradient and of the optimizer's state. The parameters of a unit
    are whole only during its forward and its backward pass. The loop's weights scale the gradients before their sum, so
    the result equals that of one process on the whole batch.

    Args:
        inner: the layer inside this one.
        place: see `JoinsProcesses`, as for the next six.
        gather_frequency: see `JoinsProcesses`.
        timeout_s: see `JoinsProcesses`.
        allow_pickle: see `JoinsProcesses`.
        rendezvous_timeout_s: see `JoinsProcesses`.
        run_id: see `JoinsProcesses`.
        environ: see `JoinsProcesses`.
        units: the modules whose parameters are gathered together: modules, their names (`"model.layers.0"`), their
            classes, or names of these (`"Block"`). All ranks have to call each of them in each forward pass. By default
            they are the result of `sharding_units` of the module, or else the blocks that an `nn.ModuleList` or
            `nn.Sequential` repeats; with `find_unused_parameters` there are none, so all parameters are gathered at
            once.
        find_unused_parameters: whether a parameter may take no part in the loss of a step. One more small exchange in
            each step finds the parameters that no rank has used; their `grad` remains None.
        reshard_after_forward: whether a unit frees its gathered parameters between its forward and its backward pass.
            False needs more memory and less communication.
        low_precision_gather: gather parameters in the dtype of the precision layer, such as bfloat16 in `fsdp-bf16`.
            Each exchange has half the bytes, and gathered parameters take half the memory. Parameters and optimizer
            states keep their dtype, and gradients are summed in float32.
        replicate: the number of replicas of the sharded module. Each replica is sharded over neighbouring ranks, and
            gradients are summed over all. A larger number needs more memory for each process, and exchanges between
            fewer processes.
        cpu_offload: keep parameters, gradients and optimizer states in host memory, and run the optimizer there. It
            needs an accelerator.
        reduce_each_pass: sum gradients over the processes in each backward pass, not once for each step. With False, a
            step of several micro-batches keeps the whole gradients of all parameters between its passes. True needs
            more communication and the memory of a single micro-batch.
        gather_for_evaluation: whether all parameters are whole during an evaluation, so that ranks may evaluate
            different numbers of batches. False is for a model that does not fit on one device: its units are gathered
            one at a time, and ranks without a batch join the passes of the others with a borrowed batch.

    Raises:
        ConfigurationError: `low_precision_gather` without a precision layer.
    """

    summary: ClassVar[str] = "joins the launcher's processes and shards parameters, gradients and optimizer states"
    collectives: ClassVar[str] = (
        "one all-gather a unit in each forward and each backward pass, one reduce-scatter a unit each global step, and "
        "with replicas one all-reduce a unit more; buffers are broadcast before an evaluation, for which all "
        "parameters are gathered"
    )
    excludes: ClassVar[Mapping[str, str]] = {
        "dp": "it clips the gradient of each record, which needs whole gradients on every process, as in 'ddp-dp'."
    }
    refuses_updates = "each pass of a sharded module sums gradients over the processes"
    refuses_closures = "each pass of a sharded module sums gradients over the processes"

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
        units: Unit | Sequence[Unit] | None = None,
        find_unused_parameters: bool = False,
        reshard_after_forward: bool = True,
        low_precision_gather: bool = False,
        replicate: int = 1,
        cpu_offload: bool = False,
        reduce_each_pass: bool = False,
        gather_for_evaluation: bool = True,
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
        self.units = (units,) if isinstance(units, str | type | nn.Module) else units
        self._finds_unused, self._reshards = find_unused_parameters, reshard_after_forward
        self.replicas, self._offloads = replicate, cpu_offload
        self.reduces_each_pass, self.evaluates_together = reduce_each_pass, not gather_for_evaluation
        self._gathered_dtype = self._low_precision() if low_precision_gather else None
        self._mesh_groups: list[dist.ProcessGroup] = []
        self._begins, self._last = True, True  # whether the current pass begins a step, and whether it ends one
        self._sharded: list[FSDPModule] = []
        self._gradients: ShardedGradients | None = None

    def _low_precision(self) -> torch.dtype:
        dtype = next((layer.autocast_dtype for layer in self.layers() if layer.autocast_dtype is not None), None)
        if dtype is None:
            raise ConfigurationError(
                f"backend {self.spec!r} with low_precision_gather=True: no layer lowers the precision of operations. "
                f"Write '{self.spec}-bf16', or remove low_precision_gather."
            )
        return dtype

    def open(self, device: DeviceChoice = "auto") -> World:
        world = super().open(device)
        if self._offloads:
            self._check_offload(world.device)
        return world

    def _check_offload(self, device: torch.device) -> None:
        remedy = "Remove backend_options={'fsdp': {'cpu_offload': True}}"
        if device.type == "cpu":
            raise ConfigurationError(
                f"cpu_offload=True on the device {str(device)!r}: parameters are in host memory already. {remedy}."
            )
        if "cpu:" not in str(dist.get_backend_config()):  # 0-dim norms of gradients are summed on the host
            raise ConfigurationError(
                f"cpu_offload=True in a process group of {dist.get_backend_config()}, which cannot exchange tensors in "
                f"host memory. Create it with backend='cpu:gloo,{device.type}:{dist.get_backend()}'. Or: {remedy}."
            )

    def _collective_backend(self, device: torch.device) -> str:
        chosen = super()._collective_backend(device)
        return f"cpu:gloo,{device.type}:{chosen}" if self._offloads and device.type != "cpu" else chosen

    def _make_groups(self) -> list[dist.ProcessGroup]:
        from trainstack.backends.sharding.mesh import check_replicas, make_groups

        groups, size = super()._make_groups(), dist.get_world_size()
        check_replicas(size, self.replicas)
        self._mesh_groups = groups
        if self.replicas > 1:
            self._mesh_groups = make_groups(size, self.replicas, lambda ranks: self._new_group(None, ranks))
        return list(dict.fromkeys([*groups, *self._mesh_groups]))

    def place(self, module: nn.Module, world: World) -> None:
        from trainstack.backends.sharding.mesh import make_mesh
        from trainstack.backends.sharding.units import Sharding, shard

        self.inner.place(module, world)
        broadcast_coalesced(world, [*(p.data for p in module.parameters()), *module.buffers()])
        how = Sharding(
            units=self._units,
            reshard_after_forward=self._reshards,
            gathered_dtype=self._gathered_dtype,
            cpu_offload=self._offloads,
        )
        self._sharded = shard(module, make_mesh(self._mesh_groups, world.device.type, self.replicas), how)

    @property
    def _units(self) -> Sequence[Unit] | None:
        return () if self.units is None and self._finds_unused else self.units

    def gathered_parts(self, module: nn.Module) -> list[nn.Module]:
        from trainstack.backends.sharding.units import OPTION

        return find_units(module, self._units, option=OPTION)

    def prepare(self, work: Workload) -> Workload:
        work = self.inner.prepare(work)
        if work.gradients_reduced_by is not None:
            return work
        from trainstack.backends.sharding.gradients import ShardedGradients

        check_optimizers(work.optimizers)
        self._gradients = ShardedGradients(work.module, self._sharded, work.world.comm, finds_unused=self._finds_unused)
        return replace(work, gradients_reduced_by=self.name)

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        assert self._gradients is not None
        if self._begins:
            self._gradients.check_members(work.parameters)
            self._gradients.begin_step()
        self._gradients.begin_pass()
        self._begins = self._last = last
        root = self._sharded[0]
        root.set_requires_gradient_sync(last or self.reduces_each_pass)
        root.set_is_last_backward(last or self.reduces_each_pass)
        return TrainingPass(self._group, self.inner.accumulate(work, last))

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        if stage is not Stage.TRAIN:
            with no_training_pass():
                return self.inner.forward(work, stage, batch, step)
        if (current := training_pass()) is not None:
            current.borrowed = isinstance(batch, Borrowed)
            current.counts = not current.borrowed
        assert self._gradients is not None
        outputs = self.inner.forward(work, stage, batch, step)
        self._gradients.check_forward(outputs)
        return outputs

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        if (current := training_pass()) is not None:
            current.counts = weight > 0
        assert self._gradients is not None
        with self._gradients.backward(counts=weight > 0, last=self._last):
            self.inner.backward(work, loss, weight)

    def clip(self, work: Workload) -> Tensor | None:
        norm = self.inner.clip(work)
        return None if norm is None else whole(norm)

    def step(self, work: Workload) -> bool:
        with explained():
            return self.inner.step(work)

    def begin_evaluation(self, work: Workload) -> None:
        """Gather all parameters, unless each forward pass gathers them one unit at a time."""
        from trainstack.backends.sharding.units import gather_all

        self.inner.begin_evaluation(work)
        if not self.evaluates_together:
            gather_all(self._sharded)
        broadcast_coalesced(work.world, list(work.module.buffers()))

    def end_evaluation(self, work: Workload) -> None:
        from trainstack.backends.sharding.units import reshard_all

        reshard_all(self._sharded)
        self.inner.end_evaluation(work)

    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        return self.inner.read([whole(one) for one in tensors])


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor as a tensor with the values of all shards. All processes call it together."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
