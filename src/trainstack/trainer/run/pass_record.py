"""`StepRecord` keeps the inputs and states of the passes of a global step, so that they can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainstack._tensor_classes import is_sharded
from trainstack.backends import Borrowed, Workload
from trainstack.backends.dp.sealed.plain_state import Owners
from trainstack.backends.dp.sealed.snapshot import Snapshot
from trainstack.backends.generators import get_generator_state, set_generator_state
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.modes import get_modes, set_modes
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.random_state import capture_rng, restore_rng
from trainstack.trainer.core.state_tree import copied, same


class PassVerbs(NamedTuple):
    """The functions that a forward and a backward pass call.

    Attributes:
        accumulate, forward, backward: the verbs of the stack.
        scale: multiplies the accumulated gradients by a factor: see `StepBatches.rescale`.
    """

    accumulate: Callable[[Workload, bool], AbstractContextManager[Any]]
    forward: Callable[..., Any]
    backward: Callable[[Workload, Tensor, float], None]
    scale: Callable[[Iterable[nn.Parameter], float], None]


class PassState:
    """The state that a pass reads and may change, without weights, gradients and the batch.

    It consists of random states (also of generators that the module and the callbacks hold), buffers, modes, the states
    of layers and of `user_state`, and the plain attributes of the module and of the objects that it holds. Tensors are
    copied. Of the tensors in plain attributes at most 1 MiB is copied in total.

    Args:
        context: the context of the run.
        generators: the generators that the module and the callbacks hold.
        owners: the objects with plain attributes; None to search for them.
        written: other tensors that passes write to; they are copied.

    Attributes:
        not_copied: tensors in plain attributes whose content `restore` does not restore.
    """

    def __init__(
        self, context: RunContext, generators: Iterable[Any], owners: Owners | None, written: Iterable[Tensor]
    ) -> None:
        self._context, module = context, context.module
        self._rng = capture_rng(context.world.device)
        self._generators = [(one, get_generator_state(one)) for one in generators]
        self._buffers, self._modes = ModuleSnapshot(module), get_modes(module)
        self._buffers.keep()
        self._attributes = Snapshot(module, owners)
        self.not_copied = self._attributes.not_copied
        self._layers = copied(context.stack.get_state())
        self._user = copied(context.user_state.get_state()) if context.user_state else None
        self._written = [(tensor, tensor.detach().clone()) for tensor in written]

    def restore(self) -> None:
        """Restore the state."""
        context = self._context
        self._attributes.restore()
        self._buffers.restore()
        set_modes(context.module, self._modes)
        for tensor, value in self._written:
            tensor.data.copy_(value)
        if not same(context.stack.get_state(), self._layers):
            context.stack.update_state(self._layers)
        if self._user is not None and not same(context.user_state.get_state(), self._user):
            context.user_state.update_state(self._user)
        for generator, state in self._generators:
            set_generator_state(generator, state)
        restore_rng(self._rng, context.world.device)


@dataclass(slots=True, eq=False)
class RecordedPass:
    """A forward and a backward pass.

    Attributes:
        batch: a copy of the batch, made before the forward pass.
        is_borrowed: see `Borrowed`.
        last: whether it ends the step.
        scale: the factor of the accumulated gradients before the pass.
        before: the state before the pass.
        loss: the detached loss of the forward pass; None if no backward pass followed.
        weight: its share of the step.
    """

    batch: Any
    is_borrowed: bool
    last: bool
    scale: float
    before: PassState
    loss: Tensor | None = None
    weight: float = 0.0


@dataclass(slots=True, eq=False)
class StepRecord:
    """The passes of a global step.

    Attributes:
        passes: the passes, in their order.
        gradients: copies by the `id` of the parameter, made directly after the last backward pass. None before it, and
            if code other than the passes has written to gradients between two of them.
        versions: the versions of the parameters and of `PassState.not_copied` when the first pass began.
        last: whether the current pass ends the step.
        scale: the factor of the next pass.
    """

    passes: list[RecordedPass] = field(default_factory=list)
    gradients: dict[int, Tensor] | None = None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    last: bool = False
    scale: float = 1.0
    _written: dict[int, tuple[int, int]] | None = None
    _is_foreign: bool = False

    def begin(self, one: RecordedPass, work: Workload) -> None:
        """Note the beginning of the pass `one`."""
        if not self.passes:  # torch 2.13.0: the private `_version` counts writes; no public API does
            self.versions = [(tensor, tensor._version) for tensor in (*work.params.all, *one.before.not_copied)]
        self.check_gradients(work.params.all)
        self.passes.append(one)
        self.scale = 1.0

    @property
    def moved(self) -> list[Tensor]:
        """The parameters and tensors that were written to since the first pass began."""
        return [tensor for tensor, version in self.versions if tensor._version != version]

    def check_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Note whether other code has written to gradients since the last pass."""
        self._is_foreign |= self._written is not None and self._written != _places(params)

    def note_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Note the current gradients as those of the passes so far."""
        self._written = _places(params)

    def end_pass(self, work: Workload) -> None:
        """Note the end of a backward pass. Call this before any hook."""
        self.note_gradients(work.params.all)
        if self.last and not self._is_foreign:
            self.gradients = {id(p): p.grad.detach().clone() for p in work.params.all if p.grad is not None}


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_differing(pairs: Mapping[Any, tuple[Tensor | None, Tensor | None]]) -> list[Any]:
    """The keys of the pairs whose bits differ. It reads once from each device."""
    found, plain = set[Any](), dict[Any, Tensor]()
    for key, (one, other) in pairs.items():
        if one is None or other is None:
            if one is not other:
                found.add(key)
        elif _is_plain(one) and _is_plain(other) and one.shape == other.shape and one.dtype == other.dtype:
            plain[key] = (_bits(one) != _bits(other)).any()
        elif not same(one, other):
            found.add(key)
    devices = {flag.device for flag in plain.values()}
    for device in devices:
        flags = {key: flag for key, flag in plain.items() if flag.device == device}
        differs = torch.stack(list(flags.values())).tolist()
        found.update(key for key, differing in zip(flags, differs, strict=True) if differing)
    return [key for key in pairs if key in found]


def _is_plain(tensor: Tensor) -> bool:
    simple = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return simple and not tensor.is_complex() and not tensor.is_quantized


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])


def _places(params: Iterable[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """The `id` and the number of writes of each gradient, by the `id` of its parameter."""
    return {id(p): (id(p.grad), p.grad._version) for p in params if p.grad is not None}


def copy_batch(batch: Any) -> Any:
    """A copy of a collated batch, to which `train_step` may write."""
    plain = batch.batch if type(batch) is Borrowed else batch
    try:
        return deepcopy(plain)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # a tensor with a graph, or an object that cannot be copied
        return copied(plain)


class SetAside:
    """Keeps the gradients of a step during other backward passes.

    Args:
        params: the parameters. Their gradients are set to None.
        shares_memory: whether later backward passes may write to the memory of these gradients. They are copied then.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, shares_memory: bool) -> None:
        params = tuple(params)
        self._held = [(p, p.grad, _copy(p.grad) if shares_memory else None) for p in params]
        for p in params:
            p.grad = None

    def put_back(self) -> None:
        """Restore the gradients of all parameters."""
        for p, gradient, values in self._held:
            p.grad = gradient
            if gradient is not None and values is not None:
                gradient.data.copy_(values)


def _copy(gradient: Tensor | None) -> Tensor | None:
    is_plain = gradient is not None and gradient.layout is torch.strided and not is_sharded(gradient)
    return gradient.detach().clone() if is_plain and gradient is not None else None
