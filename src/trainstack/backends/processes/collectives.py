"""`all_gather_with_grad`, for losses over the samples of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstack.errors import ModuleContractError


class TrainingPass:
    """The context of a forward and a backward pass in training, in which all ranks call the same collectives.

    Args:
        group: the process group of the gradients.
        inner: another context, which is entered inside this one.

    Attributes:
        borrowed: whether the micro-batch is borrowed.
        counts: whether it has a positive weight; known in the backward pass.
    """

    group: dist.ProcessGroup | None
    borrowed: bool
    counts: bool

    def __init__(self, group: dist.ProcessGroup | None, inner: AbstractContextManager[Any]) -> None:
        self.group, self._inner = group, inner
        self.borrowed, self.counts = False, True
        self._before: TrainingPass | None = None

    def __enter__(self) -> None:
        global _current
        self._before, _current = _current, self
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        global _current
        _current = self._before
        self._inner.__exit__(*raised)


# Not a ContextVar: on accelerators autograd runs in separate threads, where checkpointed parts run forward again.
_current: TrainingPass | None = None


def training_pass() -> TrainingPass | None:
    """The current pass in this process; None outside of training."""
    return _current


@contextmanager
def no_training_pass() -> Iterator[None]:
    """A block of evaluation, perhaps inside a training step."""
    global _current
    before, _current = _current, None
    try:
        yield
    finally:
        _current = before


def all_gather_with_grad(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows of all ranks, for a loss over pairs such as a contrastive loss. Call it in `train_step`, on all ranks.

    Gradients flow to the rows of all ranks; so do second derivatives. If the loss is a mean over this rank's rows, the
    gradient equals that of one process on the whole batch. A rank without samples adds no rows: see `Borrowed`. In one
    process, and in evaluation, where one rank evaluates a whole batch, the result is `tensor` itself.

    Args:
        tensor: of shape `(rows, ...)`. Ranks may have different numbers of rows, of one shape and dtype.

    Returns:
        All rows in the order of the ranks, of shape `(all rows, ...)`, and the index of this rank's first row in them.

    Raises:
        ModuleContractError: `tensor` has no dimension of rows, or ranks have rows of different shapes or dtypes; on all
            ranks.
    """
    if not tensor.dim():
        raise ModuleContractError("all_gather_with_grad got a 0-dim tensor. Give it the shape (rows, ...).")
    current = _current
    if current is None or current.group is None or dist.get_world_size(current.group) == 1:
        return (tensor if torch.is_grad_enabled() else tensor.detach()), 0
    own = tensor[:0] if current.borrowed else tensor
    counts = _row_counts(own, current.group)
    rows: Tensor = _AllGather.apply(own, counts, current)  # type: ignore[no-untyped-call]
    if current.borrowed:  # a borrowed batch is not part of `rows`, but the loss indexes its rows
        return torch.cat([rows, tensor]), len(rows)
    return rows, sum(counts[: dist.get_rank(current.group)])


def _row_counts(tensor: Tensor, group: dist.ProcessGroup) -> list[int]:
    """The number of rows of each rank; refuses rows of different shapes or dtypes."""
    row = zlib.crc32(f"{tuple(tensor.shape[1:])} {tensor.dtype}".encode())
    facts = torch.zeros(dist.get_world_size(group), 2, dtype=torch.long, device=tensor.device)
    facts[dist.get_rank(group)] = torch.tensor([len(tensor), row], device=tensor.device)
    dist.all_reduce(facts, group=group)
    by_rank = facts.tolist()
    if len({kind for _, kind in by_rank}) > 1:
        alike = [rank for rank, (_, kind) in enumerate(by_rank) if kind == row]
        raise ModuleContractError(
            f"all_gather_with_grad: a row has shape {tuple(tensor.shape[1:])}, dtype {tensor.dtype} on ranks {alike}, "
            "and another shape or dtype on the others. Pad the rows to one length that does not depend on the batch."
        )
    return [int(count) for count, _ in by_rank]


class _AllGather(torch.autograd.Function):
    """Joins rows; the gradient of a row is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: list[int], current: TrainingPass) -> Tensor:
        ctx.counts, ctx.current = counts, current
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=current.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        current: TrainingPass = ctx.current
        summed: Tensor = _Sum.apply(gradients[0], current)  # type: ignore[no-untyped-call]
        begin = sum(ctx.counts[: (rank := dist.get_rank(current.group))])
        return summed[begin : begin + ctx.counts[rank]], None, None


class _Sum(torch.autograd.Function):
    """Sums gradients over the ranks, and gradients of these in its backward pass. A pass of weight 0 adds zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, current: TrainingPass) -> Tensor:
        ctx.current = current
        # The loss of a pass of weight 0 may have a derivative of inf, and 0 * inf would reach the other ranks as nan.
        summed = tensor.contiguous().clone() if current.counts else tensor.new_zeros(tensor.shape)
        dist.all_reduce(summed, group=current.group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _Sum.apply(gradients[0], ctx.current)  # type: ignore[no-untyped-call]
        return summed, None
