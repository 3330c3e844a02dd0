"""The networks: a trunk for the kind of input, extra parts with special behaviour, and a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tools.differential.trace import Trace

if TYPE_CHECKING:
    from tools.differential.case import Case

WIDTH, OUT = 8, 2


class _Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0][:, -1]


class _Mean(nn.Module):
    def forward(self, embedded: Tensor) -> Tensor:
        return embedded.mean(1)


TRUNKS: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh()),
    "image": lambda: nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, WIDTH), nn.Tanh()
    ),
    "tokens": lambda: nn.Sequential(nn.Embedding(11, WIDTH), _Mean()),
    "series": lambda: nn.Sequential(nn.GRU(3, WIDTH, batch_first=True), _Last()),
}


class _Norm(nn.BatchNorm1d):
    """Batch norm that also accepts a single sample."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.reshape(len(h), 4, 2)).reshape(len(h), WIDTH)


class _Noise(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h) if self.training else h


class _Running(nn.Module):
    """Keeps a running mean in a buffer."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor
        self.assigns = assigns

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            now = h.detach().mean(0)
            if self.assigns:
                self.mean = 0.9 * self.mean + 0.1 * now
            else:
                self.mean.mul_(0.9).add_(now, alpha=0.1)
        return h - 0.5 * self.mean


class _Sometimes(nn.Module):
    """Uses its parameters only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.1 * self.line(h) if float(h.detach().sum()) > 0 else h


class _Scalar(nn.Module):
    """A parameter without dimensions, an empty one and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.empty = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.zeros(0, 3))
        self.fixed = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + self.factor) * self.fixed + self.empty.sum()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.full((WIDTH,), 0.3 + 0.2j))

    def forward(self, h: Tensor) -> Tensor:
        return h + (self.turn * self.turn).real


class _OtherDtype(nn.Module):
    """A part with another dtype than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.bias.to(h.dtype)


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, h: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(h)))


class _Recomputed(nn.Module):
    """Runs its forward pass once more in the backward pass, with the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        def run(h: Tensor) -> Tensor:
            return functional.dropout(torch.tanh(self.line(h)), 0.2, self.training)

        return checkpoint(run, h, use_reentrant=False)


class _Carried(nn.Module):
    """Carries a state from batch to batch in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        before = self.state
        if self.training:
            self.state = h.detach().mean(0)
        return h if before is None else h + 0.1 * before


class _Experts(nn.Module):
    """Each sample passes one of two layers; a layer without samples is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, h: Tensor) -> Tensor:
        first = h.detach()[:, 0] > 0
        for layer, chosen in zip(self.layers, (first, ~first), strict=True):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                h = h.index_add(0, rows, 0.1 * layer(h[rows]))
        return h


class _ByParity(nn.Module):
    """Uses one layer in steps with an odd number, and another one in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.step = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]), 0

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.1 * self.layers[self.step % 2](h)


class _Unused(nn.Module):
    """Has parameters that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h


EXTRAS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": _Norm,
    "dropout": lambda: nn.Dropout(0.3),
    "noise": _Noise,
    "buffer written in place": lambda: _Running(assigns=False),
    "new buffer assigned": lambda: _Running(assigns=True),
    "sometimes unused": _Sometimes,
    "scalar": _Scalar,
    "complex": _Complex,
    "a part in bfloat16": _OtherDtype,
    "tied": _Tied,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "recomputed": _Recomputed,
    "carried state": _Carried,
    "in no optimizer": lambda: nn.Linear(WIDTH, WIDTH),
    "forward hooks": lambda: nn.Linear(WIDTH, WIDTH),
}

PARTLY_USED: dict[str, Callable[[], nn.Module]] = {
    "experts": _Experts,
    "by parity": _ByParity,
    "never used": _Unused,
}
"""Further parts for trainings on several ranks: a split of the batch only changes the ranks that use them."""

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze": lambda shift: shift.squeeze(),
    "view": lambda shift: shift.view(()),
    "reshape": lambda shift: shift.reshape(()),
    "select": lambda shift: shift[0],
    "sum": lambda shift: shift.sum(),
}


def _finite(gradients: Any) -> tuple[Any, ...]:
    """The gradients if they are finite: in a skipped step either of inf and nan is correct."""
    return gradients if all(bool(torch.isfinite(one).all()) for one in gradients) else ()


class Network(nn.Module):
    """The network of a case.

    Attributes:
        shift: a parameter of shape `(1,)` that is added to the loss; None without one.
        grown: layers that a hook has added.
    """

    def __init__(self, case: Case, trace: Trace) -> None:
        super().__init__()
        self.trunk = TRUNKS[case.network]()
        if case.sparse and case.network == "tokens":
            self.trunk[0] = nn.Embedding(11, WIDTH, sparse=True)  # type: ignore[operator]
        self.extras = nn.ModuleDict({name: (EXTRAS | PARTLY_USED)[name]() for name in case.extras})
        self.head = nn.Linear(WIDTH, OUT)
        self.shift = nn.Parameter(torch.zeros(1)) if case.shift or case.loss_memory == "is a parameter" else None
        self.grown = nn.ModuleList()
        if case.double:
            self.double()
            for p in self.parameters():
                p.data = p.data.to(torch.complex128) if p.is_complex() else p.data
        self._watch(trace)
        self._set_modes(case.modes)

    def _watch(self, trace: Trace) -> None:
        if "forward hooks" not in self.extras:
            return
        layer = self.extras["forward hooks"]
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: trace.add("module", "pre", args, kwargs), with_kwargs=True
        )
        layer.register_forward_hook(lambda *_: trace.add("module", "forward"), always_call=True)
        layer.register_full_backward_hook(lambda _, inputs, outputs: trace.add("module", "backward", *_finite(outputs)))

    def _set_modes(self, modes: str) -> None:
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)) if modes else nn.Identity()
        self.block.to(self.head.weight.dtype)
        if modes == "frozen part":
            self.block.requires_grad_(False).eval()
        elif modes == "single layer":
            self.block[1].eval()
        elif modes == "trainable part":
            self.block.eval()

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.trunk(x))
        for layer in self.extras.values():
            h = layer(h)
        for layer in self.grown:
            h = h + 0.1 * layer(h)
        return self.head(h)

    def begin_step(self, number: int) -> None:
        """Begin the forward passes of a global step."""
        if "by parity" in self.extras:
            self.extras["by parity"].step = number  # type: ignore[assignment]

    def held(self) -> list[nn.Parameter]:
        """The parameters of the optimizers."""
        left_out = {id(p) for name, part in self.extras.items() if name == "in no optimizer" for p in part.parameters()}
        return [p for p in self.parameters() if id(p) not in left_out]

    def grow(self) -> list[nn.Parameter]:
        """Add a layer; returns its parameters."""
        layer = nn.Linear(WIDTH, WIDTH).to(self.head.weight.dtype)
        self.grown.append(layer)
        return list(layer.parameters())
