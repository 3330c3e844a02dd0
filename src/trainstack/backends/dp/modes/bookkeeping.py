"""`bookkeeping`: one forward and one backward pass for all records.

The forward pass runs under `torch.func.vmap` on batches of one record, so no record can influence the loss of another.
The backward pass runs outside of it and computes gradients of layers' outputs only. From them and the layers' inputs
follow the norm of each record's gradient, and then, with the factors known, one weighted parameter gradient for each
layer (Bu et al. 2022, arXiv 2210.00038).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from trainstack.backends.dp.clipping import Clipper
from trainstack.backends.dp.modes import record_vmap
from trainstack.backends.dp.modes.base import (
    GradientMode,
    Run,
    Unsupported,
    detach_outputs,
    flatten_outputs,
    full_float32,
    map_leaves,
    suppress_warning,
)
from trainstack.backends.dp.modes.custom_ops import CustomOpGuard
from trainstack.backends.dp.modes.op_interceptor import OpInterceptor
from trainstack.backends.dp.modes.param_uses import ParamUse, squared_norms
from trainstack.backends.dp.modes.vmap import NOT_VECTORISED, OneItem, explain_vmap_error, is_column, one_record_batches
from trainstack.backends.dp.torch_names import pytree
from trainstack.backends.losses import find_loss, loss_item

_HOOKS = "bookkeeping allows no hooks on saved tensors, as torch.utils.checkpoint and saved_tensors_hooks set"


class BookkeepingMode(GradientMode):
    """Each record's gradient is computed from it alone, for any module."""

    name: ClassVar[str] = "bookkeeping"
    one_by_one: ClassVar[bool] = True

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], clipper: Clipper) -> None:
        super().__init__(module, trained, clipper)
        if not record_vmap.is_available():
            raise Unsupported(
                f"bookkeeping does not know torch {torch.__version__}. Write grad_mode='vmap', or install a version "
                "of torch that trainstack names."
            )
        self._parts = tuple(module.modules())
        self._tracks_draws = False  # which costs microseconds a call, before any code reads a value

    def add(self, run: Run, batch: Any, records: int) -> Any:
        self._check_hooks()
        try:
            return self._add_together(run, batch, records)
        except record_vmap.RecordsDiverge as error:
            groups = error.groups  # the graph must not live on with the traceback
        if not groups:
            self._tracks_draws = True
            return self.add(run, batch, records)
        # Each group takes its own branch, as its records do one by one.
        cut = [pytree.tree_map(partial(_rows, index), batch, is_leaf=is_column) for index in groups]
        parts = [self.add(run, part, len(index)) for part, index in zip(cut, groups, strict=True)]
        return _merge(parts, groups)

    def _add_together(self, run: Run, batch: Any, records: int) -> Any:
        uses, outputs = self._forward(run, batch, records)
        losses = find_loss(outputs, records)
        with CustomOpGuard():  # a backward pass may call custom operators too
            gradients = self._backward(uses, losses)
        detached = detach_outputs(outputs, losses.detach().mean())
        del outputs
        with torch.no_grad(), full_float32():
            norms = self._add_uses(self._receive(uses, gradients, records), records)
        self._observe(losses, norms, detached)
        return detached

    def explain_error(self, error: Exception) -> str:
        return explain_vmap_error(error) or super().explain_error(error)

    def _forward(self, run: Run, batch: Any, records: int) -> tuple[list[ParamUse], Any]:
        """The uses, and the outputs with the records along dimension 0 and with their graph."""
        self.begin_pass()
        columns, make = one_record_batches(batch, records, record_vmap.require_same)
        found: list[Any] = []

        def step(*row: Tensor) -> None:
            ops = OpInterceptor(self.trained, self.names, records, tracks_draws=self._tracks_draws)
            with ops, disable_saved_tensors_hooks(_HOOKS):
                ops.mark_data(*row)
                outputs = run(self.module, make(row))
            with record_vmap.outside_vmap():
                found.extend([ops.uses, map_leaves(lambda leaf: _of_all_records(ops, leaf), outputs)])

        with suppress_warning(NOT_VECTORISED):
            record_vmap.run_per_record(step, columns)
        return found[0], found[1]

    def _check_hooks(self) -> None:
        """Hooks of the backward pass see all records, or, under `vmap`, are not called."""
        for part in self._parts:
            if part._backward_hooks or part._backward_pre_hooks:  # torch 2.13.0
                raise Unsupported(
                    f"a {type(part).__name__} has hooks of the backward pass, which would see all records at once. "
                    "Take them off, or write grad_mode='loop'."
                )
        for name, parameter in zip(self.names, self.trained, strict=True):
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):  # torch 2.13.0
                raise Unsupported(f"{name} has a hook on its gradient. Take it off, or write grad_mode='loop'.")

    def _backward(self, uses: list[ParamUse], losses: Tensor) -> list[Tensor | None]:
        """The gradient of the output of each use; None where the losses do not depend on it."""
        found = torch.autograd.grad(
            losses,
            [*(use.edge for use in uses), *self.trained],  # type: ignore[arg-type]
            grad_outputs=torch.ones_like(losses),
            allow_unused=True,
        )
        for name, gradient in zip(self.names, found[len(uses) :], strict=True):
            if gradient is not None:
                raise Unsupported(
                    f"{name} is used in a way that bookkeeping does not see, such as inside of a transform of "
                    "torch.func or in a compiled function. Write grad_mode='vmap'."
                )
        return list(found[: len(uses)])

    def _receive(self, uses: list[ParamUse], gradients: list[Tensor | None], records: int) -> list[ParamUse]:
        """Give each use the gradient of its output, which leaves `gradients`; returns those that have got one."""
        used = []
        for i, use in enumerate(uses):
            gradient, gradients[i] = gradients[i], None
            if gradient is not None:
                if use.was_changed:
                    name = self.names[use.parameters[0]]
                    raise Unsupported(
                        f"the input of {name} is changed in place later on. Write `x = x + y` instead of `x += y`."
                    )
                use.receive(gradient.float(), records)
                used.append(use)
        return used

    def _add_uses(self, uses: Sequence[ParamUse], records: int) -> Tensor:
        """Add the clipped sums of the uses; returns the joint norms of the records."""
        users: dict[int, list[ParamUse]] = {}
        for use in uses:
            for i in use.parameters:
                users.setdefault(i, []).append(use)
        shared = {i: found for i, found in users.items() if len(found) > 1}
        squares: dict[int, Tensor] = {}
        for use in uses:
            if not shared.keys() >= set(use.parameters):
                squares.update((i, square) for i, square in use.squares().items() if i not in shared)
        joint = {i: torch.stack([use.per_record()[i] for use in users]).sum(0) for i, users in shared.items()}
        squares.update({i: squared_norms(rows) for i, rows in joint.items()})
        nothing = self.sums[0].new_zeros(records)
        table = torch.stack([squares.get(i, nothing) for i in range(len(self.trained))])
        factors = self.clipper.factors(table)
        if factors.dropped is not None:
            for use in uses:
                use.drop(factors.dropped)
            joint = {i: rows.masked_fill(factors.dropped[:, None], 0.0) for i, rows in joint.items()}
        for use in uses:
            use.add_weighted(factors.rows, self.sums, joint)
        for i, rows in joint.items():
            self.sums[i] += (factors.rows[i] @ rows).reshape(self.sums[i].shape)
        return factors.norms


