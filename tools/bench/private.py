"""`python -m tools.bench private`: what sums of clipped per-record gradients cost, against a plain step and opacus."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.bench.report import versions
from tools.bench.workloads import SEED
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.epsilon import import_opacus
from trainstack.backends.dp.modes.selection import MODES

Step = Callable[[], object]


# --- models


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
    """A class from 32 tokens out of 1,000. The same embedding of places is looked up for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 64), nn.Embedding(32, 64)
        self.blocks, self.head = nn.Sequential(_Block(64, 4), _Block(64, 4)), nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).repeat(len(ids), 1)  # opacus needs it contiguous
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


# --- contenders


class _Module(nn.Module):
    def __init__(self, net: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.net, self.reduction = net, reduction

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction=self.reduction)


def plain(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """Forward and backward, without privacy."""
    module = _Module(net)

    def step() -> None:
        module.zero_grad()
        module(batch).backward()

    return step


def ours(mode: str) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Step]:
    """A gradient mode of this library."""

    def make(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        module = _Module(net, "none" if mode == "ghost" else "mean")
        gradients = MODES[mode](module, tuple(module.parameters()), FlatClipper(1.0))
        return lambda: gradients.add(lambda model, given: model(given), batch, len(batch[1]))

    return make


def opacus_by_layer(**options: Any) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Step]:
    """Opacus with all per-record gradients in memory, and its optimizer's clipping."""

    def make(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        wrapped = import_opacus("opacus.grad_sample", "the benchmark").GradSampleModule(net, **options)
        optimizer = import_opacus("opacus.optimizers", "the benchmark").DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=len(batch[1]),
        )

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
            optimizer.clip_and_accumulate()

        return step

    return make


CONTENDERS: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Step]] = {
    "plain": plain,
    **{mode: ours(mode) for mode in MODES},
    "opacus hooks": opacus_by_layer(),
    "opacus functorch": opacus_by_layer(force_functorch=True),
}


def prepared(model: str, contender: str, records: int) -> Step:
    """One contender's step on a batch that is the same for all."""
    torch.manual_seed(SEED)
    make, inputs = MODELS[model]
    batch = inputs(records), torch.randint(10, (records,))
    return CONTENDERS[contender](make(), batch)


# --- measuring


def ratios(model: str, contenders: Sequence[str], records: int, rounds: int) -> dict[str, list[float]]:
    """CPU time of each contender as a multiple of that of the plain step, round by round; its own in seconds."""
    steps = {name: prepared(model, name, records) for name in ("plain", *contenders)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns in every step
        for number in range(rounds + 1):
            for name, step in steps.items() if number % 2 else reversed(steps.items()):
                gc.collect()
                began = time.process_time()
                step()
                if number:
                    seconds[name].append(time.process_time() - began)
    base = seconds.pop("plain")
    return {"plain": base} | {
        name: [mine / its for mine, its in zip(found, base, strict=True)] for name, found in seconds.items()
    }


def memory(model: str, contender: str, records: int) -> float:
    """MiB that three steps add at their peak to a new process that is ready to run them; nan without /proc."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "private", "--memory-of", model, contender, str(records)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return float(done.stdout)


def _peak_of_three(model: str, contender: str, records: int) -> float:
    step = prepared(model, contender, records)
    before = _status("VmRSS")
    for _ in range(3):
        step()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), float("nan"))


def main(argv: Sequence[str]) -> int:
    """Print a row for each model and batch size."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    if options.memory_of:
        model, contender, records = options.memory_of
        print(_peak_of_three(model, contender, int(records)))
        return 0
    names = options.only or [name for name in CONTENDERS if name != "plain"]
    print(", ".join(f"{what} {value}" for what, value in versions().items()))
    print(f"CPU time as a multiple of a plain step{' / MiB beyond it' if options.memory else ''}\n")
    print(f"| model | records | plain step | {' | '.join(names)} |")
    print("|---" * (len(names) + 3) + "|")
    for model in options.model or MODELS:
        for records in options.records or (64, 256):
            found = ratios(model, names, records, options.rounds)
            cells = [f"{median(found[name]):.2f}" for name in names]
            if options.memory:
                base = memory(model, "plain", records)
                extra = [memory(model, name, records) - base for name in names]
                cells = [f"{cell} / {more:.0f}" for cell, more in zip(cells, extra, strict=True)]
            plain_step = f"{1e3 * median(found['plain']):.1f} ms"
            print(f"| {model} | {records} | {plain_step} | {' | '.join(cells)} |", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench private", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be given several times")
    parser.add_argument("--records", action="append", type=int, help="records in a batch (default: 64 and 256)")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="only this one beside the plain step")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--memory", action="store_true", help="also peak memory, each in a process of its own")
    parser.add_argument("--memory-of", nargs=3, metavar=("MODEL", "CONTENDER", "RECORDS"), help=argparse.SUPPRESS)
    return parser
