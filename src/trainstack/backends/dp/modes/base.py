"""`GradientMode`, the contract of a gradient mode."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from trainstack.backends.dp.clipping import Clipper
from trainstack.backends.dp.torch_names import pytree
from trainstack.backends.losses import with_loss
from trainstack.errors import ConfigurationError


def flatten_outputs(outputs: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves of `outputs`, and the structure from which `pytree.tree_unflatten` makes the same with other leaves.

    In addition to the types that pytree knows, dataclasses and containers of any class are taken apart. Such a
    container comes back as a plain dict, list or tuple, and a dataclass as it was.
    """
    leaves, structure = pytree.tree_flatten(_open_fields(outputs), is_leaf)
    return leaves, structure


def detach_outputs(outputs: Any, loss: Tensor) -> Any:
    """`outputs` without their graphs, with `loss` as the loss: a 0-dim leaf that requires a gradient."""
    return with_loss(detach_tensors(outputs), loss.detach().clone().requires_grad_())


def detach_tensors(outputs: Any) -> Any:
    """`outputs` with every tensor cut off its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def map_leaves(function: Callable[[Any], Any], outputs: Any) -> Any:
    """`outputs` with `function(leaf)` in the place of each leaf; see `flatten_outputs`."""
    if type(outputs) is dict and all(type(value) is Tensor for value in outputs.values()):
        return {key: function(value) for key, value in outputs.items()}  # the usual case, cheaply
    leaves, structure = flatten_outputs(outputs)
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], structure)


class _Fields:
    """A node of a tree in the place of a dataclass; `tree_unflatten` makes the dataclass again."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _open_fields(outputs: Any) -> Any:
    def opened(leaf: Any) -> Any:
        if isinstance(leaf, dict):  # of a class that pytree does not know, as below
            return {key: _open_fields(value) for key, value in leaf.items()}
        if is_dataclass(leaf) and not isinstance(leaf, type):  # one leaf for pytree, torch 2.13.0
            return _Fields(leaf)
        if isinstance(leaf, list | tuple):
            return (list if isinstance(leaf, list) else tuple)(map(_open_fields, leaf))
        return leaf

    return pytree.tree_map(opened, outputs)


def _flatten_fields(node: _Fields) -> tuple[list[Any], tuple[Any, tuple[str, ...]]]:
    """The values of a dataclass: its fields, and other attributes, which `__post_init__` may have set."""
    value = node.value
    names = dict.fromkeys([*(field.name for field in fields(value)), *getattr(value, "__dict__", ())])
    held = tuple(name for name in names if hasattr(value, name))
    return [_open_fields(getattr(value, name)) for name in held], (type(value), held)


def _rebuild_fields(values: Iterable[Any], context: tuple[Any, tuple[str, ...]]) -> Any:
    kind, names = context
    rebuilt = kind.__new__(kind)  # its constructor may take other arguments, or compute
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)  # a frozen dataclass refuses the assignment
    return rebuilt


pytree.register_pytree_node(_Fields, _flatten_fields, _rebuild_fields)


@contextmanager
def full_float32() -> Iterator[None]:
    """No autocast, and products and convolutions of float32 tensors without TF32 or bfloat16, even if allowed."""
    lowered = [(place, found) for place in _PRECISIONS if (found := place.fp32_precision) not in _FULL]
    autocast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not (lowered or autocast):
        yield
        return
    try:
        for place, _ in lowered:
            place.fp32_precision = "ieee"
        with ExitStack() as stack:
            for device in autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for place, precision in lowered:
            place.fp32_precision = precision


