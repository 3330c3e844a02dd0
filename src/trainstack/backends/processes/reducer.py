"""`GradientReducer` wraps a module in `DistributedDataParallel`, again each time its trained parameters change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainstack._tensor_bytes import bytes_of
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.processes.packing import in_buckets
from trainstack.errors import ConfigurationError

_BROADCAST_BY_WRAPPER = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""The dtypes of dense buffers and frozen parameters that the wrapper can broadcast over gloo (torch 2.13.0)."""

_BUCKET_BYTES = 25 << 20
"""The most memory of a sum in addition to the gradients: the size of a bucket of `DistributedDataParallel`."""

CommHook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class _Wrapper(DistributedDataParallel):
    """Orders buckets from the first step on: the last parameters first, because their gradients are ready first."""

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        # checked on torch 2.13.0, as is this private method
        if self.find_unused_parameters:  # torch then orders buckets only once, and reverses the order
            return parameters, sparse
        return parameters[::-1], sparse[::-1]


class GradientReducer(nn.Module):
    """The model that a stack calls in training over several ranks.

    `DistributedDataParallel` reduces the parameters that required gradients when it was made. So `refresh` makes a new
    wrapper if this set changes.

    Args:
        module: the user's module.
        comm: compares the trained parameters of all ranks.
        group: the process group of the gradients.
        broadcast: broadcasts tensors from rank 0 that the wrapper cannot broadcast.
        comm_hook: a communication hook with its state, for each wrapper; None for an all-reduce.
        options: keyword arguments of `DistributedDataParallel`.

    Attributes:
        finds_unused: whether a parameter may take no part in a step.
        syncs: whether the next backward pass ends a step, so that gradients are summed over the ranks.
    """

    entry: _Entry
    finds_unused: bool

    def __init__(
        self,
        module: nn.Module,
        *,
        comm: Communicator,
        group: dist.ProcessGroup | None,
        broadcast: Callable[[list[Tensor]], None],
        comm_hook: tuple[Any, CommHook] | None = None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.entry = _Entry(module)
        self._comm, self._group, self._broadcast, self._comm_hook = comm, group, broadcast, comm_hook
        self._options = dict(options)
        self._wrapper: list[DistributedDataParallel] = []  # in a list, so that it is not a submodule
        self._known: list[int] = []
        self._holds: list[nn.Parameter] = []  # keeps the parameters of `_known` alive, so that their ids stay unique
        self._apart: dict[str, Tensor] = {}  # buffers and frozen parameters that the wrapper cannot broadcast
        self.finds_unused = bool(options.get("find_unused_parameters"))
        self.syncs = True
        self._within_step = False  # between two passes of a step
        self._irregular = False  # parameters have changed within this step
        self._used: set[int] = set()  # ids of parameters with a gradient in a pass of positive weight, if recorded
        self._zeros: set[int] = set()  # ids of parameters without a gradient before a pass of weight 0

    @property
    def is_static(self) -> bool:
        """Whether torch assumes the same graph in each step."""
        return bool(self._options.get("static_graph"))

    @property
    def shares_buffers(self) -> bool:
        """Whether all ranks get the buffers of rank 0 at the beginning of a step."""
        return not self._wrapper or bool(getattr(self._wrapper[0], "broadcast_buffers", True))

    def forward(self, *, batch: Any, **rest: Any) -> Any:
        if not self._wrapper:
            return self.entry(batch=batch, **rest)
        wrapper = self._wrapper[0]
        # torch 2.13.0: the attribute that `no_sync` sets, and the one that makes a forward pass broadcast buffers.
        wrapper.require_backward_grad_sync = self.syncs
        if self._apart and wrapper.require_forward_param_sync and self.shares_buffers:
            buffers = [buffer for name, buffer in self.entry.named_buffers() if name in self._apart]
            self._broadcast([buffer for buffer in buffers if buffer.layout is torch.strided])
        return wrapper(batch=batch, **rest)

    def refresh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce the gradients of all `parameters` that require them. A change on only one rank is refused.

        Added parameters get the values of rank 0.

        Raises:
            ConfigurationError: the ranks do not train the same parameters.
        """
        known = _describe(parameters)
        if known != self._known:
            self._check_alike()
            self._wrap(set(map(abs, self._known)))
            self._known, self._holds = known, list(parameters)
            self._irregular |= self._within_step

    def _check_alike(self) -> None:
        """Compare the trained parameters of all ranks, which call it together."""
        mine = {name: list(p.shape) for name, p in self.entry.module.named_parameters() if p.requires_grad}
        first, *others = self._comm.gather(mine, "the parameters that are trained")
        for rank, other in enumerate(others, 1):
            differing = sorted(name for name in {*first, *other} if first.get(name) != other.get(name))
            if differing:
                raise ConfigurationError(
                    f"rank {rank} does not train the parameters that rank 0 trains: {differing[:5]} differ in shape or "
                    "in requires_grad. Freeze, unfreeze and add the same parameters on all ranks, in the same hook."
                )

    def _wrap(self, shared: set[int]) -> None:
        """Make a wrapper. The parameters whose `id` is in `shared` are already equal on all ranks."""
        for wrapper in self._wrapper:
            # torch 2.13.0: there are no public names. The first call raises if the last reduction has not finished, as
            # each forward pass does. Without the second call the hooks would last as long as the parameters.
            wrapper.reducer._rebuild_buckets()
            wrapper._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._wrapper.clear()
        if not any(p.requires_grad for p in self.entry.parameters()):
            return
        frozen = [(name, p) for name, p in self.entry.named_parameters() if not p.requires_grad]
        self._apart = {
            name: tensor
            for name, tensor in [*self.entry.named_buffers(), *frozen]
            if tensor.layout is not torch.strided or tensor.dtype not in _BROADCAST_BY_WRAPPER
        }
        self._broadcast(list(self._apart.values()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.entry, list(self._apart))  # type: ignore[no-untyped-call]
        options = dict(self._options)
        if shared:  # a broadcast of all parameters would hide that ranks have diverged
            options["init_sync"] = False
            self._broadcast([p.data for p in self.entry.parameters() if id(p) not in shared])
        wrapper = _Wrapper(self.entry, process_group=self._group, **options)
        if not (wrapper.find_unused_parameters or wrapper.static_graph):
            # torch 2.13.0: otherwise the first step of each process has other buckets than later ones. With 3 or more
            # ranks, the order of a sum depends on the position in a bucket, so a resume would give other bits.
            wrapper.reducer._push_all_rebuilt_params()
            wrapper.reducer._rebuild_buckets()
        if self._comm_hook is not None:
            wrapper.register_comm_hook(*self._comm_hook)
        self._wrapper.append(wrapper)

    def run_backward(
        self,
        parameters: Sequence[nn.Parameter],
        backward: Callable[[Tensor], None],
        loss: Tensor,
        *,
        counts: bool,
        uneven: bool,
    ) -> None:
        """Run `backward(loss)`, and in the last pass of a step the reductions that the wrapper cannot do.

        Args:
            parameters: of the module, after the forward pass.
            backward: accumulates gradients; the wrapper sums them over the ranks.
            loss: of this pass.
            counts: whether the pass has a positive weight. Otherwise its gradients are replaced by zeros.
            uneven: whether a rank may run a pass of weight 0 in this step.
        """
        changed = _describe(parameters) != self._known  # by the forward pass
        self._irregular |= changed
        records = uneven and self.finds_unused
        held = {id(p) for p in parameters if p.grad is not None} - self._zeros if records else set[int]()
        if not counts:
            self._run_zeroed(parameters, backward, loss)
        elif records:
            with _gradient_hooks(parameters, self._record):
                backward(loss)
        else:
            backward(loss)
        if changed:
            self._check_change(parameters)
        self._within_step = not self.syncs
        if self.syncs:
            if self._irregular:
                self._reduce_rest(parameters)
            if records:
                self._drop_unused(parameters, held)
            self._irregular = False
            self._used.clear()
            self._zeros.clear()

    def knows(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the ranks have agreed on `parameters`, regardless of which require gradients now."""
        return list(map(abs, self._known)) == list(map(id, parameters))

    def run_deferred(self, parameters: Sequence[nn.Parameter], backward: Callable[[], None], *, counts: bool) -> None:
        """Run `backward()`. The gradients remain those of this rank; if the pass does not count, they are dropped."""
        if counts:
            backward()
            return
        held = [(p, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            backward()
        finally:
            for p, gradient in held:
                p.grad = gradient

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of the ranks, except those that no rank has. Broadcast the buffers of rank 0."""
        counts = self._comm.sum([float(p.grad is not None) for p in parameters], "the parameters with a gradient")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter, count in zip(parameters, counts, strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            for bucket in in_buckets(gradients, _BUCKET_BYTES):
                packed = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.all_reduce(packed, group=self._group)
                summed = torch.split(packed, [gradient.numel() for gradient in bucket])
                for gradient, values in zip(bucket, summed, strict=True):
                    gradient.copy_(values.view_as(gradient))
        if self.shares_buffers:
            self._broadcast(list(self.entry.buffers()))

    def _check_change(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse changes that a forward pass may not make. All ranks with a change call it after the backward pass.

        Raises:
            ConfigurationError: a new parameter has other values on other ranks, or the wrapper waits for the gradient
                of a parameter that is frozen now.
        """
        names = {id(p): name for name, p in self.entry.module.named_parameters()}
        known = set(map(abs, self._known))
        mine = {names.get(id(p), "(no name)"): _digest(p) for p in parameters if id(p) not in known}
        if mine:
            first, *others = self._comm.gather(mine, "the parameters that a forward pass has added")
            differing = sorted(
                {name for other in others for name in {**first, **other} if first.get(name) != other.get(name)}
            )
            if differing:
                raise ConfigurationError(
                    f"train_step has created the parameters {differing[:5]}, which have other values on each rank, so "
                    "the sum of their gradients has no meaning. Create them in a hook, such as on_end_train_step: "
                    "then all ranks get the values of rank 0. Or initialise them equally on all ranks."
                )
        frozen = [names.get(id(p), "(no name)") for p in parameters if id(p) in self._known and not p.requires_grad]
        if frozen and self.syncs and self._wrapper:
            try:
                self._wrapper[0].reducer._rebuild_buckets()  # see `_wrap`
            except RuntimeError as error:
                raise ConfigurationError(
                    f"train_step has set requires_grad=False for {frozen[:5]}, after ddp had prepared to sum the "
                    "gradients of these parameters. Freeze them in a hook, before the forward pass, such as "
                    "on_end_train_step."
                ) from error

    def _record(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._used.add(id(parameter))

    def _run_zeroed(self, parameters: Sequence[nn.Parameter], backward: Callable[[Tensor], None], loss: Tensor) -> None:
        """Run `backward(loss)` with gradients of 0, even if a derivative is inf or nan.

        The wrapper waits for the gradients of all parameters, unless it looks for unused ones. A loss of weight 0 may
        depend on no parameter, so missing gradients are made by a second backward pass.
        """
        trained, fired = [p for p in parameters if p.requires_grad], set[int]()
        self._zeros |= {id(p) for p in trained if p.grad is None}

        def zero(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
            fired.add(id(parameter))
            return None if gradient is None else torch.zeros_like(gradient)

        with _gradient_hooks(trained, zero):
            if loss.requires_grad:
                backward(loss)
            missing = [p for p in trained if id(p) not in fired and id(p) in self._known]
            if missing and self._wrapper and not self.finds_unused and not self.is_static:
                backward(self._zero_loss(missing, loss.device))

    def _reduce_rest(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters that joined or left within the step, as the wrapper does for others."""
        known = set(self._known)
        rest = [p for p in parameters if id(p) not in known]
        counts = self._comm.sum([float(p.grad is not None) for p in rest], "parameters that changed within a step")
        for parameter, count in zip(rest, counts, strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient.contiguous()
                self._comm.all_reduce_(gradient)
                parameter.grad = gradient.div_(self._comm.size)

    def _drop_unused(self, parameters: Sequence[nn.Parameter], held: set[int]) -> None:
        """Remove the zero gradients of parameters that no pass of positive weight has used on any rank.

        `held` are parameters whose gradients user code set before the pass; they stay.
        """
        trained = [p for p in parameters if p.requires_grad]
        counts = self._comm.sum([float(id(p) in self._used) for p in trained], "the parameters that a step used")
        for parameter, count in zip(trained, counts, strict=True):
            if not count and id(parameter) not in held:
                parameter.grad = None

    def _zero_loss(self, parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
        """A loss of 0 with a gradient of 0 for each of `parameters`, sparse if the wrapper expects that."""
        layers = (m for m in self.entry.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
        sparse = {id(layer.weight) for layer in layers}
        parts = []
        for p in parameters:
            nothing = torch.empty(0, dtype=torch.long, device=p.device)
            rows = nn.functional.embedding(nothing, p, sparse=True) if id(p) in sparse else p.flatten()[:0]
            total = rows.sum()
            parts.append((total.real if total.is_complex() else total).to(device, torch.float32))
        return torch.stack(parts).sum()


class _Entry(nn.Module):
    """The module that `DistributedDataParallel` wraps. It opens a borrowed batch after the broadcast of buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, batch: Any, **rest: Any) -> Any:
        return self.module(batch=batch.open() if isinstance(batch, Borrowed) else batch, **rest)


def _describe(parameters: Iterable[nn.Parameter]) -> list[int]:
    """The parameters by `id`, negative for those that require no gradient."""
    return [id(p) if p.requires_grad else -id(p) for p in parameters]


def _digest(parameter: nn.Parameter) -> str:
    return hashlib.sha256(bytes_of(parameter.detach().cpu()).numpy().tobytes()).hexdigest()


@contextmanager
def _gradient_hooks(
    parameters: Iterable[nn.Parameter], hook: Callable[[nn.Parameter, Tensor | None], Any]
) -> Iterator[None]:
    """A block in which `hook(parameter, gradient)` is called before a gradient is added to `.grad`.

    The gradient is None if autograd passes an undefined one. These hooks run before those of user code, which may add
    to a gradient.
    """

    def of(parameter: nn.Parameter) -> Callable[[Tensor | None], Any]:
        return lambda gradient: hook(parameter, gradient)

    handles = []
    for p in parameters:
        if p.requires_grad:
            others = list((p._backward_hooks or {}).items())  # torch 2.13.0: called in the order of this dict
            handles.append(p.register_hook(of(p)))  # type: ignore[no-untyped-call]
            hooks: Any = p._backward_hooks
            for number, other in others:
                del hooks[number]
                hooks[number] = other
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
