"""`vmap`: `train_step` on batches of one record, vectorised by `torch.func`.

A record's gradient is computed from that record alone, so no other can leak into it. `train_step` must be traceable: no
`.item()`, no branch on a tensor's value, no change of a buffer in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import (
    GradientMode,
    Run,
    Unsupported,
    detach_outputs,
    detach_tensors,
    flatten_outputs,
    rows_of,
    shorten,
    suppress_warning,
    tensor_columns,
)
from trainstack.backends.dp.modes.custom_ops import CustomOpGuard
from trainstack.backends.dp.modes.loop import one_loss
from trainstack.backends.dp.modes.record_vmap import key_of
from trainstack.backends.dp.torch_names import pytree

_FLOATS_AT_ONCE = 1 << 25
"""Per-record gradients that are kept at a time: 128 MiB."""


NOT_VECTORISED = "There is a performance drop because we have not yet implemented"
"""How the warning of torch begins for a function that `vmap` can only repeat."""


class FunctionalModule(nn.Module):
    """Calls `module` with other parameters; `run` gets it as the model."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self._module, self._replaced = (module,), parameters  # in a tuple, because it must not be a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module, with the replaced parameters."""
        return functional_call(self._module[0], self._replaced, args, kwargs)


class _Float32Norms(TorchFunctionMode):
    """Normalises bfloat16 in float32, as the kernels do inside.

    Vectorised, their backward pass returns float32 for a bfloat16 input, which the layer before then refuses.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and args and args[0].dtype is torch.bfloat16 and not args[0].is_cuda:
            return func(args[0].float(), *args[1:], **kwargs).to(torch.bfloat16)
        return func(*args, **kwargs)


_NORMS = {F.layer_norm, F.group_norm, F.rms_norm}


class VmapMode(GradientMode):
    """`vmap(grad(train_step))`, in chunks of records whose gradients fit into memory."""

    name: ClassVar[str] = "vmap"
    one_by_one: ClassVar[bool] = True

    def add(self, run: Run, batch: Any, records: int) -> Any:
        at_once = max(1, _FLOATS_AT_ONCE // sum(p.numel() for p in self.trained))
        parts = []
        for start in range(0, records, at_once):
            rows = slice(start, min(start + at_once, records))
            part = batch if at_once >= records else rows_of(batch, records, rows)
            parts.append(self._add_chunk(run, part, rows.stop - rows.start))
        losses, outputs = torch.cat([loss for loss, _ in parts]), parts[0][1]
        if len(parts) > 1:
            flat, structure = zip(*(flatten_outputs(output) for _, output in parts), strict=True)
            columns = [torch.cat(v) if isinstance(v[0], Tensor) else v[0] for v in zip(*flat, strict=True)]
            outputs = pytree.tree_unflatten(columns, structure[0])
        return detach_outputs(outputs, losses.mean())

    def explain_error(self, error: Exception) -> str:
        return explain_vmap_error(error) or super().explain_error(error)

    def _add_chunk(self, run: Run, batch: Any, records: int) -> tuple[Tensor, Any]:
        """Returns the losses, `(records,)`, and the outputs with the records along dimension 0."""
        self.begin_pass()
        columns, make = one_record_batches(batch, records)
        others: list[Any] = []

        def loss_of_one(trained: tuple[Tensor, ...], example: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            model = FunctionalModule(self.module, dict(zip(self.names, trained, strict=True)))
            outputs = run(model, make(example))
            found, form = flatten_outputs(outputs)
            others[:] = [form, *(None if isinstance(v, Tensor) else v for v in found)]
            return one_loss(outputs), tuple(v.detach() for v in found if isinstance(v, Tensor))

        each = vmap(grad_and_value(loss_of_one, has_aux=True), in_dims=(None, 0), randomness="different")
        parameters = tuple(p.detach() for p in self.trained)
        # Without the math kernel attention is only repeated, not vectorised.
        with suppress_warning(NOT_VECTORISED), CustomOpGuard(), _Float32Norms(), sdpa_kernel(SDPBackend.MATH):
            gradients, (losses, tensors) = each(parameters, tuple(columns))
        norms = self._add_rows(gradients, records)
        form, *values = others
        rows = iter([v.flatten(0, 1) if v.dim() > 1 and v.shape[1] == 1 else v for v in tensors])
        found = [next(rows) if value is None else value for value in values]
        outputs = detach_tensors(pytree.tree_unflatten(found, form))
        self._observe(losses, norms, outputs)
        return losses, outputs


class OneItem(Sequence[Any]):
    """The place of a list with the item of one record, such as a text. All records have it at once, so no item is read.

    Args:
        read: is called when the item is asked for, and raises an exception.
    """

    def __init__(self, read: Callable[[], NoReturn]) -> None:
        self._read = read

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        self._read()


def _refuse_read(place: str) -> NoReturn:
    raise Unsupported(
        f"train_step reads {place}, which holds no tensors, so vmap cannot vectorise it. Remove it from the "
        "batches of collate_fn, encode it as a tensor, or write grad_mode='loop'."
    )


def is_column(value: Any) -> bool:
    """Whether `value` is a list or tuple of plain objects, which are one item a record: see `rows_of`."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields"):
        return False
    return not any(item is None or isinstance(item, Tensor | np.ndarray | Mapping | list | tuple) for item in value)


