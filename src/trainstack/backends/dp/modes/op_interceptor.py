"""`OpInterceptor` intercepts torch functions that a forward pass calls with a trained parameter.

Looking at functions rather than at modules means that a custom layer that calls `F.linear` is understood as well, and
that each use of a parameter is recorded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.param_uses import ConvUse, ElementwiseUse, EmbeddingUse, NormUse, ParamUse, ProductUse


def self_attention(
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    heads: int,
    in_proj: tuple[Tensor, Tensor | None],
    out_proj: tuple[Tensor, Tensor | None],
    dropout: float,
    masks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """What `F.multi_head_attention_forward` returns first where query, key and value are the same.

    Args:
        linear: called for both projections, on `(records, positions, width)`.
        query: `(positions, records, width)`.
        heads: how many.
        in_proj, out_proj: weight and bias of the projections.
        dropout: of the attention weights.
        masks: of pairs of positions, `(positions, positions)` or that for each record and head; and of the positions of
            each record, `(records, positions)`; True or -inf where not to look.
    """
    positions, records, width = query.shape
    projected = linear(query.transpose(0, 1), *in_proj)
    q, k, v = projected.reshape(records, positions, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    pairs, padding = (_added(mask, q) for mask in masks)
    if pairs is not None and pairs.dim() == 3:
        pairs = pairs.reshape(records, heads, positions, positions)
    if padding is not None:
        padding = padding[:, None, None, :]
        pairs = padding if pairs is None else pairs + padding
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs, dropout_p=dropout)
    return linear(mixed.transpose(1, 2).reshape(records, positions, width), *out_proj).transpose(0, 1)


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None or mask.dtype is not torch.bool:
        return None if mask is None else mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


class OpInterceptor(TorchFunctionMode):
    """While it is active, known uses of `trained` are recorded, and leave no edge to the parameter in the graph.

    So if the graph of the loss leads to a trained parameter all the same, it was used in a way that is not known.

    Attributes:
        uses: in the order of use.
    """

    def __init__(self, trained: Sequence[nn.Parameter], names: Sequence[str], records: int) -> None:
        super().__init__()
        self.uses: list[ParamUse] = []
        self.records = records
        self.names = names
        self._number = {id(parameter): i for i, parameter in enumerate(trained)}
        self._anchor = torch.zeros((), requires_grad=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return handler(self, func, *args, **(kwargs or {}))

    def number_of(self, parameter: Tensor | None) -> int | None:
        """The number of a trained parameter, None for anything else."""
        return None if parameter is None else self._number.get(id(parameter))

    def record_use(self, use: ParamUse, x: Tensor, output: Tensor, kept: Tensor | None = None) -> Tensor:
        """Record `use`; returns the output to go on with."""
        if x.dim() == 0 or x.shape[0] % self.records or output.shape[0] % self.records:
            name = self.names[use.parameters[0]]
            raise Unsupported(
                f"{name} is used on an input of shape {tuple(x.shape)}, which has no dimension of {self.records} "
                "records in front. Write grad_mode='vmap', or give the layer an input for each record."
            )
        if not output.requires_grad:
            output = _AttachToGraph.apply(output, self._anchor)  # type: ignore[no-untyped-call]
        use.keep(x if kept is None else kept)
        use.edge = get_gradient_edge(output)
        self.uses.append(use)
        return output


class _AttachToGraph(torch.autograd.Function):
    """Makes a tensor part of a graph. Unlike a leaf it may then be changed in place, as by `ReLU(inplace=True)`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _detach(ops: OpInterceptor, parameter: Any) -> Any:
    """`parameter`, without its edge in the graph if it is trained."""
    return parameter if ops.number_of(parameter) is None else parameter.detach()