def _rows(index: Tensor, column: Any) -> Any:
    if column is None or isinstance(column, Tensor):
        return None if column is None else column[index]
    return type(column)([column[i] for i in index.tolist()])


def _merge(parts: list[Any], groups: list[Tensor]) -> Any:
    """Outputs of groups of records as those of the batch; values other than tensors are those of the first group."""
    flat, structure = zip(*map(flatten_outputs, parts), strict=True)
    if any(other != structure[0] for other in structure):
        raise Unsupported("train_step returns outputs of another structure for other records. Return the same keys.")
    place = torch.cat(groups).argsort()
    leaves = []
    for values in zip(*flat, strict=True):
        if not isinstance(values[0], Tensor) or values[0].dim() == 0:
            leaves.append(values[0])
        elif all(value.shape[1:] == values[0].shape[1:] for value in values):
            leaves.append(torch.cat(values)[place])
        else:
            rows = [row for value in values for row in value]
            leaves.append([rows[i] for i in place.tolist()])
    losses = torch.stack([loss_item(part).detach() * len(group) for part, group in zip(parts, groups, strict=True)])
    return detach_outputs(pytree.tree_unflatten(leaves, structure[0]), losses.sum() / len(place))


def _of_all_records(ops: OpInterceptor, leaf: Any) -> Any:
    """For a tensor of one record that of all."""
    if isinstance(leaf, OneItem):
        raise Unsupported("train_step returns a part of the batch that holds no tensors: remove it.")
    return _joined(ops.physical(leaf)) if isinstance(leaf, Tensor) else leaf


def _joined(physical: Tensor) -> Tensor:
    """`(records, ...)` where the output of a batch of one is `(1, ...)`."""
    return physical.flatten(0, 1) if physical.dim() > 1 and physical.shape[1] == 1 else physical