def one_record_batches(
    batch: Any, records: int, diverge: Callable[[Sequence[Any]], NoReturn] | None = None
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of `batch`, and a function that makes a batch of one record from their rows.

    A list with one text or number a record is an `OneItem` in it, unless all records have the same.

    Args:
        batch: of `records` examples.
        records: the number of records.
        diverge: called with the items of a list that is read; by default reading is refused.

    Raises:
        Unsupported: the batch holds something else, or belongs to no record in particular.
    """
    columns = tensor_columns(batch)
    if columns is not None and all(len(column) == records for column in columns):
        kind: Any = type(batch)
        return list(columns), lambda row: kind([value.unsqueeze(0) for value in row])
    rows_of(batch, records, slice(0, 1))  # raises for values that cannot be cut
    named, structure = pytree.tree_flatten_with_path(batch, is_leaf=is_column)
    leaves, rest = [value for _, value in named], dict[int, Any]()
    for number, (path, value) in enumerate(named):
        place = f"batch{pytree.keystr(path)}"
        if is_column(value) and len(value) == records:
            is_same = len(set(map(key_of, value))) == 1
            read = partial(_refuse_read, place) if diverge is None else partial(diverge, value)
            rest[number] = value[:1] if is_same else OneItem(read)
        elif value is not None and not isinstance(value, Tensor):
            raise Unsupported(
                f"{place} is a {type(value).__name__}, which vmap cannot vectorise. Make a tensor of it in collate_fn, "
                "remove it, or write grad_mode='loop'."
            )
        elif value is not None and (value.dim() == 0 or value.shape[0] != records):
            raise Unsupported("the batch is a list with one item a record, which vmap cannot vectorise: stack it.")

    def make(row: Sequence[Tensor]) -> Any:
        values = iter(row)
        made = [next(values)[None] if isinstance(v, Tensor) else rest.get(n) for n, v in enumerate(leaves)]
        return pytree.tree_unflatten(made, structure)

    return [v for v in leaves if isinstance(v, Tensor)], make


def explain_vmap_error(error: Exception) -> str | None:
    """The reason why `train_step` cannot run under `vmap`; None if it failed for another reason."""
    if not isinstance(error, RuntimeError | ValueError | NotImplementedError):
        return None
    return (
        "train_step cannot be vectorised over records. Remove code without a rule for vmap: .item(), branches "
        "on values, gradient checkpointing, recurrent layers and buffers that change; or write grad_mode='loop'. The "
        f"error was: {shorten(error)}"
    )
