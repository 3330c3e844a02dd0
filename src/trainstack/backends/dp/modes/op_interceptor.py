"""`OpInterceptor` intercepts torch functions that a forward pass calls with a trained parameter.

It intercepts functions instead of modules, so a custom layer that calls `F.linear` works as well, and each use of a
parameter is recorded separately.

`train_step` runs under `vmap` over the records. A known function is run on the physical tensors instead, with the
parameter cut off the graph, and its input is kept. In any other function the parameter is replaced by a copy for each
record: functions with a rule for `vmap` are exact too, at the cost of a gradient for each record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import custom_function_call  # type: ignore[attr-defined]
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes import record_vmap
from trainstack.backends.dp.modes.attention import attention
from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.custom_ops import OPERATORS, check_function, check_operator
from trainstack.backends.dp.modes.layer_uses import FoldedUse, TransposedUse
from trainstack.backends.dp.modes.param_uses import ConvUse, ElementwiseUse, EmbeddingUse, NormUse, ParamUse, ProductUse
from trainstack.backends.dp.random_functions import COMPOSED, RANDOM_FUNCTIONS
from trainstack.backends.dp.torch_names import pytree

FLOATS_OF_COPIES = 1 << 25
"""Largest gradient of the copies of one parameter for all records: 128 MiB."""


class OpInterceptor(TorchFunctionMode):
    """While it is active, uses of `trained` are recorded, and leave no edge to the parameter in the graph.

    So if the graph of the losses leads to a trained parameter all the same, it was used in a way that is not known.

    Attributes:
        uses: in the order of use.
        records: of the `vmap`.
        level: its number, see `record_vmap`.
        tracks_draws: whether `check_read` can tell values of the data from those that depend on random numbers.
    """

    level: int

    def __init__(
        self, trained: Sequence[nn.Parameter], names: Sequence[str], records: int, *, tracks_draws: bool
    ) -> None:
        super().__init__()
        self.uses: list[ParamUse] = []
        self.records, self.tracks_draws, self.names = records, tracks_draws, names
        self.level = 0
        self._number = {id(parameter): i for i, parameter in enumerate(trained)}
        self._trained = trained
        self._copies: dict[int, Tensor] = {}
        self._transposed: dict[int, tuple[Tensor, int]] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def __enter__(self) -> OpInterceptor:
        self.level = record_vmap.current_level() or 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.tracks_draws:
            return self._call(func, args, kwargs)
        given = pytree.tree_leaves((args, kwargs))
        is_data = not _draws(func, args, kwargs) and not any(map(self._may_be_drawn, given))
        found = self._call(func, args, kwargs)
        if is_data:
            self.mark_data(*given, *pytree.tree_leaves(found))
        return found

    def mark_data(self, *values: Any) -> None:
        """Note that no random number of a record is in these values; a later write ends that."""
        for value in values:
            if isinstance(value, Tensor) and record_vmap.is_batched(value, self.level):
                value._data_version = record_vmap.version(value)  # type: ignore[attr-defined]

    def _may_be_drawn(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or record_vmap.is_shared(value):
            return False
        is_mine = record_vmap.is_batched(value, self.level)
        return not is_mine or getattr(value, "_data_version", None) != record_vmap.version(value)

    def check_read(self, tensor: Tensor) -> None:
        """`tensor` decides which records run together: raise `RecordsDiverge` if it may depend on random numbers.

        A record would draw others unless it agrees with other records by chance, and would so depend on them.
        """
        if self.records > 1 and (not self.tracks_draws or self._may_be_drawn(tensor)):
            raise record_vmap.RecordsDiverge([*torch.arange(self.records)[:, None]] if self.tracks_draws else [])

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            if type(func) in OPERATORS:
                check_operator(func)
            if not self._holds_parameter(args, kwargs) or func in _NO_TENSOR or not self._is_innermost():
                return func(*args, **kwargs)
            return self._with_copies(func, args, kwargs)
        if handler is not _custom_function and not (
            self._is_innermost() if handler not in _READERS else self._is_here()
        ):
            return func(*args, **kwargs)
        return handler(self, func, *args, **kwargs)

    def number_of(self, parameter: Any) -> int | None:
        """The number of a trained parameter, None for anything else."""
        return self._number.get(id(parameter))

    def physical(self, tensor: Tensor) -> Tensor:
        """See `record_vmap.unwrap`."""
        return record_vmap.unwrap(tensor, self.level, self.records)

    def record_use(self, use: ParamUse, x: Tensor, output: Tensor) -> Tensor:
        """Record `use`, whose input and output are physical; returns the output to use from here on."""
        if not output.requires_grad:
            output = _AttachToGraph.apply(output, self._anchor)  # type: ignore[no-untyped-call]
        use.keep(x)
        use.edge = get_gradient_edge(output)
        self.uses.append(use)
        return output

    def wrap(self, physical: Tensor) -> Tensor:
        """See `record_vmap.wrap`."""
        return record_vmap.wrap(physical, self.level)

    def transpose(self, func: Any, parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Remember transposed matrices, so that a product with one is known as a product with the matrix."""
        number = self.number_of(parameter)
        if number is None or parameter.dim() != 2:
            return NotImplemented
        view: Tensor = func(parameter, *args, **kwargs)
        if view.shape != parameter.shape[::-1] or view.stride() != parameter.stride()[::-1]:
            return view
        self._transposed[id(view)] = (view, number)  # which keeps its id from being used again
        return view

    def matrix(self, factor: Any) -> tuple[int, bool] | None:
        """The number of the trained matrix that a right factor is or is the transpose of, and whether it is that."""
        number = self.number_of(factor)
        if number is not None:
            return (number, False) if factor.dim() == 2 else None
        held = self._transposed.get(id(factor))
        return None if held is None else (held[1], True)

    def parameter(self, number: int) -> Tensor:
        """Without its edge in the graph."""
        return self._trained[number].detach()

    def _is_innermost(self) -> bool:
        return torch.is_grad_enabled() and self._is_here()

    def _is_here(self) -> bool:
        return record_vmap.current_level() == self.level

    def _is_parameter(self, value: Any) -> bool:
        return id(value) in self._number or (bool(self._transposed) and id(value) in self._transposed)

    def _holds_parameter(self, args: Any, kwargs: Any) -> bool:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if self._is_parameter(value):
                return True
            if type(value) in (list, tuple) and any(map(self._is_parameter, value)):
                return True
        return False

    def _with_copies(self, func: Any, args: Any, kwargs: Any) -> Any:
        def replaced(value: Any) -> Any:
            if id(value) in self._number:
                return self._copy_of(self._number[id(value)])
            if id(value) in self._transposed:
                return self._copy_of(self._transposed[id(value)][1]).t()
            return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

        return func(*map(replaced, args), **{key: replaced(value) for key, value in kwargs.items()})

    def _copy_of(self, number: int) -> Tensor:
        """The parameter as `train_step` sees it if each record has one for itself; nothing is copied in memory."""
        copy = self._copies.get(number)
        if copy is None:
            parameter = self._trained[number]
            if parameter.numel() * self.records > FLOATS_OF_COPIES:
                raise Unsupported(
                    f"{self.names[number]} is used outside of the layers that bookkeeping knows (Linear, Conv, "
                    "normalisations, Embedding, attention, products with a matrix), and is too large for a gradient "
                    "of each record. Use it in such a layer, or write grad_mode='vmap'."
                )
            with record_vmap.outside_vmap():
                # A view: nothing may be written to the parameter.
                copies = parameter.detach().clone().expand(self.records, *parameter.shape)
                use = ElementwiseUse(number, (1, *parameter.shape))
                copies = self.record_use(use, copies, copies.view_as(copies))
            copy = self._copies[number] = self.wrap(copies)
        return copy


