"""`make bench-private`: whole private steps against plain ones and against opacus, in one process."""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from tools.bench.allocator import keep_freed_memory
from tools.bench.library import null_screen
from tools.bench.private import MODELS
from tools.bench.report import versions
from tools.bench.workloads import SEED
from trainstack import (
    DefaultCheckpointerArguments,
    DifferentialPrivacyArguments,
    SupervisedModule,
    Trainer,
    TrainerArguments,
)
from trainstack.backends.dp.epsilon import import_opacus
from trainstack.trainer.run.loop import train_steps

Steps = Callable[[int], None]
"""Makes so many whole training steps."""

GOALS = {"mlp": 1.6, "cnn": 1.25, "transformer": 1.4}
"""CPU time of a private step over a plain one, at 256 records."""

_RECORDS = {"mlp": 60_000, "cnn": 60_000, "transformer": 60_000}
_SIGMA, _NORM, _RATE = 1.0, 1.0, 0.1


def trained_by_library(backend: str, model: str, data: TensorDataset, batch: int, folder: Path) -> Steps:
    """The library's own loop, from drawing and fetching a batch to zeroing the gradients.

    A private step draws its Poisson sample and then takes exactly `batch` records, so that all rounds do the same work.
    """
    sgd = partial(torch.optim.SGD, lr=_RATE)
    private = DifferentialPrivacyArguments(delta=1e-6, noise_multiplier=_SIGMA, per_sample_max_grad_norm=_NORM)
    args = TrainerArguments(
        backend=backend,
        device="cpu",
        epochs=1000,
        train_batch_size=batch,
        gpu_batch_size_limit=batch,
        differential_privacy_args=private if "dp" in backend else None,
        output_dir=folder / backend,
        writers=[],
        progress="none",
        log_level="ERROR",
        checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
    )
    trainer = Trainer(SupervisedModule(MODELS[model][0](), _LOSS, sgd, data), args)
    with null_screen(False):
        run: Any = trainer._ready(to_train=True)
    if (sampling := run.stack.sampling) is not None:
        draw = sampling._randomness.mask
        sampling._randomness.mask = lambda *given: draw(*given).repeat(2)[:batch]

    def endless() -> Any:
        while True:
            yield from run.data.iter_steps(run.state, run.stack.sampling)
            run.state.finish_epoch()

    steps = endless()

    def make(number: int, trainer: Trainer = trainer) -> None:  # which must stay alive
        train_steps(run.loop, itertools.islice(steps, number))

    return make


_LOSS = torch.nn.CrossEntropyLoss()


def trained_by_opacus(kind: str, model: str, data: TensorDataset, batch: int, folder: Path) -> Steps:
    """The loop of opacus' examples: hooks that keep all per-record gradients, or ghost clipping.

    The batch is cut from the data set in the cheapest way, and the accountant is not asked.
    """
    net, criterion = MODELS[model][0](), torch.nn.CrossEntropyLoss()
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


CONTENDERS: dict[str, Callable[..., Steps]] = {
    "sp": partial(trained_by_library, "sp"),
    "sp-dp": partial(trained_by_library, "sp-dp"),
    "opacus hooks": partial(trained_by_opacus, "hooks"),
    "opacus ghost": partial(trained_by_opacus, "ghost"),
}


def dataset(model: str) -> TensorDataset:
    """Random records."""
    torch.manual_seed(SEED)
    records = _RECORDS[model]
    return TensorDataset(MODELS[model][1](records), torch.randint(10, (records,)))


def prepared(model: str, contender: str, batch: int, data: TensorDataset, folder: Path) -> Steps:
    """A contender that has trained a few steps; all begin with the same weights."""
    torch.manual_seed(SEED)
    steps = CONTENDERS[contender](model, data, batch, folder)
    steps(3)
    return steps


def least(model: str, names: Sequence[str], batch: int, rounds: int) -> dict[str, float]:
    """CPU seconds of one step of each contender: the least of `rounds` blocks, which take turns."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns in every step
        data = dataset(model)
        contenders = {name: prepared(model, name, batch, data, Path(folder)) for name in names}
        found = dict.fromkeys(names, float("inf"))
        order = list(names)
        for _ in range(rounds):
            for name in order:
                number = 1 if name == "opacus hooks" else _BLOCK
                gc.collect()
                began = time.process_time()
                contenders[name](number)
                found[name] = min(found[name], (time.process_time() - began) / number)
            order.append(order.pop(0))
    return found


_BLOCK = 4
"""Steps in a block: what begins and ends the library's loop is a small part of so many, and a pause of the machine
spoils few."""


def peak(model: str, contender: str, batch: int) -> float:
    """MiB that a new process needs at its peak for making the model and training it; without data set and imports."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "private-steps", "--memory-of", model, contender, str(batch)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return float(done.stdout.split()[-1])


def _own_peak(model: str, contender: str, batch: int) -> float:
    data = dataset(model)
    import_opacus("opacus.optimizers", "the benchmark")
    importlib.import_module("trainstack.backends.dp.setup")  # imports are not what is measured

    before = _status("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        prepared(model, contender, batch, data, Path(folder))
    return _status("VmHWM") - before


def _status(field: str) -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), float("nan"))


def main(argv: Sequence[str]) -> int:
    """Print a row for each model and number of threads."""
    options = _parser().parse_args(argv)
    if options.memory_of:
        torch.set_num_threads(1)
        model, contender, records = options.memory_of
        print(_own_peak(model, contender, int(records)))
        return 0
    keep_freed_memory()
    names = ["sp", *(options.only or [name for name in CONTENDERS if name != "sp"])]
    print(", ".join(f"{what} {value}" for what, value in versions().items()))
    print(f"{options.records} records a step. Whole steps over a plain step, CPU time of all threads; least of many.\n")
    print(f"| model | threads | sp | goal | {' | '.join(names[1:])} |")
    print("|---" * (len(names) + 3) + "|")
    for model in options.model or MODELS:
        for threads in options.threads or (1, 2):
            torch.set_num_threads(threads)
            found = least(model, names, options.records, options.rounds)
            cells = [f"{found[name] / found['sp']:.2f}" for name in names[1:]]
            print(
                f"| {model} | {threads} | {1e3 * found['sp']:.2f} ms | {GOALS[model]} | {' | '.join(cells)} |",
                flush=True,
            )
    if options.memory:
        print(f"\nPeak memory of making the model and training, MiB.\n\n| model | {' | '.join(names)} |")
        print("|---" * (len(names) + 1) + "|")
        for model in options.model or MODELS:
            found = {name: peak(model, name, options.records) for name in names}
            cells = [f"{found[name]:.0f} ({found[name] / found['sp']:.2f})" for name in names]
            print(f"| {model} | {' | '.join(cells)} |", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench private-steps", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be given several times")
    parser.add_argument("--threads", action="append", type=int, help="of torch (default: 1, and 2)")
    parser.add_argument("--records", type=int, default=256, help="records in a step (default: 256)")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="only this one beside the plain step")
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each contender (default: 30)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave peak memory out")
    parser.add_argument("--memory-of", nargs=3, metavar=("MODEL", "CONTENDER", "RECORDS"), help=argparse.SUPPRESS)
    return parser