def _linear(ops: OpInterceptor, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    w, b = ops.number_of(weight), ops.number_of(bias)
    if w is None and b is None:
        return func(input, weight, bias)  # type: ignore[no-any-return]
    output = func(input, _detach(ops, weight), _detach(ops, bias))
    return ops.record_use(ProductUse(w, b), input, output)


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
    if (w is None and b is None) or input.dim() != weight.dim():
        return func(input, weight, bias, *rest)  # type: ignore[no-any-return]
    kernel = tuple(weight.shape[2:])
    dilations = _per_dimension(dilation, kernel)
    if padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(dilations, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in _per_dimension(0 if padding == "valid" else padding, kernel)]
    use = ConvUse(
        w,
        b,
        kernel=kernel,
        stride=_per_dimension(stride, kernel),
        padding=sides,
        dilation=dilations,
        groups=groups,
    )
    output = func(input, _detach(ops, weight), _detach(ops, bias), *rest)
    return ops.record_use(use, input, output)


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
    affine = {"weight": _detach(ops, weight)}
    if func is not F.rms_norm:
        affine["bias"] = _detach(ops, bias)
    output: Tensor = func(input, shape, **affine, **eps)
    if w is None and b is None:
        return output
    with torch.no_grad():
        plain = input if w is None else func(input, shape, **eps)
    return ops.record_use(NormUse(w, b, None if func is F.group_norm else len(shape)), input, output, plain)


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
    if w is None:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)  # type: ignore[no-any-return]
    if max_norm is not None or scale_grad_by_freq:
        what = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise Unsupported(f"{ops.names[w]}: an Embedding with {what} lets records change each other. Leave it out.")
    use = EmbeddingUse(w, weight.shape, padding_idx)
    return ops.record_use(use, input, func(input, weight.detach(), padding_idx))


def _attention(ops: OpInterceptor, func: Any, *args: Any, **options: Any) -> Any:
    """`nn.MultiheadAttention` on one sequence, without returned weights or other specialties.

    Its arguments are passed on by position up to the second bias.
    """
    query, key, value, _, heads, weight, bias, bias_k, _, add_zero, dropout, out_weight, out_bias = args[:13]
    special = bias_k is not None or add_zero or options.get("use_separate_proj_weight")
    special = special or options.get("static_k") is not None or options.get("static_v") is not None
    one_sequence = query is key is value and query.dim() == 3
    if len(args) > 13 or special or not one_sequence or options.get("need_weights", True):
        return func(*args, **options)
    mixed = self_attention(
        lambda x, w, b: _linear(ops, F.linear, x, w, b),
        query,
        heads,
        (weight, bias),
        (out_weight, out_bias),
        dropout if options.get("training", True) else 0.0,
        (options.get("attn_mask"), options.get("key_padding_mask")),
    )
    return mixed, None


def _elementwise(ops: OpInterceptor, func: Any, left: Any, right: Any, **options: Any) -> Any:
    """A parameter that is broadcast over records: each record is given a copy, whose gradients are its own."""
    operands = [left, right]
    for mine, other in ((0, 1), (1, 0)):
        number = ops.number_of(operands[mine]) if isinstance(operands[mine], nn.Parameter) else None
        if number is not None and _is_broadcast(operands[mine], operands[other], ops.records):
            ones = (1,) * (operands[other].dim() - operands[mine].dim())
            shape = (*ones, *operands[mine].shape)
            copies = operands[mine].detach().clone().reshape(shape).expand(ops.records, *shape[1:])
            operands[mine] = ops.record_use(ElementwiseUse(number, shape), copies, copies.view_as(copies))
    return func(*operands, **options)


def _expand(ops: OpInterceptor, func: Any, parameter: Tensor, *size: Any, **options: Any) -> Any:
    """A parameter that is expanded over records, such as a class token."""
    number = ops.number_of(parameter)
    if number is None:
        return func(parameter, *size, **options)
    copies = func(parameter.detach().clone(), *size, **options)  # a view: nothing may be written to the parameter
    shape = (1,) * (copies.dim() - parameter.dim()) + tuple(parameter.shape)
    if copies.dim() == 0 or shape[0] != 1 or copies.shape[0] != ops.records:
        return func(parameter, *size, **options)
    return ops.record_use(ElementwiseUse(number, shape), copies, copies.view_as(copies))


def _is_broadcast(parameter: Tensor, other: Any, records: int) -> bool:
    if not isinstance(other, Tensor) or other.dim() == 0 or other.shape[0] != records:
        return False
    return other.dim() > parameter.dim() or (other.dim() == parameter.dim() and parameter.shape[0] == 1)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.conv3d: _conv,
    **dict.fromkeys((F.layer_norm, F.rms_norm, F.group_norm), _norm),
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    Tensor.expand: _expand,
    **dict.fromkeys((torch.add, torch.sub, torch.mul, torch.div), _elementwise),
    **dict.fromkeys((Tensor.add, Tensor.sub, Tensor.mul, Tensor.div), _elementwise),
}