_FULL = ("none", "ieee")
"""Settings under which float32 is not rounded; torch 2.13.0 reads "none" only where no wider setting lowers it."""
_PRECISIONS: list[Any] = [torch.backends.mkldnn.conv, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    _PRECISIONS += [torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul]  # type: ignore[attr-defined]


Run = Callable[[nn.Module, Any], Any]
"""`run(model, batch)` calls `model(stage=..., global_step=..., batch=batch, device=...)` as the layers inside do,
including autocast, and returns the result of `train_step`."""


def shorten(error: BaseException) -> str:
    """The kind and the first sentence of an error, without texts about the insides of torch."""
    text = str(error).strip().split("\n")[0].split(". ")[0]
    if "INTERNAL ASSERT" in text or not text:
        return f"{type(error).__name__}."
    return f"{type(error).__name__}: {text[:200].rstrip('.')}."


Observer = Callable[[Tensor, Tensor, Any], None]
"""`observer(losses, norms, outputs)` gets values of a micro-batch before any noise: the losses of its records, float32
of shape `(records,)`; the joint L2 norms of their gradients before clipping, float32 of shape `(records,)`, inf or nan
where a gradient is; and the outputs of `train_step`, with the records along dimension 0. All are detached. `loop` calls
it for each record, with batches of one."""


class Unsupported(ConfigurationError):
    """A gradient mode cannot give this module's per-record gradients; the message has the place and the correction."""


def _do_nothing() -> None: ...


class GradientMode(ABC):
    """Computes clipped per-record gradients of `train_step` and sums them up over micro-batches.

    Args:
        module: the user's module, never wrapped.
        trained: the parameters whose gradients are wanted, float32, each once, all of `module`.
        clipper: bounds the contribution of one record.

    Attributes:
        sums: for each of `trained` the sum since `pop_sums`, float32, of its shape; views of one tensor, to be
            added to in place.
        observer: is called by `add` once for each micro-batch; None for nothing. See `Observer`.
    """

    module: nn.Module
    trained: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    clipper: Clipper
    observer: Observer | None = None
    begin_pass: Callable[[], None] = staticmethod(_do_nothing)
    """Called before each forward pass, outside of all transforms of `torch.func`."""
    name: ClassVar[str] = ""
    one_by_one: ClassVar[bool] = False
    """Whether a record's gradient is computed from it alone, for any module."""

    _flat: Tensor
    _sums: list[Tensor]
    _is_zeroed: bool

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], clipper: Clipper) -> None:
        self.module, self.trained, self.clipper = module, tuple(trained), clipper
        self._begin_sums()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        foreign = [tuple(p.shape) for p in self.trained if id(p) not in names]
        if foreign:
            raise ConfigurationError(
                f"the optimizers hold parameters of shape {foreign} that are not the module's. Assign them to an "
                "attribute of the module."
            )
        self.names = tuple(names[id(parameter)] for parameter in self.trained)

    @abstractmethod
    def add(self, run: Run, batch: Any, records: int) -> Any:
        """Run a micro-batch forwards and backwards, and add its clipped gradients to `sums`.

        Args:
            run: see `Run`.
            batch: `records` examples along dimension 0 of each tensor.
            records: at least 1.

        Returns:
            The result of `train_step` for the micro-batch, detached. Its loss is 0-dim and requires a gradient, so that
            the loop can call backward on it, but its graph is empty: the gradients are complete.

        Raises:
            Unsupported: this mode cannot give the per-record gradients of this module.
            Exception: any error of `train_step`, unchanged. The mode can be used after that.
        """

    def explain_error(self, error: Exception) -> str:
        """The message for `error`, which `add` raised in a trial on data with which `train_step` works."""
        return f"grad_mode={self.name!r} fails. Write grad_mode='auto'. The error was: {shorten(error)}"

    @property
    def sums(self) -> list[Tensor]:
        """See above; zeroed at their first use in a step, because the next operation then finds them in the cache."""
        if not self._is_zeroed:
            self._flat.zero_()
            self._is_zeroed = True
        return self._sums

    def pop_sums(self) -> list[Tensor]:
        """`sums`, which begin at zero again."""
        return self.pop_flat_sums()[1]

    def pop_flat_sums(self) -> tuple[Tensor, list[Tensor]]:
        """`pop_sums`, with the 1-dim tensor that contains them one after the other."""
        found = self.sums
        flat = self._flat
        self._begin_sums()
        return flat, found

    @contextmanager
    def trial(self, clipper: Clipper, observer: Observer | None) -> Iterator[None]:
        """A block with other sums, another clipper and another observer; those of the step return at its end."""
        kept = self._flat, self._sums, self._is_zeroed, self.clipper, self.observer
        self._begin_sums()
        self.clipper, self.observer = clipper, observer
        try:
            yield
        finally:
            self._flat, self._sums, self._is_zeroed, self.clipper, self.observer = kept

    def close(self) -> None:  # noqa: B027 - most modes leave nothing behind
        """Leave the module as it was found."""

    def _begin_sums(self) -> None:
        size = sum(parameter.numel() for parameter in self.trained)
        self._flat, self._is_zeroed = torch.empty(size, device=self.trained[0].device), False
        self._sums = split_like(self._flat, self.trained)

    def _observe(self, losses: Tensor, norms: Tensor, outputs: Any) -> None:
        if self.observer is not None:
            self.observer(losses.detach().float(), norms.detach(), outputs)

    def _add_rows(self, gradients: Sequence[Tensor | None], records: int) -> Tensor:
        """Clip and add per-record gradients, `(records, *shape)` each; None is zero. Returns their joint norms."""
        with torch.no_grad(), full_float32():
            rows = [None if g is None else g.detach().reshape(records, -1).float() for g in gradients]
            nothing = self.sums[0].new_zeros(records)
            squares = [nothing if row is None else torch.linalg.vector_norm(row, dim=1).square() for row in rows]
            joint = torch.stack(squares)
            factors = self.clipper.factors(joint)
            for total, row, factor in zip(self.sums, rows, factors.rows, strict=True):
                if row is not None:
                    if factors.dropped is not None:
                        row = row.masked_fill(factors.dropped[:, None], 0.0)
                    total.view(-1).addmv_(row.t(), factor)
            return factors.norms