class _AttachToGraph(torch.autograd.Function):
    """Makes a tensor part of a graph. Unlike a leaf it may then be changed in place, as by `ReLU(inplace=True)`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _custom_function(ops: OpInterceptor, func: Any, kind: Any, *args: Any, **options: Any) -> Any:
    check_function(kind)
    return func(kind, *args, **options)


def _transpose(ops: OpInterceptor, func: Any, parameter: Any, *args: Any, **options: Any) -> Any:
    view = ops.transpose(func, parameter, *args, **options)
    return _other(ops, func, (parameter, *args), options) if view is NotImplemented else view


def _other(ops: OpInterceptor, func: Any, args: Any, options: Any) -> Any:
    if not torch.is_grad_enabled() or not ops._holds_parameter(args, options):
        return func(*args, **options)
    return ops._with_copies(func, args, options)


def _detach(ops: OpInterceptor, parameter: Any) -> Any:
    """`parameter`, without its edge in the graph if it is trained."""
    return parameter if ops.number_of(parameter) is None else parameter.detach()


def _is_shared(ops: OpInterceptor, *tensors: Any) -> bool:
    """Whether all records have the same of each of these, so that they can be used with physical tensors."""
    return not any(isinstance(t, Tensor) and record_vmap.is_batched(t, ops.level) for t in tensors)


def _linear(ops: OpInterceptor, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    w, b = ops.number_of(weight), ops.number_of(bias)
    if (w is None and b is None) or not _is_shared(ops, weight, bias):
        return _other(ops, func, (input, weight, bias), {})  # type: ignore[no-any-return]
    with record_vmap.outside_vmap():
        x = ops.physical(input)
        output = ops.record_use(ProductUse(w, b), x, func(x, _detach(ops, weight), _detach(ops, bias)))
    return ops.wrap(output)


def _matmul(ops: OpInterceptor, func: Any, input: Any, other: Any, **options: Any) -> Any:
    """`input @ W` and `input @ W.t()`."""
    found = ops.matrix(other)
    if found is None or options or not isinstance(input, Tensor) or ops._is_parameter(input) or input.dim() == 0:
        return _other(ops, func, (input, other), options)
    number, is_transposed = found
    with record_vmap.outside_vmap():
        x, weight = ops.physical(input), ops.parameter(number)
        use: ParamUse = ProductUse(number, None)
        if not is_transposed:
            use, weight = TransposedUse(use, number, weight.shape), weight.t()
        output = ops.record_use(use, x, F.linear(x, weight))
    return ops.wrap(output)


def _conv(
    ops: OpInterceptor,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    w, b = ops.number_of(weight), ops.number_of(bias)
    rest = (stride, padding, dilation, groups)
    if (w is None and b is None) or not _is_shared(ops, weight, bias):
        return _other(ops, func, (input, weight, bias, *rest), {})  # type: ignore[no-any-return]
    kernel = tuple(weight.shape[2:])
    dilations = _per_dimension(dilation, kernel)
    if padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(dilations, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in _per_dimension(0 if padding == "valid" else padding, kernel)]
    use = ConvUse(
        w, b, kernel=kernel, stride=_per_dimension(stride, kernel), padding=sides, dilation=dilations, groups=groups
    )
    is_batch = input.dim() == weight.dim()
    return _folded(ops, use, input, is_batch, lambda x: func(x, _detach(ops, weight), _detach(ops, bias), *rest))


def _folded(
    ops: OpInterceptor,
    use: ParamUse,
    input: Tensor,
    is_batch: bool,
    compute: Callable[[Tensor], Tensor],
    kept: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """A function of a batch, whose dimension is joined with that of the records for it."""
    with record_vmap.outside_vmap():
        x = ops.physical(input)
        if is_batch:
            each = x.shape[1]
            x = x.flatten(0, 1)
            if each != 1:
                use = FoldedUse(use, each)
        output = compute(x)
        output = ops.record_use(use, x if kept is None else kept(x), output)
        if is_batch:
            output = output.view(ops.records, each, *output.shape[1:])
    return ops.wrap(output)


def _per_dimension(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values


def _norm(
    ops: OpInterceptor,
    func: Any,
    input: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    **eps: float | None,
) -> Tensor:
    """Layer norm; RMS norm, which has no bias; group norm, where `shape` is the number of groups."""
    w, b = ops.number_of(weight), ops.number_of(bias)
    affine = {"weight": weight} if func is F.rms_norm else {"weight": weight, "bias": bias}
    if (w is None and b is None) or not _is_shared(ops, weight, bias):
        return _other(ops, func, (input, shape), {**affine, **eps})  # type: ignore[no-any-return]
    affine = {key: _detach(ops, value) for key, value in affine.items()}

    def plain(x: Tensor) -> Tensor:
        if w is None:
            return x
        with torch.no_grad():
            return func(x, shape, **eps)  # type: ignore[no-any-return]

    is_group = func is F.group_norm
    use = NormUse(w, b, None if is_group else len(shape))
    return _folded(ops, use, input, is_group, lambda x: func(x, shape, **affine, **eps), plain)


def _batch_norm(
    ops: OpInterceptor,
    func: Any,
    input: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """In eval mode, in which it is an affine function of each record."""
    w, b = ops.number_of(weight), ops.number_of(bias)
    if training or (w is None and b is None) or not _is_shared(ops, mean, variance, weight, bias):
        return _other(ops, func, (input, mean, variance, weight, bias, training, momentum, eps), {})  # type: ignore[no-any-return]

    def plain(x: Tensor) -> Tensor:
        with torch.no_grad():
            return func(x, mean, variance, eps=eps)  # type: ignore[no-any-return]

    def compute(x: Tensor) -> Tensor:
        return func(x, mean, variance, _detach(ops, weight), _detach(ops, bias), eps=eps)  # type: ignore[no-any-return]

    return _folded(ops, NormUse(w, b, None), input, True, compute, plain)


def _embedding(
    ops: OpInterceptor,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    w = ops.number_of(weight)
    if w is None or not _is_shared(ops, weight):
        rest = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return _other(ops, func, (input, weight, *rest), {})  # type: ignore[no-any-return]
    if max_norm is not None or scale_grad_by_freq:
        what = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise Unsupported(f"{ops.names[w]}: an Embedding with {what} lets records change each other. Remove it.")
    with record_vmap.outside_vmap():
        x = ops.physical(input)
        output = ops.record_use(EmbeddingUse(w, weight.shape, padding_idx), x, func(x, weight.detach(), padding_idx))
    return ops.wrap(output)


def _attention(ops: OpInterceptor, func: Any, *args: Any, **options: Any) -> Any:
    """`nn.MultiheadAttention` with one weight for query, key and value, without specialties.

    Its arguments are passed on by position up to the second bias.
    """
    query, key, value, _, heads, weight, bias, bias_k, _, add_zero, dropout, out_weight, out_bias = args[:13]
    special = bias_k is not None or add_zero or options.get("use_separate_proj_weight")
    special = special or options.get("static_k") is not None or options.get("static_v") is not None
    if len(args) > 13 or special:
        return _other(ops, func, args, options)
    with ops:  # which sees the projections and the product that way
        return attention(
            (query, key, value),
            heads,
            (weight, bias),
            (out_weight, out_bias),
            dropout=dropout if options.get("training", True) else 0.0,
            pairs=options.get("attn_mask"),
            padding=options.get("key_padding_mask"),
            is_causal=bool(options.get("is_causal")),
            weights=(options.get("need_weights", True), options.get("average_attn_weights", True)),
        )


def _dot_product(
    ops: OpInterceptor,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> Any:
    """Has no rule for `vmap` in torch 2.13.0, but takes any number of batch dimensions."""
    parts = (query, key, value, attn_mask)
    if any(ops._is_parameter(part) for part in parts):
        return _other(ops, func, (*parts, *rest), options)
    with record_vmap.outside_vmap():
        most = max(query.dim(), key.dim(), value.dim())
        physical = [part if part is None else _with_dims(ops.physical(part), most + 1) for part in parts]
        ahead = physical[0].shape[:-3]  # type: ignore[union-attr]
        if len(ahead) > 1:  # the fast kernels of torch 2.13.0 take one dimension before the heads
            physical = [p if p is None else p.expand(*ahead, *p.shape[-3:]).flatten(0, -4) for p in physical]
        output = func(*physical, *rest, **options)
        output = output.unflatten(0, ahead) if len(ahead) > 1 else output
    return ops.wrap(output)


def _with_dims(physical: Tensor, count: int) -> Tensor:
    """Dimensions of size 1 behind that of the records, so that all others are aligned at the end."""
    ones = (1,) * (count - physical.dim())
    return physical.view(physical.shape[:1] + ones + physical.shape[1:]) if ones else physical


def _cross_entropy(
    ops: OpInterceptor,
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The losses of the labels, and their mean for each record; `vmap` needs several times as long."""
    rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    legacy = size_average is not None or reduce is not None
    if legacy or target.is_floating_point() or ops._is_parameter(weight) or not _is_shared(ops, weight):
        return _other(ops, func, (input, target, *rest), {})
    with record_vmap.outside_vmap():
        x, labels = ops.physical(input), ops.physical(target)
        if input.dim() > 1:
            x, labels = x.flatten(0, 1), labels.flatten(0, 1)
        each = func(
            x, labels, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        ).view(ops.records, -1)
        if reduction == "none":
            return ops.wrap(each.view(ops.records, *target.shape))
        total = each.sum(1)
        if reduction == "mean":
            kept = labels != ignore_index
            share = kept if weight is None else torch.where(kept, weight[labels.masked_fill(~kept, 0)], 0.0)
            total = total / share.view(ops.records, -1).sum(1)
    return ops.wrap(total)


