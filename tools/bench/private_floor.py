"""A private step in plain PyTorch with only its arithmetic: the minimal cost of a library.

It supports the layers of the benchmark's models: Linear, Conv2d, LayerNorm and Embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Squares = Tensor
"""The squared norm of each record's gradient of one layer, `(records,)`."""

Sums = Callable[[Tensor], list[Tensor]]
"""`sums(factors)` returns for each parameter of the layer the sum of the records' gradients times their factors."""


def floor_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, *, norm: float, sigma: float
) -> None:
    """Clip each record's gradient to `norm`, add noise of deviation `sigma * norm`, take the mean and step.

    One forward and one backward pass give inputs and output gradients of layers. Norms and weighted sums follow from
    them, as in grad_mode="bookkeeping".
    """
    used: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.requires_grad_()
        used.append((layer, given[0].detach(), output))
        return output

    layers = [layer for layer in net.modules() if isinstance(layer, tuple(_RULES))]
    net.requires_grad_(False)  # the backward pass then computes no gradients of parameters
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    loss = F.cross_entropy(net(inputs), targets, reduction="sum")
    gradients = torch.autograd.grad(loss, [output for _, _, output in used])
    for hook in hooks:
        hook.remove()
    net.requires_grad_(True)
    with torch.no_grad():
        found = [_RULES[type(layer)](layer, x, g) for (layer, x, _), g in zip(used, gradients, strict=True)]
        factors = (norm / torch.stack([squares for squares, _ in found]).sum(0).sqrt()).clamp(max=1.0)
        for (layer, _, _), (_, sums) in zip(used, found, strict=True):
            for parameter, total in zip(layer.parameters(), sums(factors), strict=True):
                noise = torch.empty_like(parameter).normal_(0.0, sigma * norm)
                parameter.grad = noise.add_(total.view_as(parameter)).mul_(1.0 / len(inputs))
    optimizer.step()
    optimizer.zero_grad()


def _squared(rows: Tensor) -> Squares:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1).square()


def _linear(layer: Any, x: Tensor, g: Tensor) -> tuple[Squares, Sums]:
    if x.dim() == 2:
        own = _squared(g)
        return own * _squared(x) + own, lambda factors: [(g * factors[:, None]).t() @ x, factors @ g]
    bias, positions = g.sum(1), x.shape[1]
    if 2 * positions**2 <= x.shape[2] * g.shape[2]:
        squares = (torch.bmm(x, x.mT) * torch.bmm(g, g.mT)).flatten(1).sum(1)

        def sums(factors: Tensor) -> list[Tensor]:
            scaled = (g * factors[:, None, None]).flatten(0, 1)
            return [scaled.t() @ x.flatten(0, 1), factors @ bias]

        return squares + _squared(bias), sums
    return _by_rows(torch.bmm(g.mT, x), bias)


def _conv2d(layer: Any, x: Tensor, g: Tensor) -> tuple[Squares, Sums]:
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    g = g.flatten(2)
    return _by_rows(torch.bmm(g, patches.mT), g.sum(2))


def _layer_norm(layer: Any, x: Tensor, g: Tensor) -> tuple[Squares, Sums]:
    return _by_rows((g * F.layer_norm(x, layer.normalized_shape, eps=layer.eps)).sum(1), g.sum(1))


def _embedding(layer: Any, x: Tensor, g: Tensor) -> tuple[Squares, Sums]:
    same = x[:, :, None] == x[:, None, :]
    squares = (torch.bmm(g, g.mT) * same).flatten(1).sum(1)

    def sums(factors: Tensor) -> list[Tensor]:
        scaled = (g * factors[:, None, None]).flatten(0, 1)
        return [torch.zeros_like(layer.weight).index_add_(0, x.flatten(), scaled)]

    return squares, sums


def _by_rows(weight: Tensor, bias: Tensor) -> tuple[Squares, Sums]:
    rows = [weight.flatten(1), bias]
    return _squared(rows[0]) + _squared(bias), lambda factors: [factors @ row for row in rows]


_RULES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], tuple[Squares, Sums]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}
