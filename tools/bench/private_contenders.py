"""The contenders of the benchmark of private training: models, whole steps of several loops, and only gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tools.bench.library import null_screen
from tools.bench.private_floor import floor_step
from tools.bench.workloads import SEED
from trainstack import (
    DefaultCheckpointerArguments,
    DifferentialPrivacyArguments,
    SupervisedModule,
    Trainer,
    TrainerArguments,
)
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.epsilon import import_opacus
from trainstack.backends.dp.modes.selection import MODES
from trainstack.trainer.run.loop import train_steps

Steps = Callable[[int], None]
"""Makes the given number of steps."""

_RECORDS = 60_000
_SIGMA, _NORM, _RATE = 1.0, 1.0, 0.1


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        records, length, width = x.shape
        parts = self.attend(self.before(x)).view(records, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(records, length, width)
        x = x + self.mix(mixed)
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class _Transformer(nn.Module):
    """Predicts a class from 32 tokens out of 1,000. Each record has the same embedding of places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 64), nn.Embedding(32, 64)
        self.blocks, self.head = nn.Sequential(_Block(64, 4), _Block(64, 4)), nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).repeat(len(ids), 1)  # contiguous, for opacus
        return self.head(self.blocks(self.tokens(ids) + self.places(places)).mean(1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (_mlp, lambda records: torch.randn(records, 784)),
    "cnn": (_cnn, lambda records: torch.randn(records, 1, 28, 28)),
    "transformer": (_Transformer, lambda records: torch.randint(1000, (records, 32))),
}


def dataset(model: str) -> TensorDataset:
    """Random records."""
    torch.manual_seed(SEED)
    return TensorDataset(MODELS[model][1](_RECORDS), torch.randint(10, (_RECORDS,)))


# --- whole steps


def trained_by_library(
    backend: str, model: str, data: TensorDataset, batch: int, folder: Path, grad_mode: str = "auto"
) -> Steps:
    """The loop of the library, from drawing and fetching a batch to zeroing the gradients.

    A private step draws its Poisson sample and then takes exactly `batch` records, so that all rounds are equal.
    """
    sgd = partial(torch.optim.SGD, lr=_RATE)
    private = DifferentialPrivacyArguments(
        delta=1e-6, noise_multiplier=_SIGMA, per_sample_max_grad_norm=_NORM, grad_mode=grad_mode
    )
    args = TrainerArguments(
        backend=backend,
        device="cpu",
        epochs=1000,
        train_batch_size=batch,
        gpu_batch_size_limit=batch,
        differential_privacy_args=private if "dp" in backend else None,
        output_dir=folder / f"{backend}-{grad_mode}",
        writers=[],
        progress="none",
        log_level="ERROR",
        checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
    )
    trainer = Trainer(SupervisedModule(MODELS[model][0](), nn.CrossEntropyLoss(), sgd, data), args)
    with null_screen(False):
        run: Any = trainer._ready(to_train=True)
    if (sampling := run.stack.sampling) is not None:
        draw = sampling._randomness.mask
        sampling._randomness.mask = lambda *given: _exactly(batch, draw(*given))

    def endless() -> Any:
        while True:
            yield from run.data.iter_steps(run.state, run.stack.sampling)
            run.state.finish_epoch()

    steps = endless()

    def make(number: int, trainer: Trainer = trainer) -> None:  # the default keeps it alive
        train_steps(run.loop, itertools.islice(steps, number))

    return make


def _exactly(batch: int, drawn: Tensor) -> Tensor:
    return drawn[:batch] if len(drawn) >= batch else torch.cat([drawn, drawn[: batch - len(drawn)]])


def trained_by_opacus(kind: str, model: str, data: TensorDataset, batch: int, folder: Path) -> Steps:
    """The loop of opacus' examples: hooks that keep all per-record gradients, or ghost clipping.

    The batch is a slice of the dataset, which is the cheapest way, and there is no accountant.
    """
    net, criterion = MODELS[model][0](), nn.CrossEntropyLoss()
    options: dict[str, Any] = {"noise_multiplier": _SIGMA, "max_grad_norm": _NORM, "expected_batch_size": batch}
    samples, optimizers = (import_opacus(f"opacus.{part}", "the benchmark") for part in ("grad_sample", "optimizers"))
    if kind == "ghost":
        wrapped = samples.GradSampleModuleFastGradientClipping(
            net, max_grad_norm=_NORM, use_ghost_clipping=True, loss_reduction="mean"
        )
        made = optimizers.DPOptimizerFastGradientClipping
        wrap = import_opacus("opacus.utils.fast_gradient_clipping_utils", "the benchmark").DPLossFastGradientClipping
    else:
        wrapped, made = samples.GradSampleModule(net, loss_reduction="mean"), optimizers.DPOptimizer
    optimizer = made(torch.optim.SGD(wrapped.parameters(), lr=_RATE), **options)
    loss_of: Any = wrap(wrapped, optimizer, criterion) if kind == "ghost" else criterion
    inputs, targets = data.tensors
    batches = itertools.cycle(range(0, len(targets) - batch, batch))

    def make(number: int) -> None:
        for begin in itertools.islice(batches, number):
            optimizer.zero_grad()
            loss_of(wrapped(inputs[begin : begin + batch]), targets[begin : begin + batch]).backward()
            optimizer.step()

    return make


def trained_by_hand(model: str, data: TensorDataset, batch: int, folder: Path) -> Steps:
    """Only the arithmetic of a private step: no sampling, account, statement or check; the noise is from torch."""
    net = MODELS[model][0]()
    optimizer = torch.optim.SGD(net.parameters(), lr=_RATE)
    inputs, targets = data.tensors

    def make(number: int) -> None:
        for chosen in torch.randperm(len(targets))[: number * batch].split(batch):
            floor_step(net, optimizer, inputs[chosen], targets[chosen], norm=_NORM, sigma=_SIGMA)

    return make


STEPS: dict[str, Callable[..., Steps]] = {
    "sp": partial(trained_by_library, "sp"),
    "sp-dp": partial(trained_by_library, "sp-dp"),
    "by hand": trained_by_hand,
    "sp-dp hooks": partial(trained_by_library, "sp-dp", grad_mode="hooks"),
    "sp-dp ghost": partial(trained_by_library, "sp-dp", grad_mode="ghost"),
    "opacus hooks": partial(trained_by_opacus, "hooks"),
    "opacus ghost": partial(trained_by_opacus, "ghost"),
}
"""Whole steps, from the fetched batch to the zeroed gradients; the others are compared with the first."""


# --- only gradients


class _Module(nn.Module):
    def __init__(self, net: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.net, self.reduction = net, reduction

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction=self.reduction)


def _plain_gradient(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    module = _Module(net)

    def step() -> None:
        module.zero_grad()
        module(batch).backward()

    return step


def _mode_gradient(mode: str, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    module = _Module(net, "none" if mode == "ghost" else "mean")
    gradients = MODES[mode](module, tuple(module.parameters()), FlatClipper(_NORM))
    return lambda: gradients.add(lambda model, given: model(given), batch, len(batch[1]))


def _opacus_gradient(net: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Callable[[], object]:
    """All per-record gradients in memory, and the clipping of the optimizer."""
    wrapped = import_opacus("opacus.grad_sample", "the benchmark").GradSampleModule(net, **options)
    optimizer = import_opacus("opacus.optimizers", "the benchmark").DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=_RATE),
        noise_multiplier=0.0,
        max_grad_norm=_NORM,
        expected_batch_size=len(batch[1]),
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
        optimizer.clip_and_accumulate()

    return step


def _repeated(
    gradient: Callable[..., Callable[[], object]], model: str, data: TensorDataset, batch: int, folder: Path
) -> Steps:
    """`gradient` of the first records, repeated."""
    inputs, targets = data.tensors
    step = gradient(MODELS[model][0](), (inputs[:batch], targets[:batch]))

    def make(number: int) -> None:
        for _ in range(number):
            step()

    return make


GRADIENTS: dict[str, Callable[..., Steps]] = {
    "plain": partial(_repeated, _plain_gradient),
    **{mode: partial(_repeated, partial(_mode_gradient, mode)) for mode in MODES},
    "opacus hooks": partial(_repeated, _opacus_gradient),
    "opacus functorch": partial(_repeated, partial(_opacus_gradient, force_functorch=True)),
}
"""Forward, backward and clipping, without noise and optimizer; hooks and ghost without their comparison with single
records. The others are compared with the first."""


def prepared(contenders: str, name: str, model: str, batch: int, data: TensorDataset, folder: Path) -> Steps:
    """A contender of "steps" or "gradients" after 3 steps; all begin with the same weights."""
    torch.manual_seed(SEED)
    steps = {"steps": STEPS, "gradients": GRADIENTS}[contenders][name](model, data, batch, folder)
    steps(3)
    return steps