def _max_pool(ops: OpInterceptor, func: Any, input: Tensor, *args: Any, **options: Any) -> Any:
    """On the CPU torch 2.13.0 needs several times as long where channels are not last; the values are the same."""
    known = input.dim() in (3, 4) and input.device.type == "cpu" and record_vmap.is_batched(input, ops.level)
    if not known or ops._is_parameter(input) or len(args) > 5 or options.get("return_indices"):
        return _other(ops, func, (input, *args), options)
    with record_vmap.outside_vmap():
        x = ops.physical(input)
        x = x.flatten(0, 1) if input.dim() == 4 else x.view_as(x)
        if x.requires_grad:  # earlier layers are slow on gradients with channels last
            x.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        pooled = func(x.contiguous(memory_format=torch.channels_last), *args, **options).contiguous()
        if input.dim() == 4:
            pooled = pooled.view(ops.records, -1, *pooled.shape[1:])
    return ops.wrap(pooled)


def _read(ops: OpInterceptor, func: Any, tensor: Tensor, *args: Any) -> Any:
    """A number for Python, such as the condition of a branch: that of all records, if they agree."""
    if ops._is_parameter(tensor) or not record_vmap.is_batched(tensor, ops.level):
        return func(tensor, *args)
    ops.check_read(tensor)
    with record_vmap.outside_vmap():
        physical = ops.physical(tensor).detach()
        record_vmap.require_agreement(physical)
        return func(physical[0], *args)


