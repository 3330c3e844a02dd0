"""The functions of torch that draw random numbers, and each as arithmetic on uniform numbers.

A value of `HANDLERS` is called with a source of numbers, the function and its arguments. The source has `uniform` and
`normal`, which return numbers of the shape, dtype and device of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NumberSource(Protocol):
    """Gives random numbers."""

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1)."""

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers."""


def _float(like: Tensor) -> Tensor:
    """A tensor of the same shape and device in a dtype of floating point."""
    return like if like.is_floating_point() else like.to(torch.float32)


def _mask(source: NumberSource, of: Tensor, p: float) -> Tensor:
    return (source.uniform(of.detach()) >= p).to(of.dtype)


def _drop(input: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    kept = kept / (1.0 - p) if p < 1.0 else kept
    return input.mul_(kept) if inplace else input * kept


def _dropout(
    source: NumberSource, func: Any, input: Tensor, p: float = 0.5, training: Any = True, *more: Any, **options: Any
) -> Tensor:
    training = options.get("train", training)
    inplace = bool(options.get("inplace", more[0] if more else False)) or func is torch.dropout_
    if not training or p == 0.0:
        return input
    return _drop(input, _mask(source, input, p), p, inplace)


def _features(input: Tensor) -> Tensor:
    """One element for each channel of each record."""
    input = input.detach()
    return input if input.dim() < 3 else input.flatten(2)[..., :1].reshape(*input.shape[:2], *[1] * (input.dim() - 2))


def _feature_dropout(
    source: NumberSource, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    bare = input.dim() == {F.dropout1d: 2, F.dropout3d: 4}.get(func)
    of = _features(input[None])[0] if bare else _features(input)
    return _drop(input, _mask(source, of, p), p, inplace)


def _alpha(
    source: NumberSource, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    saturated = -1.7580993408473766  # Klambauer et al.: Self-Normalizing Neural Networks (2017)
    by_feature = func in (F.feature_alpha_dropout, torch.feature_alpha_dropout)
    kept = _mask(source, _features(input) if by_feature else input, p)
    scale = ((1.0 - p) * (1.0 + p * saturated**2)) ** -0.5 if p < 1.0 else 0.0
    output = scale * (input * kept + saturated * (1.0 - kept)) - scale * p * saturated
    return input.copy_(output) if inplace else output


def _uniform(source: NumberSource, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _leaf(source.uniform(func(*args, **kwargs).detach()), **kwargs)


def _normal_values(source: NumberSource, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _leaf(source.normal(func(*args, **kwargs).detach()), **kwargs)


def _leaf(values: Tensor, requires_grad: bool = False, **_: Any) -> Tensor:
    return values.requires_grad_() if requires_grad else values


def _normal(source: NumberSource, func: Any, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Tensor:
    found = func(mean, std, *args, **kwargs).detach()
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    values: Tensor = mean + std * source.normal(found)
    return values


def _bernoulli(source: NumberSource, func: Any, input: Tensor, p: Any = None, **kwargs: Any) -> Tensor:
    chance = input.detach() if p is None else p
    return (source.uniform(_float(input.detach())) < chance).to(input.dtype)


def _randint(source: NumberSource, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    found = func(*args, **kwargs)
    skipped = 1 if func is torch.randint_like else 0
    bounds = [value for value in args[skipped:] if isinstance(value, int)]
    bounds += [kwargs[name] for name in ("low", "high") if name in kwargs]
    low, high = bounds if len(bounds) > 1 else (0, bounds[0])
    return (low + (source.uniform(_on_host(found)) * (high - low)).floor()).to(found)


def _randperm(source: NumberSource, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    found = func(*args, **kwargs)
    order: Tensor = source.uniform(_on_host(found)).argsort(-1)
    return order.to(found)


def _on_host(values: Tensor) -> Tensor:
    """float64, which MPS does not have."""
    return values.detach().cpu().double()


def _multinomial(
    source: NumberSource, func: Any, input: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any
) -> Tensor:
    chances = _on_host(input).log()
    if not replacement:  # the first of exponential waiting times
        found = (chances - (-torch.log1p(-source.uniform(chances))).log()).topk(num_samples, -1).indices
        return found.to(input.device)
    chances = chances.unsqueeze(-2).expand(*chances.shape[:-1], num_samples, chances.shape[-1])
    return (chances - (-torch.log1p(-source.uniform(chances))).log()).argmax(-1).to(input.device)


def _normal_(source: NumberSource, func: Any, self: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return self.copy_(mean + std * source.normal(self.detach()))


def _uniform_(source: NumberSource, func: Any, self: Tensor, *bounds: float, **named: Any) -> Tensor:
    low, high = [*bounds, *(0.0, 1.0)[len(bounds) :]]
    low, high = named.get("from", low), named.get("to", high)
    return self.copy_(low + (high - low) * source.uniform(self.detach()))


def _bernoulli_(source: NumberSource, func: Any, self: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return self.copy_((source.uniform(_float(self.detach())) < p).to(self.dtype))


def _exponential_(source: NumberSource, func: Any, self: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return self.copy_(-torch.log1p(-source.uniform(self.detach())) / lambd)


def _random_(source: NumberSource, func: Any, self: Tensor, *bounds: int, **named: Any) -> Tensor:
    bounds = tuple(named[name] for name in ("from", "to") if name in named) or bounds
    largest = 2**24 if self.is_floating_point() else min(torch.iinfo(self.dtype).max, 2**53)
    low, high = bounds if len(bounds) > 1 else (0, bounds[0] if bounds else largest)
    return self.copy_((low + (source.uniform(_on_host(self)) * (high - low)).floor()).to(self.dtype))


def _log_normal_(
    source: NumberSource, func: Any, self: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any
) -> Tensor:
    return self.copy_((mean + std * source.normal(self.detach())).exp())


def _cauchy_(
    source: NumberSource, func: Any, self: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any
) -> Tensor:
    return self.copy_(median + sigma * torch.tan(math.pi * (source.uniform(self.detach()) - 0.5)))


def _rrelu(
    source: NumberSource,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> Tensor:
    slope: Any = (lower + upper) / 2
    if training:
        slope = lower + (upper - lower) * source.uniform(input.detach())
    return torch.where(input >= 0, input, input * slope)


def _attention(
    source: NumberSource,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As in the reference of torch's documentation of `scaled_dot_product_attention`."""
    if dropout_p == 0.0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[no-any-return]
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return _drop(weights, _mask(source, weights, dropout_p), dropout_p, False) @ value