def tensor_columns(batch: Any) -> Sequence[Tensor] | None:
    """`batch` if it is a plain tuple or list of tensors with dimensions, the usual case; otherwise None."""
    if type(batch) not in (tuple, list) or not batch:
        return None
    return batch if all(type(column) is Tensor and column.dim() for column in batch) else None


def split_like(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat`, of one dimension, that have the shapes of `parameters`, one after the other."""
    views, begin = [], 0
    for parameter in parameters:
        end = begin + parameter.numel()
        views.append(flat[begin:end].view(parameter.shape))
        begin = end
    return views


def rows_of(batch: Any, records: int, rows: slice) -> Any:
    """The part of `batch` that holds the records `rows`, as a batch of the same structure.

    Tensors and arrays are cut along dimension 0; lists of strings, numbers or other plain objects by item; tuples,
    lists and mappings of those are rebuilt; None stays.

    Args:
        batch: of `records` examples.
        records: the number of records.
        rows: the selected records.

    Raises:
        Unsupported: part of the batch belongs to no record in particular.
    """
    return _slice(batch, records, rows, "batch")


def _slice(value: Any, records: int, rows: slice, place: str) -> Any:
    if value is None:
        return None
    if isinstance(value, PackedSequence):
        raise Unsupported(f"{place} is a PackedSequence, which mixes its records. Give padded tensors and lengths.")
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim == 0 or value.shape[0] != records:
            raise Unsupported(
                f"{place} has shape {tuple(value.shape)} in a batch of {records} records: which part belongs to which "
                "record? Put the records along dimension 0 of everything that collate_fn returns."
            )
        return value[rows]
    if isinstance(value, Mapping):
        cut = {key: _slice(item, records, rows, f"{place}[{key!r}]") for key, item in value.items()}
        return cut if type(value) is dict else type(value)(cut)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        # Tensors and containers in a list are always columns of the batch, and other items are records. To judge by
        # lengths would mistake one for the other in the batches in which they agree.
        atoms = not any(
            item is None or isinstance(item, Tensor | np.ndarray | Mapping | list | tuple) for item in value
        )
        if atoms and len(value) == records and not hasattr(value, "_fields"):
            return value[rows]
        parts = [_slice(item, records, rows, f"{place}[{i}]") for i, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise Unsupported(
        f"{place} is a {type(value).__name__}, which belongs to no record in particular. Let collate_fn return "
        "tensors with the records along dimension 0, lists of one item a record, and tuples, lists and dicts of those."
    )


@contextmanager
def suppress_warning(message: str) -> Iterator[None]:
    """A block in which warnings that begin with `message`, a regular expression, are not shown.

    `warnings.catch_warnings` would make Python forget which warnings it has shown, so that those of the user's code,
    shown once, would come again in every step.
    """
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    mine = ("ignore", re.compile(message, re.IGNORECASE), Warning, None, 0)
    filters.insert(0, mine)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code has reset them
            filters.remove(mine)