def _getitem(ops: OpInterceptor, func: Any, tensor: Tensor, index: Any) -> Any:
    """`x[mask]`, whose shape depends on the mask, for records that have equally many elements in it."""
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool and index.dim() > 0
    if not is_mask or not record_vmap.is_batched(index, ops.level) or ops._is_parameter(tensor):
        return _other(ops, func, (tensor, index), {})
    ops.check_read(index)
    with record_vmap.outside_vmap():
        mask, physical = ops.physical(index), ops.physical(tensor)
        counts = mask.flatten(1).sum(1, keepdim=True)
        record_vmap.require_agreement(counts)
        found = physical[mask]
        found = found.view(ops.records, int(counts[0]), *found.shape[1:])
    return ops.wrap(found)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function may draw random numbers."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p") or args[4:5] not in ((), (0.0,)))
    return func in RANDOM_FUNCTIONS or func in COMPOSED or func is custom_function_call or type(func) in OPERATORS


_METHODS: tuple[str, ...] = (
    "size",
    "dim",
    "numel",
    "stride",
    "data_ptr",
    "is_contiguous",
    "element_size",
    "ndimension",
    "nelement",
)
_METHODS += ("is_floating_point", "is_complex", "detach", "type", "get_device", "requires_grad_", "register_hook")
_METHODS += ("__len__", "__repr__", "__format__")
_PROPERTIES: tuple[str, ...] = (
    "shape",
    "dtype",
    "device",
    "layout",
    "is_cuda",
    "ndim",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
)
_PROPERTIES += ("data", "is_sparse", "is_meta", "is_quantized", "is_nested", "itemsize", "nbytes", "_version", "_base")

_NO_TENSOR = {*(getattr(Tensor, name) for name in _METHODS), *(getattr(Tensor, name).__get__ for name in _PROPERTIES)}
"""Functions of a tensor that return no tensor, or one without a graph."""

_PYTHON_VALUES = ("item", "tolist", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")

_READERS = {_read, _getitem}
"""Handlers that are needed where no gradient is computed, too."""

_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.conv3d: _conv,
    **dict.fromkeys((F.layer_norm, F.rms_norm, F.group_norm), _norm),
    F.batch_norm: _batch_norm,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    F.scaled_dot_product_attention: _dot_product,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool),
    custom_function_call: _custom_function,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.t, Tensor.t, torch.transpose, Tensor.transpose, torch.permute, Tensor.permute), _transpose),
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((getattr(Tensor, name) for name in _PYTHON_VALUES), _read),
    **dict.fromkeys((Tensor.T.__get__, Tensor.mT.__get__), _transpose),  # type: ignore[attr-defined]
}