Handler = Callable[..., Any]

HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), _dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout), _feature_dropout),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout), _alpha),
    **dict.fromkeys((F.feature_alpha_dropout, torch.feature_alpha_dropout), _alpha),
    **dict.fromkeys((torch.rand, torch.rand_like), _uniform),
    **dict.fromkeys((torch.randn, torch.randn_like), _normal_values),
    torch.normal: _normal,
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    **dict.fromkeys((torch.randint, torch.randint_like), _randint),
    torch.randperm: _randperm,
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _multinomial),
    Tensor.normal_: _normal_,
    Tensor.uniform_: _uniform_,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.exponential_: _exponential_,
    Tensor.random_: _random_,
    Tensor.log_normal_: _log_normal_,
    Tensor.cauchy_: _cauchy_,
    **dict.fromkeys((F.rrelu, torch.rrelu), _rrelu),
    F.scaled_dot_product_attention: _attention,
}

RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
"""Whose dropout is the one float among their arguments."""


def drops_between_layers(func: Any, args: Sequence[Any]) -> bool:
    """Whether a recurrent function draws: after its dropout comes whether it trains."""
    at = next((i for i, value in enumerate(args) if func in RECURRENT and type(value) is float), None)
    return at is not None and args[at] > 0.0 and args[at + 1] is True


UNHANDLED = {
    torch.poisson,
    torch.binomial,
    torch.native_dropout,
    *(getattr(torch, name, None) for name in ("_standard_gamma", "_sample_dirichlet")),  # torch 2.10 to 2.13
    torch.rrelu_,
    torch.alpha_dropout_,
    torch.feature_dropout_,
    torch.feature_alpha_dropout_,
    Tensor.geometric_,
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),  # a mode sees the calls within all others
    *(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
    *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
}
"""Functions that draw, for which there is no arithmetic here."""

RANDOM_FUNCTIONS = {*HANDLERS, *UNHANDLED, *RECURRENT}
"""All functions of torch that may draw random numbers themselves."""


def _without_dispatch(function: Any) -> Any:
    """A copy of a Python function of torch that runs its body although a mode is active.

    torch hands a call to a mode as a whole, and runs the body with the mode switched off (torch 2.10 to 2.13).
    """
    dispatch = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **{name: lambda *_: False for name in dispatch}}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


COMPOSED: dict[Any, Any] = {
    function: _without_dispatch(function)
    for function in (F.multi_head_attention_forward, F.gumbel_softmax, torch.autograd.grad, Tensor.backward)
}
"""Python functions of torch that call random ones, with copies of them in which a mode sees these calls. A backward
pass does where gradient checkpointing repeats a part of the forward pass."""
