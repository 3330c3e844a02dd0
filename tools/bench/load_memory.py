"""`python -m tools.bench load-memory`: the peak memory of each rank in a save and in a resume of a run with AdamW.

It is the resident memory of new processes. "above" is the peak minus the memory of the process before and after: the
new module before, and the local parameters and optimizer states after a resume.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tools.bench.allocator import memory
from trainstack.trainer.resume.saving import Saver

LAYOUTS = (("sp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3))
LAYERS = 20
WIDTH = 1000
MB = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench load-memory", description=__doc__)
    parser.add_argument("--millions", type=int, default=20, help="parameters in millions, float32 (default: 20)")
    parser.add_argument("--async-save", action="store_true", help="save in the background")
    parser.add_argument("--only", action="append", metavar="BACKENDxRANKS", help='such as "fsdp x 2"; can be repeated')
    options = parser.parse_args(argv)
    tensor = 4 * options.millions * 1e6 / LAYERS / MB
    print(f"{options.millions} million parameters with AdamW, {LAYERS} tensors of {tensor:.0f} MB; all figures in MB")
    print("\n| backend, ranks | rank | own state | save: peak above | resume: peak above |")
    print("|---|---|---|---|---|")
    for backend, size in LAYOUTS:
        name = f"{backend} x {size}"
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory(dir=os.environ.get("TRAINSTACK_BENCH_DIR")) as folder:
            saved, loaded = (_ranks(step, folder, backend, size, options) for step in (1, 2))
        for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
            print(f"| {name} | {rank} | {other['state']:.0f} | {one['save']:.0f} | {other['load']:.0f} |", flush=True)
    return 0


def _ranks(step: int, folder: str, backend: str, size: int, options: argparse.Namespace) -> list[dict[str, float]]:
    found = ts.launch(train, folder, backend, step, options.millions, options.async_save, nproc=size)
    return list(found)


def train(folder: str, backend: str, steps: int, millions: int, async_save: bool) -> dict[str, float]:
    """Train to `steps`, from the checkpoint in `folder` if there is one; returns the memory of this rank in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = millions * 1_000_000 // LAYERS // WIDTH
    data = TensorDataset(torch.randn(6, WIDTH), torch.randn(6, 1))
    module = ts.SupervisedModule(_Wide(rows), nn.MSELoss(), "adamw", data, optimizer_kwargs={"lr": 1e-4})
    saving = ts.DefaultCheckpointerArguments(every_n_steps=steps, async_save=async_save)
    arguments = ts.TrainerArguments(
        backend=backend,
        device="cpu",
        epochs=10,
        max_steps=steps,
        train_batch_size=6,
        output_dir=folder,
        resume="auto",
        writers=[],
        log_level="ERROR",
        progress="none",
        checkpointer_args=saving,
    )
    trainer = ts.Trainer(module, arguments)
    peak = _PeakOfSaves()
    found = {"load": 0.0, "save": 0.0}

    _reset_peak()
    held = _memory("VmRSS")
    _ = trainer.plan  # restores
    found["load"] = _memory("VmHWM") - max(held, _memory("VmRSS"))
    with peak:
        trainer.train()
    found["save"] = peak.above
    found["state"] = _state_of(trainer) / MB
    trainer.close()
    return found


class _Wide(nn.Module):
    """Layers without biases."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(inputs), 1)
        for layer in self.layers:
            total = total + layer(inputs).mean(1, keepdim=True)
        return total


class _PeakOfSaves:
    """The largest additional memory of a save, in MB."""

    above = 0.0

    def __enter__(self) -> None:
        save = self._save = Saver.save

        def measured(saver: Saver, *given: Any, **named: Any) -> None:
            before = _memory("VmRSS")
            _reset_peak()
            save(saver, *given, **named)
            self.above = max(self.above, _memory("VmHWM") - before)

        Saver.save = measured  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        Saver.save = self._save  # type: ignore[method-assign]


def _state_of(trainer: Any) -> float:
    """Bytes of the local parameters and optimizer states."""

    def local(tensor: torch.Tensor) -> int:
        return getattr(tensor, "to_local", lambda: tensor)().nbytes

    tensors = [*trainer.module.parameters()]
    for optimizer in trainer.optimizers:
        for entry in optimizer.state.values():
            tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(map(local, tensors))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # of VmHWM, see proc(5)


def _memory(field: str) -> float:
    return memory(field) * 2**20 / MB


if __name__ == "__main__":
    sys.exit(main())
