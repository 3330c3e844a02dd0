"""`trace_steps` trains a few steps and records digests of all computed values, in the order of computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainstack.trainer import Callback, ModuleInterface, Trainer, TrainerArguments
from trainstack.trainer.core.fingerprints import checksums, hash_value
from trainstack.trainer.core.random_state import capture_rng
from trainstack.trainer.core.state_tree import tensors_in

START = "weights at the start"
BETWEEN = "weights between steps"


class Entry(NamedTuple):
    """A digest of one computed value.

    Attributes:
        step: the global step, counted from 1; 0 for the start.
        quantity: `"weights at the start"`, `"weights between steps"` (changes by hooks after the optimizer step),
            `"random state"`, `"data"`, `"forward"`, `"loss"`, `"backward"` or `"optimizer"`.
        name: of the submodule or parameter; "" if there is only one value.
        digest: of the bits.
    """

    step: int
    quantity: str
    name: str
    digest: str


class _Tracer(Callback):
    """Records entries at the events of a step, and the outputs of submodules."""

    expects_all_events = False

    def __init__(self, module: nn.Module) -> None:
        self.entries: list[Entry] = []
        self._module, self._step = module, 0

    def _add(self, quantity: str, values: Mapping[str, Sequence[Tensor]]) -> None:
        flat = [tensor for tensors in values.values() for tensor in tensors]
        sums = iter(checksums(flat))
        for name, tensors in values.items():
            digest = " ".join(f"{tuple(tensor.shape)}:{next(sums) & 2**64 - 1:016x}" for tensor in tensors)
            self.entries.append(Entry(self._step, quantity, name, digest))

    def _weights(self) -> dict[str, Sequence[Tensor]]:
        buffers = self._module.named_buffers() if not self._step else ()
        return {name: (one,) for name, one in (*self._module.named_parameters(), *buffers)}

    def on_train_begin(self, trainer: Any) -> None:
        self._add(START, self._weights())

    def on_fetch_data_begin(self, trainer: Any) -> None:
        if self._step != trainer.state.global_step + 1:
            self._step = trainer.state.global_step + 1
            if self._step > 1:
                self._add(BETWEEN, self._weights())

    def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
        self.entries.append(Entry(self._step, "data", "", hash_value(batch)))
        self.entries.append(Entry(self._step, "random state", "", hash_value(capture_rng(trainer.device))))

    def after_forward(self, name: str, outputs: Any) -> None:
        """Record `outputs`, which a submodule has returned in training."""
        tensors = [one for one in tensors_in(outputs) if isinstance(one, Tensor)]
        if tensors:
            self._add("forward", {name: tensors})

    def on_train_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Tensor) -> None:
        self._add("loss", {"": (loss,)})
        self._add("backward", {n: () if p.grad is None else (p.grad,) for n, p in self._module.named_parameters()})

    def on_after_optimizer_step(self, trainer: Any, optimizers: Any) -> None:
        self._add("optimizer", self._weights())


def steps_alone(args: TrainerArguments, steps: int) -> TrainerArguments:
    """`args` for `steps` global steps that write nothing, do not validate and do not resume."""
    return replace(
        args,
        fast_dev_run=steps,
        validate_every=0,
        verify_replay=0.0,
        writers=(),
        progress="none",
        log_level="ERROR",
        handle_signals=False,
    )


def trace_steps(module: ModuleInterface, args: TrainerArguments, steps: int) -> list[Entry]:
    """Train `module` for `steps` global steps. Returns the digests of the computed values, in order.

    Outputs are those of submodules, by their names. Each entry reads the device.

    Args:
        module: a new one.
        args: for a training in one process.
        steps: the number of steps; fewer if the data has fewer.
    """
    tracer = _Tracer(module)
    with _hooked(module, tracer):
        Trainer(module, steps_alone(args, steps), callbacks=[tracer]).train()
    return tracer.entries


@contextmanager
def _hooked(module: nn.Module, tracer: _Tracer) -> Iterator[None]:
    def observe(name: str) -> Any:
        def after(part: nn.Module, given: Any, outputs: Any) -> None:
            if part.training:
                tracer.after_forward(name, outputs)

        return after

    handles = [part.register_forward_hook(observe(name)) for name, part in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_difference(one: Sequence[Entry], other: Sequence[Entry]) -> Entry | None:
    """The first entry of `one` that differs from the entry of `other` at its place; None if the traces are equal."""
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return mine
    longer = max(one, other, key=len)
    return longer[min(len(one), len(other))] if len(one) != len(other) else None
